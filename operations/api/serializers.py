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
from operations.changes.feed import FIELDS, INTEGER, OPERATION, TARGET
from operations.ledger.admission import Admission, Requester

OPERATIONS = Shape("OperationList", "The live list.", [field("operations", OPERATION.many)])
_CURSOR = field("nextCursor", TEXT, "Leads to the older ones.", optional=True)
INBOX = Shape("Inbox", "A page of the inbox.", [field("operations", OPERATION.many), _CURSOR])
HISTORY_ENTRY = Shape(
    "HistoryEntry",
    "An operation that has ended (§3.6).",
    [
        *(entry for entry in FIELDS if entry.name != "taskType"),
        field("outcome", {"type": "string", "enum": ["completed", "failed", "cancelled"]}),
        field("taskType", {"type": "string", "enum": ["installation", "deletion"]}),
    ],
)
HISTORY = Shape("History", "A page of the record.", [field("operations", HISTORY_ENTRY.many), _CURSOR])


class DoneSerializer(serializers.Serializer[Any]):
    """The result of a verb that was carried out (§3.5)."""

    success = serializers.BooleanField()
    message = serializers.CharField()


class SuccessSerializer(serializers.Serializer[Any]):
    """The result of a request that was carried out."""

    success = serializers.BooleanField()


STATES = ("queued", "running", "verifying", "waiting_for_nodes", "completed", "failed", "cancelled")
"""States of a job (O62)."""


JOB = Shape(
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
        field("state", {"type": "string", "enum": list(STATES)}),
        field("nodes", TARGET.many, optional=True),
    ],
)
JOB_STATUS = Shape(
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
        field("current_bytes", INTEGER, optional=True),
        field("total_bytes", INTEGER, optional=True),
        field("nodes", TARGET.many, optional=True),
    ],
)


class OperationRoute(FlatView):
    """Base of routes of operations."""

    tag = "operations"


MAX_NODES = 2000
JOB_FIELDS = [field("jobID", UUID), field("statusUrl", TEXT), field("message", TEXT)]
DEDUPLICATED = field("deduplicated", FLAG, optional=True)
STARTED = Shape(
    "Started",
    "An operation was admitted; `statusUrl` tells how it goes.",
    [*JOB_FIELDS, field("uuid", UUID, "The same."), DEDUPLICATED],
)


@dataclass(frozen=True)
class CommandTexts:
    """Messages for a new operation, and for a joined one that was active already."""

    started: str
    joined: str

    def of(self, admission: Admission) -> str:
        """Return the message for this admission."""
        return self.started if admission.created else self.joined


class NodesSerializer(NullIsAbsent):
    """For which nodes; without the field, for all that it concerns."""

    nodes = serializers.ListField(
        child=serializers.UUIDField(),
        required=False,
        allow_empty=False,
        max_length=MAX_NODES,
    )


class DismissSerializer(NodesSerializer):
    """Why the failure needs no more attention; with nodes, only the failures on these."""

    comment = Text(required=False, max_length=500)


def requester_of(request: Request) -> Requester:
    """Return the requester of the request."""
    return Requester(principal(request).name, request_id.get(), client_address(request))


def job_fields(admission: Admission, message: str, route: str = "/api/backends/job") -> dict[str, Any]:
    """Return the common fields of responses to a request for an operation."""
    job = str(admission.operation.id)
    return {
        "jobID": job,
        "statusUrl": f"{route}/{job}",
        "message": message,
        "deduplicated": not admission.created,
    }


def started_body(admission: Admission, texts: CommandTexts) -> dict[str, Any]:
    return STARTED.of(uuid=str(admission.operation.id), **job_fields(admission, texts.of(admission)))
