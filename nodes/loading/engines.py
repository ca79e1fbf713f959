"""The record of engines that loads have started (`EngineStart`), so that none is left behind.

A load notes the engine before it sends the start, and publishing the replica removes the note. An attempt
that ends without a replica leaves its note, however it ends; a controller then stops the engine
(`stopping.py`) and removes the note once the worker confirms it. Everything names the attempt's mark, so an
attempt whose place was taken over stops nothing.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import CharField, Exists, F, OuterRef, QuerySet, Value
from django.db.models.functions import Cast, Concat

from localai_cluster.commits import committed
from localai_cluster.messaging.messages import process_key
from nodes.models import BackendNode, EngineStart
from nodes.registry import dialling
from nodes.replicas import slots
from nodes.replicas.slots import Slot
from operations.models import Operation, Status

_CLAIMED_FOR = 45.0
"""Seconds; longer than one look at one engine takes."""
_STARTS_WITHIN = timedelta(seconds=60)
"""A start that was never answered may still wait at its worker: until then "no such process" is no proof."""


@dataclass(frozen=True)
class Engine:
    """One noted engine that is to be stopped."""

    id: int
    node_id: UUID
    process_key: str
    mark: str
    address: str
    started_at: datetime
    attempts: int
    answered: bool = False

    def may_still_start(self, now: datetime) -> bool:
        """Whether its start may still be on its way."""
        return not self.answered and now < self.started_at + _STARTS_WITHIN


def note(slot: Slot, model_name: str, *, mark: str, now: datetime) -> bool:
    """The attempt is about to have this engine started; it takes the place over from earlier attempts.

    False when the place is no longer the attempt's: then it must not start an engine.
    """
    with committed("load.note"):
        if not slots.still_reserved(slot, mark=mark):
            return False
        EngineStart.objects.update_or_create(
            node_id=slot.node_id,
            model_name=model_name,
            replica_index=slot.replica_index,
            defaults={
                "mark": mark,
                "address": "",
                "answered": False,
                "started_at": now,
                "stop_due_at": now,
                "stop_attempts": 0,
            },
        )
    return True


def note_answer(mark: str, address: str = "") -> None:
    """The worker has answered the start: no engine comes of it any more but the one at `address`, if any."""
    EngineStart.objects.filter(mark=mark).update(address=address, answered=True)


def noted(mark: str) -> bool:
    """Whether the attempt may have an engine that nothing accounts for."""
    return EngineStart.objects.filter(mark=mark).exists()


def left_at(slot: Slot, model_name: str, *, mark: str) -> bool:
    """Whether an earlier attempt may have an engine at the place that this attempt has taken."""
    there = EngineStart.objects.filter(node_id=slot.node_id, model_name=model_name)
    return there.filter(replica_index=slot.replica_index).exclude(mark=mark).exists()


def running_attempts() -> QuerySet[Any]:
    """The operations that are being carried out, each with the `mark` of its present attempt."""
    mark = Concat(Cast("id", CharField()), Value(":"), Cast("fence", CharField()), output_field=CharField())
    return Operation.objects.filter(status=Status.PROCESSING).annotate(mark=mark)


def claim(limit: int, *, now: datetime) -> list[Engine]:
    """Engines of attempts that are over, due, for this caller alone; the longest waiting first."""
    over = EngineStart.objects.filter(stop_due_at__lte=now).exclude(
        Exists(running_attempts().filter(mark=OuterRef("mark")))
    )
    with transaction.atomic():
        due = over.order_by("stop_due_at").select_for_update(no_key=True, skip_locked=True, of=("self",))
        rows = list(due[:limit])
        EngineStart.objects.filter(pk__in=[row.pk for row in rows]).update(
            stop_due_at=now + timedelta(seconds=_CLAIMED_FOR), stop_attempts=F("stop_attempts") + 1
        )
    return [_engine(row) for row in rows]


def still(engine: Engine) -> bool:
    """Whether no later attempt has taken the place over."""
    return EngineStart.objects.filter(pk=engine.id, mark=engine.mark).exists()


def gone(engine: Engine) -> None:
    """The engine does not run any more."""
    EngineStart.objects.filter(pk=engine.id, mark=engine.mark).delete()


def look_again(engine: Engine, due_at: datetime) -> None:
    """It may still run."""
    EngineStart.objects.filter(pk=engine.id, mark=engine.mark).update(stop_due_at=due_at)


def node_name(node_id: UUID) -> str | None:
    """None when the node was removed."""
    return BackendNode.objects.filter(pk=node_id).values_list("name", flat=True).first()


def bearer_at(node_id: UUID) -> str | None:
    """What a call to an engine of the node carries; None when the node was removed."""
    node = BackendNode.objects.filter(pk=node_id).values_list("engine_token", "weak_identity").first()
    return None if node is None else dialling.bearer(*node)


def _engine(row: EngineStart) -> Engine:
    key = process_key(row.model_name, row.replica_index)
    return Engine(
        row.pk, row.node_id, key, row.mark, row.address, row.started_at, row.stop_attempts, row.answered
    )
