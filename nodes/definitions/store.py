"""The only writer of stored definitions. Each change, its audit and its NOTIFY are one transaction.

A text is checked before it is saved: it must be usable, have the name of its row, and contain no secret.
Saving the text that is in force adds no revision, so an interrupted caller can repeat the call.
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
from django.db.models import BooleanField, F, Func, JSONField, Max, Q, Value

from localai_cluster.accounts import audit
from localai_cluster.accounts.audit import Change
from localai_cluster.kit import names
from localai_cluster.kit.errors import Conflict, InvalidInput, NotFound
from localai_cluster.kit.transactions import lock_name
from nodes.definitions import schema
from nodes.definitions.files import Definition, UnusableDefinition
from nodes.definitions.folder import folder
from nodes.definitions.recorded_files import FileConflict, RecordedFile, RecordedFiles, parse_entries
from nodes.definitions.rows import CHANNEL, SOURCE_PREFIX, stored_definition
from nodes.definitions.sizes import named_paths, records_in_definition, shards
from nodes.models import DefinitionRevision, ModelDefinition
from operations.changes.events import notify

log = logging.getLogger(__name__)

MAX_REVISIONS = 200
"""Maximum number of revisions of a definition; the oldest are deleted first."""
RETENTION = timedelta(days=365)
"""Minimum age of what `prune_revisions` and `prune_deleted` delete."""
MIN_REVISIONS = 100
"""Number of the latest revisions of a definition that are kept at any age."""
MAX_REASON_LENGTH = 500
_MAX_DIFF_LINES = 5000
"""Maximum number of lines of two texts together for which a difference is computed."""


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
    """Create a definition or, if `name` is given and the definition exists, add a revision to it.

    `expected_revision` is the revision that the caller has read, 0 = none. If the text is already in force,
    only `files` are stored. Raises InvalidInput for the text, FileConflict, and Conflict with `revision` if
    an existing definition must not be changed (no `name`) or has another revision.
    """
    definition = check(name, text)
    inherited = {} if files else records_for(definition)
    with transaction.atomic():
        lock_name("files of definitions")  # of two saves that name a path the second one sees the first
        row = _lock_row(definition.name)
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
                _notify_change(row)
            return row
        if row is None:
            revision = _forget_deleted(definition.name)
            row = ModelDefinition(name=definition.name, created_at=now)
        row.text, row.origin, row.revision = text, origin, revision + 1
        row.files = entries
        _save_change(row, "saved", f"revision {row.revision}{reason and f': {reason}'}", now)
        _add_revision(row, actor, reason, now)
    return row


def _forget_deleted(name: str) -> int:
    """Delete the definitions of this name that are marked as deleted; return their last revision, 0 = none.

    A new definition continues their numbers: a caller that has read a revision of the deleted one (an open
    editor, a download of hours) must not replace the new one, whose first revision would have that number.
    """
    deleted = ModelDefinition.objects.filter(name=name)
    last: int | None = deleted.aggregate(last=Max("revision"))["last"]
    deleted.delete()
    return last or 0


def check(name: str | None, text: str) -> Definition:
    """Return the definition of a text that may be saved under this name. Raise InvalidInput."""
    definition = schema.require_usable(text, SOURCE_PREFIX).definition
    assert definition is not None
    if name not in (None, definition.name):
        raise InvalidInput(
            f"text: `name` is {definition.name!r}, not {name!r}; clone it instead", field="text"
        )
    _check_name(definition.name)
    return definition


def records_for(definition: Definition) -> dict[str, RecordedFile]:
    """Return records of files that other stored definitions have for the files of this one, by path.

    One query. They are for a definition without records of its own. They come first from the stored
    definition itself, then from definitions that name the file now, then from definitions that named it
    earlier or are deleted. So a definition without its file in the models folder can be loaded if it is a
    copy, shares the file with another definition, or was deleted and saved again.
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
        records = records_in_definition(models, definition, parse_entries(row.files))
        if row.deleted_at is None and row.name == definition.name:
            own = records
        elif row.deleted_at is None:
            present = {**_records_in_row(row, records), **present}
        former = {**records, **former}
    return {**former, **present, **own}


def _records_in_row(row: ModelDefinition, records: RecordedFiles) -> dict[str, RecordedFile]:
    """Return those of the records whose files the text of the row names."""
    content = stored_definition(row).content
    return records_in_definition(folder().path, content, records) if isinstance(content, Definition) else {}


def _check_file_conflicts(definition: Definition, records: RecordedFiles) -> None:
    """Raise FileConflict if another stored definition names a different file at one of these paths.

    One query. A definition keeps the records of files that it no longer names, for its earlier revisions.
    """
    named = records_in_definition(folder().path, definition, records)
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
        files = _records_in_row(row, parse_entries(row.files))
        for path in sorted(named.keys() & files.keys()):
            if named[path].sha256 != files[path].sha256:
                raise FileConflict(
                    f"model {row.name} has another file {path}: remove it, or import under another name",
                    field="text",
                )


def _with_shared_records(
    entries: Sequence[Mapping[str, Any]], inherited: Mapping[str, RecordedFile]
) -> list[Mapping[str, Any]]:
    """Return the entries and, for paths without an entry, the `inherited` records."""
    own = {entry.get("path") for entry in entries}
    return [*entries, *(file.as_entry() for path, file in inherited.items() if path not in own)]


def _add_revision(row: ModelDefinition, actor: str, reason: str, now: datetime) -> None:
    """Store the row's text as its newest revision, and delete the oldest revisions beyond the maximum."""
    DefinitionRevision.objects.create(
        definition=row,
        number=row.revision,
        text=row.text,
        origin=row.origin,
        actor=actor[:150],
        reason=reason[:MAX_REASON_LENGTH],
        at=now,
    )
    row.revisions.filter(number__lte=row.revision - MAX_REVISIONS).delete()


def restore(
    name: str, number: int, *, actor: str, origin: str, now: datetime, expected_revision: int | None = None
) -> ModelDefinition:
    """Save the text of an earlier revision as the newest revision; raise NotFound if it does not exist.

    Without `expected_revision` the definition must not change meanwhile: a deleted one would come back.
    """
    row = find(name)
    if expected_revision is None and row is not None:
        expected_revision = row.revision
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
    """Disable or enable the definition; raise NotFound if it does not exist.

    Raise Conflict for a definition whose text disables it.
    """
    if find(name) is None:
        require_no_file(name)
    with transaction.atomic():
        row = _require_row(name)
        content = stored_definition(row).content
        if not disabled and isinstance(content, Definition) and content.disabled:
            raise Conflict("the definition says `disabled: true`: edit it", field="text")
        if row.disabled != disabled:
            row.disabled = disabled
            _save_change(row, "disabled" if disabled else "enabled", "", now)
    return row


def remove(name: str, *, id: UUID, now: datetime) -> ModelDefinition | None:
    """Mark the definition as deleted; return its row, None if it has been pruned.

    The row keeps its text until it is pruned. A repeated call changes nothing.
    """
    with transaction.atomic():
        row = _lock_row(name)
        if row is not None and row.id == id:
            row.deleted_at = now
            _save_change(row, "deleted", "", now)
            return row
        return ModelDefinition.objects.filter(pk=id).first()


def prune_revisions(*, before: datetime, limit: int) -> int:
    """Delete up to `limit` of the oldest revisions that are older than `before`; return their number.

    The latest `MIN_REVISIONS` revisions of each definition stay. Two queries.
    """
    old = DefinitionRevision.objects.filter(
        at__lt=before, number__lte=F("definition__revision") - MIN_REVISIONS
    )
    ids = old.order_by("at", "pk").values_list("pk", flat=True)[:limit]
    deleted, _ = DefinitionRevision.objects.filter(pk__in=list(ids)).delete()
    return deleted


def prune_deleted(*, before: datetime, limit: int) -> int:
    """Delete definitions that were marked as deleted before `before`; return their number.

    Deletes at most `limit` rows including revisions, but at least one definition. Three queries.
    """
    old = ModelDefinition.objects.filter(deleted_at__lt=before).order_by("deleted_at", "pk")
    ids = list(old.values_list("pk", flat=True)[: limit // MAX_REVISIONS or 1])
    ModelDefinition.objects.filter(pk__in=ids).delete()
    return len(ids)


def find(name: str) -> ModelDefinition | None:
    """Return the stored definition; None if it does not exist."""
    if names.find_unprintable(name):
        return None  # PostgreSQL rejects NUL
    return ModelDefinition.objects.filter(name=name, deleted_at__isnull=True).first()


def text_in_force(name: str) -> str | None:
    """Return the text with which an edit starts: the stored row's, else the file's, else None.

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
    """Return the file of the models folder that overrides a stored definition; "" if none does."""
    return async_to_sync(folder().file_of)(name)


def require_no_file(name: str) -> None:
    """Raise Conflict if a file defines the model."""
    if file := file_of(name):
        raise Conflict(f"the file {file} of the models folder defines {name}", field="name")


def revisions_of(name: str) -> Any:
    """Return the revisions of the stored definition, newest first."""
    rows = DefinitionRevision.objects.filter(definition__name=name, definition__deleted_at__isnull=True)
    return rows.none() if names.find_unprintable(name) else rows.order_by("-number")


def diffs(revisions: Sequence[DefinitionRevision]) -> Iterator[str]:
    """Yield for each of these revisions of one definition its difference to the revision before.

    One query.
    """
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
    """Return a unified diff of two texts; if they are too long to compare, only their numbers of lines."""
    before, after = former.splitlines(keepends=True), text.splitlines(keepends=True)
    if len(before) + len(after) > _MAX_DIFF_LINES:
        return f"--- {former_name}: {len(before)} lines\n+++ {name}: {len(after)} lines\n"
    lines = difflib.unified_diff(before, after, former_name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _lock_row(name: str) -> ModelDefinition | None:
    """Return the row, locked until the commit. The name is locked too, even if no row exists."""
    lock_name(f"definition {name}")
    return ModelDefinition.objects.select_for_update().filter(name=name, deleted_at__isnull=True).first()


_ROUTE_NAMES = ("schema", "preview")
"""Names that a definition cannot have, because they are routes below `/api/definitions/`."""
_ROUTE_SUFFIXES = ("clone", "disable", "enable", "revisions", "restore")
"""Last parts that a definition's name cannot have, because they are routes below `/api/definitions/`."""


def _check_name(name: str) -> None:
    """Raise InvalidInput if the path of the definition would be the path of another route."""
    if name in _ROUTE_NAMES or ("/" in name and name.rpartition("/")[2] in _ROUTE_SUFFIXES):
        raise InvalidInput(f"text: `name` must not be {name!r}, which is a route of the API", field="text")


def _require_row(name: str) -> ModelDefinition:
    row = None if names.find_unprintable(name) else _lock_row(name)
    if row is None:
        raise NotFound(f"there is no stored definition of {name}")
    return row


def _revision_conflict(name: str, revision: int) -> Conflict:
    what = f"is at revision {revision}" if revision else "is not stored any more"
    return Conflict(f"the definition of {name} {what}", field="revision", revision=revision)


def _save_change(row: ModelDefinition, verb: str, detail: str, now: datetime) -> None:
    """Save the row with its audit entry and NOTIFY; this process reads the row again after the commit."""
    row.change += 1
    row.updated_at = now
    row.save()
    audit.record(Change(f"definition.{verb}", f"definition {row.name}", str(row.id), detail), at=now)
    _notify_change(row)
    log.info("definition of %s: %s %s", row.name, verb, detail)


def _notify_change(row: ModelDefinition) -> None:
    """Make all processes read the row again after the commit."""
    notify(CHANNEL, row.name)
    transaction.on_commit(folder().rows_changed)
