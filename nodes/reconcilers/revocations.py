"""Revocation of NATS credentials: the server ends connections with revoked credentials and refuses new ones.

One `Revocations` runs in every controller, with its own connection to the bus's system account. It runs a
pass after a NOTIFY, after every reconnect and every `LOOK_EVERY` seconds: it compares the server's copy of
the account's JWT with the rows, and pushes a new JWT if they differ. It checks again after each push, so that
two controllers that push at once end with the state of the rows.
"""

import asyncio
import logging

from django.db import Error as DatabaseError

from localai_cluster import bus_access
from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.nkeys import KeyPair
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import revocations_of, revoking_token
from localai_cluster.metrics import passes
from nodes.registry import bus_credentials
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

LOOK_EVERY = 30.0
_LIMIT = 5.0
_INBOX = "_INBOX.revocations"
_PUSHES = 5


class Revocations(PeriodicTask):
    """Periodic task of a controller; without the operator's key it logs a warning and does nothing."""

    def __init__(self) -> None:
        super().__init__(
            "revoked credentials of the message bus",
            self._run_pass,
            interval=LOOK_EVERY,
            # It must not end this task: without it nothing is revoked any more.
            retry_on=(ClusterError, DatabaseError, ValueError),
        )
        self._operator = bus_access.operator()
        self._bus: NatsBus | None = None

    async def run(self) -> None:
        """Run passes until cancelled."""
        if self._operator is None:
            log.warning(
                "a revoked node stays on the message bus until its credentials expire (%g h): set "
                "CLUSTER_NATS_OPERATOR_SEED and CLUSTER_NATS_SYSTEM_SEED, or a shorter "
                "LOCALAI_NATS_WORKER_JWT_TTL",
                conf.cluster().nats_worker_jwt_ttl / 3600,
            )
            await asyncio.Event().wait()
            return
        self._bus = NatsBus(bus_access.system("revocations"), name="revocations")
        self._bus.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_reconnects(self._bus))
                await super().run()
        finally:
            await self._bus.close()

    async def _follow_reconnects(self, bus: NatsBus) -> None:
        generation = await bus.wait_connected()
        while True:
            generation = await bus.wait_connected(after=generation)
            self.wake()

    async def _run_pass(self) -> None:
        if self._bus is not None and self._operator is not None:
            await self._bus.wait_connected()
            with passes.counted("revocations"):
                await self.compare(self._bus, self._operator)

    async def compare(self, bus: NatsBus, operator: KeyPair) -> int:
        """Make the server's revocations equal to the rows; return the number of pushes.

        Raise ClusterError, and ValueError if the server refuses or another controller keeps pushing.
        """
        account = bus_access.account().public_key
        for pushes in range(_PUSHES):
            expected = await in_thread(bus_credentials.revoked, clock.now())
            lookup = f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP"
            current = (await bus.request(lookup, b"", _LIMIT, inbox=_INBOX)).decode()
            if revocations_of(current) == expected:
                return pushes
            token = revoking_token(operator, current, expected, now=clock.now().timestamp())
            reply = await bus.request("$SYS.REQ.CLAIMS.UPDATE", token.encode(), _LIMIT, inbox=_INBOX)
            if b'"code":200' not in reply:
                raise ValueError(f"the NATS server refused the account: {reply[:200]!r}")
            log.info("revoked credentials of the message bus: %d", len(expected))
        raise ValueError("another controller keeps changing them")
