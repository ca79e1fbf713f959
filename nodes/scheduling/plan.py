"""Plan the action that each scheduling rule needs now (R4.6 to R4.23), from one snapshot of the fleet; pure.

`plan` maps the `Fleet` and the `DesiredState`s to one `RuleDecision` per rule: the actions for the pass, and
one sentence that gives the reason. The order of the steps is the reference's: spread, cooldown, minimum, busy
burst, pressure, scale-down. If no step loads or retires replicas, replicas of a former definition are
replaced.

A replica counts if requests can reach it: it is loaded, on a healthy node that the selector matches. Other
replicas serve until they are idle. A running load counts as its future replica.

A load that replaces a replica of a former definition names that replica. If both fit, the new replica is
loaded first, and one transaction opens it for requests and closes the old one (`nodes/replicas/slots.py`). If
they do not both fit, the load reports it, and the old replica is evicted first: at once if other replicas
serve meanwhile, otherwise when it has no requests. Only one replica at a time is evicted first, and at most a
quarter of the replicas are being replaced at once. Running requests are never ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from localai_cluster.kit.quantities import counted
from nodes.scheduling.snapshot import (
    LOADING_STATES,
    Action,
    ClearUnsatisfiable,
    DesiredState,
    EligibleNodes,
    EndPressure,
    EvictReplica,
    Fleet,
    FleetNode,
    FleetReplica,
    LoadReplica,
    RetireReplica,
    RuleContext,
    RuleDecision,
    Unsatisfiable,
)

RETIRE_IDLE_AFTER = timedelta(minutes=5)
"""Time without requests after which a surplus replica may be retired (C2)."""
MAX_FAILED_TICKS = 3
"""Unsuccessful ticks after which a rule enters a cooldown (C9)."""
COOLDOWN_DURATION = timedelta(minutes=5)
"""Duration of a rule's cooldown (C10)."""
REPLACEMENT_DIVISOR = 4
"""At most one in this many serving replicas is replaced at a time, but at least one replica."""
_MAX_NAMED_NODES = 5
"""Maximum number of nodes that a reason names."""


def plan(fleet: Fleet, rules: Iterable[DesiredState], now: datetime, *, tick: bool) -> list[RuleDecision]:
    """Return the decisions, sorted by model; the order of the input does not matter.

    Without `tick`, the pass runs because of a change between two ticks. The decisions then only load missing
    replicas, because bursts, idle replicas and failures are counted by ticks (R4.14, R4.23).
    """
    rows, hosts = defaultdict(list), {host.id: host for host in fleet.hosts}
    for replica in sorted(fleet.replicas, key=lambda replica: (replica.index, replica.id)):
        rows[replica.model].append(replica)
    eligible: dict[tuple[tuple[str, str], ...] | None, EligibleNodes] = {}
    decisions = []
    for rule in sorted(rules, key=lambda rule: rule.model):
        key = None if rule.selector is None else tuple(sorted(rule.selector.items()))
        if key not in eligible:
            eligible[key] = _match_nodes(fleet.hosts, rule.selector)
        model_rows = rows[rule.model]
        loads_with_slot = sum(row.state in LOADING_STATES for row in model_rows)
        failure = fleet.failures.get(rule.model)
        fresh = failure is not None and rule.failure_seq is not None and failure.seq > rule.failure_seq
        context = RuleContext(
            rule,
            eligible=eligible[key],
            hosts=hosts,
            rows=model_rows,
            serving=[row for row in model_rows if row.state == "loaded" and row.node_id in hosts],
            # A load may have begun after its count was read.
            loads=max(fleet.loads.get(rule.model, 0), loads_with_slot),
            loads_with_slot=loads_with_slot,
            waiting=fleet.waiting.get(rule.model, 0),
            pinned=fleet.pinned.get(rule.model, frozenset()),
            failure=failure.error if failure and fresh else "",
            last_failure=failure,
            defined=fleet.defined is None or rule.model in fleet.defined,
            revision=fleet.revisions.get(rule.model, ""),
            replacing={row.id: fleet.replacing[row.id] for row in model_rows if row.id in fleet.replacing},
            pressure=fleet.pressed.get(rule.model, 0),
        )
        # The next tick counts the failure, so no pass before it may record a check of this rule.
        if tick or not context.failure:
            decisions.append(_add_replacements(context, _decide(context, now, tick=tick), now, tick=tick))
    return decisions


def _match_nodes(hosts: Iterable[FleetNode], selector: Mapping[str, str] | None) -> EligibleNodes:
    """Return the hosts that the selector matches (R1.68, R1.69)."""
    if selector is None:
        return EligibleNodes()
    matching = (host for host in hosts if selector.items() <= host.labels.items())
    return EligibleNodes(sorted(matching, key=lambda host: (host.name, host.id)))


def _decide(context: RuleContext, now: datetime, *, tick: bool) -> RuleDecision:
    """Return the decision of the first step that applies (R4.6)."""
    rule = context.rule
    if not rule.counts:
        return context.decision("")  # R4.12
    if rule.until is not None and rule.until > now:
        return _replace_lost(context) or context.decision("")  # R4.8
    if rule.spread and not context.eligible:
        return context.decision(_reason_against_load(context))  # R4.7
    if missing := _missing_count(context):
        return _load_missing(context, missing, now, tick=tick)
    met = bool(rule.ticks or rule.until) and len(context.eligible_serving) >= context.required
    cleared = (ClearUnsatisfiable(rule.model),) if met else ()
    if tick and len(context.eligible_serving) >= context.required:
        actions = _burst_actions(context) or _pressure_actions(context) or _scale_down_actions(context, now)
        if actions:
            reasons = (action.reason for action in actions if isinstance(action, LoadReplica | RetireReplica))
            return context.decision("; ".join(reasons), *cleared, *actions)
    return context.decision(_steady_reason(context), *cleared)


def _add_replacements(
    context: RuleContext, decision: RuleDecision, now: datetime, *, tick: bool
) -> RuleDecision:
    """Add replacements of outdated replicas to a decision that loads and retires nothing.

    A cooldown does not prevent replacements, because it concerns only the number of replicas. After a failed
    load, replacements pause for as long as a cooldown.
    """
    if any(isinstance(action, LoadReplica | RetireReplica) for action in decision.actions):
        return decision
    is_paused = context.last_failure is not None and context.last_failure.at > now - COOLDOWN_DURATION
    replacements = _evictions(context) or (_successors(context) if tick and not is_paused else [])
    if not replacements:
        return decision
    return context.decision(replacements[0].reason, *decision.actions, *replacements)


def _missing_count(context: RuleContext) -> int:
    """Return the number of replicas that are neither present nor being loaded (R4.7, R4.10)."""
    if context.rule.spread:
        # A load for any node may take a slot on each of them; a load that replaces a replica has its node.
        waiting = len(context.pinned - {row.node_id for row in context.rows}) + len(context.replacing)
        return 0 if context.loads > context.loads_with_slot + waiting else len(_empty_nodes(context))
    return max(context.rule.minimum - len(context.eligible_serving) - context.loads, 0)


def _empty_nodes(context: RuleContext) -> list[FleetNode]:
    """Return the nodes where a rule with one replica per node still needs a load.

    Such a node has neither a load that is restricted to it nor a replica that stays.
    """
    occupied_ids = {row.node_id for row in context.rows if row.state != "unloading"} | context.pinned
    return [host for host in context.eligible if host.id not in occupied_ids]


def _load_missing(context: RuleContext, missing: int, now: datetime, *, tick: bool) -> RuleDecision:
    """Load the missing replicas for which slots are free; if there are none, state the reason (R4.10)."""
    rule = context.rule
    if problem := _reason_against_load(context):
        # A slot that is being freed is no problem, and a definition may be written at any moment.
        if not tick or (context.eligible and context.defined and context.is_freeing_slot):
            return context.decision(problem)
        return _report_unsatisfiable(context, problem, now, pause=context.defined)
    if context.failure and rule.ticks + 1 >= MAX_FAILED_TICKS:
        return _report_unsatisfiable(context, _load_failure_text(context), now)
    loads = _plan_loads(context, missing)
    if context.failure:
        reason = f"{loads[0].reason}; {_load_failure_text(context)}"
        return context.decision(reason, Unsatisfiable(rule.model, rule.ticks + 1, None, reason), *loads)
    # After the first load: the flags stay if no load can be requested.
    cleared = [ClearUnsatisfiable(rule.model)] if rule.ticks or rule.until else []
    return context.decision(loads[0].reason, loads[0], *cleared, *loads[1:])


def _replace_lost(context: RuleContext) -> RuleDecision | None:
    """Load a replica for each one that was lost since the last pass, even in a cooldown.

    They are known to fit. It suffices that a slot is being freed: the load waits for the slot, and the next
    pass would not notice the loss.
    """
    lost = min(_missing_count(context), context.rule.seen - len(context.serving))
    if lost <= 0 or not (context.free_slots > 0 or context.is_freeing_slot) or not context.defined:
        return None
    if context.rule.spread:
        loads = _plan_loads(context, lost)[:lost]
    else:
        reason = f"{lost} of {context.rule.seen} were lost: {lost} more, without waiting for the cooldown"
        loads = [LoadReplica(context.rule.model, context.allowed_nodes, reason)] * lost
    return context.decision(loads[0].reason, *loads) if loads else None


def _plan_loads(context: RuleContext, missing: int) -> list[LoadReplica]:
    """Return as many loads as slots are free; for a rule with one replica per node, a load for each node."""
    model = context.rule.model
    if context.rule.spread:
        empty_nodes = [host for host in _empty_nodes(context) if context.free_slots_of(host)]
        suffix = (
            f" and {len(empty_nodes) - _MAX_NAMED_NODES} more" if len(empty_nodes) > _MAX_NAMED_NODES else ""
        )
        reason = f"one on each of {len(context.eligible)} nodes wanted: starting on "
        reason += ", ".join(host.name for host in empty_nodes[:_MAX_NAMED_NODES]) + suffix
        return [LoadReplica(model, frozenset({host.id}), reason, pinned=True) for host in empty_nodes]
    count = min(missing, context.free_slots)
    counts = f"{len(context.eligible_serving)} running, {context.loads} loading"
    reason = f"{context.rule.minimum} wanted, {counts}: starting {count}"
    return [LoadReplica(model, context.allowed_nodes, reason)] * count


def _reason_against_load(context: RuleContext) -> str:
    """Return the reason why no replica can be loaded now; empty if one can."""
    if not context.defined:
        return _undefined_model_text(context)
    if not context.eligible:
        selector = context.rule.selector
        if selector is None:
            return "its node selector cannot be read, so it matches no node"
        labels = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        return f"no healthy node has {labels}" if labels else "there is no healthy node"
    has_slot = (
        any(context.free_slots_of(host) for host in _empty_nodes(context))
        if context.rule.spread
        else context.free_slots > 0
    )
    if has_slot:
        return ""
    counts = f"{len(context.eligible_serving)} running, {context.loads} loading"
    nodes = f"{counted(len(context.eligible), 'node')} that it may run on"
    return f"{context.required} wanted, {counts}, but no free slot on the {nodes}"


def _report_unsatisfiable(
    context: RuleContext, reason: str, now: datetime, *, pause: bool = True
) -> RuleDecision:
    """Count one more unsuccessful tick, and start a cooldown after enough of them (R4.23)."""
    ticks = context.rule.ticks + 1
    until = now + COOLDOWN_DURATION if pause and ticks >= MAX_FAILED_TICKS else None
    if until is not None:
        reason = f"{reason}; nothing is tried until {until:%H:%M:%S} UTC"
    return context.decision(reason, Unsatisfiable(context.rule.model, ticks, until, reason))


def _may_grow(context: RuleContext) -> bool:
    """Return True if one more replica may be loaded beside the serving replicas."""
    # Every replica with a row may serve again, so it counts against the limit.
    total = len(context.rows) + context.loads - context.loads_with_slot
    below = context.rule.maximum == 0 or total < context.rule.maximum
    possible = context.free_slots > 0 and context.defined and not context.failure
    return bool(context.serving) and below and possible and not context.rule.spread and not context.loads


def _burst_actions(context: RuleContext) -> list[Action]:
    """Load one more replica if all replicas are busy and none is being loaded (R4.11, R4.14)."""
    if not _may_grow(context) or not all(row.in_flight > 0 for row in context.serving):
        return []
    count = len(context.serving)
    reason = "the one replica is busy: one more" if count == 1 else f"all {count} replicas are busy: one more"
    return [LoadReplica(context.rule.model, context.allowed_nodes, reason)]


def _pressure_actions(context: RuleContext) -> list[Action]:
    """Load one more replica if requests could not use the replica that caches their prompt (R4.13).

    If all requests begin with the same text, a further replica does not end the pressure. So a rule without a
    maximum gets at most one replica in addition to its desired number.
    """
    if not context.pressure or not _may_grow(context):
        return []
    if context.rule.maximum == 0 and len(context.rows) > max(context.rule.minimum, 1):
        return []
    model = context.rule.model
    requests = counted(context.pressure, "request")
    reason = (
        f"{requests} within a minute not sent to the replica that remembers the prompt: too busy; one more"
    )
    return [LoadReplica(model, context.allowed_nodes, reason), EndPressure(model)]


def _scale_down_actions(context: RuleContext, now: datetime) -> list[Action]:
    """Retire idle replicas beyond the minimum, first those on nodes outside the selector (R4.17, R4.18).

    No replica is retired during a load or under pressure: otherwise one pass would load a replica that the
    next pass retires, or the reverse. A load that waits does not count, because it may wait for the memory of
    exactly these replicas.
    """
    if context.loads > context.waiting or context.pressure:
        return []
    eligible_ids = {row.id for row in context.eligible_serving}
    protected_ids = {row.id for row in _one_per_node(context)} if context.rule.spread else set()
    idle = [row for row in context.serving if not row.in_flight and now - row.idle_since > RETIRE_IDLE_AFTER]
    idle = [row for row in idle if row.id not in protected_ids]
    idle.sort(key=lambda row: (row.id in eligible_ids, -row.index, row.idle_since, row.id))
    surplus = len(context.serving) - max(context.required, 1)
    eligible_surplus = len(context.eligible_serving) - context.required
    victims: list[FleetReplica] = []
    for row in idle[: max(surplus, 0)]:
        if row.id in eligible_ids:
            if eligible_surplus <= 0:
                continue
            eligible_surplus -= 1
        victims.append(row)
    if _would_burst(context, victims):
        victims.pop()
    return [_retire(context, row, now) for row in victims]


def _one_per_node(context: RuleContext) -> Iterable[FleetReplica]:
    """Return the replicas that a rule with one replica per node keeps."""
    first_by_node: dict[UUID, FleetReplica] = {}
    for row in context.eligible_serving:
        first_by_node.setdefault(row.node_id, row)
    return first_by_node.values()


def _would_burst(context: RuleContext, victims: Sequence[FleetReplica]) -> bool:
    """Return True if all replicas but the victims are busy: the next tick would load a replica again."""
    victim_ids = {row.id for row in victims}
    remaining = [row for row in context.serving if row.id not in victim_ids]
    below = context.rule.maximum == 0 or len(remaining) < context.rule.maximum
    return bool(victims) and not context.rule.spread and below and all(row.in_flight for row in remaining)


def _retire(context: RuleContext, row: FleetReplica, now: datetime) -> RetireReplica:
    minutes = int((now - row.idle_since).total_seconds() // 60)
    floor = max(context.required, 1)
    reason = (
        f"{_replica_label(context, row)} idle for {minutes} min and more than {floor} there: it is retired"
    )
    return RetireReplica(context.rule.model, row.id, reason)


def _steady_reason(context: RuleContext) -> str:
    """Return the sentence that says why the rule needs no action."""
    if not context.defined:
        return _undefined_model_text(context)
    if context.failure:
        return _load_failure_text(context)
    if context.loads:
        return f"{context.loads} loading"
    if not context.eligible:
        return _reason_against_load(context)
    return f"satisfied: {len(context.serving)} there"


def _undefined_model_text(context: RuleContext) -> str:
    return f"no model {context.rule.model} is defined in the models folder"


def _load_failure_text(context: RuleContext) -> str:
    return f"the last load failed: {context.failure}"


def _former_replicas(context: RuleContext) -> list[FleetReplica]:
    """Return the replicas of a former definition (outdated replicas), the longest idle replica first."""
    revision = context.revision
    former = (row for row in context.eligible_serving if revision and row.revision not in ("", revision))
    return sorted(former, key=lambda row: (row.in_flight, row.idle_since, row.id))


def _evictions(context: RuleContext) -> list[EvictReplica | LoadReplica]:
    """Return the eviction of an outdated replica whose successor does not fit beside it, if one may start."""
    if any(row.state == "unloading" for row in context.rows):
        return []
    has_others = len(context.eligible_serving) > 1
    for row in _former_replicas(context):
        if context.replacing.get(row.id) and (has_others or not row.in_flight):
            reason = (
                f"{_replica_label(context, row)} goes before its successor, which finds no room beside it"
            )
            return [EvictReplica(context.rule.model, row.id, reason)]
    return []


def _successors(context: RuleContext) -> list[EvictReplica | LoadReplica]:
    """Return the loads that replace the next outdated replicas."""
    former = _former_replicas(context)
    under_way = sum(row.id in context.replacing for row in former)
    waiting = [row for row in former if row.id not in context.replacing]
    allowance = max(len(context.eligible_serving) // REPLACEMENT_DIVISOR, 1) - under_way
    model, is_spread = context.rule.model, context.rule.spread
    plural = "replica has" if len(former) == 1 else "replicas have"
    edited = f"the definition was edited: {len(former)} {plural} a former one"
    return [
        LoadReplica(
            model,
            frozenset({row.node_id}) if is_spread else None,
            f"{edited}, {_replica_label(context, row)} is replaced",
            pinned=is_spread,
            replaces=row.id,
        )
        for row in waiting[: max(allowance, 0)]
    ]


def _replica_label(context: RuleContext, row: FleetReplica) -> str:
    """Return the name of the replica in sentences, with its node: on nodes with one slot every index is 0."""
    return f"replica {row.index} on {context.hosts[row.node_id].name}"
