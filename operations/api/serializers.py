"""Bodies of the routes of operations. The shape of an operation is in `changes/feed.py`."""

from dataclasses import dataclass
from typing import Any

from rest_framework import serializers
from rest_framework.request import Request

from localai_cluster.accounts.authentication import client_address, principal
from localai_cluster.kit.logs import request_id
from localai_cluster.web.envelopes import FlatView
from localai_cluster.web.rest import NullIsAbsent, Text
from localai_cluster.web.shapes import FLAG, PERCENT, TEXT, UUID, Shape, field
from operations.changes.feed import INTEGER_SCHEMA, OPERATION_FIELDS, OPERATION_SHAPE, TARGET_SHAPE
from operations.ledger.admission import Admission, Requester

OPERATIONS_SHAPE = Shape("OperationList", "The live list.", [field("operations", OPERATION_SHAPE.many)])
_CURSOR_FIELD = field("nextCursor", TEXT, "Leads to the older ones.", optional=True)
INBOX_SHAPE = Shape(
    "Inbox", "A page of the inbox.", [field("operations", OPERATION_SHAPE.many), _CURSOR_FIELD]
)
HISTORY_ENTRY_SHAPE = Shape(
    "HistoryEntry",
    "An operation that has ended (§3.6).",
    [
        *(entry for entry in OPERATION_FIELDS if entry.name != "taskType"),
        field("outcome", {"type": "string", "enum": ["completed", "failed", "cancelled"]}),
        field("taskType", {"type": "string", "enum": ["installation", "deletion"]}),
    ],
)
HISTORY_SHAPE = Shape(
    "History", "A page of the record.", [field("operations", HISTORY_ENTRY_SHAPE.many), _CURSOR_FIELD]
)


class DoneSerializer(serializers.Serializer[Any]):
    """The result of a command that was carried out (§3.5)."""

    success = serializers.BooleanField()
    message = serializers.CharField()


class SuccessSerializer(serializers.Serializer[Any]):
    """The result of a request that was carried out, without a message."""

    success = serializers.BooleanField()


JOB_STATES = ("queued", "running", "verifying", "waiting_for_nodes", "completed", "failed", "cancelled")
"""States of a job (O62)."""


JOB_SHAPE = Shape(
    "Job",
    "How one operation goes (§3.7).",
    [
        field("progress", PERCENT),
        field("message", TEXT),
        field("galleryElementName", TEXT),
        field("processed", FLAG),
        field("deletion", FLAG),
        field("queued", FLAG),
        field("error", TEXT, optional=True),
        field("completed", FLAG, optional=True),
        field("state", {"type": "string", "enum": list(JOB_STATES)}),
        field("nodes", TARGET_SHAPE.many, optional=True),
    ],
)
JOB_STATUS_SHAPE = Shape(
    "JobStatus",
    "How one operation goes, in the words of the reference's status (§3.9).",
    [
        field("deletion", FLAG),
        field("file_name", TEXT),
        field("processed", FLAG),
        field("message", TEXT),
        field("progress", PERCENT),
        field("file_size", TEXT, "For people, such as `1.2 GiB`."),
        field("downloaded_size", TEXT),
        field("gallery_element_name", TEXT),
        field("cancelled", FLAG),
        field("cancellable", FLAG),
        field("error", TEXT, optional=True),
        field("phase", TEXT, optional=True),
        field("current_bytes", INTEGER_SCHEMA, optional=True),
        field("total_bytes", INTEGER_SCHEMA, optional=True),
        field("nodes", TARGET_SHAPE.many, optional=True),
    ],
)


class OperationRoute(FlatView):
    """Base of routes of operations."""

    tag = "operations"


MAX_NODES = 2000
JOB_FIELDS = [field("jobID", UUID), field("statusUrl", TEXT), field("message", TEXT)]
DEDUPLICATED = field("deduplicated", FLAG, optional=True)
STARTED_SHAPE = Shape(
    "Started",
    "An operation was admitted; `statusUrl` tells how it goes.",
    [*JOB_FIELDS, field("uuid", UUID, "The same."), DEDUPLICATED],
)


@dataclass(frozen=True)
class CommandTexts:
    """Two messages: about a new operation, and about an active operation that the request has joined."""

    started: str
    joined: str

    def of(self, admission: Admission) -> str:
        """Return the message for this admission."""
        return self.started if admission.created else self.joined


class NodesSerializer(NullIsAbsent):
    """The nodes to work on; without the field, all nodes that the command concerns."""

    nodes = serializers.ListField(
        child=serializers.UUIDField(),
        required=False,
        allow_empty=False,
        max_length=MAX_NODES,
    )


class DismissSerializer(NodesSerializer):
    """A comment on the dismissal of a failure; with nodes, only failures on these are dismissed."""

    comment = Text(required=False, max_length=500)


def requester_of(request: Request) -> Requester:
    """Return who sent the request: user, request id and client address."""
    return Requester(principal(request).name, request_id.get(), client_address(request))


def job_fields(admission: Admission, message: str, route: str = "/api/backends/job") -> dict[str, Any]:
    """Return the fields that all responses with an operation share."""
    job = str(admission.operation.id)
    return {
        "jobID": job,
        "statusUrl": f"{route}/{job}",
        "message": message,
        "deduplicated": not admission.created,
    }


def started_body(admission: Admission, texts: CommandTexts) -> dict[str, Any]:
    return STARTED_SHAPE.of(uuid=str(admission.operation.id), **job_fields(admission, texts.of(admission)))
