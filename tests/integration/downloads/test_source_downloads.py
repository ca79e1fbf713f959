"""Loads of models whose files are at their sources: the downloads that they request, and what ends them."""

import asyncio
import itertools
import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from pytest_django import Settings

from localai_cluster.kit import cancellation, clock
from localai_cluster.kit.errors import Conflict
from localai_cluster.kit.leases import LeaseLost
from localai_cluster.kit.outbound import Outbound, SourceError
from nodes.definitions import rows
from nodes.definitions.folder import Folder
from nodes.downloads import imports
from nodes.downloads.imports import ImportModel, request_import
from nodes.loading import load, load_request, source_downloads, staging, transfer
from nodes.loading.files_in_use import paths_of_active_imports
from nodes.loading.load_attempts import LoadFailed
from nodes.models import BackendNode, ModelDefinition, NodeModel
from nodes.models.replica import load_key
from nodes.sources.plans import ImportPlan, SourceFile
from operations.api.verbs import cancel_operation
from operations.executor.work import Postpone, WakeUps, in_thread
from operations.ledger import admission, attempts
from operations.ledger.admission import OperationRequest, Requester
from operations.models import Event, Operation, Status
from tests.conftest import until
from tests.integration.downloads.test_files_at_source import (
    DATA,
    PATH,
    TEXT,
    claimed,
    definition_of,
    files_below,
    finish,
    imported,
    models,
    plan,
    run_import,
    source,
    unmounted,
)
from tests.integration.loading.test_delivery import worker
from tests.integration.loading.test_load_steps import told
from tests.support import backends, worker_http
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage
from tests.support.sources import Source, WebOpener, sha256_of

__all__ = ["loads", "models", "plan", "source", "stage", "told"]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def loading(stage: Stage, plan: ImportPlan, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A load of the imported model, whose nodes have the backend."""
    monkeypatch.setattr(transfer, "retry_delay", lambda attempts: 0.01)
    monkeypatch.setattr(source_downloads, "_POLL_SECONDS", 0.02)
    (stage.folder / "echo.yaml").unlink()
    await imported(plan)
    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
        stage.installs(node, STARTED)
    stage.handler = load.LoadModel(stage.bus, Folder(stage.folder, read_rows=rows.read_rows), WakeUps())
    await in_thread(stage.need_until)
    return stage


async def until_downloading() -> None:
    def is_active() -> bool:
        return Operation.objects.active().filter(kind=imports.KIND).exists()

    await until(lambda: in_thread(is_active))


async def loaded_while(stage: Stage, happens: Any) -> Any:
    """Run the load, and what happens once it needs a download."""
    attempt = asyncio.create_task(stage.handler(stage.work))
    try:
        await asyncio.wait(
            {attempt, waiting := asyncio.create_task(until_downloading())}, return_when="FIRST_COMPLETED"
        )
        if attempt.done():
            await attempt
        await waiting
        await happens()
        return await asyncio.wait_for(attempt, 60)
    finally:
        attempt.cancel()
        waiting.cancel()
        await asyncio.gather(attempt, waiting, return_exceptions=True)


@pytest.mark.rule("R2.56")
async def test_for_a_stock_worker_the_control_plane_downloads_and_sends(
    loading: Stage, told: list[Any], source: Source, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def download() -> None:
        assert await in_thread(paths_of_active_imports) == {PATH}, "nobody removes it meanwhile"
        (child,) = await in_thread(lambda: list(Operation.objects.active().filter(kind=imports.KIND)))
        assert child.parent_id == loading.work.id
        result = await run_import()
        assert result["message"] == "files of echo are here to be sent: 1, 195.3 KiB"

    async with worker(tmp_path_factory.mktemp("w"), loading.one) as server:
        result = await loaded_while(loading, download)
        assert server.steps == [("HEAD", 404), ("HEAD", 404), ("PUT", 200)]
        sent = server.file(f"models/echo/{PATH}")
        assert sent.read_bytes() == DATA == (models / PATH).read_bytes()
        assert told[0].ModelFile == str(sent)
    assert result["node"] == "one"
    assert (await in_thread(definition_of)).files[PATH].header is not None, "the definition stays as it was"
    assert await in_thread(lambda: ModelDefinition.objects.get().revision) == 1


@pytest.mark.rule("R2.56")
async def test_a_worker_that_has_the_file_needs_neither_source_nor_copy(
    loading: Stage, told: list[Any], source: Source, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source.stop()
    async with worker(tmp_path_factory.mktemp("w"), loading.one) as server:
        file = server.file(f"models/echo/{PATH}")
        file.parent.mkdir(parents=True)
        file.write_bytes(DATA)
        result = await loading.handler(loading.work)
        assert server.steps == [("HEAD", 200)]
    assert (result["node"], result["warnings"]) == ("one", [])
    assert files_below(models) == ["hf/o/r/config.json"]


@pytest.mark.parametrize(
    ("outcome", "error", "says"),
    [
        ("failed", Postpone, "it failed: no such file; trying another node"),
        ("cancelled", LoadFailed, "the download of hf/o/r/m.gguf to the control plane was cancelled"),
        ("waits", Postpone, "the source is busy"),
        ("queues", Postpone, "waits for one of 4 other imports"),
    ],
)
async def test_the_end_of_the_download_is_told_by_the_load(
    loading: Stage,
    outcome: str,
    error: type[Exception],
    says: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One that waits does not keep the load's place on its node."""
    running: list[asyncio.Task[Any]] = []

    async def end() -> None:
        work = await claimed()
        if outcome == "queues":
            handler = ImportModel(WebOpener())
            for _ in range(imports.AT_ONCE):
                await handler._turns.acquire()
            running.append(asyncio.create_task(handler(work)))
        elif outcome == "waits":
            await in_thread(
                lambda: attempts.put_back(
                    *work.attempt,
                    Event.POSTPONE,
                    now=clock.now(),
                    until=clock.now() + timedelta(seconds=300),
                    reason="the source is busy",
                )
            )
        else:
            event = Event.FAIL if outcome == "failed" else Event.CANCEL
            await finish(work, event, error="no such file" if outcome == "failed" else "")

    async with worker(tmp_path_factory.mktemp("w"), loading.one):
        with pytest.raises(error) as ended:
            await loaded_while(loading, end)
    assert says in str(ended.value)
    assert await in_thread(NodeModel.engines.count) == 0
    await cancellation.cancel_and_wait(*running)


@pytest.mark.rule("R2.56")
async def test_a_file_that_has_changed_at_its_source_is_downloaded_once(
    loading: Stage,
    told: list[Any],
    plan: ImportPlan,
    source: Source,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the control plane nor another node would get other bytes, nor the next request's load."""
    monkeypatch.setattr(worker_http, "ENGINE_TOKEN", backends.TOKEN)
    source.files["/m.gguf"] = DATA[:-1] + b"?"
    earlier = clock.now() - timedelta(minutes=1)
    await in_thread(lambda: ModelDefinition.objects.update(updated_at=earlier))
    requests = len(source.seen("files"))
    with worker_http.worker(fetching=worker_http.fetches(Outbound([source.host, source.storage]))) as one:
        nodes = BackendNode.objects.filter(pk__in=[loading.one.pk, loading.two.pk])
        await in_thread(lambda: nodes.update(http_address=one.address))
        with pytest.raises(
            LoadFailed, match=r"not the recorded one .*its sha256 is .*import the model again"
        ):
            await asyncio.wait_for(loading.handler(loading.work), 60)
        assert len(source.seen("files")) == requests + 1
        await finish(loading.work, Event.FAIL, error="changed", result={"code": "source_changed"})

        async def again() -> None:
            loading.handler._definitions.rows_changed()  # as a NOTIFY does
            await in_thread(loading.request_again)
            await asyncio.wait_for(loading.handler(loading.work), 60)

        with pytest.raises(LoadFailed, match=r"a load found at .*import the model again") as failed:
            await again()
        assert failed.value.code == "model_load_failed", "its own end does not count as a download"
        await finish(loading.work, Event.FAIL, error="changed", result={"code": failed.value.code})
        assert len(source.seen("files")) == requests + 1
        content = source.files["/m.gguf"]
        assert isinstance(content, bytes)
        await imported(
            replace(plan, files=(replace(plan.files[0], sha256=sha256_of(content)), plan.files[1]))
        )
        await again()
        assert await in_thread(lambda: ModelDefinition.objects.get().revision) == 1, (
            "the text is the former one"
        )
    assert not await in_thread(Operation.objects.active().filter(kind=imports.KIND).exists)
    assert files_below(models) == ["hf/o/r/config.json"]


@pytest.mark.rule("R2.56")
@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_load_waits_for_a_folder_that_is_not_mounted(
    loading: Stage,
    told: list[Any],
    models: Path,
    settings: Settings,
    is_shared: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Not for a download below the mount."""
    settings.CLUSTER = replace(settings.CLUSTER, shared_models=is_shared)
    unmounted(models)
    async with worker(tmp_path_factory.mktemp("w"), loading.one):
        with pytest.raises(Postpone, match="is it mounted"):
            await asyncio.wait_for(loading.handler(loading.work), 60)
    assert not await in_thread(Operation.objects.active().filter(kind=imports.KIND).exists)
    assert not os.listdir(models)


@pytest.mark.rule("R2.56")
@pytest.mark.parametrize("fault", ["other bytes", "longer"])
async def test_a_download_that_finds_another_file_ends_the_load(
    loading: Stage, source: Source, fault: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No further node is tried."""
    source.files["/m.gguf"] = DATA + b"?" if fault == "longer" else DATA[:-1] + b"?"

    async def download() -> None:
        work = await claimed()
        with pytest.raises(SourceError) as failed:
            await ImportModel(WebOpener())(work)
        outcome = {"error": failed.value.message, "result": {"code": failed.value.code}}
        await finish(work, Event.FAIL, **outcome)

    async with worker(tmp_path_factory.mktemp("w"), loading.one):
        with pytest.raises(LoadFailed, match=r"not the recorded one .*import the model again"):
            await loaded_while(loading, download)


@pytest.mark.rule("R2.56")
async def test_what_the_worker_loses_during_the_download_is_downloaded_too(
    loading: Stage,
    told: list[Any],
    plan: ImportPlan,
    source: Source,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Its disk was cleared, say."""
    other, data = "hf/o/r/p.gguf", DATA + b"projector"
    source.files["/p.gguf"] = data
    extra = SourceFile(other, source.url("/p.gguf"), 0, sha256_of(data))
    await imported(replace(plan, text=f"{TEXT}mmproj: {other}\n", files=(*plan.files, extra)))
    async with worker(tmp_path_factory.mktemp("w"), loading.one) as server:
        file = server.file(f"models/echo/{PATH}")
        file.parent.mkdir(parents=True)
        file.write_bytes(DATA)

        async def download() -> None:
            file.unlink()
            assert (await run_import())["bytes"] == len(data)
            await until_downloading()
            assert (await run_import())["bytes"] == len(DATA)

        result = await loaded_while(loading, download)
        assert file.read_bytes() == DATA
    assert (result["node"], result["warnings"]) == ("one", [])


async def test_a_load_waits_for_another_import_of_its_model(
    loading: Stage, plan: ImportPlan, source: Source, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = replace(plan, files=(plan.files[1],))
    await in_thread(lambda: request_import(other, by=Requester("ann"), now=clock.now()))
    async with worker(tmp_path_factory.mktemp("w"), loading.one):
        with pytest.raises(Postpone, match="model_import of echo is in progress"):
            await loading.handler(loading.work)


async def test_a_load_does_not_join_an_import_that_leaves_its_file(loading: Stage, plan: ImportPlan) -> None:
    """It would wait for the end of an import that does not download the file."""
    await in_thread(
        lambda: request_import(
            replace(plan, text=f"{TEXT}threads: 3\n"), by=Requester("ann"), now=clock.now()
        )
    )
    definition = await in_thread(definition_of)
    stated = replace(definition.files[PATH], size=0)
    definition = replace(definition, files={PATH: stated})
    operation, now = loading.work.operation, clock.now()
    with pytest.raises(Conflict):
        await in_thread(
            lambda: source_downloads.request_download(definition, [PATH], parent=operation, now=now)
        )


async def test_an_import_while_a_load_downloads_is_a_conflict(loading: Stage, plan: ImportPlan) -> None:
    definition = await in_thread(definition_of)

    def request() -> Operation:
        now = clock.now()
        return source_downloads.request_download(definition, [PATH], parent=loading.work.operation, now=now)

    first = await in_thread(request)
    assert (await in_thread(request)).id == first.id, "loads share it"
    with pytest.raises(Conflict):
        await in_thread(lambda: request_import(plan, by=Requester("ann"), now=clock.now()))


def loads_and_their_download(stage: Stage, count: int) -> tuple[list[Operation], Operation]:
    """Several active loads of the model, and the download that the first one has requested."""
    loads, now = [stage.work.operation], clock.now()
    for _ in range(count - 1):
        request = OperationRequest(
            load_request.KIND, key=load_key("echo"), element="echo", by=Requester("scaling"), joins=False
        )
        admission.admit(request, now=now)
    loads += attempts.claim("c", now=now, lease=60, limit=count)
    definition = definition_of()
    downloads = [source_downloads.request_download(definition, [PATH], parent=one, now=now) for one in loads]
    assert len({download.id for download in downloads}) == 1, "they share it"
    return loads, downloads[0]


async def test_the_last_load_that_is_cancelled_cancels_the_download(loading: Stage, plan: ImportPlan) -> None:
    """While another load waits for it, it goes on; afterwards the model can be imported again."""

    def check() -> None:
        (first, second), download = loads_and_their_download(loading, 2)
        cancel_operation(first, actor="ann")
        download.refresh_from_db()
        assert download.status == Status.PENDING
        attempt = attempts.claim("c", now=clock.now(), lease=60, limit=9)
        assert download.id in {operation.id for operation in attempt}
        assert cancel_operation(second, actor="ann").status == Status.CANCELLED
        download.refresh_from_db()
        assert (download.status, download.message) == (Status.CANCELLED, "cancelled by ann")
        request_import(plan, by=Requester("ann"), now=clock.now())
        with pytest.raises(Conflict, match="cancelled already"):
            cancel_operation(second, actor="ann")

    await in_thread(check)


class Killed(Exception):
    """The process of the caller ends before a statement."""


def kill_before(statement: int) -> Any:
    """Let `statement` statements pass."""
    passed = itertools.count()

    def wrapper(execute: Any, sql: Any, *args: Any) -> Any:
        if next(passed) == statement:
            raise Killed
        return execute(sql, *args)

    return connection.execute_wrapper(wrapper)


async def test_a_kill_between_any_two_statements_cancels_neither_load_nor_download(loading: Stage) -> None:
    """Nothing has been accepted then, both have their owners, and the next cancel ends both."""

    def check() -> None:
        (load,), download = loads_and_their_download(loading, 1)
        for statement in itertools.count():
            try:
                with kill_before(statement):
                    cancel_operation(load, actor="ann")
            except Killed:
                assert Operation.objects.active().filter(pk__in=[load.id, download.id]).count() == 2
            else:
                break
        assert statement > 10, "each cancel locks, writes, audits and takes its number"
        for operation in (load, download):
            operation.refresh_from_db()
            assert operation.status == Status.CANCELLED

    await in_thread(check)


async def test_a_kill_between_any_two_statements_leaves_no_download_without_its_load(loading: Stage) -> None:
    """The next attempt requests the same download."""

    def check() -> None:
        definition, load = definition_of(), loading.work.operation
        for statement in itertools.count():
            try:
                with kill_before(statement):
                    download = source_downloads.request_download(
                        definition, [PATH], parent=load, now=clock.now()
                    )
            except Killed:
                assert not Operation.objects.filter(kind=imports.KIND, payload__files_only=True).exists()
            else:
                break
        assert download.parent_id == load.id

    await in_thread(check)


async def test_a_load_that_has_been_cancelled_requests_no_download(loading: Stage) -> None:
    """Its controller has not noticed yet."""

    def check() -> None:
        definition, load = definition_of(), loading.work.operation
        cancel_operation(load, actor="ann")
        with pytest.raises(LeaseLost):
            source_downloads.request_download(definition, [PATH], parent=load, now=clock.now())
        assert not Operation.objects.active().exists()

    await in_thread(check)


async def test_loads_that_are_cancelled_at_once_leave_no_download(loading: Stage) -> None:
    loads, download = await in_thread(loads_and_their_download, loading, 4)
    await asyncio.gather(*(in_thread(cancel_operation, one, actor="ann") for one in loads))
    await in_thread(download.refresh_from_db)
    assert download.status == Status.CANCELLED


async def test_a_cancelled_load_leaves_imports_that_people_have_requested(
    loading: Stage, plan: ImportPlan
) -> None:
    def check() -> None:
        other = replace(plan, files=(plan.files[1],))
        requested = request_import(other, by=Requester("ann"), now=clock.now()).operation
        cancel_operation(loading.work.operation, actor="ann")
        requested.refresh_from_db()
        assert requested.status == Status.PENDING

    await in_thread(check)


async def test_on_a_shared_folder_the_control_plane_downloads(
    loading: Stage, told: list[Any], models: Path, settings: Settings
) -> None:
    settings.CLUSTER = replace(settings.CLUSTER, shared_models=True)
    await loaded_while(loading, run_import)
    assert (models / PATH).read_bytes() == DATA
    assert told[0].ModelFile == str(models / PATH)


async def test_a_load_on_a_shared_folder_that_hangs_is_tried_again(
    loading: Stage, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C37: it costs a load ten seconds."""
    settings.CLUSTER = replace(settings.CLUSTER, shared_models=True)
    hangs = threading.Event()
    monkeypatch.setattr(staging, "files_at_source", lambda *_: hangs.wait(60))
    monkeypatch.setattr(staging, "_PLAN_TIMEOUT", 0.01)
    try:
        with pytest.raises(Postpone, match="does not answer"):
            await asyncio.wait_for(loading.handler(loading.work), 30)
    finally:
        hangs.set()
