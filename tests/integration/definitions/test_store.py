"""Stored definitions on PostgreSQL: revisions, two writers, what readers see, and what wins over what."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import clock
from localai_cluster.kit.errors import Conflict, InvalidInput, NotFound
from nodes.api.definition_entries import read_entries
from nodes.definitions import folder, rows, store
from nodes.definitions.folder import Folder, FolderUnresponsive
from nodes.definitions.recorded_files import FileConflict
from nodes.gateway import gateway
from nodes.loading import load_info
from nodes.models import DefinitionRevision, ModelDefinition, ModelLoadInfo, NodeModel
from nodes.reconcilers import replicas, tasks
from operations.executor.work import WakeUps, in_thread
from operations.models import Operation
from tests.conftest import eventually
from tests.support import hot

pytestmark = pytest.mark.django_db(transaction=True)

TEXT = "name: m\nbackend: echo\nparameters: {model: m.gguf}\n"


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> Path:
    """An empty models folder."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    return tmp_path


def save(text: str = TEXT, name: str | None = "m", **options: Any) -> ModelDefinition:
    values = {"origin": "api", "actor": "ann", "now": clock.now(), **options}
    return store.save(name, text, **values)


def found(name: str = "m", where: Folder | None = None) -> Any:
    """The context size of the definition in force; None without one."""
    definition = asyncio.run((where or folder.folder()).find(name))
    return None if definition is None else definition.options.get("ContextSize", 0)


def test_each_save_is_a_revision_and_the_same_text_is_none() -> None:
    row = save(reason="first")
    again = save()
    assert (row.id, row.revision, again.revision) == (again.id, 1, 1)
    edited = save(TEXT + "context_size: 5\n", actor="bob", reason="more", origin="editor")
    assert (edited.id, edited.revision, edited.origin) == (row.id, 2, "editor")
    revisions = list(store.revisions_of("m"))
    columns = [(r.number, r.actor, r.reason, r.origin) for r in revisions]
    assert columns == [(2, "bob", "more", "editor"), (1, "ann", "first", "api")]
    assert list(store.diffs(revisions)) == [
        "--- revision 1\n+++ revision 2\n@@ -1,3 +1,4 @@\n name: m\n backend: echo\n"
        " parameters: {model: m.gguf}\n+context_size: 5\n",
        "--- revision 0\n+++ revision 1\n@@ -0,0 +1,3 @@\n+name: m\n+backend: echo\n"
        "+parameters: {model: m.gguf}\n",
    ]
    assert found() == 5


def test_a_restored_revision_is_a_new_one() -> None:
    save()
    save(TEXT + "context_size: 5\n")
    restored = store.restore("m", 1, actor="bob", origin="editor", now=clock.now())
    assert (restored.revision, restored.text) == (3, TEXT)
    assert found() == 0
    with pytest.raises(NotFound):
        store.restore("m", 9, actor="bob", origin="editor", now=clock.now())


def test_a_definition_that_is_deleted_meanwhile_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    row = save()
    save(TEXT + "context_size: 5\n")
    genuine = store.revisions_of

    def deleted_meanwhile(name: str) -> Any:
        found = list(genuine(name))
        store.remove(name, id=row.id, now=clock.now())
        return ModelDefinition.objects.get(pk=row.pk).revisions.filter(pk__in=[one.pk for one in found])

    monkeypatch.setattr(store, "revisions_of", deleted_meanwhile)
    with pytest.raises(Conflict):
        store.restore("m", 1, actor="bob", origin="editor", now=clock.now())
    assert store.find("m") is None


def test_old_revisions_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_REVISIONS", 2)
    for size in range(1, 5):
        save(f"{TEXT}context_size: {size}\n")
    assert sorted(DefinitionRevision.objects.values_list("number", flat=True)) == [3, 4]


def test_the_pruning_task_keeps_the_last_revisions_and_the_young_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Issue 25."""
    monkeypatch.setattr(store, "MIN_REVISIONS", 2)
    monkeypatch.setattr(tasks, "PRUNE_CHUNK_ROWS", 1)
    now = clock.now()
    for number in range(6):
        save(TEXT + f"context_size: {number}\n", now=now)
    save(TEXT.replace("name: m", "name: other"), "other")
    DefinitionRevision.objects.exclude(number=3).update(at=now - store.RETENTION - timedelta(days=1))
    tasks.prune_timeline()
    assert list(store.revisions_of("m").values_list("number", flat=True)) == [6, 5, 3]
    assert store.revisions_of("other").count() == 1
    assert found() == 5


def test_the_pruning_task_drops_what_was_deleted_long_ago() -> None:
    """Issue 25: the names are free, so nothing else removes the rows."""
    now = clock.now()
    for name, days in (("old", 366), ("young", 364)):
        row = save(TEXT.replace("name: m", f"name: {name}"), name)
        store.remove(name, id=row.id, now=now - timedelta(days=days))
    save(TEXT.replace("name: m", "name: old"), "old")
    save()
    row = ModelDefinition.objects.create(
        name="gone", text=TEXT, origin="api", deleted_at=now - timedelta(days=400)
    )
    DefinitionRevision.objects.create(definition=row, number=1, text=TEXT, origin="api", actor="ann")
    tasks.prune_timeline()
    assert sorted(ModelDefinition.objects.values_list("name", flat=True)) == ["m", "old", "young"]


def test_pruning_costs_equally_many_queries_for_any_number_of_definitions() -> None:
    counts, past = [], clock.now() - store.RETENTION - timedelta(days=1)
    for size in (1, 5):
        for number in range(size):
            name = f"{size}-{number}"
            row = save(TEXT.replace("name: m", f"name: {name}"), name, now=past)
            ModelDefinition.objects.filter(pk=row.pk).update(revision=999)
            row = save(TEXT.replace("name: m", f"name: {name}-gone"), f"{name}-gone", now=past)
            store.remove(row.name, id=row.id, now=past)
        with CaptureQueriesContext(connection) as queries:
            assert store.prune_revisions(before=clock.now() - store.RETENTION, limit=1000) == size
            assert store.prune_deleted(before=clock.now() - store.RETENTION, limit=1000) == size
        counts.append(len(queries))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("expected", [None, 0])
def test_of_two_that_create_one_wins(expected: int | None) -> None:
    outcomes = race(lambda number: save(f"{TEXT}context_size: {number}\n", None, expected_revision=expected))
    assert sorted(outcomes) == ["1", "conflict 1"]
    assert ModelDefinition.objects.count() == 1


def test_of_two_that_edit_one_revision_one_wins() -> None:
    save()
    outcomes = race(lambda number: save(f"{TEXT}context_size: {number}\n", expected_revision=1))
    assert sorted(outcomes) == ["2", "conflict 2"]
    assert list(DefinitionRevision.objects.order_by("number").values_list("number", flat=True)) == [1, 2]


def race(write: Callable[[int], ModelDefinition]) -> list[str]:
    """What two threads get that write at the same time."""
    outcomes: list[str] = []
    start = threading.Barrier(2)

    def run(number: int) -> None:
        try:
            start.wait(30)
            outcomes.append(str(write(number).revision))
        except Conflict as conflict:
            outcomes.append(f"conflict {conflict.data.get('revision', conflict.code)}")
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def test_a_text_of_another_name_is_refused() -> None:
    with pytest.raises(InvalidInput, match="clone it") as caught:
        save(name="other")
    assert caught.value.field == "text"
    assert not ModelDefinition.objects.exists()


def test_a_writer_of_a_deleted_definition_does_not_replace_its_successor() -> None:
    """An editor or an import that has read revision 1; meanwhile the model was deleted and created again."""
    row = save()
    store.remove("m", id=row.id, now=clock.now())
    successor = save(TEXT + "context_size: 7\n", None, expected_revision=0)
    with pytest.raises(Conflict) as refused:
        save(TEXT + "context_size: 9\n", expected_revision=row.revision)
    assert refused.value.data["revision"] == successor.revision == 2
    assert found() == 7
    assert [revision.number for revision in store.revisions_of("m")] == [2]
    assert store.restore("m", 2, actor="ann", origin="api", now=clock.now()).revision == 2


def test_a_disabled_or_deleted_definition_defines_nothing() -> None:
    row = save()
    store.set_disabled("m", True, now=clock.now())
    assert found() is None
    assert store.set_disabled("m", True, now=clock.now()).change == row.change + 1, "no second change"
    store.set_disabled("m", False, now=clock.now())
    assert found() == 0
    for _ in range(2):
        removed = store.remove("m", id=row.id, now=clock.now())
        assert removed is not None
        assert removed.text == TEXT
    assert found() is None
    with pytest.raises(NotFound):
        store.set_disabled("m", True, now=clock.now())
    another = save()
    assert another.id != row.id
    assert store.remove("m", id=row.id, now=clock.now()) is None, "the name is another definition's"
    assert found() == 0


def test_a_file_wins_over_a_row_also_when_it_breaks_and_the_row_comes_back_without_it(models: Path) -> None:
    save(TEXT + "context_size: 5\n")
    file = models / "m.yaml"
    for content, expected in ((TEXT + "context_size: 7\n", 7), ("name: m\nbackend: [", None), (None, 5)):
        file.unlink() if content is None else file.write_text(content)
        asyncio.run(folder.folder().reload())
        assert found() == expected
    file.write_text("name: m\nbackend: [")
    asyncio.run(folder.folder().reload())
    assert found() is None, "a broken file wins by the name that it states"
    fresh = Folder(models, read_rows=rows.read_rows)
    assert found(where=fresh) is None, "so a process that starts decides as one that knows its former name"
    (only,) = asyncio.run(folder.folder().stored_rows())
    assert only.file == file.name


def test_a_row_that_cannot_be_used_is_a_problem_like_a_file() -> None:
    """Another version has stored it: nothing else suffers, and it counts as unreadable."""
    save()
    save(TEXT.replace("name: m", "name: n"), "n")
    ModelDefinition.objects.filter(name="m").update(text="name: m\nthreads: x", change=99)
    asyncio.run(folder.folder().reload())
    assert (found(), found("n")) == (None, 0)
    assert list(asyncio.run(folder.folder().problems()).files) == ["definitions/m"]
    assert asyncio.run(folder.folder().unreadable_files()) == frozenset({"definitions/m"})


def test_known_definitions_go_on_serving_while_the_database_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = False

    def read(known: rows.Rows) -> Any:
        if away:
            raise DatabaseError("gone")
        return rows.read_rows(known)

    save()
    now = [0.0]
    models = Folder(tmp_path, lambda: now[0], read_rows=read)
    assert found(where=models) == 0
    away = True
    for _ in range(3):
        now[0] += 2
        assert found(where=models) == 0
    with pytest.raises(FolderUnresponsive, match="database"):
        found("unknown", models)
    assert len([line for line in caplog.messages if "cannot be read" in line]) == 1
    away = False
    save(TEXT + "context_size: 5\n")
    now[0] += 2
    assert eventually(lambda: found(where=models) == 5)
    assert found("unknown", models) is None


def test_a_process_that_has_never_read_the_rows_knows_nothing_of_them(tmp_path: Path) -> None:
    """503 rather than 404, and no record of a load is withdrawn."""

    def read(known: rows.Rows) -> Any:
        raise DatabaseError("gone")

    models = Folder(tmp_path, read_rows=read)
    with pytest.raises(FolderUnresponsive):
        found(where=models)
    assert asyncio.run(models.unreadable_files()) is None


def test_a_lookup_costs_no_query_and_a_poll_one(tmp_path: Path, django_assert_num_queries: Any) -> None:
    polls = []

    def read(known: rows.Rows) -> Any:
        polls.append(len(known))
        return rows.read_rows(known)

    for number in range(3):
        save(TEXT.replace("name: m", f"name: m{number}"), f"m{number}")
    now = [0.0]
    models = Folder(tmp_path, lambda: now[0], read_rows=read)
    known = rows.read_rows({})
    with django_assert_num_queries(1):
        assert rows.read_rows(known) == known
    with django_assert_num_queries(2):
        rows.read_rows({})
    for _ in range(5):
        assert found("m1", models) == 0
    assert polls == [0]
    now[0] += 2
    for _ in range(5):
        assert found("m1", models) == 0
    assert eventually(lambda: polls == [0, 3])
    for _ in range(5):
        assert found("unknown", models) is None
    assert polls == [0, 3], "an unknown name is asked for once a second"


def test_a_known_model_does_not_wait_for_the_database(tmp_path: Path) -> None:
    may_answer = threading.Event()
    polls: list[int] = []

    def read(known: rows.Rows) -> Any:
        polls.append(len(known))
        assert not known or may_answer.wait(30)
        return rows.read_rows(known)

    save()
    now = [0.0]
    models = Folder(tmp_path, lambda: now[0], read_rows=read)
    assert found(where=models) == 0
    now[0] += 2
    for _ in range(3):
        assert found(where=models) == 0
    assert eventually(lambda: polls == [0, 1])
    hangs_at_once = models._rows_hang
    now[0] += 20
    assert found(where=models) == 0
    hangs_later = models._rows_hang
    may_answer.set()
    assert (hangs_at_once, hangs_later) == (False, True)
    assert eventually(lambda: not models._rows_hang)


@pytest.fixture
def listening() -> Iterator[None]:
    """The listener of a web process, in a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(gateway._listen_for_notifications(WakeUps()), loop)
    yield

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def test_another_process_reads_a_change_at_its_notify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Its clock stands still, so that nothing but the NOTIFY can make it read."""
    other = Folder(tmp_path, lambda: 0.0, read_rows=rows.read_rows)
    monkeypatch.setattr(folder, "folder", lambda: other)
    monkeypatch.setattr(store, "folder", lambda: Folder(tmp_path))  # the writer is somebody else
    assert found(where=other) is None
    other._row_polls._read_at = 0.0
    request.getfixturevalue("listening")
    eventually(lambda: other._row_polls._changes, what="it listens")
    save()
    assert eventually(lambda: other._row_polls._changes > 1, what="the NOTIFY has come")
    assert found(where=other) == 0


def test_the_audit_says_who_did_what() -> None:
    from localai_cluster.accounts import actors, audit

    with audit.attribute_to(actors.command("ann")):
        row = save(reason="why")
        store.set_disabled("m", True, now=clock.now())
        store.remove("m", id=row.id, now=clock.now())
    entries = AuditEntry.objects.order_by("id").values_list("kind", "actor", "subject", "detail")
    assert list(entries) == [
        ("definition.saved", "ann", "definition m", "revision 1: why"),
        ("definition.disabled", "ann", "definition m", ""),
        ("definition.deleted", "ann", "definition m", ""),
    ]


@pytest.mark.parametrize("withdrawn", ["disabled", "deleted"])
async def test_what_a_person_deleted_or_disabled_is_not_loaded_from_its_record(
    tmp_path: Path, withdrawn: str
) -> None:
    """Issue 23: also while the folder hangs, and before a pass has seen it."""
    row = await in_thread(save)
    definition = await folder.folder().find("m")
    assert definition is not None
    columns = load_info.columns_of(definition)
    await in_thread(lambda: ModelLoadInfo.objects.create(model_name="m", backend_type="echo", **columns))
    assert await in_thread(load_info._last_definition, "m", None) == definition
    if withdrawn == "disabled":
        await in_thread(lambda: store.set_disabled("m", True, now=clock.now()))
    else:
        await in_thread(lambda: store.remove("m", id=row.id, now=clock.now()))
    assert await in_thread(load_info._last_definition, "m", None) is None
    assert await load_info.find_definition(folder.folder(), "m") is None


def test_the_pass_unloads_what_is_disabled_and_leaves_a_files_model_alone(models: Path) -> None:
    (models / "n.yaml").write_text(TEXT.replace("name: m", "name: n"))
    save()
    save(TEXT.replace("name: m", "name: n"), "n")
    node = hot.node()
    for name in ("m", "n", "undefined"):
        hot.replica(node, name, config_revision="")
    assert replicas.run_pass(tick=True)
    assert not Operation.objects.exists()
    for name in ("m", "n"):
        store.set_disabled(name, True, now=clock.now())
    for _ in range(2):
        assert replicas.run_pass(tick=True)
    (operation,) = Operation.objects.all()
    assert (operation.kind, operation.element, operation.actor) == ("model_unload", "m", "system")
    assert operation.payload["reason"] == "its definition is disabled or deleted"
    (models / "n.yaml").write_text(TEXT.replace("name: m", "name: n") + "disabled: true\n")
    assert replicas.run_pass(tick=True)
    assert set(Operation.objects.values_list("element", flat=True)) == {"m", "n"}
    assert NodeModel.objects.count() == 3
    connection.close()


def test_a_definition_whose_text_disables_it_cannot_be_enabled(models: Path) -> None:
    save(TEXT + "disabled: true\n")
    with pytest.raises(Conflict, match="disabled: true"):
        store.set_disabled("m", False, now=clock.now())
    (entry,) = read_entries()
    assert entry.state == "disabled"


@pytest.mark.parametrize("name", ["schema", "preview", "a/clone", "a/revisions", "a/b/enable"])
def test_names_of_routes_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="is a route of the API"):
        save(TEXT.replace("name: m", f"name: {name}"), name)
    assert save(TEXT.replace("name: m", "name: a/model"), "a/model").revision == 1


def test_an_unchanged_text_may_get_its_files() -> None:
    save()
    row = save(files=[{"path": "m.gguf", "url": "https://example.com/m.gguf"}])
    assert (row.revision, row.files[0]["path"]) == (1, "m.gguf")
    stored = store.find("m")
    assert stored is not None
    assert stored.files == row.files


def entry(path: str, content: str) -> dict[str, Any]:
    return {"path": path, "source": f"https://h/{content}", "sha256": content * 64, "size": 9}


def text_of(name: str, model: str) -> str:
    return TEXT.replace("name: m", f"name: {name}").replace("m.gguf", model)


def test_a_file_that_another_model_has_taken_over_meanwhile_does_not_come_back() -> None:
    """Else one path would have two files, and one model's would be sent as the other's."""
    save(files=[entry("m.gguf", "a")])
    save(text_of("m", "n.gguf"))
    save(text_of("other", "m.gguf"), "other", files=[entry("m.gguf", "b")])
    with pytest.raises(FileConflict, match=r"model other has another file m\.gguf") as refused:
        store.restore("m", 1, actor="ann", origin="api", now=clock.now())
    assert (refused.value.field, refused.value.status) == ("text", 409)
    with pytest.raises(FileConflict):
        save()
    with pytest.raises(FileConflict):
        save(text_of("m", "n.gguf") + "options: ['draft:m.gguf']\n")
    assert save(text_of("m", "n.gguf") + "threads: 2\n").revision == 3, "other edits are possible"
    assert found("m") == 0
    row = store.find("other")
    assert row is not None
    store.remove("other", id=row.id, now=clock.now())
    assert save().files == [entry("m.gguf", "a")]


def test_a_new_model_gets_the_file_that_a_definition_names_now() -> None:
    """Not the one that another definition has named before."""
    save(files=[entry("m.gguf", "a")])
    save(text_of("m", "n.gguf"))
    save(text_of("other", "m.gguf"), "other", files=[entry("m.gguf", "b")])
    assert save(text_of("third", "m.gguf"), "third").files == [entry("m.gguf", "b")]


def test_of_two_saves_that_bring_two_files_to_one_path_one_wins() -> None:
    for number, content in ((1, "a"), (2, "b")):
        save(text_of(f"m{number}", "n.gguf"), f"m{number}", files=[entry("m.gguf", content)])
    results = race(lambda number: save(text_of(f"m{number}", "m.gguf"), f"m{number}"))
    assert sorted(results) == ["2", "conflict file_exists"]
