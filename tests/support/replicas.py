"""Columns of replica rows for tests: a phase with a matching owner and deadline, by the reference's state."""

from datetime import timedelta
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from localai_cluster.kit import clock
from localai_cluster.kit.leases import Attempt
from nodes.models import LOADING_PHASES, BackendNode, NodeModel, OwnerKind, Phase, PhaseReason
from nodes.replicas import slots
from nodes.replicas.engines import owner_columns
from nodes.replicas.slots import Slot
from nodes.replicas.states import WITHOUT_ENGINE
from operations.models import Operation

_OF_STATE = {
    "loading": Phase.RESERVED,
    "staging": Phase.STAGING,
    "loaded": Phase.SERVING,
    "unloading": Phase.STOPPING,
}
_REASONS = {
    Phase.DRAINING: PhaseReason.UNLOAD,
    Phase.TERMINATING: PhaseReason.EVICTED,
    Phase.STOPPING: PhaseReason.UNLOAD,
    Phase.DEPARTED: PhaseReason.NODE_LEFT,
}
SOON = timedelta(hours=1)


def attempt(text: str) -> Attempt:
    """Return an attempt of a load from a short name or an operation with its fence: `m:1`."""
    name, _, fence = text.rpartition(":")
    try:
        operation = UUID(name)
    except ValueError:
        operation = uuid5(NAMESPACE_OID, name or text)
    return operation, int(fence) if fence.isdigit() else 0


def owner_of(row: NodeModel) -> Attempt:
    """Return the attempt that owns the row of a load."""
    assert row.owner_id is not None
    assert row.owner_fence is not None
    return row.owner_id, row.owner_fence


def columns(
    state: str = "loaded", *, owner: Attempt | None = None, phase: str = "", **fields: Any
) -> dict[str, Any]:
    """Return the columns of a row in this phase, by default a phase of this state.

    By default a load belongs to an attempt that does not run, and a stop is due in an hour.
    """
    now, phase = clock.now(), phase or _OF_STATE[state]
    life: dict[str, Any] = {"phase": phase, "address": "127.0.0.1:1"}
    if phase in LOADING_PHASES:
        load = owner_columns(OwnerKind.OPERATION, *(owner or attempt("nobody:1")))
        life |= {"address": "", **load, "deadline": now + SOON}
    elif phase != Phase.SERVING:
        life |= {
            "owner_kind": OwnerKind.CONTROLLERS,
            "deadline": now + SOON,
            "reason": _REASONS[Phase(phase)],
        }
    if phase in (Phase.STOPPING, Phase.DEPARTED):
        life |= {"next_stop_at": now + SOON}
    if phase in LOADING_PHASES and phase not in WITHOUT_ENGINE:
        life |= {"started_at": now}
    if phase in WITHOUT_ENGINE:
        fields.pop("address", None)
    return life | fields


def run(owner: Attempt) -> None:
    """Let a controller execute the attempt."""
    running = {
        "kind": "model_load",
        "key": str(owner[0]),
        "status": "processing",
        "fence": owner[1],
        "lease_owner": "test",
        "lease_until": clock.now() + SOON,
    }
    Operation.objects.update_or_create(pk=owner[0], defaults=running)


def publish(slot: Slot, owner: Attempt, *, address: str = "127.0.0.1:1", **fields: Any) -> bool:
    """Start the engine of a slot and publish it."""
    now = fields.pop("now", None) or clock.now()
    values: dict[str, Any] = {"backend": "b", "options": {}, "revision": "", **fields}
    run(owner)
    slots.start(slot, attempt=owner, now=now)
    return slots.publish(slot, attempt=owner, address=address, now=now, **values)


def forget_nodes() -> None:
    """Delete all nodes and their replicas."""
    NodeModel.engines.all().delete()
    BackendNode.objects.all().delete()


def stop_now() -> None:
    """Make every stop due immediately."""
    now = clock.now()
    NodeModel.engines.exclude(phase__in=[*LOADING_PHASES, Phase.SERVING]).update(
        deadline=now, claimed_until=None
    )
    NodeModel.engines.filter(phase__in=(Phase.STOPPING, Phase.DEPARTED)).update(next_stop_at=now)
