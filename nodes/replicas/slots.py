"""The rows of a load: the slot it takes, by eviction if it must, and how a slot becomes a replica.

A row in `loading` belongs to the attempt whose mark it carries. Publishing and dropping name that mark, so an
attempt that was overtaken changes nothing (I3).
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef, QuerySet

from localai_cluster.commits import committed
from nodes.models import BEING_LOADED, BackendNode, EngineStart, ModelLoadInfo, NodeModel, ReplicaState
from nodes.placement.choose import NOTHING, Candidate, Need, Reason, lowest_free
from nodes.placement.evict import Eviction
from nodes.replicas import eviction, leaving, reasons, vram
from nodes.replicas.reasons import Decided
from nodes.replicas.vram import GpuShare


@dataclass(frozen=True)
class Slot:
    """A reserved place for one replica."""

    id: UUID
    node_id: UUID
    node_name: str
    replica_index: int
    gpus: tuple[GpuShare, ...] = ()
    """The only GPUs that its engine may see; none: all of them."""


@dataclass(frozen=True)
class NoSlot:
    """The node has no place for the replica any more, and why."""

    reason: str


def reserve(
    view: Candidate,
    model_name: str,
    *,
    mark: str,
    backend: str,
    now: datetime,
    need: Need = NOTHING,
    room: Eviction | None = None,
    why: Decided | None = None,
) -> Slot | NoSlot:
    """Takes the lowest free slot of the node for the model (R1.63, R2.44) and the memory that the load needs.

    As the rows are now; those in every state keep their slot, also in `unloading` (R1.67). With `room` its
    victims leave the picks, and memory that leaving replicas will give back counts as free: the slot must not
    be used before they have gone. `why` is kept with the slot or not at all.
    """
    with committed("load.reserve"):
        # Under the node's lock: a drain either sees this slot or keeps it from being taken, and so does
        # every other load that takes a slot of this node.
        healthy = BackendNode.objects.filter(pk=view.id, status="healthy")
        node = healthy.select_for_update(no_key=True).first()
        if node is None:
            return NoSlot("gone or not healthy any more")
        if node.vram_read_at is not None:
            # A reading may have come since the caller's look at the clock; the reservation is newer than it.
            now = max(now, node.vram_read_at + timedelta(microseconds=1))
        rows = NodeModel.objects.of(model_name).filter(node_id=view.id)
        index = lowest_free(set(rows.values_list("replica_index", flat=True)), node.max_replicas_per_model)
        if index is None:
            return NoSlot(Reason.FULL)
        memory = _memory(node, need, model_name, room, now)
        if isinstance(memory, NoSlot):
            return memory
        row = NodeModel.objects.create(
            node_id=view.id,
            model_name=model_name,
            replica_index=index,
            state="loading",
            loading_by=mark,
            backend_type=backend,
            last_used=now,
            created_at=now,
            updated_at=now,
            **memory.columns,
        )
        if why is not None:
            reasons.record(why.at_index(index), now=now, victims=room.victims if room is not None else ())
    return Slot(row.id, view.id, view.name, index, memory.gpus)


def _memory(
    node: BackendNode, need: Need, model_name: str, room: Eviction | None, now: datetime
) -> vram.Taken | NoSlot:
    """The memory of the locked node that the load takes; the victims of `room` have left the picks then.

    Under the node's lock no other load counts on the same bytes: each reserves what it takes.
    """
    soon = []
    if room is not None:
        if not eviction.still_victims(model_name, room.victims, now=now):
            return NoSlot("what should make room there is in use again or kept by its rule")
        soon = eviction.about_to_stop(node.pk, now=now)
    if room is not None and room.victims:
        if vram.fits(node, need, soon=soon):
            return NoSlot("another load has made room there meanwhile")
        soon = [*soon, *room.victims]
    memory = vram.take(node, need, now=now, soon=soon) if need.vram > 0 else vram.Taken({})
    if memory is None:
        return NoSlot(Reason.GPUS if node.gpus else Reason.MEMORY)
    if room is not None:
        eviction.take_out(room.victims, now=now)
    return memory


def still_reserved(slot: Slot, *, mark: str) -> bool:
    """Whether the slot is this attempt's; it stays so until the transaction ends."""
    mine = NodeModel.objects.filter(pk=slot.id, loading_by=mark, state="loading")
    return mine.select_for_update(no_key=True, of=("self",)).first() is not None


def begin_staging(slot: Slot, *, mark: str, running: QuerySet[Any]) -> bool | None:
    """The attempt brings the model's files to its node now, alone of all loads of the model there (R2.26).

    False while another of the attempts in `running`, by its `mark`, does that; None when the slot is no
    longer this attempt's.
    """
    with committed("load.staging"):
        # As for a slot: of two that begin at once one sees the other.
        BackendNode.objects.filter(pk=slot.node_id).select_for_update(no_key=True).first()
        mine = NodeModel.objects.filter(pk=slot.id, loading_by=mark, state__in=BEING_LOADED)
        row = mine.select_for_update(no_key=True, of=("self",)).first()
        if row is None:
            return None
        beside = NodeModel.objects.of(row.model_name).filter(node_id=slot.node_id, state="staging")
        if beside.exclude(pk=slot.id).filter(Exists(running.filter(mark=OuterRef("loading_by")))).exists():
            return False
        row.state = ReplicaState.STAGING
        row.save(update_fields=["state"])
    return True


def end_staging(slot: Slot, *, mark: str) -> bool:
    """The files are there; False when the slot is no longer this attempt's."""
    with committed("load.staged"):
        mine = NodeModel.objects.filter(pk=slot.id, loading_by=mark, state="staging")
        return bool(mine.update(state="loading"))


def publish(
    slot: Slot,
    *,
    mark: str,
    address: str,
    backend: str,
    options: dict[str, Any],
    revision: str,
    now: datetime,
    told: str = "",
    replaces: UUID | None = None,
) -> bool:
    """Makes the slot a replica that receives traffic; False when the slot is no longer this attempt's.

    `told` is the fingerprint of the options that the engine got, which the node may have changed (R2.80).
    The replica that it replaces leaves the picks with it: there is no moment with neither or with both.
    """
    with committed("load.publish"):
        former = _locked_beside(slot, replaces)
        published = NodeModel.objects.filter(pk=slot.id, loading_by=mark, state="loading").update(
            state="loaded",
            loading_by="",
            address=address,
            model_options=options,
            config_revision=revision,
            effective_options_hash=told,
            in_flight=0,
            last_used=now,
            updated_at=now,
            loaded_at=now,
        )
        if published:
            # From here on the replica accounts for the engine.
            EngineStart.objects.filter(mark=mark).delete()
            model_name = NodeModel.objects.values_list("model_name", flat=True).get(pk=slot.id)
            ModelLoadInfo.objects.update_or_create(
                model_name=model_name,
                defaults={"backend_type": backend, "model_options": options, "updated_at": now},
            )
            if former is not None:
                leaving.replace([former], now=now)
    return bool(published)


def _locked_beside(slot: Slot, replaced: UUID | None) -> UUID | None:
    """The replica to be replaced if it still serves, locked in order with the slot's row."""
    if replaced is None:
        return None
    rows = NodeModel.objects.filter(pk__in=[slot.id, replaced]).order_by("id").select_for_update(of=("self",))
    states = dict(rows.values_list("pk", "state"))
    return replaced if states.get(replaced) == "loaded" else None
