"""What the raw ASGI routes of workers share: bodies, answers, their description, and what follows a wrong
credential."""

from collections.abc import Mapping
from typing import Any

import orjson
from channels.sessions import CookieMiddleware, SessionMiddleware

from localai_cluster.accounts.principals import Principal
from localai_cluster.accounts.sessions import principal_of_socket
from localai_cluster.kit import errors
from localai_cluster.web import throttle, wire
from localai_cluster.web.openapi import Operation, json_body, refusals
from localai_cluster.web.shapes import reference
from nodes.api.worker_auth import INSTANCE, WORKER_REFUSAL, WORKERS_ONLY, WRONG
from nodes.registry import identity

Scope = dict[str, Any]


def headers_of(scope: Scope) -> dict[bytes, str]:
    """The headers by their names in lower case."""
    return {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}


def client_of(scope: Scope) -> str:
    """The same as `wire.client_of`, short enough for a column."""
    return wire.client_of(scope)[:64]


async def followed_up(refusal: errors.ClusterError, scope: Scope) -> errors.ClusterError:
    """What the caller is told. A person is forbidden, not unknown; a wrong credential is counted."""
    if refusal.status != 401 or isinstance(refusal, identity.MustRotate):
        return refusal
    if await _from_a_person(scope):
        return errors.Forbidden(WORKERS_ONLY)
    if isinstance(refusal, identity.WrongCredential):
        return await throttle.shared().noted(refusal, client_of(scope))
    return refusal


async def _from_a_person(scope: Scope) -> bool:
    """Whether a user's key or a browser's session came with a refused beat: known, but not a worker."""
    found: list[Principal] = []

    async def note(inner: Any, receive: Any, send: Any) -> None:
        found.append(await principal_of_socket(inner))

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


def refused(*statuses: int) -> dict[str, Operation]:
    """Refusals with these statuses, as the API document describes them."""
    meanings = {status: answer.description for status, answer in refusals(*statuses).items()}
    return {
        str(status): {"description": meaning, "content": json_body(reference("Refusal"))}
        for status, meaning in meanings.items()
    }


def node_route(operation_id: str, summary: str, description: str, *in_path: str) -> Operation:
    """What the API document says of every route that a node calls with its own secret."""
    return {
        "operationId": operation_id,
        "tags": ["worker"],
        "summary": summary,
        "description": description,
        "security": [{"nodeSecret": []}],
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in in_path
            ),
            {
                "name": INSTANCE.name,
                "in": "header",
                "required": INSTANCE.required,
                "schema": INSTANCE.type,
                "description": INSTANCE.description,
            },
        ],
    }


WRONG_SECRET: Operation = {
    "401": {
        "description": WRONG,
        "content": json_body(WORKER_REFUSAL.ref, {"error": "invalid node credential"}),
    }
}
"""The refusal of a credential, as the API document describes it."""
