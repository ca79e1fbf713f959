"""The history: ended operations (`contract/http-api.md` §3.6, O94 to O100), and changes by users.

A failure that is not dismissed is in the inbox, not in the history. Pages use keyset pagination in the order
(finish, id), so a page stays correct while operations end. The export (O100) has one JSON object or one CSV
line per entry, the newest first. It is read and sent in chunks at the client's pace, so a long export needs
no more memory than a short one. Between two chunks it holds no database connection.
"""

import base64
import csv
import io
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
from django.db.models import Count, Q, prefetch_related_objects
from django.http import StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts import audit
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import errors
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import validate
from operations.api import serializers as shapes
from operations.api.serializers import OperationRoute
from operations.changes import feed
from operations.executor.work import in_thread
from operations.ledger import retention
from operations.models import IN_HISTORY, UNDISMISSED_FAILURE, Operation, OperationTarget

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 50, 500
MAX_TARGETS = 5000
"""Maximum number of targets in one page or chunk; an operation with more is a page by itself."""
Position = tuple[datetime, UUID]
"""Position in the order of the history: the time of the end, and the operation's id."""
_OUTCOME_VALUES = ("completed", "failed", "cancelled")
_MAX_TEXT_LENGTH = 255


class _Limit(serializers.Serializer[Any]):
    """The length of the requested page."""

    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=MAX_PAGE_SIZE, default=DEFAULT_PAGE_SIZE
    )


class _Period(serializers.Serializer[Any]):
    """The requested time; `since_text` describes `from`, a Python keyword that cannot be an attribute."""

    since_text: str

    def get_fields(self) -> dict[str, Any]:
        """Return the fields and `from`."""
        since = serializers.DateTimeField(required=False, help_text=self.since_text)
        return {**super().get_fields(), "from": since}


class _Page(_Limit):
    """Query parameters of a page of the history."""

    cursor = serializers.CharField(
        required=False, max_length=128, help_text="`nextCursor` of the page before."
    )


class Filters(_Period):
    """Query parameters that select operations of the history."""

    since_text = "Ended at this time at the earliest."
    node = serializers.UUIDField(required=False, help_text="A node that it was for.")
    backend = serializers.CharField(
        required=False, max_length=_MAX_TEXT_LENGTH, help_text="Backend or model."
    )
    kind = serializers.CharField(required=False, max_length=32)
    outcome = serializers.ChoiceField(choices=_OUTCOME_VALUES, required=False)
    actor = serializers.CharField(required=False, max_length=150)
    to = serializers.DateTimeField(required=False, help_text="Ended at this time at the latest.")


class _Query(Filters, _Page):
    """Query parameters of the history: filters and page."""


class HistoryView(OperationRoute):
    """`/api/operations/history`."""

    @describe(
        "operations_history",
        "List operations that have ended",
        shapes.HISTORY_SHAPE,
        refused=(400,),
        parameters=[_Query],
    )
    def get(self, request: Request) -> Response:
        """Returns operations that have ended, the latest first. `nextCursor` leads to older operations."""
        return Response(history_page(request.query_params))

    @describe("operations_history_clear", "Clear the record", shapes.SuccessSerializer)
    def delete(self, request: Request) -> Response:
        """Deletes the history of the whole cluster. Failures that no one has dismissed stay (O98)."""
        retention.delete_ended()
        return Response({"success": True})


class InboxView(OperationRoute):
    """`/api/operations/inbox`."""

    @describe(
        "operations_inbox",
        "List failures that wait for someone",
        shapes.INBOX_SHAPE,
        refused=(400,),
        parameters=[_Page],
    )
    def get(self, request: Request) -> Response:
        """Returns failures that were not dismissed, the newest first.

        `nextCursor` leads to older failures.
        """
        values = validate_query(_Page, request.query_params)
        failed = Operation.objects.filter(UNDISMISSED_FAILURE)
        return Response(_page_of(failed, values, lambda row: feed.as_dict(row, row.targets.all())))


def history_page(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page of the history; see `validate_query` for parameters that are wrong."""
    values = validate_query(_Query, parameters)
    return _page_of(matching_operations(values), values, history_entry)


def undismissed_failures() -> list[dict[str, Any]]:
    """Return the undismissed failures, the newest first."""
    failed = Operation.objects.filter(UNDISMISSED_FAILURE)
    rows = failed.order_by("-finished_at", "-id").prefetch_related("targets")
    return [feed.as_dict(row, row.targets.all()) for row in rows]


def _page_of(
    rows: Any, values: dict[str, Any], serialize: Callable[[Operation], dict[str, Any]]
) -> dict[str, Any]:
    operations, last = read_after(rows, _parse_cursor(values.get("cursor", "")), values["limit"])
    page: dict[str, Any] = {"operations": [serialize(row) for row in operations]}
    return page | ({"nextCursor": _cursor_after(last)} if last else {})


def read_after(rows: Any, position: Position | None, limit: int) -> tuple[list[Operation], Position | None]:
    """Return up to `limit` operations after the position, and the position of the last one if more follow.

    The result is shorter if the operations have more than `MAX_TARGETS` targets.
    """
    if position is not None:
        at, id = position
        rows = rows.filter(Q(finished_at__lt=at) | Q(finished_at=at, id__lt=id))
    found = list(rows.order_by("-finished_at", "-id")[: limit + 1])
    operations = found[: _fitting(found[:limit])]
    prefetch_related_objects(operations, "targets")
    last = operations[-1] if len(found) > len(operations) else None
    return operations, (last.finished_at, last.id) if last and last.finished_at else None


def _fitting(operations: Sequence[Operation]) -> int:
    """Return how many of the first operations have at most `MAX_TARGETS` targets together; at least one."""
    parts = OperationTarget.objects.filter(operation__in=operations).order_by()
    counts: dict[UUID, int] = dict(parts.values_list("operation_id").annotate(number=Count("pk")))
    totals = itertools.accumulate(counts.get(operation.id, 0) for operation in operations)
    return max(sum(total <= MAX_TARGETS for total in totals), 1)


def validate_query(query: type[serializers.Serializer[Any]], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated parameters. Raise InvalidInput for an unknown, ValidationError for a wrong one."""
    known = query().fields
    for name in parameters:
        if name not in known:
            raise errors.InvalidInput(f"there is no parameter {name}", field=name)
    return validate(query, parameters)


def matching_operations(filters: dict[str, Any]) -> Any:
    """Return the ended operations that match the filters."""
    rows = Operation.objects.filter(IN_HISTORY)
    if node := filters.get("node"):
        # Not a join with DISTINCT: it would compare whole rows, for each page of a long history.
        of_node = OperationTarget.objects.filter(node_id=node).values("operation_id")
        rows = rows.filter(Q(node_id=node) | Q(pk__in=of_node))
    if backend := filters.get("backend"):
        rows = rows.filter(Q(element=backend) | Q(element__endswith=f"@{backend}"))
    columns = {
        "kind": "kind",
        "outcome": "status",
        "actor": "actor",
        "from": "finished_at__gte",
        "to": "finished_at__lte",
    }
    return _filter(rows, filters, columns)


def _filter(rows: Any, filters: dict[str, Any], columns: Mapping[str, str]) -> Any:
    """Filter the rows by the columns of the given filters."""
    return rows.filter(**{column: filters[name] for name, column in columns.items() if filters.get(name)})


def _cursor_after(position: Position) -> str:
    at, id = position
    return base64.urlsafe_b64encode(f"{at.isoformat()} {id}".encode()).decode()


def _parse_cursor(cursor: str) -> Position | None:
    if not cursor:
        return None
    try:
        at, _, id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(" ")
        finished_at = datetime.fromisoformat(at)
        if finished_at.tzinfo is None:
            raise ValueError("a time without a zone")
        # In UTC: PostgreSQL knows no offset of 16 hours or more.
        return finished_at.astimezone(UTC), UUID(id)
    except (ValueError, OverflowError):
        raise errors.InvalidInput("cursor: not one that this list has given", field="cursor") from None


def history_entry(operation: Operation) -> dict[str, Any]:
    """Return the operation as in §3.6, with all keys of the live list."""
    ended = feed.as_dict(operation, operation.targets.all())
    return ended | {
        "id": operation.key,
        "outcome": operation.status,
        "startedAt": (operation.started_at or operation.created_at).isoformat(),
        "taskType": "deletion" if ended["isDeletion"] else "installation",
    }


CHUNK_ENTRIES = 100
"""Maximum number of entries in one chunk."""
NDJSON_FORMAT, CSV_FORMAT = "ndjson", "csv"
_MEDIA_TYPE_BY_FORMAT = {NDJSON_FORMAT: "application/x-ndjson", CSV_FORMAT: "text/csv; charset=utf-8"}
_CSV_COLUMNS = (
    "jobID",
    "kind",
    "fullName",
    "nodes",
    "outcome",
    "actor",
    "clientAddress",
    "requestID",
    "createdAt",
    "startedAt",
    "finishedAt",
    "error",
    "message",
    "dismissedBy",
    "dismissedComment",
)
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes that a spreadsheet evaluates as a formula; some texts come from workers."""

Entry = Mapping[str, Any]


class _ExportQuery(Filters):
    """Query parameters of an export: filters and format."""

    format = serializers.ChoiceField(
        choices=(NDJSON_FORMAT, CSV_FORMAT), required=False, default=NDJSON_FORMAT
    )


class ExportView(OperationRoute):
    """`/api/operations/history/export`."""

    @describe(
        "operations_history_export",
        "Export operations that have ended",
        others={(200, "application/x-ndjson"): OpenApiTypes.STR, (200, "text/csv"): OpenApiTypes.STR},
        refused=(400,),
        parameters=[_ExportQuery],
    )
    def get(self, request: Request) -> StreamingHttpResponse:
        """Returns the whole history, with the same filters as the list.

        A line of NDJSON is an entry of the list.
        """
        filters = validate_query(_ExportQuery, request.query_params)
        kind = filters["format"]
        first = _read_chunk(filters, None)  # an outage can still become an error response here
        response = StreamingHttpResponse(
            _read_chunks(filters, first), content_type=_MEDIA_TYPE_BY_FORMAT[kind]
        )
        response["Content-Disposition"] = f'attachment; filename="operations.{kind}"'
        return response


_Chunk = tuple[bytes, Position | None]


def _read_chunk(filters: dict[str, Any], position: Position | None) -> _Chunk:
    rows, last = read_after(matching_operations(filters), position, CHUNK_ENTRIES)
    entries = [history_entry(row) for row in rows]
    if filters["format"] == NDJSON_FORMAT:
        return b"".join(orjson.dumps(entry) + b"\n" for entry in entries), last
    return _csv_lines(entries, with_header=position is None), last


async def _read_chunks(filters: dict[str, Any], first: _Chunk) -> AsyncIterator[bytes]:
    chunk, last = first
    yield chunk
    while last is not None:
        chunk, last = await in_thread(_read_chunk, filters, last)
        yield chunk


def _csv_lines(entries: Sequence[Entry], *, with_header: bool) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if with_header:
        writer.writerow(_CSV_COLUMNS)
    for entry in entries:
        names = [part["node_name"] for part in entry.get("nodes", ())] or [entry.get("nodeName", "")]
        values = {**entry, "nodes": "; ".join(names)}
        writer.writerow([_csv_cell(str(values.get(column, ""))) for column in _CSV_COLUMNS])
    return text.getvalue().encode()


def _csv_cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA_PREFIXES) else text


_MAX_CURSOR = 2**63 - 1


class _ChangesQuery(_Limit, _Period):
    """Query parameters of the list of changes by users."""

    since_text = "At this time at the earliest."
    cursor = serializers.IntegerField(
        required=False, min_value=1, max_value=_MAX_CURSOR, help_text="`nextCursor` of the page before."
    )
    actor = serializers.CharField(required=False, max_length=150)
    kind = serializers.CharField(
        required=False, max_length=64, help_text="`operation.cancelled`, or `operation` for all of that sort."
    )
    subject = serializers.CharField(
        required=False, max_length=64, help_text="The id of an operation, a node or another thing."
    )
    to = serializers.DateTimeField(required=False, help_text="At this time at the latest.")


class AuditEntrySerializer(serializers.Serializer[Any]):
    """One change by a user."""

    id = serializers.IntegerField()
    at = serializers.DateTimeField()
    kind = serializers.CharField()
    actor_kind = serializers.CharField(help_text="`user`, `static_key` or `command`.")
    actor = serializers.CharField()
    address = serializers.CharField(allow_blank=True, help_text="Empty at the server's own command line.")
    request_id = serializers.CharField(allow_blank=True)
    subject = serializers.CharField()
    subject_id = serializers.CharField(allow_blank=True)
    detail = serializers.CharField(allow_blank=True)


class AuditSerializer(serializers.Serializer[Any]):
    """A page of changes by users."""

    entries = AuditEntrySerializer(many=True)
    nextCursor = serializers.IntegerField(required=False, help_text="Leads to the older ones.")


class AuditView(OperationRoute):
    """`/api/audit`."""

    @describe(
        "audit_list", "List changes by people", AuditSerializer, refused=(400,), parameters=[_ChangesQuery]
    )
    def get(self, request: Request) -> Response:
        """Returns the changes by users within the retention of events, the newest first."""
        filters = validate_query(_ChangesQuery, request.query_params)
        rows, limit = _matching_changes(filters), filters["limit"]
        entries = list(rows.order_by("-id")[: limit + 1])
        page: dict[str, Any] = {"entries": [audit.as_dict(entry) for entry in entries[:limit]]}
        if len(entries) > limit:
            page["nextCursor"] = entries[limit - 1].id
        return Response(page)


def _matching_changes(filters: dict[str, Any]) -> Any:
    rows = AuditEntry.objects.all()
    if kind := filters.get("kind"):
        rows = rows.filter(kind=kind) if "." in kind else rows.filter(kind__startswith=f"{kind}.")
    columns = {
        "actor": "actor",
        "subject": "subject_id",
        "from": "at__gte",
        "to": "at__lte",
        "cursor": "id__lt",
    }
    return _filter(rows, filters, columns)
