"""The addresses of the bus and the logins for it.

A login is a JWT for one user, minted by the account key (`contract/nats.md` §9.2). A worker may use its own
node's subjects and its own inbox, nothing else. Requests to a node go out with a reply subject below that
inbox (`messages.inbox`), so no worker sees or forges the replies of another one. The server processes are
users without limits. Times are seconds since 1970.
"""

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from localai_cluster.kit import nkeys
from localai_cluster.kit.addresses import is_local
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.kit.nkeys import KeyPair
from localai_cluster.messaging import messages

AGENT_NODE_TYPE = "agent"
_AGENT_PUBLISH_SUBJECTS = ("agent.>", "jobs.>")
_AGENT_SUBSCRIBE_SUBJECTS = (
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
_UNLIMITED_CLAIMS = {"subs": -1, "data": -1, "payload": -1}


@dataclass(frozen=True)
class Credentials:
    """A user's JWT, and the user's seed, which signs the server's challenge."""

    jwt: str = field(repr=False)
    seed: str = field(repr=False)

    @classmethod
    def of(cls, jwt: str, seed: str) -> "Credentials":
        """Return credentials after checking that the JWT was issued for the seed's key.

        Raise ValueError if they do not match; the message has neither the JWT nor the seed.
        """
        claims = nkeys.claims_of(jwt)
        if claims.get("sub") != nkeys.from_seed(seed, "user").public_key:
            raise ValueError("the JWT is not that of the user seed")
        return cls(jwt, seed)

    @property
    def public_key(self) -> str:
        """Public key of the user, `U…`."""
        return str(nkeys.claims_of(self.jwt)["sub"])

    @property
    def lifetime(self) -> float | None:
        """Seconds from issue to expiry; None if the credentials never expire."""
        claims = nkeys.claims_of(self.jwt)
        issued, expires = claims.get("iat"), claims.get("exp")
        if not isinstance(issued, int) or not isinstance(expires, int) or not expires:
            return None
        return float(max(expires - issued, 0))

    def sign(self, nonce: str) -> bytes:
        """Return the response to the server's challenge, in base64."""
        return base64.b64encode(nkeys.from_seed(self.seed, "user").sign(nonce.encode()))


@dataclass(frozen=True)
class Permissions:
    """Subjects that a user may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions_of(node_type: str, node_id: str) -> Permissions:
    """Return the permissions of a node's user (§9.2), with the node's own inbox (W35)."""
    inbox = f"{messages.inbox(node_id)}.>"
    prefix = messages.node_prefix(node_id)
    if node_type == AGENT_NODE_TYPE:
        return Permissions(
            (*_AGENT_PUBLISH_SUBJECTS, inbox),
            (*_AGENT_SUBSCRIBE_SUBJECTS, messages.subject("backend.stop", node_id), inbox),
        )
    return Permissions(
        (messages.install_progress_of_all(node_id), f"{prefix}.files.>", inbox), (f"{prefix}.>", inbox)
    )


def mint_worker(
    account: KeyPair, user: KeyPair, node_type: str, node_id: str, *, now: float, lifetime: float
) -> Credentials:
    """Create a JWT for a node's user, valid for `lifetime` seconds."""
    permissions = permissions_of(node_type, node_id)
    limits = {
        "pub": {"allow": list(permissions.publish)},
        "sub": {"allow": list(permissions.subscribe)},
        **_UNLIMITED_CLAIMS,
    }
    name = f"localai-{node_type}-{messages.token(node_id)}"
    return _sign_user_jwt(account, user, name, now, {"exp": int(now + lifetime)}, limits)


def mint_service(account: KeyPair, name: str, *, now: float) -> Credentials:
    """Create credentials without limits or expiry for a server process, which never stores them."""
    user = nkeys.generate("user")
    return _sign_user_jwt(account, user, name, now, {}, {"pub": {}, "sub": {}, **_UNLIMITED_CLAIMS})


def operator_token(operator: KeyPair, system_account: str, *, now: float) -> str:
    """Sign the operator's own JWT, for the configuration of a NATS server."""
    nats = {"type": "operator", "version": 2, "system_account": system_account}
    return nkeys.sign_token(
        {"sub": operator.public_key, "name": "localai-cluster", "iat": int(now), "nats": nats}, operator
    )


def account_token(operator: KeyPair, account: str, name: str, *, now: float) -> str:
    """Sign the JWT of an account without limits."""
    unlimited = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    limits = {**dict.fromkeys(unlimited, -1), "wildcards": True}
    nats = {"type": "account", "version": 2, "limits": limits}
    return nkeys.sign_token({"sub": account, "name": name, "iat": int(now), "nats": nats}, operator)


def revoking_token(operator: KeyPair, current: str, revoked: Mapping[str, int], *, now: float) -> str:
    """Sign the account's JWT `current` again, with `revoked` (time by user) as its only revocations.

    All other claims stay unchanged.
    """
    claims = nkeys.claims_of(current, nkeys.MAX_ACCOUNT_TOKEN_LENGTH)
    nats = {**claims["nats"], "revocations": dict(revoked)}
    unchanged = {key: value for key, value in claims.items() if key not in ("iss", "jti", "iat", "nats")}
    return nkeys.sign_token({**unchanged, "iat": int(now), "nats": nats}, operator)


def revocations_of(token: str) -> dict[str, int]:
    """Return the revocations in an account's JWT, as the time of the revocation by user."""
    revocations = (
        nkeys.claims_of(token, nkeys.MAX_ACCOUNT_TOKEN_LENGTH).get("nats", {}).get("revocations") or {}
    )
    return {str(user): int(at) for user, at in revocations.items()}


def _sign_user_jwt(
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


DEFAULT_PORT = 4222
MAX_URL_LENGTH = 2048


@dataclass(frozen=True)
class Servers:
    """Addresses of the servers of one bus, and the login: `credentials`, or user and password, or a token.

    With a TLS context, a connection without encryption fails.
    """

    urls: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    credentials: Credentials | None = None
    tls: ssl.SSLContext | None = None

    @property
    def has_login(self) -> bool:
        """True if there is a login: credentials, a user or a token."""
        return bool(self.credentials or self.user or self.token)


def parse_url(text: str) -> Servers:
    """Parse `nats://user:password@host:port[,…]`; the login comes from the first URL.

    Raise InvalidInput. Its message contains no part of the text, which may hold a password.
    """
    wrong = InvalidInput("not a NATS URL such as nats://host:4222", field="url")
    if len(text) > MAX_URL_LENGTH:
        raise wrong
    try:
        parts = [
            urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}")
            for part in text.split(",")
            if part.strip()
        ]
        ports = [part.port for part in parts]
    except ValueError:
        raise wrong from None
    if not parts or 0 in ports:
        raise wrong
    urls = []
    for part in parts:
        if part.scheme not in ("nats", "tls") or not part.hostname or part.path.strip("/") or part.query:
            raise wrong
        urls.append(f"{part.scheme}://{part.netloc.rpartition('@')[2]}")
    user, password = unquote(parts[0].username or ""), parts[0].password
    if user and password is None:
        return Servers(tuple(urls), token=user)
    return Servers(tuple(urls), user=user, password=unquote(password or ""))


def url_for_worker(configured: str, own_host: str) -> str:
    """Return `configured`, the URL of the bus, without credentials and with a host that a worker can reach.

    `own_host` is the name under which the worker has just reached this server. It replaces a host that means
    only this machine, unless `own_host` is empty or loopback itself.
    """
    urls = []
    for url in parse_url(configured).urls:
        scheme, _, authority = url.partition("://")
        parts = urlsplit(url)
        if own_host and not is_local(own_host) and is_local(parts.hostname or ""):
            bracketed = f"[{own_host}]" if ":" in own_host else own_host
            authority = f"{bracketed}:{parts.port or DEFAULT_PORT}"
        urls.append(f"{scheme}://{authority}")
    return ",".join(urls)
