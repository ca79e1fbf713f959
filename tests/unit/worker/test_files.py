"""The worker's file server over real sockets: routes, headers, parts, side files (worker.md §12)."""

import asyncio
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from localai_cluster.worker.exchange import Exchange
from localai_cluster.worker.files.keys import Folders
from localai_cluster.worker.files.routes import PIECE_BYTES, FileServer
from tests.support.file_client import BEARER, Files, files, on_disk, served, sha256
from tests.support.worker_http import ENGINE_TOKEN, Served, fetches

__all__ = ["files", "served"]
CONTENT = bytes(range(256)) * 12
DIGEST = sha256(CONTENT)
OTHER = sha256(b"other")
OLD = 1_600_000_000


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """Of a file of this test's own."""
    return f"models/{request.node.name.replace('[', '-').rstrip(']')}/dir/f.bin"


def side(path: Path, ending: str = ".sha256") -> Path:
    return path.with_name(path.name + ending)


@pytest.mark.rule("worker-12", "worker-12.1", "worker-14")
@pytest.mark.parametrize(
    ("prefix", "folder"),
    [("models/x", "models/x"), ("data/x", "data/x"), ("ephemeral/x", "staging/ephemeral/x")],
)
def test_keys_lead_to_their_folders(served: Served, files: Files, prefix: str, folder: str) -> None:
    """With the modes of the rule; the three folders are there from the start."""
    key = quote(f"{prefix}/a b/f+ü.bin")
    got = files.put(key, CONTENT, DIGEST)
    path = served.folders.models.parent / folder / "a b" / "f+ü.bin"
    assert (got.status, got.json) == (200, {"local_path": str(path)})
    assert path.read_bytes() == CONTENT
    assert side(path).read_text() == DIGEST
    for each, mode in ((path, 0o640), (side(path), 0o640), (path.parent, 0o750), (path.parent.parent, 0o750)):
        assert stat.S_IMODE(each.stat().st_mode) == mode & ~_umask(), each
    head = files.head(key)
    assert head.headers["x-local-path"].encode("latin-1").decode() == str(path)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@pytest.mark.rule("worker-12.2", "W28")
def test_head_tells_what_is_there(served: Served, files: Files, key: str) -> None:
    assert files.head(key).status == 404
    assert files.put(key, CONTENT, DIGEST).status == 200
    head = files.head(key)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["accept-ranges"] == "bytes"
    assert head.headers["x-file-size"] == head.headers["content-length"] == str(len(CONTENT))
    assert head.headers["x-content-sha256"] == DIGEST
    assert "x-target-sha256" not in head.headers
    assert files.head(key.rpartition("/")[0]).status == 400


@pytest.mark.rule("worker-12.1", "worker-12.2")
def test_a_hash_is_believed_only_of_what_is_there(served: Served, files: Files, key: str) -> None:
    """A side file that is older than its file, torn or missing is replaced; also if a copy kept its time."""
    path = on_disk(served, key)
    assert files.put(key, CONTENT, DIGEST).status == 200
    side(path).write_text(OTHER)
    assert files.head(key).headers["x-content-sha256"] == OTHER
    path.write_bytes(b"by hand")
    for torn in (None, "", "\0" * 64, "a" * 63):
        if torn is not None:
            side(path).write_text(torn)
        assert files.head(key).headers["x-content-sha256"] == sha256(b"by hand")
        assert side(path).read_text() == sha256(b"by hand")
    (path.parent / "new").write_bytes(b"copied")
    os.utime(path.parent / "new", (OLD, OLD))
    os.replace(path.parent / "new", path)
    assert files.head(key).headers["x-content-sha256"] == sha256(b"copied")


@pytest.mark.rule("worker-12.4", "W28")
@pytest.mark.parametrize(
    ("wanted", "status", "span"),
    [
        ("", 200, (0, 3072)),
        ("bytes=0-0", 206, (0, 1)),
        ("bytes=3000-", 206, (3000, 3072)),
        ("bytes=-10", 206, (3062, 3072)),
        ("bytes=-9000", 206, (0, 3072)),
        ("bytes=100-99999", 206, (100, 3072)),
        ("bytes=0-1,5-6", 200, (0, 3072)),
        ("bytes=9-8", 200, (0, 3072)),
        ("bytes=-", 200, (0, 3072)),
        ("bytes=3072-", 416, (0, 0)),
        ("bytes=-0", 416, (0, 0)),
    ],
    ids=lambda value: str(value),
)
def test_get_gives_the_file_or_a_part(files: Files, wanted: str, status: int, span: tuple[int, int]) -> None:
    assert files.put("models/got/f.bin", CONTENT).status == 200
    got = files.get("models/got/f.bin", wanted)
    assert got.status == status
    if status == 416:
        assert got.headers["content-range"] == "bytes */3072"
        return
    assert got.body == CONTENT[slice(*span)]
    assert got.headers["content-type"] == "application/octet-stream"
    if status == 206:
        assert got.headers["content-range"] == f"bytes {span[0]}-{span[1] - 1}/3072"


@pytest.mark.rule("worker-12.3", "worker-12.4")
def test_large_files_come_and_go_in_pieces(served: Served, files: Files, key: str) -> None:
    content = os.urandom(3_000_001)
    assert files.stage(key, content) == 1
    assert files.stage(key, content) == 0
    assert files.get(key).body == content
    assert files.get(key, "bytes=2999999-").body == content[2999999:]
    assert (files.put(key, b"").status, files.get(key).body) == (200, b"")
    assert files.head(key).headers["x-content-sha256"] == sha256(b"")


@pytest.mark.rule("worker-12.3", "W29")
def test_a_file_in_parts(served: Served, files: Files, key: str) -> None:
    got = files.put_part(key, CONTENT, 0, 1000, DIGEST)
    assert (got.status, got.body, got.headers["range"]) == (308, b"", "bytes=0-999")
    assert got.headers["x-file-size"] == "1000"
    assert "location" not in got.headers
    path = on_disk(served, key)
    assert side(path, ".sha256.target").read_text() == DIGEST
    assert not side(path).exists()
    head = files.head(key)
    assert head.headers["x-target-sha256"] == DIGEST
    assert "x-content-sha256" not in head.headers
    got = files.put_part(key, CONTENT, 500, 3072, DIGEST)
    assert (got.status, got.text) == (416, "Content-Range start 500 does not match current file size 1000\n")
    assert (got.headers["content-range"], got.headers["x-file-size"]) == ("bytes */3072", "1000")
    assert files.put_part(key, CONTENT, 1000, 3072, DIGEST.upper()).status == 200
    assert path.read_bytes() == CONTENT
    assert side(path).read_text() == DIGEST
    assert not side(path, ".sha256.target").exists()
    got = files.put_part(key, CONTENT, 0, 3072, DIGEST)
    assert (got.status, got.headers["x-file-size"]) == (416, "3072")
    assert path.read_bytes() == CONTENT


@pytest.mark.rule("worker-12.3", "W29")
def test_another_hash_on_the_way_removes_what_came(served: Served, files: Files, key: str) -> None:
    path = on_disk(served, key)
    assert files.put_part(key, CONTENT, 0, 1000, DIGEST).status == 308
    got = files.put_part(key, CONTENT, 1000, 3072, OTHER)
    assert got.status == 409
    assert got.text.endswith("restart from byte 0\n")
    assert list(path.parent.iterdir()) == []
    assert files.put_part(key, CONTENT, 0, 1000, OTHER).status == 308
    got = files.put_part(key, CONTENT, 1000, 3072, OTHER)
    assert (got.status, got.text) == (400, f"sha256 mismatch: expected {OTHER} got {DIGEST}\n")
    assert list(path.parent.iterdir()) == []
    assert files.put(key, CONTENT, OTHER).status == 400
    assert files.head(key).status == 404


@pytest.mark.rule("worker-12.3")
def test_a_changed_file_replaces_what_is_there(served: Served, files: Files, key: str) -> None:
    """Also a part of another one, and one that nothing vouches for. An engine keeps what it has mapped."""
    path = on_disk(served, key)
    assert files.put(key, CONTENT, DIGEST).status == 200
    with path.open("rb") as mapped:
        for number, former in enumerate((b"", b"part")):
            changed = CONTENT[number + 1 :]
            if former:
                assert files.put_part(key, CONTENT, 0, 9, DIGEST).status == 308
            assert files.put_part(key, changed, 0, len(changed), sha256(changed)).status == 200
            assert path.read_bytes() == changed
        assert mapped.read() == CONTENT
    path.write_bytes(CONTENT)
    assert files.put_part(key, CONTENT, 0, 9, None).status == 308
    assert path.read_bytes() == CONTENT[:9]
    assert not side(path, ".sha256.target").exists()


@pytest.mark.rule("worker-12.3")
def test_a_short_body_keeps_what_came(served: Served, files: Files, key: str) -> None:
    got = files.put(key, CONTENT[:1000], DIGEST, **{"Content-Range": "bytes 0-3071/3072"})
    assert (got.status, got.text) == (400, "short body: got 1000 expected 3072\n")
    assert files.head(key).headers["x-file-size"] == "1000"
    assert files.stage(key, CONTENT) == 1
    longer = files.put(key + "2", CONTENT, None, **{"Content-Range": "bytes 0-9/20"})
    assert (longer.status, longer.headers["x-file-size"]) == (308, "10")


@pytest.mark.rule("worker-12.3")
@pytest.mark.parametrize(
    "span",
    [
        "bytes 0-*/3072",
        "bytes 0-2999/*",
        "bytes 5-4/3072",
        "bytes 0-3072/3072",
        "bytes -1-3/3072",
        "0-1/2",
        "bytes 0-1/1e3",
        "bytes 0-1/2, bytes 0-1/2",
        f"bytes 0-1/{10**30}",
        "bytes 0x0-0x1/0x2",
        "items 0-1/2",
        "bytes  0-1/2",
        "bytes 0-1/\u00b2",
    ],
    ids=ascii,
)
def test_other_ranges_are_refused(served: Served, files: Files, span: str) -> None:
    assert files.put("models/ranges/f.bin", CONTENT, DIGEST, **{"Content-Range": span}).status == 400
    assert not (served.folders.models / "ranges").exists()


@pytest.mark.rule("worker-12", "worker-12.3")
def test_lengths_and_hashes_are_said_and_bounded(served: Served, files: Files) -> None:
    """D-FILE-LIMITS."""
    path = "/v1/files/models/lengths/f.bin"
    assert files.ask("PUT", path).status == 411
    chunked = files.ask("PUT", path, BEARER | {"Transfer-Encoding": "chunked"}, b"3\r\nabc\r\n0\r\n\r\n")
    assert chunked.status == 411
    for length, status in (("-1", 400), ("1e3", 400), (str(50 * 2**30 + 1), 413)):
        assert files.ask("PUT", path, BEARER | {"Content-Length": length}, b"abc").status == status, length
    both = BEARER | {"Content-Length": "3", "Transfer-Encoding": "chunked"}
    assert files.ask("PUT", path, both, b"3\r\nabc\r\n0\r\n\r\n").status in (400, 411)
    for digest in ("no hash", "a" * 63, "g" * 64):
        assert files.put("models/lengths/f.bin", b"abc", digest).status == 400
    assert not (served.folders.models / "lengths").exists()


@pytest.mark.rule("worker-12", "worker-12.5", "W27", "W30")
def test_methods_tokens_and_other_paths(served: Served, files: Files) -> None:
    assert files.put("models/m/f.bin", CONTENT).status == 200
    for method in ("DELETE", "PATCH", "OPTIONS"):
        assert files.ask(method, "/v1/files/models/m/f.bin").status == 405
    assert files.ask("POST", "/v1/files/models/m/f.bin").status == 404
    assert files.ask("GET", "/v1/files/").status == 400
    assert files.ask("PUT", "/v1/files-list/models/m", BEARER | {"Content-Length": "0"}).status == 405
    for path in ("/v1/files", "/v1/filesx/models/m/f.bin", "/v1/x"):
        assert files.ask("GET", path).status == 404, path
    for path in ("/v1/files/models/m/f.bin", "/v1/files/none", "/v1/files-list/models/m", "/v1/files/../x"):
        for value in ("", f"Bearer {ENGINE_TOKEN[:-1]}", f"Basic {ENGINE_TOKEN}", "Bearer tok", ENGINE_TOKEN):
            for method in ("GET", "HEAD", "PUT", "POST"):
                headers = {"Content-Length": "0"} | ({"Authorization": value} if value else {})
                assert files.ask(method, path, headers).status == 401, (method, path, value)
    for name in ("authorization", "AUTHORIZATION"):
        assert files.ask("GET", "/v1/files/models/m/f.bin", {name: f"bearer {ENGINE_TOKEN}"}).body == CONTENT


@pytest.mark.rule("worker-12.5", "W30")
def test_a_temporary_file_is_made_and_fetched_by_its_name(served: Served, files: Files) -> None:
    got = files.ask("POST", "/v1/files/temp", BEARER | {"Content-Length": "3"}, b"abc")
    path = Path(got.json["local_path"])
    assert (got.status, path.parent, path.read_bytes()) == (200, served.folders.staging, b"")
    assert path.name.startswith("localai-output-")
    assert path.name.endswith(".tmp")
    path.write_bytes(b"an engine's output")
    assert files.get(path.name).body == b"an engine's output"
    again = files.ask("POST", "/v1/files/temp", BEARER | {"Content-Length": "0"}).json["local_path"]
    assert again != str(path)


@pytest.mark.rule("worker-12.6")
def test_a_folder_is_listed(served: Served, files: Files) -> None:
    """Not its side files, and nothing behind a link that leaves the folder."""
    for name in ("b.bin", "sub/a.bin", "sub/deep/c.bin"):
        assert files.put(f"models/listed/{name}", CONTENT).status == 200
    folder = served.folders.models / "listed"
    (folder / "outside").symlink_to(served.home.name)
    (folder / "leak").symlink_to(Path(served.home.name, "secret"))
    Path(served.home.name, "secret").write_text("x")
    (folder / "inside").symlink_to(folder / "b.bin")
    (folder / "empty").mkdir()
    got = files.ask("GET", "/v1/files-list/models/listed")
    assert got.headers["content-type"] == "application/json"
    assert got.json == {"files": ["b.bin", "inside", "sub/a.bin", "sub/deep/c.bin"]}
    assert files.ask("GET", "/v1/files-list/models/listed/empty").json == {"files": []}
    for path in ("models/listed/none", "models/listed/b.bin"):
        assert files.ask("GET", f"/v1/files-list/{path}").status == 404


@pytest.mark.rule("worker-12.4")
async def test_a_reader_that_leaves_ends_the_reading(tmp_path: Path) -> None:
    """The server under us forgets what is sent to it: 100 GB would be read for nothing."""
    folders = Folders.of_worker(tmp_path / "models", tmp_path / "own", ())
    folders.models.mkdir()
    (folders.models / "big").touch()
    os.truncate(folders.models / "big", 1000 * PIECE_BYTES)
    sent: list[int] = []
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(len(message.get("body", b"")))
        left.set()

    scope = {"type": "http", "method": "GET", "path": "/v1/files/models/big", "headers": []}
    await FileServer(folders, fetches())(Exchange(scope, receive, send), True)
    assert 0 < sum(sent) < 20 * PIECE_BYTES
