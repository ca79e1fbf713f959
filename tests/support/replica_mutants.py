"""Defects that are planted into the life of replicas, each with a name; histories must find all of them."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import Any
from uuid import UUID

import pytest
from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from nodes.backends import inventory
from nodes.loading import load
from nodes.models import BackendNode, NodeModel, Phase
from nodes.placement.choose import lowest_free_index
from nodes.placement.evict import Resident
from nodes.replicas import (
    drains,
    engines,
    eviction,
    reserved_memory,
    slots,
    statements,
    stops,
    terminations,
)
from nodes.replicas.evidence import Running
from nodes.replicas.states import ReplicaEvent
from nodes.replicas.stops import GONE
from nodes.replicas.stops import stop_exactly as genuine_stop
from operations.models import Operation, Status

Plant = Callable[[pytest.MonkeyPatch], None]


def _drops_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A load publishes its slot even if it does not own the slot."""
    genuine = slots.publish

    def publish(slot: slots.Slot, **named: Any) -> bool:
        rows = NodeModel.engines.filter(pk=slot.id).exclude(phase="serving")
        columns = {**engines.SERVING_COLUMNS, "phase": "serving", "address": named["address"]}
        return genuine(slot, **named) or bool(rows.update(**columns))

    patch.setattr(slots, "publish", publish)


def _releases_twice(patch: pytest.MonkeyPatch) -> None:
    genuine = engines._release
    patch.setattr(engines, "_release", lambda rows: (genuine(rows), genuine(rows)))


def _believes(patch: pytest.MonkeyPatch, words: str) -> None:
    """A stop that failed with this text counts as confirmed."""

    async def stop_exactly(*arguments: Any) -> Any:
        stopped = await genuine_stop(*arguments)
        return GONE if words in stopped.reason else stopped

    patch.setattr(stops, "stop_exactly", stop_exactly)


def _late_note(patch: pytest.MonkeyPatch) -> None:
    """The recovery of an engine overwrites later changes of its row."""

    def restore_lost(engine: NodeModel) -> bool:
        rows = NodeModel.engines.filter(pk=engine.id).exclude(address="")
        return bool(rows.update(**engines.SERVING_COLUMNS, phase=Phase.SERVING))

    patch.setattr(terminations, "restore_lost", restore_lost)


def _reuses_the_index(patch: pytest.MonkeyPatch) -> None:
    """A load uses the index of an engine whose stop was not confirmed."""
    genuine = slots._free_index

    def free_index(node: Any, model_name: str) -> int | None:
        stale = NodeModel.engines.of(model_name).filter(node=node, phase="stopping", stop_attempts__gt=0)
        engines.end_rows(list(stale.select_for_update(of=("self",))))
        return genuine(node, model_name)

    patch.setattr(slots, "_free_index", free_index)


def _forgets_the_deadline(patch: pytest.MonkeyPatch) -> None:
    """Replicas wait for their requests without a limit."""
    genuine = engines.drain_columns

    def drain_columns(deadline: datetime) -> dict[str, Any]:
        return genuine(deadline + timedelta(days=30))

    patch.setattr(engines, "drain_columns", drain_columns)


def _confirms_early(patch: pytest.MonkeyPatch) -> None:
    """An engine counts as not started although its start message may still arrive."""
    patch.setattr(engines, "may_still_start", lambda row, now: False)


def _keeps_abandoned(patch: pytest.MonkeyPatch) -> None:
    """No pass ends the loads whose attempt was killed."""
    patch.setattr(slots, "end_abandoned_loads", lambda model_name=None, *, now: [])


def _gives_up_at_once(patch: pytest.MonkeyPatch) -> None:
    """A failed load frees its slot although its engine may run."""

    def give_up(slot: slots.Slot, *, attempt: Any, now: datetime) -> None:
        with transaction.atomic():
            mine = slots.owned_rows(slot, attempt)
            engines.end_rows(list(mine.select_for_update(of=("self",))))

    patch.setattr(slots, "end_attempt", give_up)


def _leaving_ends(patch: pytest.MonkeyPatch) -> None:
    """The engines of a departing node count as ended."""
    genuine = engines.depart

    @wraps(genuine)
    def depart(*node_ids: Any, now: datetime, keep: Any = (), ended: Any = ()) -> int:
        every = NodeModel.engines.filter(node_id__in=node_ids).values_list("pk", flat=True)
        return genuine(*node_ids, now=now, keep=keep, ended=list(every))

    patch.setattr(engines, "depart", depart)


def _counts_out_twice(patch: pytest.MonkeyPatch) -> None:
    wrong = _changed(statements.EXCHANGE, "+ m.more - m.less", "+ m.more - 2 * m.less")
    patch.setattr(statements, "EXCHANGE", wrong)


def _returns_stopped(patch: pytest.MonkeyPatch) -> None:
    """A replica serves again when its unload ends, although a stop was sent."""
    genuine = drains.return_abandoned

    def return_abandoned() -> list[NodeModel]:
        gone = NodeModel.objects.filter(drains.has_no_operation(), phase="stopping", owner_kind="operation")
        gone.exclude(address="").update(**engines.SERVING_COLUMNS, phase=Phase.SERVING)
        return genuine()

    patch.setattr(drains, "return_abandoned", return_abandoned)


def _sends_unrecorded(patch: pytest.MonkeyPatch) -> None:
    """A stop is sent before it is recorded."""
    genuine = stops.record_failure

    def record_failure(engine: NodeModel, error: str, *, now: datetime) -> None:
        engines.apply_event(NodeModel.engines.filter(pk=engine.id), ReplicaEvent.STOP_SENT)
        genuine(engine, error, now=now)

    patch.setattr(stops, "record_sent", lambda engine, *, now: True)
    patch.setattr(stops, "record_failure", record_failure)


# Planted by somebody who had read `nodes/replicas` and `nodes/loading`, and not the histories.


def _forgets_departed_indices(patch: pytest.MonkeyPatch) -> None:
    """The index of an engine on a departed node counts as free."""

    def free_index(node: BackendNode, model_name: str) -> int | None:
        taken = NodeModel.objects.of(model_name).filter(node=node).values_list("replica_index", flat=True)
        return lowest_free_index(set(taken), node.max_replicas_per_model, set())

    patch.setattr(slots, "_free_index", free_index)


def _any_attempt_runs(patch: pytest.MonkeyPatch) -> None:
    """The row of a lost attempt counts as owned while a later attempt of the operation runs."""
    running = Operation.objects.filter(pk=OuterRef("owner_id"), status=Status.PROCESSING)
    patch.setattr(engines, "has_running_attempt", lambda: Exists(running))


def _evicts_busy(patch: pytest.MonkeyPatch) -> None:
    """A load evicts replicas with running requests."""

    def lock_victims(model_name: str, victims: Sequence[Resident], *, now: datetime) -> bool:
        rows = NodeModel.objects.loaded().filter(pk__in=[victim.id for victim in victims]).order_by("id")
        return len(rows.select_for_update(of=("self",))) == len(victims)

    patch.setattr(eviction, "lock_victims", lock_victims)


def _believes_old_lists(patch: pytest.MonkeyPatch) -> None:
    """A worker's list ends engines that were published after the list was sent."""
    genuine = engines.end_unlisted

    def end_unlisted(node_id: UUID, running: Running, *, before: datetime) -> list[str]:
        return genuine(node_id, running, before=before + timedelta(days=1))

    patch.setattr(inventory, "end_unlisted", end_unlisted)


def _returns_early(patch: pytest.MonkeyPatch) -> None:
    """A controller considers replicas abandoned although their unload continues."""
    patch.setattr(drains, "has_no_operation", lambda: Q(pk__isnull=False))


def _keeps_the_former(patch: pytest.MonkeyPatch) -> None:
    """A replaced replica keeps serving."""
    patch.setattr(slots, "_lock_replaced_replica", lambda slot, replaced: None)


def _releases_for_others(patch: pytest.MonkeyPatch) -> None:
    """A process that was declared dead counts its requests out a second time."""
    least = "LEAST(COALESCE(u.count, 0), COALESCE(g.n, 0)) AS less"
    wrong = _changed(statements.EXCHANGE, least, "COALESCE(g.n, 0) AS less")
    patch.setattr(statements, "EXCHANGE", wrong)


def _loses_requests(patch: pytest.MonkeyPatch) -> None:
    """A lost replica counts no requests any more."""
    wrong = _changed(statements.LOSE, "SET phase = %(phase)s,", "SET phase = %(phase)s, in_flight = 0,")
    patch.setattr(statements, "LOSE", wrong)


def _reserves_by_column(patch: pytest.MonkeyPatch) -> None:
    """The rows of loads reserve no memory: a reading clears their reservations."""
    patch.setattr(reserved_memory, "by_node", lambda rows: {})


def _departed_hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """The engines of a departed node use no memory on it."""
    genuine = reserved_memory.by_node
    patch.setattr(reserved_memory, "by_node", lambda rows: genuine(rows.exclude(phase="departed")))


# Planted into the order of `nodes/loading/load.py`.


def _serves_unloaded(patch: pytest.MonkeyPatch) -> None:
    """A replica is published before its engine has loaded the model."""

    async def load_nothing(*arguments: Any) -> None:
        """Leave the model to the first request."""

    patch.setattr(load.LoadModel, "_load", load_nothing)


def _starts_too_early(patch: pytest.MonkeyPatch) -> None:
    """A load starts its engine while the engines that it evicts still run."""

    async def wait_for_nobody(*arguments: Any) -> None:
        """Assume that the memory will be free soon."""

    patch.setattr(load, "wait_until_evicted", wait_for_nobody)


def _changed(statement: str, old: str, new: str) -> str:
    assert old in statement
    return statement.replace(old, new)


MUTANTS: Mapping[str, Plant] = {
    "publish without the fence": _drops_the_fence,
    "release memory twice": _releases_twice,
    "no stop after a lost reply": lambda patch: _believes(patch, "did not answer"),
    "a silent worker has no engines": lambda patch: _believes(patch, "not responding"),
    "a refusal is a confirmation": lambda patch: _believes(patch, "still running"),
    "a late note overwrites a newer one": _late_note,
    "reuse an index before the end": _reuses_the_index,
    "forget the deadline": _forgets_the_deadline,
    "confirm while a start is on its way": _confirms_early,
    "keep what a killed load has left": _keeps_abandoned,
    "give up without a stop": _gives_up_at_once,
    "engines end with their node": _leaving_ends,
    "count a request out twice": _counts_out_twice,
    "serve again after a stop": _returns_stopped,
    "send a stop before it is written": _sends_unrecorded,
    "use the index of a departed engine": _forgets_departed_indices,
    "any attempt of an operation owns a row": _any_attempt_runs,
    "evict a busy replica": _evicts_busy,
    "an old list ends a new engine": _believes_old_lists,
    "return what an unload has taken": _returns_early,
    "keep the replaced replica": _keeps_the_former,
    "count out for a dead process": _releases_for_others,
    "a lost replica has no requests": _loses_requests,
    "serve before the model is loaded": _serves_unloaded,
    "start before the evicted have gone": _starts_too_early,
    "the rows of loads hold no memory": _reserves_by_column,
    "departed engines hold no memory": _departed_hold_nothing,
}
QUICK = {
    "no stop after a lost reply": 4,
    "forget the deadline": 0,
    "keep the replaced replica": 8,
    "serve before the model is loaded": 0,
}
"""Mutants that few histories find: every run plants them. The given seed, which finds the mutant, is first.
"""
