"""The copy of the stored definitions that a process has; a row that has changed is read and parsed again.

`ModelDefinition.change` is the stamp of a row, as size and time are that of a file, so a poll without a
change is one query, and a lost NOTIFY costs only the time until the next poll.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Count, Max, Sum

from nodes.definitions.files import Definition, UnusableDefinition, parse_file
from nodes.definitions.recorded_files import parse_entries
from nodes.models import ModelDefinition

CHANNEL = "cluster_definitions"
"""NOTIFY channel: the name of the model whose definition has changed."""
SOURCE = "definitions/"
"""Prefix of `Definition.source` of a row. No file of the models folder has such a name."""
_COLUMNS = ("id", "change", "name", "origin", "revision", "disabled", "updated_at", "files", "text")


@dataclass(frozen=True)
class StoredDefinition:
    """A row, with its text parsed."""

    change: int
    name: str
    origin: str
    revision: int
    disabled: bool
    updated_at: datetime
    content: Definition | UnusableDefinition

    @property
    def source(self) -> str:
        """The `Definition.source` of this row."""
        return SOURCE + self.name

    @property
    def expects_marker(self) -> bool:
        """True if it records files of a models folder that was marked."""
        files = self.content.files.values() if isinstance(self.content, Definition) else ()
        return any(file.is_marked for file in files)


Rows = Mapping[UUID, StoredDefinition]


def read_rows(known: Rows) -> dict[UUID, StoredDefinition]:
    """Return the rows that are not deleted, reading those that differ from `known`; two queries at most.

    For a thread of its own, whose connection is closed.
    """
    try:
        present = ModelDefinition.objects.filter(deleted_at__isnull=True)
        stamps = dict(present.values_list("id", "change"))
        rows = {id: row for id, row in known.items() if stamps.get(id) == row.change}
        if outdated := stamps.keys() - rows.keys():
            for id, *values, text in present.filter(pk__in=outdated).values_list(*_COLUMNS):
                rows[id] = _parsed(values, text)
        return rows
    finally:
        connections.close_all()


def stored_definition(row: ModelDefinition) -> StoredDefinition:
    """Return the row with its text parsed."""
    return _parsed([getattr(row, name) for name in _COLUMNS[1:-1]], row.text)


_NOT_PARSED = UnusableDefinition("was not parsed")


def _parsed(values: Sequence[Any], text: str) -> StoredDefinition:
    *columns, entries = values
    row = StoredDefinition(*[*columns, _NOT_PARSED])
    try:
        definition = parse_file(text.encode(), row.source)
    except UnusableDefinition as error:
        return replace(row, content=error)
    files, changed = parse_entries(entries), int(row.updated_at.timestamp())
    return replace(row, content=replace(definition, files=files, changed=changed))


def definitions_revision() -> str:
    """Return a text that differs after each change of a row; one query."""
    figures = ModelDefinition.objects.aggregate(Count("id"), Sum("change"), Max("updated_at"))
    return "-".join(map(str, figures.values()))


def read_text(name: str) -> str | None:
    """Return the text of the stored definition; None without one. For a thread of its own."""
    try:
        present = ModelDefinition.objects.filter(deleted_at__isnull=True, name=name)
        return present.values_list("text", flat=True).first()
    finally:
        connections.close_all()
