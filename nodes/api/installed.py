"""Installed backends of the cluster, and available upgrades (`contract/http-api.md` §4.2 to §4.5).

Both come from rows: no request waits for a worker or a gallery. A controller runs an upgrade check. The
request for a check returns the stored result, and the live feed reports the end of the check.
"""

from functools import partial

from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.gallery_index import folded
from localai_cluster.kit import clock
from localai_cluster.web.openapi import describe, name_operations
from localai_cluster.web.shapes import FLAG, TEXT, UUID, Row, Shape, count, field, mapping_schema
from nodes.api.base import NODE_ID, BackendRoute
from nodes.api.catalogue import INVENTORY_MAX_AGE
from nodes.backends import installed, intents, inventory, upgrade_check, upgrade_state
from nodes.backends.installed import WHERE, Upgrade

METADATA_SHAPE = Shape(
    "BackendMetadata",
    "What the first node that says so tells of an install (§4.3).",
    [
        field("name", TEXT, example="minilm"),
        field("gallery_url", TEXT, optional=True),
        field("installed_at", TEXT, example="2026-08-20T09:12:44Z", optional=True),
        field("version", TEXT, example="1.0.0", optional=True),
        field("uri", TEXT, optional=True),
        field("digest", TEXT, optional=True),
    ],
)
INSTALLED_SHAPE = Shape(
    "InstalledBackend",
    "A backend and the nodes that have it (§4.3).",
    [
        field("Name", TEXT, example="minilm"),
        field("RunFile", TEXT, "Empty: it is on workers.", example=""),
        field("IsMeta", FLAG, example=False),
        field("IsSystem", FLAG, "It came with the machines and is not removed.", example=False),
        field("Metadata", METADATA_SHAPE.ref, nullable=True),
        field("upgrade_available", FLAG, example=True, optional=True),
        field("available_version", TEXT, example="1.1.0", optional=True),
        field(
            "pending_operations",
            count(1),
            "Installs, upgrades and deletions of it that have not ended, one a node and command.",
            optional=True,
        ),
        field("nodes", WHERE.many),
    ],
)
DRIFT_SHAPE = Shape(
    "NodeDrift",
    "A node with another build than most.",
    [
        field("node_id", UUID, example=NODE_ID),
        field("node_name", TEXT, example="gpu-a"),
        field("version", TEXT, example="0.9.0", optional=True),
        field("digest", TEXT, optional=True),
    ],
)
UPGRADE_SHAPE = Shape(
    "UpgradeInfo",
    "An upgrade that would change something (§4.4).",
    [
        field("backend_name", TEXT, example="minilm"),
        field("installed_version", TEXT, "Of most nodes.", example="1.0.0"),
        field("available_version", TEXT, "The gallery's; empty if it names none.", example="1.1.0"),
        field("installed_digest", TEXT, optional=True),
        field("available_digest", TEXT, optional=True),
        field("node_drift", DRIFT_SHAPE.many, optional=True),
    ],
)
_describe_upgrades = partial(
    describe, answer=mapping_schema(UPGRADE_SHAPE.ref), shown={"minilm": UPGRADE_SHAPE.example}
)


def upgrades_by_backend() -> dict[str, Row]:
    upgrades = upgrade_check.read_overview().upgrades
    return {upgrade.backend.name: _upgrade_row(upgrade) for upgrade in upgrades.values()}


def installed_rows(picture: upgrade_check.UpgradeOverview) -> list[Row]:
    """Return the installed backends in the form of §4.3, by name, with their active operations."""
    pending = intents.count_pending_by_backend()
    return [
        _installed_row(backend, picture.upgrades.get(backend.name), pending.get(folded(backend.name), 0))
        for backend in picture.backends
    ]


def _upgrade_row(upgrade: Upgrade) -> Row:
    build = upgrade.backend.majority
    return UPGRADE_SHAPE.of(
        backend_name=upgrade.backend.name,
        installed_version=build.version,
        available_version=upgrade.available_version,
        installed_digest=build.digest,
        available_digest=upgrade.available_digest,
        node_drift=[
            DRIFT_SHAPE.of(**{name: place.node[name] for name in DRIFT_SHAPE.fields if name in place.node})
            for place in upgrade.drifted
        ],
    )


def _installed_row(backend: installed.InstalledBackend, upgrade: Upgrade | None, pending: int) -> Row:
    metadata = backend.metadata
    return INSTALLED_SHAPE.of(
        Name=backend.name,
        RunFile="",
        IsMeta=any(place.is_meta for place in backend.places),
        IsSystem=backend.is_system,
        Metadata=METADATA_SHAPE.of(name=backend.name, **metadata) if metadata else None,
        upgrade_available=upgrade is not None,
        available_version=upgrade.available_version if upgrade else "",
        pending_operations=pending,
        nodes=[place.row for place in backend.places],
    )


class InstalledView(BackendRoute):
    """`/backends`."""

    @describe("backends_installed", "List installed backends", INSTALLED_SHAPE.many)
    def get(self, request: Request) -> Response:
        """Returns the backends of all approved nodes by name, with their nodes and available upgrades.

        Inventories that are too old are refreshed in the background.
        """
        inventory.wake(older_than=INVENTORY_MAX_AGE, now=clock.now())
        return Response(installed_rows(upgrade_check.read_overview()))


class UpgradesView(BackendRoute):
    """`/api/backends/upgrades`."""

    @_describe_upgrades("backends_upgrades", "List available upgrades")
    def get(self, request: Request) -> Response:
        """Returns the available upgrades: what the last check found against the installed builds."""
        return Response(upgrades_by_backend())


class UpgradeCheckView(BackendRoute):
    """`/api/backends/upgrades/check`."""

    @_describe_upgrades("backends_upgrades_check", "Check for upgrades")
    def post(self, request: Request) -> Response:
        """Requests a check of the galleries, and returns the upgrades that are known now.

        A controller runs the check. A request during a pending check starts no second one. The list of
        upgrades shows the result when the check has ended.
        """
        upgrades = upgrades_by_backend()
        upgrade_state.request_check()
        return Response(upgrades)


@name_operations(get="backends_upgrades_other_name")
class OtherUpgradesView(UpgradesView):
    """`/backends/upgrades` (§4.5)."""


@name_operations(post="backends_upgrades_check_other_name")
class OtherUpgradeCheckView(UpgradeCheckView):
    """`/backends/upgrades/check` (§4.5)."""
