"""The output of `manage.py nodes`: JSON as in the REST API, or the same facts as aligned text.

Pure functions over the rows of `nodes.registry.node_rows`; nothing here reads the database.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
from django.utils.timesince import timesince

from localai_cluster.messaging.messages import human_bytes
from localai_cluster.web.shapes import TIME
from nodes.models import NodeEvent
from nodes.registry.shape import DRAIN, IDENTITY, INVENTORY, NODE_DETAIL, OVERRIDE, ZERO_TIME

NOTHING = "-"
SHORT_ID = 8
_SIZES = ("vram", "ram", "disk", "bytes")
_LIST = (
    "NAME",
    "STATUS",
    "TYPE",
    "ADDRESS",
    "GPU",
    "FREE VRAM",
    "MODELS",
    "BUSY",
    "LAST SEEN",
    "NOTES",
    "ID",
)
_CLAIMS = (
    "CONFLICT",
    "NODE",
    "STATE",
    "WHAT",
    "FROM",
    "ADVERTISES",
    "NODE ADDRESS",
    "ATTEMPTS",
    "LAST",
    "CLAIMS",
)
_FACT = {"at", "by", "reason"}
_PLAIN_MINUTE = 120
_TIMES = {
    name
    for one in (NODE_DETAIL, DRAIN, IDENTITY, INVENTORY, OVERRIDE)
    for name, field in one.fields.items()
    if field.schema == TIME
}
"""Keys of a node that are times."""


def as_json(value: Any) -> str:
    """Indented JSON; times in UTC end in `Z`."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z | orjson.OPT_INDENT_2).decode()


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns without trailing blanks."""
    lines = [list(heads), *([printable(cell) or NOTHING for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """Without control characters, since some texts come from untrusted sources."""
    return "".join(character if character.isprintable() else "?" for character in text)


def nodes(rows: Sequence[Mapping[str, Any]], now: datetime) -> str:
    """The list, one node per line."""
    return table(_LIST, [_node(row, now) for row in rows]) if rows else "no nodes"


def _node(row: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    vram = f"{human_bytes(row['available_vram'])} of {human_bytes(row['total_vram'])}"
    return (
        row["name"],
        row["status"],
        row["node_type"],
        row["address"],
        row["gpu_vendor"],
        vram if row["total_vram"] else "",
        str(row["model_count"]),
        str(row["in_flight_count"]),
        age(row["last_heartbeat"], now),
        ", ".join(_notes(row)),
        str(row["id"])[:SHORT_ID],
    )


def _notes(row: Mapping[str, Any]) -> Iterator[str]:
    yield from (word for word in ("rejected", "revoked") if word in row)
    if row.get("weak_identity"):
        yield "shared token"
    if skew := row.get("version_skew"):
        yield skew
    if claims := row.get("open_conflicts"):
        yield f"conflicts: {claims}"


def age(at: str | None, now: datetime) -> str:
    """How long ago; in seconds up to two minutes."""
    if at is None or at == ZERO_TIME:
        return "never"
    then = _time(at)
    seconds = max(int((now - then).total_seconds()), 0)
    if seconds < _PLAIN_MINUTE:
        return f"{seconds} s ago"
    # Django uses non-breaking spaces.
    return f"{timesince(then, now, depth=1)} ago".replace("\xa0", " ")


def _time(at: str) -> datetime:
    return datetime.fromisoformat(at)


def detail(row: Mapping[str, Any], events: Sequence[NodeEvent]) -> str:
    """One node: its facts, then its latest events."""
    labels = sorted(row["labels"].items())
    others = {name: value for name, value in row.items() if name not in ("labels", "open_conflicts")}
    facts = [(name, text) for name, text in _flat(others, "") if text]
    facts += [(f"label {key}", text or NOTHING) for key, text in labels]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {printable(text)}" for name, text in facts]
    return "\n".join([*lines, "", _events(events)])


def _flat(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping) and value.keys() == _FACT:
            yield label, _fact(value)
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{label}: ")
        elif name == "gpus":
            for one in value:
                more = {name: figure for name, figure in one.items() if name != "index"}
                yield from _flat(more, f"GPU {one['index']}: ")
        else:
            yield label, _text(name, value)


def _fact(value: Mapping[str, Any]) -> str:
    reason = f": {value['reason']}" if value["reason"] else ""
    return f"{moment(_time(value['at']))} by {value['by'] or 'unknown'}{reason}"


def _text(name: str, value: Any) -> str:
    if value is None or value == ZERO_TIME:
        return ""
    if name in _TIMES:
        return moment(_time(value))
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        measured = name.rpartition("_")[2] in _SIZES
        return (human_bytes(value) if value else "") if measured else str(value)
    return str(value)


def moment(at: datetime) -> str:
    """A time in UTC, to the second."""
    return f"{at:%Y-%m-%d %H:%M:%S}Z"


def _events(events: Sequence[NodeEvent]) -> str:
    rows = [(moment(event.at), event.kind, _change(event), event.actor, event.cause) for event in events]
    return table(("TIME", "EVENT", "STATUS", "ACTOR", "REASON"), rows)


def _change(event: NodeEvent) -> str:
    if event.status_before == event.status_after:
        return event.status_after
    return f"{event.status_before} -> {event.status_after}"


def conflicts(rows: Sequence[Mapping[str, Any]], now: datetime) -> str:
    """Conflicts, one per line."""
    return table(_CLAIMS, [_conflict(row, now) for row in rows]) if rows else "no conflicts"


def _conflict(row: Mapping[str, Any], now: datetime) -> tuple[str, ...]:
    proof = row.get("claimed_name") if row["kind"] == "name" else row.get("fingerprint", row.get("instance"))
    return (
        str(row["id"])[:SHORT_ID],
        row["node_name"],
        row["state"],
        row["kind"],
        row["source_address"],
        row.get("advertised_address", ""),
        row["node_source_address"],
        str(row["count"]),
        age(row["last_at"], now),
        proof or "",
    )
