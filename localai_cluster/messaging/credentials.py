"""Who may do what on the bus: a JWT for each user, minted by the account key (`contract/nats.md` §9.2).

A worker may use its own node's subjects and its own inbox, nothing else. Requests to a node go out with a
reply subject below that inbox (`subjects.inbox`), so no worker sees or forges another one's replies. The
server processes are users without limits. Times are seconds since 1970.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localai_cluster.messaging import nkeys, subjects
from localai_cluster.messaging.nkeys import KeyPair

AGENT = "agent"
_AGENT_PUBLISHES = ("agent.>", "jobs.>")
_AGENT_SUBSCRIBES = (
    "agent.execute",
    "agent.*.cancel",
    "gallery.*.cancel",
    "gallery.*.progress",
    "jobs.*.cancel",
    "jobs.*.progress",
    "jobs.*.result",
    "jobs.mcp-ci.new",
    "mcp.tools.execute",
    "mcp.discovery",
    "staging.*.progress",
)
_NO_LIMITS = {"subs": -1, "data": -1, "payload": -1}


@dataclass(frozen=True)
class Credentials:
    """A user's JWT and the seed that proves it is theirs."""

    jwt: str = field(repr=False)
    seed: str = field(repr=False)

    @classmethod
    def of(cls, jwt: str, seed: str) -> "Credentials":
        """Credentials that belong together; ValueError, which quotes neither, if they do not."""
        claims = nkeys.claims_of(jwt)
        if claims.get("sub") != nkeys.from_seed(seed, "user").public_key:
            raise ValueError("the JWT is not that of the user seed")
        return cls(jwt, seed)

    @property
    def public_key(self) -> str:
        """The user, `U…`."""
        return str(nkeys.claims_of(self.jwt)["sub"])

    @property
    def lifetime(self) -> float | None:
        """Seconds from issue to expiry; None if they never expire."""
        claims = nkeys.claims_of(self.jwt)
        issued, expires = claims.get("iat"), claims.get("exp")
        if not isinstance(issued, int) or not isinstance(expires, int) or not expires:
            return None
        return float(max(expires - issued, 0))

    def sign(self, nonce: str) -> bytes:
        """The answer to the server's challenge, base64."""
        return base64.b64encode(nkeys.from_seed(self.seed, "user").sign(nonce.encode()))


@dataclass(frozen=True)
class Permissions:
    """Subjects that a user may publish to and subscribe to; None = all."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions_of(node_type: str, node_id: str) -> Permissions:
    """W35: the lists of §9.2, with an inbox of its own in place of the shared one."""
    inbox = f"{subjects.inbox(node_id)}.>"
    prefix = subjects.node_prefix(node_id)
    if node_type == AGENT:
        return Permissions(
            (*_AGENT_PUBLISHES, inbox), (*_AGENT_SUBSCRIBES, subjects.backend_stop(node_id), inbox)
        )
    return Permissions(
        (subjects.install_progress_of_all(node_id), f"{prefix}.files.>", inbox), (f"{prefix}.>", inbox)
    )


def mint_worker(
    account: KeyPair, user: KeyPair, node_type: str, node_id: str, *, now: float, lifetime: float
) -> Credentials:
    """A new JWT of a node's user, good for `lifetime` seconds."""
    allowed = permissions_of(node_type, node_id)
    limits = {
        "pub": {"allow": list(allowed.publish)},
        "sub": {"allow": list(allowed.subscribe)},
        **_NO_LIMITS,
    }
    name = f"localai-{node_type}-{subjects.token(node_id)}"
    return _mint(account, user, name, now, {"exp": int(now + lifetime)}, limits)


def mint_service(account: KeyPair, name: str, *, now: float) -> Credentials:
    """New credentials without limits or expiry, for a process of ours that keeps them in memory."""
    user = nkeys.generate("user")
    return _mint(account, user, name, now, {}, {"pub": {}, "sub": {}, **_NO_LIMITS})


def operator_token(operator: KeyPair, system_account: str, *, now: float) -> str:
    """The operator's own JWT, for the configuration of a server."""
    nats = {"type": "operator", "version": 2, "system_account": system_account}
    return nkeys.sign_token(
        {"sub": operator.public_key, "name": "localai-cluster", "iat": int(now), "nats": nats}, operator
    )


def account_token(operator: KeyPair, account: str, name: str, *, now: float) -> str:
    """The JWT of an account without limits."""
    unlimited = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    limits = {**dict.fromkeys(unlimited, -1), "wildcards": True}
    nats = {"type": "account", "version": 2, "limits": limits}
    return nkeys.sign_token({"sub": account, "name": name, "iat": int(now), "nats": nats}, operator)


def revoking_token(operator: KeyPair, current: str, revoked: Mapping[str, int], *, now: float) -> str:
    """The account's JWT `current` with exactly these revocations (user -> time), otherwise unchanged."""
    claims = nkeys.claims_of(current, nkeys.LONGEST_ACCOUNT)
    nats = {**claims["nats"], "revocations": dict(revoked)}
    rest = {key: value for key, value in claims.items() if key not in ("iss", "jti", "iat", "nats")}
    return nkeys.sign_token({**rest, "iat": int(now), "nats": nats}, operator)


def revocations_of(token: str) -> dict[str, int]:
    """What an account's JWT revokes: user -> time."""
    found = nkeys.claims_of(token, nkeys.LONGEST_ACCOUNT).get("nats", {}).get("revocations") or {}
    return {str(user): int(at) for user, at in found.items()}


def _mint(
    account: KeyPair,
    user: KeyPair,
    name: str,
    now: float,
    expiry: Mapping[str, int],
    limits: Mapping[str, Any],
) -> Credentials:
    nats = {**limits, "issuer_account": account.public_key, "type": "user", "version": 2}
    claims = {"sub": user.public_key, "name": name, "iat": int(now), **expiry, "nats": nats}
    return Credentials(nkeys.sign_token(claims, account), user.seed)
