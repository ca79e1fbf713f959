"""Uploads that are cut, repeated, changed, killed or refused by the disk: no side file ever lies (§12.3)."""

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import connections
from localai_cluster.kit.connections import serving
from localai_cluster.worker import exchange
from localai_cluster.worker.commands import delete_model
from localai_cluster.worker.files import disk
from localai_cluster.worker.files.disk import PartialUpload
from localai_cluster.worker.files.keys import Folders
from localai_cluster.worker.files.routes import FileServer
from localai_cluster.worker.http_server import WorkerApplication
from localai_cluster.worker.log_rings import LogRings
from localai_cluster.worker.source_files import HEADROOM_BYTES, WorkCancelled
from tests.conftest import eventually, until
from tests.support.effort import EFFORT
from tests.support.file_client import BEARER, Files, answered, files, on_disk, served, sha256
from tests.support.worker_http import ENGINE_TOKEN, Served, fetches

__all__ = ["files", "served"]
CONTENT = bytes(range(256)) * 40
DIGEST = sha256(CONTENT)


@pytest.fixture
def key() -> str:
    return f"models/{uuid4()}/f.bin"


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below, without its side files."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".sha256" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


CUTS = st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), max_size=6)
"""Where an upload ends, whether by a reset, and whether the file has changed by the next try."""


@pytest.mark.rule("worker-12.3", "W29")
@settings(max_examples=60 * EFFORT)
@given(content=st.binary(max_size=400_000), cuts=CUTS)
@example(content=b"", cuts=[(0.0, True, False)])
@example(content=b"ab", cuts=[(0.5, False, False), (0.0, True, True)])
@example(content=b"x" * 400_000, cuts=[(0.9, True, False), (0.5, False, False), (1.0, True, False)])
def test_an_upload_cut_at_any_byte_resumes(
    served: Served, content: bytes, cuts: list[tuple[float, bool, bool]]
) -> None:
    """And ends with equal bytes; a file that changed meanwhile goes again; nothing else changes."""
    files, key, home = Files(served.address), f"models/{uuid4()}/f.bin", Path(served.home.name)
    before = tree(home)
    for share, reset, changes in cuts:
        if content:
            head = files.head(key).headers
            size = int(head.get("x-file-size", 0))
            resumes = size < len(content) and head.get("x-target-sha256") == sha256(content)
            start = size if resumes else 0
            files.cut(key, content, start, int(share * (len(content) - start)), reset=reset)
        content = content[1:] + b"!" if changes else content
    files.stage(key, content)
    assert files.get(key).body == content
    assert files.head(key).headers["x-content-sha256"] == sha256(content)
    path = on_disk(served, key)
    assert {one.name for one in path.parent.iterdir()} == {"f.bin", "f.bin.sha256"}
    assert tree(home) == before | {str(path.relative_to(home)): content}
    delete_model(served.folders.models, path.parent.name)


def test_what_was_received_before_a_cut_is_not_sent_again(served: Served, files: Files, key: str) -> None:
    content = os.urandom(2_000_000)
    more = {"Content-Length": "2000000", "Content-Range": "bytes 0-1999999/2000000"}
    with files.connect() as link:
        files.send_head(
            link, "PUT", f"/v1/files/{key}", BEARER | more | {"X-Content-SHA256": sha256(content)}
        )
        link.sendall(content[:1_500_000])
        eventually(lambda: on_disk(served, key).exists() and on_disk(served, key).stat().st_size == 1_500_000)
    head = files.head(key).headers
    assert (head["x-file-size"], head["x-target-sha256"]) == ("1500000", sha256(content))
    inode = on_disk(served, key).stat().st_ino
    assert files.put_part(key, content, 1_500_000, 2_000_000, sha256(content)).status == 200
    assert on_disk(served, key).read_bytes() == content
    assert on_disk(served, key).stat().st_ino == inode


LEFT: dict[str, dict[str, bytes | None]] = {
    "nothing": {},
    "an empty file": {"": b""},
    "an empty file and its target": {"": b"", ".sha256.target": DIGEST.encode()},
    "the target alone": {".sha256.target": DIGEST.encode()},
    "a part": {"": CONTENT[:77], ".sha256.target": DIGEST.encode()},
    "a part whose last bytes are not on disk": {
        "": CONTENT[:70] + bytes(7),
        ".sha256.target": DIGEST.encode(),
    },
    "a part without its target": {"": CONTENT[:77]},
    "a part and a torn target": {"": CONTENT[:77], ".sha256.target": DIGEST.encode()[:20]},
    "a part and the former hash": {".sha256": DIGEST.encode(), "": CONTENT[:77]},
    "all bytes, not finished": {"": CONTENT, ".sha256.target": DIGEST.encode()},
    "all bytes, some not on disk": {"": CONTENT[:-9] + bytes(9), ".sha256.target": DIGEST.encode()},
    "finished but for the target": {
        "": CONTENT,
        ".sha256": DIGEST.encode(),
        ".sha256.target": DIGEST.encode(),
    },
    "finished with a torn hash": {
        "": CONTENT,
        ".sha256": DIGEST.encode()[:9],
        ".sha256.target": DIGEST.encode(),
    },
    "finished": {"": CONTENT, ".sha256": DIGEST.encode()},
    "another file": {"": b"other", ".sha256": sha256(b"other").encode()},
    "a part of another": {"": b"oth", ".sha256.target": sha256(b"other").encode()},
    "more than all": {"": CONTENT + b"!", ".sha256.target": DIGEST.encode()},
    "a hash without a file": {".sha256": DIGEST.encode()},
}


@pytest.mark.rule("worker-12.1", "worker-12.2", "worker-12.3")
@pytest.mark.parametrize("left", LEFT)
def test_whatever_a_kill_leaves_the_upload_ends_with_equal_bytes(
    served: Served, files: Files, key: str, left: str
) -> None:
    """And HEAD has never vouched for other bytes. D-FILE-FINISH: no 416 without end."""
    path = on_disk(served, key)
    path.parent.mkdir()
    for ending, content in LEFT[left].items():
        path.with_name(path.name + ending).write_bytes(content or b"")
        if ending == ".sha256" and "former" in left:
            os.utime(path.with_name(path.name + ending), (1, 1))
    head = files.head(key)
    claimed = head.headers.get("x-content-sha256")
    assert claimed in (None, sha256(path.read_bytes()) if path.exists() else None)
    with contextlib.suppress(AssertionError):
        files.stage(key, CONTENT, tries=2)  # what a power cut tore fails by its hash once
    files.stage(key, CONTENT, tries=2)
    assert path.read_bytes() == CONTENT
    assert {one.name for one in path.parent.iterdir()} == {"f.bin", "f.bin.sha256"}


STEPS: tuple[tuple[Any, str], ...] = (
    (disk, "prepare_folder"),
    (disk, "remove"),
    (disk, "_write_side_file"),
    (disk, "sync_folder"),
    (PartialUpload, "append"),
    (PartialUpload, "sync"),
    (PartialUpload, "digest"),
    (disk, "record_hash"),
    (os, "fsync"),
)


@pytest.mark.rule("worker-12.3")
@pytest.mark.parametrize(("place", "step"), STEPS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_refuses_any_step_loses_nothing(
    served: Served,
    files: Files,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    step: str,
    number: int,
    error: int,
) -> None:
    """It is said as such, nothing is vouched for, and the next try goes on (D-FILE-FULL)."""
    honest: Callable[..., Any] = getattr(place, step)
    calls = 0

    def refuses(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(error, os.strerror(error))
        return honest(*arguments)

    path = on_disk(served, key)
    assert files.put_part(key, CONTENT, 0, 1000, DIGEST).status == 308
    monkeypatch.setattr(place, step, refuses)
    got = files.put_part(key, CONTENT, 1000, len(CONTENT), DIGEST)
    monkeypatch.undo()
    if calls < number:
        assert got.status == 200
        return
    assert got.status == (507 if error == errno.ENOSPC else 500)
    assert os.strerror(error) in got.text
    assert path.read_bytes()[:1000] == CONTENT[:1000]
    assert files.head(key).headers.get("x-content-sha256") in (None, DIGEST)
    assert files.stage(key, CONTENT) <= 1
    assert path.read_bytes() == CONTENT


@pytest.mark.rule("worker-12.3")
def test_what_does_not_fit_is_refused_before_the_old_file_goes(
    served: Served, files: Files, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files.put(key, CONTENT, DIGEST).status == 200
    usage = type("Usage", (), {"free": HEADROOM_BYTES + 9})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    larger = CONTENT * 2
    for got in (
        files.put_part(key, larger, 0, len(larger), sha256(larger)),
        files.put(key, larger, sha256(larger)),
    ):
        assert (got.status, "free" in got.text) == (507, True)
        assert on_disk(served, key).read_bytes() == CONTENT
    other = b"!" + CONTENT[1:]
    assert files.put_part(key, other, 0, len(other), sha256(other)).status == 200


@pytest.mark.rule("worker-12.3")
def test_a_whole_upload_that_fails_leaves_nothing(
    served: Served, files: Files, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: PartialUpload, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PartialUpload, "append", full)
    assert files.put(key, CONTENT, DIGEST).status == 507
    monkeypatch.undo()
    assert list(on_disk(served, key).parent.iterdir()) == []
    with files.connect() as link:
        files.send_head(link, "PUT", f"/v1/files/{key}", BEARER | {"Content-Length": "1000"})
        link.sendall(b"abc")
        eventually(lambda: on_disk(served, key).exists())
        head = files.head(key).headers
        assert head["x-file-size"] in ("0", "3")
        assert "x-content-sha256" not in head
    eventually(lambda: not on_disk(served, key).exists())
    assert files.head(key).status == 404


@pytest.mark.rule("worker-12.3")
def test_two_uploads_of_a_file_take_turns(served: Served, files: Files, key: str) -> None:
    """The second waits and looks again. It was sent for what was there before, so it removes nothing."""
    older = b"?" + CONTENT[1:]
    with files.connect() as first, files.connect() as same, files.connect() as stale:
        for link, content in ((first, CONTENT), (same, CONTENT), (stale, older)):
            span = f"bytes 0-{len(content) - 1}/{len(content)}"
            length = {"Content-Length": str(len(content)), "X-Content-SHA256": sha256(content)}
            files.send_head(link, "PUT", f"/v1/files/{key}", BEARER | length | {"Content-Range": span})
            link.sendall(content[:-1])
            eventually(lambda: on_disk(served, key).exists())
        eventually(lambda: on_disk(served, key).stat().st_size == len(CONTENT) - 1)
        assert files.head(key).headers["x-target-sha256"] == DIGEST
        for link in (same, stale):
            link.sendall(b"!")
        first.sendall(CONTENT[-1:])
        assert answered(first, "PUT").status == 200
        for link in (same, stale):
            got = answered(link, "PUT")
            assert (got.status, got.headers["x-file-size"]) == (416, str(len(CONTENT)))
    assert on_disk(served, key).read_bytes() == CONTENT
    assert files.stage(key, older) == 1


@pytest.mark.rule("worker-12.3")
def test_many_uploads_of_one_file_at_once_end_with_equal_bytes(
    served: Served, files: Files, key: str
) -> None:
    content = os.urandom(700_000)
    senders = [threading.Thread(target=lambda: files.stage(key, content)) for _ in range(6)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert files.get(key).body == content
    assert files.head(key).headers["x-content-sha256"] == sha256(content)


@pytest.mark.rule("worker-12")
def test_a_sender_that_stalls_keeps_nobody_waiting(
    served: Served, files: Files, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends, what it has sent stays, and the one behind it goes on (D-FILE-STALL)."""
    for limit in ("HEAD_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(connections, limit, 0.5)
    span = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", "X-Content-SHA256": DIGEST}
    with files.connect() as stalls:
        length = {"Content-Length": str(len(CONTENT))}
        files.send_head(stalls, "PUT", f"/v1/files/{key}", BEARER | span | length)
        stalls.sendall(CONTENT[:500])
        eventually(lambda: on_disk(served, key).exists() and on_disk(served, key).stat().st_size == 500)
        got = files.put_part(key, CONTENT, 500, len(CONTENT), DIGEST)
        assert got.status == 200
        assert answered(stalls, "PUT").status == 408
    assert on_disk(served, key).read_bytes() == CONTENT


@pytest.mark.rule("worker-12.3")
def test_a_refusal_is_heard_over_a_large_body(
    served: Served, files: Files, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends then, without the whole body having been read."""
    monkeypatch.setattr(exchange, "LINGER_SECONDS", 0.2)
    total = 200_000_000
    for headers, status in ((BEARER, 416), ({}, 401)):
        with files.connect() as link:
            span = {"Content-Range": f"bytes 500-{total - 1}/{total}", "Content-Length": str(total - 500)}
            files.send_head(link, "PUT", f"/v1/files/{key}", headers | span)
            link.sendall(bytes(300_000))
            got = answered(link, "PUT")
            assert (got.status, got.headers["connection"]) == (status, "close")
            with contextlib.suppress(ConnectionError):
                assert link.recv(10) == b""


@pytest.mark.rule("worker-12.3")
def test_who_asks_before_the_body_is_told_to_send_it(files: Files, key: str) -> None:
    with files.connect() as link:
        more = {"Content-Length": str(len(CONTENT)), "Expect": "100-continue"}
        files.send_head(link, "PUT", f"/v1/files/{key}", BEARER | more)
        assert link.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        link.sendall(CONTENT)
        assert answered(link, "PUT").status == 200


@pytest.mark.rule("worker-12.3", "worker-14")
def test_a_file_that_is_deleted_meanwhile_is_not_vouched_for(served: Served, files: Files, key: str) -> None:
    span = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", "X-Content-SHA256": DIGEST}
    with files.connect() as link:
        length = {"Content-Length": str(len(CONTENT))}
        files.send_head(link, "PUT", f"/v1/files/{key}", BEARER | span | length)
        link.sendall(CONTENT[:-1])
        eventually(lambda: on_disk(served, key).exists())
        delete_model(served.folders.models, on_disk(served, key).parent.name)
        link.sendall(CONTENT[-1:])
        assert answered(link, "PUT").status == 500
    assert not on_disk(served, key).parent.exists()
    assert files.stage(key, CONTENT) == 1


@pytest.mark.rule("worker-12.3")
def test_memory_does_not_grow_with_the_file(
    served: Served, files: Files, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of bounded size, one of them at a time, however slow the disk is."""
    sizes: list[int] = []
    honest, content = PartialUpload.append, bytes(8_000_000)

    def slow(self: PartialUpload, piece: bytes) -> None:
        sizes.append(len(piece))
        threading.Event().wait(0.002)
        honest(self, piece)

    monkeypatch.setattr(PartialUpload, "append", slow)
    monkeypatch.setattr(disk, "SYNC_EVERY_BYTES", 3_000_000)
    assert files.stage(key, content) == 1
    assert sum(sizes) == len(content)
    assert max(sizes) <= 512 * 1024


@pytest.mark.rule("worker-12.2")
def test_a_hash_is_computed_once_for_all_who_ask(
    served: Served, files: Files, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = on_disk(served, key), 0
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    honest = hashlib.sha256

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return honest(*arguments)

    monkeypatch.setattr(hashlib, "sha256", counted)
    asking = [threading.Thread(target=lambda: found.append(files.head(key))) for _ in range(5)]
    found: list[Any] = []
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert {got.headers["x-content-sha256"] for got in found} == {DIGEST}
    assert count == 1


@pytest.mark.rule("worker-12.3")
async def test_the_end_of_the_worker_ends_uploads_and_keeps_what_came(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hashes that run end too: nothing keeps the process."""
    server = FileServer(Folders.of_worker(tmp_path / "models", tmp_path, ()), fetches())
    application = WorkerApplication(lambda: "", LogRings(), server, lambda: ENGINE_TOKEN, "")
    listener = socket.create_server(("127.0.0.1", 0))
    files, path = Files(f"127.0.0.1:{listener.getsockname()[1]}"), tmp_path / "models" / "m" / "f.bin"
    async with server.running(), serving(listener, application):
        with files.connect() as link:
            span = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", "X-Content-SHA256": DIGEST}
            length = {"Content-Length": str(len(CONTENT))}
            files.send_head(link, "PUT", "/v1/files/models/m/f.bin", BEARER | span | length)
            link.sendall(CONTENT[:500])

            await until(lambda: path.exists() and path.stat().st_size == 500)
    with pytest.raises(WorkCancelled):
        disk.hash_file(path, server._threads.stopped)
    assert path.read_bytes() == CONTENT[:500]
    assert path.with_name("f.bin.sha256.target").read_text() == DIGEST
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
