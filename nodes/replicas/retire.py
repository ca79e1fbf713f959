"""The only place that deletes rows of replicas. Each removal is announced once, after commit.

Whole nodes go at once. One replica goes when its engine is known to have ended: its worker has confirmed the
stop (`retire_unloaded`, `retire_noted`), or has said itself that the process is not there any more, by its
list, its reply, or by giving the address to another one. Until then its row is `unloading` (`leaving.py`).
Rows are locked in the order of their ids, as the hot path does it (`statements.py`), or two transactions
would wait for each other.
"""

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from localai_cluster.commits import committed
from localai_cluster.messaging.messages import split_process_key
from nodes.models import BEING_LOADED, EngineStart, NodeModel, ReplicaState
from nodes.replicas import hooks, vram
from nodes.replicas.evidence import Running, lists
from nodes.replicas.hooks import ALL_REPLICAS, Removed
from nodes.replicas.slots import Slot
from operations.changes import events


def retire_of_nodes(*node_ids: UUID, keep: Collection[UUID] = ()) -> int:
    """Removes the replicas of these nodes except those in `keep`; answers how many.

    Each model of a node is announced once, with index -1. Needs a transaction.
    """
    rows = NodeModel.objects.filter(node_id__in=node_ids).exclude(pk__in=keep).order_by("id")
    gone = list(rows.select_for_update(of=("self",)).values_list("pk", "node_id", "model_name"))
    _delete([pk for pk, _, _ in gone], {Removed(model, node, ALL_REPLICAS) for _, node, model in gone})
    return len(gone)


def retire_slots_of_ended(running: QuerySet[Any], model_name: str | None = None) -> list[Slot]:
    """Removes and answers the slots, of one model or all, whose attempt is none of `running`, by its `mark`.

    A killed attempt leaves its slot, and nothing else frees it. The slots of a load that goes on stay,
    however many loads of the model there are.
    """
    rows = NodeModel.objects.all() if model_name is None else NodeModel.objects.of(model_name)
    return _retire_slots(rows.exclude(Exists(running.filter(mark=OuterRef("loading_by")))))


def retire_unlisted(node_id: UUID, running: Running, *, before: datetime) -> list[str]:
    """Removes the loaded replicas of a node that its worker does not run, and answers their keys.

    Those that an upgrade has taken out of the picks count as loaded.

    `running` are the worker's engines, as it listed them after `before`.
    """
    held = Q(state="loaded") | Q(withdrawn_for__isnull=False)
    loaded = NodeModel.objects.filter(held, node_id=node_id, updated_at__lt=before)
    with transaction.atomic():
        rows = list(loaded.order_by("id").select_for_update(of=("self",)))
        gone = [row for row in rows if not lists(running, str(row), row.address)]
        _delete_rows(gone)
    return [str(row) for row in gone]


def of_node(node_id: UUID) -> frozenset[UUID]:
    """The replicas of a node as they are now, in every state."""
    return frozenset(NodeModel.objects.filter(node_id=node_id).values_list("pk", flat=True))


def retire_stopped(node_id: UUID, keys: Collection[str], *, among: Collection[UUID]) -> list[str]:
    """Removes the replicas whose engines a worker reports as stopped, and answers their keys (nats.md §6.2).

    `among` are the rows from before the command: a row that was made since stands for another engine under
    the same key. What is no key is ignored.
    """
    slots = {slot for key in keys if (slot := split_process_key(key)) is not None}
    with transaction.atomic():
        rows = NodeModel.objects.filter(node_id=node_id, pk__in=among).order_by("id")
        known = rows.select_for_update(of=("self",))
        gone = [row for row in known if (row.model_name, row.replica_index) in slots]
        _delete_rows(gone)
    return [str(row) for row in gone]


def retire_at(address: str, slot: Slot) -> list[str]:
    """Removes every replica at an address that a new engine has, that of `slot`; answers their keys.

    A stock worker that restarted gives its ports again before it was asked what still runs there.
    """
    former = NodeModel.objects.filter(node_id=slot.node_id, address=address).exclude(pk=slot.id)
    with transaction.atomic():
        gone = list(former.order_by("id").select_for_update(of=("self",)))
        _delete_rows(gone)
    return [str(row) for row in gone]


def retire_slot(slot: Slot, *, mark: str) -> None:
    """Gives a slot back, if it is still this attempt's; not before an engine that it may have is gone.

    Such a row is `unloading` without an address: the engine's note says how it is stopped (`retire_noted`).
    """
    mine = NodeModel.objects.filter(pk=slot.id, loading_by=mark, state__in=BEING_LOADED)
    with transaction.atomic():
        row = mine.select_for_update(of=("self",)).first()
        if row is None:
            return
        if EngineStart.objects.filter(mark=mark).exists():
            row.state = ReplicaState.UNLOADING
            row.save(update_fields=["state"])
            events.notify(events.NODES, str(row.node_id))
        else:
            _delete_rows([row])


def retire_noted(mark: str | None = None) -> int:
    """Gives back the slots of failed loads whose engine is gone: of this attempt, or all without a note."""
    rows = NodeModel.objects.filter(state="unloading", address="", withdrawn_for__isnull=True)
    noted = EngineStart.objects.filter(mark=OuterRef("loading_by"))
    gone = rows.exclude(Exists(noted)) if mark is None else rows.filter(loading_by=mark)
    with transaction.atomic():
        found = list(gone.order_by("id").select_for_update(of=("self",), skip_locked=True))
        retire_lifeless(found)
    return len(found)


def retire_unloaded(replica_id: UUID, *, stop_sent: datetime | None = None) -> bool:
    """Removes a replica in `unloading` whose engine is gone; False when the row was gone already.

    Loads that took a place on its node without the memory have been waiting for what it gives back.
    `stop_sent`: when the stop was sent that ended the engine; None if it may have ended before.
    """
    with committed("unload.gone"):
        beside = NodeModel.objects.filter(pk=replica_id).values("node_id")
        short = Q(state__in=BEING_LOADED, vram_on_node=False, vram_needed__gt=0, node_id__in=beside)
        rows = NodeModel.objects.filter(short | Q(pk=replica_id, state="unloading")).order_by("id")
        locked = {row.pk: row for row in rows.select_for_update(of=("self",))}
        row = locked.pop(replica_id, None)
        if row is None:
            return False
        vram.given_back_beside(row, locked.values(), stop_sent=stop_sent)
        _delete([row.pk], [Removed(row.model_name, row.node_id, row.replica_index)])
        events.notify(events.NODES, str(row.node_id))
        if stop_sent is not None and row.loaded_at is not None and row.vram_needed > 0:
            transaction.on_commit(lambda: vram.credit(row, stop_sent=stop_sent), robust=True)
    return True


def retire_lifeless(rows: Sequence[NodeModel]) -> None:
    """Removes these locked replicas, whose engines have ended. Needs a transaction.

    Who waits for the nodes hears of it: a place there is free.
    """
    _delete_rows(rows)
    if rows:
        events.notify(events.NODES, *sorted({str(row.node_id) for row in rows}))


def _retire_slots(stale: QuerySet[NodeModel]) -> list[Slot]:
    with transaction.atomic():
        loading = stale.filter(state__in=BEING_LOADED).order_by("id")
        rows = list(loading.select_for_update(of=("self",)).select_related("node"))
        _delete_rows(rows)
    return [Slot(row.id, row.node_id, row.node.name, row.replica_index) for row in rows]


def _delete_rows(gone: Sequence[NodeModel]) -> None:
    announced = [Removed(row.model_name, row.node_id, row.replica_index) for row in gone]
    _delete([row.pk for row in gone], announced)
    if reserving := [row for row in gone if row.loaded_at is None and row.vram_on_node]:
        # No `partial`: Django wants the name of what has failed.
        transaction.on_commit(lambda: _release(reserving), robust=True)


def _release(rows: Sequence[NodeModel]) -> None:
    """R2.43, "Port:": after commit, as nodes are locked before replicas. A reading makes up for a miss."""
    for row in rows:
        vram.release(row.node_id, row.vram_needed, since=row.created_at)


def _delete(ids: list[UUID], removed: Iterable[Removed]) -> None:
    """Deletes locked rows; other processes hear of it, and the hooks are called, after commit."""
    if ids:
        NodeModel.objects.filter(pk__in=ids).delete()
        announced = sorted(removed)
        events.notify(hooks.CHANNEL, *map(hooks.told, announced))
        transaction.on_commit(lambda: hooks.announce(announced))
