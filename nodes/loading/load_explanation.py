"""Explanation of a model: its replicas, the reasons for them, and the outcome of its next request.

Reads rows and the definition only.

The number of queries is the same for any number of nodes, replicas and records.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from asgiref.sync import async_to_sync
from django.db.models import Q

from localai_cluster.kit import conf, errors, names
from localai_cluster.web.shapes import Row
from nodes.definitions.folder import folder
from nodes.loading import needs
from nodes.loading.failures import refusals
from nodes.loading.load_placement import LoadNeeds, decide, find_eviction
from nodes.loading.load_request import ANYWHERE, KIND, request_of
from nodes.loading.reason_shapes import EXPLAINED, NEXT, RECORD, REPLICA, decision
from nodes.loading.wait import has_other_node_since
from nodes.models import NodeModel, PlacementRecord
from nodes.models.replica import ALL_SUFFIX, load_key
from nodes.placement.explain import DecisionOutcome, Explanation
from nodes.placement.load_decision import decide_load
from nodes.placement.node_backoff import backed_off_nodes, from_payload
from operations.models import Operation, Status

RECORDS = 20
"""Number of the latest decisions that are shown."""


def explain_model(model_name: str, now: datetime) -> Row:
    """Return the explanation; raise NotFound for a model without a definition, replicas or records."""
    if names.unprintable(model_name):
        raise errors.NotFound("there is no such model")
    wanted = needs_of(model_name)
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
async def needs_of(model_name: str) -> LoadNeeds | None:
    """Return the needs and conflicts of a replica by the model's definition; None if it is not defined."""
    models = folder()
    definition = await models.find(model_name)
    if definition is None:
        return None
    need = needs.estimate_need(definition, await models.sizes.of(definition))
    return LoadNeeds(definition, need, await models.conflicting(definition))


def _next(model_name: str, wanted: LoadNeeds | None, replicas: Sequence[Row], now: datetime) -> Row:
    if wanted is None:
        sentence = f"model {model_name} is not defined"
        return NEXT.of(action="refuse", says=sentence, replica_id=None, operation_id=None, placement=None)
    active, failed = _operations(model_name, now)
    load = active if active is not None and active.kind == KIND else None
    explanation = _placement(wanted, load, now)
    chosen_id = _picked(model_name)
    chosen = next((replica for replica in replicas if replica["id"] == chosen_id), None)
    action, sentence = _action(chosen, active, failed, explanation)
    operation = {"join": active, "wait": active, "refuse": failed}.get(action)
    return NEXT.of(
        action=action,
        says=sentence,
        replica_id=chosen and chosen["id"],
        operation_id=operation and str(operation.id),
        placement=decision(explanation),
    )


def _action(
    replica: Row | None, active: Operation | None, failed: Operation | None, explanation: Explanation
) -> tuple[str, str]:
    if replica is not None:
        target = f"replica {replica['replica_index']} on {replica['node']}"
        return "route", f"it is sent to {target}; requests there: {replica['in_flight']}"
    if active is not None and active.kind == KIND:
        return "join", f"it waits for the load under way: {active.message or active.status}"
    if failed is not None:
        return "refuse", f"the last load failed a moment ago: {failed.error}"
    if active is not None:
        return "wait", f"it waits for the end of {active.kind}: {active.message or active.status}"
    if explanation.outcome == DecisionOutcome.PLACED and explanation.node is not None:
        return "load", f"a load begins on {explanation.node.name}: {explanation.sentence}"
    return "load", f"a load begins and waits: {explanation.sentence}"


def _operations(model_name: str, now: datetime) -> tuple[Operation | None, Operation | None]:
    """Return the operation that a request would join or await, and the failure it would get (`wait.py`)."""
    since = now - timedelta(seconds=conf.cluster().load_failure_grace)
    active = Q(status__in=(Status.PENDING, Status.PROCESSING, Status.WAITING))
    failed = Q(kind=KIND, status=Status.FAILED, dismissed_at=None, finished_at__gt=since)
    own_key, model_key = load_key(model_name), load_key(model_name, ALL_SUFFIX)
    operations = list(Operation.objects.filter(active | failed, key__in=(own_key, model_key)))
    running = [operation for operation in operations if operation.status != Status.FAILED]
    running.sort(key=lambda operation: operation.key != own_key)
    failures = [row for row in operations if row.status == Status.FAILED and row.key == own_key]
    failures = [failure for failure in failures if not has_other_node_since(failure)]
    return next(iter(running), None), next(iter(failures), None)


def _picked(model_name: str) -> str | None:
    """Return the id of the next pick's replica, by the order in `statements.EXCHANGE` (R1.78)."""
    serving = NodeModel.objects.of(model_name).reached().filter(node__node_type="backend")
    ranked = serving.order_by("in_flight", "last_used", "-node__available_vram", "id")
    replica_id = ranked.values_list("id", flat=True).first()
    return None if replica_id is None else str(replica_id)


def _placement(wanted: LoadNeeds, load: Operation | None, now: datetime) -> Explanation:
    """Return the decision of a load now, with the request and the back-offs of the active load if any."""
    request = request_of(load) if load is not None else ANYWHERE
    payload = load.payload if load is not None else {}
    backoffs = from_payload(payload)
    refusing_nodes = frozenset(refusal.node_id for refusal in refusals(payload))
    excluded_nodes = backed_off_nodes(backoffs, now) | refusing_nodes
    question, decision = decide(wanted, request, backoffs, excluded_nodes, refusing_nodes)
    return decide_load(question, decision, find_eviction(wanted.definition.name, question, decision))
