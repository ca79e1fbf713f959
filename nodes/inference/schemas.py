"""JSON schemas that clients send, for tools and for the format of an answer: what may reach an engine. Pure.

An engine makes a grammar of a schema, so one that refers to itself, or to a place outside of it, could keep
it busy without end. How deep a body may be nested is checked before (`localai_cluster/nesting.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from localai_cluster.errors import InvalidInput

MOST_STEPS = 10_000
"""Parts of all schemas of a request, counted again wherever a reference names them."""
LONGEST_REFERENCE = 512
"""Characters: a reference is looked up again at each step that meets it."""
_SKIPPED = frozenset({"$defs", "definitions", "enum", "const", "default"})
"""Values that are no schemas may look like references, and definitions count where they are named."""
_MAPS = ("properties", "patternProperties", "dependentSchemas")
"""What stands in these has names of the client's own, which may be any of `_SKIPPED`."""


def check(schemas: Iterable[tuple[Mapping[str, Any], str]]) -> None:
    """Raises InvalidInput, naming a schema's field, unless every reference leads somewhere and none back."""
    steps = 0
    for schema, field in schemas:
        # Each step is a part of the schema and the references that led to it.
        waiting: list[tuple[Any, frozenset[str]]] = [(schema, frozenset())]
        while waiting:
            steps += 1
            if steps > MOST_STEPS:
                raise InvalidInput(f"{field}: the schema has more than {MOST_STEPS} parts", field=_top(field))
            part, behind = waiting.pop()
            reference = part.get("$ref") if isinstance(part, Mapping) else None
            if isinstance(reference, str):
                found = _resolved(schema, reference, behind, field)
                waiting.append((found, behind | {reference}))
            waiting.extend((inner, behind) for inner in _inside(part))


def _inside(part: Any) -> Iterator[Any]:
    """The schemas, and the lists of them, that a part consists of."""
    if isinstance(part, list):
        yield from (inner for inner in part if isinstance(inner, Mapping | list))
        return
    for name, inner in part.items():
        if name in _MAPS and isinstance(inner, Mapping):
            yield from (one for one in inner.values() if isinstance(one, Mapping | list))
        elif name not in _SKIPPED and isinstance(inner, Mapping | list):
            yield inner


def _resolved(schema: Mapping[str, Any], reference: str, behind: frozenset[str], field: str) -> Any:
    if reference in behind:
        raise InvalidInput(f"{field}: the schema is recursive ({reference[:100]})", field=_top(field))
    if len(reference) > LONGEST_REFERENCE:
        raise InvalidInput(
            f"{field}: a reference has more than {LONGEST_REFERENCE} characters", field=_top(field)
        )
    found: Any = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    if not reference.startswith("#") or not isinstance(found, Mapping):
        raise InvalidInput(f"{field}: the schema has no {reference[:100]!r}", field=_top(field))
    return found


def _top(field: str) -> str:
    return field.partition("[")[0].partition(".")[0]
