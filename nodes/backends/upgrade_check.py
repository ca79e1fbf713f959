"""A controller's part of the upgrade check (R6.35): read what the galleries offer for the installed backends.

It runs ten seconds after a controller starts, on a schedule, on request, when a node's list of backends has
changed, and when a page finds that a gallery has changed. Each check reads the galleries again (A87), and the
digests of images from their registries, to detect moved tags (R6.34). Only manifests are read, with limits on
time and bytes. No lock is held meanwhile; one transaction stores the result. Readers compare it with the
installed backends (`installed.py`).

Automatic upgrades follow each check (O103): `system` upgrades each backend that has a newer offer, if
`LOCALAI_AUTO_UPGRADE_BACKENDS` is set. The upgrades of a completed check are retried until every backend was
processed, also after the death of a controller. One transaction under the backend's lock writes the operation
and the list of decided nodes, so no node gets two operations. Each node is decided once for each offered
build: afterwards operators handle failures and nodes that need a human decision. Absent nodes are named
without a decision; the first check after their return decides.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from uuid import UUID

import httpx
from django.db import Error as DatabaseError
from django.db import transaction

from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.kit import clock, conf, errors
from localai_cluster.kit.names import to_single_line
from localai_cluster.kit.outbound import SourceError
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.kit.transactions import lock_name
from localai_cluster.registries import references
from localai_cluster.registries.access import Access, default_config
from localai_cluster.registries.client import Registries
from nodes.backends import catalogue, installed, node_commands, upgrade_state
from nodes.backends.admission import admit
from nodes.backends.backend_requests import KINDS, UPGRADE, BackendRequest, ExcludedNode, RequestScope
from nodes.backends.installed import Build, InstalledBackend, Offered, Upgrade, behind, is_image, upgrades
from nodes.backends.waves import Options
from nodes.models import BackendNode, BackendOffer, NodeBackend
from nodes.replicas import drains
from operations.executor.work import in_thread
from operations.ledger.admission import Requester
from operations.models import Operation

log = logging.getLogger(__name__)


class Verdict(Enum):
    """The decision about a node."""

    NOTHING = auto()
    UPGRADE = auto()
    AWAY = auto()
    """The node needs the upgrade, but its worker takes no commands now."""
    LAST_REPLICA = auto()
    """An upgrade would leave a model without a replica: an operator decides."""


@dataclass(frozen=True)
class BackendOnNode:
    """The backend on one node. `last_of`: the models whose last replica runs on the node."""

    id: UUID
    name: str
    status: str
    build: Build
    last_of: tuple[str, ...] = ()
    from_address: bool = False
    """True if installed from an address: a gallery's build would be different software."""
    decided: bool = False
    """True if an earlier automatic upgrade to the same offer has decided about the node."""


def identity(offer: Offered) -> str:
    """Return the version of the offer or its first digest; "" if it has neither."""
    return offer.version or "".join(offer.digests[:1])


def verdict(on_node: BackendOnNode, offer: Offered) -> Verdict:
    """Return the first verdict that applies to the node, in the order of the checks."""
    if on_node.decided or on_node.from_address or not behind(on_node.build, offer):
        return Verdict.NOTHING
    if on_node.status != "healthy":
        return Verdict.AWAY
    return Verdict.LAST_REPLICA if on_node.last_of else Verdict.UPGRADE


@dataclass(frozen=True)
class UpgradePlan:
    """The nodes on which a backend is outdated."""

    upgrade: tuple[BackendOnNode, ...] = ()
    """Nodes to upgrade now."""
    last_replica: tuple[BackendOnNode, ...] = ()
    """Nodes with the last replica of a model: an operator decides."""
    away: tuple[BackendOnNode, ...] = ()
    """Nodes whose worker takes no commands now."""

    @property
    def decided(self) -> tuple[BackendOnNode, ...]:
        """The nodes that need no further decision for the same offer."""
        return (*self.upgrade, *self.last_replica)


def plan(backends_on_nodes: Iterable[BackendOnNode], offer: Offered) -> UpgradePlan:
    """Return which nodes to upgrade to the offer, and which need it but are left out, by the reason.

    A node that has the offered build, or about which an earlier upgrade has decided, is in no group.
    """
    backends_by_verdict: dict[Verdict, list[BackendOnNode]] = {key: [] for key in Verdict}
    for on_node in backends_on_nodes:
        backends_by_verdict[verdict(on_node, offer)].append(on_node)
    upgrade, last_replica, away = Verdict.UPGRADE, Verdict.LAST_REPLICA, Verdict.AWAY
    return UpgradePlan(*(tuple(backends_by_verdict[key]) for key in (upgrade, last_replica, away)))


ACTOR = "system"


def follow(*, now: datetime) -> list[Operation]:
    """Create the automatic upgrades for completed checks; a few queries if there are none.

    A backend with an active operation is retried at the next call.
    """
    check = upgrade_state.read_state()
    if check.processed >= check.completed:
        return []
    created, has_remaining = [], False
    offers = upgrade_state.offers()
    for upgrade in upgrades(installed.read(), offers):
        try:
            operation = _upgrade(upgrade.backend, offers[folded(upgrade.backend.name)], now)
        except errors.ClusterError as refusal:
            log.info("automatic upgrade of %s: not now: %s", upgrade.backend.name, refusal.message)
            has_remaining = True
            continue
        if operation is not None:
            created.append(operation)
    if not has_remaining:
        upgrade_state.record_processed(check.completed)
    return created


def _upgrade(backend: InstalledBackend, offer: Offered, now: datetime) -> Operation | None:
    """Create the operation for this backend; return None if no node must be upgraded or named.

    Raise Conflict and NotFound.
    """
    name = backend.name
    with transaction.atomic():
        lock_name(name)
        row = BackendOffer.objects.select_for_update(no_key=True).filter(pk=folded(name)).first()
        if row is None or upgrade_state.offer_of(row) != offer:
            return None  # a later check has changed the offer, and is followed next
        nodes = _upgradable_nodes(backend)
        upgrade_plan = plan(_backends_on_nodes(backend, nodes, row, offer), offer)
        if not upgrade_plan.decided:
            return None
        active = Operation.objects.active().filter(kind__in=KINDS, payload__backend__iexact=name).first()
        if active is not None:
            raise errors.Conflict(f"{active.kind} has not ended (operation {active.id})")
        _record_decided(row, offer, upgrade_plan)
        operation = admit(BackendRequest(UPGRADE, name), _scope(upgrade_plan, nodes), now=now).operation
    log.info("automatic upgrade of %s to %s: operation %s", name, identity(offer), operation.id)
    return operation


def _upgradable_nodes(backend: InstalledBackend) -> dict[str, BackendNode]:
    """Return the nodes whose installs of the backend can be upgraded, by id."""
    ids = [on_node.node["node_id"] for on_node in backend.removable]
    nodes = BackendNode.objects.filter(pk__in=ids, node_type="backend", approved_at__isnull=False)
    return {str(node.id): node for node in nodes.order_by("name")}


def _backends_on_nodes(
    backend: InstalledBackend, nodes: Mapping[str, BackendNode], row: BackendOffer, offer: Offered
) -> list[BackendOnNode]:
    last_replicas = drains.last_replicas(backend.name, [node.id for node in nodes.values()])
    decided = set(row.automatic_nodes) if row.automatic_to == identity(offer) else set()
    places_by_node = {str(on_node.node["node_id"]): on_node for on_node in backend.removable}
    return [
        BackendOnNode(
            node.id,
            node.name,
            node.status,
            places_by_node[id].build,
            last_of=tuple(sorted(last_replicas.get(node.id, ()))),
            from_address=bool(places_by_node[id].node.get("uri")) and not places_by_node[id].gallery_url,
            decided=id in decided,
        )
        for id, node in nodes.items()
    ]


def _record_decided(row: BackendOffer, offer: Offered, upgrade_plan: UpgradePlan) -> None:
    before = row.automatic_nodes if row.automatic_to == identity(offer) else []
    row.automatic_to = identity(offer)
    row.automatic_nodes = [*before, *(str(on_node.id) for on_node in upgrade_plan.decided)]
    row.save(update_fields=["automatic_to", "automatic_nodes"])


def _scope(upgrade_plan: UpgradePlan, nodes: Mapping[str, BackendNode]) -> RequestScope:
    """Return an upgrade in waves by `system`; each excluded node gets a target with the reason."""
    last = [
        ExcludedNode(nodes[str(on_node.id)], _last_replica_reason(on_node), fails=True)
        for on_node in upgrade_plan.last_replica
    ]
    reason = "left out: {0.name} is {0.status}; a check after its return upgrades it"
    away = [ExcludedNode(nodes[str(on_node.id)], reason.format(on_node)) for on_node in upgrade_plan.away]
    return RequestScope(
        [nodes[str(on_node.id)] for on_node in upgrade_plan.upgrade],
        by=Requester(ACTOR),
        waves=Options(),
        left_out=[*last, *away],
    )


def _last_replica_reason(on_node: BackendOnNode) -> str:
    models = ", ".join(on_node.last_of)
    return (
        f"skipped: {on_node.name} serves the last replica of {models}. Load it on another node, or upgrade"
        f" {on_node.name} by hand and confirm that it may stop"
    )


IMAGE_LIMIT = 10.0
"""Time limit in seconds for the digests of one image, including the token of its registry."""
ALL_IMAGES_LIMIT = 30.0
"""Time limit in seconds for the digests of all images."""
PARALLEL_IMAGES = 8
MOST = 200
"""Maximum number of images whose digests one check reads."""


async def image_digests(uris: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the digests of each image by URI: first of the image, then of its builds for single platforms.

    Workers record the digest of a build. Images that cannot be read are left out and logged. Never raise, and
    never take longer than `ALL_IMAGES_LIMIT`.
    """
    unique_uris, settings = sorted(set(uris)), conf.cluster()
    if len(unique_uris) > MOST:
        log.warning("upgrade check: the digests of %d images are left out", len(unique_uris) - MOST)
    digests_by_uri: dict[str, tuple[str, ...]] = {}
    semaphore = asyncio.Semaphore(PARALLEL_IMAGES)

    async def read(uri: str, registries: Registries) -> None:
        async with semaphore:
            try:
                async with asyncio.timeout(IMAGE_LIMIT):
                    digests_by_uri[uri] = await _digests(uri, registries)
            except (SourceError, TimeoutError) as error:
                log.warning("upgrade check: image %s: %s", uri, str(error) or type(error).__name__)
            except Exception:
                # A defect in reading one image must not lose the check of the others.
                log.exception("upgrade check: image %s", uri)

    try:
        async with (
            asyncio.timeout(ALL_IMAGES_LIMIT),
            httpx.AsyncClient(timeout=IMAGE_LIMIT, verify=settings.registry_ca or True) as client,
        ):
            access = Access(settings.registries, settings.registry_config or default_config())
            registries = Registries(client, access)
            await asyncio.gather(*(read(uri, registries) for uri in unique_uris[:MOST]))
    except TimeoutError:
        log.warning(
            "upgrade check: %d images were not looked at in time",
            len(unique_uris[:MOST]) - len(digests_by_uri),
        )
    return digests_by_uri


async def _digests(uri: str, registries: Registries) -> tuple[str, ...]:
    reference = references.parse(uri)
    if reference is None:
        raise SourceError("not the reference of an image")
    return await registries.digests(reference)


FIRST_CHECK_DELAY = 10.0
"""Seconds from the start of a controller until it requests a check (C47)."""
POLL_SECONDS = 30.0
"""Seconds between two polls for a due check when no wake-up arrives."""
CHECK_PAUSE = 2.0
"""Seconds between two checks; an operation on a thousand nodes requests a thousand checks."""
CHECK_LIMIT = 120.0
"""Time limit of a check in seconds; well within its claim."""
_WAKE_UP_GATHER_SECONDS = 0.2


@dataclass(frozen=True)
class UpgradeOverview:
    """Snapshot of the installed backends and their upgrades."""

    backends: list[installed.InstalledBackend]
    upgrades: dict[str, Upgrade]


def read_overview() -> UpgradeOverview:
    """Read the installed backends and compare them with the offers; two queries."""
    backends = installed.read()
    available = upgrades(backends, upgrade_state.offers())
    return UpgradeOverview(backends, {upgrade.backend.name: upgrade for upgrade in available})


def offered(entries: Collection[GalleryEntry], names: Collection[str]) -> dict[str, Offered]:
    """Return the offers by case-folded name; the first entry of a name counts, as for an install."""
    offers: dict[str, Offered] = {}
    for entry in entries:
        if (name := folded(entry.name)) in names:
            offers.setdefault(
                name, Offered(to_single_line(entry.version[:255]), to_single_line(entry.uri[:2048]))
            )
    return offers


async def read_offers() -> tuple[dict[str, Offered], Mapping[str, str], str]:
    """Return offers for the installed backends, unreadable galleries, and the catalogue's fingerprint.

    An image that cannot be read keeps the digests of the last check that could read it.
    """
    readings = await catalogue.read_all(node_commands.galleries())
    offer = await in_thread(catalogue.combine, readings, now=clock.now())
    offers = offered(offer.builds, await in_thread(_installed_names))
    image_uris = [entry.uri for entry in offers.values() if not entry.version and is_image(entry.uri)]
    digests_by_uri: dict[str, tuple[str, ...]] = {}
    if image_uris:
        known_offers = await in_thread(upgrade_state.offers)
        digests_by_uri = {known.uri: known.digests for known in known_offers.values()}
        digests_by_uri |= await image_digests(image_uris)
    with_digests = {
        name: Offered(entry.version, entry.uri, digests_by_uri.get(entry.uri, ()))
        for name, entry in offers.items()
    }
    return with_digests, offer.problems, offer.fingerprint


def _installed_names() -> set[str]:
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False, is_system=False).order_by()
    return {folded(name) for name in rows.values_list("name", flat=True).distinct()}


class UpgradeChecker(PeriodicTask):
    """Makes the due checks; a claim assigns each check to one controller."""

    def __init__(
        self, owner: str, *, first_after: float = FIRST_CHECK_DELAY, rest: float = CHECK_PAUSE
    ) -> None:
        super().__init__(
            "upgrade check", self._check_and_follow, interval=POLL_SECONDS, gather=_WAKE_UP_GATHER_SECONDS
        )
        self._owner = owner
        self._first_after, self._rest = first_after, rest

    async def run(self) -> None:
        """Poll after each wake-up and every `POLL_SECONDS` seconds, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._request_first_check())
            await super().run()

    async def _check_and_follow(self) -> None:
        done = await self.check()
        await self.follow()
        if done:
            await asyncio.sleep(self._rest)

    async def _request_first_check(self) -> None:
        await asyncio.sleep(self._first_after)
        with contextlib.suppress(DatabaseError):
            await in_thread(upgrade_state.request_check)

    async def check(self) -> bool:
        """Make the check that is due; return True if a check was due. Never raise."""
        try:
            claim = await in_thread(upgrade_state.claim, self._owner, now=clock.now())
            if claim is None:
                return False
            offers, problems, galleries = await self._read_offers_in_time()
            is_stored = await in_thread(
                upgrade_state.finish, claim, offers, problems=problems, galleries=galleries, now=clock.now()
            )
            if not is_stored:
                log.warning("the upgrade check took too long; another controller makes it")
            return True
        except DatabaseError as error:
            log.warning("the upgrade check is left out: %s", error)
            return False

    async def follow(self) -> None:
        """Create the automatic upgrades after the checks if the setting is on. Never raise."""
        if not conf.cluster().auto_upgrade_backends:
            return
        try:
            await in_thread(follow, now=clock.now())
        except DatabaseError as error:
            log.warning("automatic upgrades are left out: %s", error)
        except Exception:
            # A defect. It must not end the checks; the next poll retries them.
            log.exception("automatic upgrades failed")

    @staticmethod
    async def _read_offers_in_time() -> tuple[dict[str, Offered], Mapping[str, str], str]:
        try:
            async with asyncio.timeout(CHECK_LIMIT):
                return await read_offers()
        except TimeoutError:
            return {}, {"": f"the check took longer than {CHECK_LIMIT:.0f} s"}, ""
        except DatabaseError:
            raise
        except Exception:
            # A defect. Without this the check would stay due and fail without a pause.
            log.exception("the upgrade check failed")
            return {}, {"": "internal error; the controller's log has details"}, ""
