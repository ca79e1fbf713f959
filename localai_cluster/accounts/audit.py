"""Audit of changes by people: actor, change, time and address. `record` is the only writer.

The code that makes a change calls `record` in the same transaction, so the two are atomic. Actor and address
are not parameters: a request to Django, a management command or a raw route that changes something opens a
context (`AttributionMiddleware`, `attribute_to`). Changes outside of a context are not by people: those of
workers, controllers and requests for inference write no entry.
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

from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import Actor, ActorKind, of_principal
from localai_cluster.accounts.authentication import client_address
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.accounts.principals import Principal
from localai_cluster.kit import clock
from localai_cluster.kit.logs import request_id

AUDITED_ACTOR_KINDS = (ActorKind.USER, ActorKind.STATIC_KEY, ActorKind.COMMAND)
"""Kinds of actors whose changes are audited: those that stand for a person."""
_MAX_TEXT_LENGTH = 255
_CHANGE_BY_ADMIN_FLAG: Mapping[int, str] = {ADDITION: "added", DELETION: "deleted"}
_ENTRY_COLUMNS = (
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

_Author = tuple[Actor, str]
"""An actor and the client's address."""
_change_author: ContextVar[HttpRequest | _Author | None] = ContextVar("where", default=None)
"""The request or author to which changes in the current context are attributed; None outside of a context."""


@dataclass(frozen=True)
class Change:
    """A change for the audit: its kind, such as `operation.cancelled`, its subject and details."""

    kind: str
    subject: str
    subject_id: str
    detail: str = ""


class AttributionMiddleware:
    """Django middleware that attributes changes during a request to the request's user."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        """Process the request. Attribute changes meanwhile to its caller."""
        with _attribute_to(request):
            return self._get_response(request)


@contextmanager
def attribute_to(actor: Actor, address: str = "") -> Iterator[None]:
    """Attribute changes within the block to this actor. For management commands and raw routes.

    `address` is that of the client, "" for a command on the server.
    """
    with _attribute_to((actor, address)):
        yield


@contextmanager
def _attribute_to(source: HttpRequest | _Author) -> Iterator[None]:
    token = _change_author.set(source)
    try:
        yield
    finally:
        _change_author.reset(token)


def _current_actor() -> tuple[Actor | None, str]:
    """Return the actor of the current context and the client's address.

    The actor is None outside of a context, and for a request without a signed-in user.
    """
    source = _change_author.get()
    if source is None:
        return None, ""
    if isinstance(source, tuple):
        return source
    user: Any = source.user
    principal = user if isinstance(user, Principal) else principals.of_user(user)
    actor = of_principal(principal) if principal.is_user else None
    return actor, client_address(source)


def record(*changes: Change, at: datetime | None = None) -> None:
    """Write audit entries for the changes, in the caller's transaction. Do nothing outside of a context."""
    if not changes:
        return
    actor, address = _current_actor()
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
            subject=change.subject[:_MAX_TEXT_LENGTH],
            subject_id=change.subject_id[:64],
            detail=change.detail[:_MAX_TEXT_LENGTH],
        )
        for change in changes
    )


def record_admin_edit(sender: type[LogEntry], instance: LogEntry, created: bool, **_: Any) -> None:
    """Record an edit in Django's admin. This is the receiver of `post_save` of `LogEntry`."""
    if created:
        record(admin_change(instance))


def admin_change(entry: LogEntry) -> Change:
    """Return the change that an entry of Django's admin log describes."""
    of = entry.content_type.name if entry.content_type else "row"
    action = _CHANGE_BY_ADMIN_FLAG.get(entry.action_flag, "changed")
    return Change(
        f"admin.{action}", f"{of} {entry.object_repr}", str(entry.object_id), entry.get_change_message()
    )


def as_dict(entry: AuditEntry) -> dict[str, Any]:
    """Return the entry in the form of the REST API."""
    return {name: getattr(entry, name) for name in _ENTRY_COLUMNS} | {"at": entry.at.isoformat()}


def prune(*, before: datetime, limit: int) -> int:
    """Delete up to `limit` entries older than `before`, oldest first. Return their number."""
    old = AuditEntry.objects.filter(at__lt=before).order_by("at", "pk").values_list("pk", flat=True)
    deleted, _ = AuditEntry.objects.filter(pk__in=list(old[:limit])).delete()
    return deleted
