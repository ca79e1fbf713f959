"""Texts of errors that are raised without one: they are on the wire and independent of the docstrings."""

import json
from typing import Any

import pytest
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from localai_cluster.accounts import passwords, principals
from localai_cluster.kit import errors
from localai_cluster.messaging import bus
from localai_cluster.rpc import errors as rpc_errors
from localai_cluster.worker.installer import InstallFailed
from nodes.commands.outcomes import CommandFailed
from nodes.dialects.routes import ANTHROPIC_ENVELOPE, OLLAMA_ENVELOPE
from nodes.gateway import endpoint, gbnf, generate
from nodes.gateway.endpoint import OPENAI_ENVELOPE
from nodes.loading import load_attempts
from nodes.registry import bulk, heartbeats

TEXTS: dict[type[errors.ClusterError], str] = {
    errors.ClusterError: "Something went wrong inside the cluster.",
    errors.InvalidInput: "The request is not valid.",
    errors.NotAuthenticated: "A valid credential is required.",
    errors.Forbidden: "This credential may not do that.",
    errors.NotFound: "There is no such thing.",
    errors.Conflict: "The present state does not allow that.",
    errors.Unavailable: "Not possible right now; trying again later may help.",
    bus.BusError: "The message bus could not do that.",
    rpc_errors.BackendError: "The inference engine did not answer the request.",
    rpc_errors.Refused: "Nothing accepts connections at the engine's address.",
    rpc_errors.Lost: "The connection to the engine broke before it answered.",
    rpc_errors.Busy: "The engine takes no further work right now.",
    rpc_errors.ModelNotLoaded: "The engine runs but holds no model.",
    rpc_errors.DeadlineExceeded: "The engine did not answer in time.",
    rpc_errors.Cancelled: "The engine gave the call up.",
    rpc_errors.Unauthenticated: "The engine refused its node's token; its worker must register again.",
    rpc_errors.Unimplemented: "The model's engine does not offer this kind of request.",
    rpc_errors.Rejected: "The engine does not accept this input.",
    rpc_errors.BackendFailed: "The engine failed while it worked on the request.",
    principals.WrongKey: "Incorrect API key provided.",
    passwords.PasswordChangeRequired: "The generated password must be changed first.",
    InstallFailed: "The backend could not be installed.",
    CommandFailed: "The worker has not run the command, or may not run it.",
    endpoint.TooLarge: "The request body is too large.",
    generate.LogprobsUnsupported: "The model's engine does not tell log probabilities.",
    gbnf._Contradiction: (
        "response_format: the schema leaves no value that all of its `const` and `enum` name."
    ),
    load_attempts.LoadFailed: "The model could not be loaded.",
    load_attempts.NodeRefused: "This node could not load it; another one may.",
    load_attempts.WorkerGone: "The attempt's worker is gone, or its place on it.",
    bulk.BulkFailed: "The verb was refused for at least one of the nodes.",
    heartbeats.WriteConflict: "The node was changed while the batch was being written.",
}


@pytest.mark.parametrize(("kind", "text"), TEXTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_an_error_without_a_text_has_that_of_its_class(kind: type[errors.ClusterError], text: str) -> None:
    assert (kind().message, str(kind())) == (text, text)


def test_a_given_text_replaces_it() -> None:
    error = errors.NotFound("no node has that id")
    assert (error.message, str(error)) == ("no node has that id",) * 2


@pytest.mark.parametrize(
    "envelope", [OPENAI_ENVELOPE, ANTHROPIC_ENVELOPE, OLLAMA_ENVELOPE], ids=["openai", "anthropic", "ollama"]
)
@pytest.mark.parametrize(
    "text", [gettext_lazy("no such thing"), mark_safe("no such thing")], ids=["lazy", "safe"]
)
def test_a_text_of_django_is_a_text_on_the_wire(envelope: Any, text: Any) -> None:
    """Forms and templates raise errors with lazy and safe strings."""
    body = envelope.render(errors.NotFound(text)).body
    assert "no such thing" in json.dumps(json.loads(body))
