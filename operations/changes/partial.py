"""Changes that name only the parts of an operation that moved, and how several of them become one.

A change counts for those who know everything up to the number before it. So one part that moves costs the
size of one part, however many nodes the operation has. Pure.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from operations.changes.feed import as_dict, part_as_dict
from operations.models import Operation, OperationTarget

PARTIAL = "partial"
"""In a change: `nodes` has only the parts that changed, the others are as they were."""


def change_of(
    operation: Operation,
    targets: Sequence[OperationTarget],
    moved: Collection[OperationTarget] | None = None,
) -> dict[str, Any]:
    """A change for those who know the operation as it was before; `moved` are its parts that changed.

    Then the others are left out, and `partial` says so.
    """
    if moved is None or len(moved) == len(targets):
        return as_dict(operation, targets)
    nodes = [part_as_dict(target) for target in moved]
    return {**as_dict(operation), "nodes": nodes, PARTIAL: True}


def folded(changes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Change in their order as one for each operation, in the order of their last ones."""
    last: dict[str, dict[str, Any]] = {}
    for change in changes:
        before = last.pop(change["jobID"], None)
        last[change["jobID"]] = change if before is None or PARTIAL not in change else _over(before, change)
    return list(last.values())


def _over(before: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A partial change on top of an earlier one, which may be whole."""
    nodes = {part["node_id"]: part for part in (*before.get("nodes", ()), *change["nodes"])}
    merged = {**change, "nodes": list(nodes.values())}
    if PARTIAL not in before:
        del merged[PARTIAL]
    return merged
