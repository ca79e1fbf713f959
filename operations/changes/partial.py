"""Partial changes, which hold only the changed targets of an operation, and their merging.

A partial change applies to readers that have all changes up to the number before it. So a change of one
target has the size of one target, regardless of the number of nodes. Pure.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from operations.changes.feed import as_dict, part_as_dict
from operations.models import Operation, OperationTarget

PARTIAL = "partial"
"""Key of a change whose `nodes` has only the changed targets; the others are unchanged."""


def change_of(
    operation: Operation,
    targets: Sequence[OperationTarget],
    moved: Collection[OperationTarget] | None = None,
) -> dict[str, Any]:
    """Return the change for readers that have the previous state; `moved` has the changed targets.

    With `moved` the unchanged targets are omitted, and the change is marked `partial`.
    """
    if moved is None or len(moved) == len(targets):
        return as_dict(operation, targets)
    nodes = [part_as_dict(target) for target in moved]
    return {**as_dict(operation), "nodes": nodes, PARTIAL: True}


def folded(changes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the changes to one per operation, in the order of each operation's last change."""
    last: dict[str, dict[str, Any]] = {}
    for change in changes:
        before = last.pop(change["jobID"], None)
        last[change["jobID"]] = change if before is None or PARTIAL not in change else _over(before, change)
    return list(last.values())


def _over(before: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Merge a partial change into an earlier change, which may be complete."""
    nodes = {part["node_id"]: part for part in (*before.get("nodes", ()), *change["nodes"])}
    merged = {**change, "nodes": list(nodes.values())}
    if PARTIAL not in before:
        del merged[PARTIAL]
    return merged
