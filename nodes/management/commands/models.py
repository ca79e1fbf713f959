"""`manage.py models`: definitions of models. Each verb calls the functions that REST calls."""

import json
import os
import shlex
import subprocess
import tempfile
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error as DatabaseError
from django.db import close_old_connections

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import AddVerb, Argument, Columns, Options, VerbCommand
from localai_cluster.kit import clock, errors, names, untrusted
from localai_cluster.kit.quantities import human_bytes
from localai_cluster.web.shapes import Row
from nodes.api import definition_entries
from nodes.api.definition_shapes import STATES
from nodes.definitions import edit, store
from nodes.definitions.files import MAX_FILE_BYTES
from nodes.downloads.imports import request_import
from nodes.loading import definition_removal
from nodes.models import DefinitionOrigin
from nodes.sources import inspection
from operations.ledger.admission import Requester
from operations.management import following

_LIST_HEADINGS: Columns = {
    "NAME": "name",
    "BACKEND": "backend",
    "MODEL": "model",
    "ORIGIN": "origin",
    "STATE": "state",
    "REVISION": lambda row: row["revision"] or "",
    "CHANGED": lambda row: command_line.format_age(row["updated_at"].isoformat(), clock.now()),
    "BY": "actor",
}
_FITS = {True: "yes", False: "no", None: "unknown"}
_VARIANT_HEADINGS: Columns = {
    "VARIANT": "id",
    "SIZE": lambda variant: human_bytes(variant["size"]) if variant["size"] else "unknown",
    "CONTEXT": lambda variant: variant["context_size"] or "",
    "FITS": lambda variant: _FITS[variant["fit"]["fits"]],
    "": lambda variant: "recommended" if variant["recommended"] else "",
}
_CANDIDATE_HEADINGS: Columns = {
    "ADD": "text",
    "KIND": "kind",
    "DESCRIPTION": lambda candidate: candidate["description"][:60],
}
_HISTORY_HEADINGS: Columns = {
    "REVISION": "number",
    "CHANGED": lambda revision: command_line.format_age(revision.at.isoformat(), clock.now()),
    "BY": "actor",
    "ORIGIN": "origin",
    "REASON": "reason",
}
EDITOR_VARIABLE = "EDITOR"
"""Environment variable with the editor that `edit` opens."""


_MODEL: Argument = ("model", {"metavar": "MODEL"})


class Command(VerbCommand):
    """The command; its subcommands are the verbs."""

    help = "Imports, shows, edits and deletes models."

    def add_verbs(self, add: AddVerb) -> None:
        added = add("add", add_model, "Import a model from a name, an address, a command line or YAML.")
        added.add_argument("text", metavar="TEXT")
        added.add_argument("--variant", default="", help="its id; without it the best one that fits")
        added.add_argument("--name", default="", help="name of the model")
        added.add_argument("--show", action="store_true", help="only show what the text means")
        added.add_argument("--load", action="store_true", help="load the model afterwards")
        added.add_argument("--detach", action="store_true", help="do not wait for the end")
        listed = add("list", list_models, "List definitions, of files too.")
        listed.add_argument("term", nargs="?", default="", metavar="TERM", help="part of a name or backend")
        listed.add_argument("--state", choices=STATES)
        add("show", show, "Show the YAML of a model.", _MODEL)
        edited = "Change a definition, in $EDITOR unless values are given."
        _add_edit_arguments(add("edit", edit_model, edited, _MODEL))
        removed = add("remove", remove, "Unload a model and delete its stored definition.", _MODEL)
        removed.add_argument(
            "--files", action="store_true", help="also delete the files that no other definition names"
        )
        removed.add_argument("--detach", action="store_true", help="do not wait for the end")
        disabled = "Disable a definition: no requests, and its replicas are unloaded."
        add("disable", switch, disabled, _MODEL)
        add("enable", switch, "Enable a definition.", _MODEL)
        diff = ("--diff", {"action": "store_true", "help": "with what each has changed"})
        add("history", show_history, "List the revisions of a definition.", _MODEL, diff)
        revision = ("revision", {"type": int, "metavar": "REVISION"})
        add("restore", restore, "Make the text of a revision the newest one.", _MODEL, revision)


def _add_edit_arguments(parser: CommandParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--set",
        type=_parse_change,
        action="append",
        metavar="NAME=VALUE",
        help=f"one of {', '.join(edit.FORM)}; an empty value removes the setting; repeatable",
    )
    source.add_argument("-f", "--file", type=Path, help="the new YAML")
    parser.add_argument("--reason", default="", help="why, for the history")


def _parse_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    if problem := untrusted.json_problem(value.encode("utf-8", "replace")):
        raise CommandError(f"--set {name}: the value is {problem}")
    try:
        return name, json.loads(value) if value else None
    except ValueError:
        return name, value


def list_models(options: Options) -> str:
    term = options["term"].casefold()
    entries = [
        entry
        for entry in definition_entries.read_entries()
        if entry.contains(term) and options["state"] in (None, entry.state)
    ]
    rows = definition_entries.summaries_of(entries)
    unusable = definition_entries.read_unusable_rows()
    if options["json"]:
        return command_line.as_json({"definitions": rows, "unusable": unusable})
    lines = [command_line.format_table(_LIST_HEADINGS, rows)] if rows else []
    lines += [
        command_line.printable(f"unusable: {row['file'] or row['name']}: {row['error']}") for row in unusable
    ]
    return "\n".join(lines) or "no definitions"


def show(options: Options) -> str:
    row = definition_entries.definition_detail(options["model"])
    if options["json"]:
        return command_line.as_json(row)
    notes = [f"# the file {row['file']} defines this model and stays in force"] if row["shadowed"] else []
    notes += [f"# {command_line.printable(text)}" for text in (*row["warnings"], row["error"]) if text]
    return "\n".join([*notes, str(row["text"]).rstrip()])


def edit_model(options: Options) -> str:
    """Edit a definition and save it. Raise Conflict if another user has changed the definition meanwhile."""
    names.check_text(options["reason"], "reason")
    name, row = options["model"], store.find(options["model"])
    former = store.text_in_force(name)
    if former is None:
        raise errors.NotFound(f"there is no definition of {name}; `manage.py models list` lists them")
    if options["set"]:
        text = edit.apply_changes(former, dict(options["set"]))
    else:
        text = _read_text(options["file"]) if options["file"] is not None else _edit_in_program(former)
    if text == former:
        return _saved_text(options, "not changed")
    try:
        saved = store.save(
            name,
            text,
            origin=DefinitionOrigin.EDITOR,
            actor=str(command_line.current_actor()),
            reason=options["reason"],
            expected_revision=row.revision if row is not None else 0,
            now=clock.now(),
        )
    except (errors.ClusterError, DatabaseError) as error:
        if options["set"] or options["file"] is not None:
            raise
        reason = error.message if isinstance(error, errors.ClusterError) else f"not saved: {error}"
        raise CommandError(
            f"{' '.join(reason.split())}; the edited text is in {_save_draft(text)}: use it with --file"
        ) from error
    return _saved_text(options, f"revision {saved.revision}")


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error


def _edit_in_program(text: str) -> str:
    """Open the text in the user's editor; return the edited text."""
    try:
        program = shlex.split(os.environ.get(EDITOR_VARIABLE, "")) or ["vi"]
    except ValueError as error:
        raise CommandError(f"{EDITOR_VARIABLE}: {error}: {os.environ[EDITOR_VARIABLE]}") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "definition.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            subprocess.run([*program, str(path)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CommandError(f"{program[0]}: {error}") from error
        close_old_connections()  # the database may have been restarted since: an edit takes minutes
        return _read_text(path)


def _save_draft(text: str) -> str:
    """Save the text to a file, because it was not accepted, and return the path."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False, encoding="utf-8") as file:
        file.write(text)
    return file.name


def _saved_text(options: Options, done: str) -> str:
    """Return the saved definition as text or JSON."""
    row = definition_entries.definition_detail(options["model"])
    if options["json"]:
        return command_line.as_json(row)
    shadowed = f"; the file {row['file']} stays in force" if row["shadowed"] else ""
    return f"{options['model']}: {done}{shadowed}"


def remove(options: Options) -> str:
    """Request the deletion of a definition, and follow it to its end."""
    name = options["model"]
    by = Requester(str(command_line.current_actor()))
    admission = definition_removal.request_removal(name, by=by, with_files=options["files"], now=clock.now())
    job = admission.operation.id
    return following.follow_unless_detached(options, job, name, {"jobID": str(job)})


def switch(options: Options) -> str:
    """Disable or enable the definition, as the verb says."""
    store.set_disabled(options["model"], options["verb"] == "disable", now=clock.now())
    return _saved_text(options, f"{options['verb']}d")


def show_history(options: Options) -> str:
    revisions = list(store.revisions_of(options["model"]))
    if not revisions:
        raise errors.NotFound(f"there is no stored definition of {options['model']}")
    diffs = list(store.diffs(revisions)) if options["diff"] or options["json"] else []
    if options["json"]:
        columns = ("number", "actor", "at", "reason", "origin")
        rows = [{name: getattr(revision, name) for name in columns} for revision in revisions]
        return command_line.as_json([row | {"diff": diff} for row, diff in zip(rows, diffs, strict=True)])
    return "\n\n".join(
        [
            command_line.format_table(_HISTORY_HEADINGS, revisions),
            *("\n".join(map(command_line.printable, diff.splitlines())) for diff in diffs),
        ]
    )


def restore(options: Options) -> str:
    saved = store.restore(
        options["model"],
        options["revision"],
        actor=str(command_line.current_actor()),
        origin=DefinitionOrigin.EDITOR,
        now=clock.now(),
    )
    return _saved_text(options, f"revision {saved.revision} has the text of revision {options['revision']}")


def add_model(options: Options) -> str:
    """Show the models that a text identifies, or import one model and follow the import to its end."""
    if options["show"]:
        found = inspection.inspect(options["text"], clock.now())
        return command_line.as_json(found) if options["json"] else _inspection_text(found)
    plan = inspection.plan_import(
        options["text"], variant=options["variant"], name=options["name"], now=clock.now()
    )
    if inspection.is_defined(plan.name):
        raise errors.Conflict(f"a model {plan.name} is defined: choose another name with --name, or edit it")
    admission = request_import(
        plan,
        by=Requester(str(command_line.current_actor())),
        now=clock.now(),
        load_after_import=options["load"],
    )
    job = admission.operation.id
    return following.follow_unless_detached(options, job, plan.name, {"jobID": str(job), "model": plan.name})


def _inspection_text(found: Row) -> str:
    lines = [command_line.printable(f"{found['title']} ({found['kind']})")]
    lines += [
        command_line.printable(f"{name}: {found[name]}")
        for name in ("licence", "commit", "problem")
        if found[name]
    ]
    if found["variants"]:
        lines.append(command_line.format_table(_VARIANT_HEADINGS, found["variants"]))
    if found["candidates"]:
        lines.append(command_line.format_table(_CANDIDATE_HEADINGS, found["candidates"]))
    return "\n".join(lines)
