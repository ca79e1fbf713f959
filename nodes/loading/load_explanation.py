"""Read-only answers about placement: why a replica is on its node, which nodes fit, and what-if questions.

`explain_model` reads rows and the definition; `node_fit` returns the reason for each node, by the functions
that placement uses; `plan` is a dry run with hypothetical nodes. The number of queries is the same for any
number of nodes, replicas and records. `replay` repeats a stored decision from rows alone: the record, and the
snapshot that the decision used (I14). If the replayed decision differs from the record, the decision depended
on something that the rows do not have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db.models import Q

from localai_cluster.kit import clock, conf, errors, names
from localai_cluster.web.shapes import Row
from nodes.decisions import decision_log, fleet_cache, scale_records
from nodes.decisions.decision_log import SnapshotRef, State
from nodes.definitions.files import Definition
from nodes.definitions.folder import folder
from nodes.loading import load_attempts, load_info, load_request, load_snapshots
from nodes.loading.load_attempts import refusals
from nodes.loading.load_placement import LoadNeeds, decide, find_eviction, read_needs
from nodes.loading.load_request import ANY_REPLICA_REQUEST, KIND, request_of
from nodes.loading.reason_shapes import (
    EXPLAINED,
    FIT,
    NEXT,
    NODE_FIT,
    PLAN,
    PLANNED,
    RECORD,
    REPLICA,
    decision,
    memory,
)
from nodes.loading.wait import has_other_node_since
from nodes.models import BackendNode, DecisionKind, NodeModel, PlacementRecord
from nodes.models.replica import ALL_REPLICAS_SUFFIX, load_key
from nodes.placement.choose import ANY_NODE, Candidate, Need, Selector, has_memory
from nodes.placement.explain import (
    DecisionOutcome,
    Explanation,
    FleetView,
    explain,
    explain_memory,
    nearest_by_memory,
)
from nodes.placement.load_decision import EvictionCandidates, LoadQuestion, decide_load, simulate_placements
from nodes.placement.load_times import backed_off_nodes, from_payload
from nodes.registry.labels import auto_labels
from nodes.replicas import eviction, fleet_queries, unload_requests
from nodes.scheduling.plan import plan as plan_replicas
from operations.models import UNDISMISSED_FAILURE, Operation, Status

GIB = 2**30


@dataclass(frozen=True)
class NewNodes:
    """A group of equal hypothetical nodes of a plan, healthy and empty; memory in GiB."""

    count: int
    vram_gib: float = 0
    disk_gib: float = 0
    """Disk space in GiB; 0 = not reported."""
    max_replicas_per_model: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRequest:
    """The question of a plan: a model, or only its need; the number of replicas; and nodes to add."""

    need: Need
    model: str = ""
    conflicts: frozenset[str] = frozenset()
    """The models that should not share a node with this model."""
    selector: Mapping[str, str] | None = None
    """Node selector; None = the selector of the model's rule."""
    replicas: int = 1
    nodes: Sequence[NewNodes] = ()
    backend: str = ""
    """Backend of the model; among equal nodes, nodes with the backend installed rank first."""


def need_for(vram: int, disk: int) -> Need:
    """Return a need of these bytes. The settings decide which part is required (R2.32, R2.39)."""
    checks_disk = conf.cluster().disk_headroom_check
    return load_request.under_policy(
        Need(vram, disk=disk, disk_required=checks_disk, files=disk, source="stated")
    )


def plan(question: PlanRequest, now: datetime) -> Row:
    """Return a decision for each replica, which assumes that all earlier replicas were placed."""
    snapshot = read_plan_snapshot(question, now)
    occupants = snapshot.occupants
    explanations = simulate_placements(snapshot.question, [None] * question.replicas, occupants)
    decisions = [decision(explanation) for explanation in explanations]
    return PLAN.of(
        model=question.model or None,
        wanted=question.replicas,
        placed=sum(row["outcome"] == DecisionOutcome.PLACED for row in decisions),
        decisions=[
            PLANNED.of(replica=number, hypothetical=row["node_id"] in snapshot.new, **row)
            for number, row in enumerate(decisions, 1)
        ],
        memory=memory(explain_memory(snapshot.question.view, occupants.residents, occupants.guard)),
    )


def _read_memory(model_name: str, view: FleetView, now: datetime) -> Row:
    """Return the memory of the nodes compared with the need of the model. At most three queries."""
    lacking = [node.id for node, _ in nearest_by_memory(view) if not has_memory(node, view.need)]
    residents = eviction.residents(lacking, now=now)
    return memory(explain_memory(view, residents, eviction.guard(model_name, residents, now=now)))


@dataclass(frozen=True)
class PlanSnapshot:
    """The current fleet together with the nodes that a plan adds."""

    question: LoadQuestion
    occupants: EvictionCandidates
    new: frozenset[str]
    """The ids of the added nodes."""


def read_plan_snapshot(question: PlanRequest, now: datetime, *, evicts: bool = True) -> PlanSnapshot:
    """Read the snapshot that a placement decision uses, in a constant number of queries."""
    model, selector = question.model, _selector(question)
    fleet = fleet_cache.read_fleet(model, selector=selector, conflicts=question.conflicts)
    fleet = fleet_queries.mark_installed(fleet, question.backend)
    added = list(added_nodes(question.nodes))
    residents = eviction.residents([node.id for node in fleet], now=now)
    claimed = load_request.nodes_claimed_before(now, now)
    return PlanSnapshot(
        LoadQuestion(FleetView([*fleet, *added], question.need, selector), evicts=evicts),
        EvictionCandidates(residents, eviction.guard(model, residents, now=now, claimed=claimed)),
        frozenset(str(node.id) for node in added),
    )


def _selector(question: PlanRequest) -> Selector:
    if question.selector is not None:
        return Selector(question.model, frozenset(question.selector.items()))
    return fleet_queries.selectors_of([question.model])[question.model] if question.model else ANY_NODE


def added_nodes(groups: Sequence[NewNodes]) -> Iterator[Candidate]:
    """Yield the hypothetical nodes with unused names and ids, and with the labels that the registry sets.

    A node's memory is that of one GPU.
    """
    kinds = (group for group in groups for _ in range(group.count))
    for number, kind in enumerate(kinds, 1):
        vram, disk = int(kind.vram_gib * GIB), int(kind.disk_gib * GIB)
        gpus = frozenset({(0, vram)} if vram else ())
        node = BackendNode(
            name=f"(new {number})", total_vram=vram, max_replicas_per_model=kind.max_replicas_per_model
        )
        yield Candidate(
            id=UUID(int=number),
            name=node.name,
            node_type="backend",
            status="healthy",
            free_vram=vram,
            loaded=0,
            in_flight=0,
            used_indices=frozenset(),
            slots=kind.max_replicas_per_model,
            labels=frozenset((auto_labels(node) | dict(kind.labels)).items()),
            available_vram=vram,
            most_vram=vram,
            card_vram=vram,
            total_disk=disk,
            available_disk=disk,
            gpus=gpus,
            gpu_totals=gpus,
        )


MAX_RECORDS = 20
"""Maximum number of recent decisions in an explanation."""


def explain_model(model_name: str, now: datetime) -> Row:
    """Return the explanation; raise NotFound for a model without a definition, replicas or records."""
    if names.find_unprintable(model_name):
        raise errors.NotFound("there is no such model")
    wanted = needs_of(model_name)
    replicas = REPLICA.rows(NodeModel.objects.of(model_name).order_by("node__name", "replica_index"))
    records = RECORD.rows(PlacementRecord.objects.filter(model_name=model_name).order_by("-id")[:MAX_RECORDS])
    if wanted is None and not replicas and not records:
        raise errors.NotFound("this model is not defined, and no load of it was ever decided")
    return EXPLAINED.of(
        model=model_name,
        defined=wanted is not None,
        replicas=replicas,
        records=records,
        next=_next_request(model_name, wanted, replicas, now),
    )


@async_to_sync
async def needs_of(model_name: str) -> LoadNeeds | None:
    """Return the needs and conflicts of a replica of the model; None if the model is not defined."""
    definition = await load_info.find_definition(folder(), model_name)
    return None if definition is None else await read_needs(folder(), definition)


@async_to_sync
async def needs_of_definition(definition: Definition) -> LoadNeeds:
    """Return the needs and conflicts of a replica with this definition, which need not be in force."""
    return await read_needs(folder(), definition)


def _next_request(model_name: str, wanted: LoadNeeds | None, replicas: Sequence[Row], now: datetime) -> Row:
    if wanted is None:
        sentence = f"model {model_name} is not defined"
        nothing = dict.fromkeys(("replica_id", "operation_id", "placement", "memory"))
        return NEXT.of(action="refuse", says=sentence, **nothing)
    active, failed = _read_operations(model_name, now)
    load = active if active is not None and active.kind == KIND else None
    explanation, memory_row = _decide_now(wanted, load, now)
    chosen_id = _find_next_pick(model_name)
    chosen = next((replica for replica in replicas if replica["id"] == chosen_id), None)
    action, sentence = _describe_action(chosen, active, failed, explanation)
    operation = {"join": active, "wait": active, "refuse": failed}.get(action)
    return NEXT.of(
        action=action,
        says=sentence,
        replica_id=chosen and chosen["id"],
        operation_id=operation and str(operation.id),
        placement=decision(explanation),
        memory=memory_row,
    )


def _describe_action(
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


def _read_operations(model_name: str, now: datetime) -> tuple[Operation | None, Operation | None]:
    """Return the operation that a new request would join or wait for, and its immediate failure."""
    since = now - timedelta(seconds=conf.cluster().load_failure_grace)
    active = Q(status__in=(Status.PENDING, Status.PROCESSING, Status.WAITING))
    failed = UNDISMISSED_FAILURE & Q(kind=KIND, finished_at__gt=since)
    own_key, model_key = load_key(model_name), load_key(model_name, ALL_REPLICAS_SUFFIX)
    operations = list(Operation.objects.filter(active | failed, key__in=(own_key, model_key)))
    running = [operation for operation in operations if operation.status != Status.FAILED]
    running.sort(key=lambda operation: operation.key != own_key)
    failures = [row for row in operations if row.status == Status.FAILED and row.key == own_key]
    failures = [failure for failure in failures if not has_other_node_since(failure)]
    return next(iter(running), None), next(iter(failures), None)


def _find_next_pick(model_name: str) -> str | None:
    """Return the id of the replica that the next pick would choose, as `statements.EXCHANGE` does (R1.78)."""
    serving = NodeModel.objects.of(model_name).reached().filter(node__node_type="backend")
    ranked = serving.order_by("in_flight", "last_used", "-node__available_vram", "id")
    replica_id = ranked.values_list("id", flat=True).first()
    return None if replica_id is None else str(replica_id)


def _decide_now(wanted: LoadNeeds, load: Operation | None, now: datetime) -> tuple[Explanation, Row]:
    """Return the decision that a load would get now, and the memory of the nodes.

    An active load's request and back-offs are used; without an active load, those of a new inference request.
    """
    name = wanted.definition.name
    request = request_of(load) if load is not None else ANY_REPLICA_REQUEST
    payload = load.payload if load is not None else {}
    backoffs = from_payload(payload)
    refusing_nodes = frozenset(refusal.node_id for refusal in refusals(payload))
    excluded_nodes = backed_off_nodes(backoffs, now) | refusing_nodes
    question, decision = decide(wanted, request, backoffs, excluded_nodes, refusing_nodes)
    created_at = load.created_at if load is not None else None
    explanation = decide_load(question, decision, find_eviction(name, question, decision, created_at))
    return explanation, _read_memory(name, question.view, now)


def node_fit(model_name: str) -> Row:
    """Return which nodes fit one more replica of the model; raise NotFound if it is not defined.

    The number of queries is the same for any number of nodes.
    """
    wanted = None if names.find_unprintable(model_name) else needs_of(model_name)
    if wanted is None:
        raise errors.NotFound("there is no such model")
    return fit_of(wanted)


def fit_of(wanted: LoadNeeds) -> Row:
    """Return which nodes fit one more replica with these needs, and which one would be chosen."""
    model_name = wanted.definition.name
    selector = fleet_queries.selectors_of([model_name])[model_name]
    fleet = fleet_cache.read_fleet(model_name, selector=selector, conflicts=wanted.conflicts)
    fleet = fleet_queries.mark_installed(fleet, wanted.definition.backend)
    view = FleetView(fleet, wanted.need, selector)
    found = view.decide()
    return FIT.of(
        model=model_name,
        nodes=[
            NODE_FIT.of(
                node_id=str(node.id),
                reason=str(found.refused.get(node.id, "")),
                enough_vram=has_memory(node, wanted.need),
            )
            for node in fleet
        ],
        placement=decision(explain(view, found)),
        memory=_read_memory(model_name, view, clock.now()),
    )


@dataclass(frozen=True)
class ReplayedDecision:
    """The part of a decision that a replay compares with the record."""

    outcome: str
    reason: str
    node_id: UUID | None


def recorded_decision(record: PlacementRecord) -> ReplayedDecision:
    """Return the decision in the record."""
    return ReplayedDecision(record.outcome, record.reason, record.node_id)


def replay(record: PlacementRecord) -> ReplayedDecision | None:
    """Repeat the decision of a record from its snapshot; return None if the snapshot has been pruned."""
    if record.kind == DecisionKind.ATTEMPT:
        return ReplayedDecision(load_attempts.replay_outcome(record.facts), record.reason, record.node_id)
    if record.base is None or record.position is None:
        return None
    state = decision_log.read_snapshot(SnapshotRef(record.base, record.position))
    if state is None:
        return None
    if record.kind == DecisionKind.SCALE:
        return _replay_rule(state, record)
    if record.kind == DecisionKind.UNLOAD:
        words = unload_requests.replay_unload(state, record.model_name, record.operation_id)
        return None if words is None else ReplayedDecision(DecisionOutcome.UNLOADING, words, None)
    return _replay_load(state, record)


def _replay_load(state: State, record: PlacementRecord) -> ReplayedDecision | None:
    """Repeat a placement, or the eviction of a replica for a placement."""
    is_eviction = record.kind == DecisionKind.EVICTION
    model = record.facts["for"] if is_eviction else record.model_name
    snapshot = load_snapshots.decode_load(state, str(record.operation_id), model)
    if snapshot is None:
        return None
    question, decision = snapshot.question, snapshot.question.view.decide()
    candidates = snapshot.occupants
    eviction = candidates.choose_eviction(question, decision) if candidates is not None else None
    for victim in eviction.victims if is_eviction and eviction is not None else ():
        if (victim.model_name, victim.replica_index) == (record.model_name, record.replica_index):
            reason = decision_log.describe_eviction(model, victim)
            return ReplayedDecision(DecisionOutcome.EVICTED, reason, victim.node_id)
    explanation = decide_load(question, decision, eviction, is_expired=snapshot.is_expired)
    node_id = explanation.node.id if explanation.node else None
    return ReplayedDecision(explanation.outcome, explanation.sentence, node_id)


def _replay_rule(state: State, record: PlacementRecord) -> ReplayedDecision | None:
    decoded = scale_records.decode_rule(state, record.model_name)
    if decoded is None:
        return None
    fleet, rule, now, tick = decoded
    for action in plan_replicas(fleet, [rule], now, tick=tick):
        sentence = scale_records.sentence(action)
        if record.outcome == DecisionOutcome.REFUSED and record.facts["decided"] == sentence:
            return recorded_decision(record)  # the refusal was not this decision's
        return ReplayedDecision(scale_records.outcome(action) or "", sentence, None)
    return None
