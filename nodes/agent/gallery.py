"""Galleries: lists of installable backends, fetched anew for every install, and the choice of a build.

The choice is pure (`choose`); only `fetch` touches disk or network.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import yaml

from localai_cluster.errors import ClusterError, NotFound
from localai_cluster.messaging.messages import Gallery

log = logging.getLogger(__name__)

FETCH_TIMEOUT = 120.0
INDEX_LIMIT = 16 * 1024 * 1024
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# Words in a build's name or source that bind it to hardware, and the start of the capabilities that have it.
_NEEDS: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("darwin", "mlx", "metal"), ("metal", "darwin-x86")),
    (("l4t",), ("nvidia-l4t",)),
    (("cuda", "nvidia"), ("nvidia",)),
    (("rocm", "hip", "amd"), ("amd",)),
    (("sycl", "intel"), ("intel",)),
)


class GalleryUnreadable(ClusterError):
    """The list of a gallery cannot be read."""

    code = "gallery_unreadable"
    permanent = False


@dataclass(frozen=True)
class Build:
    """One entry of a gallery; `gallery` is where it was found."""

    name: str
    alias: str = ""
    uri: str = ""
    mirrors: tuple[str, ...] = ()
    capabilities: Mapping[str, str] | None = None
    version: str = ""
    gallery: Gallery = field(default_factory=Gallery)

    @property
    def is_meta(self) -> bool:
        """Whether this entry only chooses between others."""
        return bool(self.capabilities) and not self.uri


@dataclass(frozen=True)
class Choice:
    """The build to install, and the meta entry through which it was found, if any."""

    build: Build
    meta: Build | None = None


def parse(text: bytes, gallery: Gallery) -> list[Build]:
    """The entries of an index; what does not read like an entry is left out. GalleryUnreadable."""
    try:
        listed = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise GalleryUnreadable(
            f"the list of gallery {gallery.name or gallery.url} is not YAML: {error}"
        ) from error
    if not isinstance(listed, list):
        raise GalleryUnreadable(f"the list of gallery {gallery.name or gallery.url} is not a YAML list")
    return [_build(item, gallery) for item in listed if isinstance(item, dict) and _text(item.get("name"))]


def choose(name: str, builds: Sequence[Build], capability: str) -> Choice:
    """The build that `name` (or `gallery@name`) means on this machine (worker.md §18.3). NotFound."""
    gallery, _, bare = name.rpartition("@")
    wanted = _folded(bare)
    named = [
        build
        for build in builds
        if _folded(build.name) == wanted and (not gallery or build.gallery.name.lower() == gallery.lower())
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
        if concrete and not other.is_meta and _folded(other.name) == _folded(concrete):
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
    """The entries of a gallery from its URL or the first mirror that answers. GalleryUnreadable."""
    reasons = []
    for url in (gallery.url, *gallery.mirrors):
        try:
            text = await _read(url, roots, client)
            return await asyncio.to_thread(parse, text, gallery)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, GalleryUnreadable) as error:
            reasons.append(f"{_shown(url)}: {error or type(error).__name__}")
    raise GalleryUnreadable(f"gallery {gallery.name} cannot be read: {'; '.join(reasons)}")


def local_path(url: str) -> Path | None:
    """The path of a `file://` URL or of a plain path; None for anything else."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme == "file":
        return Path(unquote(parts.netloc + parts.path))
    return Path(url) if not parts.scheme else None


def within(path: Path, roots: Sequence[Path]) -> Path:
    """`path` with every link followed, if that lies in one of `roots`. ValueError names the setting."""
    real = path.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{path} lies outside LOCALAI_WORKER_SOURCE_ROOTS of this worker")
    return real


async def _read(url: str, roots: Sequence[Path], client: httpx.AsyncClient) -> bytes:
    path = local_path(url)
    if path is not None:
        return await asyncio.to_thread(_read_file, within(path, roots))
    if not url.startswith(("http://", "https://")):
        raise ValueError("only file://, http:// and https:// lists are read")
    urlsplit(url).port  # noqa: B018 - reading it raises ValueError for a port that cannot be
    text = bytearray()
    async with asyncio.timeout(FETCH_TIMEOUT), client.stream("GET", url, follow_redirects=True) as answer:
        if answer.status_code != 200:
            raise ValueError(f"HTTP status {answer.status_code}")
        async for part in answer.aiter_bytes():
            text += part
            _bounded(len(text))
    return bytes(text)


def _read_file(path: Path) -> bytes:
    with open(path, "rb") as file:
        text = file.read(INDEX_LIMIT + 1)
    _bounded(len(text))
    return text


def _bounded(size: int) -> None:
    if size > INDEX_LIMIT:
        raise ValueError(f"longer than {INDEX_LIMIT} bytes")


def _build(item: Mapping[str, Any], gallery: Gallery) -> Build:
    mirrors = item.get("mirrors")
    capabilities = item.get("capabilities")
    return Build(
        name=_text(item.get("name")),
        alias=_text(item.get("alias")),
        uri=_text(item.get("uri")),
        mirrors=tuple(_text(m) for m in mirrors if _text(m)) if isinstance(mirrors, list) else (),
        capabilities={str(k): v for k, v in capabilities.items() if _text(v)}
        if isinstance(capabilities, dict)
        else None,
        version=_text(item.get("version")),
        gallery=gallery,
    )


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float) else ""


def _folded(name: str) -> str:
    return name.replace("/", "__").lower()


def _shown(url: str) -> str:
    """The URL without the credentials and the query it may carry."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a malformed URL"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
