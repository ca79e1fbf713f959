"""Validation of clients' JSON schemas and grammars before they reach an engine. Pure.

An engine compiles a schema into a grammar. A schema with a recursive or external reference could keep it busy
without end, and one with a billion items would exhaust its memory. The engine parses a grammar recursively,
one call per parenthesis, so a deeply nested grammar would crash every process that tries it. The nesting
depth of a body is checked before (`localai_cluster/kit/untrusted.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web.wire import field_error

MAX_SCHEMA_PARTS = 10_000
"""Maximum number of parts in all schemas of a request. A part counts at every reference to it.

Entries of a list count, also the values of an `enum`, and so do the items that an array must or may have: an
engine reads or creates rules for each of them.
"""
MAX_SCHEMA_DEPTH = 128
"""Maximum nesting depth of a schema, with references resolved. Readers of a schema recurse per level."""
MAX_REFERENCE_LENGTH = 512
"""Maximum number of characters of a reference, because it is resolved each time that it is reached."""
_SKIPPED_KEYWORDS = frozenset({"$defs", "definitions", "enum", "const", "default"})
"""Keywords whose values are not checked.

Some are no schemas but may look like references. Definitions are checked where they are referenced.
"""
_SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "dependentSchemas")
"""Keywords whose values map names to schemas. The client chooses the names, so a name may be in
`_SKIPPED_KEYWORDS`."""


MAX_GRAMMAR_LENGTH = 256 * 1024
"""Maximum number of characters of a grammar."""
MAX_GRAMMAR_DEPTH = 128
"""Maximum nesting depth of parentheses in a grammar."""
MAX_REPEATED_LENGTH = 1_000_000
"""Maximum number of characters that all repetitions of a grammar make: an engine copies what it repeats."""
# Literals, character classes and comments, whose parentheses are only characters. An unclosed one extends to
# the end, where engines refuse it; a pattern that backtracked to the next character would take minutes.
_LITERAL_OR_COMMENT_PATTERN = re.compile(
    r'"(?:\\.|[^"\\])*+\\?"?|\[(?:\\.|[^\]\\])*+\\?\]?|#[^\r\n]*+', re.DOTALL
)
"""Parts of a grammar in which a parenthesis has no meaning: texts, classes and comments."""
_REPETITION_PATTERN = re.compile(_LITERAL_OR_COMMENT_PATTERN.pattern + r"|\{[^}]*+\}?", re.DOTALL)
"""The same parts, and the bounds of repetitions."""


def check_grammar(grammar: str) -> None:
    """Raise InvalidInput for a grammar that could crash its engine."""
    if grammar.lstrip().startswith(("{", "%")):
        raise InvalidInput("grammar: is not GBNF; a schema goes to `response_format`", field="grammar")
    if len(grammar) > MAX_GRAMMAR_LENGTH:
        raise InvalidInput(f"grammar: has more than {MAX_GRAMMAR_LENGTH} characters", field="grammar")
    level = 0
    for sign in re.findall("[()]", _LITERAL_OR_COMMENT_PATTERN.sub(" ", grammar)):
        # Below 0 the engine refuses the grammar; the text after it must not count as less deep.
        level = level + 1 if sign == "(" else max(level - 1, 0)
        if level > MAX_GRAMMAR_DEPTH:
            raise InvalidInput(
                f"grammar: has more than {MAX_GRAMMAR_DEPTH} parentheses inside each other", field="grammar"
            )
    _check_repetitions(grammar)


def _check_repetitions(grammar: str) -> None:
    """Raise InvalidInput if the repetitions make too many characters.

    A rule's name and a group count as one character, because an engine repeats only a reference to them.
    """
    total = size = end = 0
    for match in _REPETITION_PATTERN.finditer(grammar):
        # `x+` is a copy of `x` and a reference, and both are repeated; of `x*` and `x?` only a reference is.
        part, is_adjacent = match[0], not grammar[end : match.start()].strip(" \t\r\n+")
        end = match.end()
        size = size if is_adjacent else 1
        if part.startswith("{"):
            bounds = [int(number[:10]) for number in re.findall("[0-9]+", part)]
            if bounds != sorted(bounds):
                raise InvalidInput(f"grammar: {part} ends before it begins", field="grammar")
            size *= max(bounds, default=1)
            total += size
        elif not part.startswith("#"):
            size = len(part)
        if total > MAX_REPEATED_LENGTH:
            message = f"grammar: its repetitions make more than {MAX_REPEATED_LENGTH} characters"
            raise InvalidInput(message, field="grammar")


def check_schemas(schemas: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    """Raise InvalidInput with the schema's field unless every reference resolves and none is recursive."""
    steps = 0.0
    # The subschemas of each part that was read, by its id: it may be large, with many references to it.
    subschemas: dict[int, list[Any]] = {}
    for schema, field in schemas:
        # Each entry is a part of the schema, the references on the path to it, and its depth.
        pending: list[tuple[Any, frozenset[str], int]] = [(schema, frozenset(), 1)]
        while pending:
            part, ancestors, level = pending.pop()
            steps += _count_parts(part)
            # Each pending entry is at least one more step.
            if steps + len(pending) > MAX_SCHEMA_PARTS:
                raise field_error(
                    field, f"the schema has more than {MAX_SCHEMA_PARTS} parts, values and items"
                )
            if level > MAX_SCHEMA_DEPTH:
                raise field_error(
                    field, f"the schema has more than {MAX_SCHEMA_DEPTH} parts inside each other"
                )
            reference = part.get("$ref") if isinstance(part, dict) else None
            if isinstance(reference, str):
                target = _require_reference(schema, reference, ancestors, field)
                pending.append((target, ancestors | {reference}, level + 1))
            if id(part) not in subschemas:
                subschemas[id(part)] = list(_subschemas(part))
            pending.extend((inner, ancestors, level + 1) for inner in subschemas[id(part)])


def _count_parts(part: Any) -> float:
    if not isinstance(part, dict):
        return max(1, len(part))
    counts = [part.get(name) for name in ("minItems", "maxItems")]
    values = part.get("enum")
    return (
        1
        + max(count for count in (*counts, 0) if isinstance(count, int | float))
        + (len(values) if isinstance(values, list) else 0)
    )


def _subschemas(part: Any) -> Iterator[Any]:
    """Yield the subschemas of a part of a schema, and lists of subschemas."""
    if isinstance(part, list):
        yield from (inner for inner in part if isinstance(inner, dict | list))
        return
    for name, inner in part.items():
        if name in _SCHEMA_MAP_KEYWORDS and isinstance(inner, dict):
            yield from (subschema for subschema in inner.values() if isinstance(subschema, dict | list))
        elif name not in _SKIPPED_KEYWORDS and isinstance(inner, dict | list):
            yield inner


def _require_reference(
    schema: Mapping[str, Any], reference: str, ancestors: frozenset[str], field: str
) -> Any:
    if reference in ancestors:
        raise field_error(field, f"the schema is recursive ({reference[:100]})")
    if len(reference) > MAX_REFERENCE_LENGTH:
        raise field_error(field, f"a reference has more than {MAX_REFERENCE_LENGTH} characters")
    target = resolve_reference(schema, reference)
    if not reference.startswith("#") or not isinstance(target, dict):
        raise field_error(field, f"the schema has no {reference[:100]!r}")
    return target


def resolve_reference(schema: Mapping[str, Any], reference: str) -> Any:
    """Return the part to which a reference such as `#/$defs/city` refers; None if it does not exist."""
    target: Any = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, dict) else None
    return target
