"""Tells the NATS server whose credentials are revoked; it ends their connections and refuses new ones.

One `Revocations` lives in every controller, with a connection of its own to the bus's system account. It
looks at a NOTIFY, at every new connection and every `LOOK_EVERY` seconds: it compares the account's JWT that
the server has with the rows, and pushes one with the right revocations where they differ. It looks again
after each push: two controllers that push at once end with what the rows say.
"""

import asyncio
import contextlib
import logging

from django.db import Error as DatabaseError

from localai_cluster import bus_access, clock, conf
from localai_cluster.errors import ClusterError
from localai_cluster.messaging.credentials import revocations_of, revoking_token
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.nkeys import KeyPair
from localai_cluster.metrics import passes
from nodes.registry import bus_credentials
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

LOOK_EVERY = 30.0
_LIMIT = 5.0
_INBOX = "_INBOX.revocations"
_PUSHES = 5


class Revocations:
    """A controller's part; without the operator's key it says so and does nothing."""

    def __init__(self) -> None:
        self._operator = bus_access.operator()
        self._look = asyncio.Event()

    def hint(self) -> None:
        """Something was revoked; look now."""
        self._look.set()

    async def run(self) -> None:
        """Looks until cancelled."""
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
                        await self.look_once(bus, self._operator)
                except (ClusterError, DatabaseError, ValueError) as error:
                    # It must not end this loop: without it nothing is revoked any more.
                    log.warning("revoked credentials: not told to the NATS server yet: %s", error)
                await self._next_look(bus, generation)
        finally:
            await bus.close()

    async def look_once(self, bus: NatsBus, operator: KeyPair) -> int:
        """Brings the server to what the rows say; answers how many pushes it took. ClusterError."""
        account = bus_access.account().public_key
        for pushes in range(_PUSHES):
            wanted = await in_thread(bus_credentials.revoked, clock.now())
            lookup = f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP"
            current = (await bus.request(lookup, b"", _LIMIT, inbox=_INBOX)).decode()
            if revocations_of(current) == wanted:
                return pushes
            token = revoking_token(operator, current, wanted, now=clock.now().timestamp())
            reply = await bus.request("$SYS.REQ.CLAIMS.UPDATE", token.encode(), _LIMIT, inbox=_INBOX)
            if b'"code":200' not in reply:
                raise ValueError(f"the NATS server refused the account: {reply[:200]!r}")
            log.info("revoked credentials of the message bus: %d", len(wanted))
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
