"""How far the load of a model is (`contract/http-api.md` §6.2): where a request that got a 503 looks next."""

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts.authentication import IsUser
from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import refusals
from localai_cluster.web.shapes import BYTES, TEXT, Shape, count, field
from nodes.api.base import answered
from nodes.loading import wait

LOADING = Shape(
    "ModelLoading",
    "A load that goes on, or the failure that stands for a moment.",
    [
        field("model", TEXT),
        field("state", {"type": "string", "enum": ["pending", "installing", "staging", "loading", "failed"]}),
        field(
            "progress",
            {"type": "number"},
            "Percent of the whole load. It never falls, until an attempt begins again.",
        ),
        field("bytes_sent", BYTES),
        field("total_bytes", BYTES),
        field("file_index", count()),
        field("total_files", count()),
        field("node", TEXT, "The name of the node, once it is chosen.", optional=True),
        field("eta_seconds", count(), "Seconds that are left, once bytes move.", optional=True),
    ],
)
_EXAMPLE = {
    "model": "minilm",
    "state": "loading",
    "progress": 40.0,
    "bytes_sent": 419430400,
    "total_bytes": 1073741824,
    "file_index": 0,
    "total_files": 0,
    "node": "gpu-a",
    "eta_seconds": 12,
}


class LoadStatusView(APIView):
    """`/api/models/:model/load-status`."""

    permission_classes = [IsUser]
    error_type = "not_found_error"

    @extend_schema(
        operation_id="models_load_status",
        summary="Show how far the load of a model is",
        tags=["nodes"],
        parameters=[OpenApiParameter("model", str, OpenApiParameter.PATH)],
        responses={200: LOADING.ref, **refusals(401, 404)},
        examples=[answered(_EXAMPLE)],
    )
    def get(self, request: Request, model: str) -> Response:
        """404 when no load goes on: the model may be ready, so ask it again."""
        now = clock.now()
        look = wait.status(model, now)
        if look is None:
            raise errors.NotFound(f"no load is running for model {model}")
        return Response(LOADING.of(**wait.loading_body(model, look, now)))
