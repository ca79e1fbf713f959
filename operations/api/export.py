"""The record of operations as a file (O100): one JSON object or one CSV line an entry, what ended last first.

It is read and sent in pieces, as fast as the client takes them, so a long record costs no more memory than a
short one. Between two pieces no database connection is held.
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
"""Entries of one piece."""
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
"""What makes a spreadsheet calculate; some texts come from workers."""

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
        wanted = history.checked(_Asked, request.query_params)
        kind = wanted["format"]
        first = _piece(wanted, None)  # an outage is still a refusal here
        answer = StreamingHttpResponse(_pieces(wanted, first), content_type=_TYPES[kind])
        answer["Content-Disposition"] = f'attachment; filename="operations.{kind}"'
        return answer


_Piece = tuple[bytes, history.Position | None]


def _piece(wanted: dict[str, Any], position: history.Position | None) -> _Piece:
    rows, last = history.after(history.matching(wanted), position, AT_ONCE)
    entries = [history.entry(row) for row in rows]
    if wanted["format"] == NDJSON:
        return b"".join(orjson.dumps(one) + b"\n" for one in entries), last
    return _lines(entries, heads=position is None), last


async def _pieces(wanted: dict[str, Any], first: _Piece) -> AsyncIterator[bytes]:
    written, last = first
    yield written
    while last is not None:
        written, last = await in_thread(_piece, wanted, last)
        yield written


def _lines(entries: Sequence[Entry], *, heads: bool) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if heads:
        writer.writerow(_COLUMNS)
    for one in entries:
        names = [part["node_name"] for part in one.get("nodes", ())] or [one.get("nodeName", "")]
        values = {**one, "nodes": "; ".join(names)}
        writer.writerow([_cell(str(values.get(column, ""))) for column in _COLUMNS])
    return text.getvalue().encode()


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULAS) else text
