"""Files that a worker fetches from their source itself; what it cannot fetch is sent within the same load."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.kit.outbound import Outbound
from localai_cluster.worker import download
from nodes.definitions import rows, store
from nodes.definitions.files import Definition, parse_file
from nodes.definitions.recorded_files import FileSource, RecordedFile, sources_for_worker
from nodes.loading import staging, transfer, worker_fetch
from nodes.loading.source_files import plan_files
from nodes.loading.staging import ModelTransfer, StagingResult, TransferLimits
from nodes.loading.transfer import UploadMeter
from nodes.loading.worker_fetch import FetchFailed
from nodes.models import BackendNode, UnreachedSource
from nodes.registry.dial_targets import Contact, HttpServer, client_of
from operations.executor.work import in_thread
from operations.ledger.progress import Tick
from tests.integration.loading.test_delivery import files
from tests.integration.loading.test_load_steps import told
from tests.support import backends, hot, worker_http
from tests.support.file_server import file_server
from tests.support.loading import Stage, loads, stage
from tests.support.sources import Refusal, Source, started

__all__ = ["files", "loads", "stage", "told"]
pytestmark = pytest.mark.django_db(transaction=True)
DATA = os.urandom(3_000_000)
DIGEST = hashlib.sha256(DATA).hexdigest()
TEXT = "name: m\nbackend: llama-cpp\nparameters: {model: a.gguf}\n"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    monkeypatch.setattr(download, "RETRY_PAUSES", ())
    monkeypatch.setattr(transfer, "retry_delay", lambda attempts: 0.02)
    with started(files={"/a.gguf": DATA}) as source:
        yield source


@pytest.fixture
def worker(source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(worker_http, "ENGINE_TOKEN", backends.TOKEN)
    fetching = worker_http.fetches(Outbound([source.host, source.storage]))
    with worker_http.worker(fetching=fetching) as one:
        yield one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    models.mkdir()
    (models / "a.gguf").write_bytes(DATA)
    return models


async def deliver(
    folder: Path,
    address: str,
    file: FileSource,
    token: str = backends.TOKEN,
    *,
    node_id: UUID | None = None,
    unreached: dict[str, datetime] | None = None,
    limits: TransferLimits | None = None,
) -> tuple[StagingResult, UploadMeter]:
    planned = plan_files(folder, "m", {"Model": "a.gguf"})
    meter = UploadMeter({"a.gguf": planned.files["a.gguf"].size}, "gpu")
    server = HttpServer("gpu", "healthy", Contact(address, token))
    async with client_of(server) as client:
        sending = ModelTransfer(
            "m",
            planned,
            client,
            node_id or uuid4(),
            limits or TransferLimits(),
            meter,
            sources={"a.gguf": file},
        )
        sending.unreached |= unreached or {}
        await sending.check()
        return await sending.send(), meter


def there_at(worker: Any) -> Path:
    return Path(worker.home.name, "models", "m", "a.gguf")


def there(worker: Any) -> bytes:
    return there_at(worker).read_bytes()


async def test_the_worker_fetches_the_file_and_nothing_is_sent(
    folder: Path, worker: Any, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_upload(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is sent")

    monkeypatch.setattr(transfer.Transfer, "_put", no_upload)
    result, meter = await deliver(folder, worker.address, FileSource(source.url("/a.gguf"), DIGEST))
    assert result == StagingResult(str(Path(worker.home.name, "models", "m")), {}, [])
    assert there(worker) == DATA
    assert meter.current == meter.total == len(DATA)
    assert len(source.seen("files")) == 1
    await deliver(folder, worker.address, FileSource(source.url("/a.gguf"), DIGEST))
    assert len(source.seen("files")) == 1, "what is there is neither fetched nor sent"


async def test_a_file_that_the_worker_fetches_waits_for_no_file_that_is_sent(
    folder: Path, worker: Any, source: Source
) -> None:
    limits, file = TransferLimits(), FileSource(source.url("/a.gguf"), DIGEST)
    limits.all = asyncio.Semaphore(0)
    result, _ = await asyncio.wait_for(deliver(folder, worker.address, file, limits=limits), 60)
    assert (there(worker), result.sent_instead) == (DATA, [])


async def test_what_the_source_refuses_to_the_worker_is_sent_with_the_reason(
    folder: Path, worker: Any, source: Source
) -> None:
    source.tokens = {"/": "Bearer of-the-control-plane"}
    result, meter = await deliver(
        folder, worker.address, FileSource(source.url("/a.gguf?key=s3cret"), DIGEST)
    )
    assert there(worker) == DATA
    (sentence,) = result.sent_instead
    assert sentence.startswith("gpu did not download a.gguf, so it is sent: ")
    assert "Access is restricted" in sentence
    assert "s3cret" not in sentence
    assert meter.current == meter.total


@pytest.mark.parametrize("broken", ["private", "hash", "length", "gone"])
async def test_every_failure_of_a_fetch_ends_with_the_file_there(
    folder: Path, worker: Any, source: Source, broken: str
) -> None:
    url = source.url("/a.gguf")
    if broken == "private":
        url = f"http://localhost:{source.host.rpartition(':')[2]}/a.gguf"
    elif broken == "gone":
        source.refusals = [Refusal(404)]
    else:
        source.files["/a.gguf"] = DATA[::-1] if broken == "hash" else DATA + b"more"
    result, _ = await deliver(folder, worker.address, FileSource(url, DIGEST))
    assert len(result.sent_instead) == 1
    assert there(worker) == DATA


async def test_a_stock_worker_is_asked_for_nothing_new(folder: Path, source: Source, tmp_path: Path) -> None:
    async with file_server(tmp_path / "w") as server:
        file = FileSource(source.url("/a.gguf"), DIGEST)
        result, _ = await deliver(folder, server.address, file, server.token)
        assert server.steps == [("HEAD", 404), ("PUT", 200)]
    assert result.sent_instead == []
    assert not source.requests


async def test_a_file_that_was_changed_here_is_sent(folder: Path, worker: Any, source: Source) -> None:
    (folder / "a.gguf").write_bytes(b"other")
    result, _ = await deliver(folder, worker.address, FileSource(source.url("/a.gguf"), DIGEST))
    assert there(worker) == b"other"
    assert result.sent_instead == []
    assert not source.requests


def answer(*lines: object, status: int = 200) -> httpx.AsyncClient:
    """A worker that answers with these lines."""
    body = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, stream=httpx.ByteStream(body)))
    return httpx.AsyncClient(transport=transport, base_url="http://worker")


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        ((), 200, "ended the answer early"),
        (({"bytes": 1, "total": 9},), 200, "ended the answer early"),
        ((b"[]\n",), 200, "no progress"),
        ((b'{"bytes": "1"}\n',), 200, "no progress"),
        ((b'{"bytes": 1e99}\n',), 200, "no progress"),
        ((b"\xff\n",), 200, "no progress"),
        ((b"[" * 9000 + b"\n",), 200, "no progress"),
        ((b"x" * 20_000,), 200, "too long"),
        (({"error": "bad\x00\n https://h/x?sig=s3cret ends"},), 200, "https://h/x ends"),
        (({"error": "long " * 1000},), 200, "long long"),
        ((b"no",), 404, "its worker refused: no"),
        ((b"size: 1 to 9 bytes are fetched\n",), 400, "its worker refused: size: 1 to 9 bytes are fetched"),
        ((b"x" * 100_000,), 500, "its worker refused: xxx"),
    ],
)
async def test_hostile_answers_are_failures_in_short_words(
    lines: tuple[Any, ...], status: int, says: str
) -> None:
    async with answer(*lines, status=status) as client:
        with pytest.raises(FetchFailed) as failed:
            await worker_fetch.fetch(
                client, "models/m/a", FileSource("https://h/a", DIGEST), 9, lambda position: None
            )
    text = str(failed.value)
    assert says in text
    assert "s3cret" not in text
    assert "\x00" not in text
    assert len(text) < 400


async def test_positions_only_grow_and_stay_within_the_file() -> None:
    seen: list[int] = []
    lines = [{"bytes": count, "total": 9} for count in (-5, 0, 3, 2, 3, 99, 9)]
    async with answer(*lines, {"local_path": "/x"}) as client:
        file = FileSource("https://h/a", DIGEST)
        assert await worker_fetch.fetch(client, "models/m/a", file, 9, seen.append) == "/x"
    assert seen == [3, 9]


class Silence(httpx.AsyncByteStream):
    """One line, and then nothing."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'{"bytes": 1}\n'
        await asyncio.Event().wait()


async def test_a_worker_without_a_further_byte_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_fetch, "STALL_SECONDS", 0.01)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Silence()))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        with pytest.raises(FetchFailed, match="no further byte"):
            await worker_fetch.fetch(
                client, "models/m/a", FileSource("https://h/a", DIGEST), 9, lambda position: None
            )


class Turn(httpx.AsyncByteStream):
    """The worker downloads other files for these minutes, and then this one."""

    def __init__(self, minutes: int) -> None:
        self._minutes = minutes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(2 * self._minutes):
            yield b'{"bytes": 0, "waiting": true}\n'
            await asyncio.sleep(30)
        yield b'{"local_path": "/x"}\n'


async def after_others(minutes: int) -> str:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Turn(minutes)))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        file = FileSource("https://h/a", DIGEST)
        return await worker_fetch.fetch(client, "models/m/a", file, 9, lambda position: None)


@pytest.mark.looptime
async def test_a_worker_that_downloads_other_files_first_is_waited_for_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = asyncio.get_running_loop()
    monkeypatch.setattr(clock, "monotonic", running.time)
    assert await after_others(minutes=55) == "/x"
    with pytest.raises(FetchFailed, match="no further byte"):
        await after_others(minutes=65)


@pytest.mark.parametrize(
    ("setting", "stated", "count"),
    [
        ("worker", "", 1),
        ("control-plane", "", 0),
        ("control-plane", "worker", 1),
        ("worker", "control-plane", 0),
    ],
)
def test_the_definition_decides_and_else_the_setting(
    settings: Settings, setting: str, stated: str, count: int
) -> None:
    """No query. Files of other kinds of addresses are sent."""
    settings.CLUSTER = replace(settings.CLUSTER, download_on=setting)
    text = TEXT + (f"download_on: {stated}\n" if stated else "")
    entries = [
        {"path": "a.gguf", "size": 9, "sha256": DIGEST, "source": "hf://o/r@0a/a.gguf"},
        {"path": "b.gguf", "size": 9, "sha256": DIGEST, "source": "s3://b/b.gguf"},
    ]
    row = store.save(None, text, origin="import", actor="ann", now=clock.now(), files=entries)
    definition = rows.stored_definition(row).content
    assert isinstance(definition, Definition)
    with CaptureQueriesContext(connection) as queries:
        sources = sources_for_worker(definition.files, definition.download_on)
    assert len(queries) == 0
    assert sources == ({"a.gguf": FileSource("hf://o/r@0a/a.gguf", DIGEST)} if count else {})
    of_folder = parse_file(text.encode(), "m.yaml")
    assert sources_for_worker(of_folder.files, of_folder.download_on) == {}, "a file of the models folder"


@pytest.mark.parametrize("failures", [1, 2])
async def test_an_unreached_source_is_noted_and_not_tried_again_for_a_while(
    folder: Path, worker: Any, source: Source, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by another controller; the file still arrives."""
    node = await in_thread(hot.node, "gpu")
    monkeypatch.setattr(download, "RETRY_PAUSES", (3600.0,))
    file = FileSource(source.url("/a.gguf"), DIGEST)
    source.stop()
    for _ in range(failures):
        result, _ = await deliver(folder, worker.address, file, node_id=node.id)
        assert "connection lost" in result.sent_instead[0]
        await in_thread(lambda: there_at(worker).unlink())
    (row,) = await in_thread(lambda: list(UnreachedSource.objects.all()))
    assert (row.node_id, row.host) == (node.id, source.host)

    unreached = await in_thread(worker_fetch.unreached_hosts, node.id, now=row.seen_at)
    monkeypatch.setattr(worker_fetch, "fetch", None)  # whoever calls it fails
    result, meter = await deliver(folder, worker.address, file, node_id=node.id, unreached=unreached)
    until = row.seen_at + worker_fetch.UNREACHED_LIFETIME
    assert f"did not reach {source.host} at" in result.sent_instead[0]
    assert f"tries again from {until:%H:%M}" in result.sent_instead[0]
    assert there(worker) == DATA
    assert meter.current == meter.total


def test_the_note_of_an_unreached_source_expires() -> None:
    """One query reads the notes of a node; a new one removes those that have expired."""
    one, two, now = hot.node("one"), hot.node("two"), clock.now()
    worker_fetch.record_unreached(one.id, "h:443", now=now)
    worker_fetch.record_unreached(two.id, "i:443", now=now)
    with CaptureQueriesContext(connection) as queries:
        assert worker_fetch.unreached_hosts(one.id, now=now) == {"h:443": now}
    assert len(queries) == 1
    later = now + worker_fetch.UNREACHED_LIFETIME
    assert worker_fetch.unreached_hosts(one.id, now=later) == {}
    worker_fetch.record_unreached(one.id, "j:443", now=later)
    assert [row.host for row in UnreachedSource.objects.all()] == ["j:443"]
    worker_fetch.record_unreached(uuid4(), "j:443", now=later)  # its node has been removed
    assert UnreachedSource.objects.count() == 1


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://h.example/a?key=s3cret", "h.example:443"),
        ("http://h.example:81/a", "h.example:81"),
        ("hf://o/r@0a/a.gguf", "Hugging Face"),
        ("https://" + "h" * 900, "h" * 255),
    ],
)
def test_a_source_is_noted_by_its_host(url: str, host: str) -> None:
    assert FileSource(url, DIGEST).host == host


@pytest.mark.rule("R2.56")
@pytest.mark.parametrize("is_noted", [False, True])
async def test_a_load_tries_a_source_that_its_node_does_not_reach_once(
    stage: Stage,
    files: Path,
    told: list[Any],
    worker: Any,
    source: Source,
    is_noted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file that comes next in the same load is sent at once; all of them if the host was noted before."""
    monkeypatch.setattr(download, "RETRY_PAUSES", (3600.0,))
    monkeypatch.setattr(staging, "MAX_TRANSFERS_PER_NODE", 1)
    source.stop()
    sources = {
        path: FileSource(source.url("/x"), hashlib.sha256((files / path).read_bytes()).hexdigest())
        for path in ("sub/a.gguf", "proj.bin")
    }
    monkeypatch.setattr(staging, "sources_for_worker", lambda *_: sources)
    if is_noted:
        await in_thread(worker_fetch.record_unreached, stage.one.id, source.host, now=clock.now())
    await in_thread(lambda: BackendNode.objects.filter(pk=stage.one.pk).update(http_address=worker.address))
    result = await stage.handler(stage.work)
    sentences = [text for text in result["warnings"] if f"did not reach {source.host}" in text]
    assert len(sentences) == 1 + is_noted
    assert any("connection lost" in text for text in result["warnings"]) is not is_noted
    assert result["node"] == "one"


@pytest.mark.rule("R2.56")
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_load_reports_what_was_sent_instead(
    stage: Stage,
    files: Path,
    told: list[Any],
    worker: Any,
    source: Source,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = (files / "sub" / "a.gguf").read_bytes()
    source.files["/a.gguf"] = content
    source.tokens = {"/": "Bearer another"} if is_refused else {}
    file = FileSource(source.url("/a.gguf"), hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(staging, "sources_for_worker", lambda *_: {"sub/a.gguf": file})
    await in_thread(lambda: BackendNode.objects.filter(pk=stage.one.pk).update(http_address=worker.address))
    messages: list[str] = []
    recorder = stage.work.recorder
    add: Callable[..., None] = recorder.add

    def kept(attempt: Any, ticks: list[Tick]) -> None:
        messages.extend(tick.message for tick in ticks)
        add(attempt, ticks)

    monkeypatch.setattr(recorder, "add", kept)
    result = await stage.handler(stage.work)
    home = Path(worker.home.name, "models", "echo")
    assert (home / "sub" / "a.gguf").read_bytes() == content
    assert told[0].ModelFile == str(home / "sub" / "a.gguf")
    sentences = [text for text in result["warnings"] if "did not download sub/a.gguf" in text]
    assert len(sentences) == is_refused
    assert [text for text in messages if "so it is sent" in text] == sentences
    assert result["node"] == "one"


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_worker_that_is_lost_while_it_fetches_is_no_reason_to_download_here(
    tmp_path: Path, worker: Any, source: Source, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file that is at its source: the load takes another node, or the worker goes on."""
    calls: list[str] = []
    fetch = worker_fetch.fetch

    async def lost(client: Any, key: str, *arguments: Any) -> str:
        calls.append(key)
        if comes_back and len(calls) > 1:
            return await fetch(client, key, *arguments)
        if not comes_back:
            monkeypatch.setattr(transfer.Transfer, "_head", unanswered)
        raise FetchFailed("the connection to its worker was lost", lost_worker=True)

    async def unanswered(self: Any) -> Any:
        raise transfer.Unreachable("refused")

    monkeypatch.setattr(worker_fetch, "fetch", lost)
    record = RecordedFile("a.gguf", source.url("/a.gguf"), len(DATA), DIGEST)
    planned = plan_files(tmp_path, "m", {"Model": "a.gguf"}, {"a.gguf": record})
    meter = UploadMeter({"a.gguf": len(DATA)}, "gpu")
    async with client_of(HttpServer("gpu", "healthy", Contact(worker.address, backends.TOKEN))) as client:
        file = FileSource(record.source, DIGEST)
        sending = ModelTransfer(
            "m", planned, client, uuid4(), TransferLimits(), meter, sources={"a.gguf": file}
        )
        await sending.check()
        if comes_back:
            assert (await sending.send()).sent_instead == []
            assert there(worker) == DATA
        else:
            with pytest.raises(transfer.Unreachable):
                await sending.send()
    assert len(calls) == 1 + comes_back
