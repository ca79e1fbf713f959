"""Files that nothing names: what is listed, what is removed, and what returns when it is named meanwhile."""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import Conflict
from nodes.definitions import store
from nodes.definitions.folder import FolderUnresponsive
from nodes.downloads import partial_files, unused_files
from nodes.downloads.imports import request_import
from nodes.downloads.partial_files import ByteSpan, PartialFile
from nodes.downloads.unused_files import RemoveFiles, Selection, UnusedFile, request_removal
from nodes.loading import file_removal
from nodes.loading.files_in_use import FilesInUse, read_files_in_use
from nodes.models import BackendNode, BroughtModel
from nodes.reconcilers import tasks
from nodes.sources.plans import ImportPlan, SourceFile
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger import attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Recorder
from operations.models import Operation
from tests.support import api

pytestmark = pytest.mark.django_db(transaction=True)

NAMED = "a.gguf"
YAML = "name: {}\nbackend: llama-cpp\nparameters:\n  model: {}\n"
FILE = SourceFile("tiny/m.gguf", "https://a.example/m")


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    cluster = replace(conf.cluster(), models_path=path)
    monkeypatch.setattr(conf, "cluster", lambda: cluster)
    write(path, "a.yaml", YAML.format("a", NAMED))
    write(path, NAMED)
    return path


def write(models: Path, path: str, text: str = "x", *, days: int = 0) -> None:
    file = models / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    then = (clock.now() - timedelta(days=days)).timestamp()
    os.utime(file, (then, then))


async def listed(models: Path) -> list[str]:
    in_use = await read_files_in_use()
    return [file.path for file in unused_files.list_unused(models, in_use)]


async def remove(*paths: str) -> Any:
    files = [UnusedFile(path, 1, clock.now()) for path in paths]
    await in_thread(lambda: request_removal(files, by=Requester("ann"), now=clock.now()))
    return await RemoveFiles()(await claim())


async def claim() -> Work:
    (operation,) = await in_thread(attempts.claim, "c", now=clock.now(), lease=60, limit=1)

    async def write(batch: Any) -> set[Any]:
        return set()

    return Work(operation, Recorder(write))


async def test_what_nothing_names_is_listed_with_the_oldest_first(models: Path, tmp_path: Path) -> None:
    write(models, "old.gguf", days=9)
    write(models, "deep/er/older.gguf", days=90)
    write(models, "b/weights/w.safetensors")
    write(models, "b.yaml", YAML.format("b", "b/weights"))
    write(models, "c-00001-of-00002.gguf")
    write(models, "c-00002-of-00002.gguf")
    write(models, "c.yaml", YAML.format("c", "c-00001-of-00002.gguf"))
    write(models, f"{NAMED}.sha256")
    write(models, ".hidden/file")
    write(models, "notes.txt")
    write(tmp_path, "elsewhere/file")
    (models / "link.gguf").symlink_to(tmp_path / "elsewhere/file")
    (models / "share").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(models / "fifo")
    assert await listed(models) == ["deep/er/older.gguf", "old.gguf", "notes.txt"]


async def test_a_time_that_no_calendar_has_hides_no_file(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems keep it: after a copy, or from a machine whose clock is broken."""
    write(models, "odd.gguf")
    status = unused_files._modification_time
    monkeypatch.setattr(unused_files, "_modification_time", lambda _: status(Mock(st_mtime=3e11)))
    assert await listed(models) == ["odd.gguf"]


async def test_a_value_that_is_no_file_name_may_need_no_file(models: Path) -> None:
    """Nothing could be removed while one definition had a long option."""
    option = "override_tensor:" + "|".join(f"blk[.]{number}[.]" for number in range(40)) + "=CPU"
    write(
        models, "b.yaml", f'name: b\nbackend: echo\nparameters: {{model: {NAMED}}}\noptions: ["{option}"]\n'
    )
    write(models, "old.gguf", days=9)
    in_use = await read_files_in_use()
    assert (in_use.problem, await listed(models)) == ("", ["old.gguf"])


async def test_a_share_is_never_cleaned(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(models, "nas/m.gguf")
    write(models, "nas/deep/m.gguf")
    assert sorted(await listed(models)) == ["nas/deep/m.gguf", "nas/m.gguf"]
    cluster = replace(conf.cluster(), share_roots=(models / "nas",))
    monkeypatch.setattr(conf, "cluster", lambda: cluster)
    assert await listed(models) == []
    await remove("nas/m.gguf")
    assert (models / "nas/m.gguf").exists()


async def test_files_of_a_running_import_are_in_use(models: Path) -> None:
    write(models, "tiny/m.gguf")
    assert await listed(models) == ["tiny/m.gguf"]
    plan = ImportPlan("tiny", YAML.format("tiny", "tiny/m.gguf"), (FILE,), "import", "x")
    await in_thread(lambda: request_import(plan, by=Requester("a"), now=clock.now()))
    assert await listed(models) == []


async def test_downloads_that_nobody_resumes_are_listed_and_removed(models: Path) -> None:
    partial = PartialFile.open(models, "gone/m.gguf")
    partial.restart("https://a.example", "")
    (path,) = await listed(models)
    assert path.startswith(".downloads/")
    result = await remove(path)
    assert await listed(models) == [path]  # somebody writes it
    partial.close()
    await end(result)
    await remove(path)
    assert await listed(models) == []
    assert list((models / ".downloads").iterdir()) == []


async def test_the_pruning_task_removes_downloads_that_nobody_resumes(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 25: without another import nothing else removes them."""
    plan = ImportPlan("b", YAML.format("b", "b"), (SourceFile("b", "https://a.example/b"),), "import", "x")
    await in_thread(lambda: request_import(plan, by=Requester("a"), now=clock.now()))
    for path in ("b", "old", "young"):
        partial = PartialFile.open(models, path)
        partial.restart("https://a.example", "")
        span = ByteSpan(0, -1, 0)
        partial.divide(span, 9, '"x"', with_ranges=True)
        partial.write(span, b"x")
        partial.close()
        if path != "young":
            (data,) = (data for data, its_path, _ in partial_files.partial_files(models) if its_path == path)
            os.utime(data, (0, 0))
    await in_thread(tasks.prune_timeline)
    assert sorted(path for _, path, _ in partial_files.partial_files(models)) == ["b", "young"]
    await in_thread(models.rename, models.with_name("elsewhere"))
    await in_thread(tasks.prune_timeline)


async def end(result: Any) -> None:
    await in_thread(lambda: Operation.objects.all().delete())


async def test_a_removal_takes_files_and_empty_folders_only(models: Path) -> None:
    write(models, "deep/er/older.gguf", "12345")
    write(models, "deep/other.gguf")
    write(models, NAMED)
    result = await remove("deep/er/older.gguf", NAMED, "missing.gguf")
    assert result == {"message": "5 B freed; 1 stay: it is in use", "bytes": 5}
    assert left_in(models) == ["a.gguf", "a.yaml", "deep", "deep/other.gguf"]


def left_in(models: Path) -> list[str]:
    return sorted(path.relative_to(models).as_posix() for path in models.rglob("*"))


@pytest.mark.parametrize("by", ["import", "definition", "broken definition"])
async def test_what_is_named_meanwhile_returns(
    models: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """It is named after the files were set aside, as when another process saves at that moment."""
    write(models, "tiny/m.gguf", "12345")
    plain: Callable[..., None] = file_removal._MovedFiles.take

    def name_it(*arguments: Any) -> None:
        plain(*arguments)
        assert not (models / "tiny").joinpath("m.gguf").exists()
        if by == "definition":
            write(models, "tiny.yaml", YAML.format("tiny", "tiny/m.gguf"))
        elif by == "broken definition":
            write(models, "tiny.yaml", "name: [")
        else:
            plan = ImportPlan("tiny", YAML.format("tiny", "tiny/m.gguf"), (FILE,), "import", "x")
            request_import(plan, by=Requester("a"), now=clock.now())

    monkeypatch.setattr(file_removal._MovedFiles, "take", name_it)
    result = await remove("tiny/m.gguf")
    assert (models / "tiny/m.gguf").read_text() == "12345"
    reason = "tiny.yaml cannot be used" if by == "broken definition" else "in use"
    assert result["message"].startswith("0 B freed; 1 stay: ")
    assert reason in result["message"]
    assert not (models / ".removed").exists()


async def test_an_interrupted_removal_is_ended_by_the_next_attempt(models: Path) -> None:
    write(models, "old.gguf", "12345")
    file_removal._MovedFiles(models, (uuid4(), 1)).take(["old.gguf"], FilesInUse(frozenset()))
    assert await listed(models) == []
    result = await remove("old.gguf")
    assert result["bytes"] == 5
    assert not (models / ".removed").exists()


async def test_nothing_is_removed_while_a_definition_cannot_be_used(models: Path) -> None:
    write(models, "broken.yaml", "name: [")
    write(models, "old.gguf")
    with pytest.raises(Conflict, match=r"broken\.yaml cannot be used and may name any of the files"):
        await remove("old.gguf")
    assert (models / "old.gguf").exists()


async def test_a_stored_definition_names_files_in_any_state(models: Path) -> None:
    write(models, "d/m.gguf")
    text = YAML.format("d", "d/m.gguf")
    await in_thread(lambda: store.save(None, text, origin="api", actor="a", now=clock.now()))
    assert await listed(models) == []
    await in_thread(lambda: store.set_disabled("d", True, now=clock.now()))
    assert await listed(models) == []


HUB = "hub/models--o--r"


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("options: ['draft:d.gguf']", "m/d.gguf"),
        ("options: ['draft:m/d.gguf']", "m/d.gguf"),
        ("overrides: ['draft:./x/../d.gguf']", "m/d.gguf"),
        ("mmproj: link.gguf", "real/p.gguf"),
        ("mmproj: linked/p.gguf", "real/p.gguf"),
        (f"mmproj: {HUB}/snapshots/1", f"{HUB}/blobs/2"),
    ],
)
async def test_what_a_definition_may_mean_is_in_use(models: Path, text: str, used: str) -> None:
    """A value of an option, a path beside the model, and what a link leads to, also one in a folder."""
    write(models, "m/m.gguf")
    write(models, used)
    (models / "link.gguf").symlink_to("real/p.gguf")
    (models / "linked").symlink_to("real")
    (models / HUB / "snapshots/1").mkdir(parents=True)
    (models / HUB / "snapshots/1/w.safetensors").symlink_to("../../blobs/2")
    write(models, "b.yaml", YAML.format("b", "m/m.gguf"))
    assert await listed(models) == [used]
    write(models, "b.yaml", YAML.format("b", "m/m.gguf") + text + "\n")
    assert await listed(models) == []
    await remove(used)
    assert (models / used).exists()


async def test_files_that_a_stored_import_has_fetched_are_in_use(models: Path) -> None:
    write(models, "d/m.gguf")
    write(models, "d/notice.txt")
    text, files = YAML.format("d", "d/m.gguf"), [{"path": "d/notice.txt"}]
    await in_thread(lambda: store.save(None, text, origin="api", actor="a", now=clock.now(), files=files))
    assert await listed(models) == []


async def test_a_folder_that_cannot_be_read_is_left_out(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(models, "lost+found/x")
    write(models, "old.gguf")
    plain = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("lost+found"):
            raise PermissionError
        return plain(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert await listed(models) == ["old.gguf"]
    monkeypatch.setattr(unused_files, "MAX_SEEN", 1)
    assert len(await listed(models)) <= 1


async def test_files_return_when_a_removal_fails(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look fails: what was taken out of the way is there again, for everybody."""
    write(models, "deep/old.gguf", "12345")
    plain = read_files_in_use
    looks = iter([plain, None])

    async def look() -> FilesInUse:
        if (read := next(looks)) is None:
            assert not (models / "deep/old.gguf").exists()
            raise FolderUnresponsive("the models folder does not answer")
        return await read()

    monkeypatch.setattr(file_removal, "read_files_in_use", look)
    with pytest.raises(Postpone, match="does not answer"):
        await remove("deep/old.gguf")
    assert (models / "deep/old.gguf").read_text() == "12345"
    assert not (models / ".removed").exists()


async def test_a_new_download_wins_over_a_file_that_returns(models: Path) -> None:
    write(models, "old.gguf", "old")
    aside = file_removal._MovedFiles(models, (uuid4(), 1))
    aside.take(["old.gguf"], FilesInUse(frozenset()))
    write(models, "old.gguf", "new")
    aside.close()
    assert (models / "old.gguf").read_text() == "new"
    assert not (models / ".removed").exists()


def test_paths_that_lead_out_are_never_touched(models: Path, tmp_path: Path) -> None:
    """A path comes from the list; a payload that was changed by hand must not matter either."""
    write(tmp_path, "elsewhere/file")
    (models / "share").symlink_to(tmp_path / "elsewhere")
    aside = file_removal._MovedFiles(models, (uuid4(), 1))
    aside.take(["share/file", "../elsewhere/file", "/etc/hostname"], FilesInUse(frozenset()))
    assert (tmp_path / "elsewhere/file").exists()


def test_a_selection_by_age_and_by_bytes() -> None:
    day = datetime(2026, 1, 1, tzinfo=UTC)
    files = [UnusedFile(str(number), 10, day + timedelta(days=number)) for number in range(5)]

    def of(**options: Any) -> list[str]:
        return [file.path for file in Selection(**options).of(files)]

    assert of(before=day + timedelta(days=2)) == ["0", "1"]
    assert of(bytes_needed=11) == ["0", "1"]
    assert of(bytes_needed=1000, before=day + timedelta(days=3)) == ["0", "1", "2"]
    assert of(paths=["3", "1", "3"]) == ["3", "1"]


def test_models_of_nodes_that_nothing_defines_or_runs() -> None:
    node, other = api.make_node("n1"), api.make_node("n2")
    for where, name in ((node, "gone"), (node, "a"), (node, "runs"), (other, "gone")):
        BroughtModel.objects.create(node_id=where.id, model_name=name, size=7, seen_at=clock.now())
    api.replica(BackendNode.objects.get(pk=node.id), "runs")
    with CaptureQueriesContext(connection) as queries:
        places = unused_files.list_on_nodes({"a"})
    assert {name: [file.path for file in files] for (_, name), files in places.items()} == {
        "n1": ["gone"],
        "n2": ["gone"],
    }
    assert len(queries) == 2
