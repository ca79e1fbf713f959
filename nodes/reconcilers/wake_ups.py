"""Wake-ups after a change of nodes, for waiting loads that a node could take now and for backend work.

`NodeWakeUps` gathers the node ids of NOTIFYs for a moment and reads the rows once for all of them, so a burst
costs a limited number of passes. The present state of the node decides, not the fact that it changed: a new
label of an absent node wakes no operation. A lost wake-up only costs time, because every waiting operation
polls.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster.kit import clock
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.metrics import passes
from nodes.decisions import fleet_cache
from nodes.loading import load_request
from nodes.loading.load_request import request_of
from nodes.placement.choose import Candidate, Selector, find_refusal
from nodes.placement.load_times import backed_off_nodes, from_payload
from nodes.reconcilers import intents
from nodes.replicas import fleet_queries
from operations.executor.work import in_thread
from operations.ledger import attempts
from operations.models import Operation, Status

GATHER_SECONDS = 0.2
"""Seconds for which changes are gathered into one pass."""
CLEAN_INTERVAL = 30.0
"""Seconds between two passes over intents that cannot succeed any more."""
MAX_CONSIDERED_LOADS = 500
"""Maximum number of loads that one pass considers, the oldest first. The rest poll by themselves."""

ChangedNodes = Collection[UUID] | None
"""Nodes that changed; None = any node may have changed."""


def wake_waiting_work(changed: ChangedNodes) -> int:
    """Wake the operations that wait for one of these nodes and could continue; return the number of loads.

    The pass also makes intents due whose node is healthy, and refreshes the reasons of their targets.
    """
    intents.refresh_reasons(changed, now=clock.now())
    return attempts.wake(_loads_to_wake(changed), now=clock.now())


def _loads_to_wake(changed: ChangedNodes) -> list[UUID]:
    """Return the loads that one of the nodes could take now; a constant number of queries.

    A load that needs an eviction may be missing here: it polls by itself.
    """
    loads = Operation.objects.filter(kind=load_request.KIND, status=Status.WAITING).order_by(
        "created_at", "id"
    )
    waiting = list(loads.only("id", "element", "payload")[:MAX_CONSIDERED_LOADS])
    if not waiting:
        return []
    selectors = fleet_queries.selectors_of({operation.element for operation in waiting})
    labels = frozenset(label for selector in selectors.values() for label in selector.labels or ())
    nodes, taken_slots = (
        fleet_cache.read_fleet("", selector=Selector("", labels), allowed_nodes=changed),
        fleet_queries.occupied_indices(selectors),
    )
    now = clock.now()
    return [
        operation.id
        for operation in waiting
        if _could_take_load(
            operation, nodes, taken_slots[operation.element], selectors[operation.element], now
        )
    ]


def _could_take_load(
    operation: Operation,
    nodes: Iterable[Candidate],
    taken_slots: Mapping[UUID, Set[int]],
    selector: Selector,
    now: datetime,
) -> bool:
    node_backoffs, request = backed_off_nodes(from_payload(operation.payload), now), request_of(operation)
    need = load_request.parse_need(operation.payload)
    return any(
        find_refusal(
            replace(node, used_indices=frozenset(taken_slots.get(node.id, ()))),
            node_backoffs,
            need,
            selector=selector,
        )
        is None
        for node in nodes
        if node.id not in request.excluded_nodes
        and (request.allowed_nodes is None or node.id in request.allowed_nodes)
    )


class NodeWakeUps(PeriodicTask):
    """The periodic task of a controller that wakes waiting work; one pass covers all changes of a moment."""

    def __init__(self, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(
            "wakes", self._run_pass, interval=CLEAN_INTERVAL, gather=GATHER_SECONDS, retry_on=(DatabaseError,)
        )
        self._then = then
        self._changed: set[UUID] = set()
        self._any = False
        self._clean_at = clock.monotonic()

    def changed(self, node_id: str) -> None:
        """Add a changed node. A text that is not an id means that any node may have changed."""
        try:
            self._changed.add(UUID(node_id))
        except ValueError:
            self._any = True
        self.wake()

    async def _run_pass(self) -> None:
        if clock.monotonic() >= self._clean_at:
            # A schedule does the same, but this must not depend on the process that runs schedules.
            # Before the call: an error must not keep the passes from the nodes that have changed.
            self._clean_at = clock.monotonic() + CLEAN_INTERVAL
            await in_thread(intents.end_stale_intents, now=clock.now())
        if not self._any and not self._changed:
            return
        changed = None if self._any else frozenset(self._changed)
        self._changed, self._any = set(), False
        try:
            with passes.count_pass("wakes"):
                await in_thread(wake_waiting_work, changed)
                await self._then()
        except DatabaseError:
            self._any = True
            raise
