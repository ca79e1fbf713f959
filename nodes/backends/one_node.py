"""What commands on one backend of one node share: its key, how a kind of command is carried out, progress."""

import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from localai_cluster import errors, names
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from nodes.backends.flights import OnProgress
from nodes.backends.intents import Ended, Intent
from nodes.backends.outcomes import Done, Outcome, Refused
from nodes.models import BackendNode
from operations.ledger.progress import Tick

_LONGEST_NAME = 255
_LONGEST_LABEL = 512
_MOST_BYTES = 2**62
_PHASES = frozenset({"resolving", "downloading", "extracting", "starting"})
"""Those of `contract/nats.md` §4.3; any other text of a worker's is none."""


class CommandFailed(errors.ClusterError):
    """The worker did not do it, or must not be asked to."""

    status = 502
    code = "command_failed"


@dataclass(frozen=True)
class Command:
    """How one kind of intent is carried out."""

    limit: Callable[[], float]
    """Seconds after which a worker that has not answered may be stuck."""
    send: Callable[[Bus, Intent, float, OnProgress], Coroutine[Any, Any, Outcome[Any]]]
    """Sends the command and waits for its answer, up to so many seconds; raises CommandFailed."""
    conclude: Callable[[Bus, Intent, Done[Any] | Refused[Any]], Awaitable[Ended]]
    """What the worker's answer means; may ask the worker again, and raises Unclear if it does not say."""
    proven: Callable[[Intent, messages.InstalledBackend | None], bool]
    """Whether what the worker lists of the backend shows that the command has been carried out."""


class Unclear(Exception):
    """The worker's answer leaves open what is so, and it does not say; ask again later."""


def key(node_id: UUID | str, backend: str) -> str:
    """O35: what an operation on one backend of one node owns; a long address is told by its hash."""
    return f"node:{node_id}:{subject(backend)}"


def subject(backend: str) -> str:
    """A backend's name, or its address as a name: a long one is told by its hash."""
    return backend if len(backend) <= _LONGEST_NAME else hashlib.sha256(backend.encode()).hexdigest()


def find_node(node_id: UUID | None) -> BackendNode:
    """The node, if commands may be sent to it; NotFound or Conflict with the reason otherwise."""
    node = BackendNode.objects.filter(pk=node_id).first() if node_id else None
    if node is None:
        raise errors.NotFound(f"node {node_id} is no longer registered")
    if reason := refusal(node):
        raise errors.Conflict(reason)
    return node


def refusal(node: BackendNode) -> str:
    """Why no command on a backend may be asked for there; "" if it may."""
    if node.node_type != "backend":
        return f"{node.name} is an agent node, which does not run backends"
    if node.status == "pending":
        return f"node {node.name} is pending approval"
    # An admin's drain goes on while the node is offline; a worker's own ends when it comes back.
    if node.status == "draining" or (node.drained_at is not None and not node.drain_is_own):
        return f"node {node.name} is draining"
    return ""


def listed(backend: str, reply: messages.ListReply) -> messages.InstalledBackend | None:
    """What the worker lists of a backend, by its name or, where nothing has that name, by its alias."""
    wanted = backend.lower()
    named = (one for one in reply.backends if one.name.lower() == wanted)
    return next(named, None) or next((one for one in reply.backends if one.alias.lower() == wanted), None)


def tick(node: BackendNode, event: messages.ProgressEvent) -> Tick:
    """A worker's report of progress as the operation keeps it: a stranger's numbers and texts, bounded."""
    total = max(event.total_bytes, 0)
    current = min(max(event.current_bytes, 0), total or _MOST_BYTES)
    file_name = names.plain(event.file_name[:_LONGEST_LABEL])
    return Tick(
        phase=event.phase if event.phase in _PHASES else "downloading",
        message=file_name or f"downloading to {node.name}",
        current_bytes=current,
        total_bytes=total,
        percentage=100 * current / total if total else min(max(event.percentage, 0.0), 100.0),
        file_name=file_name,
        node_id=node.id,
        node_name=node.name,
    )
