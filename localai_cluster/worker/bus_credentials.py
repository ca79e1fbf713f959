"""The worker's credentials for the message bus, and the times of their renewal (nats.md §9.3).

A registration provides credentials. Registering again provides new ones: at 75 % of their lifetime, and at
once when the bus refuses those in use. The connection switches without losing a message
(`messaging/nats.py`). A node without credentials is pending: it has no connection and polls until an
administrator decides. Credentials from the settings are used unchanged and never replaced.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace

from localai_cluster.kit import clock
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.messaging.credentials import Credentials
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import Servers, parse_url
from localai_cluster.worker.control_plane import CallFailed, Registered
from localai_cluster.worker.registration import hint

log = logging.getLogger(__name__)

REFRESH_AT = 0.75
RETRY_EVERY = 30.0
AGAIN_AFTER_REFUSAL = 5.0
"""Minimum seconds between two registrations that are caused by a refusal of the bus."""
PENDING_FIRST, PENDING_LONGEST = 2.0, 10.0
REFUSED_PAUSE = 60.0
"""Seconds to pause after a refusal, as every refused registration counts against this address."""


class BusCredentials:
    """Provides `bus` with credentials. `register_once` registers and passes the response to `adopt`."""

    def __init__(
        self,
        bus: NatsBus,
        configured: Servers | None,
        tls: ssl.SSLContext | None,
        register_once: Callable[[], Awaitable[None]],
    ) -> None:
        self._bus = bus
        self._tls = tls
        self._configured = configured
        self._fixed = replace(configured, tls=tls) if configured and configured.proves_itself else None
        self._register_once = register_once
        self._lifetime: float | None = None
        self._due_at: float | None = None
        self._refused = asyncio.Event()
        self._pending_pause = PENDING_FIRST
        self._not_before = 0.0
        """Earliest time of a registration that is caused by a refusal of the bus."""
        self.problem = "not registered yet"
        """Reason why this worker does not dial the bus; "" if it does."""

    def adopt(self, registered: Registered) -> None:
        """Use the credentials of a registration."""
        if self._fixed is not None:
            if self.problem:
                self._bus.use(self._fixed)
                self.problem = ""
            return
        try:
            servers = self._servers(registered)
        except (ValueError, InvalidInput) as error:
            self.problem = f"the control plane gave unusable credentials for the message bus: {error}"
            log.error("%s", self.problem)
            self._due_at = clock.monotonic() + RETRY_EVERY
            return
        if servers is None:
            self.problem = "this node is awaiting approval by an administrator"
            self._bus.use(None)
            self._due_at = clock.monotonic() + self._pending_pause
            self._pending_pause = min(2 * self._pending_pause, PENDING_LONGEST)
            return
        assert servers.credentials is not None
        self.problem, self._pending_pause = "", PENDING_FIRST
        self._lifetime = servers.credentials.lifetime
        # Counted from the receipt: the clocks of this machine and of the control plane may differ.
        self._due_at = None if self._lifetime is None else clock.monotonic() + REFRESH_AT * self._lifetime
        self._bus.use(servers)

    def refused(self) -> None:
        """Record that the bus rejected the credentials in use."""
        if self._fixed is None:
            self._refused.set()

    async def run(self) -> None:
        """Register again whenever new credentials are needed, until cancelled."""
        while True:
            await self._until_due()
            is_refused_by_bus = self._refused.is_set()
            self._refused.clear()
            # A bus that refuses fresh credentials must not make this worker flood the control plane.
            self._not_before = clock.monotonic() + AGAIN_AFTER_REFUSAL
            try:
                await self._register_once()
            except CallFailed as error:
                is_final = error.refused or error.http_status == 409
                pause = max(REFUSED_PAUSE if is_final else self._retry_pause(), error.wait)
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

    async def _until_due(self) -> None:
        with contextlib.suppress(TimeoutError):
            pause = None if self._due_at is None else max(self._due_at - clock.monotonic(), 0.0)
            async with asyncio.timeout(pause):
                await self._refused.wait()
            await asyncio.sleep(max(self._not_before - clock.monotonic(), 0.0))

    def _retry_pause(self) -> float:
        return min(RETRY_EVERY, max(1.0, (self._lifetime or RETRY_EVERY * 20) / 20))

    def _servers(self, registered: Registered) -> Servers | None:
        """Return the servers to dial; None without credentials. Raise ValueError or InvalidInput."""
        if not registered.nats_jwt or not registered.nats_user_seed:
            return None
        credentials = Credentials.of(registered.nats_jwt, registered.nats_user_seed)
        servers = self._configured or self._parse_bus_url(registered.nats_url)
        return replace(servers, credentials=credentials, tls=self._tls)

    @staticmethod
    def _parse_bus_url(url: str) -> Servers:
        if not url:
            raise ValueError("it did not say where the bus is; set LOCALAI_NATS_URL")
        return parse_url(url)
