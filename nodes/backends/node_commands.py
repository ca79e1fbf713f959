"""Commands on one backend of one node: install, upgrade and delete, with the steps and the progress of each.

This module also selects the galleries for a node (`offered_to`), for upgrades and loads too.

Upgrade and deletion stop the backend's engines first. After every reply, also a refusal, the rows of the
engines that the worker reports as stopped are removed: their ports may serve another model soon. A report may
be lost with its controller, and some workers send none, so the queue also compares the rows with the worker's
running engines after each attempt. Both commands are idempotent.
"""

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from localai_cluster import gallery_index
from localai_cluster.kit import addresses, conf, names
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.messages import decode_galleries, encode_galleries
from nodes.backends import inventory
from nodes.backends.installed import Build, is_from_address
from nodes.backends.intents import Ended, Intent
from nodes.commands.commands import DELETE_TIMEOUT, Worker
from nodes.commands.outcomes import CommandFailed, Done, NotSent, Outcome, Refused, StillRunning
from nodes.commands.shared_commands import OnProgress
from nodes.models import BackendNode, NodeBackend
from nodes.replicas import engines
from operations.executor.work import in_thread
from operations.ledger.progress import Tick

_MAX_NAME_LENGTH = 255
_MAX_LABEL_LENGTH = 512
_MAX_BYTES = 2**62
_PROGRESS_PHASES = frozenset({"resolving", "downloading", "extracting", "starting"})
"""The phases of `contract/nats.md` §4.3; other texts in this field are no phases."""


@dataclass(frozen=True)
class Command:
    """The functions that execute one kind of intent."""

    limit: Callable[[], float]
    """Returns the seconds after which a worker that has not answered may be stuck."""
    send: Callable[[Bus, Intent, float, OnProgress], Coroutine[Any, Any, Outcome[Any]]]
    """Sends the command and waits for its reply, for the given seconds; raises CommandFailed."""
    conclude: Callable[[Bus, Intent, Done[Any] | Refused[Any]], Awaitable[Ended]]
    """Converts the worker's reply to the end of the intent. May send requests; raises Unclear."""
    is_proven: Callable[[Intent, messages.InstalledBackend | None], bool]
    """Returns True if the worker's list proves that the command was executed."""


class Unclear(Exception):
    """The worker's reply does not determine the result, and a second request did not either; retry later."""


def key(node_id: UUID | str, backend: str) -> str:
    """O35: return the key of an operation on one backend of one node; a long address is hashed."""
    return f"node:{node_id}:{subject(backend)}"


def subject(backend: str) -> str:
    """Return the backend's name, or its address as a name; a long address is hashed."""
    return backend if len(backend) <= _MAX_NAME_LENGTH else hashlib.sha256(backend.encode()).hexdigest()


def refusal(node: BackendNode) -> str:
    """Return why the node takes no commands on backends; "" if it takes commands."""
    if node.node_type != "backend":
        return f"{node.name} is an agent node, which does not run backends"
    if node.status == "pending":
        return f"node {node.name} is pending approval"
    # An admin's drain stays while the node is offline; a worker's own drain ends when it returns.
    if node.status == "draining" or (node.drained_at is not None and not node.drain_is_own):
        return f"node {node.name} is draining"
    return ""


def listed(backend: str, reply: messages.ListReply) -> messages.InstalledBackend | None:
    """Return the entry of a backend in the list, by name or, if no entry has the name, by alias."""
    folded_name = backend.lower()
    by_name = (entry for entry in reply.backends if entry.name.lower() == folded_name)
    by_alias = (entry for entry in reply.backends if entry.alias.lower() == folded_name)
    return next(by_name, None) or next(by_alias, None)


def tick(node: BackendNode, event: messages.ProgressEvent) -> Tick:
    """Convert a worker's progress report to the form of operations.

    A worker's numbers and texts are untrusted, so they are bounded.
    """
    total = max(event.total_bytes, 0)
    current = min(max(event.current_bytes, 0), total or _MAX_BYTES)
    file_name = names.to_single_line(event.file_name[:_MAX_LABEL_LENGTH])
    return Tick(
        phase=event.phase if event.phase in _PROGRESS_PHASES else "downloading",
        message=file_name or f"downloading to {node.name}",
        current_bytes=current,
        total_bytes=total,
        percentage=100 * current / total if total else min(max(event.percentage, 0.0), 100.0),
        file_name=file_name,
        node_id=node.id,
        node_name=node.name,
    )


def galleries() -> list[messages.Gallery]:
    """Return the configured galleries of this cluster."""
    return list(decode_galleries(json.dumps(conf.cluster().galleries)))


@dataclass(frozen=True)
class GalleryOffer:
    """The galleries that are sent to one node, and why other galleries are withheld."""

    galleries: tuple[messages.Gallery, ...] = ()
    withheld: tuple[str, ...] = ()

    @property
    def encoded(self) -> str:
        """JSON of `backend_galleries`; "" for the worker's own galleries (`contract/nats.md` §4.1)."""
        return encode_galleries(self.galleries) if self.galleries else ""

    def explained(self, reason: str) -> str:
        """Return the reason of a failure with the reasons for withheld galleries appended."""
        return "; ".join((reason, *self.withheld))


def offer(listed: Sequence[messages.Gallery], *, same_machine: bool, own_identity: bool) -> GalleryOffer:
    """Select the galleries that a node can read.

    `same_machine`: the worker can read our files. `own_identity`: the node has a secret, which `cluster:`
    needs.
    """
    sent, withheld = [], []
    for gallery in listed:
        name = gallery.name or gallery_index.public_url(gallery.url)
        if gallery.url.startswith(gallery_index.CLUSTER_PREFIX) and not own_identity:
            withheld.append(f"gallery {name} was not sent, because the node has no secret of its own")
        elif gallery_index.local_path(gallery.url) is not None and not same_machine:
            withheld.append(
                f"gallery {name} was not sent, because it is a file of the server and the node is another"
                " machine"
            )
        else:
            sent.append(gallery)
    return GalleryOffer(tuple(sent), tuple(withheld))


def offered_to(node: BackendNode) -> GalleryOffer:
    """Select the galleries of this cluster for one node."""
    return offer(
        galleries(),
        same_machine=is_loopback(node.source_address),
        own_identity=bool(node.fingerprint) and not node.weak_identity,
    )


def is_loopback(address: str) -> bool:
    """Return True if a node that registered from this address runs on the server's own machine."""
    return addresses.is_ip_address(address) and addresses.is_loopback(address)


async def _send(
    bus: Bus, intent: Intent, timeout: float, report: OnProgress
) -> Outcome[messages.InstallReply]:
    row = intent.row
    nameless = row.uri and not row.name and row.backend == subject(row.uri)
    request = messages.InstallRequest(
        backend="" if nameless else f"{row.gallery}@{row.backend}" if row.gallery else row.backend,
        backend_galleries=row.galleries or offered_to(intent.node).encoded,
        uri=row.uri,
        name=row.name,
        alias=row.alias,
        force=row.force,
        op_id=str(row.operation_id),
        install_only=True,
    )
    node = intent.node
    worker = Worker(bus, str(node.id), node.name, node.instance)
    return await worker.install(request, timeout=timeout, on_progress=report)


async def _conclude(
    bus: Bus, intent: Intent, answer: Done[messages.InstallReply] | Refused[messages.InstallReply]
) -> Ended:
    if isinstance(answer, Refused):
        # An admin who specifies galleries knows which ones that worker can read.
        offered = GalleryOffer() if intent.row.galleries else offered_to(intent.node)
        return Ended(error=offered.explained(answer.reason))
    # Before the operation ends: a page that is notified of its end finds the backend in the list.
    await inventory.refresh(bus, intent.node)
    return Ended()


def _is_result_proven(intent: Intent, listed: messages.InstalledBackend | None) -> bool:
    return listed is not None and intent.listed_build is None and not intent.row.force


COMMAND = Command(lambda: conf.cluster().install_timeout, _send, _conclude, _is_result_proven)


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
        _refuse_useless_upgrade(listed(backend, contact.reply), backend, node)
    request = messages.UpgradeRequest(
        backend=backend,
        backend_galleries=offered_to(node).encoded,
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
        return Ended(error=offered_to(intent.node).explained(answer.reason))
    current = await in_thread(_stored_version, intent)
    # A folder has no digest, and a stock worker may report none: then the comparison is impossible.
    if not listed or current is None or not current.digest or current != intent.listed_build:
        return Ended()
    return Ended(reason=f"nothing changed: {current.version or 'the same files'} was installed before")


def _stored_version(intent: Intent) -> Build | None:
    rows = NodeBackend.objects.filter(node=intent.node, name=intent.row.backend)
    row = rows.values_list("version", "digest").first()
    return Build(*row) if row else None


def _has_new_version(intent: Intent, listed: messages.InstalledBackend | None) -> bool:
    before = intent.listed_build
    return listed is not None and before is not None and Build(listed.version, listed.digest) != before


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
    return listed(intent.row.backend, contact.reply) is not None


def _refuse_useless_upgrade(entry: messages.InstalledBackend | None, backend: str, node: BackendNode) -> None:
    """Raise CommandFailed if the upgrade would stop engines without an effect."""
    if entry is None:
        raise CommandFailed(f"{backend} is not installed on {node.name}")
    if entry.is_system:
        raise CommandFailed(f"{backend} came with the machine of {node.name} and is not upgraded")
    if is_from_address(entry.uri, entry.gallery_url, entry.version):
        raise CommandFailed(
            f"{backend} was installed on {node.name} by its address; install it from there again"
        )


async def _run_and_retire(
    bus: Bus, node: BackendNode, command: Callable[[], Awaitable[Outcome[R]]]
) -> Outcome[R]:
    """Run a command that stops engines; remove the rows of these engines and return the outcome."""
    before = await in_thread(engines.engine_ids, node.id)
    outcome = await command()
    if isinstance(outcome, Done | Refused):
        keys = outcome.reply.stopped_process_keys if outcome.reply.reports_stopped_processes else ()
        retired = await in_thread(engines.end_stopped, node.id, keys, among=before) if keys else []
        if retired:
            log.info("node %s stopped %s", node.name, ", ".join(retired))
    return outcome


UPGRADE = Command(lambda: conf.cluster().upgrade_timeout, _send_upgrade, _conclude_upgrade, _has_new_version)
DELETE = Command(
    lambda: DELETE_TIMEOUT, _send_delete, _conclude_delete, lambda intent, listed: listed is None
)
