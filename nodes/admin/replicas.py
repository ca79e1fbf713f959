"""Replicas and their use, installed backends, the upgrade check, mass silence: read-only."""

from django.contrib import admin
from django.http import HttpRequest

from localai_cluster.web.admin import Observed
from nodes.models import (
    BackendOffer,
    BroughtModel,
    FileHash,
    MassSilence,
    NodeBackend,
    NodeModel,
    ReplicaUse,
    UpgradeCheck,
    WebProcess,
)
from nodes.models.replica import NodeModelQuerySet


@admin.register(NodeModel)
class NodeModelAdmin(Observed):
    """Replicas, and the engines of nodes that have left."""

    list_display = (
        *("model_name", "replica_index", "node", "phase", "reason", "deadline", "stop_error"),
        *("in_flight", "backend_type", "last_used"),
    )
    list_filter = ("phase", "reason", "backend_type")
    list_select_related = ("node",)
    search_fields = ("model_name", "node__name")

    def get_queryset(self, request: HttpRequest) -> NodeModelQuerySet:
        """Include the departed rows."""
        return NodeModel.engines.all()


@admin.register(WebProcess)
class WebProcessAdmin(Observed):
    """Running web processes."""

    list_display = ("host", "pid", "version", "started_at", "seen_at")


@admin.register(ReplicaUse)
class ReplicaUseAdmin(Observed):
    """Requests of each web process on each replica."""

    list_display = ("replica", "process", "count")
    list_select_related = ("replica", "process")


@admin.register(NodeBackend)
class NodeBackendAdmin(Observed):
    """What the workers reported last."""

    list_display = ("name", "node", "version", "is_system", "is_meta", "installed_at")
    list_filter = ("is_system", "is_meta")
    list_select_related = ("node",)
    search_fields = ("name", "node__name")


@admin.register(BackendOffer)
class BackendOfferAdmin(Observed):
    """What the galleries offer for installed backends, as of the last upgrade check."""

    list_display = ("name", "version", "uri", "digest", "automatic_to")
    search_fields = ("name",)


@admin.register(UpgradeCheck)
class UpgradeCheckAdmin(Observed):
    """How the upgrade check stands."""

    list_display = ("id", "checked_at", "asked", "answered", "claimed_by", "claimed_until", "revision")


@admin.register(MassSilence)
class MassSilenceAdmin(Observed):
    """That many nodes fell silent at once, while they are kept for that."""

    list_display = ("__str__", "since", "until")


@admin.register(BroughtModel)
class BroughtModelAdmin(Observed):
    """How much of each model's files the nodes have."""

    list_display = ("model_name", "node", "size", "seen_at")
    list_select_related = ("node",)
    search_fields = ("model_name",)


@admin.register(FileHash)
class FileHashAdmin(Observed):
    """What files of the models folder hashed to."""

    list_display = ("path", "sha256", "hashed_at")
    search_fields = ("path", "sha256")
