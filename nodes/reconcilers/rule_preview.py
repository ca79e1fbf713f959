"""Preview of a rule: what the replica pass would do now if the rule were saved. Writes nothing.

The rule is evaluated as by a tick of the schedule. Saving the rule does not end the cooldown of the stored
one: the preview shows the end of the cooldown, and the rest is what follows after it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from localai_cluster.web.shapes import Row
from nodes.loading import load_explanation
from nodes.loading.load_explanation import NewNodes, PlanRequest, PlanSnapshot, needs_of
from nodes.loading.reason_shapes import GIVEN_RULE, PLACE_WHY, RULE_PLAN, UNSATISFIED
from nodes.models import ModelSchedulingConfig, selectors
from nodes.placement.choose import NO_NEED
from nodes.placement.explain import SHOWN, Explanation
from nodes.placement.load_decision import simulate_placements
from nodes.reconcilers import replicas
from nodes.scheduling.plan import plan
from nodes.scheduling.rules import Rule, check_rule
from nodes.scheduling.snapshot import (
    DesiredState,
    EvictReplica,
    Fleet,
    FleetNode,
    LoadReplica,
    RetireReplica,
    RuleDecision,
    Unsatisfiable,
)

_ONLY_ROUTES = "it says nothing of how many replicas: the pass leaves the model alone"
MOST = 64
"""Maximum number of loads whose nodes are computed."""


def preview(rule: Rule, nodes: Sequence[NewNodes], now: datetime) -> Row:
    """Plan the rule on the present fleet plus these nodes; raise InvalidInput for an invalid rule."""
    check_rule(rule)
    desired_state = DesiredState(
        rule.model_name,
        selectors.readable(rule.node_selector),
        rule.min_replicas,
        rule.max_replicas,
        rule.spread_all,
    )
    snapshot = _read_snapshot(rule, nodes, now)
    fleet = _add_new_nodes(replicas.observe([desired_state], replicas.definition_revisions(), now), snapshot)
    (decision,) = plan(fleet, [desired_state], now, tick=True)
    if not rule.counts:
        decision = replace(decision, wanted=0, reason=_ONLY_ROUTES, actions=())
    loads = [action for action in decision.actions if isinstance(action, LoadReplica)]
    explanations = list(
        simulate_placements(snapshot.question, [_allowed_nodes(load) for load in loads[:MOST]])
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
        left_out=max(len(loads) - MOST, 0),
        unsatisfiable=_unsatisfied_row(decision, missed),
        misses=_missed_rows(missed),
    )


def _read_snapshot(rule: Rule, nodes: Sequence[NewNodes], now: datetime) -> PlanSnapshot:
    """Read the snapshot for the rule's loads. Evictions are left out: no request waits for these replicas."""
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


def _allowed_nodes(action: LoadReplica) -> frozenset[UUID] | None:
    return action.allowed_nodes if action.pinned else None


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
    """Return the reason of the rule itself, or of the first load without a node."""
    reasons = [action.reason for action in decision.actions if isinstance(action, Unsatisfiable)]
    reasons += [explanation.sentence for explanation in missed]
    if not reasons:
        return None
    counts: Counter[str] = Counter()
    for explanation in missed:
        counts.update({refused["code"]: refused["count"] for refused in explanation.facts["refused"]})
    return UNSATISFIED.of(reason=reasons[0], counts=dict(counts))


def _missed_rows(missed: Sequence[Explanation]) -> list[Mapping[str, Any]]:
    """Return the first few nodes, each once."""
    nodes = {miss["node_id"]: miss for explanation in missed for miss in explanation.facts["misses"]}
    return list(nodes.values())[:SHOWN]


def _waits_until(model: str, now: datetime) -> str | None:
    rules = ModelSchedulingConfig.objects.filter(model_name=model, unsatisfiable_until__gt=now)
    until = rules.values_list("unsatisfiable_until", flat=True).first()
    return None if until is None else until.isoformat()
