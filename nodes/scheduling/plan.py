"""Plan the action that each scheduling rule needs now (R4.6 to R4.23), from one snapshot of the fleet; pure.

`plan` maps the `Fleet` and the `Demand`s to one `Ruling` per rule: the actions for the pass, and one sentence
that gives the reason. The order is the reference's: spread, cooldown, minimum, busy burst, pressure,
scale-down. If none of these loads or retires replicas, replicas of a former definition are replaced
(`renewal.py`).

Replicas count where requests can find them: loaded, on a healthy node that the selector chooses. Other
replicas serve until they are idle. A load under way counts as the replica that it will become.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from nodes.scheduling.picture import (
    Action,
    ClearFlags,
    Demand,
    EndPressure,
    Fleet,
    Host,
    LoadAnother,
    Placed,
    Retire,
    Ruling,
    Unsatisfiable,
)
from nodes.scheduling.renewal import Renewal
from nodes.scheduling.scene import LOADING, Ground, Scene

IDLE_FOR = timedelta(minutes=5)
"""Idle time after which a replica may be retired (C2)."""
MOST_TICKS = 3
"""Passes without success before the rule enters a cooldown (C9)."""
COOLDOWN = timedelta(minutes=5)
"""Duration of a rule's cooldown (C10)."""
_NAMED = 5
"""Number of nodes that a reason names."""


def plan(fleet: Fleet, demands: Iterable[Demand], now: datetime, *, tick: bool) -> list[Ruling]:
    """Return the rulings by model; the order of rows does not matter.

    Without `tick`, something has changed between two ticks: then the rulings only request missing replicas,
    because bursts, idle replicas and failures are counted by ticks (R4.14, R4.23).
    """
    rows, hosts = defaultdict(list), {host.id: host for host in fleet.hosts}
    for replica in sorted(fleet.replicas, key=lambda replica: (replica.index, replica.id)):
        rows[replica.model].append(replica)
    chosen: dict[tuple[tuple[str, str], ...] | None, Ground] = {}
    rulings = []
    for demand in sorted(demands, key=lambda demand: demand.model):
        key = None if demand.selector is None else tuple(sorted(demand.selector.items()))
        if key not in chosen:
            chosen[key] = _matching(fleet.hosts, demand.selector)
        model_rows = rows[demand.model]
        placed = sum(row.state in LOADING for row in model_rows)
        failure = fleet.failures.get(demand.model)
        fresh = failure is not None and demand.looked_at is not None and failure.at > demand.looked_at
        scene = Scene(
            demand,
            fits=chosen[key],
            hosts=hosts,
            rows=model_rows,
            serving=[row for row in model_rows if row.state == "loaded" and row.node_id in hosts],
            # A load may have begun after its count was read.
            loads=max(fleet.loads.get(demand.model, 0), placed),
            placed=placed,
            pinned=fleet.pinned.get(demand.model, frozenset()),
            failure=failure.error if failure and fresh else "",
            failed_at=failure.at if failure else None,
            defined=fleet.defined is None or demand.model in fleet.defined,
            revision=fleet.revisions.get(demand.model, ""),
            replacing={row.id: fleet.replacing[row.id] for row in model_rows if row.id in fleet.replacing},
            pressed=fleet.pressed.get(demand.model, 0),
        )
        # The next tick counts the failure, so no pass before it may record a check of this rule.
        if tick or not scene.failure:
            rulings.append(_with_replacements(scene, _decide(scene, now, tick=tick), now, tick=tick))
    return rulings


def _matching(hosts: Iterable[Host], selector: Mapping[str, str] | None) -> Ground:
    """Return the hosts that the selector matches (R1.68, R1.69)."""
    if selector is None:
        return Ground()
    matching = (host for host in hosts if selector.items() <= host.labels.items())
    return Ground(sorted(matching, key=lambda host: (host.name, host.id)))


def _decide(scene: Scene, now: datetime, *, tick: bool) -> Ruling:
    """Return the ruling of the first step that applies (R4.6)."""
    demand = scene.demand
    if not demand.counts:
        return scene.ruling("")  # R4.12
    if demand.until is not None and demand.until > now:
        return _replace_lost(scene) or scene.ruling("")  # R4.8
    if demand.spread and not scene.fits:
        return scene.ruling(_problem(scene))  # R4.7
    if missing := _missing(scene):
        return _load_missing(scene, missing, now, tick=tick)
    met = bool(demand.ticks or demand.until) and len(scene.fitting) >= scene.wanted
    cleared = (ClearFlags(demand.model),) if met else ()
    if tick and len(scene.fitting) >= scene.wanted:
        actions = _burst(scene) or _pressure(scene) or _scale_down(scene, now)
        if actions:
            reasons = (action.reason for action in actions if isinstance(action, LoadAnother | Retire))
            return scene.ruling("; ".join(reasons), *cleared, *actions)
    return scene.ruling(_steady_reason(scene), *cleared)


def _with_replacements(scene: Scene, ruling: Ruling, now: datetime, *, tick: bool) -> Ruling:
    """Return the ruling, extended by replacements for a former definition if it loads and retires nothing.

    A cooldown does not prevent them: it concerns only the number of replicas. After a failed load,
    replacements pause for as long as a cooldown.
    """
    if any(isinstance(action, LoadAnother | Retire) for action in ruling.actions):
        return ruling
    renewal = Renewal(
        scene.demand.model,
        scene.revision,
        scene.rows,
        scene.fitting,
        scene.hosts,
        scene.replacing,
        scene.demand.spread,
    )
    is_paused = scene.failed_at is not None and scene.failed_at > now - COOLDOWN
    replacements = renewal.giving_way() or (renewal.successors() if tick and not is_paused else [])
    if not replacements:
        return ruling
    return scene.ruling(replacements[0].reason, *ruling.actions, *replacements)


def _missing(scene: Scene) -> int:
    """Return the number of replicas that are neither present nor being loaded (R4.7, R4.10)."""
    if scene.demand.spread:
        # A load for any node may take a slot on each of them; a load that replaces a replica has its node.
        waiting = len(scene.pinned - {row.node_id for row in scene.rows}) + len(scene.replacing)
        return 0 if scene.loads > scene.placed + waiting else len(_empty_nodes(scene))
    return max(scene.demand.minimum - len(scene.fitting) - scene.loads, 0)


def _empty_nodes(scene: Scene) -> list[Host]:
    """Return the nodes of a spread model without a pinned load or a replica that stays."""
    occupied_ids = {row.node_id for row in scene.rows if row.state != "unloading"} | scene.pinned
    return [host for host in scene.fits if host.id not in occupied_ids]


def _load_missing(scene: Scene, missing: int, now: datetime, *, tick: bool) -> Ruling:
    """Load the missing replicas as far as slots are free, or give the reason why not (R4.10)."""
    demand = scene.demand
    if problem := _problem(scene):
        # A slot that is being freed is no problem, and a definition may be written at any moment.
        if not tick or (scene.fits and scene.defined and scene.leaving):
            return scene.ruling(problem)
        return _unsatisfiable(scene, problem, now, pause=scene.defined)
    if scene.failure and demand.ticks + 1 >= MOST_TICKS:
        return _unsatisfiable(scene, _failed(scene), now)
    loads = _loads(scene, missing)
    if scene.failure:
        reason = f"{loads[0].reason}; {_failed(scene)}"
        return scene.ruling(reason, Unsatisfiable(demand.model, demand.ticks + 1, None, reason), *loads)
    # After the first load: the flags stay if no load can be requested.
    cleared = [ClearFlags(demand.model)] if demand.ticks or demand.until else []
    return scene.ruling(loads[0].reason, loads[0], *cleared, *loads[1:])


def _replace_lost(scene: Scene) -> Ruling | None:
    """Replace replicas that were lost since the last pass, even in a cooldown: they are known to fit.

    A slot that is being freed suffices: the load waits for it, and the next pass does not know of the loss.
    """
    lost = min(_missing(scene), scene.demand.seen - len(scene.serving))
    if lost <= 0 or not (scene.room > 0 or scene.leaving) or not scene.defined:
        return None
    if scene.demand.spread:
        loads = _loads(scene, lost)[:lost]
    else:
        reason = f"{lost} of {scene.demand.seen} were lost: {lost} more, although it rests"
        loads = [LoadAnother(scene.demand.model, scene.only, reason)] * lost
    return scene.ruling(loads[0].reason, *loads) if loads else None


def _loads(scene: Scene, missing: int) -> list[LoadAnother]:
    """Return as many loads as slots are free; for a spread model, one load for each of its nodes."""
    model = scene.demand.model
    if scene.demand.spread:
        empty_nodes = [host for host in _empty_nodes(scene) if scene.free(host)]
        suffix = f" and {len(empty_nodes) - _NAMED} more" if len(empty_nodes) > _NAMED else ""
        reason = f"one on each of {len(scene.fits)} nodes wanted, none on "
        reason += ", ".join(host.name for host in empty_nodes[:_NAMED]) + suffix
        return [LoadAnother(model, frozenset({host.id}), reason, pinned=True) for host in empty_nodes]
    count = min(missing, scene.room)
    counts = f"{len(scene.fitting)} there and {scene.loads} loading"
    reason = f"at least {scene.demand.minimum} wanted, {counts}: {count} more"
    return [LoadAnother(model, scene.only, reason)] * count


def _problem(scene: Scene) -> str:
    """Return the reason why nothing can be loaded; empty if something can."""
    if not scene.defined:
        return _undefined(scene)
    if not scene.fits:
        selector = scene.demand.selector
        if selector is None:
            return "its node selector cannot be read, so it matches no node"
        labels = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        return f"no healthy node has {labels}" if labels else "there is no healthy node"
    has_slot = (
        any(scene.free(host) for host in _empty_nodes(scene)) if scene.demand.spread else scene.room > 0
    )
    if has_slot:
        return ""
    counts = f"{len(scene.fitting)} there and {scene.loads} loading"
    nodes = f"{len(scene.fits)} {'node' if len(scene.fits) == 1 else 'nodes'} that it may run on"
    return f"{scene.wanted} wanted, {counts}, but no free slot on the {nodes}"


def _unsatisfiable(scene: Scene, reason: str, now: datetime, *, pause: bool = True) -> Ruling:
    """Count one more unsuccessful tick, and start a cooldown after enough of them (R4.23)."""
    ticks = scene.demand.ticks + 1
    until = now + COOLDOWN if pause and ticks >= MOST_TICKS else None
    if until is not None:
        reason = f"{reason}; nothing is tried until {until:%H:%M:%S} UTC"
    return scene.ruling(reason, Unsatisfiable(scene.demand.model, ticks, until, reason))


def _may_grow(scene: Scene) -> bool:
    """Return True if one more replica may be loaded beside the serving ones, with none being loaded."""
    # Every replica with a row may serve again, so it counts against the limit.
    total = len(scene.rows) + scene.loads - scene.placed
    below = scene.demand.maximum == 0 or total < scene.demand.maximum
    possible = scene.room > 0 and scene.defined and not scene.failure
    return bool(scene.serving) and below and possible and not scene.demand.spread and not scene.loads


def _burst(scene: Scene) -> list[Action]:
    """Load one more replica while every replica is busy and none is being loaded (R4.11, R4.14)."""
    if not _may_grow(scene) or not all(row.in_flight > 0 for row in scene.serving):
        return []
    count = len(scene.serving)
    reason = "the one replica is busy: one more" if count == 1 else f"all {count} replicas are busy: one more"
    return [LoadAnother(scene.demand.model, scene.only, reason)]


def _pressure(scene: Scene) -> list[Action]:
    """Load one more replica while requests cannot use the replica that caches their prompt (R4.13).

    If all requests begin with the same text, a further replica does not end the pressure. So a rule without a
    maximum gets at most one replica more than it wants.
    """
    if not scene.pressed or not _may_grow(scene):
        return []
    if scene.demand.maximum == 0 and len(scene.rows) > max(scene.demand.minimum, 1):
        return []
    model, requests = scene.demand.model, f"{scene.pressed} request{'' if scene.pressed == 1 else 's'}"
    reason = (
        f"{requests} within a minute not sent to the replica that remembers the prompt: too busy; one more"
    )
    return [LoadAnother(model, scene.only, reason), EndPressure(model)]


def _scale_down(scene: Scene, now: datetime) -> list[Action]:
    """Retire idle replicas beyond the minimum, those on nodes outside the selector first (R4.17, R4.18)."""
    fitting_ids = {row.id for row in scene.fitting}
    protected_ids = {row.id for row in _first_of_each_node(scene)} if scene.demand.spread else set()
    idle = [row for row in scene.serving if not row.in_flight and now - row.idle_since > IDLE_FOR]
    idle = [row for row in idle if row.id not in protected_ids]
    idle.sort(key=lambda row: (row.id in fitting_ids, -row.index, row.idle_since, row.id))
    surplus = len(scene.serving) - max(scene.wanted, 1)
    fitting_surplus = len(scene.fitting) - scene.wanted
    victims: list[Placed] = []
    for row in idle[: max(surplus, 0)]:
        if row.id in fitting_ids:
            if fitting_surplus <= 0:
                continue
            fitting_surplus -= 1
        victims.append(row)
    if _would_burst(scene, victims):
        victims.pop()
    return [_retire(scene, row, now) for row in victims]


def _first_of_each_node(scene: Scene) -> Iterable[Placed]:
    """Return the replicas that a spread model keeps."""
    first_by_node: dict[UUID, Placed] = {}
    for row in scene.fitting:
        first_by_node.setdefault(row.node_id, row)
    return first_by_node.values()


def _would_burst(scene: Scene, victims: Sequence[Placed]) -> bool:
    """Return True if all remaining replicas are busy, so that the next tick would load a replica again."""
    victim_ids = {row.id for row in victims}
    remaining = [row for row in scene.serving if row.id not in victim_ids]
    below = scene.demand.maximum == 0 or len(remaining) < scene.demand.maximum
    return bool(victims) and not scene.demand.spread and below and all(row.in_flight for row in remaining)


def _retire(scene: Scene, row: Placed, now: datetime) -> Retire:
    minutes = int((now - row.idle_since).total_seconds() // 60)
    floor = max(scene.wanted, 1)
    replica = f"replica {row.index} on {scene.hosts[row.node_id].name}"
    reason = f"{replica} idle for {minutes} min and more than {floor} there: it is retired"
    return Retire(scene.demand.model, row.id, reason)


def _steady_reason(scene: Scene) -> str:
    """Return the reason why the rule needs no action."""
    if not scene.defined:
        return _undefined(scene)
    if scene.failure:
        return _failed(scene)
    if scene.loads:
        return f"{scene.loads} loading"
    if not scene.fits:
        return _problem(scene)
    return f"satisfied: {len(scene.serving)} there"


def _undefined(scene: Scene) -> str:
    return f"no model {scene.demand.model} is defined in the models folder"


def _failed(scene: Scene) -> str:
    return f"the last load failed: {scene.failure}"
