"""Upgrade and deletion of a backend on one node: both stop its engines first.

The rows of the engines that a worker reports as stopped are removed after every reply, also after a refusal:
their ports may serve another model soon. A report may be lost with its controller, and some workers send
none, so the rows are compared with the worker's running engines as well. Both commands are idempotent.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from localai_cluster.kit import conf
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from nodes.backends import install, inventory, node_commands
from nodes.backends.intents import Ended, Intent, Known
from nodes.backends.node_commands import Command, Unclear
from nodes.commands.commands import DELETE_TIMEOUT, Worker
from nodes.commands.outcomes import CommandFailed, Done, NotSent, Outcome, Refused, StillRunning
from nodes.commands.shared_commands import OnProgress
from nodes.models import BackendNode, NodeBackend
from nodes.replicas import engine_ends
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

R = TypeVar("R", bound=messages.UpgradeReply)


async def _send_upgrade(
    bus: Bus, intent: Intent, timeout: float, report: OnProgress
) -> Outcome[messages.UpgradeReply]:
    node, backend = intent.node, intent.row.backend
    worker = Worker(bus, str(node.id), node.name, node.instance)
    contact = await worker.contact()
    if isinstance(contact, Refused):
        return Refused(contact.reason, messages.UpgradeReply(error=contact.reason))
    if isinstance(contact, StillRunning):
        return NotSent(contact.reason)
    if not isinstance(contact, Done):
        return contact
    # A repeated upgrade may meet a half-finished backend; the worker reports the result of that.
    if intent.row.unanswered_since is None:
        _refuse_useless_upgrade(node_commands.listed(backend, contact.reply), backend, node)
    request = messages.UpgradeRequest(
        backend=backend,
        backend_galleries=install.offered_to(node).encoded,
        op_id=str(intent.row.operation_id),
    )
    return await _run_and_retire(
        bus, node, lambda: worker.upgrade(request, timeout=timeout, on_progress=report)
    )


async def _conclude_upgrade(
    bus: Bus, intent: Intent, answer: Done[messages.UpgradeReply] | Refused[messages.UpgradeReply]
) -> Ended:
    listed = await inventory.refresh(bus, intent.node)
    if isinstance(answer, Refused):
        return Ended(error=install.offered_to(intent.node).explained(answer.reason))
    current = await in_thread(_stored_version, intent)
    # A folder has no digest, and a stock worker may report none: then the comparison is impossible.
    if not listed or current is None or not current.digest or current != intent.known:
        return Ended()
    return Ended(reason=f"nothing changed: {current.version or 'the same files'} was installed before")


def _stored_version(intent: Intent) -> Known | None:
    rows = NodeBackend.objects.filter(node=intent.node, name=intent.row.backend)
    row = rows.values_list("version", "digest").first()
    return Known(*row) if row else None


def _has_new_version(intent: Intent, listed: messages.InstalledBackend | None) -> bool:
    before = intent.known
    return listed is not None and before is not None and Known(listed.version, listed.digest) != before


async def _send_delete(
    bus: Bus, intent: Intent, timeout: float, report: OnProgress
) -> Outcome[messages.DeleteReply]:
    worker = Worker(bus, str(intent.node.id), intent.node.name, intent.node.instance)
    return await _run_and_retire(bus, intent.node, lambda: worker.delete(intent.row.backend, timeout=timeout))


async def _conclude_delete(
    bus: Bus, intent: Intent, answer: Done[messages.DeleteReply] | Refused[messages.DeleteReply]
) -> Ended:
    """A missing backend counts as deleted: an interrupted attempt may have deleted it (A83)."""
    present = isinstance(answer, Refused) and await _is_installed(bus, intent)
    await inventory.refresh(bus, intent.node)
    if isinstance(answer, Refused) and present:
        return Ended(error=answer.reason)
    return Ended(reason="removed" if isinstance(answer, Done) else "was not installed")


async def _is_installed(bus: Bus, intent: Intent) -> bool:
    contact = await Worker(bus, str(intent.node.id), intent.node.name, intent.node.instance).contact()
    if not isinstance(contact, Done):
        raise Unclear(f"node {intent.node.name} does not say what is installed")
    return node_commands.listed(intent.row.backend, contact.reply) is not None


def _refuse_useless_upgrade(entry: messages.InstalledBackend | None, backend: str, node: BackendNode) -> None:
    """Raise CommandFailed if an upgrade would stop engines for nothing."""
    if entry is None:
        raise CommandFailed(f"{backend} is not installed on {node.name}")
    if entry.is_system:
        raise CommandFailed(f"{backend} came with the machine of {node.name} and is not upgraded")
    if entry.uri and not entry.gallery_url and not entry.version:
        raise CommandFailed(
            f"{backend} was installed on {node.name} by its address; install it from there again"
        )


async def _run_and_retire(
    bus: Bus, node: BackendNode, command: Callable[[], Awaitable[Outcome[R]]]
) -> Outcome[R]:
    """Run a command that stops engines; remove their rows and return its outcome."""
    before = await in_thread(engine_ends.engine_ids, node.id)
    outcome = await command()
    if isinstance(outcome, Done | Refused):
        keys = outcome.reply.stopped_process_keys if outcome.reply.reports_stopped_processes else ()
        retired = await in_thread(engine_ends.end_stopped, node.id, keys, among=before) if keys else []
        if retired:
            log.info("node %s stopped %s", node.name, ", ".join(retired))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(inventory.QUICK):
                await inventory.compare_replicas(bus, node.id, node.name)
    return outcome


UPGRADE = Command(lambda: conf.cluster().upgrade_timeout, _send_upgrade, _conclude_upgrade, _has_new_version)
DELETE = Command(
    lambda: DELETE_TIMEOUT, _send_delete, _conclude_delete, lambda intent, listed: listed is None
)
