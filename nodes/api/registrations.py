"""`POST /api/node/register`: a raw ASGI application in front of Django (§1.1, R1.29).

A fleet that starts registers at once. All registrations that arrive while a transaction is under way share
the next one. If that fails, or waits for a row too long, each is tried alone, so that every caller sees
its own error only.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from asgiref.sync import ThreadSensitiveContext
from channels.db import database_sync_to_async
from django.conf import settings
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.views import APIView

from localai_cluster import bus_access
from localai_cluster.accounts import principals
from localai_cluster.kit import clock, conf, errors, names
from localai_cluster.web import throttle
from localai_cluster.web.envelopes import body_of, refusal_headers, translate_error
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import MALFORMED, is_json, parse_object
from localai_cluster.web.shapes import TEXT, TIME, UUID, Named, Shape, field, reference
from localai_cluster.web.wire import Disconnected
from nodes.api.base import answered
from nodes.api.raw import (
    Scope,
    client_of,
    followed_up,
    headers_of,
    method_not_allowed,
    respond,
)
from nodes.api.raw import body_of as request_body
from nodes.api.registration_body import RegistrationSerializer, registration
from nodes.api.worker_auth import (
    INSTANCE,
    NO_CREDENTIAL,
    SECRET,
    WORKER_REFUSAL,
    RegistrationAuthentication,
)
from nodes.registry import identity, joining, services
from nodes.registry.services import Claim, Registered
from nodes.registry.shape import NODE_STATUS, NODE_TYPE

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_TOGETHER = 32
PATIENCE = 1.0
"""Seconds for which a shared transaction waits for a row that another one holds."""
_PRIVATE = {"Cache-Control": "private, no-store"}
_BODY = RegistrationSerializer()
REGISTERED = Shape(
    "Registered",
    "The answer to a registration. Only an approved node gets credentials for the message bus, new ones each "
    "time; `nats_url` is where they are good. `api_token` goes to an approved agent, this once.",
    [
        field("id", UUID),
        field("name", TEXT),
        field("node_type", NODE_TYPE.ref),
        field("status", NODE_STATUS.ref),
        field("created_at", TIME),
        field("api_token", {"type": "string", "pattern": "^lai-[0-9a-f]{64}$"}, optional=True),
        field("nats_jwt", TEXT, optional=True),
        field("nats_user_seed", {"type": "string", "pattern": "^SU[A-Z2-7]{56}$"}, optional=True),
        field("nats_url", TEXT, optional=True),
    ],
)
REGISTRATION_REFUSAL = Named("RegistrationRefusal", {"oneOf": [WORKER_REFUSAL.ref, reference("Refusal")]})


_Asked = tuple[Claim, "asyncio.Future[services.RegistrationOutcome | None]"]


async def _in_thread(work: Callable[[], T]) -> T:
    """Runs `work` on a thread of its own with one of Django's connections."""
    async with ThreadSensitiveContext():
        return await database_sync_to_async(work)()


class Registrar:
    """Registers claims, all that arrive while a transaction is under way in the next one."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._task: asyncio.Task[None] | None = None

    async def register(self, claim: Claim) -> Registered:
        """Registers one claim; raises like `services.register_one`."""
        answer: asyncio.Future[services.RegistrationOutcome | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked.append((claim, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._register_all())
        found = await answer
        if found is None:
            return await _in_thread(lambda: services.register_one(claim, **_circumstances()))
        if isinstance(found, errors.Conflict):
            raise found
        return found

    async def _register_all(self) -> None:
        while self._asked:
            batch, self._asked = _apart(self._asked)
            outcomes = await self._together([claim for claim, _ in batch])
            for (_, answer), outcome in zip(batch, outcomes, strict=True):
                if not answer.done():
                    answer.set_result(outcome)

    async def _together(self, claims: Sequence[Claim]) -> Sequence[services.RegistrationOutcome | None]:
        """What became of each claim; None for all if they have to be tried one by one."""
        try:
            return await _in_thread(
                lambda: services.register_all(claims, **_circumstances(), patience=PATIENCE)
            )
        except Exception as error:
            # On any failure each caller finds out for itself, and gets its own answer.
            if len(claims) > 1:
                log.info("%d registrations are tried one by one: %s", len(claims), type(error).__name__)
            return [None] * len(claims)


def _apart(asked: Sequence[_Asked]) -> tuple[list[_Asked], list[_Asked]]:
    """Those that can share a transaction, no two of one name or secret, and the rest."""
    batch: list[_Asked] = []
    rest: list[_Asked] = []
    taken: set[str] = set()
    for one in asked:
        own = {
            f"name {names.key(one[0].told.name)}",
            f"secret {one[0].fingerprint or names.key(one[0].told.name)}",
        }
        if len(batch) == MOST_TOGETHER or own & taken:
            rest.append(one)
        else:
            batch.append(one)
            taken |= own
    return batch, rest


def _circumstances() -> dict[str, Any]:
    return {"now": clock.now(), "auto_approve": conf.cluster().auto_approve_nodes}


class RegistrationApplication:
    """The ASGI application."""

    error_type = "node_error"
    flat_auth = True

    def __init__(self) -> None:
        self._registrar = Registrar()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answers one request."""
        try:
            status, body, headers = 201, await self._register(scope, receive), {}
        except Disconnected:
            return
        except Exception as error:
            refusal = translate_error(error)
            if refusal is None:
                raise
            status, body, headers = refusal.status, body_of(refusal, self), refusal_headers(refusal)
            if status == 405:
                headers = {"Allow": "POST"}
        await respond(send, status, body, _PRIVATE | headers)

    async def _register(self, scope: Scope, receive: Any) -> dict[str, Any]:
        headers, address = headers_of(scope), client_of(scope)
        offered, ticket = await _authenticate(scope, headers, address)
        if scope["method"] != "POST":
            raise method_not_allowed(scope["method"])
        fields = await _fields(headers, receive)
        await _check_token(fields.pop("token", ""), offered, address)
        registered = await self._registrar.register(
            services.claim(
                registration(fields),
                secret=headers.get(b"x-localai-node-secret", ""),
                instance=identity.check_instance(headers.get(b"x-localai-node-instance", "")),
                source_address=address,
                ticket=ticket,
            )
        )
        node, credentials = registered.node, registered.credentials
        return REGISTERED.of(
            id=node.id,
            name=node.name,
            node_type=node.node_type,
            status=node.status,
            created_at=node.created_at,
            api_token=registered.api_token,
            nats_jwt=credentials.jwt if credentials else "",
            nats_user_seed=credentials.seed if credentials else "",
            nats_url=bus_access.worker_url(_own_host(headers)) if credentials else "",
        )


def _own_host(headers: dict[bytes, str]) -> str:
    """The host under which the worker has reached this server; "" for what is none."""
    try:
        return urlsplit(f"//{headers.get(b'host', '')[:255]}").hostname or ""
    except ValueError:
        return ""


async def _authenticate(
    scope: Scope, headers: dict[bytes, str], address: str
) -> tuple[str, joining.JoinTicket | None]:
    """The token of the header, and the ticket if it is a join token.

    401 with a wrong one, 429 unseen after too many failures.
    """
    offered = principals.bearer(headers.get(b"authorization", ""))
    try:
        if not offered:
            raise errors.NotAuthenticated(NO_CREDENTIAL)
        await asyncio.to_thread(throttle.shared().check, address, clock.now())
        if principals.is_registration_token(offered):
            return offered, None
        fingerprint = identity.node_fingerprint(headers.get(b"x-localai-node-secret", ""))
        if not joining.is_join_token(offered):
            # A known worker proves itself by its secret: it goes on when the registration token is replaced.
            if await _in_thread(lambda: identity.is_bound(fingerprint)):
                return offered, None
            raise identity.WrongCredential("invalid registration token")
        return offered, await _in_thread(lambda: joining.recognise(offered, fingerprint, clock.now()))
    except errors.NotAuthenticated as refusal:
        raise await followed_up(refusal, scope) from refusal


async def _fields(headers: dict[bytes, str], receive: Any) -> dict[str, Any]:
    """The body's fields; raises InvalidInput, or DRF's ValidationError naming a field."""
    raw = await request_body(receive, settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
    if raw and not is_json(headers.get(b"content-type", "")):
        raise errors.InvalidInput(MALFORMED)
    fields: dict[str, Any] = _BODY.run_validation(parse_object(raw))
    return fields


async def _check_token(token: str, offered: str, address: str) -> None:
    """The body carries the same token, and its refusal is nested where the header's is flat."""
    if not token:
        raise errors.NotAuthenticated("registration token required", field="token", nested=True)
    if not principals.secrets_equal(token, offered):
        await asyncio.to_thread(throttle.shared().note, address, clock.now())
        raise identity.WrongCredential("invalid registration token", field="token", nested=True)


def _registered() -> dict[int, Any]:
    who = {
        "id": "ef9b4900-b105-4cad-8a02-3033fa0df092",
        "name": "w1",
        "node_type": "backend",
        "status": "pending",
        "created_at": "2026-11-21T00:09:05.820188Z",
    }
    agent = {"name": "agent-1", "node_type": "agent", "status": "healthy", "api_token": "lai-" + "0f" * 32}
    nested = {"error": {"code": 401, "message": "registration token required", "type": "node_error"}}
    return {
        201: OpenApiResponse(
            REGISTERED.ref,
            "Registered; `pending` until an admin approves it.",
            [
                answered(who, status="201"),
                answered(who | agent, "approved agent", "201"),
            ],
        ),
        **refusals(400, 403, 409, 413, 429),
        401: OpenApiResponse(
            REGISTRATION_REFUSAL.ref,
            "A missing or wrong token, or a join token that is revoked, expired or used up: flat for the "
            "header's, nested for the body's.",
            [answered(nested, status="401")],
        ),
    }


class RegistrationDescription(APIView):
    """`/api/node/register` (§1.1, R1.29)."""

    authentication_classes = [RegistrationAuthentication]
    permission_classes = []

    @extend_schema(
        operation_id="node_register",
        summary="Register a worker",
        tags=["worker"],
        request=RegistrationSerializer,
        parameters=[SECRET, INSTANCE],
        responses=_registered(),
    )
    def post(self, request: Request) -> None:
        """Registers a worker, or refreshes it after a restart. A new worker awaits approval."""
