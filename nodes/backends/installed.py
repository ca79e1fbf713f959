"""What is installed in the cluster, merged by backend from the workers' lists (R6.31, R6.32, O102).

One query for any number of nodes; `merge` is pure. Approved nodes count, whatever their status: the rows are
what their workers listed last, and each place has the status of its node.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nodes.backends.catalogue import WHERE
from nodes.models import NodeBackend

_MORE = ("name", "is_system", "is_meta", "gallery_url")
_METADATA = ("gallery_url", "installed_at", "version", "uri", "digest")


@dataclass(frozen=True)
class Build:
    """What tells two installs of a backend apart; empty texts where the worker does not say."""

    version: str = ""
    digest: str = ""


@dataclass(frozen=True)
class InstalledOn:
    """A backend on one node: `node` is an object of `WHERE`."""

    node: Mapping[str, Any]
    is_system: bool = False
    is_meta: bool = False
    gallery_url: str = ""

    @property
    def build(self) -> Build:
        """What is installed there."""
        return Build(self.node.get("version", ""), self.node.get("digest", ""))

    @property
    def metadata(self) -> dict[str, str]:
        """What the worker says of the install, without empty texts; nothing for a system backend's."""
        known = {"gallery_url": self.gallery_url, **self.node}
        return {name: known[name] for name in _METADATA if known.get(name)}


@dataclass(frozen=True)
class InstalledBackend:
    """One backend and everywhere it is, by the names of the nodes."""

    name: str
    places: tuple[InstalledOn, ...]

    @cached_property
    def is_system(self) -> bool:
        """Whether it came with every machine that has it."""
        return all(place.is_system for place in self.places)

    @cached_property
    def removable(self) -> tuple[InstalledOn, ...]:
        """Where it was installed by the cluster."""
        return tuple(place for place in self.places if not place.is_system)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Of the first node that has any."""
        return next((found for place in self.removable if (found := place.metadata)), {})

    @cached_property
    def majority(self) -> Build:
        """What most nodes have; of as many, the one that sorts last."""
        found = Counter(place.build for place in self.removable)
        return max(found, key=lambda one: (found[one], one.version, one.digest), default=Build())

    @cached_property
    def drifted(self) -> tuple[InstalledOn, ...]:
        """Nodes with another build than the majority."""
        return tuple(place for place in self.removable if place.build != self.majority)


def read() -> list[InstalledBackend]:
    """Everything on approved nodes, by name; one query."""
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False).order_by("node__name")
    columns = rows.values_list(*WHERE.columns.values(), *_MORE)
    return merge((values[len(WHERE.columns)], _place(values)) for values in columns)


def merge(rows: Iterable[tuple[str, InstalledOn]]) -> list[InstalledBackend]:
    """Backends by name, each with its places in the order of the rows."""
    found: dict[str, list[InstalledOn]] = defaultdict(list)
    for name, place in rows:
        found[name].append(place)
    return [InstalledBackend(name, tuple(found[name])) for name in sorted(found)]


def _place(values: tuple[Any, ...]) -> InstalledOn:
    _, is_system, is_meta, gallery_url = values[len(WHERE.columns) :]
    return InstalledOn(WHERE.row(values), is_system, is_meta, gallery_url)
