"""What a worker makes of galleries: the choice of a build for this machine, and which files it may read.

The choice is pure (`choose`). The lists themselves are read by `localai_cluster.galleries`, anew for every
install.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from localai_cluster import galleries
from localai_cluster.errors import NotFound
from localai_cluster.galleries import Build, folded
from localai_cluster.messaging.messages import Gallery

# Words in a build's name or source that bind it to hardware, and the start of the capabilities that have it.
_NEEDS: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("darwin", "mlx", "metal"), ("metal", "darwin-x86")),
    (("l4t",), ("nvidia-l4t",)),
    (("cuda", "nvidia"), ("nvidia",)),
    (("rocm", "hip", "amd"), ("amd",)),
    (("sycl", "intel"), ("intel",)),
)


@dataclass(frozen=True)
class Choice:
    """The build to install, and the meta entry through which it was found, if any."""

    build: Build
    meta: Build | None = None


def choose(name: str, builds: Sequence[Build], capability: str) -> Choice:
    """The build that `name` (or `gallery@name`) means on this machine (worker.md §18.3). NotFound."""
    gallery, _, bare = name.rpartition("@")
    wanted = folded(bare)
    named = [
        build
        for build in builds
        if folded(build.name) == wanted and (not gallery or build.gallery.name.lower() == gallery.lower())
    ]
    if not named:
        raise NotFound(f'no backend called "{name}" in any gallery')
    for build in named:
        choice = _resolved(build, builds, capability)
        if choice is not None:
            return choice
    raise NotFound(f'backend "{name}" has no build for the capability "{capability}" of this node')


def _resolved(build: Build, builds: Sequence[Build], capability: str) -> Choice | None:
    if not build.is_meta:
        return Choice(build) if compatible(build, capability) else None
    concrete = lookup(build.capabilities or {}, capability)
    for other in builds:
        if concrete and not other.is_meta and folded(other.name) == folded(concrete):
            return Choice(other, meta=build)
    return None


def lookup(capabilities: Mapping[str, str], capability: str) -> str | None:
    """What a meta entry names for a capability: exact, else `default`, else `cpu` (worker.md §18.4)."""
    return next((capabilities[key] for key in (capability, "default", "cpu") if key in capabilities), None)


def compatible(build: Build, capability: str) -> bool:
    """Whether a concrete build can run here, judged by the words in its name and source."""
    if capability == "disable":
        return True
    words = f"{build.name} {build.uri}".lower()
    for needed, capabilities in _NEEDS:
        if any(word in words for word in needed):
            return capability.startswith(capabilities)
    return True


async def fetch(gallery: Gallery, roots: Sequence[Path], client: httpx.AsyncClient) -> list[Build]:
    """The entries of a gallery; its files must lie in one of `roots`. GalleryUnreadable."""
    return await galleries.fetch(gallery, client, place=lambda path: within(path, roots))


def within(path: Path, roots: Sequence[Path]) -> Path:
    """`path` with every link followed, if that lies in one of `roots`. ValueError names the setting."""
    real = path.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{path} lies outside LOCALAI_WORKER_SOURCE_ROOTS of this worker")
    return real
