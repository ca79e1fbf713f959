"""The replica pass (R4.6 to R4.23): observe, plan (pure, `nodes.scheduling.plan`), apply.

It asks for loads and unloads and waits for none of them. Each request is a transaction of its own, so one
that fails stops no other (R4.5), and the rows of the rules say what came of it.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import assert_never
from uuid import UUID

from django.db import transaction
from django.db.models.functions import Greatest

from localai_cluster import clock, errors
from localai_cluster.locks import Lock, try_lock_across
from localai_cluster.outage import is_outage
from nodes.definitions import folder
from nodes.loading import another
from nodes.loading.load import KIND
from nodes.models import BackendNode, NodeLabel, NodeModel
from nodes.reconcilers import scale_records
from nodes.replicas import leaving
from nodes.scheduling import passes
from nodes.scheduling.picture import (
    Action,
    ClearFlags,
    Demand,
    Failure,
    Fleet,
    Host,
    LoadAnother,
    Placed,
    Retire,
    Ruling,
    Unsatisfiable,
)
from nodes.scheduling.plan import IDLE_FOR, plan
from nodes.unloading import asking
from nodes.unloading.asking import UnloadWish
from operations.models import Operation, Status

log = logging.getLogger(__name__)

ACTOR = "system"
_SHOWN = 200
"""Characters of a load's error that a rule repeats."""


def look(*, tick: bool) -> bool:
    """One pass; False, and nothing done, if another process is at it. `tick`: see `plan`."""
    now = clock.now()
    with try_lock_across(Lock.REPLICAS) as mine:
        if mine and (demands := passes.demands()):
            about, fleet = {demand.model: demand for demand in demands}, observe(demands)
            rulings = plan(fleet, demands, now, tick=tick)
            seen = scale_records.keep(rulings, fleet, about, now, tick=tick)
            done = [apply(ruling, now) for ruling in rulings]
            scale_records.keep_refused(rulings, done, seen, now)
            passes.record(done, about, now)
    return mine


def observe(demands: Sequence[Demand]) -> Fleet:
    """What the rules are about; six queries for any number of rules, nodes and replicas."""
    names = [demand.model for demand in demands]
    # Loads before replicas: one that ends meanwhile counts twice rather than not at all.
    loads, pinned = another.loads_under_way(names), another.nodes_of_loads(names)
    failed = Operation.objects.filter(
        kind=KIND, element__in=names, status=Status.FAILED, dismissed_at=None
    ).order_by("finished_at")
    failures = failed.values_list("element", "finished_at", "error")
    idle_since = Greatest("last_used", "last_released_at")
    rows = NodeModel.objects.filter(model_name__in=names).values_list(
        "id", "node_id", "model_name", "replica_index", "state", "in_flight", idle_since
    )
    return Fleet(
        hosts=_hosts({key for demand in demands for key in demand.selector or ()}),
        replicas=[Placed(*row) for row in rows],
        loads=loads,
        pinned=pinned,
        failures={model: Failure(at, error[:_SHOWN]) for model, at, error in failures if at},
        defined=_defined(),
    )


def _hosts(keys: Iterable[str]) -> list[Host]:
    """The healthy backend nodes, with the labels that selectors name."""
    labels: dict[UUID, dict[str, str]] = defaultdict(dict)
    for node, key, value in NodeLabel.objects.filter(key__in=keys).values_list("node_id", "key", "value"):
        labels[node][key] = value
    healthy = BackendNode.objects.matching({}).values_list("id", "name", "max_replicas_per_model")
    return [Host(id, name, labels.get(id, {}), slots) for id, name, slots in healthy]


def _defined() -> frozenset[str] | None:
    """The models that a definition is there for (R4.21); None while the folder does not answer."""
    try:
        return frozenset(definition.name for definition in asyncio.run(folder.every()))
    except folder.FolderHangs as hangs:
        log.warning("replicas: %s", hangs.message)
        return None


def apply(ruling: Ruling, now: datetime) -> Ruling:
    """Asks for what a rule needs, until something is refused (R4.15); answers what was done of it."""
    done: list[Action] = []
    for action in ruling.actions:
        try:
            _carry_out(action, now)
        except errors.ClusterError as refusal:
            log.info("%s: refused: %s", ruling.model, refusal.message)
            said = f"{ruling.reason}; refused: {refusal.message}"
            return replace(ruling, reason=said, actions=tuple(done))
        except Exception as error:
            # One model never stops the others (R4.5), but without the connection the lock is gone too.
            if is_outage(error):
                raise
            log.exception("%s: its rule was not carried out", ruling.model)
            return replace(ruling, reason=f"{ruling.reason}; it failed: see the log", actions=tuple(done))
        done.append(action)
    return ruling


def _carry_out(action: Action, now: datetime) -> None:
    """Flags are written with the rest of the ruling."""
    match action:
        case LoadAnother(model, only, reason, pinned):
            another.load_another(model, only=only if pinned else None, actor=ACTOR, reason=reason)
            log.info("%s: %s", model, reason)
        case Retire(model, replica_id, reason):
            retire(replica_id, reason, now)
            log.info("%s: %s", model, reason)
        case Unsatisfiable(model, ticks, _, reason):
            log.warning("%s (%d times): %s", model, ticks, reason)
        case ClearFlags(model):
            log.info("%s: its rule can be carried out again", model)
        case _:
            assert_never(action)


def retire(replica_id: UUID, reason: str, now: datetime) -> None:
    """Has the replica unloaded; Conflict if a request has come since. The operation stops its engine.

    It leaves the picks here, under its row's lock: no request that runs there is ended.
    """
    with transaction.atomic():
        row = leaving.idle(replica_id, since=now - IDLE_FOR)
        if row is None:
            raise errors.Conflict("the replica is in use again, or gone")
        if not leaving.enough_besides(row):
            raise errors.Conflict("another replica of the model has gone since")
        wish = UnloadWish(
            row.model_name, ACTOR, node=row.node, index=row.replica_index, grace=0, reason=reason
        )
        operation = asking.unload(wish, now=now).operation
        leaving.take_out(row, owner=str(operation.id), now=now)
