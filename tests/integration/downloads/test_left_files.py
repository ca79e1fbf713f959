"""The policy `worker`: files that an import leaves at their sources, and loads that need them here."""

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.kit import cancellation, clock
from localai_cluster.kit.errors import Conflict
from localai_cluster.kit.leases import LeaseLost
from localai_cluster.kit.outbound import Outbound, SourceBody, SourceError
from nodes.api import definition_entries
from nodes.definitions import rows, sizes, store
from nodes.definitions.files import Definition
from nodes.definitions.folder import Folder
from nodes.definitions.recorded_files import LACKS_MARKER, MARKER, FileConflict, mark_folder
from nodes.downloads import imports, left_files
from nodes.downloads.imports import ImportModel, request_import
from nodes.loading import files_in_use, load, load_request, source_downloads, staging, transfer
from nodes.loading.files_in_use import paths_of_active_imports
from nodes.loading.load_attempts import LoadFailed
from nodes.loading.load_request import estimate_need
from nodes.loading.source_files import plan_files
from nodes.models import BackendNode, ModelDefinition, NodeModel
from nodes.models.replica import load_key
from nodes.sources import probing
from nodes.sources.plans import ImportPlan, SourceFile
from operations.api.verbs import cancel_operation
from operations.executor.work import Postpone, Recorder, WakeUps, Work, in_thread, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import OperationRequest, Requester
from operations.models import Event, Operation, Status
from tests.integration.loading.test_delivery import worker
from tests.integration.loading.test_load_steps import told
from tests.support import backends, hub, worker_http
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage
from tests.support.sources import LFS_POINTER, Source, WebOpener, sha256_of, started

__all__ = ["loads", "stage", "told"]
pytestmark = pytest.mark.django_db(transaction=True)

DATA = hub.gguf(200_000)
PATH = "hf/o/r/m.gguf"
TEXT = f"name: echo\nbackend: echo\nparameters:\n  model: {PATH}\n"


@pytest.fixture
def source() -> Iterator[Source]:
    with started(files={"/m.gguf": DATA, "/config.json": b"{}"}) as source:
        yield source


@pytest.fixture(autouse=True)
def models(tmp_path: Path, settings: Settings) -> Path:
    """The models folder; it is that of `stage` too."""
    settings.CLUSTER = replace(settings.CLUSTER, models_path=tmp_path, download_on="worker")
    return tmp_path


@pytest.fixture
def plan(source: Source) -> ImportPlan:
    files = (
        SourceFile(PATH, source.url("/m.gguf"), 0, sha256_of(DATA)),
        SourceFile("hf/o/r/config.json", source.url("/config.json"), 2, sha256_of(b"{}")),
    )
    return ImportPlan("echo", TEXT, files, "import", "the hub")


async def claimed() -> Work:
    (operation,) = await in_thread(lambda: attempts.claim("c", now=clock.now(), lease=60, limit=1))
    return Work(operation, Recorder(write_batch))


class SilentOpener(WebOpener):
    """Reads from a source that says neither how long a file is nor that it knows ranges."""

    @asynccontextmanager
    async def open(
        self, file: SourceFile, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[SourceBody]:
        async with super().open(file) as body:
            yield replace(body, offset=0, total=0, has_ranges=False)


async def run_import(opener: WebOpener | None = None) -> Any:
    """Run the import that is due to its end, as a controller does."""
    work = await claimed()
    assert work.operation.kind == imports.KIND
    result = await ImportModel(opener or WebOpener())(work)
    await finish(work, Event.COMPLETE, result=result)
    return result


async def finish(work: Work, event: Event, **outcome: Any) -> None:
    await in_thread(lambda: attempts.finish(*work.attempt, event, now=clock.now(), **outcome))


async def imported(plan: ImportPlan, opener: WebOpener | None = None) -> Any:
    await in_thread(lambda: request_import(plan, by=Requester("ann"), now=clock.now()))
    return await run_import(opener)


def definition_of(name: str = "echo") -> Definition:
    row = store.find(name)
    assert row is not None
    content = rows.stored_definition(row).content
    assert isinstance(content, Definition)
    return content


def files_below(folder: Path) -> list[str]:
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [path for path in paths if path != MARKER]


async def test_the_weights_stay_and_are_measured_by_their_record(
    plan: ImportPlan, source: Source, models: Path
) -> None:
    """R2.40: placement has the size and the figures of the header, as with the file itself."""
    result = await imported(plan)
    assert result["message"] == "model echo is defined; workers download 195.3 KiB in 1 file"
    assert (result["files"], result["bytes"]) == (1, 2)
    assert files_below(models) == ["hf/o/r/config.json"]
    ranges = [request.range for request in source.seen("storage") if request.path == "/m.gguf"]
    assert ranges == [f"bytes=0-{2**20 - 1}"]
    definition = await in_thread(definition_of)
    record = definition.files[PATH]
    assert (record.size, record.sha256, record.source) == (len(DATA), sha256_of(DATA), source.url("/m.gguf"))
    left = sizes.measure(models, definition)
    (models / PATH).write_bytes(DATA)
    here = sizes.measure(models, definition)
    assert (left.weights, left.payload) == (here.weights, here.payload) == (len(DATA), len(DATA))
    assert left.header is not None
    assert here.header is not None
    assert (left.header.architecture, left.header.figures) == (here.header.architecture, here.header.figures)
    assert estimate_need(definition, left) == estimate_need(definition, here)


@pytest.mark.parametrize(
    ("vocabulary", "template", "has_tools", "is_cut"),
    [
        (3, "{% if tools %}{{ tools }}{% endif %}", True, False),
        (3, "{{ messages }}", False, False),
        (80_000, "{% if tools %}{{ tools }}{% endif %}", True, False),
        (80_000, "{{ messages }}", False, False),
        (80_000, "{% if tools %}{{ tools }}{% endif %}", False, True),
    ],
)
async def test_the_template_of_a_file_at_its_source_is_known(
    plan: ImportPlan,
    source: Source,
    models: Path,
    vocabulary: int,
    template: str,
    has_tools: bool,
    is_cut: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C3: clients send tools by it. A source that does not send so much is no obstacle to the import."""
    data = hub.gguf(2**21, vocabulary=vocabulary, template=template)
    source.files["/m.gguf"] = data
    if is_cut:
        read_start = probing.read_start

        async def cut(opener: Any, file: SourceFile, length: int) -> tuple[bytes, int]:
            if length == probing.TABLE_BYTES:
                raise SourceError("no answer within 20 s", can_retry=True)
            return await read_start(opener, file, length)

        monkeypatch.setattr(probing, "read_start", cut)
    await imported(replace(plan, files=(replace(plan.files[0], sha256=sha256_of(data)), plan.files[1])))
    reads = [request for request in source.seen("storage") if request.path == "/m.gguf"]
    assert len(reads) == (2 if vocabulary > 3 and not is_cut else 1), "more is read only for the template"
    definition = await in_thread(definition_of)
    assert await Folder(models).has_tools(definition) is has_tools
    if not is_cut:
        (models / PATH).write_bytes(data)
        assert await Folder(models).has_tools(definition) is has_tools, "as with the file itself"


async def test_a_file_that_is_here_already_is_used(plan: ImportPlan, source: Source, models: Path) -> None:
    (models / "hf/o/r").mkdir(parents=True)
    (models / PATH).write_bytes(DATA)
    result = await imported(plan)
    assert result["bytes"] == len(DATA) + 2
    assert not [request for request in source.requests if request.path == "/m.gguf"]


async def test_a_file_whose_size_its_source_does_not_say_is_fetched(
    plan: ImportPlan, source: Source, models: Path
) -> None:
    """Nothing else tells its size to placement."""
    source.ranges = False
    result = await imported(plan, SilentOpener())
    assert result["bytes"] == len(DATA) + 2
    assert (models / PATH).read_bytes() == DATA


async def test_a_header_that_a_row_cannot_have_is_left_out(plan: ImportPlan, source: Source) -> None:
    """PostgreSQL stores no NUL, and the source chooses the keys of a header."""
    data = DATA.replace(b"context_length", b"context_lengt\0", 1)
    source.files["/m.gguf"] = data
    await imported(replace(plan, files=(replace(plan.files[0], sha256=sha256_of(data)), plan.files[1])))
    assert (await in_thread(definition_of)).files[PATH].size == len(data)


@pytest.mark.parametrize(
    ("policy", "stated", "shared", "count"),
    [
        ("worker", "", False, 1),
        ("control-plane", "worker", False, 1),
        ("worker", "control-plane", False, 0),
        ("control-plane", "", False, 0),
        ("worker", "", True, 0),
    ],
)
def test_the_policy_decides(
    plan: ImportPlan, settings: Settings, policy: str, stated: str, shared: bool, count: int
) -> None:
    settings.CLUSTER = replace(settings.CLUSTER, download_on=policy, shared_models=shared)
    plan = replace(plan, text=TEXT + (f"download_on: {stated}\n" if stated else ""))
    assert len(left_files.choose(plan, settings.CLUSTER)) == count


@pytest.mark.parametrize(
    ("url", "sha256", "path", "stays"),
    [
        ("https://h/m.gguf", "a" * 64, PATH, True),
        (f"hf://o/r@{'0' * 40}/m.gguf", "a" * 64, PATH, True),
        ("hf://o/r@main/m.gguf", "a" * 64, PATH, False),
        ("https://h/m.gguf", "", PATH, False),
        ("s3://b/m.gguf", "a" * 64, PATH, False),
        (f"oci://h/r@sha256:{'a' * 64}", "a" * 64, PATH, False),
        ("share://nas/m.gguf", "a" * 64, PATH, False),
        ("https://h/config.json", "a" * 64, "hf/o/r/config.json", False),
    ],
)
def test_only_what_workers_fetch_for_good_and_can_verify_stays(
    plan: ImportPlan, settings: Settings, url: str, sha256: str, path: str, stays: bool
) -> None:
    file = SourceFile(path, url, 9, sha256)
    assert left_files.choose(replace(plan, files=(file,)), settings.CLUSTER) == ([file] if stays else [])


@pytest.mark.parametrize("fault", ["gone", "longer", "pointer"])
async def test_what_the_source_does_not_have_is_refused_at_the_import(
    plan: ImportPlan, source: Source, fault: str
) -> None:
    size = len(DATA)
    if fault == "gone":
        del source.files["/m.gguf"]
    elif fault == "longer":
        size += 1
    else:
        source.files["/m.gguf"] = LFS_POINTER % (sha256_of(DATA).encode(), size)
        size = 0
    files = (replace(plan.files[0], size=size), plan.files[1])
    with pytest.raises(SourceError, match=r"m\.gguf|not found"):
        await imported(replace(plan, files=files))
    assert not await in_thread(ModelDefinition.objects.exists)


@pytest.mark.parametrize(
    ("saved_meanwhile", "settings_of_plan"), [(False, ""), (True, ""), (True, "download_on: control-plane\n")]
)
async def test_one_path_never_has_two_files(
    plan: ImportPlan,
    source: Source,
    saved_meanwhile: bool,
    settings_of_plan: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the control plane would send one model's file as the other's, once it has downloaded it."""
    plan = replace(plan, text=TEXT + settings_of_plan)
    source.files["/other.gguf"] = DATA + b"other"
    entry = SourceFile(PATH, source.url("/other.gguf"), len(DATA) + 5, sha256_of(DATA + b"other"))
    other = replace(plan, name="other", text=TEXT.replace("echo", "other", 1), files=(entry,))
    await imported(other)
    if saved_meanwhile:
        monkeypatch.setattr(left_files, "check_conflicts", lambda *_: None)
    with pytest.raises(FileConflict, match="model other has another file"):
        await imported(plan)
    assert await in_thread(store.find, "echo") is None


async def test_a_copy_takes_the_records_over(plan: ImportPlan, models: Path) -> None:
    """A clone and a definition made by hand can be loaded too, also after the first one is gone."""
    await imported(plan)
    text = TEXT.replace("echo", "copy", 1)

    def copied() -> Definition:
        store.save(None, text, origin="api", actor="ann", now=clock.now())
        return definition_of("copy")

    copy = await in_thread(copied)
    assert copy.files.keys() == {PATH}
    row = await in_thread(store.find, "echo")
    assert row is not None
    await in_thread(lambda: store.remove("echo", id=row.id, now=clock.now()))
    planned = plan_files(models, "copy", copy.options, copy.files)
    assert (planned.at_source, planned.files[PATH].size) == ([PATH], len(DATA))


async def test_a_model_that_was_deleted_and_is_saved_again_has_its_source(plan: ImportPlan) -> None:
    await imported(plan)

    def again() -> Definition:
        row = store.find("echo")
        assert row is not None
        store.remove("echo", id=row.id, now=clock.now())
        store.save(None, TEXT, origin="api", actor="ann", now=clock.now())
        return definition_of("echo")

    assert (await in_thread(again)).files.keys() == {PATH}


async def test_pages_say_where_the_file_lies(plan: ImportPlan, source: Source, models: Path) -> None:
    """Without what follows the path of an address, which may be a key."""
    url = source.url("/m.gguf?key=s3cret")
    await imported(replace(plan, files=(replace(plan.files[0], url=url), plan.files[1])))
    detail = await in_thread(definition_entries.detail_of, "echo")
    file = {"path": PATH, "size": len(DATA), "present": False, "source": source.url("/m.gguf")}
    assert (detail["size"], detail["files"]) == (len(DATA), [file])
    (models / PATH).write_bytes(DATA)
    detail = await in_thread(definition_entries.detail_of, "echo")
    assert detail["files"] == [{**file, "present": True, "source": ""}]


async def test_a_page_does_not_wait_for_a_folder_that_hangs(
    plan: ImportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    await imported(plan)
    hangs = threading.Event()
    monkeypatch.setattr(definition_entries, "files_at_source", lambda *_: hangs.wait(60))
    monkeypatch.setattr(files_in_use, "ANSWER_WITHIN", 0.01)
    try:
        detail = await in_thread(definition_entries.detail_of, "echo")
    finally:
        hangs.set()
    assert detail["size"] == len(DATA)


def unmounted(models: Path) -> None:
    """The folder as it is below its mount."""
    shutil.rmtree(models)
    models.mkdir()


async def test_a_folder_that_is_not_mounted_gets_no_download(plan: ImportPlan, models: Path) -> None:
    """Neither is a file counted as deleted; the import goes on when the folder is back."""
    await imported(plan)
    assert await in_thread(lambda: definition_of().files[PATH].is_marked)
    unmounted(models)
    other = replace(plan, name="other", text=TEXT.replace("echo", "other", 1))
    await in_thread(lambda: request_import(other, by=Requester("ann"), now=clock.now()))
    work = await claimed()
    with pytest.raises(Postpone, match=r"has no file \.localai-cluster.*is it mounted"):
        await ImportModel(WebOpener())(work)
    assert not os.listdir(models)
    detail = await in_thread(definition_entries.detail_of, "echo")
    assert [(file["present"], file["source"]) for file in detail["files"]] == [(False, "")]
    assert (detail["size"], detail["warnings"]) == (len(DATA), [f"the models folder {LACKS_MARKER}"])
    definitions = Folder(models, read_rows=rows.read_rows)
    assert (await definitions.problems()).folder == LACKS_MARKER
    (models / MARKER).touch()
    await ImportModel(WebOpener())(work)
    assert (await definitions.reload(), (await definitions.problems()).folder)[1] == ""


async def test_a_folder_that_cannot_be_written_has_no_marker(
    plan: ImportPlan, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing distinguishes it, and its files are as ever."""
    monkeypatch.setattr(imports, "mark_folder", lambda *_: mark_folder(models / "absent", ()))
    await imported(plan)
    assert not await in_thread(lambda: definition_of().files[PATH].is_marked)
    unmounted(models)
    definition = await in_thread(definition_of)
    assert plan_files(models, "echo", definition.options, definition.files).at_source == [PATH]


@pytest.fixture
async def loading(stage: Stage, plan: ImportPlan, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A load of the imported model, whose nodes have the backend."""
    monkeypatch.setattr(transfer, "retry_delay", lambda attempts: 0.01)
    monkeypatch.setattr(source_downloads, "_POLL", 0.02)
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

    async def check() -> bool:
        return await in_thread(is_active)

    assert await clock.wait_until(check, timeout=60, every=0.02)


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
    await cancellation.end(*running)


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
            load_request.KIND, key=load_key("echo"), element="echo", by=Requester("scaling")
        )
        admission.admit_one_more(request, now=now)
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
    monkeypatch.setattr(staging, "_PLAN_LIMIT", 0.01)
    try:
        with pytest.raises(Postpone, match="does not answer"):
            await asyncio.wait_for(loading.handler(loading.work), 30)
    finally:
        hangs.set()
