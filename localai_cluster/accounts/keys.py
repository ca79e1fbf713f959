"""A person's own API keys: list, create, revoke. The static key and keys of agent nodes have other owners."""

from datetime import datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction

from localai_cluster.accounts import audit, principals
from localai_cluster.accounts.models import ApiKey
from localai_cluster.kit import errors

MOST_KEYS = 100
"""Most keys of one user that are not revoked."""


def keys_of(user_id: int) -> list[ApiKey]:
    """Return the user's keys that are not revoked, the newest first; no more than the user can create."""
    return list(ApiKey.objects.filter(user_id=user_id, revoked_at=None).order_by("-pk")[: 2 * MOST_KEYS])


def create(user: Any, name: str) -> tuple[ApiKey, str]:
    """Create a key on the request of its user; raise Conflict above `MOST_KEYS`.

    Returns the row and the plaintext, which exists nowhere else.
    """
    with transaction.atomic():
        # Two requests at once would each see the last free place.
        get_user_model().objects.select_for_update(no_key=True).get(pk=user.pk)
        if ApiKey.objects.filter(user=user, revoked_at=None).count() >= MOST_KEYS:
            raise errors.Conflict(f"you have {MOST_KEYS} API keys; revoke one first")
        row, plain = principals.create_api_key(user, name)
        audit.record(audit.Change("user.key_created", f"API key {row}", str(row.pk)))
    return row, plain


def revoke(user_id: int, key_id: int, *, now: datetime) -> None:
    """Revoke a key of this user; one that is revoked stays so. Raises NotFound for any other key."""
    with transaction.atomic():
        row = ApiKey.objects.select_for_update(no_key=True).filter(user_id=user_id, pk=key_id).first()
        if row is None:
            raise errors.NotFound("no key of yours has this id")
        if row.revoked_at is None:
            row.revoked_at = now
            row.save(update_fields=["revoked_at"])
            audit.record(audit.Change("user.key_revoked", f"API key {row}", str(row.pk)))
