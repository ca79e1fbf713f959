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
from nodes.definitions.files import Definition
from nodes.loading import needs
from nodes.loading.asking import Answer, best_that_answers
from nodes.loading.failures import refusals, refused_by_all
from nodes.loading.room import Room, room_of, what_makes_room
from nodes.loading.wish import LACKS_ROOM, LoadWish, wish_of
from nodes.placement.choose import Candidate, Decision, Need, Reason, free_index, lacks_disk
from nodes.placement.evict import Eviction
from nodes.placement.explain import Ending, Explanation, FleetView, explain
from nodes.placement.setbacks import (
    Setbacks,
    after_failure,
    from_payload,
    into_payload,
    next_end,
    resting,
)
from nodes.replicas import mirror, reasons, slots, snapshot
from nodes.replicas.reasons import Decided
from nodes.replicas.slots import Slot
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


async def place(bus: Bus, work: Work, what: Wanted, *, mark: str) -> Place:
    """Takes a slot on the best node whose worker answers; raises what follows when there is none."""
    wish, definition, need = wish_of(work.operation), what.definition, what.need
    setbacks = from_payload(work.operation.payload)
    rest, answered = resting(setbacks, clock.now()) | _refusing(work), set[UUID]()
    while True:
        seen, decision = await in_thread(_seen, what, wish, setbacks, rest)
        room, node, ranked = None, decision.node, decision.ranked
        if node is None:
            room = await _room(work, what, seen.nodes, decision, rest)
            if room is None or room.node is None:
                lacks = await in_thread(_lacks_room, wish, decision)
                known = needs.into_payload({LACKS_ROOM: True} if lacks else {}, need)
                raise await _no_node(work, _with_room(explain(seen, decision), room), setbacks, known)
            node, ranked = room.node, [room.node]
        if node.id not in answered:
            unasked = [node for node in ranked if node.id not in answered]
            answer = await _ask(bus, work, unasked)
            for silent in answer.silent:
                setbacks = after_failure(setbacks, silent, clock.now())
            rest |= answer.silent
            answered |= {answer.node.id} if answer.node is not None else set()
            continue
        told = _with_room(explain(seen, decision), room)
        slot = await in_thread(
            slots.reserve,
            node,
            definition.name,
            mark=mark,
            backend=definition.backend,
            now=clock.now(),
            need=need,
            room=room,
            why=Decided(definition.name, work.id, told),
        )
        if isinstance(slot, Slot):
            _warn(node, what)
            return Place(slot, setbacks, told.sentence, room_of(room))
        # The next look at the rows sees the same: this node is refused then.
        log.info("no place for %s on %s: %s", definition.name, node.name, slot.reason)


def _seen(what: Wanted, wish: LoadWish, setbacks: Setbacks, rest: Set[UUID]) -> tuple[FleetView, Decision]:
    """The fleet, and what placement makes of it."""
    name = what.definition.name
    selector = snapshot.selectors_of([name])[name]
    asked = FleetView((), what.need, selector, setbacks, rest, wish.restricted)
    return mirror.shared().decided(
        name, asked, only=wish.only, besides=wish.besides, conflicts=what.conflicts
    )


def _refusing(work: Work) -> frozenset[UUID]:
    """The nodes that have refused this load: each is tried once."""
    return frozenset(one.node_id for one in refusals(work.operation.payload))


async def _room(
    work: Work, what: Wanted, fleet: Sequence[Candidate], decision: Decision, rest: Set[UUID]
) -> Eviction | None:
    """What can make room; None if nothing should. Raises the end of a load that nodes have refused.

    For one more replica, which no request waits for, nothing is evicted.
    """
    refusing = _refusing(work)
    rests = (id for id, reason in decision.refused.items() if reason is Reason.SILENT)
    if refusing and all(id in refusing for id in rests):
        raise refused_by_all(work.operation.payload)
    if wish_of(work.operation).another:
        return None
    return await in_thread(what_makes_room, what.definition.name, fleet, decision, rest, what.need)


def _with_room(told: Explanation, room: Eviction | None) -> Explanation:
    """The explanation of a decision for no node, with what makes room or why nothing can."""
    if room is None or not room.why:
        return told
    if room.node is None:
        return replace(told, sentence=f"{told.sentence}; {room.why}")
    index = free_index(room.node) or 0
    sentence = f"{room.why}; {told.sentence}"
    return replace(told, outcome=Ending.PLACED, sentence=sentence, node=room.node, replica_index=index)


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
        raise later(operation, _NO_BUS, seconds=_LOOK_FOR_BUS, waiting=False) from None


def _lacks_room(wish: LoadWish, decision: Decision) -> bool:
    """Whether the replica that the load replaces takes the room that it needs."""
    return wish.replaces is not None and snapshot.lacks_room(wish.replaces, decision.refused)


async def _no_node(work: Work, told: Explanation, setbacks: Setbacks, known: Mapping[str, Any]) -> Exception:
    """What follows, said and kept in the same words; kept first, so that no wait is without its record.

    What is `known` goes into the payload: by its need the load is woken, and the replica pass has a replaced
    one go first that takes its room.
    """
    rested = next_end(setbacks, clock.now())
    seconds = _LOOK_FOR_NODE if rested is None else min(rested, _LOOK_FOR_NODE)
    # Read again: requests that came while nodes were asked have moved the time at which it gives up.
    operation = await in_thread(Operation.objects.get, pk=work.id)
    payload = into_payload({**operation.payload, LACKS_ROOM: False, **known}, setbacks)
    follows = later(operation, told.sentence, seconds=seconds, payload=payload)
    if isinstance(follows, Abandoned):
        told = replace(told, outcome=Ending.REFUSED)
    await in_thread(reasons.record, Decided(operation.element, work.id, told), now=clock.now())
    return follows


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
