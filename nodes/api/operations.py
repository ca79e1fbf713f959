"""Operations as they are now: the live list, and one of them (`contract/http-api.md` §3.2).

What an operation waits for depends on nodes and their queues, so these stand here and not beside the record.
"""

from typing import Any
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import flat_refusals
from nodes.backends import wait_reasons
from operations.api import serializers as shapes
from operations.changes import feed
from operations.ledger import admission
from operations.models import Operation


def live() -> list[dict[str, Any]]:
    """Waiting and running operations, and failures not dismissed yet; least progress first."""
    entries = sorted(feed.snapshot().operations, key=lambda entry: (entry["progress"], entry["id"]))
    wait_reasons.annotate(entries, now=clock.now())
    return entries


def entry_of(id: UUID) -> dict[str, Any] | None:
    """The operation, also long after its end; None if there is no record of it."""
    row = Operation.objects.filter(pk=id).prefetch_related("targets").first()
    if row is None:
        return None
    entry = feed.as_dict(row, row.targets.all())
    wait_reasons.annotate([entry], now=clock.now())
    return entry


class OperationsView(APIView):
    """`/api/operations`."""

    envelope = "flat"

    @extend_schema(
        operation_id="operations_list",
        summary="List operations",
        tags=["operations"],
        responses={200: shapes.OperationListSerializer, **flat_refusals()},
    )
    def get(self, request: Request) -> Response:
        """Waiting and running operations, and failures not dismissed yet; least progress first."""
        return Response({"operations": live()})


class OperationView(APIView):
    """`/api/operations/:jobID`."""

    envelope = "flat"

    @extend_schema(
        operation_id="operations_retrieve",
        summary="Show one operation",
        tags=["operations"],
        responses={
            200: shapes.OperationSerializer,
            **flat_refusals(404),
        },
    )
    def get(self, request: Request, job_id: str) -> Response:
        """The operation with its parts, also after its end, for as long as its record exists."""
        try:
            entry = entry_of(UUID(job_id))
        except ValueError:
            entry = None
        if entry is None:
            raise errors.NotFound(admission.NO_SUCH_OPERATION)
        return Response(entry)
