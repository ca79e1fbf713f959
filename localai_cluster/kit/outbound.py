"""HTTP requests to sources of models: checks of the dialled addresses, and the use of credentials.

The addresses come from users and from files that others wrote. A host that the operator has configured
(`allowed_hosts`: mirrors, galleries, registries) may be anywhere. The name of any other host is resolved
once for each connection, refused if one of its addresses is not public, and the connection goes to an
address that was checked: another answer of the name server a moment later (DNS rebinding) changes nothing.
The name stays in the header `Host`, in SNI and in the check of the certificate. A redirect is a new request
with the same checks, never from HTTPS to plain HTTP.

A credential goes only to the scheme, host and port of the URL that the operator has configured for it.
A redirect to another origin gets neither the credential nor the headers of the caller. Messages name host
and path; they never have a query, which may be a signature.
"""

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import httpcore
import httpx
import msgspec

from localai_cluster.kit import addresses, clock, names, untrusted
from localai_cluster.kit.errors import ClusterError, InvalidInput

CONNECT_TIMEOUT, NEXT_ADDRESS_DELAY = 10.0, 2.0
"""Seconds to wait for a connection, and for each but the last of several addresses of a name."""
HEADERS_TIMEOUT = 60.0
"""Seconds until the headers of a response must have arrived."""
STALL_TIMEOUT = 60.0
"""Seconds without a byte of the body after which a response counts as stalled."""
MIN_BYTES_PER_SECOND = 4096
"""Bytes per second that a server must send. A slower server uses up `STALL_TIMEOUT`."""
BODY_TIMEOUT = 60.0
"""Maximum seconds for the body of a document that is read into memory."""
MAX_REDIRECTS = 5
MAX_URL_LENGTH, MAX_MESSAGE_LENGTH = 8192, 300
MAX_RETRY_AFTER_SECONDS = 3600.0
_MAX_ERROR_BODY_BYTES = 16 * 1024
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_TEMPORARY_STATUSES = (408, 425, 429)
_REDIRECTED_HEADERS = ("accept", "range", "if-range", "if-none-match")
"""Headers of the caller that are kept in a redirect to another origin."""
_CONTENT_RANGE_PATTERN = re.compile(r"bytes (?:(\d{1,15})-\d{1,15}|\*)/(\d{1,15}|\*)")
_NUMBER_PATTERN = re.compile(r"\d{1,15}")  # the sum of many is still a number of 64 bits

# Both log addresses or headers, and the query of a signed address is a credential.
for _logger in ("httpx", "httpcore"):
    logging.getLogger(_logger).setLevel(logging.WARNING)


class SourceError(ClusterError):
    """A source cannot be read; the message quotes the source. `permanent` is False if a retry can help."""

    status = 502
    code = "source_failed"

    def __init__(self, message: str, *, can_retry: bool = False, **data: Any) -> None:
        super().__init__(message, **data)
        self.permanent = not can_retry


class SourceRefused(SourceError):
    """A source refuses access (401, 403): it requires a token, or consent to a licence."""

    status = 400
    code = "source_refused"


class SourceMissing(SourceError):
    """The source does not have the file (404, 410)."""

    status = 404
    code = "source_missing"


class SourceChanged(SourceError):
    """The file at the source differs from the declared size or hash."""

    code = "source_changed"


class SourceBusy(SourceError):
    """A source is temporarily unable to respond (408, 425, 429, 5xx)."""

    status = 503
    code = "source_busy"

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message, can_retry=True)
        self.retry_after = retry_after
        """Seconds that the source named, 0 if it named none."""


class SourceUnreachable(SourceError):
    """No connection to a source: its name has no address, or no server listens there."""

    def __init__(self, message: str) -> None:
        super().__init__(message, can_retry=True)


class AddressRefused(SourceError):
    """The product must not connect to this address."""

    status = 400
    code = "address_refused"


@dataclass(frozen=True)
class SourceBody:
    """The body of a file that is being read."""

    pieces: AsyncIterator[bytes]
    offset: int
    """Position in the file of the body's first byte; 0 if the source ignores ranges."""
    total: int
    """Bytes of the complete file; 0 if unknown."""
    validator: str
    """Text that identifies the content: a strong ETag, else the modification time, else ""."""
    has_ranges: bool = False
    """True if the source has sent the requested range; it then supports other ranges too."""


@dataclass(frozen=True)
class _AllowedHost:
    """A host on one port, or on every port (None)."""

    name: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "_AllowedHost":
        try:
            address = addresses.parse(text)
        except ValueError:
            return cls(addresses.host(text), None)
        return cls(address.host, address.port)


class Outbound:
    """Client for HTTP requests to sources. Thread-safe, and usable from several event loops.

    `allowed_hosts` are `host` or `host:port`. `credentials` maps a URL to the value of the header
    `Authorization` for its origin. `verify` replaces the usual certificate authorities.
    """

    def __init__(
        self,
        allowed_hosts: Collection[str] = (),
        credentials: Mapping[str, str] | None = None,
        *,
        verify: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = frozenset(map(_AllowedHost.parse, allowed_hosts))
        self._credentials = {_url_origin(httpx.URL(url)): value for url, value in (credentials or {}).items()}
        self._verify = verify

    @asynccontextmanager
    async def open(
        self, url: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> AsyncIterator[httpx.Response]:
        """Yield an unencoded response after redirects: status below 300, 304 or 416. Raise SourceError."""
        target = parse_url(url)
        try:
            async with self.client() as client:
                response = await self._send_with_redirects(client, target, headers or {}, method)
                async with contextlib.aclosing(response):
                    yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise SourceUnreachable(f"{_host_and_path(target)}: {_connection_problem(error)}") from error
        except (httpx.HTTPError, TimeoutError) as error:
            problem = f"{_host_and_path(target)}: {_connection_problem(error)}"
            raise SourceError(problem, can_retry=True) from error

    async def read(self, url: str, limit: int, headers: Mapping[str, str] | None = None) -> bytes:
        """Return a document of at most `limit` bytes. Raise SourceError, also for a longer document."""
        async with self.open(url, headers) as response, asyncio.timeout(BODY_TIMEOUT):
            if response.status_code not in (200, 206):
                raise SourceError(f"{_host_and_path(response.url)}: HTTP status {response.status_code}")
            body = await untrusted.read_at_most(response.aiter_raw(), limit)
            if len(body) > limit:
                raise SourceError(f"{_host_and_path(response.url)}: the answer is longer than {limit} bytes")
            return body

    @asynccontextmanager
    async def open_range(
        self, url: str, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[SourceBody]:
        """Yield `length` bytes of the file from `offset`, or all bytes from there. Raise SourceError."""
        end = "" if length is None else str(offset + length - 1)
        ranges = {"Range": f"bytes={offset}-{end}"} if offset or length is not None else {}
        async with self.open(url, ranges) as response:
            yield body_of(response, offset)

    def is_allowed(self, host: str, port: int) -> bool:
        """Return True if the operator has configured this host, which may have a private address."""
        return not self._allowed.isdisjoint((_AllowedHost(host, None), _AllowedHost(host, port)))

    def credential_of(self, url: httpx.URL | str) -> str:
        """Return the credential for the origin of this URL; "" if there is none."""
        return self._credentials.get(_url_origin(httpx.URL(url)), "")

    def client(self) -> httpx.AsyncClient:
        """Return a client that connects to checked addresses only.

        The caller checks redirects and adds credentials.
        """
        # One for each call: clients belong to an event loop, and a large file needs few connections.
        return httpx.AsyncClient(
            transport=_CheckedTransport(self, self._verify or _default_tls_context()),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT),
            headers={"User-Agent": "localai-cluster"},
            trust_env=False,
            follow_redirects=False,
        )

    async def _send_with_redirects(
        self, client: httpx.AsyncClient, url: httpx.URL, headers: Mapping[str, str], method: str
    ) -> httpx.Response:
        authorization, was_redirected = self.credential_of(url), False
        for _ in range(MAX_REDIRECTS + 1):
            sent = {**headers, "Accept-Encoding": "identity"}
            if authorization:
                sent["Authorization"] = authorization
            async with asyncio.timeout(HEADERS_TIMEOUT):
                try:
                    response = await client.send(client.build_request(method, url, headers=sent), stream=True)
                except UnicodeError:  # httpx prepares the next request, also if it is not to follow
                    raise SourceError(f"{_host_and_path(url)} redirects to a malformed address") from None
            if response.status_code not in _REDIRECT_STATUSES:
                break
            await response.aclose()
            target = _redirect_target(response)
            if _url_origin(target) != _url_origin(url):
                # Nor back to the first host: the host that redirects there chooses the path.
                authorization, was_redirected = "", True
                headers = {name: headers[name] for name in headers if name.lower() in _REDIRECTED_HEADERS}
            url = target
        else:
            raise SourceError(f"{_host_and_path(url)}: more than {MAX_REDIRECTS} redirects")
        if problem := await _response_error(response, authorization, was_redirected=was_redirected):
            await response.aclose()
            raise problem
        return response


def body_of(response: httpx.Response, offset: int) -> SourceBody:
    """Return the body of the response to a request for the bytes from `offset`.

    If the source ignores the range, the body begins at byte 0. Raise SourceError for another range, or if the
    file ends before `offset`.
    """
    etag = response.headers.get("etag", "")
    is_strong = etag.startswith('"') and len(etag) <= MAX_MESSAGE_LENGTH
    validator = etag if is_strong else response.headers.get("last-modified", "")[:100]
    pieces = response.aiter_raw()
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        return SourceBody(pieces, 0, int(length) if _NUMBER_PATTERN.fullmatch(length) else 0, validator)
    match = _CONTENT_RANGE_PATTERN.fullmatch(response.headers.get("content-range", ""))
    total = int(match[2]) if match and match[2] != "*" else 0
    if response.status_code == 416 and match and not total and not offset:
        return SourceBody(_no_pieces(), 0, 0, validator)  # an empty file has no range
    if response.status_code == 416:
        raise SourceError(
            f"{_host_and_path(response.url)}: the file ends before byte {offset}", can_retry=True
        )
    if response.status_code != 206 or match is None or match[1] is None or int(match[1]) != offset:
        raise SourceError(
            f"{_host_and_path(response.url)}: HTTP status {response.status_code} with another range"
        )
    return SourceBody(pieces, offset, total, validator, has_ranges=True)


async def read_pieces(
    body: AsyncIterator[bytes], size: int, stall: float = STALL_TIMEOUT
) -> AsyncIterator[bytes]:
    """Yield the body in pieces of `size` bytes; the last piece may be shorter.

    Raise TimeoutError after `stall` seconds without data, or if the data arrives too slowly. Received bytes
    are yielded before the error is raised.
    """
    buffer, patience = bytearray(), stall
    error: Exception | None = None
    data: bytes | None = b""
    while data is not None:
        waits_since = clock.monotonic()
        try:
            async with asyncio.timeout(patience):
                data = await anext(body, None)
        except (httpx.HTTPError, TimeoutError) as broken:
            data, error = None, broken
        # A byte now and then must not keep one of the few downloads at once.
        patience += len(data or b"") / MIN_BYTES_PER_SECOND - (clock.monotonic() - waits_since)
        patience = min(max(patience, 0.0), stall)
        buffer += data or b""
        while len(buffer) >= size or (buffer and data is None):
            yield bytes(buffer[:size])
            del buffer[:size]
    if error is not None:
        raise error


class _CheckedTransport(httpx.AsyncHTTPTransport):
    """A transport that connects to checked addresses. TLS verifies the name, not the address."""

    def __init__(self, outbound: Outbound, verify: ssl.SSLContext) -> None:
        super().__init__(verify=verify, trust_env=False)
        # httpx has no parameter for it yet.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=verify, network_backend=_CheckedNetwork(outbound)
        )


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """A network backend that resolves a name once and connects only to the addresses it has checked."""

    def __init__(self, outbound: Outbound) -> None:
        self._outbound, self._network = outbound, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that accepts. Raise AddressRefused or an error of httpcore."""
        numbers = await self._resolve_and_check(host, port)
        connect = partial(
            self._network.connect_tcp,
            port=port,
            local_address=local_address,
            socket_options=socket_options,
        )
        for number in numbers[:-1]:
            try:
                return await connect(number, timeout=min(timeout or NEXT_ADDRESS_DELAY, NEXT_ADDRESS_DELAY))
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                pass
        return await connect(numbers[-1], timeout=timeout)

    async def sleep(self, seconds: float) -> None:
        """Sleep between two attempts."""
        await asyncio.sleep(seconds)

    async def _resolve_and_check(self, host: str, port: int) -> list[str]:
        try:
            name = addresses.host(host)
        except ValueError as error:
            raise AddressRefused(f"{names.to_single_line(host[:100])} {error}") from None
        # A thread of its own: a resolver that hangs must not occupy those of the database.
        lookup = untrusted.in_daemon_thread(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                found = await asyncio.wrap_future(lookup)
        except TimeoutError:
            raise SourceUnreachable(f"{name}: the name server does not answer") from None
        except OSError as error:
            raise SourceUnreachable(f"{name}: {error.strerror or error}") from None
        numbers = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
        if not self._outbound.is_allowed(name, port):
            barred = next((number for number in numbers if not addresses.is_public(number)), None)
            if barred is not None or addresses.is_special(name):
                what = name if name == barred else f"{name} is {barred or 'a metadata service'}, which"
                raise AddressRefused(
                    f"{what} is not a public address;"
                    " only the mirrors, galleries and registries in the settings may have a private one"
                )
        return numbers


@lru_cache(maxsize=1)
def _default_tls_context() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


async def _no_pieces() -> AsyncIterator[bytes]:
    for piece in tuple[bytes, ...]():
        yield piece


def host_of(address: str) -> str:
    """Return `host:port` of a mirror's or gallery's URL; "" for any other text."""
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, ValueError):
        return ""
    if url.scheme not in ("http", "https") or not url.host:
        return ""
    host = f"[{url.host}]" if ":" in url.host else url.host
    return f"{host}:{url.port or (443 if url.scheme == 'https' else 80)}"


def parse_url(text: str) -> httpx.URL:
    """Return the URL of a file. Raise InvalidInput for no URL, AddressRefused for a forbidden one."""
    try:
        url = httpx.URL(text if len(text) <= MAX_URL_LENGTH else "")
        _ = url.host  # ValueError for a label `xn--…` that encodes no name; httpx decodes it later
    except (httpx.InvalidURL, ValueError):
        raise InvalidInput("is no URL", field="url") from None
    if url.scheme not in ("http", "https") or not url.raw_host or url.port == 0:
        raise AddressRefused("only http:// and https:// URLs with a host are read")
    if url.userinfo:
        raise AddressRefused(f"{_host_and_path(url)}: a URL with a user name or password is not read")
    return url


def _redirect_target(response: httpx.Response) -> httpx.URL:
    site = _host_and_path(response.request.url)
    try:
        target = parse_url(str(response.request.url.join(response.headers.get("location", ""))))
    except (httpx.InvalidURL, ValueError, InvalidInput):
        raise SourceError(f"{site} redirects to a malformed address") from None
    if target.scheme != "https" and response.request.url.scheme == "https":
        raise AddressRefused(f"{site} redirects from HTTPS to plain HTTP")
    return target


def _url_origin(url: httpx.URL) -> tuple[str, str, int]:
    name = url.raw_host.decode("ascii", "replace")
    with suppress(ValueError):  # it is refused when it is dialled
        name = addresses.host(name)
    return url.scheme, name, url.port or (443 if url.scheme == "https" else 80)


async def _response_error(
    response: httpx.Response, authorization: str, *, was_redirected: bool
) -> SourceError | None:
    """Return the error for an unsuccessful response, with the source's own text; None for a success."""
    status, site = response.status_code, _host_and_path(response.url)
    if status < 300 or status in (304, 416):
        if response.headers.get("content-encoding", "identity") == "identity":
            return None
        return SourceError(f"{site}: the source compresses the file, although it was asked not to")
    words = await _source_error_text(response, authorization)
    text = f"{site}: HTTP status {status}" + (f": {words}" if words else "")
    if status in (401, 403, 410) and was_redirected:
        return SourceError(text, can_retry=True)  # a signed address is good for minutes
    if status in (401, 403):
        hint = "it needs a token with access to it, and its licence may have to be accepted"
        return SourceRefused(f"{site} refuses access (HTTP status {status}): {words or hint}")
    if status in (404, 410):
        return SourceMissing(text)
    if status in _TEMPORARY_STATUSES or status >= 500:
        return SourceBusy(text, retry_after=_retry_after(response))
    return SourceError(text)


async def _source_error_text(response: httpx.Response, authorization: str) -> str:
    """Return the source's error message from the response, on one line, without our credential."""
    words: Any = response.headers.get("x-error-message", "")
    try:
        async with asyncio.timeout(NEXT_ADDRESS_DELAY):
            body = (
                await untrusted.read_at_most(response.aiter_raw(), _MAX_ERROR_BODY_BYTES)
                if not words
                else b""
            )
        document = msgspec.json.decode(body) if body and not untrusted.json_problem(body) else None
    except (httpx.HTTPError, TimeoutError, ValueError):
        document = None
    if isinstance(document, dict):
        words = document.get("error") or document.get("message") or ""
        words = words.get("message", "") if isinstance(words, dict) else words
    text = words if isinstance(words, str) else ""
    for secret in {authorization, authorization.rpartition(" ")[2]} - {""}:
        text = text.replace(secret, "…")
    return names.to_single_line(" ".join(text.split())[:MAX_MESSAGE_LENGTH])


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_RETRY_AFTER_SECONDS) if _NUMBER_PATTERN.fullmatch(text) else 0.0


def _host_and_path(url: httpx.URL) -> str:
    """Return the host and path of a URL, for a message."""
    host = url.raw_host.decode("ascii", "replace")
    return names.to_single_line(f"{host}{url.path}"[:200])


def _connection_problem(error: Exception) -> str:
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"connection lost: {str(error)[:200] or type(error).__name__}"
