"""Room for a load that no node can take: looking for it, and waiting for those that make it.

The load holds its slot and its share of the memory while they stop, so no other load takes what they give
back. Controllers stop them (`stopping.py`), not the load: if it ends first, they stop all the same.
"""

import asyncio
from dataclasses import dataclass
from uuid import UUID

from localai_cluster import clock
from nodes.loading.failures import WorkerGone
from nodes.models import ReplicaState
from nodes.placement.choose import Decision
from nodes.placement.evict import Eviction, choose_victims, named
from nodes.placement.settle import LoadQuestion
from nodes.replicas import eviction
from nodes.replicas.slots import Slot
from operations.executor.work import Work, in_thread
from operations.ledger.progress import Tick

LOOK_EVERY = 0.5


@dataclass(frozen=True)
class Room:
    """The replicas that must have gone before the engine starts, and the sentence that says so."""

    replicas: tuple[UUID, ...]
    why: str


def what_makes_room(model_name: str, question: LoadQuestion, decision: Decision) -> Eviction | None:
    """The replicas that make room, or why none can; None while no node lacks memory alone, or none may go."""
    nodes, need = question.lacking(decision), question.view.need
    if not nodes:
        return None
    now = clock.now()
    found = eviction.residents([node.id for node in nodes], now=now)
    return choose_victims(nodes, found, eviction.guard(model_name, found, now=now), need)


def room_of(found: Eviction | None) -> Room | None:
    """What the load has to wait for."""
    if found is None:
        return None
    return Room(tuple(one.id for one in [*found.victims, *found.leaving]), found.why)


async def made(room: Room, work: Work, slot: Slot) -> None:
    """Returns when all of them are gone; raises WorkerGone when one stays or serves again."""
    limit = eviction.STOPS_WITHIN.total_seconds()
    until = clock.monotonic() + limit
    await work.report(Tick("loading", room.why, node_id=slot.node_id, node_name=slot.node_name))
    while left := await in_thread(_left, room):
        if back := [name for name, state in left if state == ReplicaState.LOADED]:
            raise WorkerGone(f"{named(back)} on {slot.node_name} serves again")
        if clock.monotonic() >= until:
            names = named(name for name, _ in left)
            raise WorkerGone(f"{names} on {slot.node_name} did not stop within {limit:.0f} s")
        await asyncio.sleep(LOOK_EVERY)


def _left(room: Room) -> list[tuple[str, str]]:
    return [(str(row), row.state) for row in eviction.not_gone(room.replicas)]
