"""The shape of JSON objects: one table of fields makes the values and describes them for the API document.

A `Shape` is what a route answers or a socket sends. Its fields say which column each value comes from, so it
reads rows by itself, without model instances. Values that come from elsewhere are given to `of`. An optional
field is left out while it is empty (`contract/http-api.md` §0.5).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from django.db.models import Case, CharField, F, Func, QuerySet, TextField, When
from django.db.models.enums import Choices
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, JSONObject

Schema = dict[str, Any]
Row = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
UUID: Schema = {"type": "string", "format": "uuid"}
TIME: Schema = {"type": "string", "format": "date-time"}
BYTES: Schema = {"type": "integer", "maximum": 2**63 - 1, "minimum": 0, "format": "int64"}
TEXTS: Schema = {"type": "array", "items": TEXT}


def count(least: int = 0, **more: Any) -> Schema:
    """A whole number."""
    return {"type": "integer", "minimum": least} | more


def reference(component: str) -> Schema:
    """The schema of that name."""
    return {"$ref": f"#/components/schemas/{component}"}


def mapping(values: Schema) -> Schema:
    """An object with any keys."""
    return {"type": "object", "additionalProperties": values}


class Time(Func):
    """A time as the wire has it, made by the database: cheaper than thousands of `datetime`s."""

    function = "to_char"
    template = """%(function)s(%(expressions)s AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
    output_field = CharField()


def text(column: str) -> Cast:
    """A column as a text, for instance an id."""
    return Cast(column, TextField())


class Named:
    """A component of the API document: its name and its schema."""

    def __init__(self, name: str, schema: Schema) -> None:
        self.name = name
        self.schema = schema

    @property
    def ref(self) -> Schema:
        """A reference to it."""
        return reference(self.name)

    @property
    def many(self) -> Schema:
        """A list of them."""
        return {"type": "array", "items": self.ref}


def enum(name: str, choices: type[Choices]) -> Named:
    """One of these values."""
    told = "\n".join(f"* `{value}` - {label}" for value, label in choices.choices)
    return Named(name, {"enum": list(choices.values), "type": "string", "description": told})


_SOURCES: Mapping[str, Callable[[str], Combinable]] = {"uuid": text, "date-time": Time}
"""How a column of this format is read; others are read as they are."""


@dataclass(frozen=True)
class Field:
    """One key: its schema, where its value comes from (None: from elsewhere) and when it is there.

    `inner` is the shape of a value that the database makes as a JSON text.
    """

    name: str
    schema: Schema
    column: Combinable | None = None
    meaning: str = ""
    optional: bool = False
    nullable: bool = False
    inner: "Shape | None" = None

    @property
    def described(self) -> Schema:
        """The schema, with what the field adds to it."""
        more = ({"description": self.meaning} if self.meaning else {}) | (
            {"nullable": True} if self.nullable else {}
        )
        if more and "$ref" in self.schema:
            return {"allOf": [self.schema]} | more
        return self.schema | more


def field(name: str, schema: Schema, meaning: str = "", **options: Any) -> Field:
    """A key whose value the caller has."""
    return Field(name, schema, None, meaning, **options)


def column(
    name: str, schema: Schema, meaning: str = "", *, source: Combinable | None = None, **options: Any
) -> Field:
    """A key whose value is a column, by default that of the same name."""
    if source is None:
        source = _SOURCES.get(schema.get("format", ""), F)(name)
    return Field(name, schema, source, meaning, **options)


class Shape(Named):
    """A JSON object."""

    def __init__(
        self, name: str, meaning: str, fields: Iterable[Field], required: Iterable[str] | None = None
    ) -> None:
        self.fields = {one.name: one for one in fields}
        self.columns = {name: one.column for name, one in self.fields.items() if one.column is not None}
        self._optional = [one.name for one in self.fields.values() if one.optional]
        self._inner = [(one.name, one.inner) for one in self.fields.values() if one.inner is not None]
        there = self.fields.keys() - set(self._optional) if required is None else required
        super().__init__(name, self._schema(meaning, sorted(there)))

    def _schema(self, meaning: str, required: Sequence[str]) -> Schema:
        schema = {
            "type": "object",
            "description": meaning,
            "properties": {name: one.described for name, one in self.fields.items()},
        }
        return schema | ({"required": required} if required else {})

    def of(self, **values: Any) -> Row:
        """The object with these values."""
        if unknown := values.keys() - self.fields.keys():
            raise TypeError(f"{self.name} has no {', '.join(sorted(unknown))}")
        return self.trimmed(values)

    def trimmed(self, row: Row) -> Row:
        """The same object without its optional keys that are empty."""
        for name in self._optional:
            if name in row and not row[name]:
                del row[name]
        return row

    def rows(self, found: QuerySet[Any]) -> list[Row]:
        """The object of each row, in their order; one query."""
        return [self.row(values) for values in found.values_list(*self.columns.values())]

    def row(self, values: Sequence[Any]) -> Row:
        """The object of the values of `columns`, in their order; more of them do no harm."""
        row: Row = dict(zip(self.columns, values, strict=False))
        for name, inner in self._inner:
            if row[name] is not None:
                row[name] = inner.trimmed(orjson.loads(row[name]))
        return self.trimmed(row)

    def made(self, **sources: Combinable) -> JSONObject:
        """The object as the database makes it; `sources` for fields that have no column of their own."""
        return JSONObject(**(self.columns | sources))

    def read(self, *, unless_null: str = "", **sources: Combinable) -> Combinable:
        """The object as a JSON text, null while the column `unless_null` is."""
        made: Combinable = self.made(**sources)
        if unless_null:
            made = Case(When(**{f"{unless_null}__isnull": False}, then=made))
        return Cast(made, TextField())
