"""Shapes of JSON objects: one table of fields that builds the values and describes them in the API document.

A `Shape` is the body of a response or of a websocket message. Its fields name the column of each value, so it
reads rows without model instances. The caller passes all other values to `of`. An optional field is omitted
while it is empty (`contract/http-api.md` §0.5). The values of `example` form the example of the API document.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from django.db.models import Case, CharField, F, Func, QuerySet, TextField, When
from django.db.models.enums import Choices
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast, JSONObject
from msgspec import UNSET

Schema = dict[str, Any]
Row = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number", "minimum": 0}
PERCENT: Schema = NUMBER | {"maximum": 100, "format": "double"}
UUID: Schema = {"type": "string", "format": "uuid"}
TIME: Schema = {"type": "string", "format": "date-time"}
BYTES: Schema = {"type": "integer", "maximum": 2**63 - 1, "minimum": 0, "format": "int64"}
TEXTS: Schema = {"type": "array", "items": TEXT}
EXAMPLE_FINGERPRINT = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
EXAMPLE_TIME = "2026-08-22T09:15:04.120394Z"
EXAMPLE_NODE_ID = "5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11"
EXAMPLE_JOB_ID = "e63fad81-e53f-4e5f-a2a5-0eb06c5b5af7"


def count(least: int = 0, **constraints: Any) -> Schema:
    """Return the schema of a whole number that is at least `least`."""
    return {"type": "integer", "minimum": least} | constraints


def reference(component: str) -> Schema:
    """Return a schema that refers to the component with this name."""
    return {"$ref": f"#/components/schemas/{component}"}


def mapping_schema(values: Schema) -> Schema:
    """Return the schema of an object with any keys, whose values have the schema `values`."""
    return {"type": "object", "additionalProperties": values}


class Time(Func):
    """SQL expression that formats a time for the API, faster than Python could."""

    function = "to_char"
    template = """%(function)s(%(expressions)s AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""
    output_field = CharField()


def text(column: str) -> Cast:
    """Return a SQL expression that casts a column, such as an id, to text."""
    return Cast(column, TextField())


COMPONENT_SCHEMAS: dict[str, Schema] = {}
"""Component schemas of the API document by name."""


class Named:
    """A named component of the API document, with its schema."""

    def __init__(self, name: str, schema: Schema) -> None:
        if name in COMPONENT_SCHEMAS:
            raise ValueError(f"the API document has two components {name}")
        self.name = name
        self.schema = COMPONENT_SCHEMAS[name] = schema

    @property
    def ref(self) -> Schema:
        """A schema that refers to this component."""
        return reference(self.name)

    @property
    def many(self) -> Schema:
        """The schema of a list of this component."""
        return {"type": "array", "items": self.ref}


def one_of(choices: type[Choices]) -> Schema:
    """Return the schema of a text with one of these choices."""
    description = "\n".join(f"* `{value}` - {label}" for value, label in choices.choices)
    return {"enum": list(choices.values), "type": "string", "description": description}


def enum(name: str, choices: type[Choices]) -> Named:
    """Return a named component whose value is one of these choices."""
    return Named(name, one_of(choices))


_EXPRESSION_BY_FORMAT: Mapping[str, Callable[[str], Combinable]] = {"uuid": text, "date-time": Time}
"""SQL expression that reads a column, by the format of its schema. Other columns are read unchanged."""


@dataclass(frozen=True)
class Field:
    """A key of an object: its name, its schema, its column, and whether it may be absent or null.

    If `column` is None, the caller passes the value. `value_shape` is the shape of a value that the database
    builds as JSON text. Without an `example` of its own, the field has the example of its schema.
    """

    name: str
    schema: Schema
    column: Combinable | None = None
    meaning: str = ""
    optional: bool = False
    nullable: bool = False
    value_shape: "Shape | None" = None
    example: Any = UNSET

    @property
    def described(self) -> Schema:
        """The schema with the description and nullability of the field."""
        additions = ({"description": self.meaning} if self.meaning else {}) | (
            {"nullable": True} if self.nullable else {}
        )
        if additions and "$ref" in self.schema:
            return {"allOf": [self.schema]} | additions
        return self.schema | additions


def field(name: str, schema: Schema, meaning: str = "", **options: Any) -> Field:
    """Return a field whose value the caller passes."""
    return Field(name, schema, None, meaning, **options)


def column(
    name: str, schema: Schema, meaning: str = "", *, source: Combinable | None = None, **options: Any
) -> Field:
    """Return a field whose value is read from a column, by default the column with its name."""
    if source is None:
        source = _EXPRESSION_BY_FORMAT.get(schema.get("format", ""), F)(name)
    return Field(name, schema, source, meaning, **options)


def example_of(schema: Schema) -> Any:
    """Return the example of a shape, or of a list of one, that this schema refers to; UNSET without one."""
    if schema.get("type") == "array" and (item := example_of(schema["items"])) is not UNSET:
        return [item]
    shape = _SHAPES.get(schema.get("$ref", "").rpartition("/")[2])
    return UNSET if shape is None else shape.example


_SHAPES: "dict[str, Shape]" = {}


class Shape(Named):
    """A JSON object with a fixed set of keys, built from columns or from values."""

    def __init__(
        self, name: str, meaning: str, fields: Iterable[Field], required: Iterable[str] | None = None
    ) -> None:
        self.fields = {entry.name: entry for entry in fields}
        self.columns = {name: entry.column for name, entry in self.fields.items() if entry.column is not None}
        self._optional = [entry.name for entry in self.fields.values() if entry.optional]
        self._value_shapes = [
            (name, entry.value_shape) for name, entry in self.fields.items() if entry.value_shape is not None
        ]
        required_names = self.fields.keys() - set(self._optional) if required is None else required
        super().__init__(name, self._schema(meaning, sorted(required_names)))
        _SHAPES[name] = self

    @property
    def example(self) -> Any:
        """The object with the examples of its fields; UNSET if one that is always there has none."""
        values = {
            name: example_of(entry.schema) if entry.example is UNSET else entry.example
            for name, entry in self.fields.items()
        }
        if any(values[name] is UNSET for name, entry in self.fields.items() if not entry.optional):
            return UNSET
        return {name: value for name, value in values.items() if value is not UNSET}

    def _schema(self, meaning: str, required: Sequence[str]) -> Schema:
        schema = {
            "type": "object",
            "description": meaning,
            "properties": {name: entry.described for name, entry in self.fields.items()},
        }
        return schema | ({"required": required} if required else {})

    def of(self, **values: Any) -> Row:
        """Return the object with these values. Raise TypeError for an unknown field."""
        if unknown := values.keys() - self.fields.keys():
            raise TypeError(f"{self.name} has no {', '.join(sorted(unknown))}")
        return self.trimmed(values)

    def of_object(self, source: object, **values: Any) -> Row:
        """Return the object with these values. Other fields are attributes of `source`."""
        others = {name: getattr(source, name) for name in self.fields if name not in values}
        return self.of(**others, **values)

    def trimmed(self, row: Row) -> Row:
        """Delete the empty optional keys of `row` in place; return `row`."""
        for name in self._optional:
            if name in row and not row[name]:
                del row[name]
        return row

    def rows(self, queryset: QuerySet[Any]) -> list[Row]:
        """Return one object for each row of the queryset, in its order, with one query."""
        return [self.row(values) for values in queryset.values_list(*self.columns.values())]

    def row(self, values: Sequence[Any]) -> Row:
        """Return the object for the values of its columns, in order. Ignore further values."""
        row: Row = dict(zip(self.columns, values, strict=False))
        for name, value_shape in self._value_shapes:
            if row[name] is not None:
                row[name] = value_shape.trimmed(orjson.loads(row[name]))
        return self.trimmed(row)

    def made(self, **sources: Combinable) -> JSONObject:
        """Return a SQL expression that builds the object; `sources` has those of fields without a column."""
        return JSONObject(**(self.columns | sources))

    def read(self, *, unless_null: str = "", **sources: Combinable) -> Combinable:
        """Return a SQL expression of the object as JSON text, null if the column `unless_null` is null."""
        expression: Combinable = self.made(**sources)
        if unless_null:
            expression = Case(When(**{f"{unless_null}__isnull": False}, then=expression))
        return Cast(expression, TextField())
