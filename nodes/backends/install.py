"""Install: bring one backend's files to one node, with progress in bytes.

The galleries that a node gets are selected here too (`offered_to`), for upgrades and loads as well.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from localai_cluster import gallery_index
from localai_cluster.kit import conf
from localai_cluster.messaging import messages
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.codec import encode_galleries
from nodes.backends import inventory, node_commands
from nodes.backends.intents import Ended, Intent
from nodes.backends.node_commands import Command
from nodes.commands.commands import Worker
from nodes.commands.outcomes import Done, Outcome, Refused
from nodes.commands.shared_commands import OnProgress
from nodes.models import BackendNode


def galleries() -> list[messages.Gallery]:
    """Return the configured galleries of this cluster."""
    return [
        messages.Gallery(url=str(entry["url"]), name=str(entry.get("name", "")))
        for entry in conf.cluster().galleries
    ]


@dataclass(frozen=True)
class GalleryOffer:
    """The galleries that are sent to one node, and the reasons why others are withheld."""

    galleries: tuple[messages.Gallery, ...] = ()
    withheld: tuple[str, ...] = ()

    @property
    def encoded(self) -> str:
        """The field of an install request; "" = the worker's own galleries (`contract/nats.md` §4.1)."""
        return encode_galleries(self.galleries) if self.galleries else ""

    def explained(self, reason: str) -> str:
        """Append the reasons for withheld galleries to the reason of a failure."""
        return "; ".join((reason, *self.withheld))


def offer(listed: Sequence[messages.Gallery], *, same_machine: bool, own_identity: bool) -> GalleryOffer:
    """Select the galleries that a node can read.

    `same_machine`: its worker reads our files. `own_identity`: it has a secret, which `cluster:` needs.
    """
    sent, withheld = [], []
    for gallery in listed:
        name = gallery.name or gallery_index.public_url(gallery.url)
        if gallery.url.startswith(gallery_index.CLUSTER) and not own_identity:
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
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


async def _send(
    bus: Bus, intent: Intent, timeout: float, report: OnProgress
) -> Outcome[messages.InstallReply]:
    row = intent.row
    nameless = row.uri and not row.name and row.backend == node_commands.subject(row.uri)
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
    outcome = await worker.install(request, timeout=timeout, on_progress=report)
    if row.force and isinstance(outcome, Done | Refused):
        # The reply does not name the engines that the install stopped.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(inventory.QUICK):
                await inventory.compare_replicas(bus, node.id, node.name)
    return outcome


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


def _proven(intent: Intent, listed: messages.InstalledBackend | None) -> bool:
    return listed is not None and intent.known is None and not intent.row.force


COMMAND = Command(lambda: conf.cluster().install_timeout, _send, _conclude, _proven)
