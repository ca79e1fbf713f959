"""`POST /api/node/register`: a raw ASGI application in front of Django (§1.1, R1.29).

`RegistrationSerializer` checks JSON types and ranges of a body; unknown fields are ignored. After the token,
`registration` checks everything else in the order of §1.1. A whole fleet may start at once, so registrations
that arrive during a transaction share the next one. If the shared transaction fails, or waits for a row too
long, each registration is tried alone, so a caller gets only its own error.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from asgiref.sync import ThreadSensitiveContext
from channels.db import database_sync_to_async
from django.conf import settings
from drf_spectacular.utils import (
    OpenApiResponse,
)
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.views import APIView

from localai_cluster import bus_access
from localai_cluster.accounts import principals
from localai_cluster.kit import clock, conf, errors, names
from localai_cluster.kit.addresses import EXPECTED_ADDRESS_FORM
from localai_cluster.web import throttle, wire
from localai_cluster.web.envelopes import body_of, translate_error
from localai_cluster.web.openapi import describe, request_example, response_example
from localai_cluster.web.rest import Described, NullIsAbsent, Text, Whole
from localai_cluster.web.shapes import TEXT, TIME, UUID, Named, Shape, field, reference
from nodes.api import worker_routes
from nodes.models import JoinToken, NodeType
from nodes.registry import identity, joining, registration, resources
from nodes.registry.heartbeats import MAX_FIGURE
from nodes.registry.labels import MAX_LABELS, MAX_VALUE_LENGTH
from nodes.registry.overrides import MAX_REPLICA_CAP
from nodes.registry.registration import Claim, Registered, Registration, Running
from nodes.registry.shape import NODE_STATUS, NODE_TYPE_SCHEMA

MAX_TEXT_LENGTHS = {
    "name": names.MAX_NAME_LENGTH,
    "address": 512,
    "http_address": 512,
    "gpu_vendor": 32,
    "gpu_compute_capability": 16,
    "capability": 64,
    "vram_budget": 32,
    "version": 64,
}
"""Maximum characters of the text fields, beginning with the fields of §1.1."""
MAX_PROCESSES = 1024
MAX_PROCESS_KEY_LENGTH = 300
_ENGINE_TOKEN_PATTERN = re.compile(r"([0-9a-f]{64})?\Z")
_MAX_UNCHECKED_LENGTH = 2**20
"""Maximum characters before the token is checked; afterwards `registration` checks the real limits."""


def _bytes_field() -> Whole:
    return Whole(required=False, min_value=0, max_value=MAX_FIGURE)


def _text_field() -> Text:
    return Text(required=False, max_length=_MAX_UNCHECKED_LENGTH)


class _Labels(serializers.DictField):
    """Labels of a worker; their number is checked before they are parsed."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if isinstance(data, dict) and len(data) > MAX_LABELS:
            raise serializers.ValidationError(f"must be at most {MAX_LABELS} labels")
        labels: dict[str, Any] = super().to_internal_value(data)
        return labels


class RunningProcessSerializer(NullIsAbsent):
    """One engine process of the worker: its key `model#replica`, and its address if known."""

    process_key = Text(max_length=_MAX_UNCHECKED_LENGTH)
    address = _text_field()


WORKER_EXAMPLE = {
    "name": "w1",
    "address": "127.0.0.1:51100",
    "http_address": "127.0.0.1:51099",
    "token": "tok",
    "total_vram": 0,
    "available_vram": 0,
    "total_ram": 25276502016,
    "available_ram": 24659845120,
    "total_disk": 270553174016,
    "available_disk": 81634766848,
    "gpu_vendor": "",
    "gpu_compute_capability": "",
    "capability": "default",
    "max_replicas_per_model": 1,
    "labels": {"node.replica-slots": "1", "tier": "t1"},
}
_RUNNING_FIELDS = {
    "version": "0.1.0",
    "running_processes": [{"process_key": "qwen3#0", "address": "127.0.0.1:51101"}],
}
_AGENT = {"name": "agent-1", "node_type": "agent", "token": "tok"}


class RegistrationSerializer(Described, NullIsAbsent):
    """The description that a worker sends of itself; sizes in bytes."""

    name, node_type, address, http_address, token = (
        _text_field(),
        _text_field(),
        _text_field(),
        _text_field(),
        _text_field(),
    )
    total_vram, available_vram = _bytes_field(), _bytes_field()
    total_ram, available_ram = _bytes_field(), _bytes_field()
    total_disk, available_disk = _bytes_field(), _bytes_field()
    gpu_vendor, gpu_compute_capability, capability, vram_budget = (
        _text_field(),
        _text_field(),
        _text_field(),
        _text_field(),
    )
    engine_token, version = _text_field(), _text_field()
    gpus, system = serializers.JSONField(required=False), serializers.JSONField(required=False)
    labels = _Labels(child=Text(max_length=_MAX_UNCHECKED_LENGTH), required=False)
    max_replicas_per_model = Whole(required=False, min_value=-(2**63), max_value=MAX_REPLICA_CAP)
    running_processes: serializers.ListSerializer[Any] = serializers.ListSerializer(
        child=RunningProcessSerializer(), required=False, max_length=MAX_PROCESSES
    )

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        properties = schema["properties"]
        for name, longest in MAX_TEXT_LENGTHS.items():
            properties[name]["maxLength"] = longest
        properties["address"]["description"] = f"Where its engines are reached, {EXPECTED_ADDRESS_FORM}."
        properties["http_address"]["description"] = (
            "The same for its probes; its host is that of `address`, or one of CLUSTER_NODE_HOSTS."
        )
        properties["engine_token"] |= {
            "pattern": "^([0-9a-f]{64})?$",
            "description": "What its engines expect as a bearer. Empty: they expect the registration token.",
        }
        for name in ("name", "token"):
            properties[name]["minLength"] = 1
            del properties[name]["nullable"]
        properties["node_type"] |= {"maxLength": 16, "pattern": f"^({'|'.join(NodeType.values)})?$"}
        properties["labels"] |= {
            "maxProperties": MAX_LABELS,
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_LENGTH},
        }
        properties["gpus"] = resources.GPUS_SCHEMA
        properties["system"] = resources.SYSTEM_SCHEMA
        properties["running_processes"] |= {
            "maxItems": MAX_PROCESSES,
            "description": "The engine processes that run. Absent: none is known to run, all replicas go.",
        }
        return schema | {"required": ["name", "token"]}


def parse_registration(fields: Mapping[str, Any]) -> Registration:
    """Convert a validated body after checks in the order of §1.1. Raise InvalidInput with the field."""
    body = dict(fields) | {"node_type": fields.get("node_type") or NodeType.BACKEND.value}
    _require_fields(body)
    for name, longest in MAX_TEXT_LENGTHS.items():
        _check_length(body.get(name, ""), name, longest)
        names.check_text(body.get(name, ""), name)
    if not _ENGINE_TOKEN_PATTERN.match(body.get("engine_token", "")):
        raise errors.InvalidInput("engine_token must be 64 lower-case hex digits", field="engine_token")
    reported_gpus = body.get("gpus")
    body["gpus"] = [] if reported_gpus is None else resources.parse_gpus(reported_gpus)
    body["system"] = resources.parse_system(body.get("system"))
    if (running := body.get("running_processes")) is not None:
        body["running_processes"] = [
            _parse_process(process, number) for number, process in enumerate(running)
        ]
    return Registration(**body)


def _require_fields(body: Mapping[str, Any]) -> None:
    if body["node_type"] not in NodeType.values:
        raise errors.InvalidInput('node_type must be "backend" or "agent"', field="node_type")
    if not body.get("name", "").strip():
        raise errors.InvalidInput("name is required", field="name")
    if body["node_type"] == NodeType.BACKEND and not body.get("address", "").strip():
        raise errors.InvalidInput("address is required for a backend node", field="address")


def _check_length(text: str, field: str, longest: int) -> None:
    if len(text) > longest:
        raise errors.InvalidInput(f"{field} exceeds {longest} characters", field=field)


def _parse_process(body: Mapping[str, Any], number: int) -> Running:
    """Parse a running process. Keys and addresses may have any characters, because they are only compared."""
    field = f"running_processes.{number}"
    if not body["process_key"]:
        raise errors.InvalidInput(f"{field}.process_key is required", field=field)
    _check_length(body["process_key"], f"{field}.process_key", MAX_PROCESS_KEY_LENGTH)
    _check_length(body.get("address", ""), f"{field}.address", MAX_TEXT_LENGTHS["address"])
    return Running(**body)


log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BATCH_SIZE = 32
SHARED_LOCK_TIMEOUT = 1.0
"""Seconds that a shared transaction waits for a locked row."""
BUSY_BATCH_SIZE = 4
"""Number of registrations in one transaction from which on the next transaction is delayed."""
BUSY_BATCH_DELAY = 0.005
"""Seconds of that delay, in which more registrations arrive."""
_PRIVATE_HEADERS = {"Cache-Control": "private, no-store"}
_BODY_SERIALIZER = RegistrationSerializer()
REGISTERED_SHAPE = Shape(
    "Registered",
    "The answer to a registration. `fingerprint` is the SHA-256 of the secret that identifies the node from "
    "now on. Only an approved node gets credentials for the message bus, new ones each time; "
    "`nats_url` is where they are good. `api_token` goes to an approved agent, this once.",
    [
        field("id", UUID, example="ef9b4900-b105-4cad-8a02-3033fa0df092"),
        field("name", TEXT, example="w1"),
        field("node_type", NODE_TYPE_SCHEMA.ref, example="backend"),
        field("status", NODE_STATUS.ref, example="pending"),
        field("created_at", TIME, example="2026-11-21T00:09:05.820188Z"),
        field("fingerprint", {"type": "string", "pattern": "^[0-9a-f]{64}$"}, optional=True),
        field("api_token", {"type": "string", "pattern": "^lai-[0-9a-f]{64}$"}, optional=True),
        field("nats_jwt", TEXT, optional=True),
        field("nats_user_seed", {"type": "string", "pattern": "^SU[A-Z2-7]{56}$"}, optional=True),
        field("nats_url", TEXT, optional=True),
    ],
)
REGISTRATION_REFUSAL = Named(
    "RegistrationRefusal", {"oneOf": [worker_routes.WORKER_REFUSAL_SHAPE.ref, reference("Refusal")]}
)


_WaitingClaim = tuple[Claim, "asyncio.Future[registration.RegistrationOutcome | None]"]


async def _in_thread(work: Callable[[], T]) -> T:
    async with ThreadSensitiveContext():
        return await database_sync_to_async(work)()


class Registrar:
    """Registers claims. The claims that arrive during a transaction share the next transaction."""

    def __init__(self) -> None:
        self._waiting: list[_WaitingClaim] = []
        self._task: asyncio.Task[None] | None = None

    async def register(self, claim: Claim) -> Registered:
        """Register one claim. Raises the errors of `registration.register_one`."""
        answer: asyncio.Future[registration.RegistrationOutcome | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting.append((claim, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._register_all())
        outcome = await answer
        if outcome is None:
            return await _in_thread(lambda: registration.register_one(claim, **_registration_options()))
        if isinstance(outcome, errors.Conflict):
            raise outcome
        return outcome

    async def _register_all(self) -> None:
        batch: Sequence[_WaitingClaim] = ()
        while self._waiting:
            if len(batch) >= BUSY_BATCH_SIZE:
                # The callers of the last batch are about to send their next registrations.
                await asyncio.sleep(BUSY_BATCH_DELAY)
            batch, self._waiting = _split_batch(self._waiting)
            outcomes = await self._register_batch([claim for claim, _ in batch])
            for (_, answer), outcome in zip(batch, outcomes, strict=True):
                if not answer.done():
                    answer.set_result(outcome)

    async def _register_batch(
        self, claims: Sequence[Claim]
    ) -> Sequence[registration.RegistrationOutcome | None]:
        """Return the outcome of each claim; None for each if all must be tried alone."""
        try:
            return await _in_thread(
                lambda: registration.register_all(
                    claims, **_registration_options(), patience=SHARED_LOCK_TIMEOUT
                )
            )
        except Exception as error:
            # On any failure each caller finds out for itself, and gets its own answer.
            if len(claims) > 1:
                log.info("%d registrations are tried one by one: %s", len(claims), type(error).__name__)
            return [None] * len(claims)


def _split_batch(waiting: Sequence[_WaitingClaim]) -> tuple[list[_WaitingClaim], list[_WaitingClaim]]:
    """Split the claims: the next transaction, without equal names or secrets, and the rest."""
    batch: list[_WaitingClaim] = []
    remaining: list[_WaitingClaim] = []
    used_names: set[str] = set()
    for entry in waiting:
        entry_names = {
            f"name {names.key(entry[0].registration.name)}",
            f"secret {entry[0].fingerprint or names.key(entry[0].registration.name)}",
        }
        if len(batch) == MAX_BATCH_SIZE or entry_names & used_names:
            remaining.append(entry)
        else:
            batch.append(entry)
            used_names |= entry_names
    return batch, remaining


def _registration_options() -> dict[str, Any]:
    return {"now": clock.now(), "auto_approve": conf.cluster().auto_approve_nodes}


class RegistrationApplication:
    """ASGI application that registers workers."""

    error_type = "node_error"
    flat_auth = True

    def __init__(self) -> None:
        self._registrar = Registrar()

    async def __call__(self, scope: worker_routes.Scope, receive: Any, send: Any) -> None:
        try:
            status, body, headers = 201, await self._register(scope, receive), {}
        except wire.Disconnected:
            return
        except Exception as error:
            refusal = translate_error(error)
            if refusal is None:
                raise
            status, body, headers = refusal.status, body_of(refusal, self), wire.refusal_headers(refusal)
        await worker_routes.send_json(send, status, body, _PRIVATE_HEADERS | headers)

    async def _register(self, scope: worker_routes.Scope, receive: Any) -> dict[str, Any]:
        headers, address = worker_routes.headers_of(scope), worker_routes.client_of(scope)
        offered, ticket = await _authenticate(scope, headers, address)
        worker_routes.require_method(scope, "POST")
        fields = await _read_fields(headers, receive)
        await _check_token(fields.pop("token", ""), offered, address)
        registered = await self._registrar.register(
            registration.claim(
                parse_registration(fields),
                secret=headers.get(b"x-localai-node-secret", ""),
                instance=identity.check_instance(headers.get(b"x-localai-node-instance", "")),
                source_address=address,
                ticket=ticket,
            )
        )
        node, credentials = registered.node, registered.credentials
        return REGISTERED_SHAPE.of_object(
            node,
            api_token=registered.api_token,
            nats_jwt=credentials.jwt if credentials else "",
            nats_user_seed=credentials.seed if credentials else "",
            nats_url=bus_access.worker_url(_server_host(headers)) if credentials else "",
        )


def _server_host(headers: dict[bytes, str]) -> str:
    """Return the name by which the worker reached this server; "" if the header is invalid."""
    try:
        return urlsplit(f"//{headers.get(b'host', '')[:255]}").hostname or ""
    except ValueError:
        return ""


async def _authenticate(
    scope: worker_routes.Scope, headers: dict[bytes, str], address: str
) -> tuple[str, JoinToken | None]:
    """Return the header's token, and its ticket if it is a join token; raise the errors for 401 and 429."""
    offered = principals.bearer(headers.get(b"authorization", ""))
    try:
        if not offered:
            raise errors.NotAuthenticated(worker_routes.NO_CREDENTIAL_MESSAGE)
        fingerprint = identity.node_fingerprint(headers.get(b"x-localai-node-secret", ""))
        try:
            await asyncio.to_thread(throttle.token_failures().check, address, clock.now())
        except throttle.TooManyFailures:
            # Others at this address lock out no known worker.
            if not await _in_thread(lambda: identity.is_bound(fingerprint)):
                raise
        if principals.is_registration_token(offered):
            return offered, None
        if not joining.is_join_token(offered):
            # A known worker proves itself by its secret: it goes on when the registration token is replaced.
            if await _in_thread(lambda: identity.is_bound(fingerprint)):
                return offered, None
            raise identity.WrongCredential("invalid registration token")
        return offered, await _in_thread(lambda: joining.recognise(offered, fingerprint, clock.now()))
    except errors.NotAuthenticated as refusal:
        raise await worker_routes.refusal_for_caller(refusal, scope) from refusal


async def _read_fields(headers: dict[bytes, str], receive: Any) -> dict[str, Any]:
    """Return the fields of the body. Raise InvalidInput, or DRF's ValidationError for a field."""
    limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    body = await wire.read_json_object(receive, headers.get(b"content-type", ""), limit)
    fields: dict[str, Any] = _BODY_SERIALIZER.run_validation(body)
    return fields


async def _check_token(token: str, offered: str, address: str) -> None:
    """Raise the refusal, which is nested, unless the body has the same token as the header."""
    if not token:
        raise errors.NotAuthenticated("registration token required", field="token", nested=True)
    if not principals.secrets_equal(token, offered):
        await asyncio.to_thread(throttle.token_failures().note, address, clock.now())
        raise identity.WrongCredential("invalid registration token", field="token", nested=True)


_AGENT_EXAMPLE = {
    "name": "agent-1",
    "node_type": "agent",
    "status": "healthy",
    "api_token": "lai-" + "0f" * 32,
}
_NESTED_EXAMPLE = {"error": {"code": 401, "message": "registration token required", "type": "node_error"}}


class RegistrationDescription(APIView):
    """`/api/node/register` (§1.1, R1.29)."""

    authentication_classes = [worker_routes.RegistrationAuthentication]
    permission_classes = []
    tag = "worker"

    @describe(
        "node_register",
        "Register a worker",
        REGISTERED_SHAPE,
        status=201,
        meaning="Registered; `pending` until an admin approves it.",
        others={
            401: OpenApiResponse(
                REGISTRATION_REFUSAL.ref,
                "A missing or wrong token, or a join token that is revoked, expired or used up: flat for the "
                "header's, nested for the body's.",
            ),
        },
        refused=(400, 409, 413, 429),
        body=RegistrationSerializer,
        parameters=[worker_routes.SECRET_PARAMETER, worker_routes.INSTANCE_PARAMETER],
        shown=REGISTERED_SHAPE.example,
        examples=[
            request_example(WORKER_EXAMPLE, "A worker without a GPU"),
            request_example(WORKER_EXAMPLE | _RUNNING_FIELDS, "Our worker, with what it runs"),
            request_example(_AGENT, "An agent"),
            response_example(REGISTERED_SHAPE.example | _AGENT_EXAMPLE, "201", "approved agent"),
            response_example(_NESTED_EXAMPLE, "401", "answer"),
        ],
    )
    def post(self, request: Request) -> None:
        """Registers a worker, or updates a known one after a restart. A new worker awaits approval."""
