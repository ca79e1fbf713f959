"""Contact of workers before a load is placed on one of them.

A node stays `healthy` for up to a minute after its worker has died. A short request finds the
connected workers, and several nodes are contacted at once, so that many dead workers cost one short wait.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never
from uuid import UUID

from localai_cluster.messaging.bus import Bus, NotConnected
from localai_cluster.messaging.messages import ListReply
from nodes.commands.commands import Worker
from nodes.commands.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.placement.choose import Candidate

ANSWER_WITHIN = 3.0
"""Seconds that a worker has to answer."""
AT_ONCE = 16
"""Number of nodes that are contacted at the same time."""


@dataclass(frozen=True)
class Contacted:
    """The best node that answered, if any, and the better ones that did not."""

    node: Candidate | None
    silent: frozenset[UUID]
    listed: ListReply | None = None
    """The backends of that node; None if its worker could not list them."""


async def contact_best(bus: Bus, ranked: Sequence[Candidate]) -> Contacted:
    """Contact the first `AT_ONCE` nodes, best first, and return with the best answer.

    Raises NotConnected when this process has lost the bus: then silence is no evidence about the nodes.
    """
    tasks = {node.id: asyncio.create_task(_answers(bus, node)) for node in ranked[:AT_ONCE]}
    silent: set[UUID] = set()
    try:
        for node in ranked[:AT_ONCE]:
            is_connected, listed = await tasks[node.id]
            if is_connected:
                return Contacted(node, frozenset(silent), listed)
            silent.add(node.id)
        return Contacted(None, frozenset(silent))
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


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
            return True, None  # the worker is connected; the attempt judges its reply
        case NoResponders() | StillRunning():
            return False, None
        case BusDown(reason):
            raise NotConnected(reason)
        case _:
            assert_never(answer)
