"""Credentials for the message bus: a JWT with each registration, revoked with the approval or identity.

The rows state which users exist and which of them are revoked. A controller applies them to the NATS server
(`nodes/reconcilers/revocations.py`); the NOTIFY only wakes it up, and it also polls the rows. The JWT and its
seed exist only in the response to the registration.
"""

import logging
import secrets
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import F, Value
from django.db.models.functions import Greatest

from localai_cluster import bus_access
from localai_cluster.kit import conf, nkeys
from localai_cluster.messaging.servers import Credentials, mint_worker
from nodes.models import BackendNode, BusCredential
from operations.changes import events

log = logging.getLogger(__name__)

CHANNEL = "cluster_bus_credentials"
"""NOTIFY channel: some credentials were revoked."""
MOST_REVOKED = 5000
"""Most revocations in one account JWT: each takes about 93 bytes, and the bus carries 1 MiB."""


def issue(nodes: Sequence[BackendNode], now: datetime) -> dict[UUID, Credentials]:
    """Return new JWTs for the approved ones of these nodes; earlier JWTs stay valid until they expire (§9.2).

    A node stays the same user until it is revoked, however often it registers: a revocation is one line of
    the account's JWT, which a server accepts up to 1 MiB. Needs a transaction, with the nodes locked: a
    revocation comes before or after it, never in between.
    """
    approved = {node.id: node for node in nodes if node.approved_at is not None}
    if not approved:
        return {}
    lifetime = conf.cluster().nats_worker_jwt_ttl
    valid = BusCredential.objects.filter(node_id__in=approved, revoked_at=None)
    salts = dict(valid.values_list("node_id", "salt"))
    new_salts = {node_id: secrets.token_hex(16) for node_id in approved if node_id not in salts}
    account = bus_access.account()
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


def revoked(now: datetime) -> dict[str, int]:
    """Return the revocations for the account's JWT: user -> time up to which that user's JWTs are refused.

    The user is never used again, so the expiry of its last JWT suffices. The time of the revocation would
    not: the clock of the process that minted the JWT may be ahead. If there are too many, the newest are
    returned.
    """
    rows = BusCredential.objects.filter(revoked_at__isnull=False, expires_at__gt=now).order_by("-revoked_at")
    revocations = rows.values_list("public_key", "expires_at")[: MOST_REVOKED + 1]
    if len(revocations) > MOST_REVOKED:
        log.error(
            "more than %d revoked nodes have credentials that have not expired: the oldest can use the"
            " message bus until then; set a shorter LOCALAI_NATS_WORKER_JWT_TTL",
            MOST_REVOKED,
        )
    return {key: int(until.timestamp()) for key, until in revocations[:MOST_REVOKED]}


def prune(now: datetime) -> int:
    """Delete expired credentials; return their number."""
    return BusCredential.objects.filter(expires_at__lt=now).delete()[0]
