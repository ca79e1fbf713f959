"""Common processing of all inference routes: credential, body, handler, and cancellation on disconnect.

A handler returns a complete answer, or an answer that `play` sends piece by piece, such as an `EventStream`.
A stream that fails before its first byte becomes an ordinary error response. If a process stops, requests
whose answers have not begun get a 503, and streams end with an error (`cancel_all_answers`).

Authentication errors come before content errors. A request without any credential is refused before its body
is read, unless it comes from a network that the operator admits without a key. A client that can send no
other credential may send the key as the password of Basic authentication. Both exceptions exclude requests
with a cookie or an `Origin`, because a browser may have sent them for a page. A form may be large, so it is
read for a confirmed caller only. The statement that picks the replica checks a stored key. If this process
has no recent confirmation of the key, it reads at most the first part of a body before a separate statement
confirms the key, and nothing at all from an address over its failure limit; the pick checks the key again. If
a request ends before its pick, a separate statement checks its key too, and so it does before a template is
rendered or a schema compiled for such a key (`confirm_early`). A wrong key counts as a failure of its
address. A request without a key may come from a page of the cluster: its session and its origin are checked.
A missing session counts as a wrong key.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Protocol, Self

from localai_cluster.accounts import principals, sessions
from localai_cluster.accounts.principals import StoredKey, WrongKey
from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import (
    ClusterError,
    InvalidInput,
    MethodNotAllowed,
    NotAuthenticated,
    Unavailable,
)
from localai_cluster.kit.logs import request_id
from localai_cluster.metrics import web as metrics
from localai_cluster.web import bodies, throttle, wire
from localai_cluster.web.wire import Answer, CancelScope, Outgoing, Receive, Scope, Send
from nodes.gateway import gateway
from nodes.gateway.request import InferenceRequest

logger = logging.getLogger(__name__)


class TooLarge(ClusterError):
    """The request body is too large."""

    message = "The request body is too large."
    status = 413
    code = "request_too_large"


class StreamedAnswer(Protocol):
    """A response that is sent in pieces while it is produced."""

    async def play(self, send: Send) -> tuple[int, bytes]:
        """Send all pieces of the response except the last. Return its status and the last piece."""


Handler = Callable[[InferenceRequest], Awaitable[Answer | StreamedAnswer]]
"""Processes one request; returns the response, or a response that is sent in pieces."""


class CancelOnStop(CancelScope):
    """A context manager whose block `cancel_all_answers` ends with Unavailable."""

    def __enter__(self) -> Self:
        _answer_scopes.add(self)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _answer_scopes.discard(self)
        super().__exit__(kind)


_answer_scopes: set[CancelOnStop] = set()


def cancel_all_answers() -> None:
    """End all responses that have not begun, and all streams, because the process stops."""
    for scope in list(_answer_scopes):
        scope.cancel(Unavailable("this web process is stopping", retry_after=1))


WATCH_DELAY_SECONDS = 0.1
"""Seconds until a request starts to watch for a disconnect. Most requests end earlier and need no task."""


class _CancelOnDisconnect(CancelScope):
    """A context manager whose block ends with Disconnected when the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(WATCH_DELAY_SECONDS, self._start_watch)
        return super().__enter__()

    def _start_watch(self) -> None:
        self._watch = asyncio.ensure_future(wire.wait_until_disconnected(self._receive))
        self._watch.add_done_callback(self._cancel_block)

    def _cancel_block(self, _: "asyncio.Task[None]") -> None:
        self.cancel(wire.Disconnected())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.remove_done_callback(self._cancel_block)
            self._watch.cancel()
        super().__exit__(kind)


@dataclass(frozen=True)
class Envelope:
    """The form of errors in one dialect, and its patience."""

    render: Callable[[ClusterError], Answer]
    body: type[wire.ResponseBody]
    """The struct of the body of an error."""
    render_for_anthropic: Callable[[ClusterError], Answer] | None = None
    """Renders errors for clients of Anthropic's API, on a route that several dialects share."""
    is_patient: bool = False
    """True if the dialect's requests wait longer for a load than those of most dialects."""


OPENAI_ENVELOPE = Envelope(wire.error_answer, wire.ErrorBody)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The ASGI application of one route."""

    handler: Handler
    method: str = "POST"
    max_body_bytes: int | None = None
    """Maximum bytes of a body; None for the default limit."""
    has_form: bool = False
    """True if the body is a form with files, which the handler gets in `request.form`."""
    envelope: Envelope = OPENAI_ENVELOPE
    other_methods: tuple["Endpoint", ...] = ()
    """Further HTTP methods on the path. The limits and the envelope of this endpoint apply to them."""

    @property
    def methods(self) -> str:
        """The supported methods, as the value of the header `Allow`."""
        return ", ".join(endpoint.method for endpoint in (self, *self.other_methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process one request. Send nothing if the client has disconnected."""
        started_at, status = clock.monotonic(), 0
        request = InferenceRequest(
            client_address=wire.client_of(scope),
            request_id=request_id.get(),
            path=scope["path"],
            is_patient=self.envelope.is_patient,
            is_anthropic_client=self.envelope.render_for_anthropic is not None and is_anthropic_client(scope),
        )
        body = bodies.Body(scope, receive, self.max_body_bytes or wire.MAX_BODY, self._too_large_error)
        try:
            with contextlib.suppress(wire.Disconnected):
                answer = await self._answer(request, scope, body, receive, send)
                if isinstance(answer, Answer):
                    await body.answer(send, answer)
                    status = answer.status
                else:
                    # Not earlier: the end of a body looks like a disconnect.
                    with Outgoing(send) as client:
                        await client.end(answer[1])
                    status = answer[0]
        finally:
            request.form.close()
            body.release()
            metrics.inference_ended(
                request.model, status or metrics.CLIENT_LEFT, clock.monotonic() - started_at
            )

    async def _answer(
        self, request: InferenceRequest, scope: Scope, body: bodies.Body, receive: Receive, send: Send
    ) -> Answer | tuple[int, bytes]:
        """Return the response; for a response that was sent in pieces, its status and its last piece."""
        render_for_anthropic = self.envelope.render_for_anthropic if request.is_anthropic_client else None
        render_error = render_for_anthropic or self.envelope.render
        try:
            await identify_caller(request, scope)
            handler = self._find_handler(scope["method"])
            await self._read_body(request, scope, body)
            with _CancelOnDisconnect(receive):
                return await self._handle(request, handler, send)
        except ClusterError as error:
            if isinstance(error, WrongKey):
                error = await throttle.api_keys().note_in_thread(error, request.client_address)
            if error.status >= 500:
                logger.warning("%s %s: %s", scope["method"], scope["path"], error.message.partition("\n")[0])
            return render_error(error)

    def _find_handler(self, method: str) -> Handler:
        for endpoint in (self, *self.other_methods):
            if endpoint.method == method:
                return endpoint.handler
        raise MethodNotAllowed(f"only {self.methods} is accepted here", self.methods)

    def _too_large_error(self, limit: int) -> ClusterError:
        message = f"the request body exceeds {limit} bytes"
        return TooLarge(message) if self.max_body_bytes else InvalidInput(message, field="input")

    async def _read_body(self, request: InferenceRequest, scope: Scope, body: bodies.Body) -> None:
        if self.has_form:
            await _confirm_and_keep(request)
            kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
            request.form = await bodies.read_form(body, kind)
            return
        if _is_unconfirmed(request):
            if not _is_suspect(request):
                await body.read_first_part()
            if not body.is_complete:
                await _confirm_and_keep(request)
        try:
            request.body = await body.read_all()
        except ClusterError:
            await confirm(request)
            raise
        finally:
            body.release()

    async def _handle(
        self, request: InferenceRequest, handler: Handler, send: Send
    ) -> Answer | tuple[int, bytes]:
        try:
            with CancelOnStop():
                answer = await handler(request)
            return answer if isinstance(answer, Answer) else await answer.play(send)
        except NotAuthenticated:
            raise
        except Unavailable:
            with contextlib.suppress(Unavailable):  # in an outage no key can be checked
                await confirm_early(request)
            raise
        except Exception:
            # An error reveals facts about the cluster, so only a confirmed caller may read it.
            await confirm(request)
            raise


def _is_suspect(request: InferenceRequest) -> bool:
    """Return True if the key must be confirmed before any byte of the body is read."""
    return bodies.shared_budget.is_half_used or throttle.api_keys().was_refused(
        request.client_address, clock.now()
    )


def _is_unconfirmed(request: InferenceRequest) -> bool:
    """Return True if the request has a key that this process has not confirmed recently."""
    return bool(request.key_hash) and request.key_hash not in gateway.current().picker.confirmed_keys


async def confirm_early(request: InferenceRequest) -> None:
    """Confirm the request's key before costly work, unless this process has confirmed it recently."""
    if _is_unconfirmed(request):
        await _confirm_and_keep(request)


async def _confirm_and_keep(request: InferenceRequest) -> None:
    """Confirm the request's key. The pick checks it a second time, because it may be revoked meanwhile."""
    key_hash, model = request.key_hash, request.model
    await confirm(request)
    request.key_hash, request.model = key_hash, model


def is_anthropic_client(scope: Scope) -> bool:
    """Return True if the request comes from a client of Anthropic's API."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


_BROWSER_HEADERS = frozenset({b"cookie", b"origin"})


def _basic_password(authorization: str) -> str | None:
    """Return the password in an `Authorization: Basic …` header; None for a header of another scheme."""
    scheme, _, encoded = authorization.strip().partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _lacks_browser_headers(scope: Scope) -> bool:
    """Return True if the request has no header that only browsers send."""
    return not any(name in _BROWSER_HEADERS for name, _ in scope["headers"])


async def identify_caller(request: InferenceRequest, scope: Scope) -> None:
    """Set the caller, or the hash of a key that must be confirmed; raise NotAuthenticated."""
    headers = principals.credential_headers(scope)
    password = _basic_password(headers.get("authorization", ""))
    if password is not None and _lacks_browser_headers(scope):
        headers["authorization"] = f"Bearer {password}"
    offered = principals.offered_credential(headers)
    credential = None if offered is None else principals.classify_credential(offered)
    if isinstance(credential, StoredKey):
        request.key_hash = request.key_owner = credential.hash
    elif credential is None and _lacks_browser_headers(scope) and _is_admitted(request.client_address):
        request.principal = principals.KEYLESS
    elif credential is None:
        if not sessions.has_session(scope):
            raise NotAuthenticated("a valid API key is required")
        request.principal = await sessions.principal_of_request(scope)
        request.names_node = request.principal.is_admin
    elif not credential.is_authenticated:
        if offered:
            raise WrongKey()
        raise NotAuthenticated("a valid API key is required")
    else:
        request.principal = credential
        request.key_owner = principals.hash_secret(offered or "")


def _is_admitted(address: str) -> bool:
    """Return True if the operator admits requests from this address without a key."""
    networks = conf.cluster().keyless_networks
    try:
        ip = ip_address(address) if networks else None
    except ValueError:
        return False
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    return ip is not None and any(ip in network for network in networks)


async def confirm(request: InferenceRequest) -> None:
    """Confirm the request's key in the database unless a pick has confirmed it; raise NotAuthenticated."""
    if request.key_hash:
        request.model = ""  # nothing is picked
        await gateway.current().picker.acquire(request)
