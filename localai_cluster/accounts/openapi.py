"""How people authenticate, for the API document."""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension

from localai_cluster.web.openapi import Operation


class BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """The admin key or a user's API key."""

    target_class = "localai_cluster.accounts.authentication.BearerAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "LOCALAI_API_KEY or a user's key (lac-…)."}


class CookieScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A browser's session."""

    target_class = "localai_cluster.accounts.authentication.CookieAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """The session cookie."""
        return {"type": "apiKey", "in": "cookie", "name": "sessionid"}


class SignInScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """The same cookie, good for signing out and for a new password even while nothing else is open."""

    target_class = "localai_cluster.accounts.authentication.SignInAuthentication"
    name = "signedIn"


class RememberingScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """The same cookie, good for a few minutes more while the database is away."""

    target_class = "localai_cluster.accounts.authentication.RememberingAuthentication"
    name = "recentSession"
