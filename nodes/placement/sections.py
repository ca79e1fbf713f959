"""What decisions were made from, as a log can hold it: sections of keys and values, and their changes. Pure.

A decision has seen some sections. The first entry of a log has all of the sections that its decision has
seen; each later entry has what the next one saw otherwise. An entry is JSON, so a section that is read back
has texts for ids, and lists for sets and tuples.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

State = dict[str, dict[Any, Any]]
"""By section: what was seen last."""
Changes = dict[str, tuple[dict[Any, Any], list[Any]]]
"""By section: what is new or other, and the keys that are gone."""
_MISSING = object()


@dataclass(frozen=True)
class Section:
    """What a decision has seen under one name; values must be immutable."""

    rows: Mapping[Any, Any]
    whole: bool = True
    """False: only these keys were looked at, others are as they were."""


Sections = Mapping[str, Section]


def changes(state: State, seen: Sections) -> Changes:
    """What these sections have that the state has not."""
    found: Changes = {}
    for name, section in seen.items():
        before, now = state.get(name, {}), section.rows
        new = {key: value for key, value in now.items() if before.get(key, _MISSING) != value}
        gone = list(before.keys() - now.keys()) if section.whole else []
        if new or gone:
            found[name] = (new, gone)
    return found


def apply(state: State, found: Changes) -> None:
    """Brings the state up to date."""
    for name, (new, gone) in found.items():
        section = state.setdefault(name, {})
        section.update(new)
        for key in gone:
            section.pop(key, None)


def encoded(found: Changes) -> bytes:
    """An entry of a log."""
    return orjson.dumps(found, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def restored(entries: Iterable[bytes]) -> State:
    """The state after these entries, from the first one on."""
    state: State = {}
    for entry in entries:
        apply(state, orjson.loads(entry))
    return state


def _plain(value: Any) -> Any:
    """Sets in an order, so that equal ones are written alike; a named tuple as a list."""
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value)
