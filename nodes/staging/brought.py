"""How much of a model's files each node has: so much less disk space does a load need there.

A load notes it after its look at the node's files and again when it ends; deleting the model there clears it.
Placement reads it (`snapshot.files_there`). It may be out of date, when somebody clears a worker's disk or a
controller is killed in the middle: then the look of the next load tells. Rows are `BroughtModel`; this is
their only writer.
"""

from contextlib import suppress
from datetime import datetime
from uuid import UUID

from django.db import IntegrityError

from nodes.models import BroughtModel


def remember(node_id: UUID, model_name: str, size: int, *, now: datetime) -> None:
    """The node has so many bytes of the model's files."""
    row = BroughtModel(node_id=node_id, model_name=model_name, size=size, seen_at=now)
    with suppress(IntegrityError):  # the node has been removed
        BroughtModel.objects.bulk_create(
            [row],
            update_conflicts=True,
            unique_fields=["model_name", "node"],
            update_fields=["size", "seen_at"],
        )


def forget(node_id: UUID, model_name: str) -> None:
    """The model's files were deleted there."""
    BroughtModel.objects.filter(node_id=node_id, model_name=model_name).delete()
