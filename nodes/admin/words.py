"""How the admin's pages say things: sizes, times, fingerprints, statuses. Pure; nothing here reads a row."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString

NOTHING = "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Bytes as a person reads them, `23.5 GiB`; a dash for 0, which workers send for "not known"."""
    if count <= 0:
        return NOTHING
    power = min((count.bit_length() - 1) // 10, len(_UNITS) - 1)
    number = f"{count / 1024**power:.1f}".removesuffix(".0")
    return f"{number} {_UNITS[power]}"


def span(seconds: float) -> str:
    """A length of time in its largest unit, rounded down: `12 s`, `5 min`, `3 h`, `2 d`."""
    whole = max(int(seconds), 0)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if whole >= length:
            return f"{whole // length} {unit}"
    return f"{whole} s"


def plain_time(at: datetime) -> str:
    """A moment, to the second, in UTC."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def moment(at: datetime | None, now: datetime) -> SafeString | str:
    """A moment and how long ago it was, for a fact of a page."""
    if at is None:
        return NOTHING
    return format_html("{} ({})", _time(at, plain_time(at)), _distance(at, now))


def age(at: datetime | None, now: datetime) -> SafeString | str:
    """How long ago, for a column; the moment itself shows on hovering."""
    return NOTHING if at is None else _time(at, _distance(at, now))


def _time(at: datetime, text: str) -> SafeString:
    return format_html('<time datetime="{}" title="{}">{}</time>', at.isoformat(), plain_time(at), text)


def _distance(at: datetime, now: datetime) -> str:
    seconds = (now - at).total_seconds()
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def badge(kind: str, text: str) -> SafeString:
    """A word with a colour; the word says everything that the colour says."""
    return format_html('<span class="node-badge node-badge-{}">{}</span>', kind, text)


def listed(names: list[str], most: int = 20) -> str:
    """Names with commas, the first `most` of them."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def count(number: int, one: str) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{number} {one}{'' if number == 1 else 's'}"


def detail(known: Mapping[str, Any]) -> str:
    """An event's detail in one line, without what is empty."""
    parts = (f"{name.replace('_', ' ')}: {_plain(value)}" for name, value in known.items() if value != "")
    return "; ".join(part for part in parts if not part.endswith(": "))


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        if value.keys() == {"from", "to"}:
            return f"{_plain(value['from'])} → {_plain(value['to'])}"
        return ", ".join(f"{name}={_plain(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value)
    return str(value) if value != "" else "none"
