"""The replica pass (R4.6 to R4.23): observe, plan (pure, `nodes.scheduling.plan`), apply.

It requests loads and unloads, and waits for none of them. Each request is a transaction of its own, so a
failed request does not stop the others (R4.5). The rows of the rules store the results. The pass includes
models without a rule that have a replica of a former definition.

`preview` plans a rule that is not saved, as at a tick of the schedule. Saving the rule does not end the
cooldown of the stored rule: the preview shows the end of the cooldown, and then the actions after it.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, assert_never
from uuid import UUID

from django.db import Error as DatabaseError
from django.db import transaction
from django.db.models import Case, Exists, F, OuterRef, Q, Value, When
from django.db.models.functions import Greatest

from localai_cluster.kit import clock, conf, errors
from localai_cluster.kit.outage import is_outage
from localai_cluster.kit.periodic_task import PeriodicTask
from localai_cluster.kit.transactions import Lock, try_lock_across
from localai_cluster.web.shapes import Row
from nodes.decisions import scale_records
from nodes.definitions import folder
from nodes.loading import load_explanation, load_info, load_request
from nodes.loading.load_explanation import NewNodes, PlanRequest, PlanSnapshot, needs_of
from nodes.loading.load_request import KIND
from nodes.loading.reason_shapes import GIVEN_RULE, PLACE_WHY, RULE_PLAN, UNSATISFIED
from nodes.models import (
    BackendNode,
    MassSilence,
    ModelDefinition,
    ModelSchedulingConfig,
    NodeLabel,
    NodeModel,
    PhaseReason,
    scheduling,
)
from nodes.placement.choose import NO_NEED
from nodes.placement.explain import MAX_SHOWN_NODES, Explanation
from nodes.placement.load_decision import simulate_placements
from nodes.replicas import drains, terminations, unload_requests
from nodes.replicas.unload_requests import UnloadRequest
from nodes.scheduling import passes, pressure
from nodes.scheduling.plan import RETIRE_IDLE_AFTER, plan
from nodes.scheduling.rules import Rule, check_rule
from nodes.scheduling.snapshot import (
    Action,
    ClearUnsatisfiable,
    DesiredState,
    EndPressure,
    EvictReplica,
    Failure,
    Fleet,
    FleetNode,
    FleetReplica,
    LoadReplica,
    RetireReplica,
    RuleDecision,
    Unsatisfiable,
)
from operations.executor.work import in_thread
from operations.ledger.admission import Requester
from operations.models import UNDISMISSED_FAILURE, Operation

log = logging.getLogger(__name__)

ACTOR = "system"
_MAX_ERROR_CHARACTERS = 200
"""Maximum characters of a load's error that the reason of a rule quotes."""


def run_pass(*, tick: bool) -> bool:
    """Run one pass; return False at once if another process is running one. `tick`: see `plan`."""
    now = clock.now()
    with try_lock_across(Lock.REPLICAS) as mine:
        if mine:
            rules, revisions = passes.read_desired_states(), definition_revisions(withdraws=True)
            unload_withdrawn(revisions, now)
            ruled = {desired_state.model: desired_state for desired_state in rules}
            desired_states = [
                *rules,
                *passes.read_desired_states_of(_models_with_former_replicas(revisions or {}) - ruled.keys()),
            ]
            done = _run_plan(desired_states, revisions, now, tick=tick) if desired_states else []
            passes.write_results([decision for decision in done if decision.model in ruled], ruled, now)
    return mine


def _run_plan(
    desired_states: Sequence[DesiredState], revisions: Mapping[str, str] | None, now: datetime, *, tick: bool
) -> list[RuleDecision]:
    about, fleet = (
        {desired_state.model: desired_state for desired_state in desired_states},
        observe(desired_states, revisions, now),
    )
    decisions = plan(fleet, desired_states, now, tick=tick)
    seen = scale_records.record_decisions(decisions, fleet, about, now, tick=tick)
    done = [apply_decision(decision, now) for decision in decisions]
    scale_records.record_refusals(decisions, done, seen, now)
    return done


def observe(
    desired_states: Sequence[DesiredState], revisions: Mapping[str, str] | None, now: datetime
) -> Fleet:
    """Read the snapshot of the rules in seven queries for any number of rules, nodes and replicas.

    `revisions` are the revisions of the present definitions; None if the folder does not respond.
    """
    names = [desired_state.model for desired_state in desired_states]
    # Loads before replicas: one that ends meanwhile counts twice rather than not at all.
    loads = load_request.active_loads(names)
    failed = Operation.objects.filter(UNDISMISSED_FAILURE, kind=KIND, element__in=names)
    failures = failed.order_by("seq").values_list("element", "finished_at", "error", "seq")
    idle_since = Greatest("last_used", "last_released_at")
    rows = (
        NodeModel.objects.filter(model_name__in=names)
        .occupying()
        .values_list(
            "id",
            "node_id",
            "model_name",
            "replica_index",
            _state_case(),
            "in_flight",
            idle_since,
            "config_revision",
        )
    )
    return Fleet(
        hosts=_read_hosts({key for desired_state in desired_states for key in desired_state.selector or ()}),
        replicas=[FleetReplica(*row) for row in rows],
        loads=loads.counts,
        waiting=loads.waiting,
        pinned=loads.pinned,
        failures={
            model: Failure(at, error[:_MAX_ERROR_CHARACTERS], seq) for model, at, error, seq in failures if at
        },
        defined=None if revisions is None else frozenset(revisions),
        revisions=revisions or {},
        replacing=loads.replacing,
        pressed=_pressure_of(names, now),
    )


def _pressure_of(models: Sequence[str], now: datetime) -> dict[str, int]:
    """Return the number of counted requests of models under enough pressure (R4.13, R4.16)."""
    least = max(conf.cluster().prefix_pressure, 1)
    return {
        model: count for model, count in pressure.pressure_by_model(models, now).items() if count >= least
    }


def _state_case() -> Case:
    """Return the SQL expression of a replica's state.

    During a mass-disruption hold, replicas that did not respond count as loaded, because this server may be
    the disconnected side.
    """
    kept = Q(reason=PhaseReason.LOST, state="unloading") & Q(Exists(MassSilence.objects.all()))
    return Case(When(kept, then=Value("loaded")), default=F("state"))


def _models_with_former_replicas(revisions: Mapping[str, str]) -> set[str]:
    """Return the defined models with a replica of a former definition; one query."""
    known = NodeModel.objects.loaded().exclude(config_revision="").order_by()
    loaded_by = known.values_list("model_name", "config_revision").distinct()
    return {model for model, revision in loaded_by if revisions.get(model, revision) != revision}


def _read_hosts(keys: Iterable[str]) -> list[FleetNode]:
    """Return the healthy backend nodes with their labels of these keys."""
    labels: dict[UUID, dict[str, str]] = defaultdict(dict)
    for node, key, value in NodeLabel.objects.filter(key__in=keys).values_list("node_id", "key", "value"):
        labels[node][key] = value
    healthy = BackendNode.objects.matching({}).values_list("id", "name", "max_replicas_per_model")
    return [FleetNode(id, name, labels.get(id, {}), slots) for id, name, slots in healthy]


def definition_revisions(*, withdraws: bool = False) -> dict[str, str] | None:
    """Return the current revision of each defined model (R4.21); None while the folder does not respond.

    The folder is read again, because a process with older definitions than another one would undo its
    replacements. A file that cannot be read counts with the revision of the model's last load. With
    `withdraws`, the last loads of deleted or disabled definitions are withdrawn: no model is loaded from
    them.
    """
    models = folder.folder()
    try:
        defined = asyncio.run(models.reload())
        unreadable = asyncio.run(models.unreadable_files())
    except folder.FolderUnresponsive as hangs:
        log.warning("replicas: %s", hangs.message)
        return None
    if withdraws:
        load_info.withdraw(defined, unreadable, clock.now())
    revisions = {definition.name: definition.revision for definition in defined}
    return load_info.revisions_of_unreadable(unreadable) | revisions


def unload_withdrawn(revisions: Mapping[str, str] | None, now: datetime) -> int:
    """Unload models whose definition was deleted or disabled; return their number.

    A load that began before may end after this. One query without such a model.
    """
    if revisions is None:
        return 0
    withdrawn = ModelDefinition.objects.filter(name=OuterRef("model_name")).filter(
        Q(disabled=True) | Q(deleted_at__isnull=False)
    )
    disabled: Iterable[str] = ()
    with suppress(folder.FolderUnresponsive):
        disabled = asyncio.run(folder.folder().disabled())
    loaded = NodeModel.objects.loaded().exclude(model_name__in=list(revisions))
    loaded = loaded.filter(Exists(withdrawn) | Q(model_name__in=list(disabled)))
    models = list(loaded.order_by().values_list("model_name", flat=True).distinct())
    for model in models:
        try:
            unload_requests.unload(UnloadRequest(model, Requester(ACTOR), reason=_WITHDRAWN_REASON), now=now)
        except errors.ClusterError as refusal:
            log.info("%s: %s; %s", model, _WITHDRAWN_REASON, refusal.message)
    return len(models)


_WITHDRAWN_REASON = "its definition is disabled or deleted"


def apply_decision(decision: RuleDecision, now: datetime) -> RuleDecision:
    """Run the actions until one is refused (R4.15); return the decision with the actions that were run."""
    done: list[Action] = []
    for action in decision.actions:
        try:
            _execute(action, now)
        except errors.ClusterError as refusal:
            log.info("%s: refused: %s", decision.model, refusal.message)
            said = f"{decision.reason}; refused: {refusal.message}"
            return replace(decision, reason=said, actions=tuple(done))
        except Exception as error:
            # One model never stops the others (R4.5), but without the connection the lock is gone too.
            if is_outage(error):
                raise
            log.exception("%s: its rule was not carried out", decision.model)
            return replace(decision, reason=f"{decision.reason}; it failed: see the log", actions=tuple(done))
        done.append(action)
    return decision


def _execute(action: Action, now: datetime) -> None:
    """Run one action. Flags of the rule are written later, with the results of the pass."""
    match action:
        case LoadReplica(model, only, reason, pinned, replaces):
            load_request.request_scale_up(
                model, allowed_nodes=only if pinned else None, actor=ACTOR, reason=reason, replaces=replaces
            )
            log.info("%s: %s", model, reason)
        case EvictReplica(model, replica_id, reason):
            replace_replica(replica_id, now)
            log.info("%s: %s", model, reason)
        case RetireReplica(model, replica_id, reason):
            retire_replica(replica_id, reason, now)
            log.info("%s: %s", model, reason)
        case Unsatisfiable(model, ticks, _, reason):
            log.warning("%s (%d times): %s", model, ticks, reason)
        case EndPressure():
            pass
        case ClearUnsatisfiable(model):
            log.info("%s: its rule can be carried out again", model)
        case _:
            assert_never(action)


def replace_replica(replica_id: UUID, now: datetime) -> None:
    """Terminate the outdated replica. Raise Conflict if it is the last one and has a request again."""
    with transaction.atomic():
        row = terminations.lock_serving(replica_id)
        if row is None or (row.in_flight and not terminations.has_other_replica(row)):
            raise errors.Conflict("the replica is in use again, or gone")
        terminations.replace([row.pk], now=now)


def retire_replica(replica_id: UUID, reason: str, now: datetime) -> None:
    """Unload the idle replica. Raise Conflict if it has got a request meanwhile.

    Under the lock of its row the replica is closed for requests, so no running request is ended. The
    operation then stops its engine.
    """
    with transaction.atomic():
        row = terminations.lock_idle(replica_id, idle_since=now - RETIRE_IDLE_AFTER)
        if row is None:
            raise errors.Conflict("the replica is in use again, or gone")
        if not terminations.keeps_minimum(row):
            raise errors.Conflict("another replica of the model has gone since")
        request = UnloadRequest(
            row.model_name, Requester(ACTOR), node=row.node, index=row.replica_index, grace=0, reason=reason
        )
        operation = unload_requests.unload(request, now=now).operation
        drains.drain_for_unload(
            row.model_name,
            [row.node_id],
            index=row.replica_index,
            deadline=now,
            operation_id=operation.id,
            now=now,
        )


GATHER_SECONDS = 1.0
"""Seconds for which changes are gathered into one pass."""


class ReplicaPass(PeriodicTask):
    """The periodic task of a controller that runs the pass after a node or a rule has changed.

    The schedule runs the pass too, as a safety net.
    """

    def __init__(self) -> None:
        super().__init__(
            "replica pass", self._run_step, interval=None, gather=GATHER_SECONDS, retry_on=(DatabaseError,)
        )

    async def _run_step(self) -> None:
        if not await in_thread(run_pass, tick=False):
            # The pass of another process may have read the rows before the change.
            self.wake()


_ONLY_ROUTES_REASON = "it says nothing of how many replicas: the pass leaves the model alone"
MAX_PREVIEWED_LOADS = 64
"""Maximum number of loads for which a preview computes nodes."""


def preview(rule: Rule, nodes: Sequence[NewNodes], now: datetime) -> Row:
    """Return what the pass would do for this rule on the present fleet with these new nodes.

    Raises InvalidInput for an invalid rule.
    """
    check_rule(rule)
    desired_state = DesiredState(
        rule.model_name,
        scheduling.readable_selector(rule.node_selector),
        rule.min_replicas,
        rule.max_replicas,
        rule.spread_all,
    )
    snapshot = _read_snapshot(rule, nodes, now)
    fleet = _add_new_nodes(observe([desired_state], definition_revisions(), now), snapshot)
    (decision,) = plan(fleet, [desired_state], now, tick=True)
    if not rule.counts:
        decision = replace(decision, wanted=0, reason=_ONLY_ROUTES_REASON, actions=())
    loads = [action for action in decision.actions if isinstance(action, LoadReplica)]
    explanations = list(
        simulate_placements(
            snapshot.question,
            [load.allowed_nodes if load.pinned else None for load in loads[:MAX_PREVIEWED_LOADS]],
        )
    )
    missed = [explanation for explanation in explanations if explanation.node is None]
    if not missed and any(isinstance(action, Unsatisfiable) for action in decision.actions):
        missed = list(simulate_placements(snapshot.question, [None]))
    return RULE_PLAN.of(
        rule=GIVEN_RULE.of(**{name: getattr(rule, name) for name in GIVEN_RULE.fields}),
        replicas_now=decision.current,
        loading=decision.loading,
        wanted=decision.wanted,
        says=decision.reason,
        waits_until=_waits_until(rule.model_name, now),
        loads=[
            _load_row(load, explanation)
            for load, explanation in zip(loads, explanations, strict=False)
            if explanation.node
        ],
        retires=_retired_rows(decision, fleet),
        left_out=max(len(loads) - MAX_PREVIEWED_LOADS, 0),
        unsatisfiable=_unsatisfied_row(decision, missed),
        misses=_first_missing_nodes(missed),
    )


def _read_snapshot(rule: Rule, nodes: Sequence[NewNodes], now: datetime) -> PlanSnapshot:
    """Read the snapshot for placing the rule's loads, which evict nothing: no request waits for them."""
    load_needs = needs_of(rule.model_name)
    need, conflicts = (
        (load_needs.need, load_needs.conflicts) if load_needs is not None else (NO_NEED, frozenset())
    )
    backend = load_needs.definition.backend if load_needs is not None else ""
    request = PlanRequest(need, rule.model_name, conflicts, rule.node_selector, nodes=nodes, backend=backend)
    return load_explanation.read_plan_snapshot(request, now, evicts=False)


def _add_new_nodes(fleet: Fleet, snapshot: PlanSnapshot) -> Fleet:
    """Add the new nodes to the fleet that the pass sees."""
    new_nodes = (node for node in snapshot.question.view.nodes if str(node.id) in snapshot.new)
    new_hosts = [FleetNode(node.id, node.name, dict(node.labels), node.slots) for node in new_nodes]
    return replace(fleet, hosts=[*fleet.hosts, *new_hosts])


def _load_row(action: LoadReplica, explanation: Explanation) -> Row:
    assert explanation.node is not None
    return PLACE_WHY.of(
        node=explanation.node.name, why=action.reason if action.pinned else explanation.sentence
    )


def _retired_rows(decision: RuleDecision, fleet: Fleet) -> list[Row]:
    names = {host.id: host.name for host in fleet.hosts}
    nodes = {row.id: names.get(row.node_id, "") for row in fleet.replicas}
    return [
        PLACE_WHY.of(node=nodes[action.replica_id], why=action.reason)
        for action in decision.actions
        if isinstance(action, RetireReplica | EvictReplica)
    ]


def _unsatisfied_row(decision: RuleDecision, missed: Sequence[Explanation]) -> Row | None:
    """Return why the rule cannot be satisfied, or why its first load finds no node; None if all is well."""
    reasons = [action.reason for action in decision.actions if isinstance(action, Unsatisfiable)]
    reasons += [explanation.sentence for explanation in missed]
    if not reasons:
        return None
    counts: Counter[str] = Counter()
    for explanation in missed:
        counts.update({refused["code"]: refused["count"] for refused in explanation.facts["refused"]})
    return UNSATISFIED.of(reason=reasons[0], counts=dict(counts))


def _first_missing_nodes(missed: Sequence[Explanation]) -> list[Mapping[str, Any]]:
    """Return the first few nodes that lack something for these loads, without duplicates."""
    nodes = {miss["node_id"]: miss for explanation in missed for miss in explanation.facts["misses"]}
    return list(nodes.values())[:MAX_SHOWN_NODES]


def _waits_until(model: str, now: datetime) -> str | None:
    rules = ModelSchedulingConfig.objects.filter(model_name=model, unsatisfiable_until__gt=now)
    until = rules.values_list("unsatisfiable_until", flat=True).first()
    return None if until is None else until.isoformat()
