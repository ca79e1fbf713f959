"""Operations for admins: live list, dismissal, one job's status (`contract/http-api.md` §3.2, §3.5, §3.7).

Authentication and the admin check are the project's defaults; errors are flat on these routes.
"""

from typing import Any
from uuid import UUID

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster import clock, errors
from localai_cluster.web import openapi
from operations.api import serializers as shapes
from operations.changes import feed
from operations.ledger import admission
from operations.models import TERMINAL, Operation, Status

_REFUSED = {
    401: OpenApiResponse(openapi.RefusalSerializer, "A valid credential is required."),
    403: OpenApiResponse(openapi.RefusalSerializer, "Admins only."),
    503: OpenApiResponse(
        openapi.FlatRefusalSerializer, "Not possible right now; Retry-After says when to come back."
    ),
}
_UNKNOWN = OpenApiResponse(openapi.FlatRefusalSerializer, "No operation has this id.")


class OperationsView(APIView):
    """`/api/operations`."""

    envelope = "flat"

    @extend_schema(
        operation_id="operations_list",
        summary="List operations",
        tags=["operations"],
        responses={200: shapes.OperationListSerializer, **_REFUSED},
    )
    def get(self, request: Request) -> Response:
        """Waiting and running operations, and failures not dismissed yet; least progress first."""
        operations = sorted(feed.snapshot().operations, key=lambda entry: (entry["progress"], entry["id"]))
        return Response({"operations": operations})


class DismissView(APIView):
    """`/api/operations/:jobID/dismiss`."""

    envelope = "flat"

    @extend_schema(
        operation_id="operations_dismiss",
        summary="Dismiss a failed operation",
        tags=["operations"],
        request=None,
        responses={
            200: shapes.DoneSerializer,
            **_REFUSED,
            404: _UNKNOWN,
            409: OpenApiResponse(openapi.FlatRefusalSerializer, "It has not failed."),
        },
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Removes a failure from the live list for all users; its record stays (O52)."""
        job = _uuid(job_id)
        if job is None:
            raise errors.NotFound(admission.NO_SUCH_OPERATION)
        who: Any = request.user
        admission.dismiss(job, actor=who.name, now=clock.now())
        return Response({"success": True, "message": "operation dismissed"})


class JobView(APIView):
    """`/api/backends/job/:uid`."""

    envelope = "flat"

    @extend_schema(
        operation_id="backends_job",
        summary="Show an operation",
        tags=["operations"],
        responses={
            200: shapes.JobSerializer,
            **_REFUSED,
            404: _UNKNOWN,
        },
    )
    def get(self, request: Request, uid: str) -> Response:
        """The state of an operation, for as long as its record exists."""
        job = _uuid(uid)
        operation = Operation.objects.filter(pk=job).first() if job else None
        if operation is None:
            raise errors.NotFound(admission.NO_SUCH_OPERATION)
        return Response(job_of(operation))


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def job_of(operation: Operation) -> dict[str, Any]:
    """§3.7. A known job is never `queued`: the reference says so of ids that it does not know."""
    job: dict[str, Any] = {
        "progress": operation.progress,
        "message": operation.message,
        "galleryElementName": operation.element,
        "processed": operation.status in TERMINAL,
        "deletion": operation.kind.endswith("_delete"),
        "queued": False,
    }
    if operation.status == Status.COMPLETED:
        job["completed"] = True
    elif operation.error:
        job["error"] = operation.error
    return job
