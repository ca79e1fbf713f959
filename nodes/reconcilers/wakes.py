"""What a change of nodes wakes: loads that one of them could take, and work on backends that waits for them.

`Wakes` gathers the node ids of NOTIFYs for a moment and looks at the rows once for all of them, so a burst
costs a bounded number of looks. The state of the node wakes an operation, not the fact that it changed: a
label of an absent node wakes nothing. A wake that is lost costs time only: every waiting operation also
looks again by itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster import clock
from localai_cluster.metrics import passes
from nodes.loading import load, needs
from nodes.loading.wish import wish_of
from nodes.placement.choose import Candidate, refusal
from nodes.placement.selector import Selector
from nodes.placement.setbacks import from_payload, resting
from nodes.reconcilers import intents
from nodes.replicas import snapshot
from operations.executor.work import in_thread
from operations.ledger import lease
from operations.models import Operation, Status

log = logging.getLogger(__name__)

GATHER = 0.2
"""Seconds for which changes are gathered into one look."""
CLEAN_EVERY = 30.0
"""Seconds between two looks for intents that have no future."""
MOST = 500
"""Loads that one look considers, the oldest first; all others look again by themselves."""

Changed = Collection[UUID] | None
"""Nodes that changed; None = any node may have."""


def wake(changed: Changed) -> int:
    """Wakes what waits for one of these nodes and could go on now; answers how many loads.

    Intents that wait for a node are due when it is healthy; what they say of their node is brought up to
    date.
    """
    intents.explain(changed, now=clock.now())
    return lease.wake(_loads(changed), now=clock.now())


def _loads(changed: Changed) -> list[UUID]:
    """Loads that one of the nodes could take now, with what they need; a constant number of queries.

    An eviction may help one that is not among them: it looks again by itself.
    """
    loads = Operation.objects.filter(kind=load.KIND, status=Status.WAITING).order_by("created_at", "id")
    waiting = list(loads.only("id", "element", "payload")[:MOST])
    if not waiting:
        return []
    selectors = snapshot.selectors_of({operation.element for operation in waiting})
    labels = frozenset(label for one in selectors.values() for label in one.labels or ())
    nodes, taken = snapshot.fleet("", selector=Selector("", labels), only=changed), snapshot.taken(selectors)
    now = clock.now()
    return [
        one.id for one in waiting if _could_take(one, nodes, taken[one.element], selectors[one.element], now)
    ]


def _could_take(
    operation: Operation,
    nodes: Iterable[Candidate],
    taken: Mapping[UUID, Set[int]],
    selector: Selector,
    now: datetime,
) -> bool:
    rest, wish = resting(from_payload(operation.payload), now), wish_of(operation)
    need = needs.from_payload(operation.payload)
    return any(
        refusal(replace(node, taken=frozenset(taken.get(node.id, ()))), rest, need, selector=selector) is None
        for node in nodes
        if node.id not in wish.besides and (wish.only is None or node.id in wish.only)
    )


class Wakes:
    """A controller's part: one look for all changes of a moment."""

    def __init__(self, then: Callable[[], Awaitable[None]]) -> None:
        self._then = then
        self._changed: set[UUID] = set()
        self._any = False
        self._heard = asyncio.Event()

    def changed(self, node_id: str) -> None:
        """This node has changed; what is no id means that any node may have."""
        try:
            self._changed.add(UUID(node_id))
        except ValueError:
            self._any = True
        self._heard.set()

    async def run(self) -> None:
        """Looks after each gathered change, until cancelled."""
        clean_at = clock.monotonic()
        while True:
            try:
                if clock.monotonic() >= clean_at:
                    # A schedule does the same, but nothing must wait for one process to be there.
                    clean_at = clock.monotonic() + CLEAN_EVERY
                    await in_thread(intents.clean, now=clock.now())
                async with asyncio.timeout(CLEAN_EVERY):
                    await self._heard.wait()
            except TimeoutError:
                continue
            except DatabaseError as error:
                log.warning("cannot look for work that has no future: %s", error)
                await asyncio.sleep(GATHER)
                continue
            await asyncio.sleep(GATHER)
            self._heard.clear()
            changed = None if self._any else frozenset(self._changed)
            self._changed, self._any = set(), False
            try:
                with passes.counted("wakes"):
                    await in_thread(wake, changed)
                    await self._then()
            except DatabaseError as error:
                log.warning("cannot see what a change of nodes wakes: %s", error)
