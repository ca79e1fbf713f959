"""The output of `manage.py placement`: the answers of the REST API as aligned text. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from nodes.management.rendering import age, printable, table
from nodes.reconcilers.decision_replay import Found

_REPLICAS = ("NODE", "INDEX", "STATE", "REQUESTS", "SINCE")
_RECORDS = ("RECORD", "AGE", "KIND", "OUTCOME", "NODE", "INDEX", "WHY")
_DEEDS = ("DO", "NODE", "WHY")
_PLAN = ("REPLICA", "OUTCOME", "NODE", "INDEX", "WHY")


def explained(row: Mapping[str, Any], now: datetime) -> str:
    """Replicas, decisions, and what comes next."""
    parts = [f"next request: {printable(row['next']['says'])}"]
    if row["replicas"]:
        parts.append(table(_REPLICAS, [_replica(one, now) for one in row["replicas"]]))
    if row["records"]:
        records = [
            [str(one["id"]), age(one["last_at"], now), one["kind"], *_decision(one)] for one in row["records"]
        ]
        parts.append(table(_RECORDS, records))
    if (told := row["next"]["placement"]) is not None:
        parts.append("\n".join(["one more replica now:", *_nodes(told)]))
    return "\n\n".join(parts)


def planned(row: Mapping[str, Any]) -> str:
    """The decisions, and of the last one the nodes that were near."""
    decisions = row["decisions"]
    lines = table(_PLAN, [[str(one["replica"]), *_decision(one)] for one in decisions])
    parts = [f"{row['placed']} of {row['wanted']} replicas placed", lines]
    if near := list(_nodes(decisions[-1])):
        parts.append("\n".join([f"replica {decisions[-1]['replica']}:", *near]))
    return "\n\n".join(parts)


def ruled(row: Mapping[str, Any]) -> str:
    """What the replica pass would do, and on which nodes."""
    said = f"{row['replicas_now']} there, {row['loading']} loading, {row['wanted']} wanted"
    parts = [f"{said}: {printable(row['says'])}"]
    if row["waits_until"]:
        parts.append(f"a cooldown goes on until {row['waits_until']}")
    deeds = [["load", one["node"], one["why"]] for one in row["loads"]]
    deeds += [["retire", one["node"], one["why"]] for one in row["retires"]]
    if deeds:
        parts.append(table(_DEEDS, deeds))
    if row["left_out"]:
        parts.append(f"and {row['left_out']} loads more")
    if row["unsatisfiable"]:
        missed = [printable(f"  not {one['node']}: {one['reason']}") for one in row["misses"]]
        parts.append("\n".join([f"not possible: {printable(row['unsatisfiable']['reason'])}", *missed]))
    return "\n\n".join(parts)


def again(said: Found, found: Found | None) -> str:
    """Whether both are the same."""
    if found is None:
        return "what this decision saw is not kept any more"
    if found == said:
        return f"the same decision: {said.outcome}: {printable(said.reason)}"
    return printable(
        f"ANOTHER decision: {found.outcome}: {found.reason}\ninstead of: {said.outcome}: {said.reason}"
    )


def _replica(one: Mapping[str, Any], now: datetime) -> Sequence[str]:
    return [
        one["node"],
        str(one["replica_index"]),
        one["state"],
        str(one["in_flight"]),
        age(one["since"], now),
    ]


def _record(one: Mapping[str, Any], now: datetime) -> Sequence[str]:
    return [str(one["id"]), age(one["last_at"], now), one["kind"], *_decision(one)]


def _decision(one: Mapping[str, Any]) -> Sequence[str]:
    index = one["replica_index"]
    return [one["outcome"], one["node"] or "", "" if index is None else str(index), one["reason"]]


def _nodes(told: Mapping[str, Any]) -> Iterator[str]:
    for one in told["best"]:
        yield printable(f"  {one['node']}: {one.get('against') or told['reason']}")
    for one in told["misses"]:
        yield printable(f"  not {one['node']}: {one['reason']}")
