"""Unused files of models: their list by location, and their removal."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from asgiref.sync import async_to_sync
from drf_spectacular.utils import OpenApiResponse
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.kit import clock, conf, errors
from localai_cluster.kit.quantities import counted
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import NullIsAbsent, Text, Whole, validate_body
from localai_cluster.web.shapes import TEXT, TIME, Row, Shape, count, field
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.api.base import JOB_ID, MOMENT, job_example, require_node_id
from nodes.api.node_actions import NodeIdField
from nodes.definitions.folder import folder
from nodes.downloads import unused_files
from nodes.downloads.unused_files import Selection, UnusedFile
from nodes.loading.files_in_use import FilesInUse, in_folder_thread, read_files_in_use
from nodes.models import BackendNode
from nodes.replicas import unload_requests
from nodes.replicas.unload_requests import UnloadRequest
from operations.api.serializers import requester_of
from operations.ledger.admission import Admission, Requester

MAX_DAYS, MAX_BYTES_NEEDED = 36_500, 2**60
CONTROL_PLANE = "control plane"
FILE_SHAPE = Shape(
    "UnusedFile",
    "A file of the models folder, or on a node all files of a model, which nothing defines or runs.",
    [
        field("path", TEXT, "Its path in the models folder; on a node the model's name.", example="old.gguf"),
        field("size", count(), "Bytes.", example=4_800_000_000),
        field("modified_at", TIME, "On a node: the time of the last load that sent them.", example=MOMENT),
    ],
)
PLACE_SHAPE = Shape(
    "UnusedFilesPlace",
    "The control plane, or a node.",
    [
        field("node_id", {**UUID_SCHEMA, "nullable": True}, "Null: the control plane.", example=None),
        field("node_name", TEXT, example=CONTROL_PLANE),
        field("total", count(), "Bytes of its unused files.", example=4_800_000_000),
        field("files", FILE_SHAPE.many, "The oldest first."),
        field("problem", TEXT, "Why nothing can be removed here at the moment.", optional=True),
    ],
)
FILES_SHAPE = Shape("UnusedFiles", "Unused files by place.", [field("places", PLACE_SHAPE.many)])
JOB_SHAPE = Shape(
    "FileRemovalJob",
    "An operation that removes files.",
    [field("jobID", UUID_SCHEMA), field("statusUrl", TEXT)],
)
REMOVAL_SHAPE = Shape(
    "FileRemoval",
    "What is being removed, by which operations: one on the control plane, on a node one for each model.",
    [
        field("message", TEXT),
        field("paths", {"type": "array", "items": {"type": "string"}}),
        field("bytes", count()),
        field("jobs", JOB_SHAPE.many),
        field("jobID", UUID_SCHEMA, "The first of them.", optional=True),
        field("statusUrl", TEXT, optional=True),
    ],
)


class UnusedFilesView(APIView):
    """`/api/models/files`."""

    @describe("models_files", "List unused files of models", FILES_SHAPE, tag="nodes")
    def get(self, request: Request) -> Response:
        """Returns the files that no definition or running import names, of control plane and nodes.

        On a node these are only files that loads have sent, because workers list no files. Files on shares
        are never listed. 503 while the models folder does not answer.
        """
        return Response(FILES_SHAPE.of(places=[place.row for place in _read_locations()]))


class RemovalSerializer(NullIsAbsent):
    """The unused files to remove, of one node or, without a node, of the control plane."""

    node_id = NodeIdField(required=False)
    paths = serializers.ListField(
        child=Text(max_length=1024),
        required=False,
        min_length=1,
        max_length=unused_files.MAX_REMOVED,
    )
    older_than_days = Whole(required=False, min_value=0, max_value=MAX_DAYS)
    bytes_needed = Whole(required=False, min_value=1, max_value=MAX_BYTES_NEEDED)


class RemoveFilesView(APIView):
    """`/api/models/files/remove`."""

    @describe(
        "models_files_remove",
        "Remove unused files of models",
        REMOVAL_SHAPE,
        status=202,
        meaning="The removal is recorded and goes on.",
        others={200: OpenApiResponse(REMOVAL_SHAPE.ref, "There is nothing to remove.")},
        refused=(400, 404, 409, 413),
        body=RemovalSerializer,
        sent={"older_than_days": 30},
        shown=job_example("1 file is being removed")
        | {
            "paths": ["old.gguf"],
            "bytes": 4_800_000_000,
            "jobs": [{"jobID": JOB_ID, "statusUrl": f"/api/backends/job/{JOB_ID}"}],
        },
        tag="nodes",
    )
    def post(self, request: Request) -> Response:
        """Removes the named files, files of a minimum age, or the oldest until enough bytes are free.

        A file that a definition names meanwhile stays. 409 while a definition cannot be used, because it may
        name any of the files.
        """
        fields = validate_body(RemovalSerializer, request)
        if not fields.keys() & {"paths", "older_than_days", "bytes_needed"}:
            raise errors.InvalidInput(
                "one of paths, older_than_days and bytes_needed is required", field="paths"
            )
        now, days = clock.now(), fields.get("older_than_days")
        selection = Selection(
            fields.get("paths", ()),
            None if days is None else now - timedelta(days=days),
            fields.get("bytes_needed", 0),
        )
        node_id = require_node_id(str(fields["node_id"])) if "node_id" in fields else None
        place = next(
            (place for place in _read_locations() if place.node_id == node_id), _StorageLocation(node_id)
        )
        if place.problem:
            raise errors.Conflict(place.problem)
        selected = selection.of(place.files)
        admissions = _request_removal(requester_of(request), node_id, selected) if selected else []
        return Response(_removal_body(selected, admissions), status=202 if admissions else 200)


@dataclass(frozen=True)
class _StorageLocation:
    """The unused files of one node or, without a node, of the control plane."""

    node_id: UUID | None
    node_name: str = CONTROL_PLANE
    files: Sequence[UnusedFile] = ()
    problem: str = ""

    @property
    def row(self) -> Row:
        return PLACE_SHAPE.of(
            node_id=str(self.node_id) if self.node_id else None,
            node_name=self.node_name,
            total=sum(file.size for file in self.files),
            files=[FILE_SHAPE.of_object(file) for file in self.files],
            problem=self.problem,
        )


def _read_locations() -> list[_StorageLocation]:
    """Return the unused files of the control plane and of each node. Raise FolderUnresponsive."""
    in_use, files, defined = async_to_sync(_read_files)()
    nodes = unused_files.list_on_nodes(defined)
    return [
        _StorageLocation(None, CONTROL_PLANE, files, in_use.problem),
        *(_StorageLocation(id, name, models, in_use.problem) for (id, name), models in nodes.items()),
    ]


async def _read_files() -> tuple[FilesInUse, list[UnusedFile], set[str]]:
    in_use = await read_files_in_use()
    files = await in_folder_thread(unused_files.list_unused, conf.cluster().models_path, in_use)
    return in_use, files, {entry.name for entry in await folder().all_contents()}


def _request_removal(by: Requester, node_id: UUID | None, files: Sequence[UnusedFile]) -> list[Admission]:
    """Request the removal of these files; return the operations. Raise Conflict."""
    now = clock.now()
    if node_id is None:
        return [unused_files.request_removal(files, by=by, now=now)]
    node = BackendNode.objects.get(pk=node_id)
    reason = "nothing defines the model any more"
    return [
        unload_requests.delete(UnloadRequest(file.path, by, node, reason=reason), now=now) for file in files
    ]


def _removal_body(files: Sequence[UnusedFile], admissions: Sequence[Admission]) -> Row:
    jobs = [
        JOB_SHAPE.of(jobID=str(entry.operation.id), statusUrl=f"/api/backends/job/{entry.operation.id}")
        for entry in admissions
    ]
    amount = counted(len(files), "file is being removed", "files are being removed")
    return REMOVAL_SHAPE.of(
        message=amount if files else "there is no such unused file",
        paths=[file.path for file in files],
        bytes=sum(file.size for file in files),
        jobs=jobs,
        **(jobs[0] if jobs else {"jobID": "", "statusUrl": ""}),
    )
