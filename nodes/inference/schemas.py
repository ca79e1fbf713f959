"""JSON schemas that clients send, for tools and for the format of an answer: what may reach an engine. Pure.

An engine makes a grammar of a schema, so one that refers to itself, or to a place outside of it, could keep
it busy without end. How deep a body may be nested is checked before (`localai_cluster/nesting.py`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from localai_cluster.errors import InvalidInput

MOST_STEPS = 10_000
"""Parts of a schema, counted again wherever a reference names them."""


def check(schema: Mapping[str, Any], field: str) -> None:
    """Raises InvalidInput, naming `field`, unless every reference leads somewhere and none back."""
    steps = 0
    # Each step is a part of the schema and the references that led to it.
    waiting: list[tuple[Any, frozenset[str]]] = [(schema, frozenset())]
    while waiting:
        steps += 1
        if steps > MOST_STEPS:
            raise InvalidInput(f"{field}: the schema has more than {MOST_STEPS} parts", field=_top(field))
        part, behind = waiting.pop()
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str):
            if reference in behind:
                raise InvalidInput(f"{field}: the schema is recursive ({reference[:100]})", field=_top(field))
            waiting.append((_resolved(schema, reference, field), behind | {reference}))
        waiting.extend((inner, behind) for inner in _inside(part))


def _inside(part: Any) -> Iterator[Any]:
    """What a part consists of. Values that are no schemas may look like references, so they are left out."""
    if isinstance(part, Mapping):
        names = (name for name in part if name not in ("$defs", "definitions", "enum", "const", "default"))
        yield from (part[name] for name in names if isinstance(part[name], Mapping | list))
    elif isinstance(part, list):
        yield from (inner for inner in part if isinstance(inner, Mapping | list))


def _resolved(schema: Mapping[str, Any], reference: str, field: str) -> Any:
    found: Any = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    if not reference.startswith("#") or not isinstance(found, Mapping):
        raise InvalidInput(f"{field}: the schema has no {reference[:100]!r}", field=_top(field))
    return found


def _top(field: str) -> str:
    return field.partition("[")[0].partition(".")[0]
