"""The only writer of stored definitions. Each change, its audit and its NOTIFY are one transaction.

A text is checked before it is saved: it is usable, has the name of its row, and holds no secret. Saving the
text that is in force adds no revision, so a caller that was interrupted can repeat it.
"""

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.models import BooleanField, F, Func, JSONField, Q, Value

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.kit import names
from localai_cluster.kit.errors import Conflict, InvalidInput, NotFound
from localai_cluster.kit.locks import lock_name
from nodes.definitions import schema
from nodes.definitions.files import Definition, UnusableDefinition
from nodes.definitions.folder import folder
from nodes.definitions.recorded_files import FileConflict, RecordedFile, RecordedFiles, parse_entries
from nodes.definitions.rows import CHANNEL, SOURCE, stored_definition
from nodes.definitions.sizes import named_paths, named_records, shards
from nodes.models import DefinitionRevision, ModelDefinition
from operations.changes.events import notify

log = logging.getLogger(__name__)

MOST_REVISIONS = 200
"""Revisions of a definition that are kept, the latest ones."""
RETENTION = timedelta(days=365)
"""Age after which `prune_revisions` and `prune_deleted` may delete."""
LEAST_REVISIONS = 100
"""Revisions of a definition that stay at any age, the latest ones."""
LONGEST_REASON = 500
_MOST_LINES = 5000
"""Lines of two texts together that are compared."""


def save(
    name: str | None,
    text: str,
    *,
    origin: str,
    actor: str,
    now: datetime,
    reason: str = "",
    expected_revision: int | None = None,
    files: Sequence[Mapping[str, Any]] = (),
) -> ModelDefinition:
    """Create the definition, or add a revision if `name` is given and it exists.

    `expected_revision` is the one that the caller has seen, 0 for none. Of a text that is in force only
    `files` are stored. Raises InvalidInput for the text, FileConflict, and Conflict with `revision` if a
    definition exists that `name` does not permit to change, or has moved.
    """
    definition = check(name, text)
    inherited = {} if files else records_for(definition)
    with transaction.atomic():
        lock_name("files of definitions")  # of two saves that name a path the second one sees the first
        row = _locked(definition.name)
        revision = row.revision if row is not None else 0
        if (name is None and row is not None) or expected_revision not in (None, revision):
            raise _revision_conflict(definition.name, revision)
        fetched = list(map(dict, files))
        entries = fetched or _with_shared_records(row.files if row is not None else (), inherited)
        _check_file_conflicts(definition, parse_entries(entries))
        if row is not None and row.text == text:
            if fetched and row.files != fetched:
                row.files, row.change, row.updated_at = fetched, row.change + 1, now
                row.save(update_fields=["files", "change", "updated_at"])
                _announce(row)
            return row
        if row is None:
            ModelDefinition.objects.filter(name=definition.name).delete()  # those that were deleted before
            row = ModelDefinition(name=definition.name, created_at=now)
        row.text, row.origin, row.revision = text, origin, revision + 1
        row.files = entries
        _save_change(row, "saved", f"revision {row.revision}{reason and f': {reason}'}", now)
        _add_revision(row, actor, reason, now)
    return row


def check(name: str | None, text: str) -> Definition:
    """Return the definition of a text that may be saved under the name. Raise InvalidInput."""
    definition = schema.require_usable(text, SOURCE).definition
    assert definition is not None
    if name not in (None, definition.name):
        raise InvalidInput(
            f"text: `name` is {definition.name!r}, not {name!r}; clone it instead", field="text"
        )
    _check_name(definition.name)
    return definition


def records_for(definition: Definition) -> dict[str, RecordedFile]:
    """Return the stored file records for a definition that has none, by path; one query.

    The records are those of all stored definitions: its own first, then those of definitions that name the
    file now, then those that have named it before or are deleted. So a copy of a definition, another one with
    the same file, or one that was deleted and is saved again can be loaded while that is at its source.
    """
    models = folder().path
    paths = {path.relative_to(models) for path in named_paths(models, definition)}
    names_file = [
        Func(
            "files",
            Value("$[*].path ? (@ starts with $text)"),
            Value({"text": path.as_posix()}, JSONField()),
            function="jsonb_path_exists",
            output_field=BooleanField(),
        )
        for path in {shards(path)[0] for path in paths}
    ]
    if not names_file:
        return {}
    rows = ModelDefinition.objects.filter(reduce(or_, map(Q, names_file)))
    own: dict[str, RecordedFile] = {}
    present: dict[str, RecordedFile] = {}
    former: dict[str, RecordedFile] = {}
    for row in rows.order_by(F("deleted_at").desc(nulls_first=True), "created_at"):
        records = named_records(models, definition, parse_entries(row.files))
        if row.deleted_at is None and row.name == definition.name:
            own = records
        elif row.deleted_at is None:
            present = {**_named_by(row, records), **present}
        former = {**records, **former}
    return {**former, **present, **own}


def _named_by(row: ModelDefinition, records: RecordedFiles) -> dict[str, RecordedFile]:
    """Return those of the records whose files the row's text names."""
    content = stored_definition(row).content
    return named_records(folder().path, content, records) if isinstance(content, Definition) else {}


def _check_file_conflicts(definition: Definition, records: RecordedFiles) -> None:
    """Raise FileConflict if another stored definition names another file under a path of this one; one query.

    A definition keeps the records of files that it names no longer, for its former revisions.
    """
    named = named_records(folder().path, definition, records)
    if not named:
        return
    has_path = Func(
        "files",
        Value("$[*].path ? (@ == $paths[*])"),
        Value({"paths": sorted(named)}, JSONField()),
        function="jsonb_path_exists",
        output_field=BooleanField(),
    )
    others = ModelDefinition.objects.filter(has_path, deleted_at__isnull=True).exclude(name=definition.name)
    for row in others.order_by("created_at"):
        files = _named_by(row, parse_entries(row.files))
        for path in sorted(named.keys() & files.keys()):
            if named[path].sha256 != files[path].sha256:
                raise FileConflict(
                    f"model {row.name} has another file {path}: remove it, or import under another name",
                    field="text",
                )


def _with_shared_records(
    entries: Sequence[Mapping[str, Any]], inherited: Mapping[str, RecordedFile]
) -> list[Mapping[str, Any]]:
    """Return the entries, and the `inherited` records of paths that have no entry."""
    own = {entry.get("path") for entry in entries}
    return [*entries, *(file.as_entry() for path, file in inherited.items() if path not in own)]


def _add_revision(row: ModelDefinition, actor: str, reason: str, now: datetime) -> None:
    """Store the row's text as its newest revision; remove the oldest above the limit."""
    DefinitionRevision.objects.create(
        definition=row,
        number=row.revision,
        text=row.text,
        origin=row.origin,
        actor=actor[:150],
        reason=reason[:LONGEST_REASON],
        at=now,
    )
    row.revisions.filter(number__lte=row.revision - MOST_REVISIONS).delete()


def restore(
    name: str, number: int, *, actor: str, origin: str, now: datetime, expected_revision: int | None = None
) -> ModelDefinition:
    """Save the text of an earlier revision as the newest one; raise NotFound without it."""
    revision = revisions_of(name).filter(number=number).first()
    if revision is None:
        raise NotFound(f"model {name} has no revision {number}")
    reason = f"restored revision {number}"
    return save(
        name,
        revision.text,
        origin=origin,
        actor=actor,
        now=now,
        reason=reason,
        expected_revision=expected_revision,
    )


def set_disabled(name: str, disabled: bool, *, now: datetime) -> ModelDefinition:
    """Disable or enable the definition; raise NotFound without one, Conflict if only a file defines it."""
    if find(name) is None:
        require_no_file(name)
    with transaction.atomic():
        row = _existing(name)
        if row.disabled != disabled:
            row.disabled = disabled
            _save_change(row, "disabled" if disabled else "enabled", "", now)
    return row


def remove(name: str, *, id: UUID, now: datetime) -> ModelDefinition | None:
    """Delete this definition, unless it is deleted already; return its row, None if the name is used again.

    Its text stays until then.
    """
    with transaction.atomic():
        row = _locked(name)
        if row is not None and row.id == id:
            row.deleted_at = now
            _save_change(row, "deleted", "", now)
            return row
        return ModelDefinition.objects.filter(pk=id).first()


def prune_revisions(*, before: datetime, limit: int) -> int:
    """Delete the oldest `limit` revisions from before `before` that `LEAST_REVISIONS` others follow.

    Return their number. Two queries.
    """
    old = DefinitionRevision.objects.filter(
        at__lt=before, number__lte=F("definition__revision") - LEAST_REVISIONS
    )
    ids = old.order_by("at", "pk").values_list("pk", flat=True)[:limit]
    deleted, _ = DefinitionRevision.objects.filter(pk__in=list(ids)).delete()
    return deleted


def prune_deleted(*, before: datetime, limit: int) -> int:
    """Delete definitions that were marked as deleted before `before`; return their number.

    With their revisions they are at most `limit` rows, but one definition at least. Three queries.
    """
    old = ModelDefinition.objects.filter(deleted_at__lt=before).order_by("deleted_at", "pk")
    ids = list(old.values_list("pk", flat=True)[: limit // MOST_REVISIONS or 1])
    ModelDefinition.objects.filter(pk__in=ids).delete()
    return len(ids)


def find(name: str) -> ModelDefinition | None:
    """Return the stored definition; None without one."""
    if names.unprintable(name):
        return None  # PostgreSQL rejects NUL
    return ModelDefinition.objects.filter(name=name, deleted_at__isnull=True).first()


def text_in_force(name: str) -> str | None:
    """Return the text that an edit begins with: that of the row, of the file without one; None without both.

    Raises InvalidInput for a file that cannot be read.
    """
    row = find(name)
    if row is not None:
        return row.text
    try:
        return async_to_sync(folder().text)(name)
    except UnusableDefinition as error:
        raise InvalidInput(f"name: the file of {name} {error}", field="name") from error


def file_of(name: str) -> str:
    """Return the file of the models folder that wins over a row of this name; "" without one."""
    return async_to_sync(folder().file_of)(name)


def require_no_file(name: str) -> None:
    """Raise Conflict if a file defines the model."""
    if file := file_of(name):
        raise Conflict(f"the file {file} of the models folder defines {name}", field="name")


def revisions_of(name: str) -> Any:
    """Return the revisions of the stored definition, the newest first."""
    rows = DefinitionRevision.objects.filter(definition__name=name, definition__deleted_at__isnull=True)
    return rows.none() if names.unprintable(name) else rows.order_by("-number")


def diffs(revisions: Sequence[DefinitionRevision]) -> Iterator[str]:
    """Yield the change from the one before for each of these revisions of one definition; one query."""
    numbers = {revision.number - 1 for revision in revisions}
    before = DefinitionRevision.objects.filter(
        definition__in={revision.definition_id for revision in revisions}, number__in=numbers
    )
    texts = {row.number: row.text for row in before}
    for revision in revisions:
        former = texts.get(revision.number - 1, "")
        labels = f"revision {revision.number - 1}", f"revision {revision.number}"
        yield diff(former, revision.text, *labels)


def diff(former: str, text: str, former_name: str, name: str) -> str:
    """Return a unified diff; only the numbers of lines for texts that are too long to be compared."""
    before, after = former.splitlines(keepends=True), text.splitlines(keepends=True)
    if len(before) + len(after) > _MOST_LINES:
        return f"--- {former_name}: {len(before)} lines\n+++ {name}: {len(after)} lines\n"
    lines = difflib.unified_diff(before, after, former_name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _locked(name: str) -> ModelDefinition | None:
    """Return the row, locked until the commit; also a row that does not exist is locked, by its name."""
    lock_name(f"definition {name}")
    return ModelDefinition.objects.select_for_update().filter(name=name, deleted_at__isnull=True).first()


_WORDS, _VERBS = ("schema", "preview"), ("clone", "disable", "enable", "revisions", "restore")
"""Names and last parts of names that are routes below `/api/definitions/`."""


def _check_name(name: str) -> None:
    """Raise InvalidInput for a name whose definition would have the path of another route."""
    if name in _WORDS or ("/" in name and name.rpartition("/")[2] in _VERBS):
        raise InvalidInput(f"text: `name` must not be {name!r}, which is a route of the API", field="text")


def _existing(name: str) -> ModelDefinition:
    row = None if names.unprintable(name) else _locked(name)
    if row is None:
        raise NotFound(f"there is no stored definition of {name}")
    return row


def _revision_conflict(name: str, revision: int) -> Conflict:
    what = f"is at revision {revision}" if revision else "is not stored any more"
    return Conflict(f"the definition of {name} {what}", field="revision", revision=revision)


def _save_change(row: ModelDefinition, verb: str, detail: str, now: datetime) -> None:
    """Save the row with its audit entry and NOTIFY; this process reads it again after the commit."""
    row.change += 1
    row.updated_at = now
    row.save()
    audit.record(Change(f"definition.{verb}", f"definition {row.name}", str(row.id), detail), at=now)
    _announce(row)
    log.info("definition of %s: %s %s", row.name, verb, detail)


def _announce(row: ModelDefinition) -> None:
    """Have all processes read the row again after the commit."""
    notify(CHANNEL, row.name)
    transaction.on_commit(folder().rows_changed)
