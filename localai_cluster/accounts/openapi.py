"""Authentication schemes of people, for the API document."""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension

from localai_cluster.web.openapi import Operation


class BearerScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """The admin key or a user's API key."""

    target_class = "localai_cluster.accounts.authentication.BearerAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """Return the scheme of `Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "LOCALAI_API_KEY or a user's key (lac-…)."}


class CookieScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A browser's session."""

    target_class = "localai_cluster.accounts.authentication.CookieAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """Return the scheme of the session cookie."""
        return {"type": "apiKey", "in": "cookie", "name": "sessionid"}


class SignInScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """The session cookie, which suffices to sign out and to change the password before all other routes."""

    target_class = "localai_cluster.accounts.authentication.SignInAuthentication"
    name = "signedIn"


class RememberingScheme(CookieScheme):  # type: ignore[no-untyped-call]
    """The session cookie, which stays valid for a few minutes while the database is away."""

    target_class = "localai_cluster.accounts.authentication.RememberingAuthentication"
    name = "recentSession"
