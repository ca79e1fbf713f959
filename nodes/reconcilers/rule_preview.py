"""What the replica pass would do now if a rule were saved, and where its loads would go. Writes nothing.

The rule is looked at as by a tick. A cooldown of the stored rule goes on when the rule is saved: its end is
told, and the rest is what comes then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from localai_cluster.web.shapes import Row
from nodes.loading import planning
from nodes.loading.explaining import wanted_of
from nodes.loading.planning import NewNodes, PlanPicture, PlanWish
from nodes.loading.reason_shapes import GIVEN_RULE, PLACE_WHY, RULE_PLAN, UNSATISFIED
from nodes.models import ModelSchedulingConfig, selectors
from nodes.placement.choose import NOTHING
from nodes.placement.explain import SHOWN, Explanation
from nodes.placement.plan import successive
from nodes.reconcilers import replicas
from nodes.scheduling.picture import Demand, Fleet, GiveWay, Host, LoadAnother, Retire, Ruling, Unsatisfiable
from nodes.scheduling.plan import plan
from nodes.scheduling.rules import Rule, check

_ONLY_ROUTES = "it says nothing of how many replicas: the pass leaves the model alone"
MOST = 64
"""Loads whose nodes are worked out."""


def preview(rule: Rule, nodes: Sequence[NewNodes], now: datetime) -> Row:
    """The plan of the rule on the present fleet with these nodes; InvalidInput for what is no rule."""
    check(rule)
    demand = Demand(
        rule.model_name,
        selectors.readable(rule.node_selector),
        rule.min_replicas,
        rule.max_replicas,
        rule.spread_all,
    )
    picture = _picture(rule, nodes, now)
    fleet = _with(replicas.observe([demand], replicas.revisions_now(), now), picture)
    (ruling,) = plan(fleet, [demand], now, tick=True)
    if not rule.counts:
        ruling = replace(ruling, wanted=0, reason=_ONLY_ROUTES, actions=())
    loads = [action for action in ruling.actions if isinstance(action, LoadAnother)]
    told = list(successive(picture.asked, [_only(one) for one in loads[:MOST]]))
    missed = [one for one in told if one.node is None]
    if not missed and any(isinstance(action, Unsatisfiable) for action in ruling.actions):
        missed = list(successive(picture.asked, [None]))
    return RULE_PLAN.of(
        rule=GIVEN_RULE.of(**{name: getattr(rule, name) for name in GIVEN_RULE.fields}),
        replicas_now=ruling.current,
        loading=ruling.loading,
        wanted=ruling.wanted,
        says=ruling.reason,
        waits_until=_waits_until(rule.model_name, now),
        loads=[_placed(action, one) for action, one in zip(loads, told, strict=False) if one.node],
        retires=_retired(ruling, fleet),
        left_out=max(len(loads) - MOST, 0),
        unsatisfiable=_unsatisfied(ruling, missed),
        misses=_misses(missed),
    )


def _picture(rule: Rule, nodes: Sequence[NewNodes], now: datetime) -> PlanPicture:
    """What its loads would see: nothing is evicted for a replica that no request waits for."""
    wanted = wanted_of(rule.model_name)
    need, conflicts = (wanted.need, wanted.conflicts) if wanted is not None else (NOTHING, frozenset())
    backend = wanted.definition.backend if wanted is not None else ""
    wish = PlanWish(need, rule.model_name, conflicts, rule.node_selector, nodes=nodes, backend=backend)
    return planning.pictured(wish, now, evicts=False)


def _with(fleet: Fleet, picture: PlanPicture) -> Fleet:
    """The fleet as the pass sees it, with the nodes that are added."""
    new = (node for node in picture.asked.view.nodes if str(node.id) in picture.new)
    more = [Host(node.id, node.name, dict(node.labels), node.slots) for node in new]
    return replace(fleet, hosts=[*fleet.hosts, *more])


def _only(action: LoadAnother) -> frozenset[UUID] | None:
    return action.only if action.pinned else None


def _placed(action: LoadAnother, told: Explanation) -> Row:
    assert told.node is not None
    return PLACE_WHY.of(node=told.node.name, why=action.reason if action.pinned else told.sentence)


def _retired(ruling: Ruling, fleet: Fleet) -> list[Row]:
    names = {host.id: host.name for host in fleet.hosts}
    nodes = {row.id: names.get(row.node_id, "") for row in fleet.replicas}
    return [
        PLACE_WHY.of(node=nodes[action.replica_id], why=action.reason)
        for action in ruling.actions
        if isinstance(action, Retire | GiveWay)
    ]


def _unsatisfied(ruling: Ruling, missed: Sequence[Explanation]) -> Row | None:
    """By the rule's own words, or by those of the first load that finds no node."""
    said = [action.reason for action in ruling.actions if isinstance(action, Unsatisfiable)]
    said += [one.sentence for one in missed]
    if not said:
        return None
    counts: Counter[str] = Counter()
    for one in missed:
        counts.update({refused["code"]: refused["count"] for refused in one.facts["refused"]})
    return UNSATISFIED.of(reason=said[0], counts=dict(counts))


def _misses(missed: Sequence[Explanation]) -> list[Mapping[str, Any]]:
    """The first few nodes, each once."""
    nodes = {miss["node_id"]: miss for one in missed for miss in one.facts["misses"]}
    return list(nodes.values())[:SHOWN]


def _waits_until(model: str, now: datetime) -> str | None:
    rules = ModelSchedulingConfig.objects.filter(model_name=model, unsatisfiable_until__gt=now)
    until = rules.values_list("unsatisfiable_until", flat=True).first()
    return None if until is None else until.isoformat()
