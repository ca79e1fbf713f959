"""Asking workers whether they are there, before a load is placed on one of them.

A node stays `healthy` for up to a minute after its worker has died. A short question tells the living from
the dead, and several nodes are asked at once, so that a row of dead ones costs one short wait.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from localai_cluster.messaging.bus import Bus, NotConnected
from localai_cluster.messaging.messages import ListReply
from nodes.backends.commands import Worker
from nodes.backends.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.placement.choose import Candidate

ANSWER_WITHIN = 3.0
"""Seconds that a worker has to answer."""
AT_ONCE = 16
"""Nodes asked at the same time."""


@dataclass(frozen=True)
class Answer:
    """The best node that answered, if any, and the better ones that did not."""

    node: Candidate | None
    silent: frozenset[UUID]
    listed: ListReply | None = None
    """The backends of that node; None if its worker could not list them."""


async def best_that_answers(bus: Bus, ranked: Sequence[Candidate]) -> Answer:
    """Asks the first `AT_ONCE` of the nodes, best first, and waits no longer than the best answer takes.

    Raises NotConnected when this process has lost the bus: then silence says nothing about the nodes.
    """
    asked = {node.id: asyncio.create_task(_answers(bus, node)) for node in ranked[:AT_ONCE]}
    silent: set[UUID] = set()
    try:
        for node in ranked[:AT_ONCE]:
            there, listed = await asked[node.id]
            if there:
                return Answer(node, frozenset(silent), listed)
            silent.add(node.id)
        return Answer(None, frozenset(silent))
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def _answers(bus: Bus, node: Candidate) -> tuple[bool, ListReply | None]:
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            answer = await Worker(bus, str(node.id), node.name).backends(ANSWER_WITHIN)
    except TimeoutError:
        return False, None
    match answer:
        case Done(listed):
            return True, listed
        case Refused() | Unreadable():
            return True, None  # its worker is there; what it said is for the attempt to judge
        case NoResponders() | StillRunning():
            return False, None
        case BusDown(reason):
            raise NotConnected(reason)
        case _:
            assert_never(answer)
