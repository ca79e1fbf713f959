"""Digests of images, read from their registries, to detect tags that have moved (R6.34).

Only manifests are read, never layers; without credentials, as a worker pulls. Every read is bounded: its
time, the bytes of a reply, the number of parallel and of all reads. A registry that does not reply leaves
only its own backends without a verdict.
"""

import asyncio
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import orjson

from nodes.backends.upgrade_rules import OCI

log = logging.getLogger(__name__)

WITHIN = 10.0
"""Seconds for one image, its token included."""
ALL_WITHIN = 30.0
AT_ONCE, MOST = 8, 200
MANIFEST_LIMIT = 4 * 1024 * 1024
_MOST_BUILDS = 50
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::\d{1,5})?)/(?P<path>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_ACCEPTED = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)


@dataclass(frozen=True)
class Image:
    """The location of an image: the registry's address, the path there, and a tag or a digest."""

    registry: str
    path: str
    wanted: str

    @property
    def manifest(self) -> str:
        """The URL of its manifest."""
        return f"{self.registry}/v2/{self.path}/manifests/{self.wanted}"


def parse(uri: str) -> Image | None:
    """Parse a gallery's URI; return None if it names no image. The host is required."""
    match = _REFERENCE.fullmatch(uri.removeprefix(OCI))
    if match is None:
        return None
    host = match["host"]
    local = host.partition(":")[0] in ("localhost", "127.0.0.1")
    return Image(
        f"{'http' if local else 'https'}://{host}", match["path"], match["digest"] or match["tag"] or "latest"
    )


async def digests(uris: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the digests by URI: that of the image, then those of its builds for single platforms.

    Workers record the digest of a build. Images that cannot be read are left out and logged. Never raise, and
    never take longer than `ALL_WITHIN`.
    """
    unique_uris = sorted(set(uris))
    if len(unique_uris) > MOST:
        log.warning("upgrade check: the digests of %d images are left out", len(unique_uris) - MOST)
    digests_by_uri: dict[str, tuple[str, ...]] = {}
    semaphore = asyncio.Semaphore(AT_ONCE)

    async def read(uri: str, client: httpx.AsyncClient) -> None:
        async with semaphore:
            try:
                async with asyncio.timeout(WITHIN):
                    digests_by_uri[uri] = await _digests(uri, client)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
                log.warning("upgrade check: image %s: %s", uri, str(error) or type(error).__name__)

    try:
        async with (
            asyncio.timeout(ALL_WITHIN),
            httpx.AsyncClient(timeout=WITHIN, follow_redirects=True) as client,
        ):
            await asyncio.gather(*(read(uri, client) for uri in unique_uris[:MOST]))
    except TimeoutError:
        log.warning(
            "upgrade check: %d images were not looked at in time",
            len(unique_uris[:MOST]) - len(digests_by_uri),
        )
    return digests_by_uri


async def _digests(uri: str, client: httpx.AsyncClient) -> tuple[str, ...]:
    image = parse(uri)
    if image is None:
        raise ValueError("not the name of an image")
    status, headers, body = await _get(client, image.manifest, {"Accept": _ACCEPTED})
    if status == 401:
        token = await _token(client, image, headers.get("WWW-Authenticate", ""))
        status, headers, body = await _get(
            client, image.manifest, {"Accept": _ACCEPTED, "Authorization": f"Bearer {token}"}
        )
    if status != 200:
        raise ValueError(f"HTTP status {status}")
    # The digest of the bytes, not of the header, because a worker checks the bytes, too.
    return (f"sha256:{sha256(body).hexdigest()}", *_builds(orjson.loads(body)))


def _builds(manifest: Any) -> list[str]:
    listed = manifest.get("manifests") if isinstance(manifest, dict) else None
    digests = (
        [entry.get("digest") for entry in listed or () if isinstance(entry, dict)]
        if isinstance(listed, list)
        else []
    )
    return [digest for digest in digests if isinstance(digest, str) and _DIGEST.fullmatch(digest)][
        :_MOST_BUILDS
    ]


async def _token(client: httpx.AsyncClient, image: Image, challenge: str) -> str:
    """Return a token to read this image, from the realm of the challenge; raise ValueError without one."""
    parameters = dict(_CHALLENGE.findall(challenge))
    realm = parameters.get("realm", "")
    secure = urlsplit(realm).scheme == "https" or realm.startswith(f"{image.registry}/")
    if not challenge.lower().startswith("bearer ") or not secure:
        raise ValueError("the registry asks for a credential")
    query = {"scope": f"repository:{image.path}:pull"} | (
        {"service": parameters["service"]} if "service" in parameters else {}
    )
    status, _, body = await _get(client, f"{realm}?{urlencode(query)}", {})
    answer = orjson.loads(body) if status == 200 else None
    token = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise ValueError("the registry gives no token")
    return token


async def _get(
    client: httpx.AsyncClient, url: str, headers: dict[str, str]
) -> tuple[int, httpx.Headers, bytes]:
    async with client.stream("GET", url, headers=headers) as response:
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MANIFEST_LIMIT:
                raise ValueError(f"longer than {MANIFEST_LIMIT} bytes")
        return response.status_code, response.headers, bytes(body)
