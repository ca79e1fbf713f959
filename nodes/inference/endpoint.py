"""What every inference route does: credential, body, the work, and its end when the client leaves.

A handler answers at once, or with something that is played here, as an `EventStream`: one that fails before
its first byte is a refusal like any other. A process that stops ends the work on answers that have not begun
by a 503 (`end_all`).

Errors of authentication come before errors of content, and a request without any credential is refused
before its body is read; a form, which may be large, is read for a known caller only. The statement that picks
the replica checks a stored key. If this process has not seen the key confirmed lately, it reads no more than
the first part of a body before a statement of its own confirms the key, and nothing at all from an address
that is over its limit of failures; the pick checks the key again. A request that ends before its pick has the
key checked by such a statement too. A wrong key is counted for its address after that. A request without a
key may come from the page: then its session is looked up, and its token checked; one that is not there counts
as a wrong key.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from localai_cluster import clock
from localai_cluster.accounts import browsers, credentials
from localai_cluster.accounts.credentials import StoredKey, WrongKey
from localai_cluster.errors import ClusterError, NotAuthenticated, Unavailable
from localai_cluster.logs import request_id
from localai_cluster.metrics import web as metrics
from localai_cluster.web import bodies, multipart, throttle, wire
from localai_cluster.web.wire import Answer, Receive, Scope, Send
from nodes.inference import gateway
from nodes.routing.request import InferenceRequest

logger = logging.getLogger(__name__)


class MethodNotAllowed(ClusterError):
    """The route does not accept this method."""

    status = 405
    code = "method_not_allowed"


class TooLarge(ClusterError):
    """The request body is too large."""

    status = 413
    code = "request_too_large"


class Played(Protocol):
    """An answer that is sent while it is made or read."""

    async def play(self, send: Send) -> int:
        """Sends it without the end of the body; returns the status it came to."""


Handler = Callable[[InferenceRequest], Awaitable[Answer | Played]]
T = TypeVar("T")
_unanswered: set["asyncio.Task[Any]"] = set()
_stopped: set["asyncio.Task[Any]"] = set()


@dataclass(frozen=True)
class Endpoint:
    """The ASGI application of one route. Without a `limit` its body is bounded as other routes' are.

    With `form` the body is a form with files, which the handler finds in `request.form`. `refused` is the
    envelope of the route's dialect.
    """

    method: str
    handler: Handler
    limit: int | None = None
    form: bool = False
    refused: Callable[[ClusterError], Answer] = wire.error_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; sends nothing to a client that has left."""
        began, status = clock.monotonic(), 0
        request = InferenceRequest(
            client_address=wire.client_of(scope), request_id=request_id.get(), path=scope["path"]
        )
        limit = self.limit or wire.MAX_BODY
        body = bodies.Body(scope, receive, limit, _too_large(limit) if self.limit else None)
        try:
            with contextlib.suppress(wire.Disconnected):
                answer = await self._answer(request, scope, body, receive, send)
                if isinstance(answer, Answer):
                    await body.answer(send, answer)
                    status = answer.status
                else:
                    # Only now: the end of a body looks like the client's leaving.
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    status = answer
        finally:
            request.form.close()
            body.release()
            metrics.inference_ended(request.model, status or metrics.LEFT, clock.monotonic() - began)

    async def _answer(
        self, request: InferenceRequest, scope: Scope, body: bodies.Body, receive: Receive, send: Send
    ) -> Answer | int:
        """The answer, or the status of one that has been streamed."""
        try:
            await identify(request, scope)
            if scope["method"] != self.method:
                raise MethodNotAllowed(f"only {self.method} is accepted here")
            await self._read(request, scope, body)
            return await until_disconnected(self._handle(request, send), receive)
        except MethodNotAllowed as error:
            answer = self.refused(error)
            return Answer(answer.body, answer.status, ((b"allow", self.method.encode()),))
        except ClusterError as error:
            if isinstance(error, WrongKey):
                error = await throttle.api_keys().noted(error, request.client_address)
            if error.status >= 500:
                logger.warning("%s %s: %s", scope["method"], scope["path"], error.message.partition("\n")[0])
            return self.refused(error)

    async def _read(self, request: InferenceRequest, scope: Scope, body: bodies.Body) -> None:
        if self.form:
            await _confirm_early(request)
            kind = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1")
            limit = self.limit or wire.MAX_BODY
            request.form = await multipart.read(body.receive, kind, limit, _too_large(limit))
            return
        if not _is_confirmed(request):
            if not _is_suspect(request):
                await body.read_first_part()
            if not body.is_complete:
                await _confirm_early(request)
        try:
            request.body = await body.read_all()
        except ClusterError:
            await confirm(request)
            raise
        finally:
            body.release()

    async def _handle(self, request: InferenceRequest, send: Send) -> Answer | int:
        try:
            with until_stop():
                answer = await self.handler(request)
            return answer if isinstance(answer, Answer) else await answer.play(send)
        except ClusterError as error:
            # A refusal of the content says something about the cluster, so only a known caller may read it.
            if error.status < 500 and not isinstance(error, NotAuthenticated):
                await confirm(request)
            raise


def _is_confirmed(request: InferenceRequest) -> bool:
    """Return True if the caller is known, or its key was confirmed a moment ago."""
    return not request.key_hash or request.key_hash in gateway.current().picker.confirmed_keys


def _is_suspect(request: InferenceRequest) -> bool:
    """Return True if no part of the body may be read before the key is confirmed."""
    return bodies.shared.is_half_used or throttle.api_keys().was_refused(request.client_address, clock.now())


async def _confirm_early(request: InferenceRequest) -> None:
    """Confirm the key before the body is read. The pick checks it again: it may be revoked meanwhile."""
    key_hash = request.key_hash
    await confirm(request)
    request.key_hash = key_hash


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body exceeds {limit} bytes")


@contextlib.contextmanager
def until_stop() -> Iterator[None]:
    """What `end_all` cancels in here is Unavailable."""
    task = asyncio.current_task()
    assert task is not None
    _unanswered.add(task)
    try:
        yield
    except asyncio.CancelledError:
        if task not in _stopped:
            raise
        task.uncancel()
        raise Unavailable("this web process is stopping", retry_after=1) from None
    finally:
        _unanswered.discard(task)
        _stopped.discard(task)


def end_all() -> None:
    """Ends the work on all answers that have not begun, and on sound: this process is about to stop."""
    for task in list(_unanswered):
        _stopped.add(task)
        task.cancel()


_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"xi-api-key"})


async def identify(request: InferenceRequest, scope: Scope) -> None:
    """Fills in the caller, or a stored key to confirm; raises NotAuthenticated without either."""
    headers: dict[bytes, bytes] = {name: value for name, value in scope["headers"] if name in _CREDENTIALS}

    def header(name: str) -> str:
        return headers.get(name.encode(), b"").decode("latin-1")

    credential = credentials.read(header)
    if isinstance(credential, StoredKey):
        request.key_hash = credential.hash
    elif credential is None:
        if not browsers.has_session(scope):
            raise NotAuthenticated("a valid API key is required")
        request.principal = await browsers.principal_of(scope)
        request.names_node = request.principal.is_admin
    elif not credential.is_authenticated:
        if credentials.offered(header):
            raise WrongKey()
        raise NotAuthenticated("a valid API key is required")
    else:
        request.principal = credential


async def confirm(request: InferenceRequest) -> None:
    """Has the database confirm a key that no pick has confirmed yet; raises NotAuthenticated."""
    if request.key_hash:
        request.model = ""  # nothing is picked
        await gateway.current().picker.acquire(request)


async def until_disconnected(work: Awaitable[T], receive: Receive) -> T:
    """The result of `work`. When the client leaves first, `work` is cancelled and awaited."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wire.disconnected(receive))
    watch.add_done_callback(lambda left: left.cancelled() or task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watch.done() and not watch.cancelled():
            raise wire.Disconnected from None
        raise
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
