"""Errors for callers: each has a code, an HTTP status and, where known, the field.

Adapters translate library errors into these at the boundary and chain the cause; the edges (REST, inference,
command line) convert them to the envelope of their surface. The type determines if a retry can help.
"""

from collections.abc import Mapping
from typing import Any


class ClusterError(Exception):
    """Something went wrong inside the cluster."""

    message = "Something went wrong inside the cluster."
    """Text for callers if the error is raised without a text. A subclass may replace it."""
    status = 500
    code = "internal_error"
    permanent = True
    code_on_wire = False
    """True if the nested envelope has `code` in place of the HTTP status."""

    def __init__(self, message: str | None = None, *, field: str | None = None, **data: Any) -> None:
        self.message = message or self.message
        self.field = field
        self.data: Mapping[str, Any] = data
        super().__init__(self.message)


class InvalidInput(ClusterError):
    """The request is not valid."""

    message = "The request is not valid."
    status = 400
    code = "invalid_request"


class NotAuthenticated(ClusterError):
    """A valid credential is required."""

    message = "A valid credential is required."
    status = 401
    code = "unauthorized"


class Forbidden(ClusterError):
    """This credential may not do that."""

    message = "This credential may not do that."
    status = 403
    code = "forbidden"


class NotFound(ClusterError):
    """There is no such thing."""

    message = "There is no such thing."
    status = 404
    code = "not_found"


class MethodNotAllowed(ClusterError):
    """The route does not support the HTTP method; `allowed` is the value of the header `Allow`."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class Conflict(ClusterError):
    """The present state does not allow that."""

    message = "The present state does not allow that."
    status = 409
    code = "conflict"


class Unavailable(ClusterError):
    """Not possible right now; trying again later may help."""

    message = "Not possible right now; trying again later may help."
    status = 503
    code = "unavailable"
    permanent = False

    def __init__(self, message: str | None = None, *, retry_after: float = 5.0, **data: Any) -> None:
        super().__init__(message, **data)
        self.retry_after = retry_after
