"""Stops of all engines on drained nodes.

A drain is over when the node has no replica and no engine of a former one. From then on a controller stops
what its worker lists, until it lists nothing. A result is written only while the same drain lasts: engines of
a resumed node are not stopped.
"""

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from localai_cluster.kit import clock, names
from localai_cluster.kit.rows import claim_rows
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from nodes.commands.commands import PING_TIMEOUT, Worker
from nodes.commands.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from nodes.models import BackendNode, NodeModel, NodeType
from nodes.models.node import BackendNodeQuerySet
from operations.changes import events
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

_CLAIMED_FOR = 45.0
"""Seconds; longer than one look at one node takes."""
_ERROR_LENGTH = 255
_MOST_STOPS = 256
"""Engines of one node that one pass stops; the next pass stops the rest."""
_STOPPING_POLL, _SILENT_POLL, _STOCK_POLL = 1.0, 10.0, 60.0
"""Seconds until the next check of a node whose engines stop, whose worker is silent, or cannot list them."""
CANNOT_TELL = "its worker cannot tell what runs there"


@dataclass(frozen=True)
class DrainedNode:
    """A node without replicas under one drain."""

    id: UUID
    name: str
    node_type: str
    drained_at: datetime


def claim_due(limit: int, *, now: datetime) -> list[DrainedNode]:
    """Claim due nodes, the longest drained first."""
    due = BackendNode.objects.filter(
        Q(engines_due_at__isnull=True) | Q(engines_due_at__lte=now),
        ~Exists(NodeModel.engines.filter(node=OuterRef("pk"))),
        status="draining",
        engines_gone_at__isnull=True,
    )
    columns = ("id", "name", "node_type", "drained_at")
    nodes = claim_rows(
        due.order_by("drained_at").only(*columns),
        limit=limit,
        engines_due_at=now + timedelta(seconds=_CLAIMED_FOR),
    )
    return [DrainedNode(*(getattr(node, column) for column in columns)) for node in nodes]


def is_same_drain(node: DrainedNode) -> bool:
    """Return True if the same drain lasts: engines of a resumed node must not be stopped."""
    return _same_drain(node).exists()


def confirm_empty(node: DrainedNode, *, now: datetime) -> None:
    """Record that nothing runs there: it is safe to power off."""
    with transaction.atomic():
        if _same_drain(node).update(engines_gone_at=now, engines_error="", engines_due_at=None):
            events.notify(events.NODES, str(node.id))


def schedule_check(node: DrainedNode, error: str, *, due_at: datetime) -> None:
    """Store the time of the next check, and why it is not known what runs there; "" while engines stop."""
    error = names.plain(error[:_ERROR_LENGTH])
    nodes = _same_drain(node)
    with transaction.atomic():
        if nodes.exclude(engines_error=error).update(engines_error=error):
            events.notify(events.NODES, str(node.id))
        nodes.update(engines_due_at=due_at)


def _same_drain(node: DrainedNode) -> BackendNodeQuerySet:
    return BackendNode.objects.filter(pk=node.id, drained_at=node.drained_at, engines_gone_at__isnull=True)


async def stop_engines(bus: Bus, node: DrainedNode) -> None:
    """Stop what runs on a claimed node; store the result, and the time of the next check."""
    if node.node_type == NodeType.AGENT:
        await in_thread(confirm_empty, node, now=clock.now())
        return
    worker = Worker(bus, str(node.id), node.name)
    answer = await worker.running()
    if not await in_thread(is_same_drain, node):
        return
    match answer:
        case Done(reply) if not reply.models:
            log.info("node %s is drained and runs no engine", node.name)
            await in_thread(confirm_empty, node, now=clock.now())
            return
        case Done(reply):
            error, pause = await _stop_all(worker, reply.models[:_MOST_STOPS]), _STOPPING_POLL
        case NoResponders(reason):
            error, pause = await _unasked(worker, node, reason)
        case Refused(reason) | StillRunning(reason) | Unreadable(reason) | BusDown(reason):
            error, pause = reason, _SILENT_POLL
        case _:
            assert_never(answer)
    due_at = clock.now() + timedelta(seconds=pause)
    await in_thread(schedule_check, node, error, due_at=due_at)


async def _stop_all(worker: Worker, models: tuple[messages.RunningModel, ...]) -> str:
    """Send a stop for each; return the first error."""
    stops = [_stop_one(worker, model) for model in models]
    return next((error for error in await asyncio.gather(*stops) if error), "")


async def _stop_one(worker: Worker, model: messages.RunningModel) -> str:
    key = messages.process_key(model.model_id, model.replica_index)
    outcome = await worker.stop_model(key, model.address)
    match outcome:
        case Done() | StillRunning():
            return ""
        case NoResponders():
            await worker.stop(key)
            return ""
        case Refused(reason) | Unreadable(reason) | BusDown(reason):
            return f"{key}: {reason}"
        case _:
            assert_never(outcome)


async def _unasked(worker: Worker, node: DrainedNode, reason: str) -> tuple[str, float]:
    """Return the error for a node whose worker does not answer `models.running`, and the next poll."""
    if isinstance(await worker.backends(PING_TIMEOUT), NoResponders | BusDown | StillRunning):
        return reason, _SILENT_POLL
    if await in_thread(is_same_drain, node):
        await worker.stop("")
    return CANNOT_TELL, _STOCK_POLL
