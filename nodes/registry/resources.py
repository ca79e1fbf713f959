"""Resources of nodes: their GPUs one by one, VRAM budgets (R1.49) and disk quotas.

GPUs belong to the same reading as `available_vram`: both are written together, and a worker that reports only
totals empties the list. So a GPU never counts as free by a figure that is older than the node's.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from localai_cluster.kit import errors

MAX_GPUS = 64
MAX_GPU_INDEX = 1023
_MAX_INTEGER = 2**63 - 1
MAX_GPU_TEXT_LENGTHS = {"uuid": 96, "name": 128, "driver": 48}
"""Maximum characters of the texts that describe a GPU, by field."""

GpuList = list[dict[str, Any]]
_CheckedField = tuple[Callable[[str, Any], Any], dict[str, Any]]
"""The check of a reported value, which takes the name of the field, and its schema for the API document."""


def parse_gpus(value: Any) -> GpuList:
    """Parse the GPUs of a body, sorted by index; raise InvalidInput with the name of the field.

    Unknown fields of a GPU are ignored.
    """
    if not isinstance(value, list) or len(value) > MAX_GPUS:
        raise errors.InvalidInput(f"gpus must be a list of at most {MAX_GPUS} GPUs", field="gpus")
    parsed = [_parse_gpu(f"gpus.{number}", entry) for number, entry in enumerate(value)]
    _check_unique(parsed, "index")
    _check_unique([gpu for gpu in parsed if gpu["uuid"]], "uuid")
    return sorted(parsed, key=lambda gpu: gpu["index"])


def _parse_gpu(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise errors.InvalidInput(f"{field} must be an object", field=field)
    gpu = {name: check(f"{field}.{name}", value.get(name)) for name, (check, _) in _GPU_FIELDS.items()}
    return gpu | _valid_facts(value, _GPU_FACTS)


def _valid_facts(facts: Mapping[str, Any], fields: Mapping[str, _CheckedField]) -> dict[str, Any]:
    """Return the facts that are valid.

    Invalid facts are left out, so that a broken sensor blocks no heartbeat.
    """
    valid = {}
    for name, (check, _) in fields.items():
        with contextlib.suppress(errors.InvalidInput):
            valid[name] = check(name, facts.get(name))
    return {name: fact for name, fact in valid.items() if fact not in (None, "")}


def _check_unique(parsed: Sequence[Mapping[str, Any]], name: str) -> None:
    values = set()
    for gpu in parsed:
        if gpu[name] in values:
            raise errors.InvalidInput(f"gpus has two of {name} {gpu[name]}", field="gpus")
        values.add(gpu[name])


def _number(most: int, meaning: str = "", *, required: bool = False, **schema: Any) -> _CheckedField:
    """Return a field with a whole number from 0 to `most`, which may be absent unless it is required."""

    def check(field: str, value: Any) -> int | None:
        if value is None and not required:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise errors.InvalidInput(f"{field} must be a whole number from 0 to {most}", field=field)
        return value

    schema |= {"type": "integer", "minimum": 0, "maximum": most}
    schema |= {} if required else {"nullable": True}
    return check, schema | ({"description": meaning} if meaning else {})


def _text(longest: int) -> _CheckedField:
    def check(field: str, value: Any) -> str:
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise errors.InvalidInput(
                f"{field} must be a printable text of at most {longest} characters", field=field
            )
        return value

    return check, {"type": "string", "maxLength": longest, "nullable": True}


def _time(field: str, value: Any) -> str | None:
    """Return the time in wire form."""
    if value is None:
        return None
    try:
        at = datetime.fromisoformat(value)
        return at.astimezone(UTC).isoformat(timespec="seconds")
    except (TypeError, ValueError, OverflowError):
        raise errors.InvalidInput(
            f"{field} must be a time such as 2026-01-31T12:00:00Z", field=field
        ) from None


_GPU_FIELDS: Mapping[str, _CheckedField] = {
    "index": _number(MAX_GPU_INDEX, required=True),
    "uuid": _text(MAX_GPU_TEXT_LENGTHS["uuid"]),
    "name": _text(MAX_GPU_TEXT_LENGTHS["name"]),
    "total_vram": _number(_MAX_INTEGER, required=True, format="int64"),
    "free_vram": _number(_MAX_INTEGER, required=True, format="int64"),
    "utilization": _number(100),
}
_GPU_FACTS: Mapping[str, _CheckedField] = {
    "temperature": _number(1000, "Degrees Celsius."),
    "power": _number(100_000, "Watts."),
    "power_limit": _number(100_000, "The most watts that its driver lets it draw."),
    "ecc_errors": _number(_MAX_INTEGER, "Uncorrected memory errors since its driver was loaded."),
    "driver": _text(MAX_GPU_TEXT_LENGTHS["driver"]),
}
"""Optional facts of a GPU; a fact with an invalid value is left out."""
GPUS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "nullable": True,
    "maxItems": MAX_GPUS,
    "description": "The GPUs one by one, with `available_vram` (else it is their sum). No index and no UUID"
    " twice. Absent beside `available_vram`: they are not known one by one.",
    "items": {
        "type": "object",
        "required": ["index", "total_vram", "free_vram"],
        "properties": {name: schema for name, (_, schema) in (*_GPU_FIELDS.items(), *_GPU_FACTS.items())},
    },
}
"""The schema of the values that `parse_gpus` accepts, for the API document."""
_SYSTEM_FACTS: Mapping[str, _CheckedField] = {
    "os": _text(128),
    "kernel": _text(128),
    "cpu": _text(128),
    "cpu_count": _number(100_000, "Logical processors."),
    "cpu_cores": _number(100_000, "Cores of the processors."),
    "booted_at": (_time, {"type": "string", "format": "date-time", "nullable": True}),
}
SYSTEM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "nullable": True,
    "description": "What identifies the machine's software and processor.",
    "properties": {name: schema for name, (_, schema) in _SYSTEM_FACTS.items()},
}


def parse_system(value: Any) -> dict[str, Any]:
    """Parse the facts about the machine in a registration; raise InvalidInput unless `value` is an object.

    Unknown and invalid facts are ignored.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise errors.InvalidInput("system must be an object", field="system")
    return _valid_facts(value, _SYSTEM_FACTS)


_BYTES_BY_UNIT = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES_BY_UNIT[f"{_letter}b"] = 1000**_power
    _BYTES_BY_UNIT[f"{_letter}ib"] = 1024**_power

_MIN_FRACTION = Decimal("1e-12")
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%|b|[kmgt]i?b)?\Z", re.ASCII)


def budget_ceiling(text: str, total: int) -> int:
    """Return how many of `total` bytes a budget allows; 0 for no limit. Raise ValueError if it is unreadable.

    Accepts `50%`, a fraction up to 1, a whole number of bytes, or a number with B, KB … TB, KiB … TiB.
    """
    size, share = _parse_size_or_fraction(text, "VRAM budget")
    return min(size or int(total * share), total)


def parse_disk_quota(text: str) -> tuple[int, Decimal]:
    """Return a disk quota as bytes and as a fraction of the disk; one of the two is 0.

    Both are 0 without a quota. Raise ValueError unless `text` is empty or a budget (`budget_ceiling`) of at
    least one byte.
    """
    size, share = _parse_size_or_fraction(text, "disk quota")
    share = share.quantize(_MIN_FRACTION)
    if text.strip() and not size and not share:
        raise ValueError("a disk quota of 0 bytes: leave it empty for none")
    return min(size, _MAX_INTEGER), share


def _parse_size_or_fraction(text: str, setting: str) -> tuple[int, Decimal]:
    """Return a budget as bytes and as a fraction; one of the two is 0, or both for an empty text."""
    text = text.strip().lower()
    if not text:
        return 0, Decimal(0)
    parsed = _SIZE_PATTERN.match(text)
    if parsed is None:
        raise ValueError(f"not a {setting}: {text!r}")
    number, unit = Decimal(parsed[1]), parsed[2] or ""
    if unit == "%":
        if number > 100:
            raise ValueError(f"a {setting} over 100 %")
        return 0, number / 100
    if unit:
        return int(number * _BYTES_BY_UNIT[unit]), Decimal(0)
    if number <= 1:
        return 0, number
    if number != number.to_integral_value():
        raise ValueError(f"a {setting} with a fraction of a byte")
    return int(number), Decimal(0)


def budget_ceiling_or_none(text: str, total: int) -> int:
    """Return how many of `total` bytes a budget allows; 0 if it is unreadable (R1.49, registry level)."""
    try:
        return budget_ceiling(text, total)
    except ValueError:
        return 0


def cap_to_ceiling(available: int, ceiling_bytes: int) -> int:
    """Limit `available` bytes to those below the ceiling (R1.36); a ceiling of 0 is no limit."""
    return min(available, ceiling_bytes) if ceiling_bytes else available
