"""Selects the gallery build that fits this machine, and restricts the files that may be read.

`choose` is pure. `localai_cluster.gallery_index` reads the galleries, once per install.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from localai_cluster import gallery_index
from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.kit.errors import NotFound
from localai_cluster.messaging.messages import Gallery

# Words in a build's name or source that require hardware, and the prefixes of capabilities that provide it.
_NEEDS: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("darwin", "mlx", "metal"), ("metal", "darwin-x86")),
    (("l4t",), ("nvidia-l4t",)),
    (("cuda", "nvidia"), ("nvidia",)),
    (("rocm", "hip", "amd"), ("amd",)),
    (("sycl", "intel"), ("intel",)),
)


@dataclass(frozen=True)
class Choice:
    """The build to install, and the meta entry that led to it, if any."""

    build: GalleryEntry
    meta: GalleryEntry | None = None


def choose(name: str, builds: Sequence[GalleryEntry], capability: str) -> Choice:
    """Return the build for `name` (or `gallery@name`) on this machine (worker.md §18.3). Raise NotFound."""
    gallery, _, bare = name.rpartition("@")
    folded_name = folded(bare)
    candidates = [
        build
        for build in builds
        if folded(build.name) == folded_name
        and (not gallery or build.gallery.name.lower() == gallery.lower())
    ]
    if not candidates:
        raise NotFound(f'no backend called "{name}" in any gallery')
    for build in candidates:
        choice = _resolve(build, builds, capability)
        if choice is not None:
            return choice
    raise NotFound(f'backend "{name}" has no build for the capability "{capability}" of this node')


def _resolve(build: GalleryEntry, builds: Sequence[GalleryEntry], capability: str) -> Choice | None:
    if not build.is_meta:
        return Choice(build) if compatible(build, capability) else None
    concrete = lookup(build.capabilities or {}, capability)
    for candidate in builds:
        if concrete and not candidate.is_meta and folded(candidate.name) == folded(concrete):
            return Choice(candidate, meta=build)
    return None


def lookup(capabilities: Mapping[str, str], capability: str) -> str | None:
    """Return the build of a meta entry for a capability: exact, `default` or `cpu` (worker.md §18.4)."""
    return next((capabilities[key] for key in (capability, "default", "cpu") if key in capabilities), None)


def compatible(build: GalleryEntry, capability: str) -> bool:
    """Return True if a concrete build can run here, according to the words in its name and source."""
    if capability == "disable":
        return True
    words = f"{build.name} {build.uri}".lower()
    for needed, capabilities in _NEEDS:
        if any(word in words for word in needed):
            return capability.startswith(capabilities)
    return True


async def fetch(
    gallery: Gallery, roots: Sequence[Path], client: httpx.AsyncClient, served: gallery_index.ReadServed
) -> list[GalleryEntry]:
    """Fetch the entries of a gallery; local files must be in one of `roots`. Raise GalleryUnreadable."""
    return await gallery_index.fetch(gallery, client, served=served, resolve=lambda path: within(path, roots))


def within(path: Path, roots: Sequence[Path]) -> Path:
    """Resolve all links in `path`. Raise ValueError, naming the setting, if it is outside of `roots`."""
    real = path.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{path} is outside LOCALAI_WORKER_SOURCE_ROOTS of this worker")
    return real
