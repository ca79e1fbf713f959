"""The life of an engine: the one writer of its columns, and the only code that deletes rows of replicas.

Each change is an event of the table in `states.py`, and its UPDATE names the phases in which the event is
allowed. So a change that comes late, after another one has moved the row on, changes nothing. The statement
that takes a lost replica out of the picks (`statements.LOSE`) follows the same table without the ORM.

An engine ends when that is confirmed: its worker has confirmed the stop (`confirm_end`), or does not list it
any more, reports it stopped, or has given its address to another one. When a node leaves, its replicas
depart: they count for nobody, and their rows stay until the end is confirmed or the node is removed. What
counted as a replica is announced once, when it departs or ends, after commit. Rows are locked in the order of
their ids, as the hot path does it (`statements.py`), or two transactions would wait for each other.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Case, CharField, Exists, F, OuterRef, Q, Value, When

from localai_cluster.kit.commit_hooks import committed
from localai_cluster.kit.leases import Attempt
from localai_cluster.messaging.messages import process_key, split_process_key
from nodes.models import BEING_LOADED, LOADING_PHASES, NodeModel, OwnerKind, Phase, PhaseReason, ReplicaUse
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import hooks, reserved_memory, states
from nodes.replicas.evidence import Running, is_listed
from nodes.replicas.hooks import ALL_REPLICAS, RemovedReplica
from nodes.replicas.states import ReplicaEvent
from operations.changes import events
from operations.models import Operation, Status

NO_OWNER: Mapping[str, Any] = {"owner_kind": "", "owner_id": None, "owner_fence": None}
CONTROLLERS: Mapping[str, Any] = {**NO_OWNER, "owner_kind": OwnerKind.CONTROLLERS}
_NO_STOP: Mapping[str, Any] = {
    "claimed_until": None,
    "next_stop_at": None,
    "stop_attempts": 0,
    "stop_error": "",
}
SERVES: Mapping[str, Any] = {**NO_OWNER, **_NO_STOP, "reason": "", "deadline": None}


@dataclass(frozen=True)
class Engine:
    """One engine that is to be stopped: a snapshot of its row."""

    id: UUID
    node_id: UUID
    model_name: str
    replica_index: int
    address: str
    """Empty until the worker has answered the start."""
    phase: Phase
    is_lost: bool = False
    """True if it did not answer a request; the engine may still run."""
    started_at: datetime | None = None
    start_answered: bool = True

    @property
    def process_key(self) -> str:
        """The engine process on its worker."""
        return process_key(self.model_name, self.replica_index)

    def may_still_start(self, now: datetime) -> bool:
        """Return True if its start may still be on its way to the worker."""
        started = self.started_at
        return started is not None and not self.start_answered and now < started + states.STARTS_WITHIN


def engine_of(row: NodeModel) -> Engine:
    """Return the snapshot of a row."""
    return Engine(
        row.id,
        row.node_id,
        row.model_name,
        row.replica_index,
        row.address,
        Phase(row.phase),
        row.reason == "lost",
        row.started_at,
        row.start_answered,
    )


def apply_event(rows: NodeModelQuerySet, event: ReplicaEvent, **columns: Any) -> int:
    """Apply `event` to the rows whose phase allows it (`states.MOVES`); return their number.

    Writes the phase that follows and `columns`. `end_rows` deletes the rows that the event ends.
    """
    follows = states.MOVES[event]
    columns["phase"] = Case(
        *(When(phase=source, then=Value(target)) for source, target in follows.items()),
        output_field=CharField(),
    )
    return rows.filter(phase__in=follows).order_by().update(**columns)


def drain_until(deadline: datetime) -> dict[str, Any]:
    """Return the columns of a row that begins to drain or to terminate."""
    return {**_NO_STOP, "deadline": deadline}


def stop_from(now: datetime) -> dict[str, Any]:
    """Return the columns of a row that begins to stop."""
    return {**_NO_STOP, "deadline": now + states.REPORTED_AFTER}


def owned_by(kind: OwnerKind, id: UUID, fence: int | None = None) -> dict[str, Any]:
    """Return the columns of a row that this operation or intent owns; of a load, its attempt `fence`."""
    return {"owner_kind": kind, "owner_id": id, "owner_fence": fence}


def of_attempt(attempt: Attempt) -> Q:
    """The rows of loads that the attempt owns."""
    return Q(**owned_by(OwnerKind.OPERATION, *attempt), phase__in=LOADING_PHASES)


def has_running_attempt() -> Exists:
    """True for rows whose owner is an attempt that is being executed."""
    running = Operation.objects.filter(
        pk=OuterRef("owner_id"), fence=OuterRef("owner_fence"), status=Status.PROCESSING
    )
    return Exists(running)


def depart(*node_ids: UUID, now: datetime, keep: Collection[UUID] = (), ended: Collection[UUID] = ()) -> int:
    """Make the replicas of these nodes `departed`, except `keep`; return their number.

    The rows stay while their engines may run; those in `ended` do not. A row that has departed already keeps
    its deadline. Each model of a node is announced once, with index -1. Needs a transaction.
    """
    rows = _locked(NodeModel.engines.filter(node_id__in=node_ids).exclude(pk__in=keep))
    present = [row for row in rows if row.phase != Phase.DEPARTED]
    removed = {RemovedReplica(row.model_name, row.node_id, ALL_REPLICAS) for row in present}
    over = [row for row in rows if row.phase in states.WITHOUT_ENGINE or row.pk in ended]
    staying = {row.pk for row in rows} - {row.pk for row in over}
    ReplicaUse.objects.filter(replica__in=staying).delete()
    apply_event(
        NodeModel.engines.filter(pk__in=staying),
        ReplicaEvent.NODE_LEFT,
        **CONTROLLERS,
        deadline=Case(When(phase=Phase.DEPARTED, then=F("deadline")), default=now + states.CONFIRMED_AFTER),
        reason=PhaseReason.NODE_LEFT,
        claimed_until=None,
        next_stop_at=None,
        in_flight=0,
    )
    _delete(over, removed)
    return len(present)


def forget_nodes(*node_ids: UUID) -> int:
    """End all rows of nodes that are removed; return the number of replicas. Needs a transaction."""
    rows = _locked(NodeModel.engines.filter(node_id__in=node_ids))
    present = [row for row in rows if row.phase != Phase.DEPARTED]
    _delete(rows, {RemovedReplica(row.model_name, row.node_id, ALL_REPLICAS) for row in present})
    return len(present)


def forget_departed(*, now: datetime) -> list[NodeModel]:
    """End the engines of nodes that have been away past the deadline; return their rows."""
    overdue = NodeModel.engines.filter(phase=Phase.DEPARTED, deadline__lte=now)
    if not overdue.exists():
        return []
    with transaction.atomic():
        rows = _locked(overdue)
        end_rows(rows)
    return rows


def end_unlisted(node_id: UUID, running: Running, *, before: datetime) -> list[str]:
    """End the replicas of a node that its worker does not run; return their keys.

    Those that serve, or that an upgrade has taken out of the picks. `running` are the worker's engines, as it
    listed them after `before`.
    """
    held = Q(phase=Phase.SERVING) | Q(phase=Phase.DRAINING, owner_kind=OwnerKind.INTENT)
    with transaction.atomic():
        rows = _locked(NodeModel.objects.filter(held, node_id=node_id, updated_at__lt=before))
        gone = [row for row in rows if not is_listed(running, str(row), row.address)]
        end_rows(gone)
    return [str(row) for row in gone]


def engine_ids(node_id: UUID) -> frozenset[UUID]:
    """Return the engines of a node whose start was answered, as they are now, in every phase.

    A start that was not answered may be sent again: later the row may stand for a later process.
    """
    started = NodeModel.engines.filter(node_id=node_id).exclude(address="")
    return frozenset(started.values_list("pk", flat=True))


def end_stopped(node_id: UUID, keys: Collection[str], *, among: Collection[UUID]) -> list[str]:
    """End the engines that a worker reports as stopped; return their keys (nats.md §6.2).

    `among` are the engines from before the command (`engine_ids`): a row that was made since stands for
    another engine under the same key. What is no key is ignored.
    """
    slots = {slot for key in keys if (slot := split_process_key(key)) is not None}
    with transaction.atomic():
        rows = _locked(NodeModel.engines.filter(node_id=node_id, pk__in=among))
        gone = [row for row in rows if (row.model_name, row.replica_index) in slots]
        end_rows(gone)
    return [str(row) for row in gone]


def end_at_address(address: str, *, node_id: UUID, but: UUID) -> list[str]:
    """End the engines at `address` that were started before the one of row `but`; return their keys.

    A stock worker that has restarted assigns the same ports again before its list of engines is read. Nothing
    ends if the new engine's load is over: then its address may have a later engine.
    """
    with transaction.atomic():
        rows = _locked(NodeModel.engines.filter(node_id=node_id, address=address))
        new = next((row for row in rows if row.pk == but and row.phase == Phase.STARTING), None)
        gone = [row for row in rows if new is not None and _is_former(row, new)]
        end_rows(gone)
    return [str(row) for row in gone]


def _is_former(row: NodeModel, new: NodeModel) -> bool:
    """Return True if the row's engine was started before the new one."""
    return row.started_at is None or (new.started_at is not None and row.started_at < new.started_at)


def confirm_end(engine_id: UUID, *, stop_sent: datetime | None = None) -> bool:
    """End an engine whose worker has confirmed the stop; False when the row was gone already.

    Loads that took a slot on its node without the memory have been waiting for what it gives back.
    `stop_sent`: when the stop was sent that ended the engine; None if it may have ended before.
    """
    with committed("unload.gone"):
        mine = NodeModel.engines.filter(pk=engine_id)
        short = Q(
            state__in=BEING_LOADED, vram_on_node=False, vram_needed__gt=0, node_id__in=mine.values("node_id")
        )
        stopping = Q(pk=engine_id, phase__in=(Phase.STOPPING, Phase.DEPARTED))
        locked = {row.pk: row for row in _locked(NodeModel.engines.filter(short | stopping))}
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
    """End these locked rows, whose engines do not run any more. Needs a transaction.

    Who waits for the nodes hears of it: a slot there is free.
    """
    end_rows(rows)
    if rows:
        events.notify(events.NODES, *sorted({str(row.node_id) for row in rows}))


def end_rows(rows: Sequence[NodeModel]) -> None:
    """Delete these locked rows and announce those that were replicas. Needs a transaction."""
    present = [row for row in rows if row.phase != Phase.DEPARTED]
    _delete(rows, [RemovedReplica(row.model_name, row.node_id, row.replica_index) for row in present])


# Django deletes a hundred rows at a time.
_DELETE = """
    WITH uses AS (DELETE FROM replica_uses WHERE replica_id = ANY(%(ids)s))
    DELETE FROM node_models WHERE id = ANY(%(ids)s)
"""


def _release(rows: Sequence[NodeModel]) -> None:
    """R2.43, "Port:": after commit, as nodes are locked before replicas. A reading makes up for a miss.

    Replicas too: a node that never reports free memory has no reading that clears their reservations.
    """
    reserved_memory.release((row.node_id, row.vram_needed, row.created_at) for row in rows)


def _locked(rows: NodeModelQuerySet) -> list[NodeModel]:
    return list(rows.order_by("id").select_for_update(of=("self",)))


def _delete(rows: Sequence[NodeModel], removed: Iterable[RemovedReplica]) -> None:
    """Delete the rows, tell other processes of the removed replicas, and call the hooks after commit."""
    if rows:
        with connection.cursor() as cursor:
            cursor.execute(_DELETE, {"ids": [row.pk for row in rows]})
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
    """Add the memory of an engine that has ended to the readings that these locked loads started from.

    Later readings show that much more free memory; without the correction it would hide the memory of the
    loads until they have ended. Two kinds of loads stay unchanged: those whose reading is older than the
    engine's allocation, and those whose reading may be newer than its end. The engine ran until its stop was
    sent; nothing changes if that time is unknown.
    """
    if gone.loaded_at is None or stop_sent is None:
        return
    until = stop_sent - reserved_memory.CLOCKS_DIFFER
    freed = {gpu["index"]: gpu["bytes"] for gpu in gone.gpus}
    affected_loads = [row for row in loads if row.vram_seen_at and gone.loaded_at < row.vram_seen_at < until]
    for row in affected_loads:
        row.vram_seen += gone.vram_needed
        row.gpus = [gpu | {"seen": gpu["seen"] + freed.get(gpu["index"], 0)} for gpu in row.gpus]
    NodeModel.engines.bulk_update(affected_loads, ["vram_seen", "gpus"])
