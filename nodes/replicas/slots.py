"""The rows of a load: how it reserves a slot, by eviction if necessary, and how a slot becomes a replica.

Each reservation is a row of its own, which belongs to the attempt that created it. Every change names slot
and attempt, so an attempt that lost its slot changes nothing (I3). An index is free again when the row is
deleted, after the engine is confirmed to have ended.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Case, F, Q, Value, When

from localai_cluster.kit.leases import Attempt, LeaseLost
from localai_cluster.kit.transactions import committed
from nodes.decisions import decision_log, fleet_cache
from nodes.decisions.decision_log import DecisionRecord
from nodes.models import (
    BEING_LOADED,
    LOADING_PHASES,
    BackendNode,
    ModelLoadInfo,
    NodeModel,
    OwnerKind,
    Phase,
    PhaseReason,
)
from nodes.models.replica import NodeModelQuerySet
from nodes.placement.choose import NO_NEED, Candidate, Need, lowest_free_index
from nodes.placement.choose import Reason as RefusalReason
from nodes.placement.evict import Eviction
from nodes.placement.sizes import QUOTA_HINT, describe_quota
from nodes.replicas import engines, eviction, reserved_memory, states, terminations
from nodes.replicas.reserved_memory import GpuShare
from nodes.replicas.states import ReplicaEvent
from operations.changes import events
from operations.ledger import attempts


class InsufficientDisk(Exception):
    """The model's files exceed the node's disk quota, or its free disk space; the text has the reason."""


@dataclass(frozen=True)
class Slot:
    """A reserved place for one replica on a node, with the GPUs that its engine may use."""

    id: UUID
    node_id: UUID
    node_name: str
    replica_index: int
    gpus: tuple[GpuShare, ...] = ()
    """The only GPUs that the engine may see; empty for all GPUs."""
    gpu_layers: int = 0
    """Number of layers on the GPU if smaller than in the definition; 0 = as in the definition."""
    tuned_options: Mapping[str, Any] | None = None
    """The options tuned to the node, if it has the memory that they need."""

    @property
    def options(self) -> dict[str, Any]:
        """Load options that differ from the definition's; stored in the row and not in a revision."""
        return {"NGPULayers": self.gpu_layers} if self.gpu_layers else {}


@dataclass(frozen=True)
class TunedLoad:
    """The need of a load with the options tuned to a node, and these options."""

    need: Need
    options: Mapping[str, Any]


@dataclass(frozen=True)
class NoSlot:
    """Why the node has no slot for the replica."""

    reason: str


def reserve(
    view: Candidate,
    model_name: str,
    *,
    attempt: Attempt,
    backend: str,
    now: datetime,
    need: Need = NO_NEED,
    room: Eviction | None = None,
    why: DecisionRecord | None = None,
    gpu_layers: int = 0,
    tuned: TunedLoad | None = None,
) -> Slot | NoSlot:
    """Take the lowest free slot of the node for the model (R1.63, R2.44) and the memory that the load needs.

    The function reads the current rows: an index is taken until its engine has ended, also in `unloading`
    (R1.67). `room` is an eviction: its victims terminate, and the memory that terminating replicas free
    counts as free. The slot must not be used before these replicas have ended. `why` is stored in the same
    transaction. The need of `tuned` replaces `need` if the node has the memory for it.
    """
    with committed("load.reserve"):
        # Under the node's lock: a drain either sees this slot or keeps it from being taken, and so does
        # every other load that takes a slot of this node.
        node = BackendNode.objects.select_for_update(no_key=True).filter(pk=view.id, status="healthy").first()
        if node is None:
            return NoSlot("gone or not healthy any more")
        # The reservation counts until the next reading, so it must be newer than the last one.
        now = max(now, node.vram_read_at + timedelta(microseconds=1)) if node.vram_read_at else now
        index = _index_with_disk(node, model_name, need)
        if isinstance(index, NoSlot):
            return index
        memory = _memory(node, need, tuned, model_name, room, now)
        if isinstance(memory, NoSlot):
            return memory
        columns = {"backend_type": backend, "files_needed": need.files, **memory.columns}
        row = _add_row(view.id, model_name, index, attempt, now, columns)
        if why is not None:
            # The slot in the snapshot may be another one.
            decided = replace(why, explanation=replace(why.explanation, replica_index=index))
            decision_log.record(decided, now=now, victims=room.victims if room else ())
    options = tuned.options if tuned is not None and memory.is_tuned else None
    return Slot(row.id, view.id, view.name, index, memory.gpus, gpu_layers, options)


def _add_row(
    node_id: UUID, model_name: str, index: int, attempt: Attempt, now: datetime, columns: Mapping[str, Any]
) -> NodeModel:
    """Add the row of the slot, which is the newest load of the node."""
    row = NodeModel.objects.create(
        node_id=node_id,
        model_name=model_name,
        replica_index=index,
        phase=Phase.RESERVED,
        **engines.owner_columns(OwnerKind.OPERATION, *attempt),
        deadline=now + states.LOAD_LIMIT,
        last_used=now,
        created_at=now,
        updated_at=now,
        **columns,
    )
    BackendNode.objects.filter(pk=node_id).update(newest_load=row.pk)
    return row


def _index_with_disk(node: BackendNode, model_name: str, need: Need) -> int | NoSlot:
    """Return the lowest free index if the node's disk has space for the model's files, or the refusal."""
    index = _free_index(node, model_name)
    if index is None:
        return NoSlot(RefusalReason.FULL)
    try:
        _check_disk(node, model_name, need.files, need.disk if need.disk_required else 0)
    except InsufficientDisk as lack:
        return NoSlot(str(lack))
    return index


def _check_disk(node: BackendNode, model_name: str, files: int, free_needed: int = 0) -> None:
    """Raise InsufficientDisk if the model's files exceed the quota, or `free_needed` bytes the free space.

    Other loads on the node have taken what they have yet to send. Needs the node's lock; one query.
    """
    quota = node.disk_quota_bytes if files else 0
    free_needed = free_needed if node.total_disk > 0 else 0
    if not quota and not free_needed:
        return
    read = fleet_cache.read_file_bytes([model_name], [node.pk])
    staged = read.staged_by_node(model_name).get(node.pk, 0)
    others = read.other_models_by_node(model_name, [node.pk]).get(node.pk, 0)
    free = max(node.available_disk - read.promised_by_node(model_name).get(node.pk, 0), 0)
    # As `lacks_disk` of the decision's snapshot: a refusal here shows there too.
    if free + staged < free_needed:
        raise InsufficientDisk(RefusalReason.DISK)
    if quota and files > staged and others + files > quota:
        raise InsufficientDisk(f"{describe_quota(others + staged, quota, files - staged)}; {QUOTA_HINT}")


def _free_index(node: BackendNode, model_name: str) -> int | None:
    rows = NodeModel.engines.of(model_name).filter(node=node)
    every = set(rows.values_list("replica_index", flat=True))
    used = set(rows.occupying().values_list("replica_index", flat=True))
    return lowest_free_index(used, node.max_replicas_per_model, every - used)


def _memory(
    node: BackendNode,
    need: Need,
    tuned: TunedLoad | None,
    model_name: str,
    room: Eviction | None,
    now: datetime,
) -> reserved_memory.MemoryReservation | NoSlot:
    """Reserve the load's memory on the locked node and, if it suffices, terminate the victims of `room`.

    Under the node's lock no other load counts on the same bytes: each reserves what it takes.
    """
    terminating = []
    if room is not None:
        if not eviction.lock_victims(model_name, room.victims, now=now):
            return NoSlot("what should make room there is in use again or kept by its rule")
        terminating = eviction.terminating_replicas(node.pk, now=now)
    if room is not None and room.victims:
        if reserved_memory.fits_after_stops(node, need, terminating=terminating):
            return NoSlot("another load has made room there meanwhile")
        terminating = [*terminating, *room.victims]
    tuned_need = tuned.need if tuned is not None else None
    memory = (
        reserved_memory.reserve_for_load(node, need, tuned_need, now=now, terminating=terminating)
        if need.vram > 0 or need.vram_share > 0
        else reserved_memory.reserve_unknown(node)
    )
    if memory is None:
        return NoSlot(RefusalReason.GPUS if node.gpus else RefusalReason.MEMORY)
    if room is not None:
        for are_busy in (False, True):
            ids = [victim.id for victim in room.victims if bool(victim.in_flight) == are_busy]
            if ids:
                terminations.evict(ids, now=now, are_busy=are_busy)
    return memory


def is_owned(slot: Slot, *, attempt: Attempt) -> bool:
    """Return True if the attempt still owns the slot.

    It loses the slot to a later attempt, or if the node departs.
    """
    return owned_rows(slot, attempt).exists()


def begin_staging(slot: Slot, *, attempt: Attempt, files: int) -> bool | None:
    """Begin to send `files` bytes of the model to the node, unless another load is sending its files (R2.26).

    Return False while another running attempt sends them, None if the attempt no longer owns the slot. Raise
    InsufficientDisk if the files do not fit into the node's disk quota.
    """
    with committed("load.staging"):
        # As for a slot: of two that begin at once one sees the other.
        node = BackendNode.objects.filter(pk=slot.node_id).select_for_update(no_key=True).first()
        mine = owned_rows(slot, attempt)
        row = mine.select_for_update(no_key=True, of=("self",)).first()
        if row is None or node is None:
            return None
        others = NodeModel.objects.of(row.model_name).filter(node_id=slot.node_id, phase=Phase.STAGING)
        if others.exclude(pk=slot.id).filter(engines.has_running_attempt()).exists():
            return False
        _check_disk(node, row.model_name, files)
        return bool(engines.apply_event(mine, ReplicaEvent.STAGING_BEGUN, files_needed=files)) or None


def end_staging(slot: Slot, *, attempt: Attempt) -> bool:
    """Record that all files are on the node; return False if the attempt no longer owns the slot."""
    with committed("load.staged"):
        # The record of its files counts from now on.
        return bool(engines.apply_event(owned_rows(slot, attempt), ReplicaEvent.STAGED, files_needed=0))


def start(slot: Slot, *, attempt: Attempt, now: datetime) -> bool:
    """Record that the engine is about to be started.

    Return False if the attempt no longer owns the slot; it must not start an engine then.
    """
    with committed("load.start"):
        return bool(engines.apply_event(owned_rows(slot, attempt), ReplicaEvent.START_SENT, started_at=now))


def record_answer(slot: Slot, address: str = "") -> None:
    """Store the address of the engine from the worker's answer to the start; empty if no engine runs.

    The row is updated in every phase, so that a stop after a late answer names the right address.
    """
    rows = NodeModel.engines.filter(pk=slot.id, started_at__isnull=False).exclude(phase=Phase.SERVING)
    kept = Case(When(address="", then=Value(address)), default=F("address"))
    with committed("load.answer"):
        rows.update(start_answered=True, address=kept)


def publish(
    slot: Slot,
    *,
    attempt: Attempt,
    address: str,
    backend: str,
    options: dict[str, Any],
    revision: str,
    now: datetime,
    options_hash: str = "",
    replaces: UUID | None = None,
    remembered: Mapping[str, Any] = types.MappingProxyType({}),
    result: Mapping[str, Any] = types.MappingProxyType({}),
) -> bool:
    """Make the slot a replica that gets requests; return False if the attempt no longer owns the slot.

    `options_hash`: fingerprint of the options that the engine got, which the node may have changed (R2.80).
    `remembered`: further columns of the model's load record. The replica `replaces` terminates in the same
    transaction, so exactly one of both serves at any time. The operation stores `result` in this transaction
    too: a repeated attempt has nothing to load.
    """
    with committed("load.publish"):
        try:
            operation = attempts.lock_owned(*attempt)
        except LeaseLost:
            return False
        former = _lock_replaced_replica(slot, replaces)
        published = engines.apply_event(
            owned_rows(slot, attempt),
            ReplicaEvent.PUBLISHED,
            **engines.SERVING_COLUMNS,
            start_answered=True,
            address=address,
            model_options=options | slot.options,
            config_revision=revision,
            effective_options_hash=options_hash,
            in_flight=0,
            last_used=now,
            updated_at=now,
            loaded_at=now,
        )
        if published:
            operation.result = dict(result)
            operation.save(update_fields=["result"])
            _record_load(slot, backend_type=backend, model_options=options, updated_at=now, **remembered)
            if former is not None:
                terminations.replace([former], now=now)
    return bool(published)


def _record_load(slot: Slot, **columns: Any) -> None:
    model_name = NodeModel.objects.values_list("model_name", flat=True).get(pk=slot.id)
    ModelLoadInfo.objects.bulk_create(
        [ModelLoadInfo(model_name=model_name, **columns)],
        update_conflicts=True,
        unique_fields=["model_name"],
        update_fields=list(columns),
    )


def owned_rows(slot: Slot, attempt: Attempt) -> NodeModelQuerySet:
    """Return the row of the slot if the attempt owns it."""
    owner = engines.owner_columns(OwnerKind.OPERATION, *attempt)
    return NodeModel.objects.filter(pk=slot.id, phase__in=LOADING_PHASES, **owner)


def _lock_replaced_replica(slot: Slot, replaced: UUID | None) -> UUID | None:
    """Lock the replica that is replaced and the slot's row, in order; return its id if it still serves."""
    if replaced is None:
        return None
    rows = NodeModel.objects.filter(pk__in=[slot.id, replaced]).order_by("id").select_for_update(of=("self",))
    phases = dict(rows.values_list("pk", "phase"))
    return replaced if phases.get(replaced) == Phase.SERVING else None


def end_attempt(slot: Slot, *, attempt: Attempt, now: datetime) -> None:
    """End an attempt that has published no replica, and free its slot.

    A controller stops the engine that the attempt may have started.
    """
    with committed("load.ended"):
        _end_loads(owned_rows(slot, attempt), now)


def end_abandoned_loads(model_name: str | None = None, *, now: datetime) -> list[NodeModel]:
    """End loads whose attempt no longer runs or is too old; return their rows.

    Without `model_name` the loads of all models. A killed attempt leaves its row, and so does an attempt
    whose reservation was committed after its operation was cancelled. The controllers stop the engines that
    may exist.
    """
    rows = NodeModel.objects.all() if model_name is None else NodeModel.objects.of(model_name)
    abandoned = rows.filter(Q(deadline__lte=now) | ~Q(engines.has_running_attempt()))
    if not abandoned.filter(phase__in=LOADING_PHASES).exists():
        return []
    with committed("load.abandoned"):
        return _end_loads(abandoned.filter(state__in=BEING_LOADED), now)


def _end_loads(loads: NodeModelQuerySet, now: datetime) -> list[NodeModel]:
    """Free the slots of these loads, and schedule stops of engines that may exist. Needs a transaction."""
    rows = list(loads.order_by("id").select_for_update(of=("self",)).select_related("node"))
    started = [row for row in rows if row.phase not in states.WITHOUT_ENGINE]
    engines.apply_event(
        NodeModel.objects.filter(pk__in=[row.pk for row in started]),
        ReplicaEvent.LOAD_ENDED,
        **engines.CONTROLLER_OWNER_COLUMNS,
        **engines.stop_columns(now),
        reason=PhaseReason.LOAD_FAILED,
    )
    for row in started:
        row.phase, row.reason = Phase.STOPPING, PhaseReason.LOAD_FAILED
    engines.end_rows([row for row in rows if row not in started])
    if started:
        events.notify(events.NODES, *sorted({str(row.node_id) for row in started}))
    return rows
