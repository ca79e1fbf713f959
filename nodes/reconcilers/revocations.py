"""Revocation of NATS credentials: the server ends connections with revoked credentials and refuses new ones.

One `Revocations` runs in every controller, with its own connection to the bus's system account. It runs a
pass after a NOTIFY, after every reconnect and every `LOOK_EVERY` seconds: it compares the server's copy of
the account's JWT with the rows, and pushes a new JWT if they differ. It checks again after each push, so that
two controllers that push at once end with the state of the rows.
"""

import asyncio
import contextlib
import logging

from django.db import Error as DatabaseError

from localai_cluster import bus_access
from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.nkeys import KeyPair
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


class Revocations:
    """Periodic task of a controller; without the operator's key it logs a warning and does nothing."""

    def __init__(self) -> None:
        self._operator = bus_access.operator()
        self._look = asyncio.Event()

    def wake(self) -> None:
        """Run a pass now, as credentials were revoked."""
        self._look.set()

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
        bus = NatsBus(bus_access.system("revocations"), name="revocations")
        bus.start()
        try:
            while True:
                generation = await bus.wait_connected()
                self._look.clear()
                try:
                    with passes.counted("revocations"):
                        await self.run_pass(bus, self._operator)
                except (ClusterError, DatabaseError, ValueError) as error:
                    # It must not end this loop: without it nothing is revoked any more.
                    log.warning("revoked credentials: not told to the NATS server yet: %s", error)
                await self._next_look(bus, generation)
        finally:
            await bus.close()

    async def run_pass(self, bus: NatsBus, operator: KeyPair) -> int:
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

    async def _next_look(self, bus: NatsBus, generation: int) -> None:
        waits = {
            asyncio.create_task(self._look.wait()),
            asyncio.create_task(bus.wait_connected(after=generation)),
        }
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
