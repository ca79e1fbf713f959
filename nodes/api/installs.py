"""Commands on the backends of a node (`contract/http-api.md` §2.10): each is an operation, a 202."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts.authentication import client_address, principal
from localai_cluster.kit import clock
from localai_cluster.kit.logs import request_id
from localai_cluster.web.fields import Described
from localai_cluster.web.openapi import refusals
from localai_cluster.web.parsers import validated
from localai_cluster.web.shapes import FLAG, TEXT, UUID, Shape, field
from nodes.api.backend_bodies import BackendSerializer, InstallSerializer, install_wish
from nodes.api.base import NodeView, answered, existing, sent
from nodes.backends import node_commands
from nodes.backends.admission import admit
from nodes.backends.backend_requests import DELETE, INSTALL, UPGRADE, Asked, Wish
from nodes.models import BackendNode
from operations.ledger.admission import Admission

ACCEPTED = Shape(
    "Accepted",
    "An operation was admitted; `statusUrl` tells how it goes.",
    [
        field("jobID", UUID),
        field("statusUrl", TEXT),
        field("message", TEXT),
        field("deduplicated", FLAG, optional=True),
    ],
)
_JOB = "e63fad81-e53f-4e5f-a2a5-0eb06c5b5af7"


@dataclass(frozen=True)
class Said:
    """What an answer says: of a new operation, and of the one that was under way."""

    started: str
    joined: str


SAID = {
    INSTALL: Said("backend installation started", "already being installed"),
    UPGRADE: Said("backend upgrade started", "already being upgraded"),
    DELETE: Said("backend deletion started", "already being deleted"),
}
"""By kind of operation."""
_Call = TypeVar("_Call", bound=Callable[..., Any])


def _accepted(said: Said) -> dict[str, Any]:
    return {"jobID": _JOB, "statusUrl": f"/api/backends/job/{_JOB}", "message": said.started}


_RESPONSES = {
    202: OpenApiResponse(ACCEPTED.ref, "The operation is recorded and will be carried out."),
    **refusals(400, 401, 403, 404, 409, 413),
}


def _schema(
    name: str, summary: str, body: type[Described], backend: str, said: Said
) -> Callable[[_Call], _Call]:
    """What the API document says of one command."""
    return extend_schema(
        operation_id=f"nodes_backends_{name}",
        summary=summary,
        tags=["backends"],
        request=body,
        responses=_RESPONSES,
        examples=[sent({"backend": backend}), answered(_accepted(said), status="202")],
    )


def asked_by(request: Request, nodes: list[BackendNode], *, all_nodes: bool = False) -> Asked:
    """Who asks, and for which nodes."""
    return Asked(
        nodes,
        actor=principal(request).name,
        all_nodes=all_nodes,
        request_id=request_id.get(),
        client_address=client_address(request),
    )


def accepted(admission: Admission, kind: str) -> dict[str, Any]:
    """What an answer says of the operation that was made, or of the one that is under way."""
    job, said = str(admission.operation.id), SAID[kind]
    return ACCEPTED.of(
        jobID=job,
        statusUrl=f"/api/backends/job/{job}",
        message=said.started if admission.created else said.joined,
        deduplicated=not admission.created,
    )


def _on_one(request: Request, node: BackendNode, wish: Wish) -> Response:
    admission = admit(wish, asked_by(request, [node]), now=clock.now())
    return Response(accepted(admission, wish.kind), status=202)


def _on_installed(request: Request, node_id: str, kind: str) -> Response:
    backend = validated(BackendSerializer, request)["backend"]
    return _on_one(request, node_commands.find_node(existing(node_id)), Wish(kind, backend))


class InstallView(NodeView):
    """`/api/nodes/:id/backends/install`."""

    @_schema("install", "Install a backend on a node", InstallSerializer, "local@minilm", SAID[INSTALL])
    def post(self, request: Request, node_id: str) -> Response:
        """Installs a backend on one node. A repeated request joins the running operation."""
        wish = install_wish(validated(InstallSerializer, request))
        return _on_one(request, node_commands.find_node(existing(node_id)), wish)


class UpgradeView(NodeView):
    """`/api/nodes/:id/backends/upgrade`."""

    @_schema("upgrade", "Upgrade a backend on a node", BackendSerializer, "minilm", SAID[UPGRADE])
    def post(self, request: Request, node_id: str) -> Response:
        """Stops the backend's engines on the node and installs it again from the galleries (A39).

        A repeated request joins the running operation.
        """
        return _on_installed(request, node_id, UPGRADE)


class DeleteView(NodeView):
    """`/api/nodes/:id/backends/delete`."""

    @_schema("delete", "Delete a backend from a node", BackendSerializer, "minilm", SAID[DELETE])
    def post(self, request: Request, node_id: str) -> Response:
        """Stops the backend's engines on the node and removes its files (O38).

        A repeated request joins the running operation.
        """
        return _on_installed(request, node_id, DELETE)
