"""The installed backends of the cluster, merged by name from the workers' lists (R6.31, R6.32, O102).

One query for any number of nodes; `merge` is pure. The result includes approved nodes of any status: the rows
have the last lists of their workers, and each install has the status of its node.

Upgrades are a pure comparison of the installed builds with the galleries' offers (R6.34). Aliases do not
occur: workers omit them from their lists (`contract/nats.md` §4.7), and names are compared with the names of
entries.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from django.db.models import F

from localai_cluster.gallery_index import folded
from localai_cluster.registries import references
from localai_cluster.web import shapes
from nodes.models import NodeBackend
from nodes.registry.shape import NODE_STATUS

DEVELOPMENT = "-development"
WHERE = shapes.Shape(
    "Where",
    "A node on which a backend is installed.",
    [
        shapes.column("node_id", shapes.UUID, example=shapes.EXAMPLE_NODE_ID),
        shapes.column("node_name", shapes.TEXT, example="gpu-a", source=F("node__name")),
        shapes.column("node_status", NODE_STATUS.ref, example="healthy", source=F("node__status")),
        shapes.column("version", shapes.TEXT, example="1.0.0", optional=True),
        shapes.column("digest", shapes.TEXT, optional=True),
        shapes.column("uri", shapes.TEXT, optional=True),
        shapes.column("installed_at", shapes.TEXT, example="2026-08-20T09:12:44Z", optional=True),
        shapes.column("alias", shapes.TEXT, "Another name that starts it.", optional=True),
        shapes.column("size", shapes.BYTES, "Of its files.", optional=True),
        shapes.field("from_address", shapes.FLAG, "Installed by an address: no upgrades.", optional=True),
    ],
)
_NODE_BACKEND_COLUMNS = ("name", "is_system", "is_meta", "gallery_url")
_METADATA_COLUMNS = ("gallery_url", "installed_at", "version", "uri", "digest")


@dataclass(frozen=True)
class Build:
    """The identity of an installed build; empty texts if the worker reports none."""

    version: str = ""
    digest: str = ""


@dataclass(frozen=True)
class InstalledOn:
    """A backend on one node; `node` has the columns of the shape `WHERE`."""

    node: Mapping[str, Any]
    is_system: bool = False
    is_meta: bool = False
    gallery_url: str = ""

    @property
    def build(self) -> Build:
        return Build(self.node.get("version", ""), self.node.get("digest", ""))

    @property
    def is_upgradable(self) -> bool:
        """True unless the node refuses every upgrade of the backend."""
        return not self.is_system and not self._is_from_address

    @property
    def row(self) -> dict[str, Any]:
        """The node in the shape `WHERE`."""
        return {**self.node, "from_address": True} if self._is_from_address else {**self.node}

    @property
    def _is_from_address(self) -> bool:
        return is_from_address(self.node.get("uri", ""), self.gallery_url, self.node.get("version", ""))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the install as the worker reported it, without empty texts.

        Empty for a system backend.
        """
        fields = {"gallery_url": self.gallery_url, **self.node}
        return {name: fields[name] for name in _METADATA_COLUMNS if fields.get(name)}


@dataclass(frozen=True)
class InstalledBackend:
    """One backend and the nodes that have it, ordered by the names of the nodes."""

    name: str
    places: tuple[InstalledOn, ...]

    @cached_property
    def is_system(self) -> bool:
        """True if the backend is a system backend on all its nodes."""
        return all(place.is_system for place in self.places)

    @cached_property
    def removable(self) -> tuple[InstalledOn, ...]:
        """The nodes on which the cluster installed the backend."""
        return tuple(place for place in self.places if not place.is_system)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The metadata of the first node that has any metadata."""
        return next((metadata for place in self.removable if (metadata := place.metadata)), {})

    @cached_property
    def majority(self) -> Build:
        """The build on most nodes; of equally frequent builds, the last in sort order."""
        counts = Counter(place.build for place in self.removable)
        return max(counts, key=lambda build: (counts[build], build.version, build.digest), default=Build())

    @cached_property
    def drifted(self) -> tuple[InstalledOn, ...]:
        """The nodes with another build than the majority."""
        return tuple(place for place in self.removable if place.build != self.majority)


def read() -> list[InstalledBackend]:
    """Return the backends on all approved nodes, by name; one query."""
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False).order_by("node__name")
    columns = rows.values_list(*WHERE.columns.values(), *_NODE_BACKEND_COLUMNS)
    return merge((values[len(WHERE.columns)], _place(values)) for values in columns)


def merge(rows: Iterable[tuple[str, InstalledOn]]) -> list[InstalledBackend]:
    """Group the rows by backend; the nodes of each backend keep the order of the rows."""
    places_by_name: dict[str, list[InstalledOn]] = defaultdict(list)
    for name, place in rows:
        places_by_name[name].append(place)
    return [InstalledBackend(name, tuple(places_by_name[name])) for name in sorted(places_by_name)]


def _place(values: tuple[Any, ...]) -> InstalledOn:
    _, is_system, is_meta, gallery_url = values[len(WHERE.columns) :]
    return InstalledOn(WHERE.row(values), is_system, is_meta, gallery_url)


def is_from_address(uri: str, gallery_url: str, version: str) -> bool:
    """Return True if the backend was installed by an address alone: no gallery can upgrade it."""
    return bool(uri) and not gallery_url and not version


@dataclass(frozen=True)
class Offered:
    """The galleries' offer for a backend. `digests`: the digests of its image, empty if unknown."""

    version: str = ""
    uri: str = ""
    digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Upgrade:
    """A backend with an upgrade or with drift; `drifted`: the nodes whose build differs from the majority."""

    backend: InstalledBackend
    available_version: str = ""
    available_digest: str = ""
    drifted: tuple[InstalledOn, ...] = field(default=())


def is_image(uri: str) -> bool:
    """Return True if the URI is an image in a registry."""
    return uri.startswith(references.IMAGE_SCHEMES) or references.parse(uri) is not None


def upgrades(installed: Iterable[InstalledBackend], offered: Mapping[str, Offered]) -> list[Upgrade]:
    """Return the backends with an upgrade, in their order, without nodes that refuse the upgrade.

    `offered` is by folded name. The result omits system backends, backends without metadata, stable builds
    whose development build is installed, and names that no gallery offers.
    """
    backends_by_name = [(folded(backend.name), _upgradable_part(backend)) for backend in installed]
    names = {name for name, _ in backends_by_name}
    candidates = (
        (backend, offered[name])
        for name, backend in backends_by_name
        if name in offered and backend.metadata and name + DEVELOPMENT not in names
    )
    verdicts = (_verdict(backend, offer) for backend, offer in candidates)
    return [verdict for verdict in verdicts if verdict is not None]


def _upgradable_part(backend: InstalledBackend) -> InstalledBackend:
    return replace(backend, places=tuple(place for place in backend.places if place.is_upgradable))


def behind(build: Build, offer: Offered) -> bool:
    """Return True if the galleries offer another build; False if the builds cannot be compared."""
    if offer.version:
        return build.version != offer.version
    return bool(offer.digests) and build.digest not in offer.digests


def _is_other_platform(build: Build, majority: Build, offer: Offered) -> bool:
    """Return True if both builds belong to the offered image: two platforms have two digests."""
    return build.version == majority.version and {build.digest, majority.digest} <= set(offer.digests)


def _verdict(backend: InstalledBackend, offer: Offered) -> Upgrade | None:
    build = backend.majority
    drifted = tuple(place for place in backend.drifted if not _is_other_platform(place.build, build, offer))
    digest = ""
    if not offer.version and is_image(offer.uri):
        if not offer.digests:
            return None
        digest = offer.digests[0]
    newer = behind(build, offer)
    return Upgrade(backend, offer.version, digest, drifted) if newer or drifted else None
