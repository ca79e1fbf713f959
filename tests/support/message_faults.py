"""Messages with one fault each, derived from their declarations, so that new messages are covered."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from localai_cluster.messaging import messages

KINDS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == messages.__name__
]
"""All declared message types."""
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(-1e300, 1e300),
}
_WRONG: dict[Any, list[Any]] = {
    str: [5, 1.5, True, [], {}, ["x"]],
    bool: [0, 1, "true", [], {}],
    int: [1.0, "1", True, 2**63, -(2**63) - 1, 10**400, [], {}],
    float: ["1", False, 1e301, [], {}],
    list: ["x", 1, True, {}],
    dict: ["x", 1, True, []],
}


def valid(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any valid message of this type."""
    if kind in _VALUES:
        return _VALUES[kind]
    if typing.get_origin(kind) is tuple:
        return st.lists(valid(typing.get_args(kind)[0]), max_size=3).map(tuple)
    return st.builds(
        kind, **{name: valid(expected) for name, expected in typing.get_type_hints(kind).items()}
    )


@st.composite
def faulty(draw: st.DrawFn, kind: type[Any]) -> tuple[dict[str, Any], str]:
    """Draw a body with one value of a wrong type, and the path of its field."""
    body = _example(kind)
    holder, key, expected, path = draw(st.sampled_from(list(_places(kind, body, ""))))
    holder[key] = draw(st.sampled_from(_WRONG[expected]))
    return body, path


def _example(kind: Any) -> Any:
    """Return plain values for every field; lists have one element."""
    if kind in _VALUES:
        return {str: "x", bool: True, int: 1, float: 1.5}[kind]
    if typing.get_origin(kind) is tuple:
        return [_example(typing.get_args(kind)[0])]
    return {name: _example(expected) for name, expected in typing.get_type_hints(kind).items()}


def _places(kind: Any, body: dict[str, Any], prefix: str) -> Iterator[tuple[Any, Any, Any, str]]:
    """Yield (holder, key, type, path) of every value inside the body of a message."""
    for name, expected in typing.get_type_hints(kind).items():
        path = f"{prefix}{name}"
        if typing.get_origin(expected) is not tuple:
            yield body, name, expected if expected in _VALUES else dict, path
            if expected not in _VALUES:
                yield from _places(expected, body[name], f"{path}.")
            continue
        items, item = body[name], typing.get_args(expected)[0]
        if item in _VALUES:
            yield items, 0, item, f"{path}[0]"
        else:
            yield items, 0, dict, f"{path}[0]"
            yield from _places(item, items[0], f"{path}[0].")
        yield body, name, list, path
