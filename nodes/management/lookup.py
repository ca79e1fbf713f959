"""Finds nodes, conflicts and operations by what an operator types, and adds hints to refused commands."""

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from django.core.management.base import CommandError
from django.db.models import CharField, Model, QuerySet
from django.db.models.functions import Cast

from localai_cluster.accounts import actors
from localai_cluster.accounts.actors import Actor
from localai_cluster.kit import errors, names
from nodes.models import BackendNode, JoinToken, NodeConflict
from nodes.registry.states import DRAINING, HEALTHY, OFFLINE, PENDING, UNHEALTHY
from operations.models import Operation

_Row = TypeVar("_Row", bound=Model)
_SHOWN = 5
_WHOLE, _LISTED = 36, 8
"""Characters of an id, and of the prefix that `manage.py nodes list` shows."""
_PREFIX = re.compile(r"[0-9a-f-]{1,36}\Z")


def actor() -> Actor:
    """The operating-system user who runs the command."""
    try:
        return actors.command(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return actors.command(f"uid {os.getuid()}")


def node(text: str) -> BackendNode:
    """The node with that name, id or id prefix; raises CommandError unless exactly one matches.

    Workers choose their names, so a name that looks like the id of another node must not be taken for it.
    """
    named = BackendNode.objects.filter(name_key=names.key(text)).first()
    found = _by_prefix(BackendNode.objects.order_by("name"), text)
    if named is not None and (len(text) < _LISTED or found in ([], [named])):
        return named
    if named is not None and len(text) < _WHOLE:
        raise CommandError(f"{text!r} is both a name and an id prefix of {_listed(found)}; use the full id")
    if not found:
        raise CommandError(f"there is no node {text!r}; `manage.py nodes list` lists them")
    if len(found) > 1:
        raise CommandError(f"{text!r} is an id prefix of {_listed(found)}; use a longer prefix or the name")
    return found[0]


def conflict(text: str) -> NodeConflict:
    """The conflict with that id or id prefix; raises CommandError unless exactly one matches."""
    found = _by_prefix(NodeConflict.objects.order_by("-last_at"), text)
    if not found:
        raise CommandError(f"there is no conflict {text!r}; `manage.py nodes conflicts` lists the open ones")
    if len(found) > 1:
        raise CommandError(f"{text!r} is an id prefix of several conflicts; use a longer prefix")
    return found[0]


def join_token(text: str) -> JoinToken:
    """The join token with that id or id prefix; raises CommandError unless exactly one matches."""
    found = _by_prefix(JoinToken.objects.all(), text)
    if not found:
        raise CommandError(
            f"there is no join token {text[:36]!r}; `manage.py nodes join-token list` lists their ids"
        )
    if len(found) > 1:
        raise CommandError(f"{text!r} is an id prefix of several join tokens; use a longer prefix")
    return found[0]


def operation(text: str) -> Operation:
    """The operation with that id or id prefix; raises CommandError unless exactly one matches."""
    found = _by_prefix(Operation.objects.order_by("-created_at"), text)
    if not found:
        raise CommandError(
            f"there is no operation {text[:36]!r}; `manage.py operations list` and `inbox` list their ids"
        )
    if len(found) > 1:
        raise CommandError(f"{text!r} is an id prefix of several operations; use a longer prefix")
    return found[0]


def _by_prefix(rows: QuerySet[_Row], text: str) -> list[_Row]:
    prefix = text.lower()
    if not _PREFIX.match(prefix):
        return []
    written = rows.annotate(written=Cast("id", CharField()))
    return list(written.filter(written__startswith=prefix)[: _SHOWN + 1])


def _listed(found: list[BackendNode]) -> str:
    more = ", …" if len(found) > _SHOWN else ""
    return ", ".join(row.name for row in found[:_SHOWN]) + more


_RESUME = "use `manage.py nodes resume {name}` to return it to service"
_OUT = "use `manage.py nodes drain {name}` or `revoke {name}` to take an approved node out of service"
_ENROL = "only a worker that has registered with its own secret has an identity"
_NEW_SECRET = (
    "give its worker a new secret (delete the file node-secret, restart the worker), then approve it"
)
_HINTS: Mapping[tuple[str, str], str] = {
    ("approve", PENDING): _NEW_SECRET,
    ("approve", DRAINING): _RESUME,
    ("approve", UNHEALTHY): _RESUME,
    ("approve", OFFLINE): "it is already approved; start its worker",
    ("approve", HEALTHY): "nothing to do",
    ("resume", PENDING): "use `manage.py nodes approve {name}`",
    ("resume", HEALTHY): "nothing to do",
}
_HINTS_OF = {"reject": _OUT, "rotate": _ENROL, "revoke": _ENROL}


@contextmanager
def hint_on_refusal(verb: str, node: BackendNode) -> Iterator[None]:
    """Turns a refusal of `verb` into a CommandError with a hint on what to do instead."""
    try:
        yield
    except errors.ClusterError as refusal:
        known = refusal.status in (400, 409)
        found = (_HINTS.get((verb, node.status)) or _HINTS_OF.get(verb)) if known else None
        hint = f"; {found.format(name=node.name)}" if found else ""
        raise CommandError(f"{node.name}: {refusal.message}{hint}") from refusal
