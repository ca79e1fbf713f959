"""Where a model runs and why, and what its next request would find. Reads rows and the definition only.

The number of queries is the same for any number of nodes, replicas and records.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from asgiref.sync import async_to_sync
from django.db.models import Q

from localai_cluster import conf, errors, names
from localai_cluster.web.shapes import Row
from nodes.definitions.folder import folder
from nodes.loading import needs
from nodes.loading.failures import refusals
from nodes.loading.load import ALL, KIND, key
from nodes.loading.placing import Wanted, asked
from nodes.loading.reason_shapes import EXPLAINED, NEXT, RECORD, REPLICA, decision
from nodes.loading.room import what_makes_room
from nodes.loading.wait import has_other_node_since
from nodes.loading.wish import ANYWHERE, wish_of
from nodes.models import NodeModel, PlacementRecord
from nodes.placement.explain import Ending, Explanation
from nodes.placement.setbacks import from_payload, resting
from nodes.placement.settle import settle
from operations.models import Operation, Status

RECORDS = 20
"""How many of the latest decisions are shown."""


def explained(model_name: str, now: datetime) -> Row:
    """All of it; NotFound for a model that is not defined and left nothing here."""
    if names.unprintable(model_name):
        raise errors.NotFound("there is no such model")
    wanted = wanted_of(model_name)
    replicas = REPLICA.rows(NodeModel.objects.of(model_name).order_by("node__name", "replica_index"))
    records = RECORD.rows(PlacementRecord.objects.filter(model_name=model_name).order_by("-id")[:RECORDS])
    if wanted is None and not replicas and not records:
        raise errors.NotFound("this model is not defined, and no load of it was ever decided")
    return EXPLAINED.of(
        model=model_name,
        defined=wanted is not None,
        replicas=replicas,
        records=records,
        next=_next(model_name, wanted, replicas, now),
    )


@async_to_sync
async def wanted_of(model_name: str) -> Wanted | None:
    """What a replica of the model needs by its definition, and avoids; None if it has none."""
    models = folder()
    definition = await models.find(model_name)
    if definition is None:
        return None
    need = needs.of(definition, await models.sizes.of(definition))
    return Wanted(definition, need, await models.conflicting(definition))


def _next(model_name: str, wanted: Wanted | None, replicas: Sequence[Row], now: datetime) -> Row:
    if wanted is None:
        says = f"model {model_name} is not defined"
        return NEXT.of(action="refuse", says=says, replica_id=None, operation_id=None, placement=None)
    active, failed = _operations(model_name, now)
    load = active if active is not None and active.kind == KIND else None
    told = _placement(wanted, load, now)
    chosen = _picked(model_name)
    found = next((one for one in replicas if one["id"] == chosen), None)
    action, says = _action(found, active, failed, told)
    concerned = {"join": active, "wait": active, "refuse": failed}.get(action)
    return NEXT.of(
        action=action,
        says=says,
        replica_id=found and found["id"],
        operation_id=concerned and str(concerned.id),
        placement=decision(told),
    )


def _action(
    replica: Row | None, active: Operation | None, failed: Operation | None, told: Explanation
) -> tuple[str, str]:
    if replica is not None:
        where = f"replica {replica['replica_index']} on {replica['node']}"
        return "route", f"it is sent to {where}; requests there: {replica['in_flight']}"
    if active is not None and active.kind == KIND:
        return "join", f"it waits for the load under way: {active.message or active.status}"
    if failed is not None:
        return "refuse", f"the last load failed a moment ago: {failed.error}"
    if active is not None:
        return "wait", f"it waits for the end of {active.kind}: {active.message or active.status}"
    if told.outcome == Ending.PLACED and told.node is not None:
        return "load", f"a load begins on {told.node.name}: {told.sentence}"
    return "load", f"a load begins and waits: {told.sentence}"


def _operations(model_name: str, now: datetime) -> tuple[Operation | None, Operation | None]:
    """What a request would join or wait for, and the failure that it would be told (`wait.py`)."""
    since = now - timedelta(seconds=conf.cluster().load_failure_grace)
    active = Q(status__in=(Status.PENDING, Status.PROCESSING, Status.WAITING))
    failed = Q(kind=KIND, status=Status.FAILED, dismissed_at=None, finished_at__gt=since)
    own, all_of_it = key(model_name), key(model_name, ALL)
    rows = list(Operation.objects.filter(active | failed, key__in=(own, all_of_it)))
    goes_on = [one for one in rows if one.status != Status.FAILED]
    goes_on.sort(key=lambda one: one.key != own)
    ended = [one for one in rows if one.status == Status.FAILED and one.key == own]
    ended = [one for one in ended if not has_other_node_since(one)]
    return next(iter(goes_on), None), next(iter(ended), None)


def _picked(model_name: str) -> str | None:
    """The replica that the next pick takes, as `statements.EXCHANGE` orders them (R1.78)."""
    serving = NodeModel.objects.of(model_name).reached().filter(node__node_type="backend")
    best = serving.order_by("in_flight", "last_used", "-node__available_vram", "id")
    found = best.values_list("id", flat=True).first()
    return None if found is None else str(found)


def _placement(wanted: Wanted, load: Operation | None, now: datetime) -> Explanation:
    """What a load would decide now; one under way knows what was asked for and which nodes failed it."""
    wish = wish_of(load) if load is not None else ANYWHERE
    payload = load.payload if load is not None else {}
    setbacks = from_payload(payload)
    refusing = frozenset(one.node_id for one in refusals(payload))
    question, decision = asked(wanted, wish, setbacks, resting(setbacks, now) | refusing, refusing)
    return settle(question, decision, what_makes_room(wanted.definition.name, question, decision))
