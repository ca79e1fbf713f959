"""Export of the history of operations (O100): one JSON object or one CSV line per entry, the newest first.

The history is read and sent in chunks, as fast as the client reads them, so a long one needs no more memory
than a short one. Between two chunks no database connection is held.
"""

import csv
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import orjson
from django.http import StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.views import APIView

from localai_cluster.web.openapi import flat_refusals
from operations.api import history
from operations.executor.work import in_thread

AT_ONCE = 100
"""Entries of one chunk."""
NDJSON, CSV = "ndjson", "csv"
_TYPES = {NDJSON: "application/x-ndjson", CSV: "text/csv; charset=utf-8"}
_COLUMNS = (
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
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes that a spreadsheet evaluates as a formula; some texts come from workers."""

Entry = Mapping[str, Any]
Written = Callable[[Sequence[Entry]], bytes]


class _Asked(history.Filters):
    """What is exported, and how."""

    format = serializers.ChoiceField(choices=(NDJSON, CSV), required=False, default=NDJSON)


class ExportView(APIView):
    """`/api/operations/history/export`."""

    envelope = "flat"

    @extend_schema(
        operation_id="operations_history_export",
        summary="Export operations that have ended",
        tags=["operations"],
        parameters=[_Asked],
        responses={
            (200, "application/x-ndjson"): OpenApiTypes.STR,
            (200, "text/csv"): OpenApiTypes.STR,
            **flat_refusals(400),
        },
    )
    def get(self, request: Request) -> StreamingHttpResponse:
        """The whole record, with the filters of the list. A line of NDJSON is an entry of that list."""
        filters = history.checked(_Asked, request.query_params)
        kind = filters["format"]
        first = _chunk(filters, None)  # an outage can still become an error response here
        response = StreamingHttpResponse(_chunks(filters, first), content_type=_TYPES[kind])
        response["Content-Disposition"] = f'attachment; filename="operations.{kind}"'
        return response


_Chunk = tuple[bytes, history.Position | None]


def _chunk(filters: dict[str, Any], position: history.Position | None) -> _Chunk:
    rows, last = history.after(history.matching(filters), position, AT_ONCE)
    entries = [history.entry(row) for row in rows]
    if filters["format"] == NDJSON:
        return b"".join(orjson.dumps(entry) + b"\n" for entry in entries), last
    return _lines(entries, with_header=position is None), last


async def _chunks(filters: dict[str, Any], first: _Chunk) -> AsyncIterator[bytes]:
    chunk, last = first
    yield chunk
    while last is not None:
        chunk, last = await in_thread(_chunk, filters, last)
        yield chunk


def _lines(entries: Sequence[Entry], *, with_header: bool) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if with_header:
        writer.writerow(_COLUMNS)
    for entry in entries:
        names = [part["node_name"] for part in entry.get("nodes", ())] or [entry.get("nodeName", "")]
        values = {**entry, "nodes": "; ".join(names)}
        writer.writerow([_cell(str(values.get(column, ""))) for column in _COLUMNS])
    return text.getvalue().encode()


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULAS) else text
