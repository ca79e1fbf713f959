"""Which waiting operations a change of nodes wakes.

An install waits for its own node, a load for any node that could take it. `Wakes` gathers the node ids of
NOTIFYs for a moment and looks at the rows once for all of them, so a burst costs a bounded number of looks.
The state of the node wakes an operation, not the fact that it changed: a label of an absent node wakes
nothing. A wake that is lost costs time only: every waiting operation also looks again by itself.
"""

import asyncio
import logging
from collections.abc import Collection
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster import clock
from nodes.backends import install
from nodes.loading import load
from nodes.models import BackendNode
from nodes.placement.choose import refusal
from nodes.placement.setbacks import from_payload, resting
from nodes.replicas import snapshot
from operations.executor.work import in_thread
from operations.ledger import lease
from operations.models import Operation, Status

log = logging.getLogger(__name__)

GATHER = 0.2
"""Seconds for which changes are gathered into one look."""

Changed = Collection[UUID] | None
"""Nodes that changed; None = any node may have."""


def wake(changed: Changed) -> int:
    """Wakes what waits for one of these nodes and could go on now; answers how many operations."""
    return lease.wake([*_installs(changed), *_loads(changed)], now=clock.now())


def _installs(changed: Changed) -> list[UUID]:
    """Installs whose node is not offline any more, or is gone: they go on, or end and say why."""
    waiting = Operation.objects.filter(kind=install.KIND, status=Status.WAITING)
    if changed is not None:
        waiting = waiting.filter(node_id__in=changed)
    node_of = dict(waiting.values_list("id", "node_id"))
    absent = BackendNode.objects.filter(pk__in=set(node_of.values()), status="offline")
    offline = set(absent.values_list("id", flat=True))
    return [id for id, node_id in node_of.items() if node_id not in offline]


def _loads(changed: Changed) -> list[UUID]:
    """Loads that one of the nodes could take."""
    waiting = Operation.objects.filter(kind=load.KIND, status=Status.WAITING)
    return [
        operation.id
        for operation in waiting.only("id", "element", "payload")
        if _could_take(operation, changed)
    ]


def _could_take(operation: Operation, changed: Changed) -> bool:
    rest = resting(from_payload(operation.payload), clock.now())
    return any(refusal(node, rest) is None for node in snapshot.fleet(operation.element, only=changed))


class Wakes:
    """A controller's part: one look for all changes of a moment."""

    def __init__(self) -> None:
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
        while True:
            await self._heard.wait()
            await asyncio.sleep(GATHER)
            self._heard.clear()
            changed = None if self._any else frozenset(self._changed)
            self._changed, self._any = set(), False
            try:
                await in_thread(wake, changed)
            except DatabaseError as error:
                log.warning("cannot see what a change of nodes wakes: %s", error)
