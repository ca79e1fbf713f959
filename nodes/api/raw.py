"""What the raw ASGI routes of workers share: bodies, answers, and what follows a wrong credential."""

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from channels.sessions import CookieMiddleware, SessionMiddleware

from localai_cluster import clock, errors
from localai_cluster.accounts.principals import Principal
from localai_cluster.accounts.websockets import principal_of
from localai_cluster.web import throttle, wire
from nodes.api.worker_auth import WORKERS_ONLY
from nodes.registry import identity

Scope = dict[str, Any]


def headers_of(scope: Scope) -> dict[bytes, str]:
    """The headers by their names in lower case."""
    return {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}


def client_of(scope: Scope) -> str:
    """Where the request came from, as far as the socket tells; "" if it does not."""
    return str((scope.get("client") or [""])[0])[:64]


async def followed_up(refusal: errors.ClusterError, scope: Scope) -> errors.ClusterError:
    """What the caller is told. A person is forbidden, not unknown; a wrong credential is counted."""
    if refusal.status != 401 or isinstance(refusal, identity.MustRotate):
        return refusal
    if await _from_a_person(scope):
        return errors.Forbidden(WORKERS_ONLY)
    if isinstance(refusal, identity.WrongCredential):
        try:
            await asyncio.to_thread(throttle.shared().note, client_of(scope), clock.now())
        except throttle.TooManyFailures as over:
            return over
    return refusal


async def _from_a_person(scope: Scope) -> bool:
    """Whether a user's key or a browser's session came with a refused beat: known, but not a worker."""
    found: list[Principal] = []

    async def note(inner: Any, receive: Any, send: Any) -> None:
        found.append(await principal_of(inner))

    asked: Any = CookieMiddleware(SessionMiddleware(note))
    await asked(scope, None, None)
    return found[0].is_authenticated


async def body_of(receive: Any, limit: int) -> bytes:
    """The body; raises Disconnected, and InvalidInput (413) for one over `limit` bytes."""
    too_large = errors.InvalidInput(f"the request body is over {limit // 1024} kB")
    too_large.status = 413
    return await wire.read_body(receive, limit, too_large)


def method_not_allowed(method: str) -> errors.ClusterError:
    """The refusal of a method that the route does not have."""
    error = errors.InvalidInput(f'method "{method}" not allowed')
    error.status = 405
    return error


async def respond(send: Any, status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Sends one JSON answer."""
    lines = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
    await wire.send_answer(send, wire.Answer(orjson.dumps(body, option=orjson.OPT_UTC_Z), status, lines))
