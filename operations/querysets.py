"""Adjectives of operations."""

from datetime import datetime
from typing import TYPE_CHECKING, Self

from django.db.models import Q, QuerySet

if TYPE_CHECKING:
    from operations.models import Operation  # noqa: F401 - the name in the base class is a string


class OperationQuerySet(QuerySet["Operation"]):
    """Operations."""

    def active(self) -> Self:
        """Not yet ended."""
        return self.filter(status__in=("pending", "processing", "waiting_for_nodes"))

    def due(self, *, at: datetime) -> Self:
        """Unclaimed and to be looked at by `at`."""
        return self.filter(status__in=("pending", "waiting_for_nodes"), next_look_at__lte=at)

    def orphaned(self, *, at: datetime) -> Self:
        """Claimed by somebody whose lease ran out."""
        return self.filter(status="processing", lease_until__lt=at)

    def listed(self) -> Self:
        """What the live list shows: active ones, and failures until dismissed (O32)."""
        return self.filter(
            Q(status__in=("pending", "processing", "waiting_for_nodes"))
            | Q(status="failed", dismissed_at__isnull=True)
        )
