"""The one writer of the columns of an engine's life.

Each change is an event of the table in `states.py`, and its UPDATE names the phases in which the event is
allowed. So a change that comes late, after another one has moved the row on, changes nothing. The statement
that takes a lost replica out of the picks (`statements.LOSE`) follows the same table without the ORM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Case, CharField, Exists, OuterRef, Q, Value, When

from localai_cluster.kit.leases import Attempt
from localai_cluster.messaging.messages import process_key
from nodes.models import LOADING_PHASES, NodeModel, OwnerKind, Phase
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import states
from nodes.replicas.states import ReplicaEvent
from operations.models import Operation, Status

NO_OWNER: Mapping[str, Any] = {"owner_kind": "", "owner_id": None, "owner_fence": None}
CONTROLLERS: Mapping[str, Any] = {**NO_OWNER, "owner_kind": OwnerKind.CONTROLLERS}
_NO_STOP: Mapping[str, Any] = {
    "claimed_until": None,
    "next_stop_at": None,
    "stop_attempts": 0,
    "stop_error": "",
}
SERVES: Mapping[str, Any] = {**NO_OWNER, **_NO_STOP, "reason": "", "deadline": None}


@dataclass(frozen=True)
class Engine:
    """One engine that is to be stopped: a snapshot of its row."""

    id: UUID
    node_id: UUID
    model_name: str
    replica_index: int
    address: str
    """Empty until the worker has answered the start."""
    phase: Phase
    is_lost: bool = False
    """It did not answer a request, and may live."""
    started_at: datetime | None = None
    start_answered: bool = True

    @property
    def process_key(self) -> str:
        """The engine process on its worker."""
        return process_key(self.model_name, self.replica_index)

    def may_still_start(self, now: datetime) -> bool:
        """Return True if its start may still be on its way to the worker."""
        started = self.started_at
        return started is not None and not self.start_answered and now < started + states.STARTS_WITHIN


def engine_of(row: NodeModel) -> Engine:
    """Return the snapshot of a row."""
    return Engine(
        row.id,
        row.node_id,
        row.model_name,
        row.replica_index,
        row.address,
        Phase(row.phase),
        row.reason == "lost",
        row.started_at,
        row.start_answered,
    )


def apply_event(rows: NodeModelQuerySet, event: ReplicaEvent, **columns: Any) -> int:
    """Let `event` happen to those of the rows to which the table allows it; return how many.

    Writes the phase that follows and `columns`. `engine_ends.py` deletes the rows that
    the event ends.
    """
    follows = states.MOVES[event]
    columns["phase"] = Case(
        *(When(phase=source, then=Value(target)) for source, target in follows.items()),
        output_field=CharField(),
    )
    return rows.filter(phase__in=follows).order_by().update(**columns)


def drain_until(deadline: datetime) -> dict[str, Any]:
    """Return the columns of a row that begins to drain or to terminate."""
    return {**_NO_STOP, "deadline": deadline}


def stop_from(now: datetime) -> dict[str, Any]:
    """Return the columns of a row that begins to stop."""
    return {**_NO_STOP, "deadline": now + states.REPORTED_AFTER}


def owned_by(kind: OwnerKind, id: UUID, fence: int | None = None) -> dict[str, Any]:
    """Return the columns of a row that this operation or intent owns; of a load, its attempt `fence`."""
    return {"owner_kind": kind, "owner_id": id, "owner_fence": fence}


def of_attempt(attempt: Attempt) -> Q:
    """The rows of loads that the attempt owns."""
    return Q(**owned_by(OwnerKind.OPERATION, *attempt), phase__in=LOADING_PHASES)


def has_running_attempt() -> Exists:
    """True for rows whose owner is an attempt that is being executed."""
    running = Operation.objects.filter(
        pk=OuterRef("owner_id"), fence=OuterRef("owner_fence"), status=Status.PROCESSING
    )
    return Exists(running)
