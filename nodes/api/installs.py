"""Backends on a node (`contract/http-api.md` §2.10)."""

import json
import re
from typing import Any
from urllib.parse import urlsplit

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster import clock, errors
from localai_cluster.accounts.authentication import client_address, principal
from localai_cluster.logs import request_id
from localai_cluster.web.fields import Described, NullIsAbsent, Text
from localai_cluster.web.openapi import refusals
from localai_cluster.web.parsers import validated
from localai_cluster.web.shapes import FLAG, TEXT, UUID, Shape, field
from nodes.api.base import NodeView, answered, existing, sent
from nodes.backends import install
from operations.ledger.admission import OperationRequest, admit

_BACKEND_NAME = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*"
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
_ACCEPTED = {
    "jobID": _JOB,
    "statusUrl": f"/api/backends/job/{_JOB}",
    "message": "backend installation started",
}


def _text(length: int) -> Text:
    return Text(required=False, allow_null=True, max_length=length)


class InstallSerializer(Described, NullIsAbsent):
    """What to install on a node (§2.10)."""

    backend = _text(255)
    uri = _text(1024)
    name = _text(255)
    alias = _text(255)
    backend_galleries = _text(64 * 1024)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the form of names, and that one of three must be there."""
        for name in ("backend", "name", "alias"):
            schema["properties"][name]["pattern"] = f"^({_BACKEND_NAME})?$"
        return schema | {"anyOf": [{"required": [name]} for name in ("backend", "name", "uri")]}

    def validate_backend(self, value: str | None) -> str | None:
        """A gallery's name, with an optional `gallery@` before it."""
        return _checked_name(value)

    validate_name = validate_backend
    validate_alias = validate_backend

    def validate_uri(self, value: str | None) -> str | None:
        """An address without control characters, and without a password: operations show it."""
        if value and not value.isprintable():
            raise serializers.ValidationError("must not contain control characters")
        if value and "@" in _authority(value):
            raise serializers.ValidationError("must not contain a user or password")
        return value

    def validate_backend_galleries(self, value: str | None) -> str:
        """O37: anything but a list with galleries in it means the configured ones."""
        try:
            galleries = json.loads(value or "[]")
        except (ValueError, RecursionError):
            return ""
        return value or "" if isinstance(galleries, list) and galleries else ""


def _authority(uri: str) -> str:
    try:
        return urlsplit(uri).netloc
    except ValueError:
        raise serializers.ValidationError("must be an address") from None


def _checked_name(value: str | None) -> str | None:
    if value and not re.fullmatch(_BACKEND_NAME, value, re.ASCII):
        raise serializers.ValidationError(
            "must be letters, digits, dots, dashes and underscores, with an optional gallery@ before it"
        )
    return value


class InstallView(NodeView):
    """`/api/nodes/:id/backends/install`."""

    @extend_schema(
        operation_id="nodes_backends_install",
        summary="Install a backend on a node",
        tags=["backends"],
        request=InstallSerializer,
        responses={
            202: OpenApiResponse(ACCEPTED.ref, "The operation is recorded and will be carried out."),
            **refusals(400, 401, 403, 404, 409, 413),
        },
        examples=[sent({"backend": "local@minilm"}), answered(_ACCEPTED, status="202")],
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Installs a backend on one node. A repeated request joins the running operation."""
        fields = validated(InstallSerializer, request)
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
        body = ACCEPTED.of(
            jobID=job,
            statusUrl=f"/api/backends/job/{job}",
            message="backend installation started" if admission.created else "already being installed",
            deduplicated=not admission.created,
        )
        return Response(body, status=202)
