"""Hooks for removed replicas (R1.101 to R1.103).

A hook is a function that is called after commit, once for each removal, in the process that removed the row.
If a hook fails, the failure is logged and the other hooks are still called. Other processes receive a NOTIFY
of the same transaction.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import UUID

log = logging.getLogger(__name__)

ALL_REPLICAS = -1
"""Replica index that stands for all replicas of the model on the node."""


@dataclass(frozen=True, order=True)
class RemovedReplica:
    """A replica that was removed; the index -1 stands for all replicas of the model on the node."""

    model_name: str
    node_id: UUID
    replica_index: int


CHANNEL = "cluster_removed_replicas"
"""NOTIFY channel of removed replicas; the payload is `<node id> <index> <model>`."""


def encode(removal: RemovedReplica) -> str:
    """Return the NOTIFY payload of a removal."""
    return f"{removal.node_id} {removal.replica_index} {removal.model_name}"


def decode(payload: str) -> RemovedReplica:
    """Parse a NOTIFY payload."""
    node, index, model = payload.split(" ", 2)
    return RemovedReplica(model, UUID(node), int(index))


Hook = Callable[[RemovedReplica], None]

on_removed: list[Hook] = []


def call_hooks(removed: Iterable[RemovedReplica]) -> None:
    """Call every hook after the removals are committed."""
    for removal in removed:
        for hook in on_removed:
            try:
                hook(removal)
            except Exception:
                log.exception(
                    "a hook failed for the removal of %s on %s", removal.model_name, removal.node_id
                )
