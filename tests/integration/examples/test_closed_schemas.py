"""Objects are closed alike in the GBNF for any engine and in the bundled engine (review C4): one table."""

import json
import subprocess
import sys
from typing import Any

import pytest

from nodes.gateway import gbnf
from tests.support.backends import gallery
from tests.support.grammars import Hearer

WHOLE, TEXT = {"type": "integer"}, {"type": "string"}
A: dict[str, Any] = {"properties": {"a": WHOLE}}
B: dict[str, Any] = {"properties": {"b": WHOLE}}
NAMED = {"$defs": {"a": A, "ab": {"allOf": [{"$ref": "#/$defs/a"}, B]}}}
INNER = {"properties": {"in": A}}
MAP = {"type": "object", "patternProperties": {"^x_": WHOLE}}
EITHER = {"properties": {"a": WHOLE, "b": WHOLE}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
AB, AC = {"a": 1, "b": 2}, {"a": 1, "c": 2}

TABLE: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "object"}, [{}, {"x": [1]}], [5]),
    (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}, {"a": "x"}, 5]),
    ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
    ({"type": "object", "required": []}, [{}, {"x": 1}], [5]),
    ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": [{}]}], [{}, {"a": 1, "b": 1}]),
    ({"required": ["a"]}, [{"a": 1}], [{}, {"a": 1, "b": 1}, 5]),
    ({**A, "required": ["b"]}, [AB, {"b": "x"}], [{"a": 1}, {"b": 1, "c": 1}]),
    (MAP, [{}, {"x_a": 1}, {"x_a": 1, "x_b": 2}], [{"x_a": "x"}, {"y": "x"}]),
    (A | MAP, [{"a": 1}, {"a": 1, "x_b": 2}], [{"a": "x"}, {"a": 1, "y": "x"}, {"a": 1, "x_b": "x"}]),
    (A | MAP | {"additionalProperties": False}, [{"a": 1}], [{"a": 1, "y": 1}, {"a": 1, "y": "x"}]),
    (A | {"additionalProperties": True}, [{"a": 1, "b": [1]}, {"b": {}}], [5]),
    (A | {"additionalProperties": TEXT}, [{"a": 1, "b": "x"}], [{"a": 1, "b": 2}]),
    ({"additionalProperties": WHOLE}, [{}, {"x": 1}], [{"x": "y"}, 5]),
    ({"allOf": [A, B]}, [{}, AB], [{"c": 1}, AC, 5]),
    ({"allOf": [A, {"required": ["b"]}]}, [AB, {"b": 1}], [{"a": 1}, {"b": 1, "c": 1}]),
    ({**A, "allOf": [B]}, [AB], [AC]),
    ({"allOf": [{**A, "additionalProperties": False}, B]}, [AB], [AC]),
    ({"allOf": [A, {"additionalProperties": True}]}, [AB, AC], [5]),
    ({"allOf": [{"allOf": [A]}, {"allOf": [B]}]}, [AB], [AC]),
    ({"allOf": [INNER]}, [{"in": {"a": 1}}], [{"in": AB}, {"in": {}, "out": 1}]),
    ({"allOf": [{"properties": {"in": {"allOf": [A, B]}}}]}, [{"in": AB}], [{"in": AC}]),
    ({"allOf": [{"$ref": "#/$defs/a"}, B], **NAMED}, [AB], [AC]),
    ({"$ref": "#/$defs/a", **B, **NAMED}, [AB], [AC]),
    ({"$ref": "#/$defs/ab", **NAMED}, [AB], [AC]),
    ({"items": {"$ref": "#/$defs/a"}, **NAMED}, [[], [{"a": 1}, {}]], [[AB]]),
    ({"prefixItems": [A], "items": False}, [[{"a": 1}]], [[AB]]),
    ({"properties": {"in": {"$ref": "#/$defs/ab"}}, **NAMED}, [{"in": AB}], [{"in": AC}]),
    (EITHER, [AB, {"a": 1}, {"b": 2}], [{}, {"b": 1, "c": 1}, AC]),
    ({**A, "anyOf": [B, {"required": ["a"]}]}, [{"a": 1}, AB, {"b": 1}], [AC, {"b": 1, "c": 1}]),
    ({"anyOf": [A, {"type": "null"}]}, [{"a": 1}, None], [AB, 5]),
    ({"anyOf": [{"allOf": [A, B]}, {"type": "null"}]}, [AB, None], [AC]),
    ({"allOf": [A, {"anyOf": [B, {"required": ["a"]}]}]}, [AB, {"a": 1}], [AC]),
    ({"type": ["object", "null"], **A}, [None, {"a": 1}], [AB, 5]),
]

_JUDGE = """
import json, sys
folder = sys.argv[1]
sys.path[:0] = [folder, folder + "/lib"]
import questions
from llguidance import LLMatcher, LLTokenizer
tokenizer = LLTokenizer("byte")
for schema, values in json.load(sys.stdin):
    grammar = questions._of_schema(schema)
    for value in values:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        tokens = tokenizer.tokenize_str(json.dumps(value, separators=(",", ": ")))
        print(int(all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()))
"""


@pytest.fixture(scope="module")
def engine() -> dict[str, bool]:
    """What the engine lets pass, by schema and value."""
    cases = [(schema, [*good, *bad]) for schema, good, bad in TABLE]
    judged = subprocess.run(
        [sys.executable, "-I", "-c", _JUDGE, str(gallery() / "llama-cpp")],
        input=json.dumps(cases),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    verdicts = iter(judged.stdout.split())
    return {
        json.dumps([schema, value]): next(verdicts) == "1" for schema, values in cases for value in values
    }


@pytest.mark.parametrize(
    ("schema", "good", "bad"), TABLE, ids=[json.dumps(schema)[:80] for schema, *_ in TABLE]
)
def test_objects_are_closed_alike(
    engine: dict[str, bool], schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    """C4: named members and no others, under `allOf`, beside references and choices too."""
    rules = gbnf.build_rules(schema)
    for value in (*good, *bad):
        text = json.dumps(value, separators=(",", ": "))
        verdicts = (Hearer(rules, text).whole(), engine[json.dumps([schema, value])])
        assert verdicts == (value in good, value in good), value
