"""Adjectives of the registry's rows. Each answers with a queryset; none of them writes."""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from django.db.models import Count, Exists, OuterRef, Prefetch, Q, QuerySet, Sum
from django.db.models.functions import Coalesce

from nodes.models import selectors

if TYPE_CHECKING:
    from nodes.models import BackendNode, NodeModel  # noqa: F401 - the names in the bases are strings

COUNTED_IN_FLIGHT = ("loaded", "unloading")
"""R1.107, D4: the states whose requests a node's `in_flight_count` sums."""


class BackendNodeQuerySet(QuerySet["BackendNode"]):
    """Nodes."""

    def silent(self, *, since: datetime) -> Self:
        """R5.4, R5.6, R5.8: approved nodes not yet offline whose last sign of life is older than `since`."""
        return self.filter(approved_at__isnull=False, offline_at__isnull=True).filter(
            Q(last_heartbeat__lt=since) | Q(last_heartbeat__isnull=True)
        )

    def with_labels(self, labels: Mapping[str, str]) -> Self:
        """Nodes with every one of these keys at exactly that value; more labels do no harm."""
        from nodes.models import NodeLabel

        found = self
        for key, value in labels.items():
            found = found.filter(Exists(NodeLabel.objects.filter(node=OuterRef("pk"), key=key, value=value)))
        return found

    def matching(self, selector: Any) -> Self:
        """R1.68: healthy backend nodes that a selector chooses, all of them if it is empty.

        R1.69: a selector that cannot be read chooses none.
        """
        labels = selectors.readable(selector)
        if labels is None:
            return self.none()
        return self.filter(status="healthy", node_type="backend").with_labels(labels)

    def with_counts(self) -> Self:
        """R1.107: by name, with `model_count` over loaded replicas, `in_flight_count`, and the labels.

        Two queries for any number. A model's own order does not hold for a query that groups.
        """
        from nodes.models import NodeLabel

        busy = Q(replicas__state__in=COUNTED_IN_FLIGHT)
        return (
            self.annotate(
                model_count=Count("replicas", filter=Q(replicas__state="loaded")),
                in_flight_count=Coalesce(Sum("replicas__in_flight", filter=busy), 0),
            )
            .prefetch_related(Prefetch("label_set", queryset=NodeLabel.objects.order_by("key")))
            .order_by("name")
        )


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
