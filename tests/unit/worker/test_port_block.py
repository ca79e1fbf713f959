"""The ports of workers that share a machine: never the same ones, and the same ones again after a restart."""

import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pytest

from localai_cluster.worker.config import Config, InvalidSettings, build
from localai_cluster.worker.ports import BLOCK_SIZE, open_probe_listener

BASE = 21051


def settings(data: Path, **more: str) -> Config:
    given = {
        "register_to": "http://c:1",
        "nats_url": "nats://n:4222",
        "addr": f"127.0.0.1:{BASE}",
        "http_addr": f"127.0.0.1:{BASE - 1}",
        "data_dir": str(data),
        "find_ports": "true",
    }
    data.mkdir(exist_ok=True)
    return build(given | more, {})


@pytest.fixture
def kept() -> Iterator[ExitStack]:
    """Closes the listeners of a test."""
    with ExitStack() as stack:
        yield stack


def test_workers_that_start_together_get_ports_of_their_own(tmp_path: Path, kept: ExitStack) -> None:
    together = Barrier(8)

    def start(number: int) -> Config:
        mine = settings(tmp_path / str(number))
        together.wait()
        found, listener = open_probe_listener(mine)
        kept.enter_context(listener)
        assert listener.getsockname() == found.http_bind
        return found

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(start, range(8)))
    assert len({one.base_port for one in found}) == 8
    for one in found:
        assert one.base_port % BLOCK_SIZE == BASE % BLOCK_SIZE
        assert one.advertise_addr == f"127.0.0.1:{one.base_port}"
        assert one.advertise_http_addr == f"127.0.0.1:{one.base_port - 1}"
        assert one.max_port < one.base_port + BLOCK_SIZE - 1


def test_a_worker_starts_on_a_full_disk(
    tmp_path: Path, kept: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the models that fill it; only its ports may be others after the next start."""

    def fill_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mine = settings(tmp_path / "one")
    monkeypatch.setattr(os, "fsync", fill_up)
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: fill_up())
    _, listener = open_probe_listener(mine)
    kept.enter_context(listener)
    monkeypatch.undo()
    assert "No space left" in caplog.text


def test_a_restarted_worker_gets_its_ports_back(tmp_path: Path, kept: ExitStack) -> None:
    """Also when lower ones are free by then, and when an engine of its last life still holds one."""
    _, first = open_probe_listener(settings(tmp_path / "one"))
    before, second = open_probe_listener(settings(tmp_path / "two"))
    first.close()
    second.close()
    left = kept.enter_context(socket.create_server(("127.0.0.1", before.base_port)))
    again, listener = open_probe_listener(settings(tmp_path / "two"))
    kept.enter_context(listener)
    assert left.getsockname()[1] == again.base_port == before.base_port


def test_ports_that_something_else_took_meanwhile_are_left_for_others(
    tmp_path: Path, kept: ExitStack
) -> None:
    before, listener = open_probe_listener(settings(tmp_path / "one"))
    listener.close()
    kept.enter_context(socket.create_server(before.http_bind))
    moved, listener = open_probe_listener(settings(tmp_path / "one"))
    kept.enter_context(listener)
    assert moved.base_port != before.base_port
    listener.close()
    again, listener = open_probe_listener(settings(tmp_path / "one"))
    kept.enter_context(listener)
    assert again.base_port == moved.base_port


@pytest.mark.parametrize("note", ["", "x", "-5", "99999", "0"])
def test_a_note_that_makes_no_sense_is_ignored(tmp_path: Path, kept: ExitStack, note: str) -> None:
    mine = settings(tmp_path)
    (tmp_path / "worker-port").write_text(note)
    found, listener = open_probe_listener(mine)
    kept.enter_context(listener)
    assert (tmp_path / "worker-port").read_text() == f"{found.base_port}\n"


def test_ports_that_were_given_are_taken_or_refused_in_plain_words(tmp_path: Path, kept: ExitStack) -> None:
    mine = settings(tmp_path, find_ports="")
    found, listener = open_probe_listener(mine)
    kept.enter_context(listener)
    assert found is mine
    with pytest.raises(InvalidSettings) as refused:
        open_probe_listener(mine)
    assert refused.value.message == (
        f"LOCALAI_HTTP_ADDR (--http-addr): cannot listen on 127.0.0.1:{BASE - 1}: Address already in use. "
        "Use a free host:port, such as 0.0.0.0:50050."
    )
    assert not (tmp_path / "worker-port").exists()
