"""Replicas that are being unloaded: taken out of the picks, and watched until nothing runs on them.

A row in `unloading` gets no requests any more and keeps its place until its engine is gone. Its columns say
how far that is: `cleanup_next_retry_at` is when the engine is stopped at the latest, and later when it is
tried again; `cleanup_attempts` counts the stops that were sent, `cleanup_error` is why the last one failed.

What an operation leaves behind, because it was cancelled or a worker did not confirm, does not stay: a
replica that no stop was sent for serves again (`put_back`), the others are stopped later (`claim`). So are
those that no operation is about, because they go for good from the start (`GOING`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import CharField, Exists, F, IntegerField, OuterRef, Q
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Greatest

from localai_cluster import clock, conf, names
from localai_cluster.messaging.messages import process_key
from nodes.models import ModelSchedulingConfig, NodeModel, ReplicaState
from nodes.models.replica import NodeModelQuerySet
from nodes.replicas import statements
from operations import targets
from operations.changes import events
from operations.ledger.progress import update
from operations.models import ACTIVE, Operation, OperationTarget

UNLOAD, DELETE = "model_unload", "model_delete"
"""The kinds of operations that take replicas out of the picks."""
EVICTED, REPLACED, LOST, STRANGE = "eviction", "replaced", "lost", "another model"
GOING = (EVICTED, REPLACED, LOST, STRANGE)
"""What `loading_by` says of replicas that leave for good, without an operation: to make room for a load,
because one of an edited definition serves or finds no room, because it did not answer a request, because its
engine serves another model or none."""
HELD = (ReplicaState.LOADED, ReplicaState.UNLOADING)
"""The states in which a replica has an engine that can be unloaded."""
_WITHDRAWN = [
    "state", "loading_by", "cleanup_next_retry_at", "cleanup_error", "cleanup_attempts", "updated_at",
]  # fmt: skip
_RUNNING = ("id", "in_flight", "cleanup_next_retry_at")
STUCK_AFTER = 7
"""Stops without a confirmation, two minutes, after which an operator hears of it."""
_LONGEST_ERROR = 240
_LONGEST_PAUSE = 300.0
_CLAIMED_FOR = 60.0
"""Seconds; longer than one stop of one engine takes."""


@dataclass(frozen=True)
class Leaving:
    """A replica that gets no more requests."""

    id: UUID
    node_id: UUID
    model_name: str
    replica_index: int
    address: str
    lost: bool = False
    """It did not answer a request; its engine may live."""

    @property
    def process_key(self) -> str:
        """The engine process on its worker."""
        return process_key(self.model_name, self.replica_index)


def held(model_name: str, *, node_id: UUID | None = None, index: int | None = None) -> NodeModelQuerySet:
    """The replicas that an unload of the model is about: everywhere, of one node, or exactly one."""
    # A failed load leaves a place in `unloading` that never was a replica.
    rows = NodeModel.objects.of(model_name).filter(state__in=HELD).exclude(address="")
    rows = rows if node_id is None else rows.filter(node_id=node_id)
    return rows if index is None else rows.filter(replica_index=index)


def withdraw(
    model_name: str,
    node_ids: Collection[UUID],
    *,
    index: int | None,
    until: datetime,
    owner: str,
    now: datetime,
) -> list[Leaving]:
    """Takes the replicas out of the picks for operation `owner`, and answers them.

    Those that are out already keep an earlier `until`. Needs a transaction. A constant number of statements.
    """
    rows = held(model_name, index=index).filter(node_id__in=node_ids).order_by("id")
    found = list(rows.select_for_update(of=("self",)))
    fresh = [row for row in found if row.state == ReplicaState.LOADED]
    for row in found:
        row.cleanup_next_retry_at = min(row.cleanup_next_retry_at or until, until)
        row.loading_by = owner
    for row in fresh:
        row.state, row.cleanup_next_retry_at = ReplicaState.UNLOADING, until
        row.cleanup_error, row.cleanup_attempts, row.updated_at = "", 0, now
    update(found, _WITHDRAWN)
    events.notify(events.NODES, *sorted({str(row.node_id) for row in fresh}))
    return [_leaving(row) for row in found]


def idle(replica_id: UUID, *, since: datetime) -> NodeModel | None:
    """The replica, locked, if it is loaded and nothing ran on it after `since`. Needs a transaction.

    No request comes and no other one takes it out before that ends.
    """
    rows = NodeModel.objects.loaded().filter(pk=replica_id, in_flight=0).select_for_update(of=("self",))
    row = rows.select_related("node").first()
    return row if row is not None and row.idle_since <= since else None


def locked(replica_id: UUID) -> NodeModel | None:
    """The replica, locked, if it is loaded. Needs a transaction."""
    return NodeModel.objects.loaded().filter(pk=replica_id).select_for_update(of=("self",)).first()


def serves_besides(row: NodeModel) -> bool:
    """Whether requests find another replica of its model."""
    return NodeModel.objects.of(row.model_name).reached().exclude(pk=row.pk).exists()


def enough_besides(row: NodeModel) -> bool:
    """Whether the rule of its model, locked, has enough serving replicas without this locked one.

    An eviction counts under the same lock, so the two never take the last ones together.
    """
    rules = ModelSchedulingConfig.objects.filter(model_name=row.model_name).select_for_update(no_key=True)
    least = rules.values_list("min_replicas", flat=True).first() or 0
    return NodeModel.objects.of(row.model_name).reached().exclude(pk=row.pk).count() >= max(least, 1)


def take_out(row: NodeModel, *, owner: str, now: datetime) -> None:
    """Takes a locked replica on which nothing runs out of the picks, for operation `owner`."""
    row.state, row.cleanup_next_retry_at, row.loading_by = ReplicaState.UNLOADING, now, owner
    row.cleanup_error, row.cleanup_attempts, row.updated_at = "", 0, now
    row.save(update_fields=_WITHDRAWN)
    events.notify(events.NODES, str(row.node_id))


def go(ids: Collection[UUID], *, owner: str, until: datetime, now: datetime) -> None:
    """Takes these locked, loaded replicas out of the picks for good, for one of the reasons in `GOING`.

    Their engines are stopped as soon as no request runs there, at the latest at `until`.
    """
    NodeModel.objects.filter(pk__in=ids).update(
        state=ReplicaState.UNLOADING,
        loading_by=owner,
        cleanup_next_retry_at=until,
        # One that no stop was sent for would be put back.
        cleanup_attempts=1,
        cleanup_error="",
        updated_at=now,
    )
    nodes = NodeModel.objects.filter(pk__in=ids).order_by().values_list("node_id", flat=True)
    events.notify(events.NODES, *sorted(map(str, set(nodes))))


def replace(ids: Collection[UUID], *, now: datetime) -> None:
    """These locked, loaded replicas of a former definition get no more requests; those that run end."""
    until = now + timedelta(seconds=conf.cluster().request_timeout)
    go(ids, owner=REPLACED, until=until, now=now)


async def lose(database: statements.Rows, replica_id: UUID, address: str, *, why: str = LOST) -> bool:
    """A replica that did no work gets no more requests: the row that was picked, not one in its place since.

    For the hot path, which has no ORM; answers whether it was in the picks. The engine of a `LOST` one may
    live and be out of reach: who comes to stop it looks first (`loading/stopping.py`).
    """
    now = clock.now()
    values = {
        "replica": replica_id,
        "address": address,
        "owner": why,
        "until": now + timedelta(seconds=conf.cluster().unload_grace),
        "now": now,
        "channel": events.NODES,
    }
    return bool(await database.rows(statements.LOSE, values))


def found_again(replica: Leaving) -> bool:
    """The engine of a lost replica answers: it serves again, if nobody else has taken it over."""
    rows = NodeModel.objects.filter(pk=replica.id, state="unloading", loading_by=LOST)
    with transaction.atomic():
        back = rows.update(state=ReplicaState.LOADED, loading_by="", cleanup_next_retry_at=None)
        if back:
            events.notify(events.NODES, str(replica.node_id))
    return bool(back)


def stuck() -> list[NodeModel]:
    """Replicas that go for good and whose engines have not been stopped for minutes, with their nodes."""
    rows = NodeModel.objects.filter(
        state="unloading", loading_by__in=GOING, cleanup_attempts__gte=STUCK_AFTER
    ).exclude(cleanup_error="")
    return list(rows.select_related("node").order_by("id"))


def hurry(rows: NodeModelQuerySet, *, until: datetime) -> None:
    """Has those of the replicas that still wait for their requests stopped at `until` already."""
    waiting = rows.filter(state="unloading", cleanup_attempts=0, cleanup_next_retry_at__gt=until)
    waiting.update(cleanup_next_retry_at=until)


def running(ids: Collection[UUID]) -> dict[UUID, tuple[int, datetime]]:
    """Of those replicas that still have a row: the requests that run, and until when they may."""
    rows = NodeModel.objects.filter(pk__in=ids, state="unloading", cleanup_next_retry_at__isnull=False)
    return {id: (requests, until) for id, requests, until in rows.values_list(*_RUNNING)}


def still(replica: Leaving) -> bool:
    """Whether the replica's row waits for its engine to go: nothing else has its place."""
    return NodeModel.objects.filter(pk=replica.id, state="unloading", address=replica.address).exists()


def stop_sent(replica: Leaving) -> bool:
    """Counts a stop that is about to be sent; False when the row is gone."""
    rows = NodeModel.objects.filter(pk=replica.id, state="unloading")
    return bool(rows.update(cleanup_attempts=F("cleanup_attempts") + 1))


def serves(replica: Leaving) -> bool:
    """Whether the replica is in the picks again."""
    return NodeModel.objects.filter(pk=replica.id, state="loaded").exists()


def not_gone(replica: Leaving, error: str, *, now: datetime) -> None:
    """The engine may still run; the row keeps the reason and when a controller tries again."""
    with transaction.atomic():
        row = (
            NodeModel.objects.filter(pk=replica.id, state="unloading").select_for_update(of=("self",)).first()
        )
        if row is None:
            return
        pause = min(2.0 ** min(row.cleanup_attempts, 10), _LONGEST_PAUSE)
        row.cleanup_error = names.plain(error[:_LONGEST_ERROR])
        row.cleanup_next_retry_at = now + timedelta(seconds=pause)
        row.save(update_fields=["cleanup_error", "cleanup_next_retry_at"])
        events.notify(events.NODES, str(row.node_id))


def put_back() -> list[Leaving]:
    """Has the replicas serve again whose operation has ended before a stop was sent; answers them.

    What an upgrade has taken out as well is put back by that (`withdrawn`), and after it by this.
    """
    with transaction.atomic():
        left = _left_behind().exclude(address="")
        rows = left.filter(cleanup_attempts=0, withdrawn_for__isnull=True).order_by("id")
        found = list(rows.select_for_update(of=("self",), skip_locked=True))
        NodeModel.objects.filter(pk__in=[row.pk for row in found]).update(
            state=ReplicaState.LOADED, loading_by="", cleanup_next_retry_at=None
        )
        if found:
            events.notify(events.NODES, *sorted({str(row.node_id) for row in found}))
    return [_leaving(row) for row in found]


def claim(limit: int, *, now: datetime) -> list[Leaving]:
    """Replicas whose stop is due again, for this caller alone, after their operation has ended."""
    quiet = Q(loading_by__in=GOING, cleanup_attempts=1, in_flight=0)
    due = _left_behind().filter(quiet | Q(cleanup_next_retry_at__lte=now), cleanup_attempts__gt=0)
    with transaction.atomic():
        found = list(due.order_by("id").select_for_update(of=("self",), skip_locked=True)[:limit])
        NodeModel.objects.filter(pk__in=[row.pk for row in found]).update(
            # The first claim ends the wait for requests.
            cleanup_attempts=Greatest(F("cleanup_attempts"), 2),
            cleanup_next_retry_at=now + timedelta(seconds=_CLAIMED_FOR),
        )
    return [_leaving(row) for row in found]


def _left_behind() -> NodeModelQuerySet:
    """Rows that no active operation is about, neither the one that took them out last nor an earlier one."""
    active = Operation.objects.active().annotate(text=Cast("id", CharField()))
    unloading = NodeModel.objects.filter(state="unloading").exclude(loading_by="")
    left = unloading.exclude(Exists(active.filter(text=OuterRef("loading_by"))))
    about = OperationTarget.objects.filter(
        operation__status__in=ACTIVE,
        operation__kind__in=(UNLOAD, DELETE),
        operation__element=OuterRef("model_name"),
        node_id=OuterRef("node_id"),
    ).exclude(status__in=targets.ENDED)
    index = Cast(KeyTextTransform("replica_index", "operation__payload"), IntegerField())
    its_own = about.annotate(index=index).filter(Q(index=None) | Q(index=OuterRef("replica_index")))
    return left.exclude(Exists(its_own))


def _leaving(row: NodeModel) -> Leaving:
    lost = row.loading_by == LOST
    return Leaving(row.id, row.node_id, row.model_name, row.replica_index, row.address, lost)
