"""Dismissal of operations (`contract/http-api.md` §3.5).

Authentication and the admin check are the project's defaults; errors are flat on these routes.
"""

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.kit import clock
from localai_cluster.web.openapi import flat_refusals
from localai_cluster.web.rest import validate_body
from operations.api import serializers as shapes
from operations.api.jobs import found
from operations.ledger import admission


class DismissView(APIView):
    """`/api/operations/:jobID/dismiss`."""

    envelope = "flat"

    @extend_schema(
        operation_id="operations_dismiss",
        summary="Dismiss a failed operation",
        tags=["operations"],
        request=shapes.DismissSerializer,
        responses={
            200: shapes.DoneSerializer,
            **flat_refusals(404, 409),
        },
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Removes a failure from the live list for all users; its record stays (O52)."""
        job = found(job_id).id
        user: Any = request.user
        comment = validate_body(shapes.DismissSerializer, request).get("comment", "")
        admission.dismiss(job, actor=user.name, now=clock.now(), comment=comment)
        return Response({"success": True, "message": "operation dismissed"})
