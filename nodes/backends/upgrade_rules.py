"""Upgrades of installed backends: a pure comparison of the installed builds with the galleries' offers.

The rules are R6.34's. An alias never gets here: workers leave it out of their lists (`contract/nats.md`
§4.7), and names are compared with the entries' own.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from localai_cluster.gallery_index import folded
from nodes.backends.catalogue import DEVELOPMENT
from nodes.backends.installed import Build, InstalledBackend, InstalledOn

OCI = "oci://"
_BARE_IMAGE = re.compile(
    r"(?:[a-z0-9-]+\.)+[a-z]+(?::\d+)?/[a-z0-9._/-]+(?::[\w][\w.-]*|@sha256:[0-9a-f]{64})", re.ASCII
)


@dataclass(frozen=True)
class Offered:
    """The galleries' offer for a backend. `digests`: those of the image, empty if unknown."""

    version: str = ""
    uri: str = ""
    digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Upgrade:
    """A backend with an upgrade or with drift; `drifted` holds the places that differ from the majority."""

    backend: InstalledBackend
    available_version: str = ""
    available_digest: str = ""
    drifted: tuple[InstalledOn, ...] = field(default=())


def is_image(uri: str) -> bool:
    """Return True for an image in a registry: `oci://…`, or a host, a path and a tag or digest."""
    return uri.startswith(OCI) or _BARE_IMAGE.fullmatch(uri) is not None


def upgrades(installed: Iterable[InstalledBackend], offered: Mapping[str, Offered]) -> list[Upgrade]:
    """Return the backends with an upgrade, in their order; `offered` is by folded name.

    System backends are left out, backends without metadata, a stable build whose development twin is
    installed, and names that no gallery offers.
    """
    backends_by_name = [(folded(backend.name), backend) for backend in installed]
    names = {name for name, _ in backends_by_name}
    candidates = (
        (backend, offered[name])
        for name, backend in backends_by_name
        if name in offered and not backend.is_system and backend.metadata and name + DEVELOPMENT not in names
    )
    verdicts = (_verdict(backend, offer) for backend, offer in candidates)
    return [verdict for verdict in verdicts if verdict is not None]


def behind(build: Build, offer: Offered) -> bool:
    """Return True if the galleries offer another build; False if the builds cannot be compared."""
    if offer.version:
        return build.version != offer.version
    return bool(offer.digests) and build.digest not in offer.digests


def _verdict(backend: InstalledBackend, offer: Offered) -> Upgrade | None:
    build, drifted = backend.majority, backend.drifted
    digest = ""
    if not offer.version and is_image(offer.uri):
        if not offer.digests:
            return None
        digest = offer.digests[0]
    newer = behind(build, offer)
    return Upgrade(backend, offer.version, digest, drifted) if newer or drifted else None
