"""Registration: the request body of a worker, the retries (worker.md §5), and the credentials of the bus.

A new registration provides new credentials of the message bus: at 75 % of their lifetime, and at once when
the bus refuses the credentials in use (nats.md §9.3). The connection switches without losing a message
(`messaging/nats.py`). A pending node has no connection and polls until an administrator decides. An approved
node without credentials connects with the URL alone, because a stock frontend gives none by default.
Credentials from the settings are used unchanged and never replaced.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from localai_cluster import __version__
from localai_cluster.kit import backoff, cancellation, clock
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import Credentials, Servers, parse_url
from localai_cluster.worker.config import Config
from localai_cluster.worker.control_plane import (
    PENDING_STATUS,
    CallFailed,
    ControlPlane,
    DowngradeRefused,
    Registered,
    ServerKind,
)
from localai_cluster.worker.engines import Engine
from localai_cluster.worker.hardware import GpuTotals, system_facts

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 100
FIRST_RETRY_PAUSE, MAX_RETRY_PAUSE = 2.0, 30.0
REPLICA_SLOTS_LABEL = "node.replica-slots"


class GaveUp(ClusterError):
    """The control plane did not accept any registration."""

    code = "registration_failed"


def body(
    config: Config, capability: str, gpus: GpuTotals, measured: Mapping[str, int], engine_token: str
) -> dict[str, Any]:
    """Return the registration body of a backend worker (worker.md §5.1), without the registration token.

    The worker's engines accept only calls with `engine_token`.
    """
    slots = config.max_replicas_per_model
    values: dict[str, Any] = {
        "name": config.node_name,
        "address": config.advertise_addr,
        "http_address": config.advertise_http_addr,
        "total_vram": gpus.total,
        "available_vram": gpus.total,
        "gpu_vendor": gpus.vendor,
        "gpu_compute_capability": gpus.compute_capability,
        "capability": capability,
        "engine_token": engine_token,
        "max_replicas_per_model": slots,
        "labels": {**config.node_labels, REPLICA_SLOTS_LABEL: str(slots)},
        "version": __version__,
        "system": system_facts(),
        **measured,
    }
    if gpus.each is not None:
        values["gpus"] = [gpu.report for gpu in gpus.each]
    if config.vram_budget:
        values["vram_budget"] = config.vram_budget
    return values


def running_processes(engines: Iterable[Engine], host: str) -> list[dict[str, str]]:
    """Return the running engines by key, with the addresses that install replies have reported."""
    return [{"process_key": engine.key, "address": f"{host}:{engine.port}"} for engine in engines]


def retry_pauses() -> Iterator[float]:
    """Yield the seconds before each retry: 2, 4, 8, 16, 30, 30 …"""
    for failures in range(1, MAX_ATTEMPTS):
        yield backoff.delay(failures, first=FIRST_RETRY_PAUSE, longest=MAX_RETRY_PAUSE)


async def register(
    control_plane: ControlPlane,
    body: Callable[[], Awaitable[dict[str, Any]]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Registered:
    """Register this worker, with up to 100 attempts. Raise GaveUp.

    Attempts do not count if the server ignores a secret that it accepted before (DowngradeRefused).
    """
    delays = retry_pauses()
    while True:
        try:
            return await control_plane.register(await body())
        except DowngradeRefused as error:
            log.error("%s", error)
            await sleep(error.wait)
        except CallFailed as error:
            pause = next(delays, None)
            if pause is None:
                raise GaveUp(
                    f"registration failed {MAX_ATTEMPTS} times, giving up: {error}{hint(error)}"
                ) from error
            pause = max(pause, error.wait)
            log.warning("registration failed: %s; retrying in %g s%s", error, pause, hint(error))
            await sleep(pause)


_HINT_BY_STATUS = {
    401: "Check LOCALAI_REGISTRATION_TOKEN; for a new join token, press Add a node on the Nodes page.",
    403: "If this node's secret was revoked, give the node a new identity: stop the worker, delete the file "
    "node-secret in its data folder (and node-secret.next, if it exists), start the worker, and have an "
    "administrator approve it.",
    409: "An administrator must resolve this conflict: accept this worker on the node's page or with "
    "`manage.py nodes accept`, or give it another LOCALAI_NODE_NAME. If its data folder is a copy of "
    "another worker's, stop this worker and delete the file node-secret in the copy.",
    429: "The control plane has counted too many failed attempts from this address.",
}


def hint(error: CallFailed) -> str:
    """Return the remedy for a refused registration, as a sentence to append; "" if none is known."""
    return f". {_HINT_BY_STATUS[error.http_status]}" if error.http_status in _HINT_BY_STATUS else ""


REFRESH_FRACTION = 0.75
"""Fraction of the credentials' lifetime after which the worker registers again."""
MAX_REFRESH_RETRY_SECONDS = 30.0
REFUSAL_INTERVAL_SECONDS = 5.0
"""Minimum seconds between two registrations after refusals of the bus."""
FIRST_PENDING_POLL_SECONDS, MAX_PENDING_POLL_SECONDS = 2.0, 10.0
REFUSED_PAUSE_SECONDS = 60.0
"""Seconds to pause after a refused registration, because each one counts against this address."""
NO_CREDENTIALS_PAUSE_SECONDS = 300.0
"""Seconds until a worker whose bus requires credentials registers again to get some.

A stock frontend considers a worker healthy for a minute after its registration, and sends it requests.
"""


AWAITS_APPROVAL_REASON = "this node is awaiting approval by an administrator"
AWAITS_CREDENTIALS_REASON = (
    "the control plane has given no credentials for the message bus, and LOCALAI_NATS_REQUIRE_AUTH is set"
)


class BusCredentials:
    """Provides `bus` with credentials.

    `register_once` registers and passes the response to `adopt`. With `require_auth` the worker never
    connects to the bus without credentials.
    """

    def __init__(
        self,
        bus: NatsBus,
        configured: Servers | None,
        tls: ssl.SSLContext | None,
        register_once: Callable[[], Awaitable[None]],
        *,
        require_auth: bool = False,
    ) -> None:
        self._bus = bus
        self._require_auth = require_auth
        self._tls = tls
        self._configured = configured
        self._fixed = replace(configured, tls=tls) if configured and configured.has_login else None
        self._register_once = register_once
        self._has_credentials = False
        self._lifetime: float | None = None
        self._due_at: float | None = None
        self._is_refused = False
        """The bus has refused a connection since the last registration of `run`."""
        self._changed = asyncio.Event()
        """Set to make `run` read the time of its next registration again."""
        self._pending_polls = 0
        self._not_before = 0.0
        """Earliest time of a registration that is caused by a refusal of the bus."""
        self.problem = "not registered yet"
        """Reason why this worker does not dial the bus; "" if it does."""

    def adopt(self, registered: Registered) -> None:
        """Connect the bus with the credentials of a registration, also of one that `run` has not made."""
        self._changed.set()
        if self._fixed is not None:
            if self.problem:
                self._bus.use(self._fixed)
                self.problem = ""
            return
        try:
            servers = self._servers_of(registered)
        except (ValueError, InvalidInput) as error:
            self.problem = f"the message bus cannot be used: {error}"
            log.error("%s", self.problem)
            is_stock = registered.kind is ServerKind.STOCK
            if is_stock:  # the credentials in use are those of another server
                self._bus.use(None)
            self._due_at = None if is_stock else clock.monotonic() + MAX_REFRESH_RETRY_SECONDS
            return
        if servers is None:
            self.problem = (
                AWAITS_APPROVAL_REASON if registered.status == PENDING_STATUS else AWAITS_CREDENTIALS_REASON
            )
            self._bus.use(None)
            self._is_refused = False  # by a bus that is not dialled any more
            self._pending_polls += 1
            pause = backoff.delay(
                self._pending_polls, first=FIRST_PENDING_POLL_SECONDS, longest=MAX_PENDING_POLL_SECONDS
            )
            self._due_at = clock.monotonic() + pause
            return
        self.problem, self._pending_polls = "", 0
        self._has_credentials = servers.credentials is not None
        if not self._has_credentials:
            self._not_before = clock.monotonic() + NO_CREDENTIALS_PAUSE_SECONDS
        self._lifetime = servers.credentials.lifetime if servers.credentials else None
        # Counted from the receipt: the clocks of this machine and of the control plane may differ.
        self._due_at = (
            None if self._lifetime is None else clock.monotonic() + REFRESH_FRACTION * self._lifetime
        )
        self._bus.use(servers)

    def refused(self) -> None:
        """Record that the bus refused the credentials in use, or a connection without credentials."""
        if self._fixed is not None:
            return
        if not self._has_credentials:
            self.problem = (
                "the message bus requires credentials, and the control plane has given none: enable them "
                "there, or set LOCALAI_NATS_JWT and LOCALAI_NATS_USER_SEED"
            )
        self._is_refused = True
        self._changed.set()

    async def run(self) -> None:
        """Register again whenever new credentials are needed, until cancelled."""
        while True:
            await self._wait_until_due()
            is_refused_by_bus, self._is_refused = self._is_refused, False
            if is_refused_by_bus and not self._has_credentials and self._bus.connected:
                continue  # the bus has changed its mind
            # A bus that refuses fresh credentials must not make this worker flood the control plane.
            self._not_before = clock.monotonic() + REFUSAL_INTERVAL_SECONDS
            try:
                await self._register_once()
            except CallFailed as error:
                is_final = error.is_credential_refused or error.http_status == 409
                pause = max(REFUSED_PAUSE_SECONDS if is_final else self._retry_pause(), error.wait)
                self._due_at = clock.monotonic() + pause
                if is_final and is_refused_by_bus:
                    self._not_before = self._due_at
                    self.problem = f"the message bus and the control plane refuse this worker: {error}"
                    self._bus.use(None)
                log.warning(
                    "no new credentials for the message bus: %s; retrying in %g s%s",
                    error,
                    pause,
                    hint(error),
                )

    async def _wait_until_due(self) -> None:
        while True:
            due_at = self._not_before if self._is_refused else self._due_at
            pause = None if due_at is None else due_at - clock.monotonic()
            if pause is not None and pause <= 0:
                return
            self._changed.clear()
            await cancellation.wait_for(self._changed, pause)

    def _retry_pause(self) -> float:
        return min(
            MAX_REFRESH_RETRY_SECONDS, max(1.0, (self._lifetime or MAX_REFRESH_RETRY_SECONDS * 20) / 20)
        )

    def _servers_of(self, registered: Registered) -> Servers | None:
        """Return the servers to connect to; None while the node awaits approval or credentials.

        Raise ValueError or InvalidInput.
        """
        jwt, seed = registered.nats_jwt, registered.nats_user_seed
        if bool(jwt) != bool(seed):
            raise ValueError("the control plane gave a JWT without its seed, or a seed without its JWT")
        if not jwt and (registered.status == PENDING_STATUS or self._require_auth):
            return None
        credentials = Credentials.of(jwt, seed) if jwt else None
        servers = self._configured or self._parse_bus_url(registered.nats_url)
        return replace(servers, credentials=credentials, tls=self._tls)

    @staticmethod
    def _parse_bus_url(url: str) -> Servers:
        if not url:
            raise ValueError(
                "the control plane reported no address of the message bus;"
                " set LOCALAI_NATS_URL on this worker"
            )
        return parse_url(url)
