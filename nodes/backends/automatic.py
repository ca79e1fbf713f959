"""Automatic upgrades (O103): after a check, an operation by `system` for each backend with something newer.

Off unless `LOCALAI_AUTO_UPGRADE_BACKENDS` is set. Nothing is kept but rows: a check that was answered is
followed until every backend had its turn, so a controller that dies in between loses nothing. The operation
and the note of the nodes it has decided about are one transaction in the backend's line: never two.
"""

import logging
from collections.abc import Mapping
from datetime import datetime

from django.db import transaction

from localai_cluster import errors
from localai_cluster.gallery_index import folded
from localai_cluster.locks import stand_in_line
from nodes.backends import installed, upgrade_state
from nodes.backends.admission import ask
from nodes.backends.automatic_rules import BackendPlace, UpgradePlan, identity, plan
from nodes.backends.installed import InstalledBackend
from nodes.backends.upgrade_rules import Offered, upgrades
from nodes.backends.wave_plan import Options
from nodes.backends.wishes import KINDS, UPGRADE, Asked, LeftOut, Wish
from nodes.models import BackendNode, BackendOffer
from nodes.replicas import upgrade_drains
from operations.models import Operation

log = logging.getLogger(__name__)

ACTOR = "system"


def follow(*, now: datetime) -> list[Operation]:
    """Makes the operations of the checks that were not followed yet; a few queries where there is nothing.

    A backend with work under way is left for the next look.
    """
    standing = upgrade_state.standing()
    if standing.followed >= standing.answered:
        return []
    made, left = [], False
    offers = upgrade_state.offers()
    for found in upgrades(installed.read(), offers):
        try:
            operation = _upgrade(found.backend, offers[folded(found.backend.name)], now)
        except errors.ClusterError as refusal:
            log.info("automatic upgrade of %s: not now: %s", found.backend.name, refusal.message)
            left = True
            continue
        if operation is not None:
            made.append(operation)
    if not left:
        upgrade_state.followed(standing.answered)
    return made


def _upgrade(backend: InstalledBackend, offer: Offered, now: datetime) -> Operation | None:
    """The operation for this backend, if there is anything to do or to say. Raises Conflict and NotFound."""
    name = backend.name
    with transaction.atomic():
        stand_in_line(name)
        row = BackendOffer.objects.select_for_update(no_key=True).filter(pk=folded(name)).first()
        if row is None or upgrade_state.offer_of(row) != offer:
            return None  # a later check has found something else, and is followed next
        nodes = _nodes(backend)
        wanted = plan(_places(backend, nodes, row, offer), offer)
        if not wanted.decided:
            return None
        active = Operation.objects.active().filter(kind__in=KINDS, payload__backend__iexact=name).first()
        if active is not None:
            raise errors.Conflict(f"{active.kind} has not ended (operation {active.id})")
        _note(row, offer, wanted)
        operation = ask(Wish(UPGRADE, name), _asked(wanted, nodes), now=now).operation
    log.info("automatic upgrade of %s to %s: operation %s", name, identity(offer), operation.id)
    return operation


def _nodes(backend: InstalledBackend) -> dict[str, BackendNode]:
    """Those that may ever be upgraded, by id."""
    ids = [place.node["node_id"] for place in backend.removable]
    found = BackendNode.objects.filter(pk__in=ids, node_type="backend", approved_at__isnull=False)
    return {str(node.id): node for node in found.order_by("name")}


def _places(
    backend: InstalledBackend, nodes: Mapping[str, BackendNode], row: BackendOffer, offer: Offered
) -> list[BackendPlace]:
    last = upgrade_drains.last_replicas(backend.name, [node.id for node in nodes.values()])
    decided = set(row.automatic_nodes) if row.automatic_to == identity(offer) else set()
    there = {str(place.node["node_id"]): place for place in backend.removable}
    return [
        BackendPlace(
            node.id,
            node.name,
            node.status,
            there[id].build,
            last_of=tuple(sorted(last.get(node.id, ()))),
            from_address=bool(there[id].node.get("uri")) and not there[id].gallery_url,
            decided=id in decided,
        )
        for id, node in nodes.items()
    ]


def _note(row: BackendOffer, offer: Offered, wanted: UpgradePlan) -> None:
    before = row.automatic_nodes if row.automatic_to == identity(offer) else []
    row.automatic_to = identity(offer)
    row.automatic_nodes = [*before, *(str(place.id) for place in wanted.decided)]
    row.save(update_fields=["automatic_to", "automatic_nodes"])


def _asked(wanted: UpgradePlan, nodes: Mapping[str, BackendNode]) -> Asked:
    """In waves, by `system`. Who is left out has a part that says why."""
    last = [LeftOut(nodes[str(one.id)], _why_last(one), fails=True) for one in wanted.last_replica]
    away = [LeftOut(nodes[str(one.id)], _why_away(one)) for one in wanted.away]
    return Asked(
        [nodes[str(one.id)] for one in wanted.upgrade],
        actor=ACTOR,
        waves=Options(),
        left_out=[*last, *away],
    )


def _why_last(place: BackendPlace) -> str:
    models = ", ".join(place.last_of)
    return (
        f"skipped: {place.name} serves the last replica of {models}. Load it on another node, or upgrade"
        f" {place.name} by hand and confirm that it may stop"
    )


def _why_away(place: BackendPlace) -> str:
    return f"left out: {place.name} is {place.status}; a check after its return upgrades it"
