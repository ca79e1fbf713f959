"""The shapes of operations on the wire, for the API document; `changes/feed.py` makes the values."""

from dataclasses import dataclass
from typing import Any

from rest_framework import serializers

from localai_cluster.web.rest import NullIsAbsent, Text
from localai_cluster.web.shapes import FLAG, TEXT, UUID, Shape, field
from operations.changes import feed
from operations.ledger.admission import Admission
from operations.models import Status, TargetStatus, Waves


class WaitSerializer(serializers.Serializer[Any]):
    """What waiting work waits for, in the lists and in one operation; the live feed does not say it."""

    waitsFor = serializers.CharField(required=False, help_text="What it waits for at this moment.")
    waitsSince = serializers.DateTimeField(required=False, help_text="Since when its node is not healthy.")
    queuePlace = serializers.IntegerField(
        required=False, min_value=1, help_text="Its place in the queue of its node, or of the controllers."
    )


class OperationTargetSerializer(WaitSerializer):
    """One node's part of an operation."""

    node_id = serializers.UUIDField()
    node_name = serializers.CharField()
    status = serializers.ChoiceField(choices=TargetStatus.choices)
    percentage = serializers.FloatField(min_value=0, max_value=100)
    file_name = serializers.CharField(required=False)
    phase = serializers.CharField(required=False)
    error = serializers.CharField(required=False)
    current = serializers.CharField(required=False)
    total = serializers.CharField(required=False)
    current_bytes = serializers.IntegerField(required=False)
    total_bytes = serializers.IntegerField(required=False)
    reason = serializers.CharField(
        required=False, help_text="What it waits for, or what there is to say of its end."
    )
    attempts = serializers.IntegerField(required=False, help_text="Attempts that failed.")
    nextLookAt = serializers.DateTimeField(required=False)
    lastProgressAt = serializers.DateTimeField(
        required=False, help_text="While it runs: when something was last heard of it."
    )
    timeLimitAt = serializers.DateTimeField(
        required=False, help_text="While it runs: when its step is given up as unanswered."
    )
    overdueSince = serializers.DateTimeField(
        required=False, help_text="Since when its time limit is over; the worker may still be busy with it."
    )
    startedAt = serializers.DateTimeField(required=False)
    finishedAt = serializers.DateTimeField(required=False)
    wave = serializers.IntegerField(
        required=False, min_value=0, help_text="When its turn is, in an upgrade in waves; 0 = the canary."
    )


class WavesSerializer(serializers.Serializer[Any]):
    """An upgrade in waves: the plan, how far it is, and what was chosen. Parts say in which wave they are."""

    state = serializers.ChoiceField(
        choices=Waves.choices, help_text="`asks`: a wave failed; continue or stop (`…/waves`)."
    )
    open = serializers.IntegerField(min_value=0, help_text="The wave that is carried out, or ended last.")
    count = serializers.IntegerField(min_value=0, help_text="How many waves there are.")
    maxUnavailable = serializers.IntegerField(min_value=1)
    canary = serializers.BooleanField()
    lastReplicas = serializers.ListField(
        child=serializers.CharField(), help_text="Models whose last replica may stop."
    )


class OperationSerializer(WaitSerializer):
    """One operation (`contract/http-api.md` §3.2), with its kind, status, sequence and next look."""

    id = serializers.CharField()
    name = serializers.CharField()
    fullName = serializers.CharField()
    jobID = serializers.UUIDField()
    kind = serializers.CharField()
    status = serializers.ChoiceField(choices=Status.choices)
    progress = serializers.IntegerField(min_value=0, max_value=100)
    taskType = serializers.ChoiceField(choices=tuple(feed.TaskType))
    isDeletion = serializers.BooleanField()
    isBackend = serializers.BooleanField()
    isQueued = serializers.BooleanField()
    cancellable = serializers.BooleanField()
    lastProgressAt = serializers.DateTimeField(
        required=False, help_text="While it runs: when something was last heard of it."
    )
    timeLimitAt = serializers.DateTimeField(
        required=False, help_text="While it runs: when its step is given up as unanswered."
    )
    message = serializers.CharField(allow_blank=True)
    attempts = serializers.IntegerField()
    nextLookAt = serializers.DateTimeField()
    givesUpAt = serializers.DateTimeField(
        required=False, help_text="Until when it waits at the longest; only while it waits and has a limit."
    )
    requestID = serializers.CharField(allow_blank=True)
    actor = serializers.CharField()
    seq = serializers.IntegerField()
    createdAt = serializers.DateTimeField()
    startedAt = serializers.DateTimeField(required=False)
    finishedAt = serializers.DateTimeField(required=False)
    nodeID = serializers.UUIDField(required=False)
    nodeName = serializers.CharField(required=False)
    phase = serializers.CharField(required=False)
    currentBytes = serializers.IntegerField(required=False)
    totalBytes = serializers.IntegerField(required=False)
    error = serializers.CharField(required=False)
    dismissedAt = serializers.DateTimeField(required=False, help_text="Since when it is off the live list.")
    dismissedBy = serializers.CharField(required=False)
    dismissedComment = serializers.CharField(required=False)
    allNodes = serializers.BooleanField(
        required=False, help_text="It was asked for all nodes that there were for it."
    )
    clientAddress = serializers.CharField(required=False)
    waves = WavesSerializer(required=False)
    nodes = OperationTargetSerializer(many=True, required=False)


class OperationListSerializer(serializers.Serializer[Any]):
    """The live list."""

    operations = OperationSerializer(many=True)


class InboxSerializer(OperationListSerializer):
    """A page of the inbox."""

    nextCursor = serializers.CharField(required=False, help_text="Leads to the older ones.")


class DoneSerializer(serializers.Serializer[Any]):
    """It was done (§3.5)."""

    success = serializers.BooleanField()
    message = serializers.CharField()


class HistoryEntrySerializer(OperationSerializer):
    """An operation that has ended (§3.6)."""

    outcome = serializers.ChoiceField(choices=("completed", "failed", "cancelled"))
    taskType = serializers.ChoiceField(choices=("installation", "deletion"))


class HistorySerializer(serializers.Serializer[Any]):
    """A page of the record."""

    operations = HistoryEntrySerializer(many=True)
    nextCursor = serializers.CharField(required=False, help_text="Leads to the older ones.")


class SuccessSerializer(serializers.Serializer[Any]):
    """It was done."""

    success = serializers.BooleanField()


class DismissSerializer(NullIsAbsent):
    """Why the failure needs no more attention."""

    comment = Text(required=False, allow_null=True, max_length=500)


STATES = ("queued", "running", "verifying", "waiting_for_nodes", "completed", "failed", "cancelled")
"""O62."""


class JobSerializer(serializers.Serializer[Any]):
    """How one operation goes (§3.7)."""

    progress = serializers.FloatField(min_value=0, max_value=100)
    message = serializers.CharField(allow_blank=True)
    galleryElementName = serializers.CharField(allow_blank=True)
    processed = serializers.BooleanField()
    deletion = serializers.BooleanField()
    queued = serializers.BooleanField()
    error = serializers.CharField(required=False)
    completed = serializers.BooleanField(required=False)
    state = serializers.ChoiceField(choices=STATES)
    nodes = OperationTargetSerializer(many=True, required=False)


class JobStatusSerializer(serializers.Serializer[Any]):
    """How one operation goes, in the words of the reference's status (§3.9)."""

    deletion = serializers.BooleanField()
    file_name = serializers.CharField(allow_blank=True)
    processed = serializers.BooleanField()
    message = serializers.CharField(allow_blank=True)
    progress = serializers.FloatField(min_value=0, max_value=100)
    file_size = serializers.CharField(allow_blank=True, help_text="For people, such as `1.2 GiB`.")
    downloaded_size = serializers.CharField(allow_blank=True)
    gallery_element_name = serializers.CharField(allow_blank=True)
    cancelled = serializers.BooleanField()
    cancellable = serializers.BooleanField()
    error = serializers.CharField(required=False)
    phase = serializers.CharField(required=False)
    current_bytes = serializers.IntegerField(required=False)
    total_bytes = serializers.IntegerField(required=False)
    nodes = OperationTargetSerializer(many=True, required=False)


MOST_NODES = 2000
STARTED = Shape(
    "Started",
    "An operation was admitted; `statusUrl` tells how it goes.",
    [
        field("jobID", UUID),
        field("uuid", UUID, "The same."),
        field("statusUrl", TEXT),
        field("message", TEXT),
        field("deduplicated", FLAG, optional=True),
    ],
)


@dataclass(frozen=True)
class CommandTexts:
    """The messages for a new operation, and for one that was active already."""

    started: str
    joined: str


class NodesSerializer(NullIsAbsent):
    """For which nodes; without the field, for all that it concerns."""

    nodes = serializers.ListField(
        child=serializers.UUIDField(),
        required=False,
        allow_null=True,
        allow_empty=False,
        max_length=MOST_NODES,
    )


def started_body(admission: Admission, texts: CommandTexts) -> dict[str, Any]:
    job = str(admission.operation.id)
    return STARTED.of(
        jobID=job,
        uuid=job,
        statusUrl=f"/api/backends/job/{job}",
        message=texts.started if admission.created else texts.joined,
        deduplicated=not admission.created,
    )
