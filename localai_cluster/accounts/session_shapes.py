"""JSON shapes of the sign-in, and of the page's first requests (`contract/http-api.md` §5.4)."""

from typing import Any

from drf_spectacular.utils import OpenApiExample
from rest_framework import serializers

from localai_cluster.web.fields import NullIsAbsent, Text

_PASSWORD_LENGTH = 4096
"""Longest password in characters; hashing a longer one would only cost time."""


def _password() -> Text:
    return Text(max_length=_PASSWORD_LENGTH, style={"input_type": "password"})


class PersonSerializer(serializers.Serializer[Any]):
    """Who is signed in. `name` is what operations and timelines record; `permissions` is empty."""

    id = serializers.CharField()
    email = serializers.CharField(allow_blank=True)
    name = serializers.CharField()
    avatarUrl = serializers.CharField(allow_blank=True)
    role = serializers.ChoiceField(choices=["admin", "user"])
    provider = serializers.CharField()
    permissions = serializers.DictField(child=serializers.BooleanField())
    mustChangePassword = serializers.BooleanField()


class StatusSerializer(serializers.Serializer[Any]):
    """Whether anybody is signed in, and how to."""

    authEnabled = serializers.BooleanField()
    staticApiKeyRequired = serializers.BooleanField()
    providers = serializers.ListField(child=serializers.CharField())
    hasUsers = serializers.BooleanField()
    registrationMode = serializers.CharField()
    user = PersonSerializer(allow_null=True)


class SignedInSerializer(serializers.Serializer[Any]):
    """The person who is signed in now."""

    user = PersonSerializer()


class LoginSerializer(NullIsAbsent):
    """A name in one of two fields, and a password."""

    username = Text(required=False, allow_null=True, max_length=254)
    email = Text(required=False, allow_null=True, max_length=254)
    password = _password()

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Raise ValidationError unless one of the two names says something."""
        name = attrs.get("username") or attrs.get("email")
        if not name:
            raise serializers.ValidationError({"username": "must not be empty"})
        return {"username": name, "password": attrs["password"]}


class PasswordSerializer(NullIsAbsent):
    """The current password and the new one."""

    old = _password()
    new = _password()


class FieldRefusalSerializer(serializers.Serializer[Any]):
    """A refusal, flat envelope (§0.4), which names the field that is wrong."""

    error = serializers.CharField()
    field = serializers.CharField(required=False)


class PasswordRefusalSerializer(FieldRefusalSerializer):
    """A refused change of password; `fields` has one sentence per broken rule, by field."""

    # DRF collects the field; the attribute of the same name stays its own.
    fields = serializers.DictField(  # type: ignore[assignment]
        child=serializers.ListField(child=serializers.CharField()), required=False
    )


class FeaturesSerializer(serializers.Serializer[Any]):
    """What this product has of what the reference may have."""

    agents = serializers.BooleanField()
    mcp = serializers.BooleanField()
    fine_tuning = serializers.BooleanField()
    quantization = serializers.BooleanField()
    distributed = serializers.BooleanField()
    localai_assistant = serializers.BooleanField()


class BrandingSerializer(serializers.Serializer[Any]):
    """Name and pictures; an empty text stands for the built-in."""

    instance_name = serializers.CharField(allow_blank=True)
    instance_tagline = serializers.CharField(allow_blank=True)
    logo_url = serializers.CharField(allow_blank=True)
    logo_horizontal_url = serializers.CharField(allow_blank=True)
    favicon_url = serializers.CharField(allow_blank=True)


class VersionSerializer(serializers.Serializer[Any]):
    """The version of the product."""

    version = serializers.CharField()


def _sent(value: Any) -> OpenApiExample:
    return OpenApiExample("request", value, request_only=True)


def _answer(value: Any, status: str = "200") -> OpenApiExample:
    return OpenApiExample(f"answer {status}", value, response_only=True, status_codes=[status])


_PERSON = {
    "id": "1",
    "email": "",
    "name": "admin",
    "avatarUrl": "",
    "role": "admin",
    "provider": "local",
    "permissions": {},
    "mustChangePassword": False,
}
STATUS = _answer(
    {
        "authEnabled": True,
        "staticApiKeyRequired": False,
        "providers": ["local"],
        "hasUsers": True,
        "registrationMode": "invite",
        "user": _PERSON,
    }
)
SIGNED_IN = _answer({"user": _PERSON})
LOGIN = _sent({"username": "admin", "password": "correct horse battery staple"})
PASSWORD = _sent({"old": "correct horse battery staple", "new": "another long sentence"})
SIGNED_OUT = _answer({"message": "signed out"})
NOT_SIGNED_IN = _answer({"error": "sign-in required"}, "401")
WRONG_NAME = _answer({"error": "incorrect username or password"}, "401")
WRONG_OLD = _answer(
    {
        "error": "Current password is incorrect.",
        "field": "old",
        "fields": {"old": ["Current password is incorrect."]},
    },
    "400",
)
EMPTY_NAME = _answer({"error": "username: must not be empty", "field": "username"}, "400")
NO_CSRF = _answer({"error": "CSRF Failed: CSRF token missing."}, "403")
TOO_MANY = _answer({"error": "too many failed sign-ins from this address; try again later"}, "429")
FEATURES = _answer(
    {
        "agents": False,
        "mcp": False,
        "fine_tuning": False,
        "quantization": False,
        "distributed": True,
        "localai_assistant": False,
    }
)
BRANDING = _answer(
    {
        "instance_name": "",
        "instance_tagline": "",
        "logo_url": "",
        "logo_horizontal_url": "",
        "favicon_url": "",
    }
)
VERSION = _answer({"version": "0.1.0"})
