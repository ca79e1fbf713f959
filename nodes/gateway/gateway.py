"""The gateway from a model's name to an engine: pick or load a replica, call, release, retry.

Each web process has one `Gateway` on the serving event loop; `manage.py serve` (or ASGI's lifespan) calls
`start` and `stop`. A request is counted out in a `finally`, so success, error, disconnect and cancellation
all release the replica. If a replica is dead, the next one is tried.
"""

import asyncio
import logging
import math
import re
from dataclasses import dataclass
from types import TracebackType
from uuid import UUID

from django.db import Error as DatabaseError

from localai_cluster.accounts.authentication import recent_sessions
from localai_cluster.accounts.sessions import ACCESS_CHANNEL
from localai_cluster.kit import cancellation, clock, conf, database_pool, outage
from localai_cluster.kit.errors import NotFound, Unavailable
from localai_cluster.metrics import web as metrics
from localai_cluster.rpc.client import BackendClient, ClientPool
from localai_cluster.rpc.errors import BackendError, IdentityMismatch, Lost, ModelNotLoaded, Refused
from localai_cluster.web import sockets
from nodes.definitions import folder, rows
from nodes.definitions.files import Definition
from nodes.gateway.picks import Picker, ProcessHeartbeat, no_weights
from nodes.gateway.prefix_routing import PrefixRouter, PrefixService
from nodes.gateway.request import InferenceRequest, Replica
from nodes.loading import load_info
from nodes.loading.wait import Loads, may_see_nodes
from nodes.registry import heartbeats
from nodes.replicas import hooks
from operations.changes.events import NODES, OPERATIONS, listen
from operations.executor.work import WakeUps, in_thread
from operations.models import TERMINAL, Operation

logger = logging.getLogger(__name__)


class ModelNotFound(NotFound):
    """No model of that name is defined."""

    code = "model_not_found"


_DEFAULT_TAG = ":latest"
"""Tag that Ollama's clients may append to a model's name. A model whose own name ends with the tag takes
precedence."""


async def find_definition(name: str) -> Definition:
    """Return the definition of the model with this name. The name may have the default tag.

    Raise ModelNotFound for an unknown name. Raise Unavailable if the models folder, or the database with the
    definitions of past loads, is needed and does not respond.
    """
    models = folder.folder()
    with outage.unavailable_on(DatabaseError):
        definition = await load_info.find_definition(models, name)
        if definition is None and name.endswith(_DEFAULT_TAG):
            definition = await load_info.find_definition(models, name.removesuffix(_DEFAULT_TAG))
    if definition is None:
        raise ModelNotFound(
            f"The model {name[:100]!r} does not exist; GET /v1/models lists them", field="model"
        )
    return definition


async def find_model(request: InferenceRequest, name: str) -> Definition:
    """Return the definition of the model, and set the model of the request.

    Raise the errors of `find_definition`.
    """
    definition = await find_definition(name)
    request.model = definition.name
    return definition


MAX_REPLICA_ATTEMPTS = 4
"""Maximum number of replicas on which one request is tried."""
MAX_LOADS_PER_REQUEST = 3
"""Maximum number of successful loads for one request. If none of them provides a replica, it fails (C34)."""
PROBE_TIMEOUT_SECONDS = 2.0
"""Time limit of the health call that decides whether a replica is dead (C19)."""


def load_wait_deadline(*, is_patient: bool = False) -> float:
    """Return the monotonic time at which a request that arrives now stops waiting for a load (C32)."""
    cluster = conf.cluster()
    budget = cluster.ollama_load_wait if is_patient else cluster.model_load_wait
    return clock.monotonic() + budget if budget else math.inf


_TRANSPORT_ADDRESS_PATTERN = re.compile(r"\b(ipv[46]|dns):")
"""Address of an engine in a message of gRPC."""


class Gateway:
    """Picks replicas, starts loads and provides engine clients for the requests of one web process."""

    def __init__(
        self, picker: Picker, clients: ClientPool, loads: Loads, prefixes: PrefixRouter | None = None
    ) -> None:
        self.picker = picker
        self._prefixes = prefixes
        self._clients = clients
        self._loads = loads
        self._probes: dict[tuple[str, str], asyncio.Task[bool]] = {}
        """Running health calls by (address, token); concurrent failures of one engine share a call."""

    async def acquire(self, request: InferenceRequest) -> Replica:
        """Pick a replica of the request's model; wait for a load if no replica is loaded.

        The replica counts the request until it is released.
        """
        if (replica := await self._pick(request)) is not None:
            return replica
        for _ in range(MAX_LOADS_PER_REQUEST):
            has_ended = False
            with self._loads.join(request) as load:
                while not has_ended:
                    has_ended = await load.next_turn(request)
                    if (replica := await self._pick(request)) is not None:
                        return replica
        raise Unavailable(f"model {request.model} was loaded, but no replica of it is available")

    def client(self, replica: Replica) -> BackendClient:
        """Return the client of the replica's engine. Raise Refused if the address is invalid."""
        return self._clients.get(replica.address, replica.token)

    async def _pick(self, request: InferenceRequest) -> Replica | None:
        if self._prefixes is None or not request.chain:
            return await self.picker.acquire(request)
        self._prefixes.set_preferred_replica(request)
        replica = await self.picker.acquire(request)
        self._prefixes.record_pick(request)
        return replica

    async def exclude_if_unusable(self, replica: Replica, error: BackendError) -> None:
        """Exclude the replica from picks if the error or a health call shows that it cannot serve."""
        has_wrong_model = isinstance(error, ModelNotLoaded | IdentityMismatch)
        is_dead = isinstance(error, Refused | Lost) and not await self._is_responding(replica)
        if not (has_wrong_model or is_dead):
            return
        with outage.unavailable_on(*database_pool.UNREACHABLE_ERRORS):
            removed = await self.picker.exclude(replica, has_wrong_model=has_wrong_model)
        if removed:
            logger.warning(
                "No more requests for the replica of %s at %s: %s",
                replica.model,
                replica.address,
                error.message,
            )
        if is_dead:
            self._clients.forget(replica.address, replica.token)

    async def _is_responding(self, replica: Replica) -> bool:
        """Return True if the replica's engine responds to a health call (R2.13).

        Concurrent requests share one call. The result is not cached, because the failure that caused the call
        is newer than any cached success.
        """
        key = (replica.address, replica.token)
        probe = self._probes.get(key)
        if probe is None:
            probe = self._probes[key] = asyncio.create_task(self._is_healthy(replica))
            probe.add_done_callback(lambda _: self._probes.pop(key, None))
        return await asyncio.shield(probe)

    async def _is_healthy(self, replica: Replica) -> bool:
        try:
            return await self.client(replica).health(PROBE_TIMEOUT_SECONDS)
        except BackendError:
            return False


def _may_name_address(error: BackendError) -> bool:
    """Return True if the text of the error is the transport's, which names the engine's address."""
    return isinstance(error, Refused | Lost) or _TRANSPORT_ADDRESS_PATTERN.search(error.message) is not None


class Attempts:
    """The attempts of one request: `while True: async with attempts as engine: return …`.

    On entry a replica is picked, on exit it is released. The calls inside the block must end by the request's
    `deadline`. If the replica did no work (it is dead, busy, or has another model), the request is retried on
    another replica. If the connection broke during the call, the request is retried only once, because it may
    have crashed the engine. Any other error is raised. After the response has begun, every error is raised.

    The deadline is set when the first replica is picked and covers all attempts. For a streamed response it
    is the time limit of the first piece.
    """

    def __init__(self, gateway: Gateway, request: InferenceRequest) -> None:
        self._gateway = gateway
        self._request = request
        self._count = self._losses = 0
        request.wait_until = load_wait_deadline(is_patient=request.is_patient)

    async def __aenter__(self) -> BackendClient:
        request = self._request
        while True:
            self._count += 1
            self._replica = await self._gateway.acquire(request)
            request.deadline = min(request.deadline, clock.monotonic() + conf.cluster().request_timeout)
            request.wait_until = min(request.wait_until, request.deadline)
            try:
                return self._gateway.client(self._replica)
            except BackendError as error:
                if not await self.__aexit__(type(error), error, None):
                    raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if isinstance(error, BackendError) and await self._can_retry(error):
                return True
            shows_nodes = may_see_nodes(self._request.principal)
            if isinstance(error, BackendError) and _may_name_address(error) and not shows_nodes:
                logger.info("%s at %s: %s", self._replica.model, self._replica.address, error.message)
                error.message = type(error).message
            return False
        finally:
            self._gateway.picker.release(self._replica)

    async def _can_retry(self, error: BackendError) -> bool:
        replica = self._replica
        await self._gateway.exclude_if_unusable(replica, error)
        is_lost = isinstance(error, Lost)
        self._losses += is_lost
        is_last = self._count == MAX_REPLICA_ATTEMPTS or self._losses > 1 or self._request.has_begun
        if is_last or not (error.repeatable or is_lost):
            return False
        logger.info("%s at %s: %s; going on", replica.model, replica.address, error.message)
        # That replica may stay in service and match the prefix, so the next picks ignore prefixes.
        self._request.ignore_prefixes()
        return True


@dataclass
class _GatewayResources:
    gateway: Gateway
    heartbeat: ProcessHeartbeat
    clients: ClientPool
    loads: Loads
    listener: "asyncio.Task[None]"
    by_prefix: PrefixService | None = None


_running_resources: _GatewayResources | None = None


def current() -> Gateway:
    """Return the gateway of this process. Raise Unavailable if it is not started."""
    if _running_resources is None:
        raise Unavailable("the web process is not ready yet", retry_after=1)
    return _running_resources.gateway


def attempts(request: InferenceRequest) -> Attempts:
    """Return the attempts of a request on the gateway of this process."""
    return Attempts(current(), request)


def wake_ups() -> WakeUps:
    """Return the wake-ups of requests that wait in this process; before `start` they wake nobody."""
    return _running_resources.loads.wake_ups if _running_resources is not None else WakeUps()


MAX_WAIT_SECONDS = 90.0
"""Seconds that a request waits for its operation: enough for the usual grace and a worker's stop."""
_POLL_SECONDS = 2.0
"""Seconds between two reads of the operation without a wake-up."""


async def wait_for_end(operation_id: UUID, seconds: float) -> Operation | None:
    """Wait up to `seconds` until the operation ends; return it as read last, or None without a row."""
    until = clock.monotonic() + seconds
    with wake_ups().watch(operation_id) as watch:
        while True:
            operation = await in_thread(Operation.objects.filter(pk=operation_id).first)
            remaining = until - clock.monotonic()
            if operation is None or operation.status in TERMINAL or remaining <= 0:
                return operation
            await watch.changed(timeout=min(remaining, _POLL_SECONDS))


_MAX_LISTEN_WAIT_SECONDS = 1.0
"""Maximum seconds for which a start waits until this process receives notifications."""


async def start() -> None:
    """Open the database pool, register this web process and start its gateway."""
    global _running_resources
    shared = await database_pool.open_shared()
    by_prefix = PrefixService.connect(conf.cluster().prefix_ttl) if conf.cluster().prefix_cache else None
    prefixes = None if by_prefix is None else by_prefix.prefixes
    connection = database_pool.DedicatedConnection(conf.cluster().database_url)
    wake_ups, listening = WakeUps(), asyncio.Event()
    picker = Picker(shared, connection, prefixes.weights if prefixes is not None else no_weights)
    clients, loads = ClientPool(stream_client=conf.cluster().stream_client), Loads(wake_ups)
    metrics.set_reader(metrics.IN_FLIGHT, picker.in_flight)
    metrics.set_reader(metrics.WAITING, loads.waiting)
    heartbeat = ProcessHeartbeat(picker, conf.cluster().web_stale_after)
    await heartbeat.start()
    listener = asyncio.create_task(_listen_for_notifications(wake_ups, prefixes, listening))
    gateway = Gateway(picker, clients, loads, prefixes)
    # Before the waits, because daphne accepts requests at once.
    _running_resources = _GatewayResources(gateway, heartbeat, clients, loads, listener, by_prefix)
    if by_prefix is not None:
        await by_prefix.start(shared, picker.process_id)
    # Its connection clears all caches: of requests before it, the prompts would be forgotten.
    await cancellation.wait_for(listening, _MAX_LISTEN_WAIT_SECONDS)


async def stop() -> None:
    """Stop the gateway and release its resources. No request may be running."""
    global _running_resources
    running, _running_resources = _running_resources, None
    if running is None:
        return
    await cancellation.cancel_and_wait(running.listener)
    if running.by_prefix is not None:
        await running.by_prefix.stop()
    await running.loads.close()
    await running.heartbeat.stop()
    await running.clients.close()
    await database_pool.close_shared()


async def _listen_for_notifications(
    wake_ups: WakeUps, prefixes: PrefixRouter | None = None, listening: asyncio.Event | None = None
) -> None:
    """Handle notifications until cancelled; set `listening` once they are received."""
    async for channel, payload in listen(OPERATIONS, NODES, ACCESS_CHANNEL, hooks.CHANNEL, rows.CHANNEL):
        try:
            _handle_notification(channel, payload, wake_ups, prefixes)
        except Exception:
            # A malformed notification must not end the subscription to all others.
            logger.exception("a notification on %s is passed over: %r", channel, payload)
        if listening is not None:
            listening.set()


def _handle_notification(
    channel: str, payload: str, wake_ups: WakeUps, prefixes: PrefixRouter | None
) -> None:
    # The channel is "" after a reconnect: notifications of all channels may be lost.
    if channel in (NODES, ""):
        heartbeats.identity_cache().forget(payload)
    if channel in (OPERATIONS, ""):
        wake_ups.notify(payload.partition(" ")[0])
    if channel in (rows.CHANNEL, ""):
        folder.folder().rows_changed()
    if channel in (ACCESS_CHANNEL, ""):
        sockets.recheck_sockets(payload)
        recent_sessions.clear()
        if _running_resources is not None:
            _running_resources.gateway.picker.confirmed_keys.clear()
    if prefixes is not None and channel == hooks.CHANNEL:
        prefixes.forget_replica(hooks.decode(payload))
    if prefixes is not None and channel == "":
        prefixes.forget_all()
