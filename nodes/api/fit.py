"""Which nodes could take a model: what the map of the fleet shows."""

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.web.openapi import refusals
from localai_cluster.web.renderers import FastJSONRenderer
from nodes.api.base import NODE_ID, NodeView, answered
from nodes.loading import fit_check

_MODEL = OpenApiParameter(
    "model", OpenApiTypes.STR, OpenApiParameter.PATH, description="The model's name; it may contain slashes."
)
_FULL = "no free slot for this model"
_FIT = {
    "model": "minilm",
    "nodes": [{"node_id": NODE_ID, "reason": _FULL, "enough_vram": True}],
    "placement": {
        "outcome": "waiting",
        "reason": f"no node can take it: 1 {_FULL}",
        "node_id": None,
        "node": None,
        "replica_index": None,
        "need": {"vram": 8589934592, "vram_required": False, "disk": 0, "disk_required": True},
        "selector": "",
        "nodes": {"considered": 1, "feasible": 0},
        "refused": [{"code": "full", "reason": _FULL, "count": 1}],
        "best": [],
        "misses": [],
        "evicts": [],
    },
}


class FitView(NodeView):
    """`/api/placement/fit/:model`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="placement_fit",
        summary="Show where a model fits",
        tags=["scheduling"],
        parameters=[_MODEL],
        responses={200: fit_check.FIT.ref, **refusals(401, 403, 404, 503)},
        examples=[answered(_FIT)],
    )
    def get(self, request: Request, model: str) -> Response:
        """Every node with the reason why it cannot take one more replica, and what placement would choose.

        404 for a model that is not defined.
        """
        return Response(fit_check.node_fit(model))
