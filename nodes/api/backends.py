"""What is installed on a node (`contract/http-api.md` §2.10).

Answered from rows at once, however slow the worker is, with the age of the list. A controller asks the worker
again for an old one meanwhile.
"""

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, errors, names
from localai_cluster.web.openapi import refusals
from localai_cluster.web.rest import FastJSONRenderer
from localai_cluster.web.shapes import FLAG, TEXT, Shape, column
from nodes.api.base import NodeView, answered, header
from nodes.api.worker_auth import parse_node_id
from nodes.backends import inventory
from nodes.models import BackendNode, NodeBackend, NodeType

ASKED_AGAIN_AFTER = 60.0
"""Seconds after which a list that a reader looks at is asked for again."""
NODE_BACKEND = Shape(
    "NodeBackend",
    "One backend on a node (§2.10).",
    [
        column("name", TEXT),
        column("is_system", FLAG, "It came with the machine and is not removed."),
        column("is_meta", FLAG, "It stands for the build that fits the machine."),
        column("installed_at", TEXT, "As the worker wrote it, RFC 3339.", optional=True),
        column("gallery_url", TEXT, optional=True),
        column("version", TEXT, optional=True),
        column("uri", TEXT, optional=True),
        column("digest", TEXT, optional=True),
        column("alias", TEXT, "Another name that starts it.", optional=True),
    ],
)
_HEADERS = [
    header("X-As-Of", OpenApiTypes.DATETIME, "When the worker listed this; absent if it never did."),
    header("X-Inventory-Error", OpenApiTypes.STR, "Why there is no newer list."),
]
_EXAMPLE = answered(
    [
        {
            "name": "minilm",
            "is_system": False,
            "is_meta": False,
            "installed_at": "2026-08-20T09:12:44Z",
            "gallery_url": "file:///srv/gallery/index.yaml",
            "version": "1.0.0",
            "uri": "/srv/gallery/minilm",
        }
    ]
)


class NodeBackendsView(NodeView):
    """`/api/nodes/:id/backends`."""

    renderer_classes = [FastJSONRenderer]

    @extend_schema(
        operation_id="nodes_backends",
        summary="List a node's backends",
        tags=["backends"],
        parameters=_HEADERS,
        responses={200: NODE_BACKEND.many, **refusals(401, 403, 404)},
        examples=[_EXAMPLE],
    )
    def get(self, request: Request, node_id: str) -> Response:
        """What the node's worker listed last; `X-As-Of` says when. An old list is asked for again."""
        found = parse_node_id(node_id)
        node = BackendNode.objects.filter(pk=found).first() if found else None
        if node is None:
            raise errors.NotFound("node not found")
        if node.node_type == NodeType.AGENT:
            return Response([])
        inventory.wake([node.id], older_than=ASKED_AGAIN_AFTER, now=clock.now())
        rows = NODE_BACKEND.rows(NodeBackend.objects.filter(node=node).order_by("name"))
        return Response(rows, headers=_age(node))


def _age(node: BackendNode) -> dict[str, str]:
    """As of when the list is true, and why there is no newer one."""
    known = {"X-As-Of": node.inventory_at.isoformat()} if node.inventory_at else {}
    problem = names.plain(node.inventory_error).encode("ascii", "replace").decode()
    return known | ({"X-Inventory-Error": problem} if problem else {})
