"""Backends on a node (`contract/http-api.md` §2.10)."""

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import clock, errors
from localai_cluster.accounts.authentication import client_address, principal
from localai_cluster.logs import request_id
from localai_cluster.web.openapi import refusals
from localai_cluster.web.parsers import validated
from nodes.api import examples
from nodes.api import serializers as shapes
from nodes.api.views import NodeView, existing
from nodes.backends import install
from operations.ledger.admission import OperationRequest, admit


class InstallView(NodeView):
    """`/api/nodes/:id/backends/install`."""

    @extend_schema(
        operation_id="nodes_backends_install",
        tags=["backends"],
        request=shapes.InstallSerializer,
        responses={
            202: OpenApiResponse(
                shapes.AcceptedSerializer, "The operation is recorded and will be carried out."
            ),
            **refusals(400, 401, 403, 404, 409, 413),
        },
        examples=[examples.INSTALL, examples.ACCEPTED],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Installs a backend on one node. Asking again while it runs joins the running operation."""
        fields = validated(shapes.InstallSerializer, request)
        node = install.find_node(existing(node_id))
        wanted = {name: fields.get(name, "") for name in ("backend", "uri", "name", "alias")}
        wanted["backend"] = wanted["backend"] or wanted["name"]
        element = wanted["backend"] or wanted["uri"]
        if not element:
            raise errors.InvalidInput("backend name or uri required", field="backend")
        now = clock.now()
        asked = OperationRequest(
            install.KIND,
            key=install.key(node.id, element.rpartition("@")[2] if wanted["backend"] else element),
            element=element[:255],
            payload=wanted | {"backend_galleries": fields.get("backend_galleries", "")},
            actor=principal(request).name,
            node=(node.id, node.name),
            targets=[(node.id, node.name)],
            request_id=request_id.get(),
            client_address=client_address(request),
            needed_until=install.gives_up_at(now),
        )
        admission = admit(asked, now=now)
        job = str(admission.operation.id)
        body = {
            "jobID": job,
            "statusUrl": f"/api/backends/job/{job}",
            "message": "backend installation started" if admission.created else "already being installed",
        }
        return Response(body if admission.created else body | {"deduplicated": True}, status=202)
