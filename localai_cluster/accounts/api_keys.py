"""REST API of a person's own API keys: list, create, revoke, at the reference's paths.

Only a session that a password began may manage keys: a key could otherwise create keys that outlive its
revocation. Errors are in the flat envelope.
"""

from datetime import datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import QuerySet
from django.urls import path
from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts import audit, principals
from localai_cluster.accounts.authentication import CookieAuthentication, IsUser, principal
from localai_cluster.accounts.models import ApiKey
from localai_cluster.kit import clock, errors, names
from localai_cluster.web import rest
from localai_cluster.web.openapi import (
    describe,
    response_example,
)
from localai_cluster.web.rest import NullIsAbsent, Text, validate_body

_MAX_NAME_LENGTH = 100
_MAX_KEY_ID = 2**31 - 1
MAX_KEYS_PER_USER = 100
"""Maximum number of keys of one user, without revoked keys."""


def list_keys(user_id: int) -> list[ApiKey]:
    """Return the user's keys that are not revoked, newest first."""
    return list(
        ApiKey.objects.filter(user_id=user_id, revoked_at=None).order_by("-pk")[: 2 * MAX_KEYS_PER_USER]
    )


def create_key(user: Any, name: str) -> tuple[ApiKey, str]:
    """Create a key for the user; return its row and plaintext. Raise Conflict above `MAX_KEYS_PER_USER`.

    The plaintext is not stored.
    """
    with transaction.atomic():
        # Two requests at once would each see the last free place.
        get_user_model().objects.select_for_update(no_key=True).get(pk=user.pk)
        if ApiKey.objects.filter(user=user, revoked_at=None).count() >= MAX_KEYS_PER_USER:
            raise errors.Conflict(f"you have {MAX_KEYS_PER_USER} API keys; revoke one first")
        row, plain = principals.create_api_key(user, name)
        audit.record(audit.Change("user.key_created", f"API key {row}", str(row.pk)))
    return row, plain


def revoke_key(user_id: int, key_id: int, *, now: datetime) -> None:
    """Revoke a key of this user. Raise NotFound if the user has no such key.

    A key that is already revoked keeps the time of its revocation.
    """
    own_key = ApiKey.objects.filter(user_id=user_id, pk=key_id)
    if not revoke_keys(own_key, now=now) and not own_key.exists():
        raise errors.NotFound("no key of yours has this id")


def revoke_keys(keys: QuerySet[ApiKey], *, now: datetime) -> int:
    """Revoke the keys that are not revoked yet; return their number."""
    with transaction.atomic():
        rows = list(keys.filter(revoked_at=None).select_for_update(no_key=True, of=("self",)))
        ApiKey.objects.filter(pk__in=[row.pk for row in rows]).update(revoked_at=now)
        audit.record(*(audit.Change("user.key_revoked", f"API key {row}", str(row.pk)) for row in rows))
    return len(rows)


class ApiKeySerializer(serializers.Serializer[Any]):
    """An API key that is not revoked; `keyPrefix` identifies it, the key itself is not stored."""

    id = serializers.CharField()
    name = serializers.CharField()
    keyPrefix = serializers.CharField()
    role = serializers.ChoiceField(choices=["admin", "user"])
    createdAt = serializers.DateTimeField()


class ApiKeysSerializer(serializers.Serializer[Any]):
    """The caller's keys, the newest first."""

    keys = ApiKeySerializer(many=True)


class CreatedApiKeySerializer(ApiKeySerializer):
    """A new key; `key` is in no other response."""

    key = serializers.CharField()


class NewApiKeySerializer(NullIsAbsent):
    """A new API key and its purpose."""

    name = Text(max_length=_MAX_NAME_LENGTH)

    def validate_name(self, name: str) -> str:
        """Require a printable name."""
        if not name.strip() or any(names.find_unprintable(character) for character in name):
            raise serializers.ValidationError("must be a name without control characters")
        return name.strip()


_KEY_EXAMPLE = {
    "id": "7",
    "name": "notebook",
    "keyPrefix": "lac-7d2f0c4e",
    "role": "user",
    "createdAt": "2026-08-22T09:00:00+00:00",
}


class PersonAuthentication(CookieAuthentication):
    """DRF authentication by a person's session; `request.auth` is the signed-in user."""

    def authenticate(self, request: Request) -> tuple[Any, Any] | None:
        """Return the principal and the user of the session; None without a session."""
        user = request._request.user
        caller = super().authenticate(request)
        return None if caller is None else (caller[0], user)


class _KeysView(APIView):
    """Base of the views of a user's keys. Only a person's session may use them."""

    envelope = "flat"
    tag = "session"
    flat_auth = True
    authentication_classes = [PersonAuthentication]
    permission_classes = [IsUser]

    def person(self, request: Request) -> Any:
        """Return the signed-in user; raise Forbidden in a session that a key began."""
        if isinstance(request.auth, principals.KeyUser):
            raise errors.Forbidden(
                "an API key started this session; to manage keys, sign in with the password"
            )
        return request.auth


class ApiKeysView(_KeysView):
    """`/api/auth/api-keys`."""

    @describe(
        "auth_keys_list",
        "List your API keys",
        ApiKeysSerializer,
        refused=(401, 403),
        examples=[response_example({"keys": [_KEY_EXAMPLE]})],
    )
    def get(self, request: Request) -> Response:
        """Lists the keys that are not revoked."""
        own_keys = list_keys(self.person(request).pk)
        return Response({"keys": [_render_key(key, request) for key in own_keys]})

    @describe(
        "auth_keys_create",
        "Create an API key",
        CreatedApiKeySerializer,
        status=201,
        refused=(400, 401, 403, 409, 413),
        body=NewApiKeySerializer,
        sent={"name": "notebook"},
        examples=[response_example(_KEY_EXAMPLE | {"key": "lac-7d2f0c4e9b1a5836"}, "201")],
    )
    def post(self, request: Request) -> Response:
        """Creates a key that may do what you may; its text is shown only in this response."""
        name = validate_body(NewApiKeySerializer, request)["name"]
        key, plain = create_key(self.person(request), name)
        return Response(_render_key(key, request) | {"key": plain}, status=201)


class ApiKeyView(_KeysView):
    """`/api/auth/api-keys/:id`."""

    @describe(
        "auth_keys_revoke",
        "Revoke an API key",
        rest.MessageSerializer,
        meaning="It is revoked.",
        refused=(401, 403, 404),
        parameters=[OpenApiParameter("key_id", str, OpenApiParameter.PATH)],
        examples=[response_example({"message": "API key revoked"})],
    )
    def delete(self, request: Request, key_id: str) -> Response:
        """Revokes one of your keys; requests and sessions with it are refused from now on."""
        number = int(key_id) if key_id.isascii() and key_id.isdigit() and len(key_id) < 11 else 0
        revoke_key(self.person(request).pk, min(number, _MAX_KEY_ID), now=clock.now())
        return Response({"message": "API key revoked"})


def _render_key(key: ApiKey, request: Request) -> dict[str, Any]:
    return {
        "id": str(key.pk),
        "name": key.name,
        "keyPrefix": key.prefix,
        "role": "admin" if principal(request).is_admin else "user",
        "createdAt": key.created_at.isoformat(),
    }


urlpatterns = [
    path("api-keys", ApiKeysView.as_view()),
    path("api-keys/<str:key_id>", ApiKeyView.as_view()),
]
