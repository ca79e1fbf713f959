"""One table of fields makes the values of a JSON object and its schema."""

import pytest
from django.db.models import F
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from localai_cluster.web.shapes import COMPONENT_SCHEMAS, FLAG, TEXT, TIME, Shape, column, count, field
from nodes.registry.shape import LIVE_NODE_SHAPE, NODE_DETAIL_SHAPE, NODE_SHAPE

_DOCUMENTED = dict(COMPONENT_SCHEMAS)
COMPONENT_SCHEMAS.clear()
FACT = Shape("Fact", "A fact.", [field("at", TIME), field("why", TEXT, optional=True)])
THING = Shape(
    "Thing",
    "A thing.",
    [
        column("name", TEXT),
        column("size", count(), "In bytes.", optional=True),
        column("fact", FACT.ref, source=F("fact_text"), nullable=True, value_shape=FACT),
        field("ready", FLAG),
    ],
)
COMPONENT_SCHEMAS.clear()
COMPONENT_SCHEMAS.update(_DOCUMENTED)


def test_a_name_stands_for_one_component() -> None:
    with pytest.raises(ValueError, match="two components NodeDetail"):
        Shape("NodeDetail", "Another one.", [])


def test_a_row_becomes_an_object_without_its_empty_optional_keys() -> None:
    """An inner object comes as a JSON text and loses its own empty keys too."""
    assert THING.row(("a", 0, '{"at": "2026-01-01T00:00:00Z", "why": ""}')) == {
        "name": "a",
        "fact": {"at": "2026-01-01T00:00:00Z"},
    }
    assert THING.row(("b", 2, None)) == {"name": "b", "size": 2, "fact": None}


def test_given_values_must_be_keys_of_the_shape() -> None:
    """A key that the document does not know cannot leave."""
    assert THING.of(name="a", size=0, ready=False) == {"name": "a", "ready": False}
    with pytest.raises(TypeError, match="Thing has no colour"):
        THING.of(name="a", colour="red")


def test_the_schema_says_what_the_values_are() -> None:
    """Which keys must be there, and what a field adds to the schema it refers to."""
    Draft202012Validator.check_schema(THING.schema)
    assert THING.schema["required"] == ["fact", "name", "ready"]
    assert THING.schema["properties"]["size"] == {"type": "integer", "minimum": 0, "description": "In bytes."}
    assert THING.schema["properties"]["fact"] == {"allOf": [FACT.ref], "nullable": True}


def test_the_live_feed_has_every_key_and_the_list_leaves_empty_ones_out() -> None:
    """The three views of a node come from one table."""
    assert LIVE_NODE_SHAPE.schema["required"] == sorted(LIVE_NODE_SHAPE.fields)
    assert NODE_SHAPE.fields.keys() < NODE_DETAIL_SHAPE.fields.keys()
    assert "capability" not in NODE_SHAPE.schema["required"]
    assert (
        NODE_SHAPE.row((None,) * len(NODE_SHAPE.columns))
        .keys()
        .isdisjoint({"capability", "rejected", "vram_budget"})
    )
