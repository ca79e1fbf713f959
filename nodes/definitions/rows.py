"""A process's copy of the stored definitions; only changed rows are read and parsed again.

`ModelDefinition.change` is the stamp of a row, like size and time of a file. So a poll without a change is
one query, and a lost NOTIFY costs only the time until the next poll.
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
"""NOTIFY channel; the payload is the name of the model whose definition has changed."""
SOURCE_PREFIX = "definitions/"
"""Prefix of `Definition.source` of a row. No file of the models folder has such a name."""
_ROW_COLUMNS = ("id", "change", "name", "origin", "revision", "disabled", "updated_at", "files", "text")


@dataclass(frozen=True)
class StoredDefinition:
    """A stored definition with its parsed text."""

    change: int
    name: str
    origin: str
    revision: int
    disabled: bool
    updated_at: datetime
    content: Definition | UnusableDefinition

    @property
    def source(self) -> str:
        """`Definition.source` of this row."""
        return SOURCE_PREFIX + self.name

    @property
    def expects_marker(self) -> bool:
        """True if the files of the row were recorded in a models folder with a marker."""
        files = self.content.files.values() if isinstance(self.content, Definition) else ()
        return any(file.is_marked for file in files)


Rows = Mapping[UUID, StoredDefinition]


def read_rows(known: Rows) -> dict[UUID, StoredDefinition]:
    """Return all rows that are not deleted; only rows that differ from `known` are read. Two queries at most.

    Must run in a dedicated thread, because it closes the thread's database connection.
    """
    try:
        present = ModelDefinition.objects.filter(deleted_at__isnull=True)
        stamps = dict(present.values_list("id", "change"))
        rows = {id: row for id, row in known.items() if stamps.get(id) == row.change}
        if outdated := stamps.keys() - rows.keys():
            for id, *values, text in present.filter(pk__in=outdated).values_list(*_ROW_COLUMNS):
                rows[id] = _parse_row(values, text)
        return rows
    finally:
        connections.close_all()


def stored_definition(row: ModelDefinition) -> StoredDefinition:
    """Return the row with its parsed text."""
    return _parse_row([getattr(row, name) for name in _ROW_COLUMNS[1:-1]], row.text)


_NOT_PARSED = UnusableDefinition("was not parsed")


def _parse_row(values: Sequence[Any], text: str) -> StoredDefinition:
    *columns, entries = values
    row = StoredDefinition(*[*columns, _NOT_PARSED])
    try:
        definition = parse_file(text.encode(), row.source)
    except UnusableDefinition as error:
        return replace(row, content=error)
    files, changed = parse_entries(entries), int(row.updated_at.timestamp())
    return replace(row, content=replace(definition, files=files, changed=changed))


def definitions_revision() -> str:
    """Return a text that changes whenever a row changes. One query."""
    figures = ModelDefinition.objects.aggregate(Count("id"), Sum("change"), Max("updated_at"))
    return "-".join(map(str, figures.values()))


def read_text(name: str) -> str | None:
    """Return the text of the stored definition; None without one.

    Must run in a dedicated thread, because it closes the thread's database connection.
    """
    try:
        present = ModelDefinition.objects.filter(deleted_at__isnull=True, name=name)
        return present.values_list("text", flat=True).first()
    finally:
        connections.close_all()
