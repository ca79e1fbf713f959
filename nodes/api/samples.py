"""The memory of a node over the last hour."""

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import FastJSONRenderer
from localai_cluster.web.shapes import BYTES, TIME, Shape, field
from nodes.api.base import MOMENT, NodeView, answered, existing
from nodes.registry import samples

SAMPLE = Shape(
    "MemorySample",
    "What a node used of its memory in one minute.",
    [
        field("at", TIME, "The beginning of the minute."),
        field("vram_used", BYTES, "Null for a node without VRAM.", nullable=True),
        field("ram_used", BYTES, nullable=True),
    ],
)
SAMPLES = Shape("MemorySamples", "The last hour, the oldest first.", [field("samples", SAMPLE.many)])
COMPONENTS = (SAMPLE, SAMPLES)


class MemoryView(NodeView):
    """`/api/nodes/:id/memory`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_memory",
        summary="Show a node's memory over the last hour",
        tags=["nodes"],
        responses={200: SAMPLES.ref, **refusals(401, 403, 404)},
        examples=[answered({"samples": [{"at": MOMENT, "vram_used": 8589934592, "ram_used": 17179869184}]})],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """A sample a minute; none for minutes in which the node was not heard."""
        found = samples.of_node(existing(node_id), now=clock.now())
        rows = [SAMPLE.of(at=at.isoformat(), vram_used=vram, ram_used=ram) for at, vram, ram in found]
        return Response(SAMPLES.of(samples=rows))
