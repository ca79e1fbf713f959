"""Placing a load: the best node whose worker answers, or what the load waits for.

The choice itself is pure (`nodes/placement`). Here the rows are read, workers are asked, the slot is taken,
and the choice is made again whenever one of these says no: the next node is tried at once.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from localai_cluster import clock
from localai_cluster.messaging.bus import Bus, NotConnected
from localai_cluster.messaging.messages import ListReply
from nodes.backends.refusals import recent_refusals
from nodes.definitions.files import Definition
from nodes.loading import attempts, needs
from nodes.loading.asking import Answer, best_that_answers
from nodes.loading.failures import Cause, refusals, refused_by_all
from nodes.loading.room import Room, room_of, what_makes_room
from nodes.loading.wish import LACKS_ROOM, LoadWish, wish_of
from nodes.placement.choose import Candidate, Decision, Need, lacks_disk
from nodes.placement.coded import sections
from nodes.placement.evict import Eviction
from nodes.placement.explain import Ending, Explanation, FleetView
from nodes.placement.sections import Sections
from nodes.placement.setbacks import (
    Setbacks,
    after_failure,
    from_payload,
    into_payload,
    next_end,
    resting,
)
from nodes.placement.settle import LoadQuestion, settle
from nodes.replicas import eviction, fleet_log, installed, mirror, reasons, slots, snapshot
from nodes.replicas.lifecycle import AttemptId
from nodes.replicas.reasons import Decided
from nodes.replicas.slots import NoSlot, Slot
from operations.executor.work import Abandoned, Postpone, Work, in_thread
from operations.models import Operation

log = logging.getLogger(__name__)

_LOOK_FOR_NODE = 5.0
_LOOK_FOR_BUS = 1.0
_NO_BUS = "this controller is not connected to the message bus"


@dataclass(frozen=True)
class Wanted:
    """A model, what it needs of its node, and the models that it should have no node in common with."""

    definition: Definition
    need: Need
    conflicts: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Place:
    """The slot taken, why there, and the nodes that failed this load so far or did not answer."""

    slot: Slot
    setbacks: Setbacks
    why: str
    room: Room | None = None
    """What has to leave the node first."""
    listed: ListReply | None = None
    """The node's backends, as its worker has just listed them; None if they have to be listed again."""


async def place(bus: Bus, work: Work, what: Wanted, *, attempt: AttemptId) -> Place:
    """Takes a slot on the best node whose worker answers; raises what follows when there is none."""
    wish = wish_of(work.operation)
    setbacks = from_payload(work.operation.payload)
    refusing = frozenset(one.node_id for one in refusals(work.operation.payload))
    rest, answered = resting(setbacks, clock.now()) | refusing, dict[UUID, ListReply | None]()
    while True:
        question, decision = await in_thread(asked, what, wish, setbacks, rest, refusing)
        room = await _room(question, decision, what)
        told = settle(question, decision, room)
        if told.node is None:
            lacks = await in_thread(_lacks_room, wish, question, decision)
            raise await _no_node(work, question, room, told, lacks)
        ranked = decision.ranked or [told.node]
        if told.node.id not in answered:
            answer = await _ask(bus, work, [node for node in ranked if node.id not in answered])
            for silent in answer.silent:
                setbacks = after_failure(setbacks, silent, clock.now())
            rest |= answer.silent
            if answer.node is not None:
                answered[answer.node.id] = answer.listed
            continue
        slot = await in_thread(_take, work.id, what, question, room, told, attempt)
        if isinstance(slot, Slot):
            _warn(told.node, what)
            leaves = room_of(room)
            # What has to leave first takes its time.
            listed = answered[told.node.id] if leaves is None else None
            return Place(slot, setbacks, told.sentence, leaves, listed)
        # The next look at the rows sees the same: this node is refused then.
        log.info("no place for %s on %s: %s", what.definition.name, told.node.name, slot.reason)


def asked(
    what: Wanted, wish: LoadWish, setbacks: Setbacks, rest: Set[UUID], refusing: Set[UUID]
) -> tuple[LoadQuestion, Decision]:
    """Return the question for a replica, as the rows are now, and the decision which node is the best.

    A node that has refused the backend of late counts as one that has failed the load: it comes last.
    """
    name = what.definition.name
    setbacks = {**recent_refusals(what.definition.backend, now=clock.now()), **setbacks}
    selector = snapshot.selectors_of([name])[name]
    view, decision = mirror.shared().decided(
        name,
        FleetView((), what.need, selector, setbacks, frozenset(rest), wish.restricted),
        only=wish.only,
        besides=wish.besides,
        conflicts=what.conflicts,
    )
    view, decision = installed.prefer(view, decision, what.definition.backend)
    return LoadQuestion(view, frozenset(refusing), evicts=not wish.another), decision


async def _room(question: LoadQuestion, decision: Decision, what: Wanted) -> Eviction | None:
    """What can make room; asks the rows only if nothing else is lacking."""
    if not question.lacking(decision):
        return None
    return await in_thread(what_makes_room, what.definition.name, question, decision)


def _take(
    load: UUID,
    what: Wanted,
    question: LoadQuestion,
    room: Eviction | None,
    told: Explanation,
    attempt: AttemptId,
) -> Slot | NoSlot:
    """The slot that was decided for. What was seen is kept first: it is no part of the slot's transaction."""
    assert told.node is not None
    now, definition = clock.now(), what.definition
    seen = fleet_log.remember(sections(str(load), definition.name, question, room), now=now)
    return slots.reserve(
        told.node,
        definition.name,
        attempt=attempt,
        backend=definition.backend,
        now=now,
        need=what.need,
        room=room,
        why=Decided(definition.name, load, told, seen),
    )


def _warn(node: Candidate, what: Wanted) -> None:
    if lacks_disk(node, what.need):
        log.warning("%s may have too little disk space for %s", node.name, what.definition.name)
    if node.conflicts:
        log.warning("%s goes to %s, %s", what.definition.name, node.name, node.why_not_alone())


async def _ask(bus: Bus, work: Work, nodes: Sequence[Candidate]) -> Answer:
    try:
        return await best_that_answers(bus, nodes)
    except NotConnected:
        operation = await in_thread(Operation.objects.get, pk=work.id)
        follows = later(operation, _NO_BUS, seconds=_LOOK_FOR_BUS, waiting=False)
        raise await attempts.kept(work, Cause.NO_BUS, follows) from None


def _lacks_room(wish: LoadWish, question: LoadQuestion, decision: Decision) -> bool:
    """Whether the replica that the load replaces takes the room that it needs."""
    former = eviction.serving(wish.replaces) if wish.replaces is not None else None
    return former is not None and question.fits_instead_of(former, decision)


async def _no_node(
    work: Work, question: LoadQuestion, room: Eviction | None, told: Explanation, lacks_room: bool
) -> Exception:
    """What follows, said and kept in the same words; kept first, so that no wait is without its record.

    By its need, in the payload, the load is woken; of a replica that it replaces and that takes its room the
    replica pass is told there to have it go first.
    """
    setbacks = question.view.setbacks
    rested = next_end(setbacks, clock.now())
    seconds = _LOOK_FOR_NODE if rested is None else min(rested, _LOOK_FOR_NODE)
    # Read again: requests that came while nodes were asked have moved the time at which it gives up.
    operation = await in_thread(Operation.objects.get, pk=work.id)
    if told.outcome == Ending.REFUSED:
        follows: Exception = refused_by_all(operation.payload)
    else:
        known = needs.into_payload({**operation.payload, LACKS_ROOM: lacks_room}, question.view.need)
        payload = into_payload(known, setbacks)
        follows = later(operation, told.sentence, seconds=seconds, payload=payload)
    over = isinstance(follows, Abandoned)
    told = replace(told, outcome=Ending.REFUSED) if over else told
    seen = sections(str(work.id), operation.element, question, room, over=over)
    await in_thread(_keep, operation, told, seen)
    return follows


def _keep(operation: Operation, told: Explanation, seen: Sections) -> None:
    now = clock.now()
    kept = fleet_log.remember(seen, now=now)
    reasons.record(Decided(operation.element, operation.pk, told, kept), now=now)


def later(
    operation: Operation,
    reason: str,
    *,
    seconds: float,
    payload: Mapping[str, Any] | None = None,
    waiting: bool = True,
) -> Exception:
    """Another look in `seconds`, or the end when its time is over."""
    return over(operation, reason) or Postpone(reason, seconds=seconds, waiting=waiting, payload=payload)


def over(operation: Operation, reason: str) -> Abandoned | None:
    """The end of a load that is not needed any more, and what it waited for; None while it is needed."""
    if operation.needed_until is None or operation.needed_until > clock.now():
        return None
    wish = wish_of(operation)
    if wish.another:
        return Abandoned(f"not possible in time ({wish.reason}); {reason}")
    return Abandoned(f"no request waits for it any more; {reason}")
