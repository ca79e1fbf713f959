"""The aligned text of `manage.py nodes`: pure functions over the rows of `nodes.registry.node_rows`."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from localai_cluster.accounts.command_line import NOTHING, SHORT_ID, age, moment, printable, table
from localai_cluster.messaging.messages import human_bytes
from localai_cluster.web.shapes import TIME
from nodes.models import NodeEvent
from nodes.registry.shape import DRAIN, IDENTITY, INVENTORY, NODE_DETAIL, OVERRIDE, ZERO_TIME

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
_TIMES = {
    name
    for shape in (NODE_DETAIL, DRAIN, IDENTITY, INVENTORY, OVERRIDE)
    for name, field in shape.fields.items()
    if field.schema == TIME
}
"""Keys of a node whose values are times."""


def nodes(rows: Sequence[Mapping[str, Any]], now: datetime) -> str:
    """Return one line per node."""
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


def detail(row: Mapping[str, Any], events: Sequence[NodeEvent]) -> str:
    """Return the facts of a node, then its latest events."""
    labels = sorted(row["labels"].items())
    plain = {name: value for name, value in row.items() if name not in ("labels", "open_conflicts")}
    facts = [(name, text) for name, text in _flat(plain, "") if text]
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
            for gpu in value:
                figures = {name: figure for name, figure in gpu.items() if name != "index"}
                yield from _flat(figures, f"GPU {gpu['index']}: ")
        else:
            yield label, _text(name, value)


def _fact(value: Mapping[str, Any]) -> str:
    reason = f": {value['reason']}" if value["reason"] else ""
    return f"{moment(datetime.fromisoformat(value['at']))} by {value['by'] or 'unknown'}{reason}"


def _text(name: str, value: Any) -> str:
    if value is None or value == ZERO_TIME:
        return ""
    if name in _TIMES:
        return moment(datetime.fromisoformat(value))
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        measured = name.rpartition("_")[2] in _SIZES
        return (human_bytes(value) if value else "") if measured else str(value)
    return str(value)


def _events(events: Sequence[NodeEvent]) -> str:
    rows = [(moment(event.at), event.kind, _change(event), event.actor, event.cause) for event in events]
    return table(("TIME", "EVENT", "STATUS", "ACTOR", "REASON"), rows)


def _change(event: NodeEvent) -> str:
    if event.status_before == event.status_after:
        return event.status_after
    return f"{event.status_before} -> {event.status_after}"


def conflicts(rows: Sequence[Mapping[str, Any]], now: datetime) -> str:
    """Return one line per conflict."""
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
