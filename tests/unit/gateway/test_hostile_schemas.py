"""The work that a schema or grammar causes is limited, whatever its shape: it blocks the web process."""

from collections.abc import Iterator
from typing import Any

import pytest

from localai_cluster.kit.errors import InvalidInput
from nodes.gateway import gbnf, schemas

ENTRIES = 6000
"""Entries of the list or object that each shape has."""
MAX_READS = 5_000_000
"""Limit on the entries that are read; ENTRIES * ENTRIES is far above it."""


class Reads:
    """Counts the entries of lists and objects that are read."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count
        assert self.count <= MAX_READS, "the work is not limited"


class CountedList(list[Any]):
    """A list that counts its entries whenever it is read."""

    reads: Reads

    def __iter__(self) -> Iterator[Any]:
        self.reads.add(len(self))
        return super().__iter__()


class CountedDict(dict[Any, Any]):
    """An object that counts its entries whenever it is read."""

    reads: Reads

    def __iter__(self) -> Iterator[Any]:
        self.reads.add(len(self))
        return super().__iter__()

    def keys(self) -> Any:
        self.reads.add(len(self))
        return super().keys()

    def values(self) -> Any:
        self.reads.add(len(self))
        return super().values()

    def items(self) -> Any:
        self.reads.add(len(self))
        return super().items()


def counted(value: Any, reads: Reads) -> Any:
    """Return a copy of the value whose lists and objects count."""
    copy: CountedDict | CountedList
    if isinstance(value, dict):
        copy = CountedDict({key: counted(inner, reads) for key, inner in value.items()})
    elif isinstance(value, list):
        copy = CountedList(counted(inner, reads) for inner in value)
    else:
        return value
    copy.reads = reads
    return copy


NAMES = [str(number) for number in range(ENTRIES)]
PARTS: dict[str, dict[str, Any]] = {
    "required": {"required": ["a"] * ENTRIES},
    "types": {"type": ["object"] * ENTRIES},
    "types without a meaning": {"type": NAMES},
    "numbers as types": {"type": [0] * ENTRIES},
    "keywords": dict.fromkeys(NAMES, 0),
    "keywords beside a choice": {**dict.fromkeys(NAMES, 0), "anyOf": [True]},
    "keywords beside a reference": {**dict.fromkeys(NAMES, 0), "$ref": "#/$defs/null"},
    "properties": {"properties": dict.fromkeys(NAMES, True)},
    "forbidden properties": {"properties": dict.fromkeys(NAMES, False)},
    "patterns": {"patternProperties": dict.fromkeys(NAMES, True)},
    "forbidden patterns": {"patternProperties": dict.fromkeys(NAMES, False)},
    "dependent names": {"dependentRequired": {"a": NAMES}},
    "all of scalars": {"allOf": [True] * ENTRIES},
    "any of scalars": {"anyOf": [True] * ENTRIES},
    "first items": {"prefixItems": [True] * ENTRIES},
    "values": {"enum": NAMES},
    "a value": {"const": NAMES},
    "examples": {"examples": NAMES},
}


def work(schema: dict[str, Any]) -> bool:
    """Convert the schema to a grammar within the limit of reads. Return False if it is refused."""
    schema = counted(schema, Reads())
    try:
        schemas.check_schemas([(schema, "format")])
        gbnf.from_schema(schema)
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_many_references_to_a_long_part_cost_little(part: dict[str, Any]) -> None:
    definitions = {"a": part, "null": {"type": "null"}}
    work({"anyOf": [{"$ref": "#/$defs/a"}] * 3000, "$defs": definitions})
    # Each of these texts is another reference, to the same part.
    work({"anyOf": [{"$ref": f"#{number}/$defs/a"} for number in range(3000)], "$defs": definitions})


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_a_long_list_of_types_costs_little(part: dict[str, Any]) -> None:
    for types in (["object", "array"] * (ENTRIES // 2), NAMES, [["object"]] * ENTRIES):
        work({**part, "type": types})


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"required": ["a"] * 10_000}, id="required"),
        pytest.param({"type": ["object"] * 10_000}, id="types"),
        pytest.param({"type": ["object"] * 5000, "required": ["a"] * 5000}, id="both"),
        pytest.param(
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"required": NAMES * 2}}}, id="reference"
        ),
    ],
)
def test_entries_of_lists_count_as_parts(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="more than 10000 parts") as refused:
        schemas.check_schemas([(part, "format")])
    assert refused.value.field == "format"


def test_types_of_a_list_are_alternatives() -> None:
    """Each counts once, and what is no type's name accepts any value."""
    assert "root ::= string | null" in gbnf.from_schema({"type": ["string", "null", "string"]})
    assert "root ::= string | value" in gbnf.from_schema({"type": ["string", None, ["object"]]})


LONG = '"' + "x" * 1000 + '"'


@pytest.mark.parametrize(
    "grammar",
    [
        LONG + "{2000}",
        LONG + "{0,2000}",
        LONG + " # a comment\n {2000,}",
        "[" + "a" * 1000 + "]{2000}",
        (LONG + "{100} ") * 20,
        "a{2000}{2000}",
        LONG + "+{2000}",
        LONG + " + {2000}",
        "(a b){99999999999999999999}",
    ],
)
def test_a_grammar_that_repetitions_make_huge_is_refused(grammar: str) -> None:
    """An engine copies what it repeats."""
    with pytest.raises(InvalidInput, match="repetitions") as refused:
        schemas.check_grammar("root ::= " + grammar)
    assert refused.value.field == "grammar"


def test_a_repetition_that_ends_before_it_begins_is_refused() -> None:
    """Engines take the difference without a sign."""
    with pytest.raises(InvalidInput, match="ends before it begins"):
        schemas.check_grammar('root ::= "a"{5,2}')


@pytest.mark.parametrize(
    "grammar",
    [
        LONG + "{100}",
        LONG + "*{2000}",
        LONG + " a{2000}",
        "(" + LONG + "){2000}",
        '"{2000}' + "x" * 1000 + '"',
        LONG + " # {2000}",
        "[{}]{0,1000} {} {",
    ],
)
def test_a_grammar_with_some_repetitions_is_accepted(grammar: str) -> None:
    schemas.check_grammar("root ::= " + grammar)


def nested_types(links: int, depth: int) -> dict[str, Any]:
    """Objects one in the other by reference, each with its type inside of lists."""
    kind: Any = "object"
    for _ in range(depth):
        kind = [kind]
    parts = {
        str(link): {"type": kind, "properties": {"a": {"$ref": f"#/$defs/{link + 1}"}}}
        for link in range(links)
    }
    return {"$ref": "#/$defs/0", "$defs": {**parts, str(links): {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(nested_types(12, 50), id="types inside each other"),
        pytest.param({"allOf": [{"anyOf": [{"title": str(one)}]} for one in range(150)]}, id="choices"),
    ],
)
def test_a_schema_never_exceeds_the_stack(schema: dict[str, Any]) -> None:
    def convert(frames: int) -> bool:  # from a stack that is far fuller than a request's
        return convert(frames - 1) if frames else work(schema)

    convert(700)
