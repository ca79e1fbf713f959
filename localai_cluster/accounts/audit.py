"""What people changed: who, what, when, from where. `record` is the only writer.

The code that makes a change calls it in the same transaction, so the two exist together or not at all. Who
and from where is not passed along: a request to Django or a management command opens a context (`of_request`,
`at_command_line`), and work outside of one is not a person's: what workers, controllers and requests for
inference cause leaves no entry.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.admin.models import ADDITION, DELETION, LogEntry
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from localai_cluster import clock
from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import Actor, ActorKind, of_principal
from localai_cluster.accounts.authentication import client_address
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.accounts.principals import Principal
from localai_cluster.logs import request_id

PEOPLE = (ActorKind.USER, ActorKind.STATIC_KEY, ActorKind.COMMAND)
_LONGEST = 255
_FLAGS: Mapping[int, str] = {ADDITION: "added", DELETION: "deleted"}
_COLUMNS = (
    "id",
    "at",
    "kind",
    "actor_kind",
    "actor",
    "address",
    "request_id",
    "subject",
    "subject_id",
    "detail",
)

_where: ContextVar[HttpRequest | Actor | None] = ContextVar("where", default=None)


@dataclass(frozen=True)
class Change:
    """One change: what was done, e.g. `operation.cancelled`, and to what."""

    kind: str
    subject: str
    subject_id: str
    detail: str = ""


class OfRequest:
    """Middleware: what happens inside a request is its user's."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Pass the request on."""
        with _inside(request):
            return self._get_response(request)


@contextmanager
def at_command_line(actor: Actor) -> Iterator[None]:
    """What happens inside is done by a management command."""
    with _inside(actor):
        yield


@contextmanager
def _inside(where: HttpRequest | Actor) -> Iterator[None]:
    token = _where.set(where)
    try:
        yield
    finally:
        _where.reset(token)


def _who() -> tuple[Actor | None, str]:
    """The person behind what happens now, and the address; None if it is no person's."""
    where = _where.get()
    if where is None or isinstance(where, Actor):
        return where, ""
    user: Any = where.user
    found = user if isinstance(user, Principal) else principals.of_user(user)
    actor = of_principal(found) if found.is_user else None
    return actor, client_address(where)


def record(*changes: Change, at: datetime | None = None) -> None:
    """Write the changes, in one statement; the caller's transaction makes them true."""
    if not changes:
        return
    actor, address = _who()
    if actor is None:
        return
    at, identifier = at or clock.now(), request_id.get()
    AuditEntry.objects.bulk_create(
        AuditEntry(
            at=at,
            kind=change.kind,
            actor_kind=actor.kind,
            actor=str(actor),
            address=address,
            request_id="" if identifier == "-" else identifier,
            subject=change.subject[:_LONGEST],
            subject_id=change.subject_id[:64],
            detail=change.detail[:_LONGEST],
        )
        for change in changes
    )


def of_admin(sender: type[LogEntry], instance: LogEntry, created: bool, **_: Any) -> None:
    """Signal: what Django's admin notes of an edit is a change like any other."""
    if created:
        record(edited(instance))


def edited(entry: LogEntry) -> Change:
    """The change that an entry of the admin's own log tells of."""
    of = entry.content_type.name if entry.content_type else "row"
    did = _FLAGS.get(entry.action_flag, "changed")
    return Change(
        f"admin.{did}", f"{of} {entry.object_repr}", str(entry.object_id), entry.get_change_message()
    )


def as_dict(entry: AuditEntry) -> dict[str, Any]:
    """One entry for the wire."""
    return {name: getattr(entry, name) for name in _COLUMNS} | {"at": entry.at.isoformat()}


def prune(*, before: datetime, limit: int) -> int:
    """Delete the oldest `limit` entries from before `before`; return the number."""
    old = AuditEntry.objects.filter(at__lt=before).order_by("at", "pk").values_list("pk", flat=True)
    deleted, _ = AuditEntry.objects.filter(pk__in=list(old[:limit])).delete()
    return deleted
