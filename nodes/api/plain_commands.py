"""Commands on backends for clients that are no pages: `/backends/…`, and the deletion that waits.

The reference's other names for what `cluster_backends.py` does (`contract/http-api.md` §4.2, §4.5). Each is
an operation like any other (O38).
"""

from typing import Any

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.web.openapi import flat_refusals
from localai_cluster.web.rest import Described, Flag, NullIsAbsent, Text, validate_body
from localai_cluster.web.shapes import FLAG, TEXT, UUID, Shape, field
from nodes.api.backend_bodies import BACKEND_NAME, bare_name, checked_name
from nodes.api.cluster_backends import command, started
from nodes.api.installs import SAID, asked_by
from nodes.api.models import HOLD, ended
from nodes.backends.backend_requests import DELETE, INSTALL, UPGRADE, Wish
from nodes.commands.outcomes import CommandFailed
from operations.models import Status

SCHEDULED = Shape(
    "Scheduled",
    "An operation was admitted; `status_url` tells how it goes.",
    [
        field("id", UUID),
        field("jobID", UUID, "The same."),
        field("status_url", TEXT, "A whole address."),
        field("message", TEXT),
        field("deduplicated", FLAG, optional=True),
    ],
)
REMOVED = Shape(
    "BackendRemoved",
    "Whether the backend is gone; `jobID` is the operation that removes it.",
    [
        field("success", FLAG),
        field("message", TEXT),
        field("jobID", UUID),
        field("statusUrl", TEXT),
    ],
)
COMPONENTS = (SCHEDULED, REMOVED)


class ApplySerializer(Described, NullIsAbsent):
    """What to install on all nodes."""

    id = Text(max_length=255)
    force = Flag(required=False, allow_null=True)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the form of names."""
        schema["properties"]["id"] |= {"pattern": f"^{BACKEND_NAME}$", "minLength": 1}
        return schema

    def validate_id(self, value: str) -> str:
        """A gallery's name, with an optional `gallery@` before it."""
        if not value:
            raise serializers.ValidationError("must not be empty")
        return checked_name(value) or ""


def _scheduled(request: Request, wish: Wish) -> Response:
    admission = started(asked_by(request, []), wish, {})
    job, said = str(admission.operation.id), SAID[wish.kind]
    return Response(
        SCHEDULED.of(
            id=job,
            jobID=job,
            status_url=request.build_absolute_uri(f"/backends/jobs/{job}"),
            message=said.started if admission.created else said.joined,
            deduplicated=not admission.created,
        )
    )


class _Plain(APIView):
    envelope = "flat"


class ApplyView(_Plain):
    """`/backends/apply`."""

    @command("apply", "Install a backend on all nodes unless it is there", ApplySerializer, SCHEDULED)
    def post(self, request: Request) -> Response:
        """Leaves nodes that have it as they are; with `force` they install it again.

        A build for one kind of hardware is a 409 that names what to install instead.
        """
        fields = validate_body(ApplySerializer, request)
        gallery, _, name = fields["id"].rpartition("@")
        return _scheduled(request, Wish(INSTALL, name, gallery=gallery, force=fields.get("force", False)))


class PlainUpgradeView(_Plain):
    """`/backends/upgrade/:name`."""

    @command("upgrade_other_name", "Upgrade a backend where it is installed", None, SCHEDULED)
    def post(self, request: Request, name: str) -> Response:
        """On all nodes that have it, at once."""
        return _scheduled(request, Wish(UPGRADE, bare_name(name)))


class PlainDeleteView(_Plain):
    """`/backends/delete/:name`."""

    @command("delete_other_name", "Delete a backend where it is installed", None, SCHEDULED)
    def post(self, request: Request, name: str) -> Response:
        """On all nodes that have it."""
        return _scheduled(request, Wish(DELETE, bare_name(name)))


class DeleteAndWaitView(_Plain):
    """`/api/backends/system/delete/:name`."""

    @extend_schema(
        operation_id="backends_delete_and_wait",
        summary="Delete a backend and wait for the end",
        tags=["backends"],
        request=None,
        responses={
            200: OpenApiResponse(REMOVED.ref, "It is done."),
            202: OpenApiResponse(REMOVED.ref, "The operation is recorded and goes on."),
            **flat_refusals(400, 409, 502),
        },
    )
    def post(self, request: Request, name: str) -> Response:
        """Removes it from all nodes that have it; 502 names the nodes that did not, and their reasons.

        It is a success where no node has it. After 90 s the answer is 202, and the deletion goes on.
        """
        wish = Wish(DELETE, bare_name(name))
        operation = ended(started(asked_by(request, []), wish, {}).operation, HOLD)
        if operation.status in (Status.FAILED, Status.CANCELLED):
            raise CommandFailed(operation.error or operation.message)
        gone = operation.status == Status.COMPLETED
        job = str(operation.id)
        body = REMOVED.of(
            success=gone,
            message=_outcome(wish.backend, operation.targets.count()) if gone else "the deletion goes on",
            jobID=job,
            statusUrl=f"/api/backends/job/{job}",
        )
        return Response(body, status=200 if gone else 202)


def _outcome(backend: str, nodes: int) -> str:
    if not nodes:
        return f"backend {backend} is on no node"
    return f"backend {backend} deleted; it was on {'1 node' if nodes == 1 else f'{nodes} nodes'}"
