"""Open files of sources at any byte, by their permanent addresses.

Each call sends a new request to the source, so a signed address that has expired does not matter. Tokens are
added from the settings of this process; no address and no row contains a token.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol
from urllib.parse import quote

import httpx

from localai_cluster.kit.outbound import (
    AddressRefused,
    Outbound,
    SourceBody,
    SourceError,
    body_of,
    host_of,
)
from localai_cluster.kit.settings_table import ClusterSettings
from localai_cluster.registries import references
from localai_cluster.registries.access import Access
from localai_cluster.registries.client import Registries
from nodes.sources import objects
from nodes.sources.plans import SHARE_PREFIX, SourceFile

HUB = "hf://"
IMAGES = ("oci://", "ollama://")


def source_hosts(settings: ClusterSettings) -> set[str]:
    """Return the hosts that the operator has configured as sources; they may have private addresses.

    A host includes the port of its address. A registry without a port may have its token service on another
    port.
    """
    addresses = [settings.hugging_face_url, settings.github_url, settings.s3_endpoint]
    for gallery in settings.model_galleries:
        addresses += [gallery["url"], *gallery.get("mirrors", ())]
    hosts = {host for address in addresses if (host := host_of(address))}
    return hosts | {registry.host for registry in settings.registries}


def build_outbound(settings: ClusterSettings) -> Outbound:
    """Return the HTTP client for model sources with the credentials of these settings."""
    credentials = {}
    if settings.hugging_face_token and host_of(settings.hugging_face_url):
        credentials[settings.hugging_face_url] = f"Bearer {settings.hugging_face_token}"
    return Outbound(source_hosts(settings), credentials, verify=settings.registry_ca)


class SourceOpener(Protocol):
    """Opens files of sources; each call sends a new request to the source."""

    def open(
        self, file: SourceFile, offset: int = 0, length: int | None = None
    ) -> AbstractAsyncContextManager[SourceBody]:
        """Open the file at byte `offset`, for `length` bytes or all. Raise SourceError."""


class SourceFileOpener:
    """Opens the files of an import plan by their addresses, with the credentials of the settings."""

    def __init__(self, settings: ClusterSettings, outbound: Outbound | None = None) -> None:
        self._settings = settings
        self._outbound = outbound or build_outbound(settings)
        self._access = Access(settings.registries, settings.registry_config)

    @asynccontextmanager
    async def open(
        self, file: SourceFile, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[SourceBody]:
        """Yield the file from byte `offset` on, `length` bytes or all of it; raise SourceError."""
        url = file.url
        if url.startswith(objects.SCHEME):
            async with self._open_object(url, offset, length) as body:
                yield body
        elif url.startswith(IMAGES):
            async with self._open_blob(url, offset, length) as body:
                yield body
        elif url.startswith(("http://", "https://", HUB)):
            address = self.web_address(url)
            async with self._outbound.open_range(address, offset, length) as body:
                yield body
        elif url.startswith(SHARE_PREFIX):
            raise SourceError(f"{url}: the files of a share are used where they are and not fetched")
        else:
            raise AddressRefused("only https://, hf://, oci://, ollama:// and s3:// addresses are read")

    def web_address(self, url: str) -> str:
        """Return the web address of a file; raise AddressRefused for a malformed hf:// address."""
        if not url.startswith(HUB):
            return url
        repository, at, rest = url.removeprefix(HUB).partition("@")
        commit, slash, path = rest.partition("/")
        if not at or not slash or repository.count("/") != 1:
            raise AddressRefused("an hf:// address is hf://owner/repository@commit/path")
        return f"{self._settings.hugging_face_url}/{repository}/resolve/{commit}/{quote(path)}"

    @asynccontextmanager
    async def registries(self) -> AsyncIterator[Registries]:
        """Yield a client of registries that connects to checked addresses only."""
        async with self._outbound.client() as client:
            yield Registries(client, self._access)

    @asynccontextmanager
    async def _open_blob(self, url: str, offset: int, length: int | None) -> AsyncIterator[SourceBody]:
        reference = references.parse(f"oci://{url.partition('://')[2]}")
        if reference is None or not reference.is_pinned:
            raise AddressRefused("the address of a blob is oci://host/repository@sha256:…")
        end = "" if length is None else str(offset + length - 1)
        ranges = {"Range": f"bytes={offset}-{end}"} if offset or length is not None else {}
        try:
            async with self.registries() as client:
                response = await client.open_layer(reference, reference.version, ranges)
                try:
                    yield body_of(response, offset)
                finally:
                    await response.aclose()
        except (httpx.HTTPError, TimeoutError) as error:
            raise SourceError(
                f"{reference.host}: {str(error)[:200] or 'connection lost'}", can_retry=True
            ) from error

    @asynccontextmanager
    async def _open_object(self, url: str, offset: int, length: int | None) -> AsyncIterator[SourceBody]:
        bucket, _, key = url.removeprefix(objects.SCHEME).partition("/")
        store = await objects.store(self._settings, bucket)
        try:
            yield await objects.read(store, url, key, offset, length)
        except TimeoutError as error:
            raise SourceError(f"{bucket}: nothing has come for too long", can_retry=True) from error
