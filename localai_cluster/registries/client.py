"""Client of a container registry (OCI distribution): tokens, manifests and layers.

The registry answers an unauthorized request with a challenge; the client then gets a token and repeats the
request once. Redirects are followed without a credential, and never from HTTPS to plain HTTP. Bodies are
bounded, and a manifest is checked against its digest.
"""

import asyncio
import hashlib
import hmac
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from localai_cluster.kit import clock, untrusted
from localai_cluster.kit.outbound import SourceBusy, SourceError, SourceMissing, SourceRefused
from localai_cluster.registries.access import Access
from localai_cluster.registries.references import ImageReference

HEADERS_TIMEOUT = 120.0
"""Maximum seconds until the headers of a response have arrived."""
BODY_TIMEOUT = 60.0
"""Maximum seconds for the body of a manifest or a token."""
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_TOKEN_BYTES = 256 * 1024
MAX_LAYERS, MAX_LAYER_BYTES = 512, 2**48
MAX_BUILDS_PER_IMAGE = 50
_MAX_REDIRECTS = 5
_DEFAULT_TOKEN_SECONDS, _MAX_TOKEN_SECONDS = 60.0, 3600.0
"""Seconds for which a token is used: if the response states none, and at most."""
_DIGEST_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_CHALLENGE_LENGTH = 4096
_CHALLENGE_PARAMETER_PATTERN = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_INDEX_MEDIA_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFEST_MEDIA_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_ARCHITECTURE_BY_MACHINE = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}


class _Platform(msgspec.Struct, frozen=True):
    os: str = ""
    architecture: str = ""

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}"


class Descriptor(msgspec.Struct, frozen=True):
    """A manifest or a layer: its digest, and its `size` in bytes."""

    digest: str
    size: int = 0
    platform: _Platform | None = None
    media_type: str = msgspec.field(default="", name="mediaType")
    annotations: dict[str, Any] | None = None


class _Manifest(msgspec.Struct, frozen=True):
    manifests: list[Descriptor] | None = None
    layers: list[Descriptor] | None = None


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""
    expires_in: float = _DEFAULT_TOKEN_SECONDS


@dataclass(frozen=True)
class Image:
    """An image for one platform: the digest of its manifest, and its layers, the lowest first."""

    digest: str
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True)
class _CachedToken:
    text: str
    good_until: float


def this_platform() -> _Platform:
    """Return the platform of this machine in OCI's terms."""
    machine = platform.machine().lower()
    return _Platform(platform.system().lower(), _ARCHITECTURE_BY_MACHINE.get(machine, machine))


class Registries:
    """Reads images from registries. `client` must not follow redirects by itself."""

    def __init__(self, client: httpx.AsyncClient, access: Access) -> None:
        self._client = client
        self._access = access
        self._tokens: dict[tuple[str, str], _CachedToken] = {}

    async def image(self, reference: ImageReference, wanted: _Platform | None = None) -> Image:
        """Return the image for `wanted`, by default this machine's platform. Raise SourceError."""
        wanted = wanted or this_platform()
        digest, manifest = await self._read_manifest(reference, reference.version)
        if manifest.manifests is not None:
            chosen = _choose_build(manifest.manifests, wanted, reference)
            digest, manifest = await self._read_manifest(reference, chosen)
        return self._validate_image(reference, digest, manifest)

    async def artifact(self, reference: ImageReference) -> Image:
        """Return an artifact without a platform, such as a model. Raise SourceError."""
        digest, manifest = await self._read_manifest(reference, reference.version)
        if manifest.manifests is not None:
            raise SourceError(f"{reference} is an image for several platforms, not a model")
        return self._validate_image(reference, digest, manifest)

    def _validate_image(self, reference: ImageReference, digest: str, manifest: _Manifest) -> Image:
        if not manifest.layers:
            raise SourceError(f"{reference} is not an image: its manifest has no layers")
        if len(manifest.layers) > MAX_LAYERS:
            raise SourceError(f"{reference} has more than {MAX_LAYERS} layers")
        for layer in manifest.layers:
            if not _DIGEST_PATTERN.fullmatch(layer.digest) or not 0 <= layer.size <= MAX_LAYER_BYTES:
                raise SourceError(f"{reference} has a layer without a sha256 digest or a possible size")
        return Image(digest, tuple(manifest.layers))

    async def digests(self, reference: ImageReference) -> tuple[str, ...]:
        """Return the digest of an image, followed by the digests of its builds for single platforms.

        Raise SourceError.
        """
        digest, manifest = await self._read_manifest(reference, reference.version)
        builds = [
            build.digest for build in manifest.manifests or () if _DIGEST_PATTERN.fullmatch(build.digest)
        ]
        return (digest, *builds[:MAX_BUILDS_PER_IMAGE])

    async def open_layer(
        self, reference: ImageReference, digest: str, headers: Mapping[str, str]
    ) -> httpx.Response:
        """Open the response with a layer: status 200, 206 or 416. The caller closes it.

        Every call sends a request to the registry, so an expired signed address is replaced. Raise
        SourceError.
        """
        return await self._open_resource(reference, f"blobs/{digest}", headers)

    async def _read_manifest(self, reference: ImageReference, version: str) -> tuple[str, _Manifest]:
        response = await self._open_resource(
            reference,
            f"manifests/{version}",
            {"Accept": ", ".join((*_INDEX_MEDIA_TYPES, *_MANIFEST_MEDIA_TYPES))},
        )
        body = await _read_body(response, MAX_MANIFEST_BYTES, str(reference))
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if version.startswith("sha256:") and not hmac.compare_digest(digest, version):
            raise SourceError(f"{reference}: the registry sent another manifest than {version}")
        if problem := untrusted.json_problem(body):
            raise SourceError(f"{reference}: its manifest is {problem}")
        try:
            return digest, msgspec.json.decode(body, type=_Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceError(f"{reference}: its manifest cannot be read: {error}") from None

    async def _open_resource(
        self, reference: ImageReference, resource: str, headers: Mapping[str, str]
    ) -> httpx.Response:
        url = f"{self._access.base_url(reference.host)}/v2/{reference.path}/{resource}"
        response = await self._send_request(url, headers, self._cached_authorization(reference))
        if response.status_code == 401:
            await response.aclose()
            authorization = await self._answer_challenge(
                reference, response.headers.get("www-authenticate", "")
            )
            response = await self._send_request(url, headers, authorization)
        was_redirected = response.status_code in _REDIRECT_STATUSES
        for _ in range(_MAX_REDIRECTS):
            if response.status_code not in _REDIRECT_STATUSES:
                break
            await response.aclose()
            response = await self._send_request(_redirect_target(response, reference), headers, "")
        if response.status_code in (200, 206, 416):
            return response
        await response.aclose()
        raise _refusal_error(reference, response.status_code, was_redirected=was_redirected)

    async def _send_request(self, url: str, headers: Mapping[str, str], authorization: str) -> httpx.Response:
        sent = {"Accept-Encoding": "identity", **headers}
        if authorization:
            sent["Authorization"] = authorization
        try:
            request = self._client.build_request("GET", url, headers=sent, timeout=None)
            async with asyncio.timeout(HEADERS_TIMEOUT):
                return await self._client.send(request, stream=True, follow_redirects=False)
        except TimeoutError as error:
            raise SourceBusy("no answer in time") from error
        except httpx.HTTPError as error:
            host = urlsplit(url).netloc.rpartition("@")[2]
            reason = str(error) or type(error).__name__
            raise SourceBusy(f"cannot reach {host}: {reason}") from error
        except (httpx.InvalidURL, ValueError) as error:
            raise SourceError("the registry redirects to a malformed address") from error

    def _cached_authorization(self, reference: ImageReference) -> str:
        token = self._tokens.get((reference.host, reference.path))
        return f"Bearer {token.text}" if token and token.good_until > clock.monotonic() else ""

    async def _answer_challenge(self, reference: ImageReference, challenge: str) -> str:
        """Return the value of `Authorization` for a challenge. Raise SourceError."""
        self._tokens.pop((reference.host, reference.path), None)
        credential = await asyncio.to_thread(self._access.credential, reference.host)
        kind, parameters = _parse_challenge(challenge)
        if kind == "basic" and credential is not None:
            return credential.header
        if kind != "bearer" or not parameters.get("realm"):
            raise SourceRefused(f"{reference} needs a credential: add {reference.host} to LOCALAI_REGISTRIES")
        realm = parameters["realm"]
        own = self._access.base_url(reference.host)
        if credential is not None and not self._access.may_authenticate_at(reference.host, realm):
            raise SourceError(
                f"{reference.host} asks for its credential at {_origin(realm)}, which is another host or not"
                " HTTPS. If that is right, name it as its realm in LOCALAI_REGISTRIES."
            )
        if not realm.startswith(("https://", f"{own}/")):
            raise SourceError(
                f"{reference.host} names the token service {_origin(realm)}, which is not HTTPS"
            )
        token = await self._get_token(reference, parameters, credential.header if credential else "")
        lifetime = min(max(token.expires_in, 0.0), _MAX_TOKEN_SECONDS)
        text = token.token or token.access_token
        if not text or not text.isascii() or not text.isprintable():
            raise SourceError(f"the token service of {reference.host} gave no token")
        self._tokens[reference.host, reference.path] = _CachedToken(text, clock.monotonic() + lifetime)
        return f"Bearer {text}"

    async def _get_token(
        self, reference: ImageReference, parameters: Mapping[str, str], authorization: str
    ) -> _Token:
        query = {"scope": f"repository:{reference.path}:pull"}
        if parameters.get("service"):
            query["service"] = parameters["service"]
        try:
            url = str(httpx.URL(parameters["realm"]).copy_merge_params(query))
        except (httpx.InvalidURL, ValueError):
            raise SourceError(f"{reference.host} names a malformed token service") from None
        response = await self._send_request(url, {}, authorization)
        if response.status_code != 200:
            await response.aclose()
            reason = f"the token service of {reference.host} answers with HTTP status {response.status_code}"
            if response.status_code in (401, 403):
                reason += ": the credential is wrong, or may not read this image"
            raise _status_error(reason, response.status_code)
        body = await _read_body(response, MAX_TOKEN_BYTES, f"token for {reference}")
        if problem := untrusted.json_problem(body):
            raise SourceError(f"the reply of the token service of {reference.host} is {problem}")
        try:
            return msgspec.json.decode(body, type=_Token)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise SourceError(f"the token service of {reference.host} sent no token") from None


def _choose_build(builds: list[Descriptor], wanted: _Platform, reference: ImageReference) -> str:
    """Return the digest of the build for a platform.

    Raise SourceError, which names the available platforms.
    """
    for build in builds:
        if build.platform == wanted and _DIGEST_PATTERN.fullmatch(build.digest):
            return build.digest
    known = sorted({str(build.platform) for build in builds if build.platform and build.platform.os})
    offered = ", ".join(name for name in known if name != "unknown/unknown")[:200]
    raise SourceError(f"{reference} has no build for {wanted}, only for {offered or 'no platform'}")


def _parse_challenge(text: str) -> tuple[str, dict[str, str]]:
    """Return the scheme and parameters of a challenge; prefer bearer to basic."""
    text = text[:_MAX_CHALLENGE_LENGTH]
    lowered = text.lower()
    start = lowered.find("bearer ")
    if start < 0:
        return ("basic", {}) if "basic" in lowered else ("", {})
    return "bearer", {key.lower(): value for key, value in _CHALLENGE_PARAMETER_PATTERN.findall(text[start:])}


def _redirect_target(response: httpx.Response, reference: ImageReference) -> str:
    """Return the target of a redirect. Raise SourceError if it goes from HTTPS to plain HTTP."""
    try:
        target = response.request.url.join(response.headers.get("location", ""))
    except (httpx.InvalidURL, ValueError):
        raise SourceError(f"{reference.host} redirects to a malformed address") from None
    if target.scheme != "https" and target.scheme != response.request.url.scheme:
        raise SourceError(f"{reference.host} redirects from HTTPS to {target.scheme or 'nowhere'}")
    return str(target)


def _refusal_error(reference: ImageReference, status: int, *, was_redirected: bool) -> SourceError:
    if was_redirected:
        # A signed address is valid for minutes; the next attempt gets another one.
        return SourceBusy(f"{reference}: its storage answers with HTTP status {status}")
    if status in (401, 403):
        return SourceRefused(
            f"{reference.host} refuses access to {reference.path}: HTTP status {status}. Is the credential in"
            " LOCALAI_REGISTRIES right?"
        )
    if status == 404:
        return SourceMissing(f"{reference.host} has no {reference.path} with {reference.version}")
    return _status_error(f"{reference}: HTTP status {status}", status)


def _status_error(message: str, status: int) -> SourceError:
    is_temporary = status in (408, 429) or status >= 500
    return (SourceBusy if is_temporary else SourceError)(message)


def _origin(url: str) -> str:
    """Return the scheme and host of a URL for a message."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a malformed URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"[:200]


async def _read_body(response: httpx.Response, limit: int, what: str) -> bytes:
    """Return a response's body of at most `limit` bytes and close the response. Raise SourceError."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            body = await untrusted.read_at_most(response.aiter_raw(), limit)
    except TimeoutError as error:
        raise SourceBusy(f"{what}: no answer in time") from error
    except httpx.HTTPError as error:
        raise SourceBusy(f"{what}: connection lost") from error
    finally:
        await response.aclose()
    if len(body) > limit:
        raise SourceError(f"{what}: the reply is longer than {limit} bytes")
    return body
