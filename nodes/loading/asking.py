"""Asking workers whether they are there, before a load is placed on one of them.

A node stays `healthy` for up to a minute after its worker has died. A short question tells the living from
the dead, and several nodes are asked at once, so that a row of dead ones costs one short wait.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from localai_cluster.messaging import messages, subjects
from localai_cluster.messaging.bus import Bus, NoResponders, RequestTimeout, ask
from localai_cluster.messaging.codec import DecodeError
from nodes.placement.choose import NodeView

ANSWER_WITHIN = 3.0
"""Seconds that a worker has to answer."""
AT_ONCE = 16
"""Nodes asked at the same time."""


@dataclass(frozen=True)
class Answer:
    """The best node that answered, if any, and the better ones that did not."""

    node: NodeView | None
    silent: frozenset[UUID]


async def best_that_answers(bus: Bus, ranked: Sequence[NodeView]) -> Answer:
    """Asks the first `AT_ONCE` of the nodes, best first, and waits no longer than the best answer takes.

    Raises NotConnected when this process has lost the bus: then silence says nothing about the nodes.
    """
    asked = {node.id: asyncio.create_task(_answers(bus, node)) for node in ranked[:AT_ONCE]}
    silent: set[UUID] = set()
    try:
        for node in ranked[:AT_ONCE]:
            if await asked[node.id]:
                return Answer(node, frozenset(silent))
            silent.add(node.id)
        return Answer(None, frozenset(silent))
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def _answers(bus: Bus, node: NodeView) -> bool:
    subject = subjects.backend_list(str(node.id))
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            await ask(bus, subject, messages.Nothing(), messages.ListReply, ANSWER_WITHIN)
    except (NoResponders, RequestTimeout, TimeoutError):
        return False
    except DecodeError:
        return True  # somebody is there; what it said is for the attempt to judge
    return True
