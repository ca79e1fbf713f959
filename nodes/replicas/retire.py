"""The only place that deletes rows of replicas. Each removal is announced once, after commit.

Rows are locked in the order of their ids, as the hot path does it (`statements.py`), or two transactions
would wait for each other.
"""

from collections.abc import Collection, Iterable
from typing import Any, Protocol
from uuid import UUID

from django.db import transaction

from nodes.models import NodeModel
from nodes.replicas import hooks, statements
from nodes.replicas.hooks import ALL_REPLICAS, Removed
from nodes.replicas.slots import Slot


class Runner(Protocol):
    """What the hot path's pool offers: statements in one transaction, and the rows of the last one."""

    async def run_in_transaction(self, statements: list[tuple[str, Any]]) -> list[tuple[Any, ...]]:
        """Runs them."""


def retire_of_nodes(*node_ids: UUID, keep: Collection[UUID] = ()) -> int:
    """Removes the replicas of these nodes except those in `keep`; answers how many.

    Each model of a node is announced once, with index -1. Needs a transaction.
    """
    rows = NodeModel.objects.filter(node_id__in=node_ids).exclude(pk__in=keep).order_by("id")
    gone = list(rows.select_for_update(of=("self",)).values_list("pk", "node_id", "model_name"))
    _delete([pk for pk, _, _ in gone], {Removed(model, node, ALL_REPLICAS) for _, node, model in gone})
    return len(gone)


def retire_leftovers(model_name: str, *, mark: str) -> list[Slot]:
    """Removes and answers the slots of earlier attempts: only one load of a model is active at a time."""
    stale = NodeModel.objects.of(model_name).filter(state="loading").exclude(loading_by=mark)
    with transaction.atomic():
        rows = list(stale.order_by("id").select_for_update(of=("self",)).select_related("node"))
        _delete(
            [row.pk for row in rows],
            [Removed(row.model_name, row.node_id, row.replica_index) for row in rows],
        )
    return [Slot(row.id, row.node_id, row.node.name, row.replica_index) for row in rows]


def retire_slot(slot: Slot, *, mark: str) -> None:
    """Gives a slot back, if it is still this attempt's."""
    mine = NodeModel.objects.filter(pk=slot.id, loading_by=mark, state="loading")
    with transaction.atomic():
        row = mine.select_for_update(of=("self",)).first()
        if row is not None:
            _delete([row.pk], [Removed(row.model_name, row.node_id, row.replica_index)])


async def retire_dead(pool: Runner, replica_id: UUID, address: str) -> bool:
    """Removes a replica that does no work: the row that was picked, not one put in its place since.

    For the hot path, which has no ORM; answers whether the row was still there.
    """
    values = {"replica": replica_id, "address": address}
    texts = (statements.LOCK_REPLICA, statements.DROP_USES, statements.DROP_REPLICA)
    removed = await pool.run_in_transaction([(text, values) for text in texts])
    hooks.announce(Removed(*row) for row in removed)
    return bool(removed)


def _delete(ids: list[UUID], removed: Iterable[Removed]) -> None:
    """Deletes locked rows; the hooks are called after commit."""
    if ids:
        NodeModel.objects.filter(pk__in=ids).delete()
        announced = sorted(removed)
        transaction.on_commit(lambda: hooks.announce(announced))
