"""The index of a gallery: installable backends in LocalAI's format, read from a file, a URL or its mirrors.

Workers read it for every install, the catalogue of the web process once a minute. Entries are parsed
leniently: a field of the wrong type is ignored, an entry without a name is skipped, and long values are cut.
`parse` is pure; only `fetch` uses disk or network.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import yaml

from localai_cluster.errors import ClusterError
from localai_cluster.messaging.messages import Gallery

FETCH_TIMEOUT = 120.0
INDEX_LIMIT = 16 * 1024 * 1024
MOST_ENTRIES, MOST_TEXTS, LONGEST_TEXT = 10_000, 100, 16 * 1024
"""Limits on entries per index, texts per field and characters per text: YAML aliases can multiply data."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

ResolvePath = Callable[[Path], Path]
"""Resolves a local path; raises ValueError for one that must not be read."""


class GalleryUnreadable(ClusterError):
    """The index of a gallery cannot be read."""

    code = "gallery_unreadable"
    permanent = False


@dataclass(frozen=True)
class GalleryEntry:
    """One entry of a gallery; `gallery` is where it came from."""

    name: str
    alias: str = ""
    uri: str = ""
    mirrors: tuple[str, ...] = ()
    capabilities: Mapping[str, str] | None = None
    version: str = ""
    description: str = ""
    icon: str = ""
    license: str = ""
    urls: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    gallery: Gallery = field(default_factory=Gallery)

    @property
    def is_meta(self) -> bool:
        """Whether this entry only selects one of several others."""
        return bool(self.capabilities) and not self.uri


def folded(name: str) -> str:
    """The form of a name for comparison: names of the same backend are equal in it."""
    return name.replace("/", "__").lower()


def parse(text: bytes, gallery: Gallery) -> list[GalleryEntry]:
    """The entries of an index; anything else in it is skipped. GalleryUnreadable."""
    try:
        listed = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise GalleryUnreadable(
            f"the index of gallery {gallery.name or gallery.url} is not YAML: {error}"
        ) from error
    if not isinstance(listed, list):
        raise GalleryUnreadable(f"the index of gallery {gallery.name or gallery.url} is not a YAML list")
    named = (item for item in listed if isinstance(item, dict) and _text(item.get("name")))
    return [_build(item, gallery) for item in islice(named, MOST_ENTRIES)]


async def fetch(
    gallery: Gallery,
    client: httpx.AsyncClient,
    *,
    resolve: ResolvePath = Path.resolve,
    timeout: float = FETCH_TIMEOUT,
) -> list[GalleryEntry]:
    """The entries of a gallery from its URL or the first mirror that answers. GalleryUnreadable.

    `resolve` decides which files may be read; `timeout` is in seconds per address.
    """
    reasons = []
    for url in (gallery.url, *gallery.mirrors):
        try:
            text = await _read(url, client, resolve, timeout)
            return await asyncio.to_thread(parse, text, gallery)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, GalleryUnreadable) as error:
            reasons.append(f"{public_url(url)}: {error or type(error).__name__}")
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


def public_url(url: str) -> str:
    """The URL without credentials and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a malformed URL"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


async def _read(url: str, client: httpx.AsyncClient, resolve: ResolvePath, timeout: float) -> bytes:
    path = local_path(url)
    if path is not None:
        return await asyncio.to_thread(_read_file, resolve(path))
    if not url.startswith(("http://", "https://")):
        raise ValueError("only file://, http:// and https:// URLs are supported")
    urlsplit(url).port  # noqa: B018 - reading it raises ValueError for a port that cannot be
    text = bytearray()
    async with asyncio.timeout(timeout), client.stream("GET", url, follow_redirects=True) as answer:
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


def _build(item: Mapping[str, Any], gallery: Gallery) -> GalleryEntry:
    capabilities = item.get("capabilities")
    return GalleryEntry(
        name=_text(item.get("name")),
        alias=_text(item.get("alias")),
        uri=_text(item.get("uri")),
        mirrors=_texts(item.get("mirrors")),
        capabilities=_choices(capabilities) if isinstance(capabilities, dict) else None,
        version=_text(item.get("version")),
        description=_text(item.get("description")),
        icon=_text(item.get("icon")),
        license=_text(item.get("license")),
        urls=_texts(item.get("urls")),
        tags=_texts(item.get("tags")),
        gallery=gallery,
    )


def _choices(value: Mapping[Any, Any]) -> dict[str, str]:
    return {_text(key): text for key, item in islice(value.items(), MOST_TEXTS) if (text := _text(item))}


def _texts(value: Any) -> tuple[str, ...]:
    listed = islice(value, MOST_TEXTS) if isinstance(value, list) else ()
    return tuple(text for item in listed if (text := _text(item)))


def _text(value: Any) -> str:
    """The text, without lone surrogates, which cannot be encoded."""
    if not isinstance(value, str | int | float):
        return ""
    return str(value)[:LONGEST_TEXT].encode("utf-8", "replace").decode()
