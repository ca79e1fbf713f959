"""Who is told when a replica's row has gone (R1.101 to R1.103).

A hook is a function that is called after commit, once for each removal, in the process that removed the row.
A hook that fails is logged and keeps no other from being called. Other processes hear of it by a NOTIFY of
the same transaction.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import UUID

log = logging.getLogger(__name__)

ALL_REPLICAS = -1
"""Stands for the index when every replica of a model on a node went at once."""


@dataclass(frozen=True, order=True)
class Removed:
    """What went: one replica, or all of a model on a node (index -1)."""

    model_name: str
    node_id: UUID
    replica_index: int


CHANNEL = "cluster_removed_replicas"
"""NOTIFY channel: `<node id> <index> <model>`."""


def told(one: Removed) -> str:
    """The payload that says so."""
    return f"{one.node_id} {one.replica_index} {one.model_name}"


def heard(payload: str) -> Removed:
    """What such a payload says."""
    node, index, model = payload.split(" ", 2)
    return Removed(model, UUID(node), int(index))


Hook = Callable[[Removed], None]

on_removed: list[Hook] = []


def announce(removed: Iterable[Removed]) -> None:
    """Calls every hook; the rows are gone and that is committed."""
    for one in removed:
        for hook in on_removed:
            try:
                hook(one)
            except Exception:
                log.exception("a hook failed for the removal of %s on %s", one.model_name, one.node_id)
