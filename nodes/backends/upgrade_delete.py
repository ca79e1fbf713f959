"""Upgrading and deleting: both stop a backend's engines on one node first.

The rows of the engines that a worker reports as stopped go with every answer, also with a refusal: their
ports may serve another model soon. A report may be lost with its controller, and some workers give none, so
the rows are compared with what the worker runs as well. Both commands may be repeated.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from localai_cluster import conf
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from nodes.backends import install, inventory, one_node
from nodes.backends.commands import DELETE_TIMEOUT, Worker
from nodes.backends.flights import OnProgress
from nodes.backends.intents import Ended, Intent, Known
from nodes.backends.one_node import Command, CommandFailed, Unclear
from nodes.backends.outcomes import Done, NotSent, Outcome, Refused, StillRunning
from nodes.models import BackendNode, NodeBackend
from nodes.replicas import retire
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

R = TypeVar("R", bound=messages.UpgradeReply)


async def _upgrade(
    bus: Bus, intent: Intent, timeout: float, say: OnProgress
) -> Outcome[messages.UpgradeReply]:
    node, backend = intent.node, intent.row.backend
    worker = Worker(bus, str(node.id), node.name, node.instance)
    found = await worker.contact()
    if isinstance(found, Refused):
        return Refused(found.reason, messages.UpgradeReply(error=found.reason))
    if isinstance(found, StillRunning):
        return NotSent(found.reason)
    if not isinstance(found, Done):
        return found
    # An upgrade that is asked again may find the backend half-way; the worker says what it makes of that.
    if intent.row.unanswered_since is None:
        _check(one_node.listed(backend, found.reply), backend, node)
    request = messages.UpgradeRequest(
        backend=backend,
        backend_galleries=install.offered_to(node).encoded,
        op_id=str(intent.row.operation_id),
    )
    return await _stopping(bus, node, lambda: worker.upgrade(request, timeout=timeout, on_progress=say))


async def _upgraded(
    bus: Bus, intent: Intent, answer: Done[messages.UpgradeReply] | Refused[messages.UpgradeReply]
) -> Ended:
    listed = await inventory.refresh(bus, intent.node)
    if isinstance(answer, Refused):
        return Ended(error=install.offered_to(intent.node).explained(answer.reason))
    now = await in_thread(_known, intent)
    # A folder has no digest, and a stock worker may not say one: then nobody knows.
    if not listed or now is None or not now.digest or now != intent.known:
        return Ended()
    return Ended(reason=f"nothing changed: {now.version or 'the same files'} was installed before")


def _known(intent: Intent) -> Known | None:
    rows = NodeBackend.objects.filter(node=intent.node, name=intent.row.backend)
    row = rows.values_list("version", "digest").first()
    return Known(*row) if row else None


def _is_another(intent: Intent, listed: messages.InstalledBackend | None) -> bool:
    before = intent.known
    return listed is not None and before is not None and Known(listed.version, listed.digest) != before


async def _delete(bus: Bus, intent: Intent, timeout: float, say: OnProgress) -> Outcome[messages.DeleteReply]:
    worker = Worker(bus, str(intent.node.id), intent.node.name, intent.node.instance)
    return await _stopping(bus, intent.node, lambda: worker.delete(intent.row.backend, timeout=timeout))


async def _deleted(
    bus: Bus, intent: Intent, answer: Done[messages.DeleteReply] | Refused[messages.DeleteReply]
) -> Ended:
    """Where the backend is not, it is deleted: an attempt that was cut off may have done it (A83)."""
    present = isinstance(answer, Refused) and await _is_there(bus, intent)
    await inventory.refresh(bus, intent.node)
    if isinstance(answer, Refused) and present:
        return Ended(error=answer.reason)
    return Ended(reason="removed" if isinstance(answer, Done) else "was not installed")


async def _is_there(bus: Bus, intent: Intent) -> bool:
    found = await Worker(bus, str(intent.node.id), intent.node.name, intent.node.instance).contact()
    if not isinstance(found, Done):
        raise Unclear(f"node {intent.node.name} does not say what is installed")
    return one_node.listed(intent.row.backend, found.reply) is not None


def _check(found: messages.InstalledBackend | None, backend: str, node: BackendNode) -> None:
    """Raises CommandFailed where an upgrade would stop engines for nothing."""
    if found is None:
        raise CommandFailed(f"{backend} is not installed on {node.name}")
    if found.is_system:
        raise CommandFailed(f"{backend} came with the machine of {node.name} and is not upgraded")
    if found.uri and not found.gallery_url and not found.version:
        raise CommandFailed(
            f"{backend} was installed on {node.name} by its address; install it from there again"
        )


async def _stopping(bus: Bus, node: BackendNode, command: Callable[[], Awaitable[Outcome[R]]]) -> Outcome[R]:
    """The outcome of a command that stops engines, after their rows are gone."""
    before = await in_thread(retire.of_node, node.id)
    outcome = await command()
    if isinstance(outcome, Done | Refused):
        keys = outcome.reply.stopped_process_keys if outcome.reply.reports_stopped_processes else ()
        gone = await in_thread(retire.retire_stopped, node.id, keys, among=before) if keys else []
        if gone:
            log.info("node %s stopped %s", node.name, ", ".join(gone))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(inventory.QUICK):
                await inventory.compare_replicas(bus, node.id, node.name)
    return outcome


UPGRADE = Command(lambda: conf.cluster().upgrade_timeout, _upgrade, _upgraded, _is_another)
DELETE = Command(lambda: DELETE_TIMEOUT, _delete, _deleted, lambda intent, listed: listed is None)
