"""Credentials for the message bus: a JWT with each registration, revoked with the approval or identity.

The rows state which NATS users exist and which users are revoked. The JWT and its seed exist only in the
response to the registration. The NATS server ends connections with revoked credentials and refuses new ones:
one `Revocations` runs in every controller, with its own connection to the bus's system account. It runs a
pass after a NOTIFY, after every reconnect and every `PASS_INTERVAL` seconds: it compares the server's copy of
the account's JWT with the rows, and pushes a new JWT if they differ. The pass compares again after each push,
so that after concurrent pushes of two controllers the JWT matches the rows.
"""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.db import Error as DatabaseError
from django.db.models import F, Value
from django.db.models.functions import Greatest

from localai_cluster import bus_access
from localai_cluster.kit import clock, conf, nkeys
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.nkeys import KeyPair
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.messaging.bus import UNQUEUED, Message
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import Credentials, mint_worker, revocations_of, revoking_token
from localai_cluster.metrics import passes
from nodes.models import BackendNode, BusCredential
from operations.changes import events
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

CHANNEL = "cluster_bus_credentials"
"""NOTIFY channel: some credentials were revoked."""
MAX_REVOCATIONS = 5000
"""Maximum number of revocations in one account JWT: each takes about 93 bytes, and the bus carries 1 MiB."""


def issue(nodes: Sequence[BackendNode], now: datetime) -> dict[UUID, Credentials]:
    """Create JWTs for the approved nodes among `nodes`; earlier JWTs stay valid until they expire (§9.2).

    A node keeps its NATS user until it is revoked, however often it registers. So the account's JWT, which is
    limited to 1 MiB, grows by one line for each revocation and not for each registration. Needs a transaction
    that has locked the nodes, so that no revocation runs at the same time.
    """
    approved = {node.id: node for node in nodes if node.approved_at is not None}
    if not approved:
        return {}
    lifetime = conf.cluster().nats_worker_jwt_ttl
    valid = BusCredential.objects.filter(node_id__in=approved, revoked_at=None)
    salts = dict(valid.values_list("node_id", "salt"))
    new_salts = {node_id: secrets.token_hex(16) for node_id in approved if node_id not in salts}
    account = bus_access.account_key()
    users = {
        node_id: nkeys.derive(account, "user", f"{node_id} {salt}")
        for node_id, salt in (salts | new_salts).items()
    }
    until = now + timedelta(seconds=lifetime)
    if salts:
        valid.update(expires_at=Greatest(F("expires_at"), Value(until)))
    BusCredential.objects.bulk_create(
        BusCredential(
            public_key=users[node_id].public_key, node_id=node_id, salt=salt, issued_at=now, expires_at=until
        )
        for node_id, salt in new_salts.items()
    )
    return {
        node_id: mint_worker(
            account, users[node_id], node.node_type, str(node_id), now=now.timestamp(), lifetime=lifetime
        )
        for node_id, node in approved.items()
    }


def revoke(node_ids: Collection[UUID], now: datetime) -> None:
    """Revoke all credentials of these nodes. Needs a transaction."""
    valid = BusCredential.objects.filter(node_id__in=node_ids, revoked_at=None, expires_at__gt=now)
    if valid.update(revoked_at=now):
        events.notify(CHANNEL, "")


def current_revocations(now: datetime) -> dict[str, int]:
    """Return the revocations for the account's JWT: user -> time up to which the user's JWTs are refused.

    A revoked user is never used again, so the expiry of its last JWT is sufficient as the time. The time of
    the revocation is not sufficient, because the clock of the process that created the JWT may be ahead. If
    the revocations exceed `MAX_REVOCATIONS`, the newest are returned.
    """
    rows = BusCredential.objects.filter(revoked_at__isnull=False, expires_at__gt=now).order_by("-revoked_at")
    revocations = rows.values_list("public_key", "expires_at")[: MAX_REVOCATIONS + 1]
    if len(revocations) > MAX_REVOCATIONS:
        log.error(
            "more than %d revoked nodes have credentials that have not expired: the oldest can use the"
            " message bus until then; set a shorter LOCALAI_NATS_WORKER_JWT_TTL",
            MAX_REVOCATIONS,
        )
    return {key: int(until.timestamp()) for key, until in revocations[:MAX_REVOCATIONS]}


def prune(now: datetime) -> int:
    """Delete expired credentials; return their number."""
    return BusCredential.objects.filter(expires_at__lt=now).delete()[0]


PASS_INTERVAL = 30.0
"""Seconds between two passes of `Revocations` without a wake-up."""
_PUSH_TIMEOUT = 5.0
_INBOX_SUBJECT = "_INBOX.revocations"
_PUSH_ATTEMPTS = 5


class Revocations(PeriodicTask):
    """Periodic task of a controller that revokes credentials at the NATS server.

    Without the operator's key it logs a warning and does nothing. `on_disconnect` is called with the public
    key of each user whose connection the server reports as ended.
    """

    def __init__(self, on_disconnect: Callable[[str], None]) -> None:
        super().__init__(
            "revoked credentials of the message bus",
            self._run_pass,
            interval=PASS_INTERVAL,
            # It must not end this task: without it nothing is revoked any more.
            retry_on=(ClusterError, DatabaseError, ValueError),
        )
        self._operator, self._on_disconnect = bus_access.operator_key(), on_disconnect
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
        self._bus = NatsBus(bus_access.system_account_servers("revocations"), name="revocations")
        self._bus.start()
        advisories = f"$SYS.ACCOUNT.{bus_access.account_key().public_key}.DISCONNECT"
        await self._bus.subscribe(advisories, self._receive_disconnect, limit=UNQUEUED)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_reconnects(self._bus))
                await super().run()
        finally:
            await self._bus.close()

    async def _receive_disconnect(self, message: Message) -> None:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            self._on_disconnect(str(json.loads(message.payload)["client"]["user"]))

    async def _follow_reconnects(self, bus: NatsBus) -> None:
        generation = await bus.wait_connected()
        while True:
            generation = await bus.wait_connected(after=generation)
            self.wake()

    async def _run_pass(self) -> None:
        if self._bus is not None and self._operator is not None:
            await self._bus.wait_connected()
            with passes.count_pass("revocations"):
                await self.compare(self._bus, self._operator)

    async def compare(self, bus: NatsBus, operator: KeyPair) -> int:
        """Make the server's revocations equal to the rows; return the number of pushes.

        Raise ClusterError, and ValueError if the server refuses or another controller keeps pushing.
        """
        account = bus_access.account_key().public_key
        for pushes in range(_PUSH_ATTEMPTS):
            expected = await in_thread(current_revocations, clock.now())
            lookup = f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP"
            current = (await bus.request(lookup, b"", _PUSH_TIMEOUT, inbox=_INBOX_SUBJECT)).decode()
            if revocations_of(current) == expected:
                return pushes
            token = revoking_token(operator, current, expected, now=clock.now().timestamp())
            reply = await bus.request(
                "$SYS.REQ.CLAIMS.UPDATE", token.encode(), _PUSH_TIMEOUT, inbox=_INBOX_SUBJECT
            )
            if b'"code":200' not in reply:
                raise ValueError(f"the NATS server refused the account: {reply[:200]!r}")
            log.info("revoked credentials of the message bus: %d", len(expected))
        raise ValueError("another controller keeps changing them")
