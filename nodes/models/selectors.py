"""Selectors: the labels that a node must have (R1.68, R1.69).

Writers check a selector. A stored one that is unreadable matches no node.
"""

from typing import Any

from localai_cluster.kit import errors, names

LONGEST_KEY, LONGEST_VALUE = 128, 255
MOST_KEYS = 64


def readable(selector: Any) -> dict[str, str] | None:
    """Return the selector, or None if it is not an object of valid label strings."""
    try:
        return check(selector)
    except errors.InvalidInput:
        return None


def check(selector: Any) -> dict[str, str]:
    """Return the selector; raise InvalidInput if it is invalid."""
    if not isinstance(selector, dict):
        raise errors.InvalidInput("node_selector must be an object of strings", field="node_selector")
    if len(selector) > MOST_KEYS:
        raise errors.InvalidInput(f"node_selector must have at most {MOST_KEYS} keys", field="node_selector")
    for key, value in selector.items():
        check_label(key, value, "node_selector")
    return selector


def check_label(key: Any, value: Any, field: str) -> None:
    """Raise InvalidInput for `field` unless a label can have this key and value."""
    if not isinstance(key, str) or not 1 <= len(key) <= LONGEST_KEY:
        raise errors.InvalidInput(f"{field}: a key must have 1 to {LONGEST_KEY} characters", field=field)
    _check_text(key, "a key", field)
    if not isinstance(value, str):
        raise errors.InvalidInput(f"{field}: the value of {key!r} must be a string", field=field)
    if len(value) > LONGEST_VALUE:
        raise errors.InvalidInput(
            f"{field}: the value of {key!r} exceeds {LONGEST_VALUE} characters", field=field
        )
    _check_text(value, f"the value of {key!r}", field)


def _check_text(text: str, subject: str, field: str) -> None:
    if character := names.unprintable(text):
        raise errors.InvalidInput(
            f"{field}: {subject} must not contain the character {character}", field=field
        )
