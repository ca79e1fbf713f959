"""The life of an engine: the one writer of its columns, and the only code that deletes rows of replicas.

Each change is an event of the table in `states.py`, and its UPDATE names the phases in which the event is
allowed. So an event that arrives after another event has changed the phase changes nothing. The statement
that drains a lost replica (`statements.LOSE`) follows the same table without the ORM.

The end of an engine is confirmed when its worker has confirmed the stop (`confirm_end`), no longer lists the
engine, reports it stopped, or has given its address to another engine. When a node leaves, its replicas
depart: they no longer count as replicas, and their rows stay until the end is confirmed or the node is
removed. The hooks are called once for each replica, when it departs or ends, after commit. Rows are locked in
the order of their ids, as in the hot path (`statements.py`), so that transactions do not deadlock.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Case, CharField, Exists, F, OuterRef, Q, Value, When

from localai_cluster.kit.transactions import committed
from localai_cluster.messaging.messages import split_process_key
from nodes.models import BEING_LOADED, NodeModel, OwnerKind, Phase, PhaseReason, ReplicaUse
from nodes.models.replica import NodeModelQuerySet
from nodes.placement.memory import CLOCK_TOLERANCE
from nodes.replicas import hooks, reserved_memory, states
from nodes.replicas.evidence import Running, is_listed
from nodes.replicas.hooks import ALL_REPLICAS, RemovedReplica
from nodes.replicas.states import ReplicaEvent
from operations.changes import events
from operations.models import Operation, Status

NO_OWNER_COLUMNS: Mapping[str, Any] = {"owner_kind": "", "owner_id": None, "owner_fence": None}
CONTROLLER_OWNER_COLUMNS: Mapping[str, Any] = {**NO_OWNER_COLUMNS, "owner_kind": OwnerKind.CONTROLLERS}
_NO_STOP_COLUMNS: Mapping[str, Any] = {
    "claimed_until": None,
    "next_stop_at": None,
    "stop_attempts": 0,
    "stop_error": "",
}
SERVING_COLUMNS: Mapping[str, Any] = {**NO_OWNER_COLUMNS, **_NO_STOP_COLUMNS, "reason": "", "deadline": None}


def may_still_start(row: NodeModel, now: datetime) -> bool:
    """Return True if the start command of the engine may still be on its way to the worker."""
    started = row.started_at
    return started is not None and not row.start_answered and now < started + states.UNANSWERED_START_LIMIT


def apply_event(rows: NodeModelQuerySet, event: ReplicaEvent, **columns: Any) -> int:
    """Apply `event` to the rows whose phase allows it (`states.MOVES`); return how many have changed.

    The UPDATE sets the next phase and `columns`. Events that end rows are for `end_rows`, which deletes them.
    """
    follows = states.MOVES[event]
    columns["phase"] = Case(
        *(When(phase=source, then=Value(target)) for source, target in follows.items()),
        output_field=CharField(),
    )
    return rows.filter(phase__in=follows).order_by().update(**columns)


def drain_columns(deadline: datetime) -> dict[str, Any]:
    """Return the columns of a row that begins to drain or terminate."""
    return {**_NO_STOP_COLUMNS, "deadline": deadline}


def stop_columns(now: datetime) -> dict[str, Any]:
    """Return the columns of a row whose engine is about to be stopped."""
    return {**_NO_STOP_COLUMNS, "deadline": now + states.UNCONFIRMED_STOP_LIMIT}


def owner_columns(kind: OwnerKind, id: UUID, fence: int | None = None) -> dict[str, Any]:
    """Return the columns that make an operation or intent the owner; `fence` is that of a load's attempt."""
    return {"owner_kind": kind, "owner_id": id, "owner_fence": fence}


def has_running_attempt() -> Exists:
    """Return a condition that is true for rows whose owner is a running attempt."""
    running = Operation.objects.filter(
        pk=OuterRef("owner_id"), fence=OuterRef("owner_fence"), status=Status.PROCESSING
    )
    return Exists(running)


def depart(*node_ids: UUID, now: datetime, keep: Collection[UUID] = (), ended: Collection[UUID] = ()) -> int:
    """Mark the replicas of these nodes as `departed`, except those in `keep`; return their number.

    Rows in `ended`, and rows in a phase without an engine, are deleted; all other rows stay, because their
    engines may still run. A row that has already departed keeps its deadline. The hooks are called once for
    each model of a node, with the index -1. Needs a transaction.
    """
    rows = lock_rows(NodeModel.engines.filter(node_id__in=node_ids).exclude(pk__in=keep))
    present = [row for row in rows if row.phase != Phase.DEPARTED]
    removed = {RemovedReplica(row.model_name, row.node_id, ALL_REPLICAS) for row in present}
    over = [row for row in rows if row.phase in states.WITHOUT_ENGINE or row.pk in ended]
    staying = {row.pk for row in rows} - {row.pk for row in over}
    ReplicaUse.objects.filter(replica__in=staying).delete()
    apply_event(
        NodeModel.engines.filter(pk__in=staying),
        ReplicaEvent.NODE_LEFT,
        **CONTROLLER_OWNER_COLUMNS,
        deadline=Case(
            When(phase=Phase.DEPARTED, then=F("deadline")), default=now + states.DEPARTED_ENGINE_LIMIT
        ),
        reason=PhaseReason.NODE_LEFT,
        claimed_until=None,
        next_stop_at=None,
        in_flight=0,
    )
    _delete(over, removed)
    return len(present)


def forget_nodes(*node_ids: UUID) -> int:
    """Delete all rows of these nodes, which are being removed; return the number of replicas.

    Needs a transaction.
    """
    rows = lock_rows(NodeModel.engines.filter(node_id__in=node_ids))
    present = [row for row in rows if row.phase != Phase.DEPARTED]
    _delete(rows, {RemovedReplica(row.model_name, row.node_id, ALL_REPLICAS) for row in present})
    return len(present)


def forget_departed(*, now: datetime) -> list[NodeModel]:
    """Delete the rows of departed engines whose deadline has passed; return these rows."""
    overdue = NodeModel.engines.filter(phase=Phase.DEPARTED, deadline__lte=now)
    if not overdue.exists():
        return []
    with transaction.atomic():
        rows = lock_rows(overdue)
        end_rows(rows)
    return rows


def end_unlisted(node_id: UUID, running: Running, *, before: datetime) -> list[str]:
    """Delete the node's replicas whose engines are missing in its worker's list; return their process keys.

    `running` is the list of the engines that run, requested from the worker after `before`. Only replicas in
    the phase `serving`, or drained by an upgrade, and unchanged since `before` are compared with the list.
    """
    held = Q(phase=Phase.SERVING) | Q(phase=Phase.DRAINING, owner_kind=OwnerKind.INTENT)
    with transaction.atomic():
        rows = lock_rows(NodeModel.objects.filter(held, node_id=node_id, updated_at__lt=before))
        gone = [row for row in rows if not is_listed(running, row.process_key, row.address)]
        end_rows(gone)
    return [str(row) for row in gone]


def engine_ids(node_id: UUID) -> frozenset[UUID]:
    """Return the ids of the node's engines whose start the worker has answered, in every phase.

    An unanswered start may be sent again, so its row may belong to a later process afterwards.
    """
    started = NodeModel.engines.filter(node_id=node_id).exclude(address="")
    return frozenset(started.values_list("pk", flat=True))


def end_stopped(node_id: UUID, keys: Collection[str], *, among: Collection[UUID]) -> list[str]:
    """End the engines that a worker reports as stopped; return their keys (nats.md §6.2).

    `among` are the engines from before the command (`engine_ids`): a later row belongs to another engine with
    the same key. Invalid keys are ignored.
    """
    slots = {slot for key in keys if (slot := split_process_key(key)) is not None}
    with transaction.atomic():
        rows = lock_rows(NodeModel.engines.filter(node_id=node_id, pk__in=among))
        gone = [row for row in rows if (row.model_name, row.replica_index) in slots]
        end_rows(gone)
    return [str(row) for row in gone]


def end_at_address(address: str, *, node_id: UUID, new_engine_id: UUID) -> list[str]:
    """End the engines whose address a new engine has taken; return their keys.

    Only engines count that started before the engine `new_engine_id`. A stock worker that has restarted
    assigns the same ports again before its list of engines is read. Nothing ends if the load of the new
    engine is over, because another engine may have its address since.
    """
    with transaction.atomic():
        rows = lock_rows(NodeModel.engines.filter(node_id=node_id, address=address))
        new = next((row for row in rows if row.pk == new_engine_id and row.phase == Phase.STARTING), None)
        began = new.started_at if new is not None else None
        former = [row for row in rows if row.started_at is None or (began and row.started_at < began)]
        gone = former if new is not None else []
        end_rows(gone)
    return [str(row) for row in gone]


def confirm_end(engine_id: UUID, *, stop_sent: datetime | None = None) -> bool:
    """Delete the row of an engine after its worker has confirmed that the engine's process has ended.

    Return False if the row no longer exists. `stop_sent` is the time at which the stop was sent; None if the
    process may have ended before. The freed memory is added to the readings of free memory by
    which the node's running loads were placed.
    """
    with committed("unload.gone"):
        mine = NodeModel.engines.filter(pk=engine_id)
        short = Q(
            state__in=BEING_LOADED, vram_on_node=False, vram_needed__gt=0, node_id__in=mine.values("node_id")
        )
        stopping = Q(pk=engine_id, phase__in=(Phase.STOPPING, Phase.DEPARTED))
        locked = {row.pk: row for row in lock_rows(NodeModel.engines.filter(short | stopping))}
        row = locked.pop(engine_id, None)
        if row is None:
            return False
        _credit_freed_memory(row, locked.values(), stop_sent=stop_sent)
        end_confirmed([row])
        if stop_sent is not None and row.loaded_at is not None and row.vram_needed > 0:
            transaction.on_commit(
                lambda: reserved_memory.credit_stopped_engine(row, stop_sent=stop_sent), robust=True
            )
    return True


def end_confirmed(rows: Sequence[NodeModel]) -> None:
    """Delete these locked rows, whose engines have certainly ended. Needs a transaction.

    Operations that wait for a free slot on these nodes are notified.
    """
    end_rows(rows)
    if rows:
        events.notify(events.NODES, *sorted({str(row.node_id) for row in rows}))


def end_rows(rows: Sequence[NodeModel]) -> None:
    """Delete these locked rows and call the hooks for those that were replicas. Needs a transaction."""
    present = [row for row in rows if row.phase != Phase.DEPARTED]
    _delete(rows, [RemovedReplica(row.model_name, row.node_id, row.replica_index) for row in present])


# Django deletes a hundred rows at a time.
_DELETE_SQL = """
    WITH uses AS (DELETE FROM replica_uses WHERE replica_id = ANY(%(ids)s))
    DELETE FROM node_models WHERE id = ANY(%(ids)s)
"""


def _release(rows: Sequence[NodeModel]) -> None:
    """Subtract the memory that deleted rows had reserved from the reserved memory of their nodes (R2.43).

    Call this after the commit of the deletion: it locks nodes, which every transaction locks before rows of
    replicas. It includes replicas that were loaded, because a node that never reports its free memory keeps
    their reservations. If the process dies before this call, the node's next report clears the reservation.
    """
    reserved_memory.release((row.node_id, row.vram_needed, row.created_at) for row in rows)


def lock_rows(rows: NodeModelQuerySet) -> list[NodeModel]:
    """Lock these rows in the order of their ids, and return them. Needs a transaction."""
    return list(rows.order_by("id").select_for_update(of=("self",)))


def _delete(rows: Sequence[NodeModel], removed: Iterable[RemovedReplica]) -> None:
    """Delete the rows, notify other processes of the removed replicas, and call the hooks after commit."""
    if rows:
        with connection.cursor() as cursor:
            cursor.execute(_DELETE_SQL, {"ids": [row.pk for row in rows]})
        nodes = {row.node_id for row in rows if row.phase not in states.WITHOUT_ENGINE}
        if nodes:  # after commit, as nodes are locked before replicas
            transaction.on_commit(lambda: reserved_memory.note_ended_engines(nodes), robust=True)
    if reserving := [row for row in rows if row.vram_on_node]:
        # No `partial`: Django wants the name of what has failed.
        transaction.on_commit(lambda: _release(reserving), robust=True)
    if announced := sorted(removed):
        events.notify(hooks.CHANNEL, *map(hooks.encode, announced))
        transaction.on_commit(lambda: hooks.call_hooks(announced))


def _credit_freed_memory(
    gone: NodeModel, loads: Collection[NodeModel], *, stop_sent: datetime | None
) -> None:
    """Add the memory of an ended engine to the readings by which these locked loads were placed.

    Later readings show more free memory by this amount, which would hide the memory that the loads use. Two
    kinds of loads stay unchanged: their reading is older than the engine's allocation, or may be newer than
    its end. The engine ran until its stop was sent; without this time nothing changes.
    """
    if gone.loaded_at is None or stop_sent is None:
        return
    until = stop_sent - CLOCK_TOLERANCE
    freed = {gpu["index"]: gpu["bytes"] for gpu in gone.gpus}
    affected_loads = [row for row in loads if row.vram_seen_at and gone.loaded_at < row.vram_seen_at < until]
    for row in affected_loads:
        row.vram_seen += gone.vram_needed
        row.gpus = [gpu | {"seen": gpu["seen"] + freed.get(gpu["index"], 0)} for gpu in row.gpus]
    NodeModel.engines.bulk_update(affected_loads, ["vram_seen", "gpus"])
