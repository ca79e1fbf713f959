"""What a credential can be, for REST, websockets and inference alike: none, the static key, a stored key, or
an unknown one.

`read` finds the credential in a request's headers and says what it is, without the database. A stored key is
only a claim until its row confirms it: `principal_of` asks for the row with one query, and the hot path asks
for it in the statement that picks a replica (`nodes/replicas/statements.py`), by the same condition.
"""

from collections.abc import Callable
from dataclasses import dataclass

from localai_cluster import conf, errors
from localai_cluster.accounts import principals
from localai_cluster.accounts.models import ApiKey
from localai_cluster.accounts.principals import ANONYMOUS, STATIC_ADMIN, Principal

_VALID = {"revoked_at__isnull": True, "user__is_active": True}
VALID_SQL = "k.revoked_at IS NULL AND u.is_active"
"""The same condition for the hot path: `k` is a row of `api_keys`, `u` its row of `auth_user`."""


class WrongKey(errors.NotAuthenticated):
    """Incorrect API key provided.

    In OpenAI's words: clients tell a wrong key from a wrong request by them (LiteLLM).
    """


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A credential in the form of a user's or an agent node's key; only the database knows whether it is
    one."""

    hash: str


def offered(header: Callable[[str], str]) -> str | None:
    """The credential that a request carries in one of the accepted headers (§0.2), None if it carries none.

    `header` returns a header's value, or "" if it is absent.
    """
    if authorization := header("authorization"):
        return principals.bearer(authorization)
    return header("x-api-key") or header("xi-api-key") or None


def identify(credential: str) -> Principal | StoredKey:
    """What this credential is; `ANONYMOUS` if it can be neither the static key nor a stored one."""
    if principals.same(credential, conf.cluster().api_key):
        return STATIC_ADMIN
    if credential.startswith((principals.KEY_PREFIX, principals.AGENT_PREFIX)):
        return StoredKey(principals.hash_secret(credential))
    return ANONYMOUS


def read(header: Callable[[str], str]) -> Principal | StoredKey | None:
    """What a request's headers offer; None if they offer nothing."""
    credential = offered(header)
    return None if credential is None else identify(credential)


def principal_of(credential: Principal | StoredKey) -> Principal:
    """Who offers this credential, in at most one query; `ANONYMOUS` if it is unknown."""
    if isinstance(credential, Principal):
        return credential
    key = ApiKey.objects.select_related("user").filter(key_hash=credential.hash, **_VALID).first()
    return principals.of_user(key.user if key else None)
