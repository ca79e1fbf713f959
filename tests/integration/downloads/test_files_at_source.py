"""The policy `worker`: files that an import leaves at their sources, and loads that need them here."""

import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.kit import clock
from localai_cluster.kit.outbound import SourceBody, SourceError
from nodes.api import definition_entries
from nodes.definitions import rows, sizes, store
from nodes.definitions.files import Definition
from nodes.definitions.folder import Folder
from nodes.definitions.recorded_files import LACKS_MARKER, MARKER, FileConflict, mark_folder
from nodes.downloads import files_at_source, imports
from nodes.downloads.imports import ImportModel, request_import
from nodes.loading import files_in_use
from nodes.loading.load_request import estimate_need
from nodes.loading.source_files import plan_files
from nodes.models import ModelDefinition
from nodes.sources import probing
from nodes.sources.plans import ImportPlan, SourceFile
from operations.executor.work import Postpone, Work, in_thread, write_batch
from operations.ledger import attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from operations.models import Event
from tests.support import hub
from tests.support.sources import LFS_POINTER, Source, WebOpener, sha256_of, started

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
    assert len(files_at_source.choose_files(plan, settings.CLUSTER)) == count


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
    assert files_at_source.choose_files(replace(plan, files=(file,)), settings.CLUSTER) == (
        [file] if stays else []
    )


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
        monkeypatch.setattr(files_at_source, "check_conflicts", lambda *_: None)
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
    detail = await in_thread(definition_entries.definition_detail, "echo")
    file = {"path": PATH, "size": len(DATA), "present": False, "source": source.url("/m.gguf")}
    assert (detail["size"], detail["files"]) == (len(DATA), [file])
    (models / PATH).write_bytes(DATA)
    detail = await in_thread(definition_entries.definition_detail, "echo")
    assert detail["files"] == [{**file, "present": True, "source": ""}]


async def test_a_page_does_not_wait_for_a_folder_that_hangs(
    plan: ImportPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    await imported(plan)
    hangs = threading.Event()
    monkeypatch.setattr(definition_entries, "files_at_source", lambda *_: hangs.wait(60))
    monkeypatch.setattr(files_in_use, "ANSWER_WITHIN", 0.01)
    try:
        detail = await in_thread(definition_entries.definition_detail, "echo")
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
    detail = await in_thread(definition_entries.definition_detail, "echo")
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
