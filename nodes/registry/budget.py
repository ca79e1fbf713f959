"""VRAM budgets: parse the text of an operator or worker to a ceiling in bytes (R1.49)."""

import re
from decimal import Decimal

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%|b|[kmgt]i?b)?\Z", re.ASCII)


def ceiling(text: str, total: int) -> int:
    """Return the bytes of `total` that may be used, 0 = no cap; raise ValueError if `text` is not a budget.

    Accepts `50%`, a fraction up to 1, a whole number of bytes, or a number with B, KB … TB, KiB … TiB.
    """
    text = text.strip().lower()
    if not text:
        return 0
    parsed = _SIZE.match(text)
    if parsed is None:
        raise ValueError(f"not a VRAM budget: {text!r}")
    return min(_amount(Decimal(parsed[1]), parsed[2] or "", total), total)


def _amount(number: Decimal, unit: str, total: int) -> int:
    if unit == "%":
        if number > 100:
            raise ValueError("a VRAM budget over 100 %")
        return int(total * number / 100)
    if unit:
        return int(number * _UNITS[unit])
    if number <= 1:
        return int(total * number)
    if number != number.to_integral_value():
        raise ValueError("a VRAM budget with a fraction of a byte")
    return int(number)


def ceiling_or_none(text: str, total: int) -> int:
    """Return `ceiling`, or no cap if the budget is unreadable (R1.49, registry level)."""
    try:
        return ceiling(text, total)
    except ValueError:
        return 0


def cap(available: int, ceiling_bytes: int) -> int:
    """Return the part of `available` that a ceiling allows, 0 = no ceiling (R1.36)."""
    return min(available, ceiling_bytes) if ceiling_bytes else available
