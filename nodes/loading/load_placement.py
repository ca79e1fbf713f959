"""Placing a load: the best node whose worker answers, or what the load waits for.

The choice itself is pure (`nodes/placement`). This module reads the rows, contacts workers and reserves the
slot. After each failure it chooses again, so the next node is tried at once.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from localai_cluster.kit import clock
from localai_cluster.messaging.bus import Bus, NotConnected
from localai_cluster.messaging.messages import ListReply
from nodes.backends.failed_installs import recent_refusals
from nodes.decisions import decision_log, fleet_cache, fleet_queries, snapshot_log
from nodes.decisions.decision_log import DecisionRecord
from nodes.decisions.load_snapshots import encode_load
from nodes.decisions.snapshot_log import Sections
from nodes.definitions.files import Definition
from nodes.loading import attempts, needs
from nodes.loading.failures import Cause, refusals, refused_by_all
from nodes.loading.free_memory import PendingEviction, find_eviction, pending_eviction
from nodes.loading.load_request import LACKS_ROOM, LoadRequest, request_of
from nodes.loading.node_contact import Contacted, contact_best
from nodes.placement.choose import Candidate, Decision, Need, lacks_disk
from nodes.placement.evict import Eviction
from nodes.placement.explain import DecisionOutcome, Explanation, FleetView
from nodes.placement.load_decision import LoadQuestion, decide_load
from nodes.placement.node_backoff import (
    NodeBackoffs,
    add_failure,
    backed_off_nodes,
    from_payload,
    into_payload,
    seconds_until_retry,
)
from nodes.replicas import eviction, slots
from nodes.replicas.lifecycle import AttemptId
from nodes.replicas.slots import NoSlot, Slot
from operations.executor.work import Abandoned, Postpone, Work, in_thread
from operations.models import Operation

log = logging.getLogger(__name__)

_LOOK_FOR_NODE = 5.0
_LOOK_FOR_BUS = 1.0
_NO_BUS = "this controller is not connected to the message bus"


@dataclass(frozen=True)
class LoadNeeds:
    """A model, what it needs of its node, and the models that it should have no node in common with."""

    definition: Definition
    need: Need
    conflicts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Placement:
    """A reserved slot, the reason for it, and the nodes that failed this load so far or did not answer."""

    slot: Slot
    backoffs: NodeBackoffs
    why: str
    room: PendingEviction | None = None
    """The replicas that must stop on the node first; None if there are none."""
    listed: ListReply | None = None
    """The node's backends, as its worker has just listed them; None if they must be listed again."""


async def reserve_slot(bus: Bus, work: Work, wanted: LoadNeeds, *, attempt: AttemptId) -> Placement:
    """Reserve a slot on the best node whose worker answers.

    Raises Postpone, LoadFailed or Abandoned if there is none.
    """
    request = request_of(work.operation)
    setbacks = from_payload(work.operation.payload)
    refusing_nodes = frozenset(refusal.node_id for refusal in refusals(work.operation.payload))
    excluded_nodes = backed_off_nodes(setbacks, clock.now()) | refusing_nodes
    listings = dict[UUID, ListReply | None]()
    while True:
        question, decision = await in_thread(
            decide, wanted, request, setbacks, excluded_nodes, refusing_nodes
        )
        victims = await _choose_victims(question, decision, wanted)
        explanation = decide_load(question, decision, victims)
        if explanation.node is None:
            lacks_room = await in_thread(_lacks_room, request, question, decision)
            raise await _no_node(work, question, victims, explanation, lacks_room)
        ranked_nodes = decision.ranked or [explanation.node]
        if explanation.node.id not in listings:
            answer = await _contact(bus, work, [node for node in ranked_nodes if node.id not in listings])
            for node_id in answer.silent:
                setbacks = add_failure(setbacks, node_id, clock.now())
            excluded_nodes |= answer.silent
            if answer.node is not None:
                listings[answer.node.id] = answer.listed
            continue
        slot = await in_thread(_reserve, work.id, wanted, question, victims, explanation, attempt)
        if isinstance(slot, Slot):
            _warn(explanation.node, wanted)
            room = pending_eviction(victims)
            # An eviction takes time, after which the listing is out of date.
            listed = listings[explanation.node.id] if room is None else None
            return Placement(slot, setbacks, explanation.sentence, room, listed)
        # The next snapshot shows the reason too, so this node is refused then.
        log.info("no place for %s on %s: %s", wanted.definition.name, explanation.node.name, slot.reason)


def decide(
    wanted: LoadNeeds,
    request: LoadRequest,
    setbacks: NodeBackoffs,
    excluded_nodes: Set[UUID],
    refusing_nodes: Set[UUID],
) -> tuple[LoadQuestion, Decision]:
    """Return the question for a replica, from the current rows, and the decision on the best node.

    A node that has refused the backend recently ranks last, like a node that has failed the load.
    """
    name = wanted.definition.name
    setbacks = {**recent_refusals(wanted.definition.backend, now=clock.now()), **setbacks}
    selector = fleet_queries.selectors_of([name])[name]
    view, decision = fleet_cache.shared_cache().decide(
        name,
        FleetView((), wanted.need, selector, setbacks, frozenset(excluded_nodes), request.is_restricted),
        only=request.allowed_nodes,
        besides=request.excluded_nodes,
        conflicts=wanted.conflicts,
    )
    view, decision = fleet_queries.prefer_installed(view, decision, wanted.definition.backend)
    return LoadQuestion(view, frozenset(refusing_nodes), evicts=not request.is_scale_up), decision


async def _choose_victims(question: LoadQuestion, decision: Decision, wanted: LoadNeeds) -> Eviction | None:
    """Return an eviction that frees enough memory; reads rows only if memory is all that is lacking."""
    if not question.lacking(decision):
        return None
    return await in_thread(find_eviction, wanted.definition.name, question, decision)


def _reserve(
    load: UUID,
    wanted: LoadNeeds,
    question: LoadQuestion,
    victims: Eviction | None,
    explanation: Explanation,
    attempt: AttemptId,
) -> Slot | NoSlot:
    """Reserve the slot of the decision. Its snapshot is stored before, outside of the slot's transaction."""
    assert explanation.node is not None
    now, definition = clock.now(), wanted.definition
    snapshot_ref = snapshot_log.store_snapshot(
        encode_load(str(load), definition.name, question, victims), now=now
    )
    return slots.reserve(
        explanation.node,
        definition.name,
        attempt=attempt,
        backend=definition.backend,
        now=now,
        need=wanted.need,
        room=victims,
        why=DecisionRecord(definition.name, load, explanation, snapshot_ref),
    )


def _warn(node: Candidate, wanted: LoadNeeds) -> None:
    if lacks_disk(node, wanted.need):
        log.warning("%s may have too little disk space for %s", node.name, wanted.definition.name)
    if node.conflicts:
        log.warning("%s goes to %s, %s", wanted.definition.name, node.name, node.describe_conflicts())


async def _contact(bus: Bus, work: Work, nodes: Sequence[Candidate]) -> Contacted:
    try:
        return await contact_best(bus, nodes)
    except NotConnected:
        operation = await in_thread(Operation.objects.get, pk=work.id)
        outcome = retry_or_end(operation, _NO_BUS, seconds=_LOOK_FOR_BUS, waiting=False)
        raise await attempts.record_end(work, Cause.NO_BUS, outcome) from None


def _lacks_room(request: LoadRequest, question: LoadQuestion, decision: Decision) -> bool:
    """Return True if the replica that the load replaces holds the memory that the load needs."""
    former = eviction.serving(request.replaces) if request.replaces is not None else None
    return former is not None and question.fits_in_place_of(former, decision)


async def _no_node(
    work: Work,
    question: LoadQuestion,
    victims: Eviction | None,
    explanation: Explanation,
    lacks_room: bool,
) -> Exception:
    """Return the exception that ends this attempt, after recording the decision with the same sentence.

    The record comes first, so that no load waits without one. The payload of a load that waits carries its
    need, by which it is woken, and `lacks_room`, by which the replica pass terminates the replaced replica
    first.
    """
    setbacks = question.view.backoffs
    back_off = seconds_until_retry(setbacks, clock.now())
    seconds = _LOOK_FOR_NODE if back_off is None else min(back_off, _LOOK_FOR_NODE)
    # Refresh: requests that came while workers were contacted have moved the load's deadline.
    operation = await in_thread(Operation.objects.get, pk=work.id)
    if explanation.outcome == DecisionOutcome.REFUSED:
        outcome: Exception = refused_by_all(operation.payload)
    else:
        payload = needs.into_payload({**operation.payload, LACKS_ROOM: lacks_room}, question.view.need)
        payload = into_payload(payload, setbacks)
        outcome = retry_or_end(operation, explanation.sentence, seconds=seconds, payload=payload)
    is_abandoned = isinstance(outcome, Abandoned)
    if is_abandoned:
        explanation = replace(explanation, outcome=DecisionOutcome.REFUSED)
    fleet_sections = encode_load(str(work.id), operation.element, question, victims, over=is_abandoned)
    await in_thread(_record, operation, explanation, fleet_sections)
    return outcome


def _record(operation: Operation, explanation: Explanation, fleet_sections: Sections) -> None:
    now = clock.now()
    snapshot_ref = snapshot_log.store_snapshot(fleet_sections, now=now)
    decision_log.record(DecisionRecord(operation.element, operation.pk, explanation, snapshot_ref), now=now)


def retry_or_end(
    operation: Operation,
    reason: str,
    *,
    seconds: float,
    payload: Mapping[str, Any] | None = None,
    waiting: bool = True,
) -> Exception:
    """Return a retry in `seconds`, or the end of the load if its deadline is over."""
    return end_if_not_needed(operation, reason) or Postpone(
        reason, seconds=seconds, waiting=waiting, payload=payload
    )


def end_if_not_needed(operation: Operation, reason: str) -> Abandoned | None:
    """Return the end of a load that is no longer needed, with `reason`; None while it is needed."""
    if operation.needed_until is None or operation.needed_until > clock.now():
        return None
    request = request_of(operation)
    if request.is_scale_up:
        return Abandoned(f"not possible in time ({request.reason}); {reason}")
    return Abandoned(f"no request waits for it any more; {reason}")
