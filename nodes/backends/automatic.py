"""Automatic upgrades (O103): after a check, `system` upgrades each backend that has a newer offer.

Off unless `LOCALAI_AUTO_UPGRADE_BACKENDS` is set. All state is in rows: a completed check is followed until
every backend was processed, so a controller that dies in between loses nothing. One transaction under the
backend's lock writes the operation and the list of nodes that it has decided about, so no node gets two.

Each node is decided once for each build that the galleries offer: failures, and nodes that need a human
decision, are left to operators from then on. Nodes that are away are named and not decided; the first check
after their return decides about them.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from uuid import UUID

from django.db import transaction

from localai_cluster.gallery_index import folded
from localai_cluster.kit import errors
from localai_cluster.kit.locks import stand_in_line
from nodes.backends import installed, upgrade_state
from nodes.backends.admission import admit
from nodes.backends.backend_requests import KINDS, UPGRADE, BackendRequest, ExcludedNode, RequestScope
from nodes.backends.installed import Build, InstalledBackend, Offered, behind, upgrades
from nodes.backends.waves import Options
from nodes.models import BackendNode, BackendOffer
from nodes.replicas import drains
from operations.models import Operation


class Verdict(Enum):
    """The decision about a node."""

    NOTHING = auto()
    UPGRADE = auto()
    AWAY = auto()
    """It needs the upgrade, but its worker takes no commands now."""
    LAST_REPLICA = auto()
    """An upgrade would leave a model without a replica: an operator decides."""


@dataclass(frozen=True)
class BackendPlace:
    """The backend on one node. `last_of`: the models whose last replica the node serves."""

    id: UUID
    name: str
    status: str
    build: Build
    last_of: tuple[str, ...] = ()
    from_address: bool = False
    """Installed from an address, not from a gallery: a gallery's build would be different software."""
    decided: bool = False
    """True if an earlier automatic upgrade to this offer has decided about the node."""


def identity(offer: Offered) -> str:
    """Return the version of the offer or its first digest; "" if it has neither."""
    return offer.version or "".join(offer.digests[:1])


def verdict(place: BackendPlace, offer: Offered) -> Verdict:
    """Return the first verdict of the table that applies."""
    if place.decided or place.from_address or not behind(place.build, offer):
        return Verdict.NOTHING
    if place.status != "healthy":
        return Verdict.AWAY
    return Verdict.LAST_REPLICA if place.last_of else Verdict.UPGRADE


@dataclass(frozen=True)
class UpgradePlan:
    """The nodes by their verdict."""

    upgrade: tuple[BackendPlace, ...] = ()
    last_replica: tuple[BackendPlace, ...] = ()
    away: tuple[BackendPlace, ...] = ()

    @property
    def decided(self) -> tuple[BackendPlace, ...]:
        """The nodes that need no other decision for the same offer."""
        return (*self.upgrade, *self.last_replica)


def plan(places: Iterable[BackendPlace], offer: Offered) -> UpgradePlan:
    """Group the nodes by their verdict."""
    places_by_verdict: dict[Verdict, list[BackendPlace]] = {key: [] for key in Verdict}
    for place in places:
        places_by_verdict[verdict(place, offer)].append(place)
    upgrade, last_replica, away = Verdict.UPGRADE, Verdict.LAST_REPLICA, Verdict.AWAY
    return UpgradePlan(*(tuple(places_by_verdict[key]) for key in (upgrade, last_replica, away)))


log = logging.getLogger(__name__)

ACTOR = "system"


def follow(*, now: datetime) -> list[Operation]:
    """Create the operations for the checks that were not followed yet; a few queries if there are none.

    A backend with an active operation is retried at the next call.
    """
    check = upgrade_state.standing()
    if check.followed >= check.answered:
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
        upgrade_state.followed(check.answered)
    return created


def _upgrade(backend: InstalledBackend, offer: Offered, now: datetime) -> Operation | None:
    """Return the new operation for this backend; None if no node has to be upgraded or named.

    Raise Conflict and NotFound.
    """
    name = backend.name
    with transaction.atomic():
        stand_in_line(name)
        row = BackendOffer.objects.select_for_update(no_key=True).filter(pk=folded(name)).first()
        if row is None or upgrade_state.offer_of(row) != offer:
            return None  # a later check has changed the offer, and is followed next
        nodes = _upgradable_nodes(backend)
        upgrade_plan = plan(_places(backend, nodes, row, offer), offer)
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
    """Return the nodes that can be upgraded at all, by id."""
    ids = [place.node["node_id"] for place in backend.removable]
    nodes = BackendNode.objects.filter(pk__in=ids, node_type="backend", approved_at__isnull=False)
    return {str(node.id): node for node in nodes.order_by("name")}


def _places(
    backend: InstalledBackend, nodes: Mapping[str, BackendNode], row: BackendOffer, offer: Offered
) -> list[BackendPlace]:
    last_replicas = drains.last_replicas(backend.name, [node.id for node in nodes.values()])
    decided = set(row.automatic_nodes) if row.automatic_to == identity(offer) else set()
    places_by_node = {str(place.node["node_id"]): place for place in backend.removable}
    return [
        BackendPlace(
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
    row.automatic_nodes = [*before, *(str(place.id) for place in upgrade_plan.decided)]
    row.save(update_fields=["automatic_to", "automatic_nodes"])


def _scope(upgrade_plan: UpgradePlan, nodes: Mapping[str, BackendNode]) -> RequestScope:
    """Return an upgrade in waves by `system`; each node that is left out gets a target with the reason."""
    last = [
        ExcludedNode(nodes[str(place.id)], _last_replica_reason(place), fails=True)
        for place in upgrade_plan.last_replica
    ]
    away = [ExcludedNode(nodes[str(place.id)], _away_reason(place)) for place in upgrade_plan.away]
    return RequestScope(
        [nodes[str(place.id)] for place in upgrade_plan.upgrade],
        actor=ACTOR,
        waves=Options(),
        left_out=[*last, *away],
    )


def _last_replica_reason(place: BackendPlace) -> str:
    models = ", ".join(place.last_of)
    return (
        f"skipped: {place.name} serves the last replica of {models}. Load it on another node, or upgrade"
        f" {place.name} by hand and confirm that it may stop"
    )


def _away_reason(place: BackendPlace) -> str:
    return f"left out: {place.name} is {place.status}; a check after its return upgrades it"
