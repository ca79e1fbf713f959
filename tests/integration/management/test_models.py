"""`manage.py models`: what it prints, stores and refuses."""

import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import psycopg
import pytest
from django.db import OperationalError, connection
from pytest_django import Settings

from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import clock
from nodes.definitions import store
from operations.changes.events import conninfo
from operations.models import Operation
from tests.support import command_line

pytestmark = pytest.mark.django_db(transaction=True)
run, refused = partial(command_line.run, "models"), partial(command_line.refused, "models")

TEXT = "name: m\nbackend: echo\nparameters: {model: m.gguf}\n"


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> Path:
    """A models folder with a usable and a broken file."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    (tmp_path / "file.yaml").write_text(TEXT.replace("name: m", "name: file"))
    (tmp_path / "broken.yaml").write_text("name: [")
    store.save("m", TEXT, origin="api", actor="ann", reason="first", now=clock.now())
    return tmp_path


def test_definitions_are_listed_and_shown() -> None:
    _, file, stored, broken = run("list").splitlines()
    assert file.split()[:5] == ["file", "echo", "m.gguf", "file", "active"]
    assert stored.split()[:6] == ["m", "echo", "m.gguf", "api", "active", "1"]
    assert broken.startswith("unusable: broken.yaml: is not valid YAML")
    assert len(run("list", "fil").splitlines()) == 3
    assert [row["name"] for row in json.loads(run("list", "--state", "active", "--json"))["definitions"]] == [
        "file",
        "m",
    ]
    assert run("show", "m") == TEXT
    assert json.loads(run("show", "file", "--json"))["file"] == "file.yaml"


def test_a_definition_is_edited_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("edit", "m", "--set", "context_size=8192", "--set", 'options=["a:b"]') == "m: revision 2\n"
    assert "context_size: 8192" in run("show", "m")
    (tmp_path / "new").write_text(TEXT + "threads: 3\n")
    assert run("edit", "m", "-f", str(tmp_path / "new"), "--reason", "by hand") == "m: revision 3\n"
    monkeypatch.setenv("EDITOR", "sed -i s/3/4/")
    assert run("edit", "m") == "m: revision 4\n"
    assert "threads: 4" in run("show", "m")
    monkeypatch.setenv("EDITOR", "true")
    assert run("edit", "m") == "m: not changed\n"
    assert run("restore", "m", "1") == "m: revision 5 has the text of revision 1\n"
    assert run("show", "m") == TEXT
    history = run("history", "m").splitlines()
    assert [line.split()[0] for line in history[1:]] == ["5", "4", "3", "2", "1"]
    assert "-threads: 4" in run("history", "m", "--diff")
    assert len(json.loads(run("history", "m", "--json"))) == 5
    assert AuditEntry.objects.filter(kind="definition.saved").count() == 4


def test_an_edit_of_a_files_model_says_that_the_file_stays() -> None:
    assert (
        run("edit", "file", "--set", "context_size=1")
        == "file: revision 1; the file file.yaml stays in force\n"
    )
    assert run("show", "file").startswith(
        "# the file file.yaml defines this model and stays in force\nname: file"
    )


def test_an_edit_without_a_change_stores_no_copy_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would come into force when the file is deleted."""
    monkeypatch.setenv("EDITOR", "true")
    assert run("edit", "file") == "file: not changed\n"
    assert store.find("file") is None


def test_a_definition_is_disabled_enabled_and_removed() -> None:
    assert run("disable", "m") == "m: disabled\n"
    assert run("enable", "m") == "m: enabled\n"
    said = run("remove", "m", "--files", "--detach")
    operation = Operation.objects.get()
    assert (operation.kind, operation.payload["files"]) == ("definition_delete", True)
    assert str(operation.id) in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "nope"), "no such definition"),
        (("edit", "nope", "--set", "context_size=1"), "no definition of nope"),
        (("edit", "m", "--set", "context_size=x"), "context_size must be"),
        (("edit", "m", "--set", "context_size=1", "--reason", "a\udcff"), "reason must not contain"),
        (("edit", "m", "--set", "options=" + "[" * 100_000), "levels deep"),
        (("edit", "m", "-f", "/nope"), "/nope"),
        (("edit", "m", "-f", "/"), "/"),
        (("restore", "m", "7"), "no revision 7"),
        (("remove", "file", "--detach"), "file.yaml"),
        (("disable", "nope"), "no stored definition"),
        (("history", "file"), "no stored definition"),
    ],
)
def test_refusals_are_one_line(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


def test_a_refused_edit_keeps_the_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("EDITOR", "sed -i s/^backend:.*//")
    said = refused("edit", "m")
    (kept,) = folder.iterdir()
    assert str(kept) in said
    assert "backend" in said
    assert kept.read_text() == re.sub("(?m)^backend:.*", "", TEXT)
    assert store.revisions_of("m").count() == 1


def test_a_database_that_restarts_during_an_edit_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit takes minutes, and the connection is idle meanwhile."""

    def edit(words: list[str], **options: object) -> None:
        path = Path(words[-1])
        path.write_text(path.read_text() + "threads: 4\n")
        with psycopg.connect(conninfo(), autocommit=True) as other:
            own = connection.connection.info.backend_pid
            assert other.execute("SELECT pg_terminate_backend(%s, 30000)", [own]).fetchone() == (True,)

    monkeypatch.setattr("nodes.management.commands.models.subprocess.run", edit)
    assert run("edit", "m") == "m: revision 2\n"
    assert "threads: 4" in run("show", "m")


def test_an_edit_that_the_database_does_not_take_keeps_the_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OperationalError("connection failed\n\tIs it running?")

    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("EDITOR", "sed -i s/echo/other/")
    monkeypatch.setattr(store, "save", refuse)
    said = refused("edit", "m")
    (kept,) = folder.iterdir()
    assert str(kept) in said
    assert kept.read_text() == TEXT.replace("echo", "other")


def test_an_editor_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("false", "no-such-editor", "vi 'x"):
        monkeypatch.setenv("EDITOR", program)
        assert program in refused("edit", "m")
    assert store.revisions_of("m").count() == 1
