"""Staged bytes of each model's files per node: a load needs that much less disk space on the node.

A load stores them after its check of the node's files and again when it ends; deleting the model on the node
deletes the row. Placement reads it (`snapshot.files_there`). It may be out of date when somebody clears a
worker's disk or a controller is killed during a load: then the next load's check corrects it. Rows are
`BroughtModel`; this module is their only writer.
"""

from contextlib import suppress
from datetime import datetime
from uuid import UUID

from django.db import IntegrityError

from nodes.models import BroughtModel


def remember(node_id: UUID, model_name: str, size: int, *, now: datetime) -> None:
    """Store how many bytes of the model's files the node has."""
    row = BroughtModel(node_id=node_id, model_name=model_name, size=size, seen_at=now)
    with suppress(IntegrityError):  # the node has been removed
        BroughtModel.objects.bulk_create(
            [row],
            update_conflicts=True,
            unique_fields=["model_name", "node"],
            update_fields=["size", "seen_at"],
        )


def forget(node_id: UUID, model_name: str) -> None:
    """Forget the model's files, which were deleted on the node."""
    BroughtModel.objects.filter(node_id=node_id, model_name=model_name).delete()
