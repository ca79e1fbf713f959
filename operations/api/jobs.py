"""Active operations: the live list, and single operations under the reference's URLs.

`contract/http-api.md` §3.5, §3.7 and §3.9, O62, O63. An operation on a backend or a model can be read under
the URLs of both. Authentication and the admin check are the project's defaults; errors are flat on these
routes.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db.models import Q
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.kit import clock, errors
from localai_cluster.kit.quantities import human_bytes
from localai_cluster.web.openapi import describe, name_operations
from localai_cluster.web.rest import validate_body
from localai_cluster.web.shapes import mapping_schema
from operations import kinds, targets
from operations.api import serializers as shapes
from operations.api.serializers import OperationRoute
from operations.changes import feed
from operations.ledger import admission
from operations.models import ACTIVE, KINDS, QUEUED, TERMINAL, Operation, OperationTarget, Status, facts_of

JOB_RETENTION = timedelta(hours=1)
"""Time for which an ended operation stays in the lists of jobs (O29).

A single operation can be read for as long as its row exists.
"""
MAX_JOBS = 500


def find_operation(text: str) -> Operation:
    """Return the operation with this id; raise NotFound."""
    try:
        operation = Operation.objects.filter(pk=UUID(text)).first()
    except ValueError:
        operation = None
    if operation is None:
        raise errors.NotFound(admission.NO_SUCH_OPERATION)
    return operation


class JobView(OperationRoute):
    """`/api/backends/job/:uid`."""

    @describe("backends_job", "Show an operation", shapes.JOB_SHAPE, refused=(404,))
    def get(self, request: Request, uid: str) -> Response:
        """Returns the state of an operation, for as long as its record exists."""
        return Response(job_of(find_operation(uid)))


@name_operations(get="models_job")
class ModelJobView(JobView):
    """`/api/models/job/:uid`."""


def job_of(operation: Operation) -> dict[str, Any]:
    """Return the operation in the form of a job (§3.7).

    `queued` follows O4: a waiting operation is queued from its start (O62).
    """
    parts = list(operation.targets.all())
    is_completed = operation.status == Status.COMPLETED
    return shapes.JOB_SHAPE.of(
        progress=operation.progress,
        message=operation.message,
        galleryElementName=operation.element,
        processed=operation.status in TERMINAL,
        deletion=facts_of(operation.kind).is_deletion,
        queued=operation.status in ACTIVE and operation.phase == QUEUED,
        completed=is_completed,
        error="" if is_completed else operation.error,
        nodes=[feed.target_as_dict(part) for part in parts],
        state=_state(operation, parts),
    )


def _state(operation: Operation, parts: Sequence[OperationTarget]) -> str:
    """Return the operation's state in one word (O62)."""
    if operation.status == Status.PROCESSING:
        unfinished = [part for part in parts if part.status not in targets.ENDED]
        return "verifying" if unfinished and all(part.overdue_since for part in unfinished) else "running"
    return "queued" if operation.status == Status.PENDING else operation.status


class JobStatusView(APIView):
    """`/backends/jobs/:uid`."""

    tag = "operations"

    @describe(
        "backends_job_status", "Show an operation's raw status", shapes.JOB_STATUS_SHAPE, refused=(404,)
    )
    def get(self, request: Request, uid: str) -> Response:
        """Returns an operation in the form of the reference's job status, with bytes and file (§3.9)."""
        return Response(status_of(find_operation(uid)))


@name_operations(get="models_job_status")
class ModelJobStatusView(JobStatusView):
    """`/models/jobs/:uid`."""


class BackendJobsView(APIView):
    """`/backends/jobs`."""

    tag = "operations"
    subject = "backend"

    @describe("backends_jobs", "List raw statuses", mapping_schema(shapes.JOB_STATUS_SHAPE.ref))
    def get(self, request: Request) -> Response:
        """Returns, by id, the newest 500 operations that are active or have ended within the last hour."""
        of_late = Q(status__in=ACTIVE) | Q(finished_at__gte=clock.now() - JOB_RETENTION)
        names = [kind.name for kind in KINDS.values() if kind.subject == self.subject]
        rows = Operation.objects.filter(of_late, kind__in=names).order_by("-created_at", "-id")
        return Response({str(row.id): status_of(row) for row in rows.prefetch_related("targets")[:MAX_JOBS]})


@name_operations(get="models_jobs")
class ModelJobsView(BackendJobsView):
    """`/models/jobs`."""

    subject = "model"


def status_of(operation: Operation) -> dict[str, Any]:
    """Return the operation as a job status (§3.9), without empty values as in the reference."""
    parts = list(operation.targets.all())
    total, current = operation.total_bytes, operation.current_bytes
    under_way = (part.file_name for part in parts if part.status not in targets.ENDED)
    return shapes.JOB_STATUS_SHAPE.of_object(
        operation,
        deletion=facts_of(operation.kind).is_deletion,
        file_name=next(filter(None, under_way), ""),
        processed=operation.status in TERMINAL,
        file_size=human_bytes(total) if total else "",
        downloaded_size=human_bytes(current) if current else "",
        gallery_element_name=operation.element,
        cancelled=operation.status == Status.CANCELLED,
        current_bytes=current,
        total_bytes=total,
        nodes=[feed.target_as_dict(part) for part in parts],
    )


class DismissView(OperationRoute):
    """`/api/operations/:jobID/dismiss`."""

    @describe(
        "operations_dismiss",
        "Dismiss a failed operation",
        shapes.DoneSerializer,
        refused=(400, 404, 409),
        body=shapes.DismissSerializer,
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Removes a failure from the live list of all users; its record stays (O52).

        With `nodes` only the failures on these nodes are removed; the operation stays because of the rest.
        """
        job = find_operation(job_id).id
        user: Any = request.user
        fields = validate_body(shapes.DismissSerializer, request)
        comment, nodes = fields.get("comment", ""), fields.get("nodes", ())
        admission.dismiss(job, actor=user.name, now=clock.now(), comment=comment, nodes=nodes)
        return Response({"success": True, "message": "operation dismissed"})


def live_entries() -> list[dict[str, Any]]:
    """Return active operations and undismissed failures, with the least progress first."""
    entries = sorted(feed.snapshot().operations, key=lambda entry: (entry["progress"], entry["id"]))
    kinds.hooks().annotate(entries, now=clock.now())
    return entries


def as_entry(operation: Operation) -> dict[str, Any]:
    """Return the operation in wire form, active or ended."""
    entry = feed.as_dict(operation, operation.targets.all())
    kinds.hooks().annotate([entry], now=clock.now())
    return entry


def read_entry(id: UUID) -> dict[str, Any] | None:
    """Return the operation with this id in wire form, active or ended; None if it has no record."""
    row = Operation.objects.filter(pk=id).first()
    return as_entry(row) if row is not None else None


class OperationsView(OperationRoute):
    """`/api/operations`."""

    @describe("operations_list", "List operations", shapes.OPERATIONS_SHAPE)
    def get(self, request: Request) -> Response:
        """Returns active operations and undismissed failures, with the least progress first."""
        return Response({"operations": live_entries()})


class OperationView(OperationRoute):
    """`/api/operations/:jobID`."""

    @describe("operations_retrieve", "Show one operation", feed.OPERATION_SHAPE, refused=(404,))
    def get(self, request: Request, job_id: str) -> Response:
        """Returns an operation with its parts, also after its end, for as long as its record exists."""
        return Response(as_entry(find_operation(job_id)))
