"""GPUs of a node one by one, as its worker reports them and as they are shown.

Workers report them in registrations and heartbeats. They belong to the same reading as `available_vram`: both
are written together, and a worker that reports only totals empties the list. So a GPU never counts as free by
a figure that is older than the node's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localai_cluster.kit import errors

MOST = 64
LARGEST_INDEX = 1023
LARGEST = 2**63 - 1
LENGTHS = {"uuid": 96, "name": 128}
"""Most characters."""

Told = list[dict[str, Any]]


def read(value: Any) -> Told | None:
    """Parse the GPUs of a body, sorted by index; None if it has none. Raise InvalidInput naming the field.

    Unknown fields of a GPU are ignored.
    """
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MOST:
        raise errors.InvalidInput(f"gpus must be a list of at most {MOST} GPUs", field="gpus")
    parsed = [_gpu(f"gpus.{number}", entry) for number, entry in enumerate(value)]
    _check_unique(parsed, "index")
    _check_unique([gpu for gpu in parsed if gpu["uuid"]], "uuid")
    return sorted(parsed, key=lambda gpu: gpu["index"])


def _gpu(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise errors.InvalidInput(f"{field} must be an object", field=field)
    return {name: check(f"{field}.{name}", value.get(name)) for name, check in _CHECKS.items()}


def _check_unique(parsed: Sequence[Mapping[str, Any]], name: str) -> None:
    values = set()
    for gpu in parsed:
        if gpu[name] in values:
            raise errors.InvalidInput(f"gpus has two of {name} {gpu[name]}", field="gpus")
        values.add(gpu[name])


def _whole_number(most: int) -> Callable[[str, Any], int]:
    def check(field: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise errors.InvalidInput(f"{field} must be a whole number from 0 to {most}", field=field)
        return value

    return check


def _text(longest: int) -> Callable[[str, Any], str]:
    def check(field: str, value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise errors.InvalidInput(
                f"{field} must be a printable text of at most {longest} characters", field=field
            )
        return value

    return check


def _percent(field: str, value: Any) -> int | None:
    return None if value is None else _whole_number(100)(field, value)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "index": _whole_number(LARGEST_INDEX),
    "uuid": _text(LENGTHS["uuid"]),
    "name": _text(LENGTHS["name"]),
    "total_vram": _whole_number(LARGEST),
    "free_vram": _whole_number(LARGEST),
    "utilization": _percent,
}
SCHEMA: dict[str, Any] = {
    "type": "array",
    "nullable": True,
    "maxItems": MOST,
    "description": "The GPUs one by one, with `available_vram` (else it is their sum). No index and no UUID"
    " twice. Absent beside `available_vram`: they are not known one by one.",
    "items": {
        "type": "object",
        "required": ["index", "total_vram", "free_vram"],
        "properties": {
            "index": {"type": "integer", "minimum": 0, "maximum": LARGEST_INDEX},
            "uuid": {"type": "string", "maxLength": LENGTHS["uuid"], "nullable": True},
            "name": {"type": "string", "maxLength": LENGTHS["name"], "nullable": True},
            "total_vram": {"type": "integer", "format": "int64", "minimum": 0, "maximum": LARGEST},
            "free_vram": {"type": "integer", "format": "int64", "minimum": 0, "maximum": LARGEST},
            "utilization": {"type": "integer", "minimum": 0, "maximum": 100, "nullable": True},
        },
    },
}
"""The schema of the values that `read` accepts, for the API document."""
