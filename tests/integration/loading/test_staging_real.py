"""Staging and the worker's real file server, with a connection between them that breaks."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.worker import exchange
from localai_cluster.worker.files import disk
from nodes.loading import transfer
from nodes.loading.source_files import plan_files
from nodes.loading.staging import ModelTransfer, StagingResult, TransferLimits
from nodes.loading.transfer import FileRefused, UploadMeter
from nodes.registry.dial_targets import Contact, HttpServer, client_of
from tests.support import worker_http

pytestmark = pytest.mark.django_db(transaction=True)
SIZE = 3_000_000


@asynccontextmanager
async def breaking(address: str, cuts: list[int]) -> AsyncIterator[str]:
    """An address that leads to the other one; each connection breaks after so many bytes of requests."""
    host, port = address.rsplit(":", 1)
    connections: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = cuts.pop(0) if cuts else 2**62
        back, there = await asyncio.open_connection(host, port)

        async def answers() -> None:
            while piece := await back.read(65536):
                writer.write(piece)

        answering = asyncio.create_task(answers())
        try:
            while left and (piece := await reader.read(min(left, 65536))):
                left -= len(piece)
                there.write(piece)
                await there.drain()
        except OSError:
            pass
        finally:
            answering.cancel()
            for one in (writer, there):
                one.transport.abort()
                with contextlib.suppress(OSError):
                    await one.wait_closed()
            await asyncio.gather(answering, return_exceptions=True)

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(forward(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for one in connections:
            one.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


async def send(folder: Path, address: str) -> tuple[StagingResult, UploadMeter]:
    planned = plan_files(folder, "org/m", {"Model": "größe/a.gguf", "MMProj": "p.bin"})
    meter = UploadMeter({file.relative: file.size for file in planned.files.values()}, "gpu")
    server = HttpServer("gpu", "healthy", Contact(address, worker_http.ENGINE_TOKEN))
    async with client_of(server) as client:
        sending = ModelTransfer("org/m", planned, client, uuid4(), TransferLimits(), meter, 60.0)
        await sending.check()
        return await sending.send(), meter


def spoiled(path: Path) -> Path:
    path.write_bytes(bytes(SIZE))
    return path


def same(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(transfer, "retry_delay", lambda attempts: 0.02)
    (tmp_path / "größe").mkdir()
    (tmp_path / "größe" / "a.gguf").write_bytes(os.urandom(SIZE))
    (tmp_path / "p.bin").write_bytes(b"")
    return tmp_path


@pytest.mark.rule("worker-13", "T-FTS-35", "T-FTS-36", "T-FTS-24", "T-FTS-25", "T-FLW-17")
@pytest.mark.parametrize("cuts", [[], [1], [700], [1500], [400_000, 500_000, 900], [SIZE + 300] * 2])
async def test_files_reach_a_worker_wherever_the_connection_breaks(folder: Path, cuts: list[int]) -> None:
    worker: Any
    with worker_http.worker() as worker:
        home = Path(worker.home.name, "models", "org", "m")
        for change in (False, True):
            if change:
                (folder / "größe" / "a.gguf").write_bytes(os.urandom(SIZE // 2))
            async with breaking(worker.address, list(cuts)) as address:
                sent, meter = await send(folder, address)
            assert sent == StagingResult(str(home), {})
            assert same(home / "größe" / "a.gguf", folder / "größe" / "a.gguf")
            assert (home / "p.bin").read_bytes() == b""
            assert meter.current == meter.total


@pytest.mark.rule("worker-13", "T-FTS-24")
async def test_what_is_there_is_not_sent_again(folder: Path) -> None:
    worker: Any
    with worker_http.worker() as worker:
        await send(folder, worker.address)
        _, meter = await send(folder, worker.address)
        assert meter.current == meter.total
        assert meter.rate(0) == 0
        there = spoiled(Path(worker.home.name, "models", "org", "m", "größe", "a.gguf"))
        await send(folder, worker.address)
        assert same(there, folder / "größe" / "a.gguf"), "it was changed there"


async def test_a_token_of_another_time_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_http.worker() as worker:
        monkeypatch.setattr(worker_http, "ENGINE_TOKEN", "another")
        with pytest.raises(FileRefused, match="does not accept our token"):
            await send(folder, worker.address)


@pytest.mark.rule("worker-13", "worker-12.3")
async def test_a_refusal_before_a_large_body_is_read_is_heard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker cuts the connection over what it does not read; its words are there by then."""
    monkeypatch.setattr(exchange, "LINGER_SECONDS", 0.05)
    monkeypatch.setattr(disk, "HEADROOM_BYTES", 2**60)
    os.truncate(folder / "größe" / "a.gguf", 400_000_000)
    with worker_http.worker() as worker, pytest.raises(FileRefused, match="not enough disk space"):
        await send(folder, worker.address)


@pytest.mark.rule("T-STG-11", "T-STG-12", "R2.57", "worker-14")
async def test_a_checksum_without_its_file_does_not_keep_a_model_from_its_worker(folder: Path) -> None:
    """Ours takes none, since it would vouch for a file that comes later."""
    tree = folder / "tree"
    tree.mkdir()
    (tree / "a.bin").write_bytes(b"weights")
    (tree / "all.sha256").write_bytes(b"0" * 64)
    planned = plan_files(folder, "m", {"Model": "tree"})
    assert "tree/all.sha256" in planned.files, "a stock worker takes it"
    with worker_http.worker() as worker:
        server = HttpServer("gpu", "healthy", Contact(worker.address, worker_http.ENGINE_TOKEN))
        meter = UploadMeter({file.relative: file.size for file in planned.files.values()}, "gpu")
        async with client_of(server) as client:
            sent = await ModelTransfer("m", planned, client, uuid4(), TransferLimits(), meter, 60.0).send()
        options, warnings = planned.engine_options(sent.root, sent.failed)
        assert (options["ModelFile"], warnings) == (f"{sent.root}/tree", [])
        assert list(sent.failed) == ["tree/all.sha256"]
