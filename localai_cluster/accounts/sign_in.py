"""Sign-in, sign-out and change of the password (`contract/http-api.md` §5.4), with Django's sessions.

People sign in with name and password, or a browser with a key, whose session ends with the key. Nodes have no
session. Errors are in the flat envelope. Every change must come from a page of this origin, also of an
anonymous caller. A person with a generated password can use only these routes until it is changed.
"""

from typing import Any

from django.contrib.auth import authenticate, get_user_model, login, logout, update_session_auth_hash
from django.db import transaction
from django.middleware.csrf import get_token
from django.urls import path
from drf_spectacular.utils import OpenApiResponse
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts import api_keys, audit, passwords, principals
from localai_cluster.accounts.authentication import SignInAuthentication, client_address, user_of_key
from localai_cluster.accounts.principals import KeyUser
from localai_cluster.kit import clock, errors
from localai_cluster.web import envelopes, rest, throttle
from localai_cluster.web.openapi import extend_schema, request_example, response_example
from localai_cluster.web.rest import NullIsAbsent, Text, validate_body

_MAX_PASSWORD_LENGTH = 4096
"""Maximum number of characters of a password, because hashing a longer one costs time."""


def _password_field() -> Text:
    return Text(max_length=_MAX_PASSWORD_LENGTH, style={"input_type": "password"})


class PersonSerializer(serializers.Serializer[Any]):
    """Who is signed in. `name` is what operations and timelines record of a person.

    `permissions` has the reference's features: true for those that this product has.
    """

    id = serializers.CharField()
    email = serializers.CharField(allow_blank=True)
    name = serializers.CharField()
    avatarUrl = serializers.CharField(allow_blank=True)
    role = serializers.ChoiceField(choices=["admin", "user"])
    provider = serializers.CharField()
    permissions = serializers.DictField(child=serializers.BooleanField())
    mustChangePassword = serializers.BooleanField()


class StatusSerializer(serializers.Serializer[Any]):
    """The signed-in person, if any, and the ways to sign in."""

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

    username = Text(required=False, max_length=254)
    email = Text(required=False, max_length=254)
    password = _password_field()

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Raise ValidationError unless one of the two names says something."""
        name = attrs.get("username") or attrs.get("email")
        if not name:
            raise serializers.ValidationError({"username": "must not be empty"})
        return {"username": name, "password": attrs["password"]}


class TokenLoginSerializer(NullIsAbsent):
    """A static key, or a person's key."""

    token = _password_field()


class PasswordSerializer(NullIsAbsent):
    """The current password and the new one."""

    old = _password_field()
    new = _password_field()


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


REFERENCE_FEATURES = (
    *("3d", "agents", "audio_classification", "audio_diarization", "audio_speech", "audio_transcription"),
    *("audio_transform", "chat", "collections", "detection", "embeddings", "face_recognition", "fine_tuning"),
    *("images", "localai_assistant", "mcp", "mcp_jobs", "moderation", "pii_filter", "quantization"),
    *("realtime", "rerank", "skills", "sound", "stores", "tokenize", "vad", "video", "voice_recognition"),
)
"""The reference's features by the names that its pages use."""
_BUILT_FEATURES = frozenset(
    {"audio_speech", "audio_transcription", "chat", "embeddings", "images", "rerank", "tokenize"}
)

_PERSON_EXAMPLE = {
    "id": "1",
    "email": "",
    "name": "admin",
    "avatarUrl": "",
    "role": "admin",
    "provider": "local",
    "permissions": {"chat": True, "agents": False},
    "mustChangePassword": False,
}
STATUS_EXAMPLE = response_example(
    {
        "authEnabled": True,
        "staticApiKeyRequired": False,
        "providers": ["local"],
        "hasUsers": True,
        "registrationMode": "invite",
        "user": _PERSON_EXAMPLE,
    }
)
SIGNED_IN_EXAMPLE = response_example({"user": _PERSON_EXAMPLE})
LOGIN_EXAMPLE = request_example({"username": "admin", "password": "correct horse battery staple"})
TOKEN_LOGIN_EXAMPLE = request_example({"token": "lac-7d2f0c4e9b1a5836"})
PASSWORD_EXAMPLE = request_example({"old": "correct horse battery staple", "new": "another long sentence"})
SIGNED_OUT_EXAMPLE = response_example({"message": "signed out"})
NOT_SIGNED_IN_EXAMPLE = response_example({"error": "sign-in required"}, "401")
WRONG_NAME_EXAMPLE = response_example({"error": "incorrect username or password"}, "401")
WRONG_TOKEN_EXAMPLE = response_example({"error": "incorrect token"}, "401")
WRONG_OLD_EXAMPLE = response_example(
    {
        "error": "Current password is incorrect.",
        "field": "old",
        "fields": {"old": ["Current password is incorrect."]},
    },
    "400",
)
EMPTY_NAME_EXAMPLE = response_example({"error": "username: must not be empty", "field": "username"}, "400")
NO_CSRF_EXAMPLE = response_example({"error": "CSRF Failed: CSRF token missing."}, "403")
TOO_MANY_EXAMPLE = response_example(
    {"error": "too many failed sign-ins from this address; try again later"}, "429"
)


_MEANING_BY_STATUS = {
    400: "The request is not valid; `field` names what is wrong.",
    401: "Incorrect username or password, or not signed in.",
    403: "The request is not one of a page of this origin, and the CSRF token is missing or wrong.",
    429: "Too many wrong passwords from this address; see Retry-After.",
    503: "Not possible right now; see Retry-After.",
}


def _refusal_responses(*statuses: int) -> dict[int, OpenApiResponse]:
    return {
        status: OpenApiResponse(FieldRefusalSerializer, _MEANING_BY_STATUS[status])
        for status in (*statuses, 503)
    }


class SessionView(APIView):
    """Base of the sign-in routes. They are open to everyone and use the flat envelope."""

    envelope = "flat"
    flat_auth = True
    authentication_classes = [SignInAuthentication]
    permission_classes: list[Any] = []

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Refuse an unsupported method with 405 before the CSRF token is checked."""
        if request.method not in self.allowed_methods:
            self.http_method_not_allowed(request)
        super().initial(request, *args, **kwargs)

    def sign_in(self, request: Request, shape: type[serializers.Serializer[Any]], refusal: str) -> Response:
        """Begin a session with the body's credentials. Raise NotAuthenticated with the text `refusal`."""
        sent = validate_body(shape, request)
        address, now = client_address(request), clock.now()
        throttle.sign_ins().begin(address, now)
        user: Any = authenticate(request._request, **sent)
        if user is None:
            throttle.sign_ins().log_failure(address, now)
            raise errors.NotAuthenticated(refusal)
        throttle.sign_ins().forgive(address, now)
        login(request._request, user)
        return Response({"user": render_user(user)})


class StatusView(SessionView):
    """`/api/auth/status`."""

    @extend_schema(
        operation_id="auth_status",
        summary="Show who is signed in",
        tags=["session"],
        auth=[],
        responses={200: StatusSerializer, **_refusal_responses()},
        examples=[STATUS_EXAMPLE],
    )
    def get(self, request: Request) -> Response:
        """`user` is null without a session or a valid key. Sets the CSRF cookie.
        `staticApiKeyRequired` is always false: people sign in with name and password.
        `registrationMode` is `invite`: an admin makes accounts.
        """
        get_token(request._request)
        user: Any = user_of_key(request) or request.user
        is_person = user is not None and not isinstance(user, KeyUser)
        return Response(
            {
                "authEnabled": True,
                "staticApiKeyRequired": False,
                "providers": ["local"],
                "hasUsers": is_person or get_user_model().objects.exists(),
                "registrationMode": "invite",
                "user": render_user(user) if user is not None else None,
            }
        )


class LoginView(SessionView):
    """`/api/auth/login`."""

    @extend_schema(
        operation_id="auth_login",
        summary="Sign in",
        tags=["session"],
        auth=[],
        request=LoginSerializer,
        responses={200: SignedInSerializer, **_refusal_responses(400, 401, 403, 429)},
        examples=[
            LOGIN_EXAMPLE,
            SIGNED_IN_EXAMPLE,
            EMPTY_NAME_EXAMPLE,
            WRONG_NAME_EXAMPLE,
            NO_CSRF_EXAMPLE,
            TOO_MANY_EXAMPLE,
        ],
    )
    def post(self, request: Request) -> Response:
        """By username and password, with a new session and a new CSRF token (D-SIGN-IN)."""
        return self.sign_in(request, LoginSerializer, "incorrect username or password")


class TokenLoginView(SessionView):
    """`/api/auth/token-login`."""

    @extend_schema(
        operation_id="auth_token_login",
        summary="Sign in with a key",
        tags=["session"],
        auth=[],
        request=TokenLoginSerializer,
        responses={200: SignedInSerializer, **_refusal_responses(400, 401, 403, 429)},
        examples=[
            TOKEN_LOGIN_EXAMPLE,
            SIGNED_IN_EXAMPLE,
            WRONG_TOKEN_EXAMPLE,
            NO_CSRF_EXAMPLE,
            TOO_MANY_EXAMPLE,
        ],
    )
    def post(self, request: Request) -> Response:
        """By a static key or a person's key. The session may do what the key may, and ends with the key."""
        return self.sign_in(request, TokenLoginSerializer, "incorrect token")


class LogoutView(SessionView):
    """`/api/auth/logout`."""

    @extend_schema(
        operation_id="auth_logout",
        summary="Sign out",
        tags=["session"],
        auth=[],
        request=None,
        responses={200: rest.MessageSerializer, **_refusal_responses(403)},
        examples=[SIGNED_OUT_EXAMPLE, NO_CSRF_EXAMPLE],
    )
    def post(self, request: Request) -> Response:
        """Ends this session; without one, nothing happens."""
        logout(request._request)
        return Response({"message": "signed out"})


class PasswordView(SessionView):
    """`/api/auth/password`."""

    @extend_schema(
        operation_id="auth_password",
        summary="Change your password",
        tags=["session"],
        request=PasswordSerializer,
        responses={
            200: SignedInSerializer,
            **_refusal_responses(401, 403, 429),
            400: OpenApiResponse(PasswordRefusalSerializer, _MEANING_BY_STATUS[400]),
        },
        examples=[
            PASSWORD_EXAMPLE,
            SIGNED_IN_EXAMPLE,
            WRONG_OLD_EXAMPLE,
            NOT_SIGNED_IN_EXAMPLE,
            NO_CSRF_EXAMPLE,
            TOO_MANY_EXAMPLE,
        ],
    )
    def post(self, request: Request) -> Response:
        """This session continues; the user's other sessions end. A wrong current password counts as a failed
        sign-in. The refusal names every broken rule, by field.
        """
        signed_in: Any = request.user
        user_id = getattr(signed_in, "pk", None)
        if user_id is None:
            raise errors.NotAuthenticated("sign-in required")
        if isinstance(signed_in, KeyUser):
            raise errors.Forbidden(
                "an API key started this session; to change the password, sign in with the password"
            )
        sent = validate_body(PasswordSerializer, request)
        address, now = client_address(request), clock.now()
        throttle.sign_ins().begin(address, now)
        try:
            with transaction.atomic():
                user = passwords.change_password(user_id, sent["old"], sent["new"])
                audit.record(audit.Change("user.password_changed", f"user {user}", str(user.pk)))
        except passwords.PasswordRefused as refused:
            if "old" in refused.problems:
                throttle.sign_ins().log_failure(address, now)
            else:
                throttle.sign_ins().forgive(address, now)
            body = envelopes.flat_error(refused.message, refused.field) | {"fields": refused.problems}
            return Response(body, status=refused.status)
        throttle.sign_ins().forgive(address, now)
        update_session_auth_hash(request._request, user)
        return Response({"user": render_user(user)})


def render_user(user: Any) -> dict[str, Any]:
    """Return a user in the form of the REST API. The user of a static key has the reference's name."""
    if isinstance(user, KeyUser):
        person = {"id": "legacy-api-key", "email": "", "name": "API Key User", "provider": ""}
        return (
            _describe_person(user.principal, False, person) if user.owner is None else render_user(user.owner)
        )
    person = {"id": str(user.pk), "email": user.email, "name": user.get_username(), "provider": "local"}
    return _describe_person(principals.of_user(user), passwords.must_change(user), person)


def _describe_person(
    caller: principals.Principal, must_change: bool, person: dict[str, str]
) -> dict[str, Any]:
    return {
        **person,
        "avatarUrl": "",
        "role": "admin" if caller.is_admin else "user",
        "permissions": {feature: feature in _BUILT_FEATURES for feature in REFERENCE_FEATURES},
        "mustChangePassword": must_change,
    }


urlpatterns = [
    path("status", StatusView.as_view()),
    path("login", LoginView.as_view()),
    path("token-login", TokenLoginView.as_view()),
    path("logout", LogoutView.as_view()),
    path("password", PasswordView.as_view()),
    *api_keys.urlpatterns,
]
