"""Who is asking, and how they prove it.

Three kinds of credential, none of them stored: the static admin key of the settings, users' API keys
(`lac-…`) and nodes' own secrets (64 hex digits, made by the worker at its first start). The registry keeps
SHA-256 fingerprints only, and every comparison takes the same time whether it fails at the first byte or the
last. The shared registration token is not an identity: it lets a worker knock.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import UUID

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Q

from localai_cluster import conf, errors
from nodes import passwords
from nodes.models import ApiKey, BackendNode

Kind = Literal["anonymous", "user", "admin", "node", "newcomer"]
"""A newcomer has signed in with a generated password and must change it before anything else."""

KEY_PREFIX = "lac-"
AGENT_PREFIX = "lai-"
"""Of the keys that agent nodes get; the reference's form, because its agents read it (§1.1)."""
SECRET_HEADER = "X-LocalAI-Node-Secret"
NEW_SECRET_HEADER = "X-LocalAI-Node-New-Secret"
INSTANCE_HEADER = "X-LocalAI-Node-Instance"
NOBODY = "-"
"""Stands for the fingerprint of what cannot be a node's secret; no row ever carries it."""
_SHOWN = 12
_NODE_SECRET = re.compile(r"[0-9a-f]{64}\Z")
_INSTANCE = re.compile(r"([0-9a-f]{32})?\Z")


@dataclass(frozen=True)
class Principal:
    """Whoever a request comes from. `name` is what an operation records as its actor."""

    kind: Kind
    name: str = ""
    user_id: int | None = None
    node_id: UUID | None = None

    @property
    def is_authenticated(self) -> bool:
        """Whether any credential was accepted."""
        return self.kind != "anonymous"

    @property
    def is_admin(self) -> bool:
        """Whether node and operation routes are open to it."""
        return self.kind == "admin"

    @property
    def is_user(self) -> bool:
        """Whether inference and documentation are open to it."""
        return self.kind in ("user", "admin")


ANONYMOUS = Principal("anonymous")
STATIC_ADMIN = Principal("admin", "static-key")


def hash_secret(text: str) -> str:
    """The fingerprint of a secret: SHA-256, hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def same(offered: str, expected: str) -> bool:
    """Constant-time equality of two texts of any length; an empty expectation matches nothing."""
    return bool(expected) and hmac.compare_digest(hash_secret(offered), hash_secret(expected))


def static_admin(credential: str) -> Principal | None:
    """The admin behind `LOCALAI_API_KEY`, if this is that key."""
    return STATIC_ADMIN if same(credential, conf.cluster().api_key) else None


def is_registration_token(credential: str) -> bool:
    """Whether this is the shared token that lets a worker register."""
    return same(credential, conf.cluster().registration_token)


def of_user(user: AbstractBaseUser | AnonymousUser | None) -> Principal:
    """The principal of a Django user; staff and superusers are admins, an inactive user is nobody."""
    if user is None or not user.is_authenticated or not user.is_active:
        return ANONYMOUS
    admin = getattr(user, "is_staff", False) or getattr(user, "is_superuser", False)
    return Principal("admin" if admin else "user", user.get_username(), user_id=user.pk)


def of_session(user: AbstractBaseUser | AnonymousUser | None) -> Principal:
    """The principal of a signed-in browser: a newcomer while the password is the generated one."""
    who = of_user(user)
    if user is None or not who.is_authenticated or not passwords.must_change(user):
        return who
    return replace(who, kind="newcomer")


def by_credential(credential: str) -> Principal | None:
    """The principal of a static or an API key, in at most one query; None if it is neither."""
    admin = static_admin(credential)
    if admin is not None or not credential.startswith((KEY_PREFIX, AGENT_PREFIX)):
        return admin
    key = (
        ApiKey.objects.select_related("user")
        .filter(key_hash=hash_secret(credential), revoked_at__isnull=True, user__is_active=True)
        .first()
    )
    return of_user(key.user) if key is not None else None


def create_api_key(user: Any, name: str) -> tuple[ApiKey, str]:
    """Makes a key for `user`; returns the row and the plaintext, which exists nowhere else."""
    return _store_key(user, name, KEY_PREFIX + secrets.token_hex(24))


def create_agent_key(user: Any, name: str) -> tuple[ApiKey, str]:
    """Makes the key of an agent node: `lai-` and 64 hex digits."""
    return _store_key(user, name[:100], AGENT_PREFIX + secrets.token_hex(32))


def _store_key(user: Any, name: str, plain: str) -> tuple[ApiKey, str]:
    row = ApiKey.objects.create(user=user, name=name, prefix=plain[:_SHOWN], key_hash=hash_secret(plain))
    return row, plain


def check_node_secret(secret: str, header: str = SECRET_HEADER) -> str:
    """The fingerprint of a worker's own secret; raises InvalidInput unless it is 64 lower-case hex digits."""
    if not _NODE_SECRET.match(secret):
        raise errors.InvalidInput(f"{header} must be 64 lower-case hex digits", field=header)
    return hash_secret(secret)


def check_instance(instance: str) -> str:
    """The id of a worker's process, "" for a worker that does not tell; InvalidInput for any other text."""
    if not _INSTANCE.match(instance):
        raise errors.InvalidInput(
            f"{INSTANCE_HEADER} must be 32 lower-case hex digits", field=INSTANCE_HEADER
        )
    return instance


def node_fingerprint(credential: str) -> str:
    """What a node's row must carry for this credential.

    The hash of a node's secret, "" for an admitted shared token, NOBODY for any other text.
    """
    if conf.cluster().allow_shared_token_nodes and is_registration_token(credential):
        return ""
    return hash_secret(credential) if _NODE_SECRET.match(credential) else NOBODY


@dataclass(frozen=True)
class NodeFacts:
    """What a verdict needs of one row."""

    id: UUID
    fingerprint: str
    weak: bool
    instance: str = ""
    rotating: bool = False


class WrongCredential(errors.NotAuthenticated):
    """A token or secret that is nobody's, or not this node's: perhaps a guess, so it is counted."""


class OtherProcess(errors.Conflict):
    """The secret is right, but another process has registered with it since."""

    code = "other_process"


class MustRotate(errors.NotAuthenticated):
    """The secret is right, but good for nothing any more but registering and replacing it."""

    code = "rotate"


def judge(
    node_id: UUID | None,
    fingerprint: str,
    instance: str,
    rows: Iterable[NodeFacts],
    *,
    rotating: bool = False,
) -> Principal:
    """Decides whether the bearer of `fingerprint`, in the process `instance`, is the node `node_id`.

    `rows` are the nodes with that id or that fingerprint; an empty fingerprint stands for the shared token,
    an empty instance for a worker that does not tell. Raises WrongCredential for what is no node's secret or
    not this node's, NotFound for an unknown id, Forbidden for another node's secret, OtherProcess,
    InvalidInput for what cannot be a process, and MustRotate unless the caller is about to. A worker whose
    node was removed gets NotFound, so that it can register again.
    """
    known = list(rows)
    target = next((row for row in known if row.id == node_id), None)
    if target is not None and _holds(target, fingerprint):
        if target.rotating and not rotating:
            raise MustRotate("an admin wants this secret replaced", rotate=True)
        if instance and instance != target.instance:
            check_instance(instance)
            raise OtherProcess("another process has registered with this secret: is its data folder a copy?")
        return Principal("node", str(target.id), node_id=target.id)
    if fingerprint == NOBODY:
        raise WrongCredential("invalid node credential")
    if target is None:
        raise errors.NotFound("node not found")
    if fingerprint and not any(_holds(row, fingerprint) for row in known):
        raise WrongCredential("invalid node credential")
    raise errors.Forbidden("this credential belongs to another node")


def _holds(row: NodeFacts, fingerprint: str) -> bool:
    if not fingerprint:
        return row.weak and not row.fingerprint
    return bool(row.fingerprint) and hmac.compare_digest(row.fingerprint, fingerprint)


def prove_node(
    node_id: UUID | None, credential: str, instance: str = "", *, rotating: bool = False
) -> Principal:
    """The node behind `credential` if it is `node_id`, in one query; raises like `judge`."""
    fingerprint = node_fingerprint(credential)
    rows = [] if fingerprint == NOBODY else _rows(node_id, fingerprint)
    return judge(node_id, fingerprint, instance, rows, rotating=rotating)


def _rows(node_id: UUID | None, fingerprint: str) -> list[NodeFacts]:
    wanted = Q(fingerprint=fingerprint) if fingerprint else Q(pk__in=[])
    found = BackendNode.objects.filter(Q(pk=node_id) | wanted).values_list(
        "id", "fingerprint", "weak_identity", "instance", "rotation_requested_at"
    )
    return [NodeFacts(*row[:4], rotating=row[4] is not None) for row in found]


def bearer(authorization: str) -> str:
    """The token of an `Authorization: Bearer …` header value, "" if it is none."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def offered(header: Callable[[str], str]) -> str | None:
    """The credential that a request carries in one of the accepted headers (§0.2), None if it carries none.

    `header` answers a header's value, or "" if it is absent.
    """
    if authorization := header("authorization"):
        return bearer(authorization)
    return header("x-api-key") or header("xi-api-key") or None
