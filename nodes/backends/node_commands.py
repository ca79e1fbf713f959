"""Commands on one backend of one node: their key, the steps of each kind of command, and their progress."""

import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from localai_cluster.kit import errors, names
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from nodes.backends.intents import Ended, Intent
from nodes.commands.outcomes import Done, Outcome, Refused
from nodes.commands.shared_commands import OnProgress
from nodes.models import BackendNode
from operations.ledger.progress import Tick

_LONGEST_NAME = 255
_LONGEST_LABEL = 512
_MOST_BYTES = 2**62
_PHASES = frozenset({"resolving", "downloading", "extracting", "starting"})
"""The phases of `contract/nats.md` §4.3; a worker's other texts are no phase."""


@dataclass(frozen=True)
class Command:
    """The functions that execute one kind of intent."""

    limit: Callable[[], float]
    """Seconds after which a worker that has not answered may be stuck."""
    send: Callable[[Bus, Intent, float, OnProgress], Coroutine[Any, Any, Outcome[Any]]]
    """Send the command and wait for its reply, up to that many seconds; raise CommandFailed."""
    conclude: Callable[[Bus, Intent, Done[Any] | Refused[Any]], Awaitable[Ended]]
    """Turn the worker's reply into the end of the intent. May send requests; raises Unclear."""
    proven: Callable[[Intent, messages.InstalledBackend | None], bool]
    """Return True if the worker's list shows that the command was executed."""


class Unclear(Exception):
    """The worker's reply leaves the result open, and a second request did not settle it; retry later."""


def key(node_id: UUID | str, backend: str) -> str:
    """O35: return the key of an operation on one backend of one node; a long address is hashed."""
    return f"node:{node_id}:{subject(backend)}"


def subject(backend: str) -> str:
    """Return the backend's name, or its address as a name; a long address is hashed."""
    return backend if len(backend) <= _LONGEST_NAME else hashlib.sha256(backend.encode()).hexdigest()


def find_node(node_id: UUID | None) -> BackendNode:
    """Return the node if it can take commands; raise NotFound or Conflict with the reason otherwise."""
    node = BackendNode.objects.filter(pk=node_id).first() if node_id else None
    if node is None:
        raise errors.NotFound(f"node {node_id} is no longer registered")
    if reason := refusal(node):
        raise errors.Conflict(reason)
    return node


def refusal(node: BackendNode) -> str:
    """Return why the node takes no commands on backends; "" if it does."""
    if node.node_type != "backend":
        return f"{node.name} is an agent node, which does not run backends"
    if node.status == "pending":
        return f"node {node.name} is pending approval"
    # An admin's drain stays while the node is offline; a worker's own drain ends when it returns.
    if node.status == "draining" or (node.drained_at is not None and not node.drain_is_own):
        return f"node {node.name} is draining"
    return ""


def listed(backend: str, reply: messages.ListReply) -> messages.InstalledBackend | None:
    """Return the list's entry of a backend by its name or, if no entry has that name, by its alias."""
    folded_name = backend.lower()
    by_name = (entry for entry in reply.backends if entry.name.lower() == folded_name)
    by_alias = (entry for entry in reply.backends if entry.alias.lower() == folded_name)
    return next(by_name, None) or next(by_alias, None)


def tick(node: BackendNode, event: messages.ProgressEvent) -> Tick:
    """Convert a worker's progress report to the form of operations.

    A worker's numbers and texts are untrusted, so they are bounded.
    """
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
