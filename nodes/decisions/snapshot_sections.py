"""The input of decisions as a log stores it: sections of keys and values, and their changes. Pure.

A decision reads some sections. The first entry of a log has all sections that its decision read; each later
entry has the differences that the next decision read. An entry is JSON, so a decoded section has texts for
ids, and lists for sets and tuples.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

State = dict[str, dict[Any, Any]]
"""By section: the rows that were last recorded."""
Changes = dict[str, tuple[dict[Any, Any], list[Any]]]
"""By section: new or changed rows, and removed keys."""
_MISSING = object()


@dataclass(frozen=True)
class Section:
    """The rows that a decision read under one name; values must be immutable."""

    rows: Mapping[Any, Any]
    whole: bool = True
    """False: only these keys were read; rows with other keys are unchanged."""


Sections = Mapping[str, Section]


def changes(state: State, seen: Sections) -> Changes:
    """Return the differences between these sections and the state."""
    result: Changes = {}
    for name, section in seen.items():
        before, now = state.get(name, {}), section.rows
        new = {key: value for key, value in now.items() if before.get(key, _MISSING) != value}
        removed = list(before.keys() - now.keys()) if section.whole else []
        if new or removed:
            result[name] = (new, removed)
    return result


def apply(state: State, changed_sections: Changes) -> None:
    """Apply the changes to the state."""
    for name, (new, removed) in changed_sections.items():
        section = state.setdefault(name, {})
        section.update(new)
        for key in removed:
            section.pop(key, None)


def encoded(changed_sections: Changes) -> bytes:
    """Encode one entry of a log."""
    return orjson.dumps(changed_sections, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def restored(entries: Iterable[bytes]) -> State:
    """Return the state after these entries, starting with the first entry of the log."""
    state: State = {}
    for entry in entries:
        apply(state, orjson.loads(entry))
    return state


def _plain(value: Any) -> Any:
    """Encode a set as a sorted list, so that equal sets have equal encodings; a named tuple as a list."""
    return sorted(value) if isinstance(value, (set, frozenset)) else list(value)
