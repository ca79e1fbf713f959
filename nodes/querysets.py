"""Adjectives of the registry's rows. Each answers with a queryset; none of them writes."""

from datetime import datetime
from typing import TYPE_CHECKING, Self

from django.db.models import Count, Prefetch, Q, QuerySet, Sum
from django.db.models.functions import Coalesce

if TYPE_CHECKING:
    from nodes.models import BackendNode, NodeModel  # noqa: F401 - the names in the bases are strings


class BackendNodeQuerySet(QuerySet["BackendNode"]):
    """Nodes."""

    def silent(self, *, since: datetime) -> Self:
        """R5.4, R5.6, R5.8: approved nodes not yet offline whose last sign of life is older than `since`."""
        return self.filter(approved_at__isnull=False, offline_at__isnull=True).filter(
            Q(last_heartbeat__lt=since) | Q(last_heartbeat__isnull=True)
        )

    def with_counts(self) -> Self:
        """Adds `model_count` and `in_flight_count` over loaded replicas, and the labels.

        Two queries for any number.
        """
        from nodes.models import NodeLabel

        loaded = Q(replicas__state="loaded")
        return self.annotate(
            model_count=Count("replicas", filter=loaded),
            in_flight_count=Coalesce(Sum("replicas__in_flight", filter=loaded), 0),
        ).prefetch_related(Prefetch("label_set", queryset=NodeLabel.objects.order_by("key")))


class NodeModelQuerySet(QuerySet["NodeModel"]):
    """Replicas."""

    def loaded(self) -> Self:
        """Rows that may receive traffic."""
        return self.filter(state="loaded")

    def serving(self) -> Self:
        """R1.61: loaded rows on healthy nodes."""
        return self.loaded().filter(node__status="healthy")

    def of(self, model_name: str) -> Self:
        """Replicas of one model."""
        return self.filter(model_name=model_name)
