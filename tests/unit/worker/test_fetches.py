"""A worker that fetches a model's file from its source itself (`/v1/files-fetch/`), over real sockets."""

import json
import logging
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localai_cluster.kit.outbound import Outbound, SourceUnreachable
from localai_cluster.worker import download
from localai_cluster.worker.backend_store import PARTIAL_PREFIX
from localai_cluster.worker.config import build
from localai_cluster.worker.files import disk
from localai_cluster.worker.files.fetches import MAX_REQUEST_LENGTH, outbound_of
from tests.support.file_client import BEARER, PATIENCE, Files, Got, answered, on_disk, sha256
from tests.support.sources import Refusal, Source, started
from tests.support.worker_http import Served, fetches, worker

pytestmark = pytest.mark.rule("worker-12")
DATA = bytes(range(256)) * 12_000
DIGEST = sha256(DATA)
KEY = "models/m/dir/w.gguf"
HUB_PATH = "/owner/repo/resolve/0a1b/dir/w%20x.gguf"
TOKEN = "Bearer hf_secret"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    monkeypatch.setattr(download, "RETRY_PAUSES", (0.0, 0.0, 0.0))
    with started(files={"/w.gguf": DATA, HUB_PATH: DATA}) as source:
        yield source


@pytest.fixture
def served(source: Source) -> Iterator[Served]:
    """A worker that may dial this machine; its token is for the hub."""
    out = Outbound([source.host, source.storage], {source.url("/"): TOKEN})
    with worker(fetching=fetches(out, source.url(""))) as one:
        yield one


@pytest.fixture
def files(served: Served) -> Files:
    return Files(served.address)


def fetch(files: Files, url: str, key: str = KEY, **more: Any) -> Got:
    body = json.dumps({"url": url, "size": len(DATA), "sha256": DIGEST} | more).encode()
    return post(files, body, key)


def post(files: Files, body: bytes, key: str = KEY) -> Got:
    head = BEARER | {"Content-Length": str(len(body))}
    return files.ask("POST", f"/v1/files-fetch/{key}", head, body)


def last_line(got: Got) -> dict[str, Any]:
    assert (got.status, got.headers["content-type"]) == (200, "application/x-ndjson")
    *progress, last = map(json.loads, got.body.splitlines())
    assert all(line.keys() == {"bytes", "total"} and line["total"] == len(DATA) for line in progress)
    assert progress[0]["bytes"] <= progress[-1]["bytes"] <= len(DATA)
    return dict(last)


def partials(served: Served) -> list[Path]:
    return list(served.folders.models.glob(f"{PARTIAL_PREFIX}*"))


def test_a_fetched_file_is_like_a_staged_one(served: Served, files: Files, source: Source) -> None:
    """HEAD says beforehand that the worker can do it; a second request finds the file."""
    assert files.head(KEY).headers["x-file-fetch"] == "1"
    assert last_line(fetch(files, source.url("/w.gguf"))) == {"local_path": str(on_disk(served, KEY))}
    assert files.get(KEY).body == DATA
    head = files.head(KEY).headers
    assert (head["x-content-sha256"], head["x-file-fetch"]) == (DIGEST, "1")
    assert not partials(served)
    before = len(source.requests)
    assert "local_path" in last_line(fetch(files, source.url("/w.gguf")))
    assert len(source.requests) == before
    assert files.stage(KEY, DATA) == 0, "the control plane has nothing to send"


def test_a_former_file_and_an_unfinished_upload_are_replaced(
    served: Served, files: Files, source: Source
) -> None:
    assert files.put_part(KEY, b"other" * 100, 0, 100, sha256(b"other" * 100)).status == 308
    assert "local_path" in last_line(fetch(files, source.url("/w.gguf")))
    assert files.head(KEY).headers["x-content-sha256"] == DIGEST
    assert "x-target-sha256" not in files.head(KEY).headers
    assert on_disk(served, KEY).read_bytes() == DATA


def test_a_file_that_waits_for_another_download_says_so(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PARALLEL_DOWNLOADS", 1)
    body = {"url": source.url("/w.gguf"), "size": len(DATA), "sha256": DIGEST}
    with worker(fetching=fetches(Outbound([source.host, source.storage]))) as served:
        client = httpx.Client(base_url=f"http://{served.address}", headers=BEARER, timeout=PATIENCE)
        source.hold(2**20)
        with client, client.stream("POST", f"/v1/files-fetch/{KEY}", json=body) as first:
            assert source.paused.wait(PATIENCE)
            with client.stream("POST", f"/v1/files-fetch/{KEY}2", json=body) as second:
                lines = second.iter_lines()
                assert json.loads(next(lines)) == {"bytes": 0, "total": len(DATA), "waiting": True}
                assert "waiting" not in json.loads(next(first.iter_lines()))
                source.release()
                assert "local_path" in json.loads([*lines][-1])


def test_the_hub_is_reached_by_its_mirror_and_gets_its_token_alone(files: Files, source: Source) -> None:
    source.tokens = {"/owner": TOKEN}
    assert "local_path" in last_line(fetch(files, "hf://owner/repo@0a1b/dir/w x.gguf"))
    assert {request.authorization for request in source.seen("files")} == {TOKEN}
    assert {request.authorization for request in source.seen("storage")} == {""}


def test_a_gated_file_is_an_error_in_the_words_of_the_source(
    served: Served, files: Files, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.tokens = {"/owner": "Bearer another"}
    with caplog.at_level(logging.DEBUG):
        line = last_line(fetch(files, "hf://owner/repo@0a1b/dir/w x.gguf"))
    assert "Access is restricted" in line["error"]
    assert "hf_secret" not in caplog.text + line["error"]
    assert not on_disk(served, KEY).exists()


def test_a_broken_connection_is_resumed_and_no_signature_is_logged(
    files: Files, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.drops = [2**20, 2**20]
    with caplog.at_level(logging.DEBUG):
        assert "local_path" in last_line(fetch(files, source.url("/w.gguf")))
    assert source.sent_to("/w.gguf") == ["", f"bytes={2**20}-", f"bytes={2**21}-"]
    assert "signature" not in caplog.text


@pytest.mark.parametrize("step", ["moved", "hashed"])
def test_what_a_killed_worker_left_is_used(
    served: Served, files: Files, source: Source, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill comes before the file is moved to its name, or before its hash is recorded."""
    name = "move_complete_file" if step == "moved" else "record_hash"

    def killed(*_: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(disk, name, killed)
        assert "killed" in last_line(fetch(files, source.url("/w.gguf")))["error"]
    assert (files.head(KEY).status == 404) is (step == "moved")
    sent = source.sent
    assert "local_path" in last_line(fetch(files, source.url("/w.gguf")))
    assert files.head(KEY).headers["x-content-sha256"] == DIGEST
    assert source.sent == sent, "no byte comes twice"
    assert not partials(served)


def test_the_download_ends_with_its_client_and_goes_on_at_its_byte(
    served: Served, files: Files, source: Source
) -> None:
    source.pause_at = 2**20
    body = json.dumps({"url": source.url("/w.gguf"), "size": len(DATA), "sha256": DIGEST}).encode()
    with files.connect() as link:
        files.send_head(link, "POST", f"/v1/files-fetch/{KEY}", BEARER | {"Content-Length": str(len(body))})
        link.sendall(body)
        assert source.paused.wait(PATIENCE)
    source.pause_at = -1
    # It waits for the lock of the one before, which ends because its client has gone.
    assert "local_path" in last_line(fetch(files, source.url("/w.gguf")))
    source.released.set()
    assert files.get(KEY).body == DATA


def test_a_file_that_is_sent_instead_leaves_no_part_of_its_fetch(
    served: Served, files: Files, source: Source
) -> None:
    """The control plane gives up a source that sends nothing more; the disk is for the file that it sends."""
    source.pause_at = 2**20
    body = json.dumps({"url": source.url("/w.gguf"), "size": len(DATA), "sha256": DIGEST}).encode()
    with files.connect() as link:
        files.send_head(link, "POST", f"/v1/files-fetch/{KEY}", BEARER | {"Content-Length": str(len(body))})
        link.sendall(body)
        assert source.paused.wait(PATIENCE)
    assert files.put_part(KEY, DATA, 0, len(DATA), DIGEST).status == 200
    source.released.set()
    assert files.get(KEY).body == DATA
    assert not partials(served)


def test_a_file_of_another_hash_or_length_is_never_visible(
    served: Served, files: Files, source: Source
) -> None:
    other = last_line(fetch(files, source.url("/w.gguf"), sha256=sha256(b"other")))
    assert DIGEST in other["error"]
    assert sha256(b"other") in other["error"]
    assert other["changed"] is True
    got = fetch(files, source.url("/w.gguf"), size=1000)
    assert "longer than 1000 bytes" in json.loads(got.body.splitlines()[-1])["error"]
    assert files.head(KEY).status == 404
    assert not partials(served)


def test_a_page_of_a_proxy_is_not_taken_for_a_changed_file(files: Files, source: Source) -> None:
    """Only all bytes of the file say that it has changed; a shorter answer says something about this node."""
    source.files["/w.gguf"] = b"<html>log in"
    line = last_line(fetch(files, source.url("/w.gguf")))
    assert "its sha256 is" in line["error"]
    assert "changed" not in line


@pytest.mark.parametrize("place", ["files", "storage"])
def test_private_addresses_are_refused_also_behind_a_redirect(source: Source, place: str) -> None:
    allowed = [] if place == "files" else [source.host]
    with worker(fetching=fetches(Outbound(allowed))) as one:
        line = last_line(fetch(Files(one.address), source.url("/w.gguf")))
    assert "not a public address" in line["error"]
    assert not source.seen(place)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/iam",
        "http://localhost/w.gguf",
        "http://[::1]:1/w.gguf",
        "http://10.0.0.1/w.gguf",
    ],
)
def test_no_address_of_this_network_is_dialled(url: str) -> None:
    with worker() as one:
        assert "public address" in last_line(fetch(Files(one.address), url))["error"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"url": "file:///etc/passwd"}, "url"),
        ({"url": "cluster:models/x"}, "url"),
        ({"url": "http://user:secret@host/x"}, "url"),
        ({"url": "hf://owner/repo/w.gguf"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://h/" + "x" * 9000}, "url"),
        ({"url": 1}, "url"),
        ({"size": 0}, "size"),
        ({"size": 2**50}, "size"),
        ({"size": "1"}, "size"),
        ({"sha256": ""}, "sha256"),
        ({"sha256": DIGEST.upper()}, "sha256"),
    ],
)
def test_a_request_that_is_wrong_is_refused_by_its_field(
    files: Files, source: Source, more: dict[str, Any], field: str
) -> None:
    got = fetch(files, **{"url": source.url("/w.gguf")} | more)
    assert got.status == 400
    assert field in got.text
    assert "secret" not in got.text
    assert not source.requests


def test_credential_key_and_body_are_checked_in_this_order(served: Served, files: Files) -> None:
    path = f"/v1/files-fetch/{KEY}"
    for token in ({}, {"Authorization": "Bearer wrong"}):
        assert files.ask("POST", path, token | {"Content-Length": "9999999"}).status == 401
    for key in ("models/../x", "models/m/w.sha256", "models/a%2fb", "models", ""):
        assert post(files, b"{}", key).status == 400, key
    for key in ("data/x", "ephemeral/x"):
        assert "only files of models" in post(files, b"{}", key).text
    for method in ("GET", "PUT", "HEAD"):
        assert files.ask(method, path, BEARER | {"Content-Length": "0"}).status == 405
    for body in (b"", b"[]", b"{", b'{"url": "http://h/"}', b"\xff", b"[" * 10_000):
        assert post(files, body).status == 400, body[:10]
    assert post(files, b" " * (MAX_REQUEST_LENGTH + 1)).status == 413
    with files.connect() as link:
        files.send_head(link, "POST", path, BEARER | {"Transfer-Encoding": "chunked"})
        link.sendall(b"0\r\n\r\n")
        assert answered(link, "POST").status == 411
    (served.folders.models / "folder").mkdir()
    assert fetch(files, "http://h/x", "models/folder").status == 400


def test_a_full_disk_is_an_error_in_words(
    served: Served, files: Files, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert "disk" in last_line(fetch(files, source.url("/w.gguf")))["error"]
    assert not partials(served)


def test_a_source_that_is_busy_is_asked_again(files: Files, source: Source) -> None:
    source.refusals = [Refusal(503), Refusal(429)]
    assert "local_path" in last_line(fetch(files, source.url("/w.gguf")))


@pytest.mark.parametrize("problem", ["refused", "no name"])
def test_a_source_without_a_connection_is_tried_once(
    files: Files, source: Source, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends the file instead: waiting would only cost time."""
    monkeypatch.setattr(download, "RETRY_PAUSES", (3600.0,))
    url = source.url("/w.gguf")
    if problem == "refused":
        source.stop()
    else:
        url = "http://nowhere.invalid/w.gguf"
        monkeypatch.setattr(socket, "getaddrinfo", no_name)
    line = last_line(fetch(files, url))
    assert line.pop("unreachable") is True
    assert line.keys() == {"error"}


look_up = socket.getaddrinfo


def no_name(host: Any, *args: Any, **more: Any) -> Any:
    if host == "nowhere.invalid":
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return look_up(host, *args, **more)


class Lost(Outbound):
    """There is no connection for the second request."""

    count = 0

    @asynccontextmanager
    async def open(self, *args: Any, **more: Any) -> AsyncIterator[httpx.Response]:
        self.count += 1
        if self.count == 2:
            raise SourceUnreachable("no route to host")
        async with super().open(*args, **more) as response:
            yield response


def test_a_source_that_is_lost_after_the_first_byte_is_asked_again(source: Source) -> None:
    source.drops = [2**20]
    out = Lost([source.host, source.storage])
    with worker(fetching=fetches(out)) as one:
        assert "local_path" in last_line(fetch(Files(one.address), source.url("/w.gguf")))
    assert out.count == 3


def test_a_fetch_that_fails_leaves_the_disk_to_the_file_that_is_sent_instead(
    served: Served, files: Files, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "RETRY_PAUSES", ())
    source.drops = [2**20]
    assert "error" in last_line(fetch(files, source.url("/w.gguf")))
    assert source.sent == 2**20, "a part of it had come"
    assert not partials(served)
    assert files.stage(KEY, DATA) == 1


def test_an_error_of_a_source_that_answers_is_not_marked(files: Files, source: Source) -> None:
    source.refusals = [Refusal(404)]
    assert last_line(fetch(files, source.url("/w.gguf"))).keys() == {"error"}


def test_configured_hosts_are_the_mirror_galleries_and_registries(tmp_path: Path) -> None:
    config = build(
        {
            "register_to": "http://c",
            "models_path": str(tmp_path),
            "galleries": json.dumps([{"name": "one", "url": "http://10.0.0.2/index.yaml"}]),
            "backend_galleries": json.dumps([{"name": "two", "url": "https://10.0.0.3/index.yaml"}]),
            "hugging_face_url": "http://10.0.0.4:8080",
            "hugging_face_token": "hf_secret",
            "registries": json.dumps([{"host": "10.0.0.5:5000"}]),
        },
        {},
    )
    out = outbound_of(config)
    hosts = [("10.0.0.2", 80), ("10.0.0.3", 443), ("10.0.0.4", 8080), ("10.0.0.5", 5000)]
    assert all(out.is_allowed(*host) for host in hosts)
    assert not out.is_allowed("10.0.0.2", 81)
    assert out.credential_of("http://10.0.0.4:8080/x") == TOKEN
    assert out.credential_of("http://10.0.0.2/x") == ""
