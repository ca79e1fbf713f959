"""The shapes of operations on the wire, for the API document; `changes/feed.py` makes the values."""

from typing import Any

from rest_framework import serializers

from operations.changes import feed
from operations.models import Status, TargetStatus


class OperationTargetSerializer(serializers.Serializer[Any]):
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


class OperationSerializer(serializers.Serializer[Any]):
    """One operation (`contract/http-api.md` §3.2), with its kind, status, sequence and next look."""

    id = serializers.CharField()
    name = serializers.CharField()
    fullName = serializers.CharField()
    jobID = serializers.UUIDField()
    kind = serializers.CharField()
    status = serializers.ChoiceField(choices=Status.choices)
    progress = serializers.IntegerField(min_value=0, max_value=100)
    taskType = serializers.ChoiceField(choices=feed.TASK_TYPES)
    isDeletion = serializers.BooleanField()
    isBackend = serializers.BooleanField()
    isQueued = serializers.BooleanField()
    cancellable = serializers.BooleanField()
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
    nodes = OperationTargetSerializer(many=True, required=False)


class OperationListSerializer(serializers.Serializer[Any]):
    """The live list."""

    operations = OperationSerializer(many=True)


class DoneSerializer(serializers.Serializer[Any]):
    """It was done (§3.5)."""

    success = serializers.BooleanField()
    message = serializers.CharField()


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
