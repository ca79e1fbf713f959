"""Credentials of REST, websockets and inference: none, the static key, a stored key, or an unknown one.

`read_credential` extracts the credential from a request's headers and classifies it, without the database. A
stored key is only a claim until its row confirms it: `owner_of` reads the row with one query, and the hot path
reads it in the statement that picks a replica (`nodes/replicas/statements.py`), by the same condition.
"""

from collections.abc import Callable
from dataclasses import dataclass

from localai_cluster.accounts import principals
from localai_cluster.accounts.models import ApiKey
from localai_cluster.accounts.principals import ANONYMOUS, STATIC_ADMIN, Principal
from localai_cluster.kit import conf, errors

_VALID = {"revoked_at__isnull": True, "user__is_active": True}
VALID_SQL = "k.revoked_at IS NULL AND u.is_active"
"""The condition `_VALID` as SQL for the hot path: `k` is a row of `api_keys`, `u` its row of `auth_user`."""


class WrongKey(errors.NotAuthenticated):
    """Incorrect API key provided.

    In OpenAI's words: clients tell a wrong key from a wrong request by them (LiteLLM).
    """

    message = "Incorrect API key provided."


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A credential in the form of a user's or an agent node's key; only its row confirms it."""

    hash: str


def offered_credential(header: Callable[[str], str]) -> str | None:
    """Return the credential in one of the accepted headers (§0.2), None if there is none.

    `header` returns a header's value, or "" if it is absent.
    """
    if authorization := header("authorization"):
        return principals.bearer(authorization)
    return header("x-api-key") or header("xi-api-key") or None


def classify_credential(credential: str) -> Principal | StoredKey:
    """Classify this credential; `ANONYMOUS` if it can be neither the static key nor a stored one."""
    if principals.secrets_equal(credential, conf.cluster().api_key):
        return STATIC_ADMIN
    if credential.startswith((principals.KEY_PREFIX, principals.AGENT_PREFIX)):
        return StoredKey(principals.hash_secret(credential))
    return ANONYMOUS


def read_credential(header: Callable[[str], str]) -> Principal | StoredKey | None:
    """Return the classified credential of a request's headers; None if they have none."""
    credential = offered_credential(header)
    return None if credential is None else classify_credential(credential)


def owner_of(credential: Principal | StoredKey) -> Principal:
    """Return the owner of this credential, in at most one query; `ANONYMOUS` if it is unknown."""
    if isinstance(credential, Principal):
        return credential
    key = ApiKey.objects.select_related("user").filter(key_hash=credential.hash, **_VALID).first()
    return principals.of_user(key.user if key else None)
