"""The index of a gallery: installable backends in LocalAI's format, read from a file, a URL or its mirrors.

Workers read it for each install. The catalogue of a web process reads it once a minute. Entries are parsed
leniently: a field of the wrong type is ignored, an entry without a name is skipped, and long values are cut.
`parse` is pure; only `fetch` uses disk or network. `cluster:NAME` is a file of the control plane's own
gallery: the control plane reads it from its folder, a worker over HTTP with its own secret.
"""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from localai_cluster.kit import clock, untrusted
from localai_cluster.kit.errors import ClusterError, NotFound
from localai_cluster.messaging.messages import Gallery
from localai_cluster.registries import references

FETCH_TIMEOUT = 120.0
MAX_INDEX_BYTES = 16 * 1024 * 1024
MAX_ENTRIES, MAX_TEXTS_PER_FIELD, MAX_TEXT_LENGTH = 10_000, 100, 16 * 1024
"""Limits per index, per field and per text: YAML aliases can multiply data."""

SMALL_VRAM_BYTES = 4 * 2**30
"""Bytes of GPU memory up to which a machine gets the builds for machines without a GPU."""
GITHUB_URL = "https://raw.githubusercontent.com"
"""Default base URL of the files that `github:` addresses name."""
_GITHUB_URL_PATTERN = re.compile(r"github:(?://)?([\w.-]+)/([\w.-]+)/([^@?#\s]+)(?:@([\w./-]+))?", re.ASCII)
_MAX_REF_BYTES = 1024
"""Maximum bytes of a `.ref` file, which holds the name of an index."""
CLUSTER_PREFIX = "cluster:"
"""Prefix of a URL of the control plane's own gallery."""
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz")
"""File name suffixes of archives."""
_SERVED_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")

ResolvePath = Callable[[Path], Path]
"""Resolves a local path; raises ValueError for one that must not be read."""


class WebClient(Protocol):
    """The part of `httpx.AsyncClient` that is needed to read an index."""

    def stream(
        self, method: str, url: str, *, headers: Any, follow_redirects: bool
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Open a response."""


ReadServedFile = Callable[[str], Awaitable[bytes]]
"""Reads a file of the control plane's own gallery, at most `MAX_INDEX_BYTES` bytes.

Raises ValueError or OSError.
"""


class GalleryUnreadable(ClusterError):
    """The index of a gallery cannot be read."""

    code = "gallery_unreadable"
    permanent = False


@dataclass(frozen=True)
class ModelFile:
    """A file of a model: its name below the models folder, its source address and its SHA-256."""

    name: str
    uri: str
    sha256: str


@dataclass(frozen=True)
class GalleryEntry:
    """An entry of a gallery; `gallery` is the gallery that has the entry."""

    name: str
    alias: str = ""
    uri: str = ""
    config_url: str = ""
    """Address of a model's config file: the entry's `url`, if it ends in `.yaml` or `.yml`."""
    mirrors: tuple[str, ...] = ()
    capabilities: Mapping[str, str] | None = None
    sha256: str = ""
    version: str = ""
    description: str = ""
    icon: str = ""
    license: str = ""
    urls: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    files: tuple[ModelFile, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a model's definition. They take precedence over those of the config file."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """A model's definition, if the entry itself contains it."""
    size: str = ""
    """Size of the model's files as text, such as `4.2GB`."""
    gallery: Gallery = field(default_factory=Gallery)

    @property
    def is_meta(self) -> bool:
        """True if this entry has no files and selects one of several other entries."""
        return bool(self.capabilities) and not self.uri


def folded(name: str) -> str:
    """Return the name in the form that is used to compare backend names.

    The form is equal for all spellings of a backend's name: lower case, with `__` for `/`.
    """
    return name.replace("/", "__").lower()


def parse(text: bytes, gallery: Gallery) -> list[GalleryEntry]:
    """Return the entries of an index; skip items without a name. Raise GalleryUnreadable."""
    try:
        listed = untrusted.load_yaml(text, untrusted.BoundedLoader)
    except untrusted.InvalidYAML as error:
        raise GalleryUnreadable(f"the index of gallery {gallery.name or gallery.url} {error}") from error
    if not isinstance(listed, list):
        raise GalleryUnreadable(f"the index of gallery {gallery.name or gallery.url} is not a YAML list")
    named = (item for item in listed if isinstance(item, dict) and text_of(item.get("name")))
    return [_parse_entry(item, gallery) for item in islice(named, MAX_ENTRIES)]


@dataclass(frozen=True)
class Index:
    """A gallery's index: its parsed entries and its text."""

    entries: list[GalleryEntry]
    text: bytes = b""


async def fetch(
    gallery: Gallery,
    client: WebClient,
    *,
    served: ReadServedFile,
    resolve: ResolvePath = Path.resolve,
    timeout: float = FETCH_TIMEOUT,
    github_url: str = GITHUB_URL,
    skip: Collection[str] = (),
    on_failure: Callable[[str, float], None] = lambda *_: None,
) -> Index:
    """Return the index from the gallery's URL, or from the first mirror that responds.

    `served` reads `cluster:` URLs; `resolve` decides which local files may be read; `timeout` is in seconds
    per address. Addresses in `skip` are not tried. `on_failure` gets each address that failed and the seconds
    that the attempt took. Raise GalleryUnreadable.
    """

    async def read(url: str) -> bytes:
        name = served_name(url)
        return await (read_url(url, client, resolve) if name is None else served(name))

    reasons = []
    for url in (gallery.url, *gallery.mirrors):
        if url in skip:
            reasons.append(f"{public_url(url)}: skipped, as it has failed slowly a short time ago")
            continue
        begin = clock.monotonic()
        try:
            async with asyncio.timeout(timeout):
                address = web_address(url, github_url)
                text = await read(address)
                if url.endswith(".ref"):
                    text = await read(_referenced_address(text, address))
            return Index(await asyncio.to_thread(parse, text, gallery), text)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ClusterError) as error:
            on_failure(url, clock.monotonic() - begin)
            reasons.append(f"{public_url(url)}: {error or type(error).__name__}")
    raise GalleryUnreadable(f"gallery {gallery.name} cannot be read: {'; '.join(reasons)}")


def web_address(url: str, github_url: str = GITHUB_URL) -> str:
    """Return the web address for `github:owner/repository/path@branch`; return other URLs unchanged."""
    match = _GITHUB_URL_PATTERN.fullmatch(url)
    # A dot segment, also an encoded one, would lead to a file of another repository.
    if match is None or {"", ".", ".."} & set(re.split("[/@]", unquote(url.partition(":")[2].lstrip("/")))):
        return url
    owner, repository, path, branch = match.groups()
    return f"{github_url}/{owner}/{repository}/{branch or 'main'}/{path}"


def _referenced_address(text: bytes, address: str) -> str:
    """Return the address of the index that a `.ref` file names, relative to that file. Raise ValueError."""
    name = text[: _MAX_REF_BYTES + 1].decode("utf-8", "replace").strip()
    if (
        not name
        or len(text) > _MAX_REF_BYTES
        or not name.isprintable()
        or ":" in name
        or name.startswith("/")
    ):
        raise ValueError("a .ref file must hold the relative name of an index")
    return resolve_source(name, address)


def local_path(url: str) -> Path | None:
    """Return the path of a `file://` URL or of a plain path; None for any other URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    if parts.scheme == "file":
        return Path(unquote(parts.netloc + parts.path))
    return Path(url) if not parts.scheme else None


def public_url(url: str) -> str:
    """Return the URL without credentials and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a malformed URL"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def archive_stem(name: str) -> str | None:
    """Return the file name of an archive without its suffix; None for other file names."""
    suffix = next((suffix for suffix in reversed(ARCHIVE_SUFFIXES) if name.lower().endswith(suffix)), None)
    return name[: -len(suffix)] if suffix else None


def default_backend_name(uri: str) -> str:
    """Return the default name of a backend from this address; "" if its path has no last segment.

    The name is the last segment of the path, without the suffix of an archive or the tag or digest of an
    image.
    """
    last = uri.partition("?")[0].partition("#")[0].rstrip("/").rpartition("/")[2].removeprefix(CLUSTER_PREFIX)
    if archive := archive_stem(last):
        return archive
    scheme = uri.partition(":")[0] if "://" in uri else ""
    if uri.startswith("/") or scheme in ("file", "http", "https"):
        return last
    return last.partition("@")[0].partition(":")[0]


def served_name(url: str) -> str | None:
    """Return the file name in a `cluster:` URL, None for any other URL. Raise ValueError."""
    if not url.startswith(CLUSTER_PREFIX):
        return None
    name = url.removeprefix(CLUSTER_PREFIX)
    if not is_served_name(name):
        raise ValueError("only letters, digits and . _ + - may follow cluster:")
    return name


def is_served_name(name: str) -> bool:
    """Return True if this is a valid name of a file directly in the control plane's gallery folder."""
    return _SERVED_NAME_PATTERN.fullmatch(name) is not None


def open_served(folder: Path, name: str) -> BinaryIO:
    """Open a regular file directly in the gallery's folder. Raise ValueError or OSError."""
    if not is_served_name(name):
        raise ValueError("not the name of a file of the gallery")
    return untrusted.open_file(folder / name, follow_links=False)


def read_served(folder: Path, name: str) -> bytes:
    """Return a file of the gallery's folder, at most `MAX_INDEX_BYTES` bytes. Raise ValueError or OSError."""
    with open_served(folder, name) as file:
        return _require_size_limit(file.read(MAX_INDEX_BYTES + 1))


def resolve_source(uri: str, index: str, github_url: str = GITHUB_URL) -> str:
    """Resolve the address of an entry's source relative to the address of its index.

    Absolute addresses and references of images stay unchanged, except that `github:` is resolved.
    """
    if not uri or urlsplit(uri).scheme or uri.startswith("/") or references.parse(uri):
        return web_address(uri, github_url)
    index = web_address(index, github_url)
    if index.startswith(CLUSTER_PREFIX):
        return CLUSTER_PREFIX + uri.removeprefix("./")
    path = local_path(index)
    return str(path.parent / uri) if path is not None else urljoin(index, uri)


UNENCODED_HEADERS = {"Accept-Encoding": "identity"}
"""Request headers that prevent an encoded response; `read_bounded_body` requires them."""


async def read_bounded_body(answer: httpx.Response) -> bytes:
    """Return the body of an open response: status 200, no encoding, at most `MAX_INDEX_BYTES` bytes.

    Raise ValueError for any other response. An encoded body could unpack to gigabytes.
    """
    if answer.status_code != 200:
        raise ValueError(f"HTTP status {answer.status_code}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise ValueError("the server sends it compressed, although it was asked not to")
    return _require_size_limit(await untrusted.read_at_most(answer.aiter_bytes(), MAX_INDEX_BYTES))


async def read_url(url: str, client: WebClient, resolve: ResolvePath) -> bytes:
    """Return the content of an address or a local path. Raise ValueError, OSError or httpx.HTTPError."""
    path = local_path(url)
    if path is not None:
        return await asyncio.to_thread(
            lambda: _require_size_limit(untrusted.read_file(resolve(path), MAX_INDEX_BYTES))
        )
    if not url.startswith(("http://", "https://")):
        raise ValueError("only cluster:, github:, file://, http:// and https:// URLs are supported")
    _ = urlsplit(url).port  # ValueError for an invalid port
    async with client.stream("GET", url, headers=UNENCODED_HEADERS, follow_redirects=True) as answer:
        return await read_bounded_body(answer)


def _require_size_limit(text: bytes) -> bytes:
    if len(text) > MAX_INDEX_BYTES:
        raise ValueError(f"longer than {MAX_INDEX_BYTES} bytes")
    return text


def _parse_entry(item: Mapping[str, Any], gallery: Gallery) -> GalleryEntry:
    capabilities = item.get("capabilities")
    url = text_of(item.get("url"))
    names_config = re.split("[?#]", web_address(url))[0].lower().endswith((".yaml", ".yml"))
    return GalleryEntry(
        name=text_of(item.get("name")),
        alias=text_of(item.get("alias")),
        uri=text_of(item.get("uri")) or ("" if names_config or isinstance(capabilities, dict) else url),
        config_url=url if names_config else "",
        mirrors=_parse_texts(item.get("mirrors")),
        capabilities=_parse_capabilities(capabilities) if isinstance(capabilities, dict) else None,
        sha256=text_of(item.get("sha256")).strip().lower(),
        version=text_of(item.get("version")),
        description=text_of(item.get("description")),
        icon=text_of(item.get("icon")),
        license=text_of(item.get("license")),
        urls=_parse_texts(item.get("urls")),
        tags=_parse_texts(item.get("tags")),
        files=files_of(item.get("files")),
        overrides=settings_of(item.get("overrides")),
        config=settings_of(item.get("config_file")),
        size=text_of(item.get("size")),
        gallery=gallery,
    )


def settings_of(value: Any) -> Mapping[str, Any]:
    """Return the mapping if all its keys are texts; return an empty one for any other value."""
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else {}


def files_of(value: Any) -> tuple[ModelFile, ...]:
    """Return the files in a list of mappings; skip invalid items."""
    listed = islice(value, MAX_TEXTS_PER_FIELD) if isinstance(value, list) else ()
    return tuple(
        ModelFile(name, text_of(item.get("uri")), text_of(item.get("sha256")).strip().lower())
        for item in listed
        if isinstance(item, dict) and (name := text_of(item.get("filename")))
    )


def _parse_capabilities(value: Mapping[Any, Any]) -> dict[str, str]:
    return {
        text_of(key): text
        for key, item in islice(value.items(), MAX_TEXTS_PER_FIELD)
        if (text := text_of(item))
    }


def _parse_texts(value: Any) -> tuple[str, ...]:
    listed = islice(value, MAX_TEXTS_PER_FIELD) if isinstance(value, list) else ()
    return tuple(text for item in listed if (text := text_of(item)))


def text_of(value: Any) -> str:
    """Return a text or number as text without lone surrogates, which cannot be encoded; "" for others."""
    if not isinstance(value, str | int | float):
        return ""
    # One object for equal texts: an index may repeat a long text by an alias.
    return sys.intern(str(value)[:MAX_TEXT_LENGTH].encode("utf-8", "replace").decode())


# Words in a build's name or source that require hardware, and the prefixes of capabilities that provide it.
_WORDS_AND_REQUIRED_CAPABILITIES: Sequence[tuple[tuple[str, ...], tuple[str, ...]]] = (
    (("darwin", "mlx", "metal"), ("metal", "darwin-x86")),
    (("l4t",), ("nvidia-l4t",)),
    (("cuda", "nvidia"), ("nvidia",)),
    (("rocm", "hip", "amd"), ("amd",)),
    (("sycl", "intel"), ("intel",)),
)


@dataclass(frozen=True)
class BuildChoice:
    """The build to install; `meta` is the meta entry that selected the build, if any."""

    build: GalleryEntry
    meta: GalleryEntry | None = None


def choose(name: str, builds: Sequence[GalleryEntry], capability: str) -> BuildChoice:
    """Choose the build for `name` (or `gallery@name`) on this machine (worker.md §18.3). Raise NotFound."""
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
        choice = _resolve_build(build, builds, capability)
        if choice is not None:
            return choice
    raise NotFound(f'backend "{name}" has no build for the capability "{capability}" of this node')


def _resolve_build(
    build: GalleryEntry, builds: Sequence[GalleryEntry], capability: str
) -> BuildChoice | None:
    if not build.is_meta:
        return BuildChoice(build) if is_compatible(build, capability) else None
    concrete = build_for_capability(build.capabilities or {}, capability)
    for candidate in builds:
        if concrete and not candidate.is_meta and folded(candidate.name) == folded(concrete):
            return BuildChoice(candidate, meta=build)
    return None


def build_for_capability(capabilities: Mapping[str, str], capability: str) -> str | None:
    """Return the name of a meta entry's build for a capability (worker.md §18.4); None if there is none.

    The order is: the capability itself, `default`, `cpu`.
    """
    return next((capabilities[key] for key in (capability, "default", "cpu") if key in capabilities), None)


def install_reason(build: GalleryEntry, capability: str) -> str:
    """Return the reason why `build` can be installed on a node with this capability; "" if it cannot."""
    if build.is_meta:
        offered = build.capabilities or {}
        if capability in offered:
            return f"listed for {capability}"
        if "default" in offered:
            return f"{capability} is not listed, so the default"
        return f"neither {capability} nor a default is listed, so cpu" if "cpu" in offered else ""
    if not is_compatible(build, capability):
        return ""
    words = f"{build.name} {build.uri}".lower()
    needed = next(
        (word for listed, _ in _WORDS_AND_REQUIRED_CAPABILITIES for word in listed if word in words), ""
    )
    return f"named for {needed}, as {capability} is" if needed else "named for no hardware"


def is_compatible(build: GalleryEntry, capability: str) -> bool:
    """Return True if a build can run with this capability, by the words in its name and source."""
    if capability == "disable":
        return True
    words = f"{build.name} {build.uri}".lower()
    for needed, capabilities in _WORDS_AND_REQUIRED_CAPABILITIES:
        if any(word in words for word in needed):
            return capability.startswith(capabilities)
    return True


def check_inside(path: Path, roots: Sequence[Path]) -> Path:
    """Return `path` with all links resolved. Raise ValueError if it is outside of `roots`."""
    real = path.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{path} is outside LOCALAI_WORKER_SOURCE_ROOTS of this worker")
    return real
