"""Authentication of a node by its own secret (64 hex digits, created by the worker at its first start).

The registry stores SHA-256 fingerprints only. The shared registration token is not an identity, except for
stock workers that the operator admits with it. People and their keys are in `localai_cluster/accounts`.
"""

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from uuid import UUID

from django.db.models import Q

from localai_cluster.accounts.principals import Principal, hash_secret, is_registration_token
from localai_cluster.kit import conf, errors
from nodes.models import BackendNode

SECRET_HEADER = "X-LocalAI-Node-Secret"
NEW_SECRET_HEADER = "X-LocalAI-Node-New-Secret"
INSTANCE_HEADER = "X-LocalAI-Node-Instance"
UNKNOWN_FINGERPRINT = "-"
"""Stands for the fingerprint of a text that cannot be a node's secret; no node has it."""
_SECRET_PATTERN = re.compile(r"[0-9a-f]{64}\Z")
_INSTANCE_PATTERN = re.compile(r"([0-9a-f]{32})?\Z")


def check_node_secret(secret: str, header: str = SECRET_HEADER) -> str:
    """Return the fingerprint of a secret; raise InvalidInput unless it is 64 lower-case hex digits."""
    if not _SECRET_PATTERN.match(secret):
        raise errors.InvalidInput(f"{header} must be 64 lower-case hex digits", field=header)
    return hash_secret(secret)


def check_instance(instance: str) -> str:
    """Return the id of a worker's process; "" for a worker that sends none.

    Raises InvalidInput for any other text.
    """
    if not _INSTANCE_PATTERN.match(instance):
        raise errors.InvalidInput(
            f"{INSTANCE_HEADER} must be 32 lower-case hex digits", field=INSTANCE_HEADER
        )
    return instance


def node_fingerprint(credential: str) -> str:
    """Return the fingerprint that a node's row must have for this credential.

    The result is the hash of a node's secret, "" for an admitted shared token, and UNKNOWN_FINGERPRINT for
    any other text.
    """
    if conf.cluster().allow_shared_token_nodes and is_registration_token(credential):
        return ""
    return hash_secret(credential) if _SECRET_PATTERN.match(credential) else UNKNOWN_FINGERPRINT


def is_bound(fingerprint: str) -> bool:
    """Return True if this is the fingerprint of a node's own secret."""
    return (
        fingerprint not in ("", UNKNOWN_FINGERPRINT)
        and BackendNode.objects.filter(fingerprint=fingerprint).exists()
    )


@dataclass(frozen=True)
class NodeFacts:
    """The columns of a node that its authentication reads."""

    id: UUID
    fingerprint: str
    weak: bool
    instance: str = ""
    rotating: bool = False


class WrongCredential(errors.NotAuthenticated):
    """A token or secret that is unknown or belongs to another node; it counts as a failed attempt."""


class OtherProcess(errors.Conflict):
    """The secret is right, but another process of the worker has registered with it since."""

    code = "other_process"


class MustRotate(errors.NotAuthenticated):
    """The secret is right but must be replaced first: it permits only registration and rotation."""

    code = "rotate"


def authenticate(
    node_id: UUID | None,
    fingerprint: str,
    instance: str,
    rows: Iterable[NodeFacts],
    *,
    rotating: bool = False,
) -> Principal:
    """Authenticate the bearer of `fingerprint`, in the process `instance`, as the node `node_id`.

    `rows` are the nodes with this id or this fingerprint. An empty fingerprint stands for the shared token,
    an empty instance for a worker that sends none. Raises WrongCredential for an unknown or wrong secret,
    NotFound for an unknown id, Forbidden for another node's secret, OtherProcess, and InvalidInput for an
    invalid process id. Raises MustRotate unless `rotating`: then the caller replaces the secret. A worker
    whose node was removed gets NotFound, so that it can register again.
    """
    candidates = list(rows)
    target = next((row for row in candidates if row.id == node_id), None)
    if target is not None and _matches(target, fingerprint):
        if target.rotating and not rotating:
            raise MustRotate("an admin wants this secret replaced", rotate=True)
        if instance and instance != target.instance:
            check_instance(instance)
            raise OtherProcess("another process has registered with this secret: is its data folder a copy?")
        return Principal("node", str(target.id), node_id=target.id)
    if fingerprint == UNKNOWN_FINGERPRINT:
        raise WrongCredential("invalid node credential")
    if target is None:
        raise errors.NotFound("node not found")
    if fingerprint and not any(_matches(row, fingerprint) for row in candidates):
        raise WrongCredential("invalid node credential")
    raise errors.Forbidden("this credential belongs to another node")


def _matches(row: NodeFacts, fingerprint: str) -> bool:
    if not fingerprint:
        return row.weak and not row.fingerprint
    return bool(row.fingerprint) and hmac.compare_digest(row.fingerprint, fingerprint)


def prove_node(
    node_id: UUID | None, credential: str, instance: str = "", *, rotating: bool = False
) -> Principal:
    """Authenticate the credential as the node `node_id`, and return the node; one query.

    Raises like `authenticate`.
    """
    fingerprint = node_fingerprint(credential)
    rows = [] if fingerprint == UNKNOWN_FINGERPRINT else _read_rows(node_id, fingerprint)
    return authenticate(node_id, fingerprint, instance, rows, rotating=rotating)


def _read_rows(node_id: UUID | None, fingerprint: str) -> list[NodeFacts]:
    by_secret = Q(fingerprint=fingerprint) if fingerprint else Q(pk__in=[])
    nodes = BackendNode.objects.filter(Q(pk=node_id) | by_secret).values_list(
        "id", "fingerprint", "weak_identity", "instance", "rotation_requested_at"
    )
    return [NodeFacts(*row[:4], rotating=row[4] is not None) for row in nodes]
