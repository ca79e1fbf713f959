"""Errors of calls to an engine, and how a caller may react to them.

`translate_status` turns gRPC's status into one of these types. Two attributes guide the caller: `repeatable`
(the engine did no work and the request may be retried on another replica) and `replica_gone` (the process at
that address is dead or unreachable, so the replica should be taken out of service).
"""

import re

import grpc

from localai_cluster.kit.errors import ClusterError, InvalidInput, Unavailable

# Part of the contract: the text by which an engine reports that it holds another model than requested.
IDENTITY_MARKER = "model identity mismatch"
# Stock engines report a missing model as a plain error, `<backend>: model not loaded`. The whole text counts,
# because an engine may repeat a part of the client's text in another error.
_NOT_LOADED_PATTERN = re.compile(
    r"(exception calling application: )?(rpc error: )?(code = \w+ desc = )?([\w.-]+: )?model not loaded\.?"
)

# No gRPC status means a prompt longer than the model's context, only the text does; stock engines report a
# failure.
_CONTEXT_PHRASES = ("context size", "context length", "context window")
_STOCK_CONTEXT_PHRASE = "exceeds the available context size"

# gRPC reports a refused connection and a broken one by the same status; only its text distinguishes them.
# Refused: the request never left. Broken: it may have reached the engine.
_REFUSED_PHRASES = (
    "failed to connect",
    "connections to all backends failing",
    "errors resolving",
    "lookup failed",
)
_BROKEN_PHRASES = (
    "socket closed",
    "connection reset",
    "broken pipe",
    "recvmsg",
    "sendmsg",
    "goaway",
    "cancelling all calls",
    "endpoint closing",
    "transport closed",
    "stream removed",
    "keepalive",
    "ping timeout",
)


class BackendError(ClusterError):
    """A call to an inference engine failed."""

    message = "The inference engine did not answer the request."
    code = "backend_error"
    repeatable = False
    replica_gone = False


class Refused(BackendError, Unavailable):
    """Nothing accepts connections at the engine's address."""

    message = "Nothing accepts connections at the engine's address."
    code = "backend_refused"
    repeatable = True
    replica_gone = True


class Lost(BackendError, Unavailable):
    """The connection to the engine broke before the reply was complete."""

    message = "The connection to the engine broke before it answered."
    # Not marked repeatable: a request that kills its engine must not walk through all replicas. Yet an idle
    # connection to a process that just died ends this way too, so a caller should repeat such a request once.
    code = "backend_lost"
    replica_gone = True


class Busy(BackendError, Unavailable):
    """The engine accepts no further requests at present."""

    message = "The engine takes no further work right now."
    code = "backend_busy"
    repeatable = True


class ModelNotLoaded(BackendError, Unavailable):
    """The engine runs but has no model loaded."""

    message = "The engine runs but holds no model."
    code = "model_not_loaded"
    repeatable = True


class IdentityMismatch(BackendError, Unavailable):
    """The engine at this address serves another model."""

    code = "model_identity_mismatch"
    repeatable = True


class DeadlineExceeded(BackendError, Unavailable):
    """The engine did not answer within the time limit."""

    message = "The engine did not answer in time."
    code = "backend_timeout"


class Cancelled(BackendError, Unavailable):
    """The engine cancelled the call."""

    message = "The engine gave the call up."
    code = "backend_cancelled"


class Unauthenticated(BackendError, Unavailable):
    """The engine refused the token of its node. Its worker must register again."""

    message = "The engine refused its node's token; its worker must register again."
    code = "backend_unauthenticated"
    permanent = True


class Unimplemented(BackendError, InvalidInput):
    """The engine does not support the called method."""

    message = "The model's engine does not offer this kind of request."
    code = "unsupported_by_backend"


class Rejected(BackendError, InvalidInput):
    """The engine does not accept the input of the request."""

    message = "The engine does not accept this input."
    code = "rejected_by_backend"


class ContextExceeded(Rejected):
    """The prompt is longer than the model's context."""

    code = "context_length_exceeded"


class BackendFailed(BackendError, Unavailable):
    """The engine failed while it processed the request."""

    message = "The engine failed while it worked on the request."
    code = "backend_failed"


_ERROR_BY_STATUS: dict[grpc.StatusCode, type[BackendError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.FAILED_PRECONDITION: ModelNotLoaded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: Rejected,
    grpc.StatusCode.OUT_OF_RANGE: Rejected,
}


def translate_status(status: grpc.StatusCode, details: str) -> BackendError:
    """Return the error for the final gRPC status of a call.

    `details` is the status message of the engine or of the transport.
    """
    text = details.lower()
    if status is grpc.StatusCode.UNAVAILABLE:
        return _classify_unavailable(text)(details or None)
    if status is grpc.StatusCode.NOT_FOUND and IDENTITY_MARKER in text:
        return IdentityMismatch(details)
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in text:
        return Busy(details or None)
    error_type = _ERROR_BY_STATUS.get(status)
    if (error_type is Rejected and any(phrase in text for phrase in _CONTEXT_PHRASES)) or (
        error_type is None and _STOCK_CONTEXT_PHRASE in text
    ):
        return ContextExceeded(details)
    if error_type is None:
        error_type = ModelNotLoaded if _NOT_LOADED_PATTERN.fullmatch(text.strip()) else BackendFailed
    return error_type(details or None)


def _classify_unavailable(text: str) -> type[BackendError]:
    if any(phrase in text for phrase in _REFUSED_PHRASES):
        return Refused
    if any(phrase in text for phrase in _BROKEN_PHRASES):
        return Lost
    return Busy
