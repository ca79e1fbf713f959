"""Evictions for a load that fits on no node: the choice of victims, and the wait for their end.

The load holds its slot and its reserved memory while the victims stop, so no other load takes the freed
memory. Controllers stop the victims (`stopper.py`), not the load: they stop even if the load ends first.
"""

import asyncio
from dataclasses import dataclass
from uuid import UUID

from localai_cluster.kit import clock
from nodes.loading.failures import WorkerGone
from nodes.models import ReplicaState
from nodes.placement.choose import Decision
from nodes.placement.evict import Eviction, choose_victims, join_names
from nodes.placement.load_decision import LoadQuestion
from nodes.replicas import eviction
from nodes.replicas.slots import Slot
from operations.executor.work import Work, in_thread
from operations.ledger.progress import Tick

EVICTION_POLL = 0.5


@dataclass(frozen=True)
class PendingEviction:
    """The replicas that must stop before the engine starts, and the sentence for the operation."""

    replicas: tuple[UUID, ...]
    why: str


def find_eviction(model_name: str, question: LoadQuestion, decision: Decision) -> Eviction | None:
    """Return the eviction for a load, without a node if none can help; None if no node lacks only memory."""
    nodes, need = question.lacking(decision), question.view.need
    if not nodes:
        return None
    now = clock.now()
    residents = eviction.residents([node.id for node in nodes], now=now)
    return choose_victims(nodes, residents, eviction.guard(model_name, residents, now=now), need)


def pending_eviction(victims: Eviction | None) -> PendingEviction | None:
    """Return the replicas that the load must wait for; None without an eviction."""
    if victims is None:
        return None
    return PendingEviction(tuple(replica.id for replica in [*victims.victims, *victims.leaving]), victims.why)


async def wait_until_evicted(room: PendingEviction, work: Work, slot: Slot) -> None:
    """Return when all replicas have stopped; raise WorkerGone if one stays or serves again."""
    limit = eviction.STOPS_WITHIN.total_seconds()
    deadline = clock.monotonic() + limit
    await work.report(Tick("loading", room.why, node_id=slot.node_id, node_name=slot.node_name))
    while remaining := await in_thread(_remaining, room):
        if serving := [name for name, state in remaining if state == ReplicaState.LOADED]:
            raise WorkerGone(f"{join_names(serving)} on {slot.node_name} serves again")
        if clock.monotonic() >= deadline:
            names = join_names(name for name, _ in remaining)
            raise WorkerGone(f"{names} on {slot.node_name} did not stop within {limit:.0f} s")
        await asyncio.sleep(EVICTION_POLL)


def _remaining(room: PendingEviction) -> list[tuple[str, str]]:
    return [(str(row), row.state) for row in eviction.not_gone(room.replicas)]
