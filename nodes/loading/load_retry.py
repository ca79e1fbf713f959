"""Outcome of a load after an attempt without a replica: a retry on another node, or the end."""

from typing import Protocol

from localai_cluster.kit import clock, errors
from nodes.loading import load_placement
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
from nodes.placement.node_backoff import NodeBackoffs, add_failure, into_payload
from nodes.replicas.slots import Slot
from operations.executor.work import Postpone, retry_delay
from operations.models import Operation


class FailedAttempt(Protocol):
    """An attempt: its slot, and the nodes that failed its load before."""

    @property
    def slot(self) -> Slot:
        """The slot of the attempt."""

    @property
    def backoffs(self) -> NodeBackoffs:
        """The nodes in back-off before this attempt."""


def retry_after_loss(tried: FailedAttempt, operation: Operation, gone: errors.ClusterError) -> Exception:
    """Return the exception after a lost worker or engine: a retry on another node, or the end."""
    deaths = operation.payload.get("engine_deaths", 0) + (not isinstance(gone, WorkerGone))
    setbacks = add_failure(tried.backoffs, tried.slot.node_id, clock.now())
    payload = into_payload(operation.payload, setbacks) | {"engine_deaths": deaths}
    if isinstance(gone, WorkerGone):
        # The node is in back-off, the load is not: it takes another node at once, or waits with a reason.
        return load_placement.retry_or_end(
            operation, f"{gone.message}; trying another node", seconds=0, payload=payload
        )
    if is_last(Cause.ENGINE_DIED, deaths):
        return LoadFailed(f"the engine of {operation.element} died while loading: {gone.message}")
    pause = retry_delay(operation.attempts)
    return load_placement.retry_or_end(operation, gone.message, seconds=pause, payload=payload, waiting=False)


def retry_after_refusal(tried: FailedAttempt, operation: Operation, refusal: NodeRefused) -> Exception:
    """Return the exception after a node's refusal: a retry on the next node, or the end with all reasons."""
    slot = tried.slot
    setbacks = add_failure(tried.backoffs, slot.node_id, clock.now())
    payload = into_payload(operation.payload, setbacks)
    payload = with_refusal(payload, NodeReason(slot.node_id, slot.node_name, refusal.message))
    if is_last(Cause.NODE_REFUSED, len(refusals(payload))):
        return refused_by_all(payload)
    reason = f"{slot.node_name}: {refusal.message}; trying another node"
    return Postpone(reason, seconds=0, waiting=True, payload=payload)
