"""What every inference route does: credential, body, the work, and the end of it when the client leaves.

Errors of authentication come before errors of content, and a request without any credential is refused before
its body is read. A key kept in the database is checked by the statement that picks the replica; a request
that never comes so far has it checked on its own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from localai_cluster.accounts import principals
from localai_cluster.errors import ClusterError, NotAuthenticated
from localai_cluster.logs import request_id
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, Receive, Scope, Send
from nodes.inference import gateway

logger = logging.getLogger(__name__)


class MethodNotAllowed(ClusterError):
    """The route does not accept this method."""

    status = 405
    code = "method_not_allowed"


@dataclass(slots=True)
class CallerClaim:
    """Who the caller says to be: known already, or the owner of a key that the database has to confirm."""

    name: str
    key_hash: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One request whose caller is known or claims to be; `body` is complete."""

    claim: CallerClaim
    body: bytes
    client_address: str
    request_id: str


Handler = Callable[[Request], Awaitable[Answer]]


@dataclass(frozen=True)
class Endpoint:
    """The ASGI application of one route."""

    method: str
    handler: Handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; says nothing to a client that has left."""
        with contextlib.suppress(wire.Disconnected):
            await wire.send_answer(send, await self._answer(scope, receive))

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        try:
            claim = claimed(scope)
            if scope["method"] != self.method:
                raise MethodNotAllowed(f"only {self.method} is accepted here")
            return await self._work(claim, scope, receive)
        except MethodNotAllowed as error:
            answer = wire.error_answer(error)
            return Answer(answer.body, answer.status, ((b"allow", self.method.encode()),))
        except ClusterError as error:
            if error.status >= 500:
                logger.warning("%s %s: %s", scope["method"], scope["path"], error.message.partition("\n")[0])
            return wire.error_answer(error)

    async def _work(self, claim: CallerClaim, scope: Scope, receive: Receive) -> Answer:
        try:
            body = await wire.read_body(receive)
        except ClusterError:
            await confirm(claim)
            raise
        client = scope.get("client")
        request = Request(claim, body, client[0] if client else "", request_id.get())
        return await until_disconnected(self._handle(request), receive)

    async def _handle(self, request: Request) -> Answer:
        try:
            return await self.handler(request)
        except NotAuthenticated:
            raise
        except ClusterError:
            await confirm(request.claim)
            raise


def claimed(scope: Scope) -> CallerClaim:
    """The caller of a request by its headers; raises NotAuthenticated when it cannot be anybody."""
    headers = {name: value for name, value in scope["headers"] if name in _CREDENTIALS}
    offered = principals.offered(lambda name: headers.get(name.encode(), b"").decode("latin-1"))
    if not offered:
        raise NotAuthenticated("a valid API key is required")
    if principals.static_admin(offered) is not None:
        return CallerClaim(principals.STATIC_ADMIN.name)
    if not offered.startswith(principals.KEY_PREFIX):
        raise NotAuthenticated("this API key is not valid")
    return CallerClaim("", principals.hash_secret(offered))


_CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"xi-api-key"})


async def confirm(claim: CallerClaim) -> None:
    """Has the database confirm a claim that no pick has confirmed yet; raises NotAuthenticated."""
    if claim.key_hash:
        caller, _ = await gateway.current().picker.take("", claim.key_hash)
        claim.name, claim.key_hash = caller.name if caller else "", ""


async def until_disconnected(work: Awaitable[Answer], receive: Receive) -> Answer:
    """The result of `work`, which is cancelled, and waited for, when the client leaves first."""
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
