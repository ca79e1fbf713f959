"""Imports: files, then the definition, once; what may pass waits in the queue; one plan at a time."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localai_cluster.kit import cancellation, clock, conf
from localai_cluster.kit.errors import ClusterError, Conflict, InvalidInput
from localai_cluster.kit.outbound import SourceBusy, SourceError
from nodes.definitions import store
from nodes.definitions.folder import Folder, FolderUnresponsive
from nodes.definitions.recorded_files import FileConflict
from nodes.downloads import imports
from nodes.downloads.imports import ImportModel, request_import
from nodes.downloads.partial_files import DiskFull
from nodes.loading.files_in_use import paths_of_active_imports
from nodes.models import DefinitionRevision, ModelDefinition
from nodes.sources.plans import ImportPlan, SourceFile
from operations.api.verbs import cancel_operation
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from operations.models import Event, Operation, Status
from tests.conftest import until
from tests.support.sources import Refusal, Source, WebOpener, sha256_of, started

pytestmark = pytest.mark.django_db(transaction=True)

DATA = bytes(range(256)) * 100
PATH = "tiny/tiny.gguf"
TEXT = "name: tiny\nbackend: llama-cpp\nparameters:\n  model: tiny/tiny.gguf\n"


@pytest.fixture
def source() -> Iterator[Source]:
    with started(files={"/m.gguf": DATA, "/template.jinja": b"{{ x }}"}) as source:
        yield source


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    cluster = replace(conf.cluster(), models_path=path)
    monkeypatch.setattr(conf, "cluster", lambda: cluster)
    return path


@pytest.fixture
def plan(source: Source) -> ImportPlan:
    files = (
        SourceFile(PATH, source.url("/m.gguf"), len(DATA), sha256_of(DATA)),
        SourceFile("tiny/template.jinja", source.url("/template.jinja")),
        SourceFile("shared/other.gguf", "share://nas/other.gguf", 10**12),
    )
    return ImportPlan("tiny", TEXT, files, "import", "the hub")


def asked(plan: ImportPlan, *, load: bool = False) -> Operation:
    return request_import(plan, by=Requester("ann"), now=clock.now(), load_after_import=load).operation


def put_back(payload: dict[str, Any]) -> None:
    Operation.objects.update(status="pending", lease_until=None, payload=payload)


class Controller:
    """Claims and runs attempts as a controller does; `ticks` is what it reported."""

    def __init__(self) -> None:
        self.ticks: list[Any] = []
        self.handler = ImportModel(WebOpener())

    async def claim(self) -> Work:
        (operation,) = await in_thread(attempts.claim, "c", now=clock.now(), lease=60, limit=1)

        async def write(batch: Any) -> set[Any]:
            self.ticks += [tick for ticks in batch.values() for tick in ticks]
            return set()

        return Work(operation, Recorder(write))

    async def run(self) -> Any:
        """Run one attempt. As in the product, reports that were not written yet are taken in the end."""
        work = await self.claim()
        result = await self.handler(work)
        self.ticks += await work.recorder.take(work.attempt) or []
        return result


async def test_a_cancel_after_the_definition_is_saved_is_refused(
    plan: ImportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the import would count as cancelled, and its model would be there."""
    refusals = []

    async def cancelled_meanwhile(work: Work, *, is_to_load: bool) -> str:
        with pytest.raises(Conflict, match="tiny is defined already: delete the model") as caught:
            await in_thread(cancel_operation, work.operation, actor="ann")
        refusals.append(caught.value.status)
        return ""

    operation = await in_thread(asked, plan)
    monkeypatch.setattr(imports, "_request_load_if_wanted", cancelled_meanwhile)
    await Controller().run()
    await in_thread(operation.refresh_from_db)
    assert (refusals, operation.status) == ([409], Status.PROCESSING)


async def test_a_cancelled_import_defines_nothing(plan: ImportPlan, models: Path) -> None:
    def check() -> None:
        assert cancel_operation(asked(plan), actor="ann").status == Status.CANCELLED
        work = asked(plan)
        attempts.claim("c", now=clock.now(), lease=60, limit=1)
        assert cancel_operation(work, actor="ann").status == Status.CANCELLED

    await in_thread(check)
    assert not await in_thread(ModelDefinition.objects.exists)


@pytest.mark.rule("O26")
async def test_files_come_first_and_the_definition_last(plan: ImportPlan, models: Path) -> None:
    operation = await in_thread(asked, plan)
    assert not await in_thread(ModelDefinition.objects.exists)
    controller = Controller()
    result = await controller.run()
    assert (models / PATH).read_bytes() == DATA
    assert result == {
        "message": "model tiny is here, 25.0 KiB in 2 files",
        "model": "tiny",
        "files": 2,
        "bytes": len(DATA) + 7,
    }
    row = await in_thread(store.find, "tiny")
    assert row is not None
    assert (row.text, row.origin, row.revision) == (TEXT, "import", 1)
    assert row.files[0] == {
        "path": PATH,
        "size": len(DATA),
        "sha256": sha256_of(DATA),
        "source": plan.files[0].url,
        "is_marked": True,
    }
    revision = await in_thread(DefinitionRevision.objects.get)
    assert (revision.actor, revision.reason) == ("ann", "imported from the hub")
    percentages = [tick.percentage for tick in controller.ticks]
    assert percentages == sorted(percentages)
    assert max(percentages[:-1], default=0) <= 90 < percentages[-1] < 100
    assert operation.key == "import:tiny"


async def test_an_attempt_that_is_repeated_changes_nothing(plan: ImportPlan, source: Source) -> None:
    """As after a kill between the definition and the end of the operation."""
    await in_thread(asked, plan)
    controller = Controller()
    work = await controller.claim()
    await controller.handler(work)
    source.requests.clear()
    await controller.handler(work)
    assert [request.range for request in source.seen("storage")] == ["bytes=0-0"]  # the size of the template
    assert await in_thread(DefinitionRevision.objects.count) == 1


async def test_a_definition_that_was_deleted_meanwhile_does_not_come_back(plan: ImportPlan) -> None:
    """The first attempt died after it had saved; then the definition was deleted, and maybe made anew."""
    await in_thread(asked, plan)
    controller = Controller()
    work = await controller.claim()
    await controller.handler(work)
    row = await in_thread(store.find, "tiny")
    assert row is not None
    await in_thread(lambda: store.remove("tiny", id=row.id, now=clock.now()))
    result = await controller.handler(work)
    assert result["message"].endswith("; its definition is disabled or deleted")
    assert await in_thread(store.find, "tiny") is None


async def test_a_repeated_attempt_knows_the_files_without_a_hash(plan: ImportPlan, source: Source) -> None:
    """The first attempt has fetched them and saved nothing; later imports know them too."""
    plan = replace(
        plan, files=(replace(plan.files[1], size=0), replace(plan.files[0], url=source.url("/no")))
    )
    await in_thread(asked, plan)
    for _ in range(2):
        with pytest.raises(SourceError, match="no"):
            await Controller().run()
        await in_thread(lambda: Operation.objects.update(status="pending", lease_until=None))
    assert len(source.sent_to("/template.jinja")) == 2  # the second request is for its size
    row = await in_thread(Operation.objects.get)
    assert list(row.payload[imports.FETCHED]) == ["tiny/template.jinja"]


async def test_a_file_of_another_source_is_not_taken_for_it(plan: ImportPlan, models: Path) -> None:
    """It has the size of the template, and nobody knows where it comes from."""
    (models / "tiny").mkdir()
    (models / "tiny/template.jinja").write_text("{{ y }}")
    await in_thread(asked, plan)
    with pytest.raises(FileConflict, match=r"another file tiny/template\.jinja"):
        await Controller().run()


async def test_a_request_that_joins_may_add_the_load(plan: ImportPlan) -> None:
    await in_thread(asked, plan)
    await in_thread(lambda: asked(plan, load=True))
    await in_thread(asked, plan)
    result = await Controller().run()
    assert result["message"].endswith("; it is being loaded")
    assert await in_thread(Operation.objects.filter(kind="model_load").count) == 1


async def test_a_load_that_is_asked_for_at_the_end_begins(plan: ImportPlan) -> None:
    """The definition is saved, and the operation has not ended yet."""
    await in_thread(asked, plan)
    await Controller().run()
    await in_thread(lambda: asked(plan, load=True))
    load = await in_thread(lambda: Operation.objects.get(kind="model_load"))
    assert load.element == "tiny"


async def test_a_source_that_never_gets_further_is_given_up(plan: ImportPlan, source: Source) -> None:
    """Bytes move in every attempt, and none gets beyond those of the attempt before."""
    source.ranges = False
    operation = await in_thread(asked, plan)
    stalled = (clock.now() - timedelta(hours=25)).isoformat()
    for drop, outcome in ((2000, Postpone), (1000, SourceError), (3000, Postpone)):
        source.drops = [drop] * 10
        with pytest.raises(outcome):
            await Controller().run()
        row = await in_thread(lambda: Operation.objects.get(pk=operation.id))
        payload = {**row.payload, imports.STALLED_SINCE: stalled}
        await in_thread(put_back, payload)
        assert payload[imports.REACHED] == max(drop, 2000)


async def test_an_unresponsive_folder_postpones_the_import(
    plan: ImportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(self: Folder) -> Any:
        raise FolderUnresponsive("the models folder does not answer")

    monkeypatch.setattr(Folder, "all_contents", hang)
    await in_thread(asked, plan)
    with pytest.raises(Postpone, match="does not answer; given up at"):
        await Controller().run()


def test_space_for_a_file_that_is_replaced_is_counted(plan: ImportPlan, models: Path) -> None:
    huge = replace(plan.files[0], size=2**59)
    (models / "tiny").mkdir()
    (models / PATH).write_bytes(b"the former version")
    with pytest.raises(DiskFull):
        imports._check_disk_space(models, [huge])
    imports._check_disk_space(models, [replace(huge, size=18)])


async def test_a_definition_that_was_changed_meanwhile_stays(plan: ImportPlan) -> None:
    await in_thread(asked, plan)
    other = TEXT + "context_size: 512\n"
    await in_thread(lambda: store.save(None, other, origin="editor", actor="bob", now=clock.now()))
    with pytest.raises(Conflict, match="it was changed meanwhile"):
        await Controller().run()
    row = await in_thread(store.find, "tiny")
    assert row is not None
    assert row.text == other


async def test_a_new_version_replaces_the_files_of_its_own_model_only(
    plan: ImportPlan, models: Path, source: Source
) -> None:
    await in_thread(asked, plan)
    work = await Controller().claim()
    await ImportModel(WebOpener())(work)
    await in_thread(lambda: attempts.finish(*work.attempt, Event.COMPLETE, now=clock.now()))
    new = DATA + b"2"
    source.files["/m.gguf"] = new
    changed = replace(plan.files[0], size=len(new), sha256=sha256_of(new))
    another = replace(plan, name="copy", text=TEXT.replace("name: tiny", "name: copy"), files=(changed,))
    await in_thread(asked, another)
    with pytest.raises(FileConflict, match=r"another file tiny/tiny\.gguf"):
        await Controller().run()
    await in_thread(lambda: Operation.objects.filter(element="copy").delete())
    await in_thread(asked, replace(plan, files=(changed,)))
    await Controller().run()
    assert (models / PATH).read_bytes() == new


def test_requests_of_one_plan_join_and_of_another_one_conflict(plan: ImportPlan) -> None:
    first = asked(plan)
    assert request_import(plan, by=Requester("bob"), now=clock.now()).operation.id == first.id
    with pytest.raises(Conflict, match="model_import of tiny is in progress"):
        request_import(replace(plan, source="elsewhere"), by=Requester("bob"), now=clock.now())


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("schema", "", "is a route of the API"),
        ("org/clone", "", "is a route of the API"),
        ("tiny", "api_key: abcdefgh", "is a secret"),
        ("tiny", "context_size: many", "context_size"),
    ],
)
def test_what_could_not_be_saved_is_not_downloaded(plan: ImportPlan, name: str, more: str, says: str) -> None:
    """Gigabytes would be there before the refusal."""
    text = f"name: {name}\nbackend: echo\nparameters: {{model: {PATH}}}\n{more}\n"
    with pytest.raises(InvalidInput, match=says):
        asked(replace(plan, name=name, text=text))
    assert not Operation.objects.exists()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", ".hidden", "a/../b", "CON", "x.yaml", "a\\b", "a\n"])
def test_hostile_paths_are_refused(plan: ImportPlan, path: str) -> None:
    with pytest.raises(InvalidInput):
        asked(replace(plan, files=(SourceFile(path, "https://a.example/f"),)))
    assert not Operation.objects.exists()


async def test_what_may_pass_waits_in_the_queue(plan: ImportPlan, source: Source) -> None:
    operation = await in_thread(asked, plan)
    source.refusals = [Refusal(429, (("Retry-After", "900"),))]
    with pytest.raises(Postpone) as postponed:
        await Controller().run()
    assert postponed.value.seconds == 900
    assert "HTTP status 429; given up at" in postponed.value.reason
    row = await in_thread(lambda: Operation.objects.get(pk=operation.id))
    since = row.payload[imports.STALLED_SINCE]
    stalled = clock.now() - timedelta(hours=25)
    await in_thread(
        lambda: Operation.objects.filter(pk=operation.id).update(
            status="pending",
            lease_until=None,
            payload={**operation.payload, imports.STALLED_SINCE: stalled.isoformat()},
        )
    )
    source.refusals = [Refusal(429, (("Retry-After", "900"),))]
    with pytest.raises(SourceError, match="given up after 24 h without a new byte") as error:
        await Controller().run()
    assert error.value.permanent
    assert since


async def test_a_refusal_fails_in_the_words_of_the_source(plan: ImportPlan, source: Source) -> None:
    await in_thread(asked, plan)
    source.tokens = {"/m.gguf": "Bearer x"}
    with pytest.raises(ClusterError, match=r"refuses access .*Access is restricted: sign in"):
        await Controller().run()


async def test_a_lost_operation_saves_nothing(plan: ImportPlan) -> None:
    """Another controller has taken it over; its fence is higher."""
    await in_thread(asked, plan)
    controller = Controller()
    work = await controller.claim()
    await in_thread(lambda: Operation.objects.update(fence=99))
    with pytest.raises(Exception, match=str(work.id)):
        await controller.handler(work)
    assert not await in_thread(ModelDefinition.objects.exists)


async def test_the_model_is_loaded_afterwards_if_asked(plan: ImportPlan) -> None:
    await in_thread(lambda: asked(plan, load=True))
    result = await Controller().run()
    assert result["message"].endswith("; it is being loaded")
    load = await in_thread(lambda: Operation.objects.get(kind="model_load"))
    assert (load.element, load.actor) == ("tiny", "ann")


async def test_no_more_imports_at_once_than_allowed(plan: ImportPlan, source: Source) -> None:
    source.pause_at = 1000
    controller = Controller()
    running = []
    for number in range(imports.AT_ONCE + 1):
        text = TEXT.replace("name: tiny", f"name: tiny-{number}").replace("tiny/", f"tiny-{number}/")
        file = replace(plan.files[0], path=f"tiny-{number}/tiny.gguf")
        await in_thread(asked, replace(plan, name=f"tiny-{number}", text=text, files=(file,)))
        work = await controller.claim()
        running.append(asyncio.create_task(controller.handler(work)))
        await asyncio.sleep(0)
    await until(lambda: any("waits for one of 4" in tick.message for tick in controller.ticks))
    source.release()
    results = await asyncio.gather(*running)
    assert [result["bytes"] for result in results] == [len(DATA)] * len(running)


async def test_imports_that_wait_leave_capacity_for_loads(
    plan: ImportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller runs 256 operations at once; hundreds of imports must not keep loads waiting for hours."""

    async def hang() -> bool:
        return await asyncio.Event().wait()

    async def report(_: Any) -> None:
        pass

    monkeypatch.setattr(imports, "_mark_folder", hang)
    operation = Operation(kind=imports.KIND, payload={imports.PLAN: plan.as_payload()})
    work: Any = SimpleNamespace(operation=operation, report=report)
    handler = imports.ImportModel(WebOpener())
    tasks = [asyncio.create_task(handler(work)) for _ in range(300)]
    await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.ALL_COMPLETED)
    running = {task for task in tasks if not task.done()}
    refusals = [task.exception() for task in tasks if task not in running]
    await cancellation.cancel_and_wait(*running)
    assert len(running) == imports.AT_ONCE + imports.MAX_WAITING
    assert all(isinstance(error, Postpone) and error.waiting for error in refusals)


async def test_nothing_moves_for_long(
    plan: ImportPlan, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the models folder hangs."""
    monkeypatch.setattr(imports, "STALL_TIMEOUT", 0.2)
    monkeypatch.setattr(imports, "REPORT_EVERY", 0.05)
    source.pause_at = 1000
    await in_thread(asked, plan)
    with pytest.raises(Postpone, match="nothing has moved for"):
        await Controller().run()


def test_a_removed_operation_is_no_plan() -> None:
    """The paths of imports that have ended are not in use."""
    assert paths_of_active_imports() == set()
    admission.admit(
        admission.OperationRequest("model_import", "import:x", "x", Requester("a")), now=clock.now()
    )
    assert paths_of_active_imports() == set()


def test_busy_is_temporary() -> None:
    assert not SourceBusy("x").permanent
