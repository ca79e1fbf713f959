"""The operation `node_stop`: the worker drains itself, leaves the registry and ends (nats.md §4.11).

The command has no reply, so the rows prove its execution: the worker leaves the registry when it ends. Until
then the operation runs, and a worker that reports its process (`instance`) gets the command again. A
supervisor on the machine, such as systemd, may restart the worker.
"""

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any, assert_never
from uuid import UUID

from localai_cluster.kit import clock, errors
from localai_cluster.messaging.bus import Bus
from nodes.commands.commands import Worker
from nodes.commands.outcomes import (
    BusDown,
    CommandFailed,
    Done,
    NoResponders,
    Refused,
    StillRunning,
    Unreadable,
)
from nodes.models import BackendNode, NodeEvent
from nodes.registry import actions
from operations.executor.work import Postpone, Work, in_thread
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.models import TargetStatus

KIND = "node_stop"
LEAVE_LIMIT = 180.0
"""Seconds until the node must have left. A worker drains for 60 s; a stock worker may leave silently."""
POLL_SECONDS = 0.5
REPEAT_SECONDS = 30.0
_BUS_RETRY_SECONDS = 5.0


def request_stop(node: BackendNode, *, by: Requester, now: datetime, reason: str = "") -> admission.Admission:
    """Create the operation that stops the node's worker, or join the active one. Raise Conflict."""
    if text := actions.refusal(actions.STOP, node):
        raise errors.Conflict(f"node {node.name} cannot be stopped: {text}", field="status")
    request = admission.OperationRequest(
        KIND,
        key=f"node-stop:{node.id}",
        element=node.name,
        by=by,
        payload={"reason": reason},
        node=(node.id, node.name),
        targets=[(node.id, node.name)],
    )
    return admission.admit(request, now=now)


class StopNode:
    """Handler of `node_stop`; one instance serves all operations of its controller."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Send the command and wait until the node has left."""
        try:
            await self._stop(work)
        except CommandFailed as failure:
            await _end(work, failure.message)
            raise
        await _end(work, "")
        return {"nodes": [work.operation.node_name]}

    async def _stop(self, work: Work) -> None:
        worker = Worker(self._bus, str(work.operation.node_id), work.operation.node_name)
        began, instance, sent_at = clock.monotonic(), "", -REPEAT_SECONDS
        while not await in_thread(_has_left, work):
            elapsed = clock.monotonic() - began
            if elapsed >= LEAVE_LIMIT:
                raise CommandFailed(f"node {worker.name} has not left within {LEAVE_LIMIT:.0f} s")
            is_first = sent_at < 0
            if is_first or (instance and elapsed - sent_at >= REPEAT_SECONDS):
                present = await _instance_of(worker, absence_fails=is_first)
                if not is_first and present and present != instance:
                    return  # another process: this one has ended, and was started again
                if is_first or present == instance:
                    await work.report(_tick(work, f"{worker.name} was told to stop; its requests may end"))
                    await worker.stop_node()
                    instance, sent_at = present or "", elapsed
            await asyncio.sleep(POLL_SECONDS)


async def _instance_of(worker: Worker, *, absence_fails: bool) -> str | None:
    """Return the id of the worker's process, "" for a stock worker, None if the worker no longer listens.

    Raise CommandFailed if the worker does not listen and `absence_fails` is set, Postpone while our
    connection is down.
    """
    answer = await worker.contact()
    match answer:
        case Done(reply) | Refused(_, reply):
            return reply.instance
        case StillRunning() | Unreadable():
            return ""  # something listens
        case NoResponders(reason):
            if absence_fails:
                raise CommandFailed(f"{reason}; stop it on its machine")
            return None
        case BusDown(reason):
            raise Postpone(reason, seconds=_BUS_RETRY_SECONDS)
        case _:
            assert_never(answer)


def _has_left(work: Work) -> bool:
    """Return True if the worker has left since the operation was created, or the node was removed."""
    node_id = _node_id(work)
    node = BackendNode.objects.filter(pk=node_id).only("offline_at").first()
    if node is None or node.offline_at is not None:
        return True
    leave_events = NodeEvent.objects.filter(node_id=node_id, kind=NodeEvent.Kind.DEACTIVATED)
    return leave_events.filter(at__gte=work.operation.created_at).exists()


def _node_id(work: Work) -> UUID:
    assert work.operation.node_id is not None
    return work.operation.node_id


def _tick(work: Work, message: str) -> Tick:
    node_id, name = work.operation.node_id, work.operation.node_name
    return Tick("stopping", message, node_id=node_id, node_name=name)


async def _end(work: Work, problem: str) -> None:
    """Write the outcome of the operation's only target."""
    status = TargetStatus.ERROR if problem else TargetStatus.SUCCESS
    node_id = _node_id(work)
    await in_thread(attempts.end_target, *work.attempt, node_id, status, problem, now=clock.now())
