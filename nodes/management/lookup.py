"""Find nodes, conflicts and join tokens by an operator's input, and add hints to refusals."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from django.core.management.base import CommandError

from localai_cluster.accounts.command_line import (
    MAX_MATCHES,
    SHORT_ID_LENGTH,
    require_row_with_prefix,
    rows_with_prefix,
)
from localai_cluster.kit import errors, names
from nodes.models import BackendNode, JoinToken, NodeConflict
from nodes.registry.states import DRAINING, HEALTHY, OFFLINE, PENDING, UNHEALTHY

_UUID_LENGTH = 36


def find_node(text: str) -> BackendNode:
    """Return the node with this name, id or id prefix. Raise CommandError unless exactly one matches.

    Workers choose their names. A name that looks like another node's id must not match in place of that id.
    """
    by_name = BackendNode.objects.filter(name_key=names.key(text)).first()
    matches = rows_with_prefix(BackendNode.objects.order_by("name"), text)
    if by_name is not None and (len(text) < SHORT_ID_LENGTH or matches in ([], [by_name])):
        return by_name
    if by_name is not None and len(text) < _UUID_LENGTH:
        raise CommandError(
            f"{text!r} is both a name and an id prefix of {_ambiguous_names(matches)}; use the full id"
        )
    if not matches:
        raise CommandError(f"there is no node {text!r}; `manage.py nodes list` lists them")
    if len(matches) > 1:
        raise CommandError(
            f"{text!r} is an id prefix of {_ambiguous_names(matches)}; use a longer prefix or the name"
        )
    return matches[0]


def find_conflict(text: str) -> NodeConflict:
    """Return the conflict with that id or id prefix. Raise CommandError unless exactly one matches."""
    hint = "`manage.py nodes conflicts` lists the open ones"
    return require_row_with_prefix(NodeConflict.objects.order_by("-last_at"), text, "conflict", hint)


def find_join_token(text: str) -> JoinToken:
    """Return the token with that id or id prefix. Raise CommandError unless exactly one matches."""
    hint = "`manage.py nodes join-token list` lists their ids"
    return require_row_with_prefix(JoinToken.objects.all(), text, "join token", hint)


def _ambiguous_names(matches: list[BackendNode]) -> str:
    ellipsis = ", …" if len(matches) > MAX_MATCHES else ""
    return ", ".join(row.name for row in matches[:MAX_MATCHES]) + ellipsis


_RESUME_HINT = "use `manage.py nodes resume {name}` to return it to service"
_DRAIN_HINT = "use `manage.py nodes drain {name}` or `revoke {name}` to take an approved node out of service"
_ENROL_HINT = "only a worker that has registered with its own secret has an identity"
_NEW_SECRET_HINT = (
    "give its worker a new secret (delete the file node-secret, restart the worker), then approve it"
)
_HINT_BY_VERB_AND_STATUS: Mapping[tuple[str, str], str] = {
    ("approve", PENDING): _NEW_SECRET_HINT,
    ("approve", DRAINING): _RESUME_HINT,
    ("approve", UNHEALTHY): _RESUME_HINT,
    ("approve", OFFLINE): "it is already approved; start its worker",
    ("approve", HEALTHY): "nothing to do",
    ("resume", PENDING): "use `manage.py nodes approve {name}`",
    ("resume", HEALTHY): "nothing to do",
}
_HINT_BY_VERB = {"reject": _DRAIN_HINT, "rotate": _ENROL_HINT, "revoke": _ENROL_HINT}


@contextmanager
def hint_on_refusal(verb: str, find_node: BackendNode) -> Iterator[None]:
    """Convert a refusal of `verb` on the node into a CommandError with a hint."""
    try:
        yield
    except errors.ClusterError as refusal:
        hint = ""
        if refusal.status in (400, 409):
            text = _HINT_BY_VERB_AND_STATUS.get((verb, find_node.status)) or _HINT_BY_VERB.get(verb) or ""
            hint = f"; {text.format(name=find_node.name)}" if text else ""
        raise CommandError(f"{find_node.name}: {refusal.message}{hint}") from refusal
