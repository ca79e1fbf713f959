"""Nodes and conflicts as a person names them at the command line, and what to do where a verb is refused."""

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from django.core.management.base import CommandError
from django.db.models import CharField, Model, QuerySet
from django.db.models.functions import Cast

from localai_cluster import errors, names
from localai_cluster.accounts import actors
from localai_cluster.accounts.actors import Actor
from nodes.models import BackendNode, NodeConflict
from nodes.registry.states import DRAINING, HEALTHY, OFFLINE, PENDING, UNHEALTHY

_Row = TypeVar("_Row", bound=Model)
_SHOWN = 5
_WHOLE, _LISTED = 36, 8
"""Characters of an id, and of the beginning that `manage.py nodes list` shows."""
_PREFIX = re.compile(r"[0-9a-f-]{1,36}\Z")


def actor() -> Actor:
    """The user of the operating system who runs the command."""
    try:
        return actors.command(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return actors.command(f"uid {os.getuid()}")


def node(text: str) -> BackendNode:
    """The node of that name, id, or beginning of an id; raises CommandError unless it is exactly one.

    Workers choose their names: one that looks like the id of another node does not stand for that.
    """
    named = BackendNode.objects.filter(name_key=names.key(text)).first()
    found = _by_prefix(BackendNode.objects.order_by("name"), text)
    if named is not None and (len(text) < _LISTED or found in ([], [named])):
        return named
    if named is not None and len(text) < _WHOLE:
        raise CommandError(f"{text!r} is a name and begins the id of {_listed(found)}: give the whole id")
    if not found:
        raise CommandError(f"there is no node {text!r}; `manage.py nodes list` shows those there are")
    if len(found) > 1:
        raise CommandError(f"{text!r} begins the ids of {_listed(found)}: give more of it, or the name")
    return found[0]


def conflict(text: str) -> NodeConflict:
    """The conflict with that id or beginning of an id; raises CommandError unless it is exactly one."""
    found = _by_prefix(NodeConflict.objects.order_by("-last_at"), text)
    if not found:
        raise CommandError(f"there is no conflict {text!r}; `manage.py nodes conflicts` shows the open ones")
    if len(found) > 1:
        raise CommandError(f"{text!r} begins the ids of several conflicts: give more of it")
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


_RESUME = "`manage.py nodes resume {name}` takes it into service again"
_OUT = "`manage.py nodes drain {name}` or `revoke {name}` takes an approved node out of service"
_ENROL = "only a worker that has registered with a secret of its own has an identity"
_ANEW = "have its worker make a new secret (delete its file node-secret, start it again), then approve it"
_MENDS: Mapping[tuple[str, str], str] = {
    ("approve", PENDING): _ANEW,
    ("approve", DRAINING): _RESUME,
    ("approve", UNHEALTHY): _RESUME,
    ("approve", OFFLINE): "it was approved before; start its worker",
    ("approve", HEALTHY): "there is nothing to do",
    ("resume", PENDING): "`manage.py nodes approve {name}` lets it in",
    ("resume", HEALTHY): "there is nothing to do",
}
_MENDS_OF = {"reject": _OUT, "rotate": _ENROL, "revoke": _ENROL}


@contextmanager
def mended(verb: str, node: BackendNode) -> Iterator[None]:
    """Turns a refusal of `verb` into a CommandError that says what to do instead."""
    try:
        yield
    except errors.ClusterError as refusal:
        known = refusal.status in (400, 409)
        mend = (_MENDS.get((verb, node.status)) or _MENDS_OF.get(verb)) if known else None
        hint = f": {mend.format(name=node.name)}" if mend else ""
        raise CommandError(f"{node.name}: {refusal.message}{hint}") from refusal
