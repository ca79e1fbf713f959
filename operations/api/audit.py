"""What people changed: who, what, when, from where; the newest first."""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts import audit
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.web.openapi import flat_refusals
from operations.api.history import MOST_A_PAGE, USUAL_PAGE, checked

_LARGEST = 2**63 - 1


class _ChangesQuery(serializers.Serializer[Any]):
    """Which changes."""

    limit = serializers.IntegerField(required=False, min_value=1, max_value=MOST_A_PAGE, default=USUAL_PAGE)
    cursor = serializers.IntegerField(
        required=False, min_value=1, max_value=_LARGEST, help_text="`nextCursor` of the page before."
    )
    actor = serializers.CharField(required=False, max_length=150)
    kind = serializers.CharField(
        required=False, max_length=64, help_text="`operation.cancelled`, or `operation` for all of that sort."
    )
    subject = serializers.CharField(
        required=False, max_length=64, help_text="The id of an operation, a node or another thing."
    )
    to = serializers.DateTimeField(required=False, help_text="At this time at the latest.")

    def get_fields(self) -> dict[str, Any]:
        """`from` is a word of Python."""
        since = serializers.DateTimeField(required=False, help_text="At this time at the earliest.")
        return {**super().get_fields(), "from": since}


class AuditEntrySerializer(serializers.Serializer[Any]):
    """One change that a person made."""

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
    """A page of changes."""

    entries = AuditEntrySerializer(many=True)
    nextCursor = serializers.IntegerField(required=False, help_text="Leads to the older ones.")


class AuditView(APIView):
    """`/api/audit`."""

    envelope = "flat"

    @extend_schema(
        operation_id="audit_list",
        summary="List changes by people",
        tags=["operations"],
        parameters=[_ChangesQuery],
        responses={
            200: AuditSerializer,
            **flat_refusals(400),
        },
    )
    def get(self, request: Request) -> Response:
        """Every change that a person made, within the retention of events; the newest first."""
        filters = checked(_ChangesQuery, request.query_params)
        rows, limit = _matching(filters), filters["limit"]
        entries = list(rows.order_by("-id")[: limit + 1])
        page: dict[str, Any] = {"entries": [audit.as_dict(entry) for entry in entries[:limit]]}
        if len(entries) > limit:
            page["nextCursor"] = entries[limit - 1].id
        return Response(page)


def _matching(filters: dict[str, Any]) -> Any:
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
    return rows.filter(**{column: filters[name] for name, column in columns.items() if filters.get(name)})
