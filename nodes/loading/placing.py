"""Placing a load: the best node whose worker answers, or what the load waits for.

The choice itself is pure (`nodes/placement`). Here the rows are read, workers are asked, the slot is taken,
and the choice is made again whenever one of these says no: the next node is tried at once.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from localai_cluster import clock
from localai_cluster.messaging.bus import Bus, NotConnected
from nodes.definitions.files import Definition
from nodes.loading.asking import Answer, best_that_answers
from nodes.placement.choose import Candidate, Need, choose, lacks_disk
from nodes.placement.setbacks import (
    Setbacks,
    after_failure,
    from_payload,
    into_payload,
    next_end,
    resting,
)
from nodes.replicas import slots, snapshot
from nodes.replicas.slots import Slot
from operations.executor.work import Abandoned, Postpone, Work, in_thread
from operations.models import Operation

log = logging.getLogger(__name__)

_LOOK_FOR_NODE = 5.0
_LOOK_FOR_BUS = 1.0
_NO_BUS = "this controller is not connected to the message bus"


@dataclass(frozen=True)
class Place:
    """The slot taken, and the nodes that failed this load so far or did not answer."""

    slot: Slot
    setbacks: Setbacks


async def place(
    bus: Bus,
    work: Work,
    definition: Definition,
    need: Need,
    *,
    mark: str,
    besides: Set[UUID] = frozenset(),
) -> Place:
    """Takes a slot on the best node whose worker answers, and on none of `besides`.

    Raises what follows when there is none.
    """
    setbacks = from_payload(work.operation.payload)
    rest, answered = resting(setbacks, clock.now()), set[UUID]()
    while True:
        fleet = await in_thread(snapshot.fleet, definition.name, besides=besides)
        decision = choose(fleet, need=need, setbacks=setbacks, resting=rest)
        if decision.node is None:
            raise await _no_node(work, decision.why_none(), setbacks)
        if decision.node.id not in answered:
            unasked = [node for node in decision.ranked if node.id not in answered]
            answer = await _ask(bus, work, unasked)
            for silent in answer.silent:
                setbacks = after_failure(setbacks, silent, clock.now())
            rest |= answer.silent
            answered |= {answer.node.id} if answer.node is not None else set()
            continue
        slot = await in_thread(
            slots.reserve,
            decision.node,
            definition.name,
            decision.replica_index,
            mark=mark,
            backend=definition.backend,
            now=clock.now(),
            need=need,
        )
        if slot is not None:
            if lacks_disk(decision.node, need):
                log.warning("%s may have too little disk space for %s", slot.node_name, definition.name)
            return Place(slot, setbacks)


async def _ask(bus: Bus, work: Work, nodes: Sequence[Candidate]) -> Answer:
    try:
        return await best_that_answers(bus, nodes)
    except NotConnected:
        operation = await in_thread(Operation.objects.get, pk=work.id)
        raise later(operation, _NO_BUS, seconds=_LOOK_FOR_BUS, waiting=False) from None


async def _no_node(work: Work, reason: str, setbacks: Setbacks) -> Exception:
    rested = next_end(setbacks, clock.now())
    seconds = _LOOK_FOR_NODE if rested is None else min(rested, _LOOK_FOR_NODE)
    # Read again: requests that came while nodes were asked have moved the time at which it gives up.
    operation = await in_thread(Operation.objects.get, pk=work.id)
    return later(operation, reason, seconds=seconds, payload=into_payload(operation.payload, setbacks))


def later(
    operation: Operation,
    reason: str,
    *,
    seconds: float,
    payload: Mapping[str, Any] | None = None,
    waiting: bool = True,
) -> Exception:
    """Another look in `seconds`, or the end when no request waits for the model any more."""
    if operation.needed_until is not None and operation.needed_until <= clock.now():
        return Abandoned(f"no request waits for it any more; {reason}")
    return Postpone(reason, seconds=seconds, waiting=waiting, payload=payload)
