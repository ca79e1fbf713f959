"""The operation `backend_install`: brings one backend's files to one node, with progress in bytes.

It waits for a node that is away, until `gives_up_at`; then it fails and says what it waited for.
"""

import hashlib
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

from localai_cluster import clock, conf, errors
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.codec import encode_galleries
from nodes.backends import inventory
from nodes.backends.commands import Worker
from nodes.backends.outcomes import BusDown, Done, NoResponders, Outcome, Refused, StillRunning, Unreadable
from nodes.models import BackendNode
from operations.executor.work import Postpone, Work, in_thread, retry_delay
from operations.ledger.progress import Tick
from operations.models import Operation

log = logging.getLogger(__name__)

KIND = "backend_install"
_LOOK_AT_ABSENT_NODE = 15.0
_LONGEST_NAME_IN_KEY = 255


class InstallFailed(errors.ClusterError):
    """The worker could not install the backend."""

    status = 502
    code = "install_failed"


def key(node_id: UUID | str, backend: str) -> str:
    """O35: what an operation on one backend of one node owns; a long address is told by its hash."""
    if len(backend) > _LONGEST_NAME_IN_KEY:
        backend = hashlib.sha256(backend.encode()).hexdigest()
    return f"node:{node_id}:{backend}"


def galleries() -> list[messages.Gallery]:
    """The galleries of this cluster."""
    return [
        messages.Gallery(url=str(entry["url"]), name=str(entry.get("name", "")))
        for entry in conf.cluster().galleries
    ]


def configured_galleries() -> str:
    """The same as a worker expects them; empty = the worker's own."""
    found = galleries()
    return encode_galleries(found) if found else ""


def find_node(node_id: UUID | None) -> BackendNode:
    """The node, if commands may be sent to it at all; NotFound or Conflict with the reason otherwise."""
    node = BackendNode.objects.filter(pk=node_id).first() if node_id else None
    if node is None:
        raise errors.NotFound(f"node {node_id} is no longer registered")
    if node.node_type != "backend":
        raise errors.Conflict(f"{node.name} is an agent node, which does not run backends")
    if node.status == "pending":
        raise errors.Conflict(f"node {node.name} is pending approval")
    return node


def gives_up_at(now: datetime) -> datetime:
    """Until when an install that is asked for now waits for its node."""
    return now + timedelta(seconds=conf.cluster().install_wait)


async def _later(work: Work, reason: str, *, seconds: float, waiting: bool = False) -> Exception:
    """Another attempt later, or the failure of an install that has waited for as long as it may."""
    # Read again: whoever asked for the same install meanwhile has moved the time at which it gives up.
    operation = await in_thread(Operation.objects.get, pk=work.id)
    if operation.needed_until is not None and operation.needed_until <= clock.now():
        return InstallFailed(f"given up, because {reason} (CLUSTER_INSTALL_WAIT)")
    return Postpone(reason, seconds=seconds, waiting=waiting)


class InstallBackend:
    """Handler; one instance serves all operations of its controller."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Sends the command and turns its outcome into the operation's.

        While there is no answer, the operation says why and asks again: the worker joins what it carries out.
        """
        while True:
            node = await in_thread(find_node, work.operation.node_id)
            if node.status == "offline":
                reason = f"node {node.name} is offline"
                raise await _later(work, reason, seconds=_LOOK_AT_ABSENT_NODE, waiting=True)
            await work.report(Tick(phase="resolving", message=f"contacting {node.name}", node_id=node.id))
            outcome = await self._install(work, node)
            match outcome:
                case Done():
                    # Before the operation ends: whoever hears of its end finds the backend in the list.
                    await inventory.refresh(self._bus, node.id)
                    return {"node": node.name}
                case Refused(reason) | Unreadable(reason):
                    raise InstallFailed(reason)
                case NoResponders(reason):
                    raise await _later(work, reason, seconds=retry_delay(work.operation.attempts))
                case StillRunning(reason) | BusDown(reason):
                    if isinstance(given_up := await _later(work, reason, seconds=0), InstallFailed):
                        raise given_up
                    log.info("%s (%s): %s; asking again", work.operation.kind, work.id, reason)
                    await work.report(Tick(message=f"{reason}; asking again", node_id=node.id))
                case _:
                    assert_never(outcome)

    async def _install(self, work: Work, node: BackendNode) -> Outcome[messages.InstallReply]:
        async def on_progress(event: messages.ProgressEvent) -> None:
            work.progress(_tick(node, event))

        return await Worker(self._bus, str(node.id), node.name).install(
            self._request(work), timeout=conf.cluster().install_timeout, on_progress=on_progress
        )

    @staticmethod
    def _request(work: Work) -> messages.InstallRequest:
        asked = work.operation.payload
        return messages.InstallRequest(
            backend=asked.get("backend") or asked.get("name", ""),
            backend_galleries=asked.get("backend_galleries") or configured_galleries(),
            uri=asked.get("uri", ""),
            name=asked.get("name", ""),
            alias=asked.get("alias", ""),
            op_id=str(work.id),
            install_only=True,
        )


def _tick(node: BackendNode, event: messages.ProgressEvent) -> Tick:
    known = event.total_bytes > 0
    share = 100 * event.current_bytes / event.total_bytes if known else event.percentage
    return Tick(
        phase=event.phase or "downloading",
        message=event.file_name or f"downloading to {node.name}",
        current_bytes=max(event.current_bytes, 0),
        total_bytes=max(event.total_bytes, 0),
        percentage=share,
        file_name=event.file_name,
        node_id=node.id,
        node_name=node.name,
    )
