"""Commands on a backend for all nodes or for chosen nodes (`contract/http-api.md` §4.2, §4.5).

Each command creates one operation with a target for each node; "all nodes" are the nodes at the time of the
request. The views below `/backends/` are the reference's other URLs for the same commands.
`DeleteAndWaitView` waits for the end of its operation (O38).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from drf_spectacular.utils import OpenApiResponse
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.gallery_index import folded
from localai_cluster.kit import clock, errors
from localai_cluster.kit.quantities import counted
from localai_cluster.web.envelopes import flat_error
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import Flag, NullIsAbsent, Text, validate_body
from localai_cluster.web.shapes import FLAG, TEXT, TEXTS, UUID, Shape, field
from nodes.api import node_backends
from nodes.api.base import BackendRoute
from nodes.api.models import wait_for_end
from nodes.api.waves import WaveOptionsSerializer, add_wave_options, last_replicas_field
from nodes.backends import catalogue, node_commands, wave_requests
from nodes.backends.admission import admit, admit_on_nodes
from nodes.backends.backend_requests import (
    DELETE,
    INSTALL,
    UPGRADE,
    BackendRequest,
    RequestScope,
    chosen_nodes,
    nodes_for_request,
    refuse_by_name,
    select_all_nodes,
)
from nodes.commands.outcomes import CommandFailed
from nodes.gateway import gateway
from operations.api import serializers as shapes
from operations.ledger.admission import Admission
from operations.models import Status

MAX_BACKENDS = 200
"""Maximum number of backends in one request to `/api/backends/changes`."""


describe_command = partial(
    describe,
    answer=shapes.STARTED_SHAPE,
    meaning="The operation is recorded and will be carried out.",
    refused=(400, 404, 409, 413),
)


class UpgradeSerializer(shapes.NodesSerializer):
    """The nodes to upgrade, and the options of waves. Without `waves` all nodes begin at once."""

    waves = WaveOptionsSerializer(required=False)
    last_replicas = last_replicas_field()

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse `last_replicas` without `waves`: only an upgrade in waves needs confirmations."""
        if attrs.get("last_replicas") and attrs.get("waves") is None:
            raise serializers.ValidationError({"last_replicas": ["needs waves"]})
        return attrs


def _force_flag(effect: str) -> Flag:
    return Flag(required=False, help_text=effect)


class InstallEverywhereSerializer(shapes.NodesSerializer):
    """The nodes to install on, and whether installed files are replaced."""

    force = _force_flag("Replace the files where it is installed: its engines stop, and their requests end.")


class ExternalSerializer(node_backends.InstallSerializer, shapes.NodesSerializer):
    """A backend to install from an address, and the nodes."""

    force = _force_flag("Stop engines of this name at once; without it, their requests may end first.")


def _scope_of_request(by: RequestScope, command: BackendRequest, fields: dict[str, Any]) -> RequestScope:
    if not (ids := fields.get("nodes")):
        ready, left_out = select_all_nodes(command)
        return replace(by, nodes=ready, all_nodes=True, left_out=left_out)
    if unknown := sorted(map(str, set(ids) - nodes_for_request(ids).keys())):
        raise errors.NotFound(f"node {unknown[0]} is not registered", field="nodes")
    return replace(by, nodes=chosen_nodes(command, ids, field="nodes"))


def check_command(by: RequestScope, command: BackendRequest, fields: dict[str, Any]) -> RequestScope:
    """Return the command with its nodes and wave options, if it may start.

    Raises an error that names the nodes or models which prevent it.
    """
    origin = _scope_of_request(by, command, fields)
    if origin.all_nodes and command.kind == INSTALL and not command.uri:
        refuse_hardware_build(command)
    origin = add_wave_options(origin, fields)
    if origin.waves is not None:
        wave_requests.refuse_last_replicas(command.backend, origin.nodes, origin.last_replicas)
    return origin


def admit_command(by: RequestScope, command: BackendRequest, fields: dict[str, Any]) -> Admission:
    """Create the operation on the nodes of `fields`, or join the active operation that does the same."""
    return _admit(command, check_command(by, command, fields))


def _admit(command: BackendRequest, origin: RequestScope) -> Admission:
    if origin.all_nodes:
        return admit(command, origin, now=clock.now())
    return admit_on_nodes(command, origin, field="nodes", now=clock.now())


def refuse_hardware_build(command: BackendRequest) -> None:
    """Raise Conflict if the command would install a build for one kind of hardware on all nodes (O11).

    The error names the backend to install instead. An unreadable gallery raises nothing.
    """
    builds = catalogue.reader.read(node_commands.galleries()).builds
    name = folded(command.backend)
    parent = catalogue.parents(builds).get(name)
    meta = any(build.is_meta and folded(build.name) == name for build in builds)
    if parent is not None and not meta:
        raise errors.Conflict(
            f"{command.backend} is a hardware-specific build; choose its nodes, or install {parent} on all",
            field="nodes",
            code="concrete_backend_requires_target",
            meta_alternative=parent,
        )


def _start(
    request: Request, command: BackendRequest, fields: dict[str, Any], *, drains: bool = False
) -> Response:
    by = replace(RequestScope((), shapes.requester_of(request)), drains=drains)
    texts = node_backends.TEXTS_BY_KIND[command.kind]
    return Response(shapes.started_body(admit_command(by, command, fields), texts))


class InstallEverywhereView(BackendRoute):
    """`/api/backends/install/:id`."""

    @describe_command(
        "backends_install", "Install a backend on all nodes, or on some", body=InstallEverywhereSerializer
    )
    def post(self, request: Request, name: str) -> Response:
        """Installs the backend on all nodes that lack it, or on `nodes`.

        With `force` it is also installed again (O10).
        """
        fields = validate_body(InstallEverywhereSerializer, request)
        gallery, force = name.rpartition("@")[0], fields.get("force", False)
        backend = node_backends.backend_name_in(name)
        return _start(request, BackendRequest(INSTALL, backend, gallery=gallery, force=force), fields)


class InstallExternalView(BackendRoute):
    """`/api/backends/install-external`."""

    @describe_command(
        "backends_install_external", "Install a backend from an address", body=ExternalSerializer
    )
    def post(self, request: Request) -> Response:
        """Installs an image, archive or folder under `name` on all nodes, or on `nodes`.

        An installed backend of this name is replaced. Its engines get no new requests, and stop when their
        running requests have ended, at the latest after `CLUSTER_UPGRADE_DRAIN`. With `force` they stop at
        once.
        """
        fields = validate_body(ExternalSerializer, request)
        if not fields.get("uri"):
            raise errors.InvalidInput("uri is required", field="uri")
        command = node_backends.install_request(
            {name: fields.get(name, "") for name in ("uri", "name", "alias")}, force=True
        )
        return _start(request, command, fields, drains=not fields.get("force", False))


class UpgradeEverywhereView(BackendRoute):
    """`/api/backends/upgrade/:name`."""

    @describe_command("backends_upgrade", "Upgrade a backend where it is installed", body=UpgradeSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Stops the backend's engines and installs it again from the galleries on all its nodes (O17).

        With `waves` a canary is upgraded first, then `max_unavailable` nodes at a time. A node gets no new
        requests, and is upgraded when its running requests have ended. After a failed wave nothing more
        starts until you choose. A model's last replica stops only if `last_replicas` names the model;
        otherwise a 409 names it.
        """
        fields = validate_body(UpgradeSerializer, request)
        return _start(request, BackendRequest(UPGRADE, node_backends.backend_name_in(name)), fields)


class DeleteEverywhereView(BackendRoute):
    """`/api/backends/delete/:id`."""

    @describe_command(
        "backends_delete", "Delete a backend where it is installed", body=shapes.NodesSerializer
    )
    def post(self, request: Request, name: str) -> Response:
        """Stops the backend's engines and removes its files, on the nodes that have it (O18, A83)."""
        fields = validate_body(shapes.NodesSerializer, request)
        return _start(request, BackendRequest(DELETE, node_backends.backend_name_in(name)), fields)


NODE_REFUSAL_SHAPE = Shape(
    "BackendNodeRefusal",
    "A node that cannot take the change of a backend.",
    [field("node_id", UUID), field("node_name", TEXT), field("reason", TEXT)],
)
CHANGE_OUTCOME_SHAPE = Shape(
    "BackendChangeOutcome",
    "What became of the change of one backend: its operation, or `error` with the reason. Neither: it was not"
    " started because another backend of the request is refused.",
    [
        field("backend", TEXT),
        field("jobID", UUID, optional=True),
        field("statusUrl", TEXT, optional=True),
        field("message", TEXT, optional=True),
        shapes.DEDUPLICATED,
        field("error", TEXT, optional=True),
        field("field", TEXT, "The field of the request that is wrong.", optional=True),
        field("last_replicas", TEXTS, "Models to confirm in `last_replicas`.", optional=True),
        field(
            "refusals",
            NODE_REFUSAL_SHAPE.many,
            "Nodes that cannot take it: nothing has started.",
            optional=True,
        ),
    ],
)
CHANGE_OUTCOMES_SHAPE = Shape(
    "BackendChangeOutcomes",
    "One for each backend, in the order of the request.",
    [field("results", CHANGE_OUTCOME_SHAPE.many)],
)
_KIND_BY_VERB = {"upgrade": UPGRADE, "reinstall": INSTALL, "delete": DELETE}
"""Kind of operation by the verb of the request."""


class BackendChangeSerializer(node_backends.BackendSerializer, shapes.NodesSerializer):
    """A backend, its nodes, and the models whose last replica an upgrade in waves may stop."""

    last_replicas = last_replicas_field()


class BackendChangesSerializer(NullIsAbsent):
    """One verb for several backends; `waves` is for upgrades only."""

    verb = serializers.ChoiceField(choices=list(_KIND_BY_VERB))
    backends = serializers.ListField(child=BackendChangeSerializer(), min_length=1, max_length=MAX_BACKENDS)
    waves = WaveOptionsSerializer(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse duplicate backends, `waves` for other verbs, and confirmations without `waves`."""
        if attrs.get("waves") is not None and attrs["verb"] != "upgrade":
            raise serializers.ValidationError({"waves": ["only upgrades have waves"]})
        if attrs.get("waves") is None and any(entry.get("last_replicas") for entry in attrs["backends"]):
            raise serializers.ValidationError({"last_replicas": ["needs waves"]})
        if attrs["verb"] == "reinstall" and not all(entry.get("nodes") for entry in attrs["backends"]):
            raise serializers.ValidationError({"nodes": ["are required to install again"]})
        if len({entry["backend"] for entry in attrs["backends"]}) < len(attrs["backends"]):
            raise serializers.ValidationError({"backends": ["names a backend twice"]})
        return attrs


def _refusal_row(command: BackendRequest, error: errors.ClusterError) -> dict[str, Any]:
    details = {name: error.data.get(name, []) for name in ("last_replicas", "refusals")}
    return {"backend": command.backend} | flat_error(error.message, error.field) | details


class ChangesView(BackendRoute):
    """`/api/backends/changes`."""

    @describe_command(
        "backends_change_many",
        "Change several backends",
        answer=CHANGE_OUTCOMES_SHAPE,
        body=BackendChangesSerializer,
    )
    def post(self, request: Request) -> Response:
        """Upgrades, reinstalls or deletes each of `backends`, as one operation for each backend.

        All requests are checked first: if one is refused, no operation starts.
        """
        fields = validate_body(BackendChangesSerializer, request)
        by, kind = RequestScope((), shapes.requester_of(request)), _KIND_BY_VERB[fields["verb"]]
        scopes: list[tuple[BackendRequest, RequestScope]] = []
        checked: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for entry in fields["backends"]:
            command = BackendRequest(kind, entry["backend"], force=kind == INSTALL)
            try:
                scope = check_command(by, command, entry | {"waves": fields.get("waves")})
                refuse_by_name(command, [node.id for node in scope.nodes], field="nodes")
                scopes.append((command, scope))
                checked.append({"backend": command.backend})
            except errors.ClusterError as error:
                checked.append(_refusal_row(command, error))
        if len(scopes) < len(checked):
            return Response(
                CHANGE_OUTCOMES_SHAPE.of(results=[CHANGE_OUTCOME_SHAPE.of(**outcome) for outcome in checked])
            )
        for command, scope in scopes:
            try:
                outcome = {"backend": command.backend} | node_backends.accepted_body(
                    _admit(command, scope), kind
                )
            except errors.ClusterError as error:  # The state has changed since the check.
                outcome = _refusal_row(command, error)
            results.append(CHANGE_OUTCOME_SHAPE.of(**outcome))
        return Response(CHANGE_OUTCOMES_SHAPE.of(results=results))


JOB_SCHEDULED_SHAPE = Shape(
    "Scheduled",
    "An operation was admitted; `status_url` tells how it goes.",
    [
        field("id", UUID),
        field("jobID", UUID, "The same."),
        field("status_url", TEXT, "A whole address."),
        field("message", TEXT),
        shapes.DEDUPLICATED,
    ],
)
BACKEND_REMOVED_SHAPE = Shape(
    "BackendRemoved",
    "Whether the backend is gone; `jobID` is the operation that removes it.",
    [field("success", FLAG), *shapes.JOB_FIELDS],
)


class ApplySerializer(NullIsAbsent):
    """A backend to install on all nodes."""

    id = Text(max_length=255, schema=node_backends.REQUIRED_NAME)
    force = Flag(required=False)

    def validate_id(self, value: str) -> str:
        if not value:
            raise serializers.ValidationError("must not be empty")
        return node_backends.check_backend_name(value) or ""


def _admit_scheduled(request: Request, command: BackendRequest) -> Response:
    admission = admit_command(RequestScope((), shapes.requester_of(request)), command, {})
    job = str(admission.operation.id)
    return Response(
        JOB_SCHEDULED_SHAPE.of(
            id=job,
            jobID=job,
            status_url=request.build_absolute_uri(f"/backends/jobs/{job}"),
            message=node_backends.TEXTS_BY_KIND[command.kind].of(admission),
            deduplicated=not admission.created,
        )
    )


class ApplyView(BackendRoute):
    """`/backends/apply`."""

    @describe_command(
        "backends_apply",
        "Install a backend on all nodes unless it is there",
        answer=JOB_SCHEDULED_SHAPE,
        body=ApplySerializer,
    )
    def post(self, request: Request) -> Response:
        """Installs the backend on all nodes that lack it; with `force` it is installed again on the rest.

        A build for one kind of hardware is a 409 that names the backend to install instead.
        """
        fields = validate_body(ApplySerializer, request)
        gallery, _, name = fields["id"].rpartition("@")
        return _admit_scheduled(
            request, BackendRequest(INSTALL, name, gallery=gallery, force=fields.get("force", False))
        )


class PlainUpgradeView(BackendRoute):
    """`/backends/upgrade/:name`."""

    @describe_command(
        "backends_upgrade_other_name", "Upgrade a backend where it is installed", answer=JOB_SCHEDULED_SHAPE
    )
    def post(self, request: Request, name: str) -> Response:
        """Upgrades the backend on all nodes that have it, at once."""
        return _admit_scheduled(request, BackendRequest(UPGRADE, node_backends.backend_name_in(name)))


class PlainDeleteView(BackendRoute):
    """`/backends/delete/:name`."""

    @describe_command(
        "backends_delete_other_name", "Delete a backend where it is installed", answer=JOB_SCHEDULED_SHAPE
    )
    def post(self, request: Request, name: str) -> Response:
        """Deletes the backend from all nodes that have it."""
        return _admit_scheduled(request, BackendRequest(DELETE, node_backends.backend_name_in(name)))


class DeleteAndWaitView(BackendRoute):
    """`/api/backends/system/delete/:name`."""

    @describe(
        "backends_delete_and_wait",
        "Delete a backend and wait for the end",
        BACKEND_REMOVED_SHAPE,
        meaning="It is done.",
        others={202: OpenApiResponse(BACKEND_REMOVED_SHAPE.ref, "The operation is recorded and goes on.")},
        refused=(400, 409, 502),
    )
    def post(self, request: Request, name: str) -> Response:
        """Deletes the backend from all nodes that have it, and waits.

        502 lists the failed nodes with reasons. It is a success if no node has the backend. After 90 s the
        answer is 202, and the deletion continues.
        """
        command = BackendRequest(DELETE, node_backends.backend_name_in(name))
        operation = wait_for_end(
            admit_command(RequestScope((), shapes.requester_of(request)), command, {}).operation,
            gateway.MAX_WAIT_SECONDS,
        )
        if operation.status in (Status.FAILED, Status.CANCELLED):
            raise CommandFailed(operation.error or operation.message)
        is_completed = operation.status == Status.COMPLETED
        job = str(operation.id)
        body = BACKEND_REMOVED_SHAPE.of(
            success=is_completed,
            message=_deletion_message(command.backend, operation.targets.count())
            if is_completed
            else "the deletion goes on",
            jobID=job,
            statusUrl=f"/api/backends/job/{job}",
        )
        return Response(body, status=200 if is_completed else 202)


def _deletion_message(backend: str, nodes: int) -> str:
    if not nodes:
        return f"backend {backend} is on no node"
    return f"backend {backend} deleted; it was on {counted(nodes, 'node')}"
