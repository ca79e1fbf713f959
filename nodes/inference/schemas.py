"""JSON schemas and grammars that clients send, for tools and for the format of an answer: what may reach an
engine. Pure.

An engine makes a grammar of a schema, so one that refers to itself, or to a place outside of it, could keep
it busy without end, and one with a billion items takes all memory. It reads a grammar by functions that call
themselves for each parenthesis, so a deep one would end every process that it is tried on. How deep a body
may be nested is checked before (`localai_cluster/nesting.py`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from localai_cluster.errors import InvalidInput
from localai_cluster.web.wire import wrong

MOST_STEPS = 10_000
"""Parts of all schemas of a request, counted again wherever a reference names them. Values of an `enum`
count, and so do the items that a list must or may have: an engine makes rules for each of them.
"""
DEEPEST_SCHEMA = 128
"""Parts inside each other, counted on through references: who reads a schema calls itself for each."""
LONGEST_REFERENCE = 512
"""Characters: a reference is looked up again at each step that meets it."""
_SKIPPED = frozenset({"$defs", "definitions", "enum", "const", "default"})
"""Values that are no schemas may look like references, and definitions count where they are named."""
_MAPS = ("properties", "patternProperties", "dependentSchemas")
"""What stands in these has names of the client's own, which may be any of `_SKIPPED`."""


MOST_GRAMMAR = 256 * 1024
"""Characters of a grammar."""
DEEPEST_GRAMMAR = 128
"""Parentheses inside each other."""
# Texts, classes of characters and comments, whose parentheses are only characters. What is never closed goes
# to the end, where engines refuse it; a pattern that tried again from its next sign would take minutes.
_NO_PARENTHESES = re.compile(r'"(?:\\.|[^"\\])*+\\?"?|\[(?:\\.|[^\]\\])*+\\?\]?|#[^\r\n]*+', re.DOTALL)


def check_grammar(grammar: str) -> None:
    """Raises InvalidInput for one that could end its engine."""
    if grammar.lstrip().startswith(("{", "%")):
        raise InvalidInput("grammar: is not GBNF; a schema goes to `response_format`", field="grammar")
    if len(grammar) > MOST_GRAMMAR:
        raise InvalidInput(f"grammar: has more than {MOST_GRAMMAR} characters", field="grammar")
    level = 0
    for sign in re.findall("[()]", _NO_PARENTHESES.sub(" ", grammar)):
        # Below 0 the engine refuses it; what follows must not count as less deep.
        level = level + 1 if sign == "(" else max(level - 1, 0)
        if level > DEEPEST_GRAMMAR:
            raise InvalidInput(
                f"grammar: has more than {DEEPEST_GRAMMAR} parentheses inside each other", field="grammar"
            )


def check(schemas: Iterable[tuple[Mapping[str, Any], str]]) -> None:
    """Raises InvalidInput, naming a schema's field, unless every reference leads somewhere and none back."""
    steps = 0.0
    for schema, field in schemas:
        # Each step is a part of the schema the references that led to it, and how deep it is.
        waiting: list[tuple[Any, frozenset[str], int]] = [(schema, frozenset(), 1)]
        while waiting:
            part, behind, level = waiting.pop()
            steps += _weight(part)
            # Each that waits is one more at least.
            if steps + len(waiting) > MOST_STEPS:
                raise wrong(field, f"the schema has more than {MOST_STEPS} parts, values and items")
            if level > DEEPEST_SCHEMA:
                raise wrong(field, f"the schema has more than {DEEPEST_SCHEMA} parts inside each other")
            reference = part.get("$ref") if isinstance(part, dict) else None
            if isinstance(reference, str):
                found = _resolved(schema, reference, behind, field)
                waiting.append((found, behind | {reference}, level + 1))
            waiting.extend((inner, behind, level + 1) for inner in _inside(part))


def _weight(part: Any) -> float:
    if not isinstance(part, dict):
        return 1
    counts = [part.get(name) for name in ("minItems", "maxItems")]
    values = part.get("enum")
    return (
        1
        + max(count for count in (*counts, 0) if isinstance(count, int | float))
        + (len(values) if isinstance(values, list) else 0)
    )


def _inside(part: Any) -> Iterator[Any]:
    """The schemas, and the lists of them, that a part consists of."""
    if isinstance(part, list):
        yield from (inner for inner in part if isinstance(inner, dict | list))
        return
    for name, inner in part.items():
        if name in _MAPS and isinstance(inner, dict):
            yield from (one for one in inner.values() if isinstance(one, dict | list))
        elif name not in _SKIPPED and isinstance(inner, dict | list):
            yield inner


def _resolved(schema: Mapping[str, Any], reference: str, behind: frozenset[str], field: str) -> Any:
    if reference in behind:
        raise wrong(field, f"the schema is recursive ({reference[:100]})")
    if len(reference) > LONGEST_REFERENCE:
        raise wrong(field, f"a reference has more than {LONGEST_REFERENCE} characters")
    found = referred(schema, reference)
    if not reference.startswith("#") or not isinstance(found, dict):
        raise wrong(field, f"the schema has no {reference[:100]!r}")
    return found


def referred(schema: Mapping[str, Any], reference: str) -> Any:
    """The part of the schema that a reference such as `#/$defs/city` leads to; None if there is none."""
    found: Any = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found
