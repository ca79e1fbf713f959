"""Principals, the callers of requests (people, keys, the static admin key), and their credentials.

No credential is stored in plaintext. The tables have SHA-256 fingerprints only, and every comparison runs in
constant time. The shared registration token only lets a worker request admission; nodes authenticate in
`nodes/registry/identity.py`.

`read_credential` extracts the credential from a request's headers and classifies it, without the database. A
stored key is only a claim until its row confirms it: `owner_of` reads the row with one query, and the hot
path reads it in the statement that picks a replica (`nodes/replicas/statements.py`), by the same condition.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.utils.crypto import salted_hmac

from localai_cluster.accounts import passwords
from localai_cluster.accounts.models import ApiKey
from localai_cluster.kit import conf, errors

Kind = Literal["anonymous", "user", "admin", "node", "newcomer", "joining"]
"""Kind of a principal.

A `newcomer` has signed in with a generated password and must change it first. A `joining` machine has a token
for its registration, and may download the files that it needs to join.
"""

KEY_PREFIX = "lac-"
AGENT_KEY_PREFIX = "lai-"
"""Prefix of the keys of agent nodes. The reference's agents parse it, so it is part of the protocol
(§1.1)."""
_SHOWN_PREFIX_LENGTH = 12


@dataclass(frozen=True)
class Principal:
    """The caller of a request. Operations record `name` as their actor."""

    kind: Kind
    name: str = ""
    user_id: int | None = None
    node_id: UUID | None = None

    @property
    def is_authenticated(self) -> bool:
        """True if the caller's credential was accepted."""
        return self.kind != "anonymous"

    @property
    def is_admin(self) -> bool:
        """True if the caller may use routes for nodes and operations."""
        return self.kind == "admin"

    @property
    def is_user(self) -> bool:
        """True if the caller may use inference routes and the documentation."""
        return self.kind in ("user", "admin")


ANONYMOUS = Principal("anonymous")
JOINING = Principal("joining")
STATIC_ADMIN = Principal("admin", "static-key")
KEYLESS = Principal("user", "keyless")
"""A caller without a key from a network whose clients need no key."""


def hash_secret(text: str) -> str:
    """Return the SHA-256 of a secret in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def secrets_equal(offered: str, expected: str) -> bool:
    """Compare two texts of any length in constant time; an empty `expected` matches nothing."""
    return bool(expected) and hmac.compare_digest(hash_secret(offered), hash_secret(expected))


def is_registration_token(credential: str) -> bool:
    """Return True if the credential is the shared token with which workers register."""
    return secrets_equal(credential, conf.cluster().registration_token)


class KeyUser:
    """The Django user of a session that began with an API key. It has no row.

    `owner` is the key's user, None for a static key. At each request Django compares the hash in the session
    with the hash of the key, so the session ends with the key. Such a session cannot open Django's admin.
    """

    is_authenticated = is_active = True
    is_anonymous = is_staff = is_superuser = False
    last_login: Any = None

    def __init__(self, id: int, key_hash: str, owner: Any = None) -> None:
        self.id = self.pk = id
        self.owner = owner
        self._key_hash = key_hash
        self._meta = get_user_model()._meta  # for Django's `login`

    @property
    def principal(self) -> Principal:
        """The principal of the session's key."""
        return STATIC_ADMIN if self.owner is None else of_user(self.owner)

    def get_username(self) -> str:
        """Return the name of the key's principal."""
        return self.principal.name

    def get_session_auth_hash(self) -> str:
        """Return the hash that Django stores in each session of this key."""
        return salted_hmac("localai_cluster.accounts.KeyUser", self._key_hash, algorithm="sha256").hexdigest()

    def get_session_auth_fallback_hash(self) -> tuple[str, ...]:
        """Return no further hashes, so that a change of `SECRET_KEY` ends the session."""
        return ()

    def save(self, **_: Any) -> None:
        """Do nothing. Django's `login` calls this to store the time of a sign-in."""


User = AbstractBaseUser | AnonymousUser | KeyUser


def of_user(user: User | None) -> Principal:
    """Return the principal of a Django user: an admin for staff and superusers.

    An inactive user is anonymous.
    """
    if isinstance(user, KeyUser):
        return user.principal
    if user is None or not user.is_authenticated or not user.is_active:
        return ANONYMOUS
    admin = getattr(user, "is_staff", False) or getattr(user, "is_superuser", False)
    return Principal("admin" if admin else "user", user.get_username(), user_id=user.pk)


def of_session(user: User | None) -> Principal:
    """Return the principal of a browser's session. A user with a generated password is a newcomer."""
    owner = of_user(user)
    if user is None or isinstance(user, KeyUser) or not owner.is_authenticated:
        return owner
    return replace(owner, kind="newcomer") if passwords.must_change(user) else owner


def create_api_key(user: Any, name: str) -> tuple[ApiKey, str]:
    """Create a key for `user`; return its row and the plaintext, which is not stored."""
    return _store_key(user, name, KEY_PREFIX + secrets.token_hex(24))


def create_agent_key(user: Any, name: str) -> tuple[ApiKey, str]:
    """Create the API key of an agent node: `lai-` and 64 hex digits."""
    return _store_key(user, name[:100], AGENT_KEY_PREFIX + secrets.token_hex(32))


def _store_key(user: Any, name: str, plain: str) -> tuple[ApiKey, str]:
    row = ApiKey.objects.create(
        user=user, name=name, prefix=plain[:_SHOWN_PREFIX_LENGTH], key_hash=hash_secret(plain)
    )
    return row, plain


def bearer(authorization: str) -> str:
    """Return the token in an `Authorization: Bearer …` header, "" for any other header."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


_VALID_KEY_FILTER = {"revoked_at__isnull": True, "user__is_active": True}
VALID_KEY_SQL = "k.revoked_at IS NULL AND u.is_active"
"""SQL condition for a valid key: `k` is its row of `api_keys`, `u` the row of its user."""


class WrongKey(errors.NotAuthenticated):
    """The API key is incorrect.

    The message is OpenAI's, because clients such as LiteLLM recognize a wrong key by it.
    """

    message = "Incorrect API key provided."
    code = "invalid_api_key"


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A credential that has the form of a stored key. Only a row confirms that it is valid."""

    hash: str


_CREDENTIAL_HEADERS = frozenset({b"authorization", b"x-api-key", b"xi-api-key"})


def credential_headers(scope: Any) -> dict[str, str]:
    """Return the headers of a request that may hold a credential, by name."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _CREDENTIAL_HEADERS
    }


def offered_credential(headers: Mapping[str, str]) -> str | None:
    """Return the credential in the headers (§0.2), None without one."""
    if authorization := headers.get("authorization"):
        return bearer(authorization)
    return headers.get("x-api-key") or headers.get("xi-api-key") or None


_hash_static_key = cache(hash_secret)


def find_static_key(credential: str) -> int | None:
    """Return the position of this key in `LOCALAI_API_KEY`, None if it is not in the list.

    The time of the comparison does not reveal the position.
    """
    offered = hash_secret(credential)
    matches = [hmac.compare_digest(offered, _hash_static_key(key)) for key in conf.cluster().api_keys if key]
    return matches.index(True) if any(matches) else None


def classify_credential(credential: str) -> Principal | StoredKey:
    """Return the principal or the stored key that a credential stands for, without the database.

    The result is `ANONYMOUS` for a credential that is neither the static key nor in the form of a stored key.
    """
    if find_static_key(credential) is not None:
        return STATIC_ADMIN
    if credential.startswith((KEY_PREFIX, AGENT_KEY_PREFIX)):
        return StoredKey(hash_secret(credential))
    return ANONYMOUS


def read_credential(headers: Mapping[str, str]) -> Principal | StoredKey | None:
    """Return the classified credential of a request's headers, None without one."""
    credential = offered_credential(headers)
    return None if credential is None else classify_credential(credential)


def owner_of(credential: Principal | StoredKey) -> Principal:
    """Return the principal that owns the credential, `ANONYMOUS` for an unknown one. One query at most."""
    if isinstance(credential, Principal):
        return credential
    key = find_stored_key(key_hash=credential.hash)
    return of_user(key.user if key else None)


def find_stored_key(**columns: Any) -> ApiKey | None:
    """Return the valid API key with these column values, in one query with its user."""
    return ApiKey.objects.select_related("user").filter(**columns, **_VALID_KEY_FILTER).first()
