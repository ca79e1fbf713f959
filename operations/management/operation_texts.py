"""Texts about operations and their targets at the command line.

Pure functions of operations in the wire form (`operations.changes.feed`). Names, reasons and errors come from
workers, so unprintable characters are removed.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import Columns
from localai_cluster.kit import clock
from localai_cluster.kit.quantities import counted
from operations.models import Status, TargetStatus

Entry = Mapping[str, Any]
"""An operation in the form of `GET /api/operations`."""
Part = Mapping[str, Any]
"""A target of an operation: an element of its `nodes`."""

_MAX_TEXT_LENGTH = 80
_TEXT_BY_STATUS = {
    Status.PENDING: "queued",
    Status.PROCESSING: "running",
    Status.WAITING: "waiting for nodes",
}
_TEXT_BY_TARGET_STATUS = {TargetStatus.SUCCESS: "done", TargetStatus.ERROR: "failed"}


def short_id(entry: Entry) -> str:
    """Return the first characters of the operation's id."""
    return str(entry["jobID"])[: command_line.SHORT_ID_LENGTH]


def target_state(part: Part) -> str:
    """Return a target's state as text."""
    if part.get("overdueSince"):
        return "running on the worker"
    if part["status"] == TargetStatus.QUEUED:
        if part.get("attempts") and part.get("nextLookAt"):
            return "trying again"
        return "waiting" if part.get("reason", "queued") != "queued" else "queued"
    if part["status"] == TargetStatus.RUNNING_ON_WORKER:
        return part.get("phase") or "running"
    return _TEXT_BY_TARGET_STATUS.get(part["status"]) or str(part["status"])


def target_reason(part: Part) -> str:
    """Return why the target failed or waits, otherwise its current step, in one line."""
    file = part.get("file_name") if part["status"] == TargetStatus.DOWNLOADING else ""
    waits = "" if part.get("attempts") else wait_text(part)
    said = part.get("error") or waits or part.get("reason") or file or ""
    at = part.get("nextLookAt") if part["status"] == TargetStatus.QUEUED and part.get("attempts") else None
    return command_line.printable(
        f"{said} (next attempt {command_line.format_time(datetime.fromisoformat(at))})" if at else said
    )


def wait_text(entry: Entry | Part) -> str:
    """Return why and since when an operation waits; "" if unknown."""
    since = entry.get("waitsSince")
    said = str(entry.get("waitsFor", ""))
    return f"{said} since {command_line.format_time(datetime.fromisoformat(since))}" if since else said


def target_size(part: Part) -> str:
    """Return the transferred and the total bytes as text."""
    if "total" in part:
        return f"{part.get('current', '0 B')} of {part['total']}"
    return str(part.get("current", ""))


def target_line(part: Part) -> str:
    """Return the line for a target."""
    done = f" {part['percentage']:.0f} %" if part["status"] == TargetStatus.DOWNLOADING else ""
    measured = f" ({target_size(part)})" if done and target_size(part) else ""
    said = f": {target_reason(part)}" if target_reason(part) else ""
    return f"{command_line.printable(part['node_name'])}: {target_state(part)}{done}{measured}{said}"


def _note_text(entry: Entry) -> str:
    said = str(entry.get("error") or wait_text(entry) or entry["message"])
    return said if len(said) <= _MAX_TEXT_LENGTH else f"{said[: _MAX_TEXT_LENGTH - 1]}…"


def _status_text(entry: Entry) -> str:
    return _TEXT_BY_STATUS.get(entry["status"]) or str(entry["status"])


def kind_text(entry: Entry) -> str:
    """Return the operation's kind as text: `backend install`."""
    return str(entry["kind"]).replace("_", " ")


def node_text(entry: Entry) -> str:
    """Return the name of the operation's node, or the number of its nodes."""
    names = [part["node_name"] for part in entry.get("nodes", ())]
    if len(names) > 1 or entry.get("allNodes"):
        nodes = counted(len(names), "node")
        return f"all ({nodes})" if entry.get("allNodes") else nodes
    return str(entry.get("nodeName") or next(iter(names), ""))


_LIST_HEADINGS: Columns = {
    "ID": short_id,
    "WHAT": kind_text,
    "OF": "id",
    "WHERE": node_text,
    "STATE": _status_text,
    "DONE": lambda entry: f"{entry['progress']} %",
    "BY": "actor",
    "AGE": lambda entry: command_line.format_age(entry["createdAt"], clock.now()),
    "SAYS": _note_text,
}
_HISTORY_HEADINGS: Columns = {
    "ID": short_id,
    "WHAT": kind_text,
    "OF": "fullName",
    "WHERE": node_text,
    "OUTCOME": "outcome",
    "BY": "actor",
    "ENDED": lambda entry: command_line.format_time(datetime.fromisoformat(entry["finishedAt"])),
    "SAYS": _note_text,
}
_TARGET_HEADINGS: Columns = {
    "NODE": "node_name",
    "STATE": target_state,
    "DONE": lambda part: f"{part['percentage']:.0f} %",
    "BYTES": target_size,
    "ATTEMPTS": "attempts",
    "SAYS": target_reason,
}


def operations_text(entries: Sequence[Entry], *, none: str) -> str:
    """Return the list of operations, one operation per line."""
    return command_line.format_table(_LIST_HEADINGS, entries) if entries else none


def history_text(entries: Sequence[Entry], cursor: str) -> str:
    """Return a page of the history, one operation per line, and the command for the next page."""
    if not entries:
        return "nothing has ended that matches"
    listed = command_line.format_table(_HISTORY_HEADINGS, entries)
    return f"{listed}\nolder ones: --cursor {cursor}" if cursor else listed


def operation_text(entry: Entry) -> str:
    """Return the text of one operation: its details, then its targets."""
    facts = [(name, text) for name, text in _detail_rows(entry) if text]
    width = max(len(name) for name, _ in facts)
    lines = [f"{name.ljust(width)}  {command_line.printable(text)}" for name, text in facts]
    parts = entry.get("nodes", ())
    return "\n".join([*lines, "", command_line.format_table(_TARGET_HEADINGS, parts)] if parts else lines)


def _detail_rows(entry: Entry) -> Iterator[tuple[str, str]]:
    yield "id", entry["jobID"]
    yield "what", f"{kind_text(entry)} of {entry['id']}"
    yield "where", node_text(entry)
    yield "state", _status_text(entry)
    yield "done", f"{entry['progress']} %"
    yield "says", entry["message"]
    yield "waits", wait_text(entry)
    if entry.get("error") and entry["error"] not in entry["message"]:
        yield "error", entry["error"]
    if waves := entry.get("waves"):
        yield (
            "waves",
            str(waves["count"]) if entry.get("finishedAt") else f"{waves['count']}, {waves['state']}",
        )
        yield "last replicas confirmed", ", ".join(waves["lastReplicas"])
    yield "asked by", entry["actor"]
    yield "from", entry.get("clientAddress", "")
    for name, key in (
        ("asked", "createdAt"),
        ("began", "startedAt"),
        ("ended", "finishedAt"),
        ("gives up", "givesUpAt"),
        ("dismissed", "dismissedAt"),
    ):
        yield name, command_line.format_time(datetime.fromisoformat(entry[key])) if entry.get(key) else ""
    yield "dismissed by", entry.get("dismissedBy", "")
    yield "comment", entry.get("dismissedComment", "")


def state_counts(parts: Sequence[Part]) -> str:
    """Return a text with the number of targets in each state, such as `3 queued, 2 done`."""
    found: dict[str, int] = {}
    for part in parts:
        found[target_state(part)] = found.get(target_state(part), 0) + 1
    return ", ".join(f"{count} {name}" for name, count in found.items()) or command_line.EMPTY_CELL
