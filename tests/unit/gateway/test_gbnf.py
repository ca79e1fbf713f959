"""JSON schemas as grammars: an answer that follows the grammar follows the schema."""

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit.errors import InvalidInput
from nodes.gateway import gbnf, schemas
from tests.support.grammars import Hearer, Speaker

SIMPLE: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "string", "format": "uuid"},
            {"type": "integer"},
            {"type": "integer", "minimum": 0},
            {"type": "number"},
            {"type": "number", "minimum": 0},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"type": "object"},
            {},
            {"const": 'a "quoted"\\\n\u00e9'},
        ]
    ),
    st.lists(
        st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none()), min_size=1, max_size=3
    ).map(lambda values: {"enum": values}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], needed: list[bool], extra: Any) -> dict[str, Any]:
        required = [name for name, must in zip(properties, needed, strict=False) if must]
        return {"type": "object", "properties": properties, "required": required, **extra}

    extras = st.sampled_from([{}, {"additionalProperties": False}])
    names = st.text(max_size=4)
    return st.builds(
        made, st.dictionaries(names, inner, max_size=4), st.lists(st.booleans(), min_size=4), extras
    )


def lists(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.sampled_from([{}, {"minItems": 1}, {"maxItems": 0}, {"minItems": 2, "maxItems": 3}])
    return st.builds(lambda items, bound: {"type": "array", "items": items, **bound}, inner, bounds)


SCHEMAS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        objects(inner),
        lists(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=6,
)


@given(SCHEMAS, st.integers(0, 2**32))
def test_what_follows_the_grammar_follows_the_schema(schema: dict[str, Any], seed: int) -> None:
    rules = gbnf.build_rules(schema)
    said = Speaker(rules, seed).says(rules["root"])
    jsonschema.validate(json.loads(said), schema)
    assert Hearer(rules, said).whole()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0},
        "born": {"type": "string", "format": "date"},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 2},
    },
    "required": ["age", "friends"],
    "$defs": {"friend": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
}
OPEN = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}}
BOTH = {
    "allOf": [
        {"properties": {"a": {"type": "null"}}, "required": ["a"]},
        {"properties": {"b": {"type": "null"}}, "required": ["b"]},
    ]
}
BASE = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
MORE = {"properties": {"b": {"type": "null"}}, "required": ["b"]}
NAMED = {
    "$defs": {"base": BASE, "other": {"$ref": "#/$defs/base"}, "all": {"allOf": [{"$ref": "#/$defs/base"}]}}
}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        (PERSON, {"name": "Ada", "age": 36, "born": "1815-12-10", "friends": ["Mary", None]}, True),
        (PERSON, {"age": 0, "friends": []}, True),
        (PERSON, {"age": -1, "friends": []}, False),
        (PERSON, {"age": 1}, False),
        (PERSON, {"name": "", "age": 1, "friends": []}, False),
        (PERSON, {"age": 1, "friends": ["a", "b", "c"]}, False),
        (PERSON, {"age": 1, "born": "tomorrow", "friends": []}, False),
        (PERSON, {"age": 1, "friends": [], "more": 1}, False),
        (OPEN, {"b": None}, True),
        (OPEN, {"b": 1}, False),
        (BOTH, {"a": None, "b": None}, True),
        (BOTH, {"a": None}, False),
        *(
            (NAMED | {"items": part}, [value], fits)
            for part in (
                {"allOf": [{"$ref": "#/$defs/base"}, MORE]},
                {"allOf": [{"$ref": "#/$defs/other"}, MORE]},
                {"allOf": [{"$ref": "#/$defs/all"}, {"allOf": [MORE]}]},
                {"$ref": "#/$defs/base", **MORE},
                {"allOf": [{"anyOf": [{"$ref": "#/$defs/base"}]}, {"anyOf": [MORE]}]},
            )
            for value, fits in (({"a": None, "b": None}, True), ({"a": None}, False), ({"b": None}, False))
        ),
        ({"$ref": "#/$defs/base", "title": "A", **NAMED}, {"a": None}, True),
        *(
            ({"allOf": parts}, value, fits)
            for parts in (
                [{"const": 2}, {"enum": [1, 2, 3]}],
                [{"enum": [1, 2, 3]}, {"const": 2}],
                [{"enum": [1, 2]}, {"enum": [2.0, 3]}],
                [{"enum": [2, True]}, {"enum": [1, 2]}],
                [{"anyOf": [{"const": 1}, {"const": 2}]}, {"enum": [2, 3]}],
                [{"$ref": "#/allOf/1"}, {"enum": [2, 3], "const": 2}],
            )
            for value, fits in ((2, True), (1, False), (3, False), (True, False))
        ),
        (PAIR, [1, "b"], True),
        (PAIR, ["b", 1], False),
        (PAIR, [1, "b", 2], False),
        ({"type": "nonsense"}, {"any": ["thing", 1.5e3, True]}, True),
    ],
)
def test_what_a_grammar_lets_pass(schema: dict[str, Any], value: object, fits: bool) -> None:
    assert Hearer(gbnf.build_rules(schema), json.dumps(value)).whole() is fits


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"const": 1}, {"const": 2}]},
        {"allOf": [{"enum": [1, 2]}, {"enum": [3]}]},
        {"const": 1, "enum": [True]},
        {"allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"enum": [3]}]},
        {"$defs": {"a": {"const": 1}}, "items": {"$ref": "#/$defs/a", "const": 2}},
        {"$defs": {"a": {"const": 1, "enum": [2]}}, "properties": {"b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="leaves no value") as refused:
        gbnf.from_schema(schema)
    assert refused.value.field == "response_format"


def test_choices_that_multiply_are_refused() -> None:
    some = [{"type": "integer", "title": str(number)} for number in range(1000)]
    with pytest.raises(InvalidInput, match="too many choices"):
        gbnf.from_schema({"allOf": [{"anyOf": some}, {"oneOf": some}]})


_LONG = {"const": "x" * 5000}
_ENTRIES = [{"required": [f"{part} {name}" for name in range(30)]} for part in range(300)]


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(
            {
                "$defs": {"long": _LONG},
                "properties": {
                    str(one): {"title": "t", "anyOf": [{"$ref": "#/$defs/long"}]} for one in range(400)
                },
            },
            id="a long value by many references",
        ),
        pytest.param({"allOf": _ENTRIES}, id="required, put together one after the other"),
        pytest.param(
            {
                "type": "string",
                "properties": dict.fromkeys(map(str, range(10_000)), True),
                "anyOf": [{"properties": {"a": {}}}] * 1000,
            },
            id="properties, beside each choice",
        ),
    ],
)
def test_a_schema_that_becomes_huge_is_refused(schema: dict[str, Any]) -> None:
    schemas.check_schemas([(schema, "response_format")])
    with pytest.raises(InvalidInput, match="too many choices"):
        gbnf.from_schema(schema)


def test_bounded_lengths_of_many_texts_do_not_add_up() -> None:
    properties = {str(one): {"type": "string", "maxLength": 1000} for one in range(100)}
    made = gbnf.from_schema({"type": "object", "properties": properties})
    assert made.count("{0,1000}") == gbnf.MAX_TOTAL_TEXT_LENGTH // 1000


def chained(links: int, depth: int) -> dict[str, Any]:
    """References one after the other, each so many parts below the one before."""
    parts: dict[str, Any] = {"0": {"type": "null"}}
    for link in range(1, links + 1):
        part: dict[str, Any] = {"$ref": f"#/$defs/{link - 1}"}
        for _ in range(depth):
            part = {"anyOf": [{"type": "array", "items": part}, {"type": "null"}]}
        parts[str(link)] = part
    return {"$ref": f"#/$defs/{links}", "$defs": parts}


@pytest.mark.parametrize(("links", "depth"), [(126, 0), (10, 3), (2, 15)], ids=str)
def test_a_deep_schema_is_a_grammar(links: int, depth: int) -> None:
    schema = chained(links, depth)
    schemas.check_schemas([(schema, "format")])
    assert Hearer(gbnf.build_rules(schema), "null").whole()
    assert gbnf.from_schema(schema)


@pytest.mark.parametrize(("links", "depth"), [(128, 0), (1000, 0), (40, 10)], ids=str)
def test_a_schema_that_references_make_deep_is_refused(links: int, depth: int) -> None:
    with pytest.raises(InvalidInput, match="inside each other") as refused:
        schemas.check_schemas([(chained(links, depth), "format")])
    assert refused.value.field == "format"
