"""How workers authenticate, for the API document."""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension

from localai_cluster.web.openapi import Operation


class NodeScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """A worker's own secret."""

    target_class = "nodes.api.worker_auth.NodeAuthentication"
    name = "nodeSecret"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "The secret of the node in the URL."}


class RegistrationScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """The shared token."""

    target_class = "nodes.api.worker_openapi.RegistrationAuthentication"
    name = "registrationToken"

    def get_security_definition(self, auto_schema: Any) -> Operation:
        """`Authorization: Bearer …`."""
        return {"type": "http", "scheme": "bearer", "description": "LOCALAI_REGISTRATION_TOKEN."}
