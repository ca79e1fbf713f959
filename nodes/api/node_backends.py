"""Backends of a node: list, install, upgrade, delete (`contract/http-api.md` §2.10).

The list comes from rows and states its age; a controller refreshes an old list in the background. Each
command creates an operation and gets a 202. The serializers here check the bodies of such commands for all
routes.
"""

import logging
import re
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from drf_spectacular.types import OpenApiTypes
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, errors, names
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import (
    Described,
    NullIsAbsent,
    Text,
    validate_body,
)
from localai_cluster.web.shapes import BYTES, FLAG, TEXT, Shape, column
from localai_cluster.web.wire import parse_json
from nodes.api.base import NodeView, job_example, require_node, require_ready_node, response_header
from nodes.backends import inventory, node_commands
from nodes.backends.admission import admit
from nodes.backends.backend_requests import DELETE, INSTALL, UPGRADE, BackendRequest, RequestScope
from nodes.backends.installed import is_image
from nodes.models import BackendNode, NodeBackend, NodeType
from operations.api.serializers import DEDUPLICATED, JOB_FIELDS, CommandTexts, job_fields, requester_of
from operations.ledger.admission import Admission

log = logging.getLogger(__name__)

BACKEND_NAME_PATTERN = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*"


_OPTIONAL_NAME = {"pattern": f"^({BACKEND_NAME_PATTERN})?$"}
REQUIRED_NAME = {"pattern": f"^{BACKEND_NAME_PATTERN}$", "minLength": 1}
"""Schema of a field that must have the name of a backend."""


class InstallSerializer(Described, NullIsAbsent):
    """A backend to install on a node (§2.10)."""

    backend = Text(required=False, max_length=255, schema=_OPTIONAL_NAME)
    uri = Text(required=False, max_length=1024)
    name = Text(required=False, max_length=255, schema=_OPTIONAL_NAME)
    alias = Text(required=False, max_length=255, schema=_OPTIONAL_NAME)
    backend_galleries = Text(required=False, max_length=64 * 1024)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        return schema | {"anyOf": [{"required": [name]} for name in ("backend", "name", "uri")]}

    def validate_backend(self, value: str | None) -> str | None:
        return check_backend_name(value)

    validate_name = validate_backend
    validate_alias = validate_backend

    def validate_uri(self, value: str | None) -> str | None:
        """Refuse control characters and passwords, because operations show the address."""
        if value and not value.isprintable():
            raise serializers.ValidationError("must not contain control characters")
        if value and "@" in _url_authority(value):
            raise serializers.ValidationError("must not contain a user or password")
        return value

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Require a name for an image (`contract/worker.md` §18.5)."""
        if is_image(attrs.get("uri") or "") and not (attrs.get("name") or attrs.get("backend")):
            raise serializers.ValidationError({"name": ["must be given with the address of an image"]})
        return attrs

    def validate_backend_galleries(self, value: str | None) -> str:
        """Return the text if it lists galleries; otherwise "": the cluster's galleries apply (O37)."""
        if not value:
            return ""
        try:
            galleries = parse_json(value.encode())
        except errors.InvalidInput:
            galleries = None
        if not isinstance(galleries, list):
            log.warning("backend_galleries is ignored, because it is not a list")  # it may hold passwords
        return value if isinstance(galleries, list) and galleries else ""


def _url_authority(uri: str) -> str:
    """Return the part of an address that names the host and may contain a password."""
    try:
        return urlsplit(uri).netloc
    except ValueError:
        raise serializers.ValidationError("must be an address") from None


def check_backend_name(value: str | None) -> str | None:
    if value and not re.fullmatch(BACKEND_NAME_PATTERN, value, re.ASCII):
        raise serializers.ValidationError(
            "must be letters, digits, dots, dashes and underscores, with an optional gallery@ before it"
        )
    return value


class BackendSerializer(serializers.Serializer[Any]):
    """An installed backend (§2.10)."""

    backend = Text(max_length=255, schema=REQUIRED_NAME)

    def validate_backend(self, value: str) -> str:
        """Return the name that the worker's list has, without the gallery."""
        if not value:
            raise serializers.ValidationError("must not be empty")
        return (check_backend_name(value) or "").rpartition("@")[2]


def install_request(fields: dict[str, Any], *, force: bool = False) -> BackendRequest:
    """Return the request for an installation. Raise InvalidInput if name and address are missing.

    Without a name the address is used as the name (A22).
    """
    gallery_name, name, uri = fields.get("backend", ""), fields.get("name", ""), fields.get("uri", "")
    gallery, _, backend = (gallery_name or name).rpartition("@")
    if not (backend or uri):
        raise errors.InvalidInput("backend name or uri required", field="backend")
    return BackendRequest(
        INSTALL,
        backend or node_commands.subject(uri),
        gallery=gallery,
        uri=uri,
        name=name,
        alias=fields.get("alias", ""),
        galleries=fields.get("backend_galleries", ""),
        force=force,
    )


def backend_name_in(text: str) -> str:
    """Return the backend's name in a path. Raise InvalidInput if it cannot be one."""
    if not re.fullmatch(BACKEND_NAME_PATTERN, text, re.ASCII) or len(text) > 255:
        raise errors.InvalidInput("this is no name of a backend", field="name")
    return text.rpartition("@")[2]


ACCEPTED_SHAPE = Shape(
    "Accepted",
    "An operation was admitted; `statusUrl` tells how it goes.",
    [*JOB_FIELDS, DEDUPLICATED],
)
TEXTS_BY_KIND = {
    INSTALL: CommandTexts("backend installation started", "already being installed"),
    UPGRADE: CommandTexts("backend upgrade started", "already being upgraded"),
    DELETE: CommandTexts("backend deletion started", "already being deleted"),
}
"""Messages about a new and a joined operation, by kind of operation."""


describe_accepted = partial(
    describe,
    answer=ACCEPTED_SHAPE,
    status=202,
    meaning="The operation is recorded and will be carried out.",
)
"""Describes a command that creates an operation."""
_describe_command = partial(
    describe_accepted,
    refused=(400, 404, 409, 413),
    body=BackendSerializer,
    sent={"backend": "minilm"},
    tag="backends",
)


def accepted_body(admission: Admission, kind: str) -> dict[str, Any]:
    return ACCEPTED_SHAPE.of(**job_fields(admission, TEXTS_BY_KIND[kind].of(admission)))


def _admit_on_node(request: Request, node: BackendNode, command: BackendRequest) -> Response:
    admission = admit(command, RequestScope([node], requester_of(request)), now=clock.now())
    return Response(accepted_body(admission, command.kind), status=202)


def _change_installed(request: Request, node_id: str, kind: str) -> Response:
    backend = validate_body(BackendSerializer, request)["backend"]
    return _admit_on_node(request, require_ready_node(node_id), BackendRequest(kind, backend))


class InstallView(NodeView):
    """`/api/nodes/:id/backends/install`."""

    @_describe_command(
        "nodes_backends_install",
        "Install a backend on a node",
        body=InstallSerializer,
        sent={"backend": "local@minilm"},
        shown=job_example("backend installation started"),
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Installs a backend on one node. A repeated request joins the running operation."""
        command = install_request(validate_body(InstallSerializer, request))
        return _admit_on_node(request, require_ready_node(node_id), command)


class UpgradeView(NodeView):
    """`/api/nodes/:id/backends/upgrade`."""

    @_describe_command(
        "nodes_backends_upgrade", "Upgrade a backend on a node", shown=job_example("backend upgrade started")
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Stops the backend's engines on the node and installs it again from the galleries (A39).

        A repeated request joins the running operation.
        """
        return _change_installed(request, node_id, UPGRADE)


class DeleteView(NodeView):
    """`/api/nodes/:id/backends/delete`."""

    @_describe_command(
        "nodes_backends_delete", "Delete a backend from a node", shown=job_example("backend deletion started")
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Stops the backend's engines on the node and removes its files (O38).

        A repeated request joins the running operation.
        """
        return _change_installed(request, node_id, DELETE)


LIST_MAX_AGE = 60.0
"""Age in seconds from which a request for the list refreshes it."""
NODE_BACKEND_SHAPE = Shape(
    "NodeBackend",
    "One backend on a node (§2.10).",
    [
        column("name", TEXT, example="minilm"),
        column("is_system", FLAG, "It came with the machine and is not removed.", example=False),
        column("is_meta", FLAG, "It stands for the build that fits the machine.", example=False),
        column(
            "installed_at",
            TEXT,
            "As the worker wrote it, RFC 3339.",
            example="2026-08-20T09:12:44Z",
            optional=True,
        ),
        column("gallery_url", TEXT, example="file:///srv/gallery/index.yaml", optional=True),
        column("version", TEXT, example="1.0.0", optional=True),
        column("uri", TEXT, example="/srv/gallery/minilm", optional=True),
        column("digest", TEXT, optional=True),
        column("alias", TEXT, "Another name that starts it.", optional=True),
        column("size", BYTES, "Of its files.", optional=True),
    ],
)
_AS_OF_HEADERS = [
    response_header("X-As-Of", OpenApiTypes.DATETIME, "When the worker listed this; absent if it never did."),
    response_header("X-Inventory-Error", OpenApiTypes.STR, "Why there is no newer list."),
]


class NodeBackendsView(NodeView):
    """`/api/nodes/:id/backends`."""

    @describe(
        "nodes_backends",
        "List a node's backends",
        NODE_BACKEND_SHAPE.many,
        refused=(404,),
        parameters=_AS_OF_HEADERS,
        tag="backends",
    )
    def get(self, request: Request, node_id: str) -> Response:
        """Returns the backends in the worker's last list; `X-As-Of` is its time. An old list is refreshed."""
        node = require_node(node_id)
        if node.node_type == NodeType.AGENT:
            return Response([])
        inventory.wake([node.id], older_than=LIST_MAX_AGE, now=clock.now())
        rows = NODE_BACKEND_SHAPE.rows(NodeBackend.objects.filter(node=node).order_by("name"))
        return Response(rows, headers=_as_of_header(node))


def _as_of_header(node: BackendNode) -> dict[str, str]:
    headers = {"X-As-Of": node.inventory_at.isoformat()} if node.inventory_at else {}
    problem = names.to_single_line(node.inventory_error).encode("ascii", "replace").decode()
    return headers | ({"X-Inventory-Error": problem} if problem else {})
