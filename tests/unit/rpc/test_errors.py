"""What a gRPC status means to the cluster: repeat elsewhere, take the replica out, or tell the caller."""

import grpc
import pytest

from localai_cluster.kit.errors import InvalidInput, Unavailable
from localai_cluster.rpc import errors
from localai_cluster.rpc.errors import BackendError, translate_status

Status = grpc.StatusCode


@pytest.mark.rule("R2.76", "T-INF-25", "T-DL-23")
@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (
            Status.UNAVAILABLE,
            "failed to connect to all addresses; last error: Connection refused",
            errors.Refused,
        ),
        (Status.UNAVAILABLE, "errors resolving nowhere:1: Domain name not found", errors.Refused),
        (Status.UNAVAILABLE, "Socket closed", errors.Lost),
        (Status.UNAVAILABLE, "recvmsg:Connection reset by peer", errors.Lost),
        (Status.UNAVAILABLE, "Cancelling all calls", errors.Lost),
        (Status.UNAVAILABLE, "all slots are taken", errors.Busy),
        (Status.RESOURCE_EXHAUSTED, "queue is full", errors.Busy),
        (Status.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 5)", errors.BackendFailed),
        (Status.UNIMPLEMENTED, "Method not found!", errors.Unimplemented),
        (Status.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded),
        (Status.UNAUTHENTICATED, "no", errors.Unauthenticated),
        (Status.PERMISSION_DENIED, "no", errors.Unauthenticated),
        (Status.FAILED_PRECONDITION, "model not loaded", errors.ModelNotLoaded),
        (Status.UNKNOWN, "rpc error: Model not loaded", errors.ModelNotLoaded),
        (Status.UNKNOWN, "Model not loaded.", errors.ModelNotLoaded),
        (Status.UNKNOWN, "vllm-cpp: model not loaded", errors.ModelNotLoaded),
        (
            Status.UNKNOWN,
            "rpc error: code = Unknown desc = parakeet-cpp: model not loaded",
            errors.ModelNotLoaded,
        ),
        # Of the client's text an engine may repeat any part.
        (Status.UNKNOWN, "no voice is named 'model not loaded'", errors.BackendFailed),
        (Status.UNKNOWN, "unknown voice: model not loaded", errors.BackendFailed),
        (Status.UNKNOWN, "the adapter a is not loaded", errors.BackendFailed),
        (Status.NOT_FOUND, "model identity mismatch: 'a' is loaded, not 'b'", errors.IdentityMismatch),
        (Status.NOT_FOUND, "no such file", errors.BackendFailed),
        (Status.CANCELLED, "", errors.Cancelled),
        (Status.INVALID_ARGUMENT, "prompt is too long", errors.Rejected),
        (Status.INVALID_ARGUMENT, "the maximum context length is 4096", errors.ContextExceeded),
        (Status.INTERNAL, "9 tokens exceeds the available context size (4)", errors.ContextExceeded),
        (Status.INTERNAL, "Context size has been exceeded.", errors.BackendFailed),
        (Status.INTERNAL, "boom", errors.BackendFailed),
    ],
)
def test_each_status_has_one_meaning(status: Status, details: str, kind: type[BackendError]) -> None:
    """gRPC transport facts: the status and, where it is ambiguous, its text decide."""
    error = translate_status(status, details)
    assert type(error) is kind
    assert error.message == details or not details


def test_only_untouched_requests_may_go_elsewhere() -> None:
    """A request that may have been worked on must not walk through all replicas."""
    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BackendError)
    ]
    repeatable = {kind.__name__ for kind in kinds if kind.repeatable}
    gone = {kind.__name__ for kind in kinds if kind.replica_gone}
    assert repeatable == {"Refused", "Busy", "ModelNotLoaded", "IdentityMismatch"}
    assert gone == {"Refused", "Lost"}


def test_every_error_fits_an_edge() -> None:
    """No engine error becomes a 500: it is the caller's input (400) or an outage (503 with Retry-After)."""
    for kind in BackendError.__subclasses__():
        error = kind("text")
        assert isinstance(error, InvalidInput | Unavailable)
        assert error.status in (400, 503)


def test_an_empty_text_gets_the_kind_s_own() -> None:
    """The cause is always named."""
    assert translate_status(Status.INTERNAL, "").message.startswith("The engine failed")
