"""What follows when an attempt of a load ended without a replica: another one elsewhere, or the end."""

from typing import Protocol

from localai_cluster import clock, errors
from nodes.loading import placing
from nodes.loading.failures import (
    Cause,
    LoadFailed,
    NodeReason,
    NodeRefused,
    WorkerGone,
    is_last,
    refusals,
    refused_by_all,
    with_refusal,
)
from nodes.placement.setbacks import Setbacks, after_failure, into_payload
from nodes.replicas.slots import Slot
from operations.executor.work import Postpone, retry_delay
from operations.models import Operation


class Tried(Protocol):
    """An attempt: its place, and the nodes that failed its load before."""

    @property
    def slot(self) -> Slot:
        """Where it was."""

    @property
    def setbacks(self) -> Setbacks:
        """Before this attempt."""


def again(tried: Tried, operation: Operation, gone: errors.ClusterError) -> Exception:
    """What follows when worker or engine vanished: another attempt elsewhere, or the end."""
    deaths = operation.payload.get("engine_deaths", 0) + (not isinstance(gone, WorkerGone))
    setbacks = after_failure(tried.setbacks, tried.slot.node_id, clock.now())
    payload = into_payload(operation.payload, setbacks) | {"engine_deaths": deaths}
    if isinstance(gone, WorkerGone):
        # The node rests, the load does not: the next look takes another node, or says what it waits for.
        return placing.later(operation, f"{gone.message}; trying another node", seconds=0, payload=payload)
    if is_last(Cause.ENGINE_DIED, deaths):
        return LoadFailed(f"the engine of {operation.element} died while loading: {gone.message}")
    pause = retry_delay(operation.attempts)
    return placing.later(operation, gone.message, seconds=pause, payload=payload, waiting=False)


def elsewhere(tried: Tried, operation: Operation, refusal: NodeRefused) -> Exception:
    """What follows when a node could not load the model: the next node, or the end with what each said."""
    slot = tried.slot
    setbacks = after_failure(tried.setbacks, slot.node_id, clock.now())
    payload = into_payload(operation.payload, setbacks)
    payload = with_refusal(payload, NodeReason(slot.node_id, slot.node_name, refusal.message))
    if is_last(Cause.NODE_REFUSED, len(refusals(payload))):
        return refused_by_all(payload)
    said = f"{slot.node_name}: {refusal.message}; trying another node"
    return Postpone(said, seconds=0, waiting=True, payload=payload)
