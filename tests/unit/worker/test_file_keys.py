"""No key leads out of the worker's three folders, to a side file or to what is the worker's own (§12.1)."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit import connections
from localai_cluster.worker.exchange import Refusal
from localai_cluster.worker.files.keys import MAX_NAME_LENGTH, Folders, decode_key, resolve_key
from tests.support.file_client import BEARER, Files
from tests.support.worker_http import Served, worker

SECRET = b"not for the network"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with worker() as one:
        home = Path(one.home.name)
        (home / "secret").write_bytes(SECRET)
        (home / "beyond").mkdir()
        (home / "beyond" / "secret").write_bytes(SECRET)
        trap = one.folders.models / "trap"
        trap.mkdir()
        (trap / "inside.bin").write_bytes(b"fine")
        (trap / "to-file").symlink_to(home / "secret")
        (trap / "to-folder").symlink_to(home / "beyond")
        (trap / "to-root").symlink_to("/")
        (trap / "upwards").symlink_to("../../beyond")
        (trap / "dangling").symlink_to(home / "beyond" / "new")
        (trap / "loop").symlink_to("loop")
        (trap / "side").symlink_to("inside.bin.sha256")
        (trap / "self").symlink_to(one.folders.models)
        (trap / "within").symlink_to("inside.bin")
        os.mkfifo(trap / "pipe")
        (one.folders.staging / "models").mkdir()
        yield one


@pytest.fixture
def files(served: Served) -> Files:
    return Files(served.address)


def outside(served: Served) -> dict[str, bytes]:
    """Everything that no key may read or change."""
    home = Path(served.home.name)
    found = {"secret": (home / "secret").read_bytes()}
    found |= {path.name: path.read_bytes() for path in (home / "beyond").iterdir()}
    return found | dict.fromkeys(os.listdir(home), b"")


ESCAPES = (
    "../secret",
    "models/../../secret",
    "models/trap/../../../secret",
    "models/%2e%2e/%2e%2e/secret",
    "models/%2E%2E/secret",
    "models/.%2e/secret",
    "models/..%2f..%2fsecret",
    "models%2f..%2fsecret",
    "models%2Ftrap%2Finside.bin",
    "models/..%5c..%5csecret",
    "models/trap/inside.bin%00",
    "models/trap/%00",
    "models/trap/a%0ab",
    "models/trap/%7f",
    "models/trap/%ff%fe",
    "/etc/passwd",
    "models//etc/passwd",
    "models//trap/inside.bin",
    "models/./trap/inside.bin",
    "models/trap/inside.bin/",
    "%2fetc%2fpasswd",
    "models/trap/to-file",
    "models/trap/to-folder/secret",
    "models/trap/to-folder/new",
    "models/trap/to-root/etc/passwd",
    "models/trap/upwards/secret",
    "models/trap/dangling",
    "models/trap/loop",
    "models/trap/side",
    "models/trap/self",
    "models/trap/self/trap/to-file",
    "models/trap/pipe",
    "models/trap/inside.bin.sha256",
    "models/trap/inside.bin.sha256.target",
    "models/trap/inside.bin.SHA256",
    "models/trap/x.sha256/inside.bin",
    "models/trap/self/trap/inside.bin.sha256",
    ".sha256",
    "models",
    "models/",
    "data",
    "data/",
    ".",
    "..",
    "%2e",
    "%2e%2e",
    "",
    "/",
    "models/" + "n" * (MAX_NAME_LENGTH + 1),
    "models/" + "ü" * 200,
    "models/" + "d/" * 2500 + "f",
)


@pytest.mark.rule("worker-12", "worker-12.1", "W27")
@pytest.mark.parametrize("key", ESCAPES, ids=lambda key: ascii(key[:40]))
def test_what_leads_elsewhere_is_refused(served: Served, files: Files, key: str) -> None:
    """By every method, with 400, and nothing of it is read or written."""
    before = outside(served)
    path = f"/v1/files/{quote(key, safe='/%.')}"
    for method in ("GET", "HEAD", "PUT"):
        got = files.ask(method, path, BEARER | {"Content-Length": "3"}, b"own")
        assert got.status == 400, (method, key, got)
        assert SECRET not in got.body
    span = {"Content-Length": "3", "Content-Range": "bytes 0-2/3"}
    assert files.ask("PUT", path, BEARER | span, b"own").status == 400
    listed = files.ask("GET", f"/v1/files-list/{quote(key, safe='/%.')}")
    assert listed.status in (400, 404), key
    assert outside(served) == before
    assert (served.folders.models / "trap" / "inside.bin").read_bytes() == b"fine"


@pytest.mark.rule("worker-12.1")
def test_links_inside_are_followed(files: Files) -> None:
    for key in ("models/trap/within", "models/trap/self/trap/inside.bin"):
        assert files.get(key).body == b"fine"


@pytest.mark.rule("worker-12.1", "worker-12.3")
def test_folders_and_files_do_not_take_each_other_s_place(served: Served, files: Files) -> None:
    assert files.put("models/places/f.bin", b"file").status == 200
    for key in ("models/places", "models/places/f.bin/below", "models/places/f.bin/deep/below"):
        assert files.put(key, b"own").status == 400, key
        assert files.put(key, b"own", None, **{"Content-Range": "bytes 0-2/3"}).status == 400, key
    assert files.head("models/places/f.bin/below").status == 404
    assert files.get("models/places").status == 400
    assert files.get("models/places/f.bin").body == b"file"


@pytest.mark.rule("worker-12.1")
def test_a_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "models", tmp_path / "staging", tmp_path / "data")
    with pytest.raises(Refusal) as refused:
        resolve_key(folders, "models/m/f.bin")
    assert (refused.value.answer.status, "does not exist" in refused.value.answer.text) == (400, True)


@pytest.mark.rule("worker-12.1")
@pytest.mark.parametrize("own", ["data", "data/deep", "models/own"])
def test_the_worker_s_own_folders_are_not_served(tmp_path: Path, own: str) -> None:
    """A machine that joined by the line of *Add a node* keeps its secret in `data` beside the models."""
    private, backends = tmp_path / own, tmp_path / "staging" / "backends"
    for path in (private, backends, tmp_path / "models", tmp_path / "data-files"):
        path.mkdir(parents=True, exist_ok=True)
    (private / "node-secret").write_bytes(SECRET)
    (tmp_path / "models" / "sly").symlink_to(private)
    folders = Folders.of_worker(tmp_path / "models", private, (backends,))
    assert folders.data.name == ("data-files" if own.startswith("data") else "data")
    for key in ("models/own/node-secret", "models/sly/node-secret", "backends/x/run.sh", "data/node-secret"):
        with contextlib.suppress(Refusal):
            real = resolve_key(folders, key).real
            assert not real.exists()
            assert not real.is_relative_to(private)
    with pytest.raises(Refusal):
        resolve_key(folders, "models/sly/node-secret")
    with pytest.raises(Refusal):
        resolve_key(folders, "backends/x/run.sh")


PARTS = st.one_of(
    st.sampled_from(
        ["models", "data", "..", ".", "", "%2e%2e", "%2f", "trap", "to-folder", "to-root", "upwards"]
    ),
    st.sampled_from(["self", "loop", "secret", "x.sha256", "%00", "etc", "passwd", "inside.bin", "dangling"]),
    st.text(max_size=8).map(lambda text: quote(text, safe="")),
)


@pytest.mark.rule("worker-12.1", "W27")
@given(parts=st.lists(PARTS, max_size=7))
def test_no_key_leaves_its_folder(served: Served, parts: list[str]) -> None:
    folders = served.folders
    try:
        place = resolve_key(folders, decode_key("/".join(parts).encode()))
    except Refusal:
        return
    homes = [path.resolve() for path in (folders.models, folders.staging, folders.data)]
    assert any(place.real.is_relative_to(home) and place.real != home for home in homes)
    assert place.real == Path(os.path.realpath(place.local))
    assert not place.real.name.endswith((".sha256", ".sha256.target"))


@pytest.mark.rule("worker-12")
def test_heads_are_bounded(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes and in time, before anything else of a request is looked at."""
    for head in (b"X-Long: " + b"x" * 70_000, b"\r\n".join(b"X-%d: y" % count for count in range(20_000))):
        with files.connect() as link, contextlib.suppress(ConnectionError):
            link.sendall(b"GET /v1/files/models/x HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
            assert link.recv(100).startswith(b"HTTP/1.1 400 ")
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with files.connect() as link:
        link.sendall(b"PUT /v1/files/models/x HTTP/1.1\r\nHost: ")
        assert link.recv(100).startswith(b"HTTP/1.1 408 ")
    monkeypatch.undo()
    assert files.get("models/trap/inside.bin").body == b"fine"
