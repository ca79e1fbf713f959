"""What each scheduling rule needs now (R4.6 to R4.23), from one picture of the fleet; pure.

`Fleet` and `Demand`s -> `plan` -> a `Ruling` for each rule: what the pass is to do, and a sentence of why.
The order is the reference's: spread, cooldown, minimum, busy burst, pressure, scale-down. Where none of these
has replicas to bring or to retire, those of a former definition are replaced (`renewal.py`).

Replicas count where requests may find them: loaded, on a healthy node that the selector chooses. Others serve
until they are idle. A load under way counts as the replica that it will be.
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
"""C2: how long nothing ran on a replica that is retired."""
MOST_TICKS = 3
"""C9: passes without success before the next ones are left out."""
COOLDOWN = timedelta(minutes=5)
"""C10: for how long they are."""
_NAMED = 5
"""Nodes that a reason names."""


def plan(fleet: Fleet, demands: Iterable[Demand], now: datetime, *, tick: bool) -> list[Ruling]:
    """The rulings, by model; the order of rows does not matter.

    Without `tick` something has changed between two ticks: then only what is missing is asked for, because
    bursts, idle replicas and failures are counted by ticks (R4.14, R4.23).
    """
    rows, hosts = defaultdict(list), {host.id: host for host in fleet.hosts}
    for replica in sorted(fleet.replicas, key=lambda one: (one.index, one.id)):
        rows[replica.model].append(replica)
    chosen: dict[tuple[tuple[str, str], ...] | None, Ground] = {}
    found = []
    for demand in sorted(demands, key=lambda one: one.model):
        key = None if demand.selector is None else tuple(sorted(demand.selector.items()))
        if key not in chosen:
            chosen[key] = _matching(fleet.hosts, demand.selector)
        own = rows[demand.model]
        placed = sum(row.state in LOADING for row in own)
        failure = fleet.failures.get(demand.model)
        fresh = failure is not None and demand.looked_at is not None and failure.at > demand.looked_at
        scene = Scene(
            demand,
            fits=chosen[key],
            hosts=hosts,
            rows=own,
            serving=[row for row in own if row.state == "loaded" and row.node_id in hosts],
            # A load may have begun after its count was read.
            loads=max(fleet.loads.get(demand.model, 0), placed),
            placed=placed,
            pinned=fleet.pinned.get(demand.model, frozenset()),
            failure=failure.error if failure and fresh else "",
            failed_at=failure.at if failure else None,
            defined=fleet.defined is None or demand.model in fleet.defined,
            revision=fleet.revisions.get(demand.model, ""),
            replacing={one.id: fleet.replacing[one.id] for one in own if one.id in fleet.replacing},
            pressed=fleet.pressed.get(demand.model, 0),
        )
        # A failure is counted by the next tick, so an earlier pass must not have looked after it.
        if tick or not scene.failure:
            found.append(_renewed(scene, _decide(scene, now, tick=tick), now, tick=tick))
    return found


def _matching(hosts: Iterable[Host], selector: Mapping[str, str] | None) -> Ground:
    """R1.68, R1.69."""
    if selector is None:
        return Ground()
    found = (host for host in hosts if selector.items() <= host.labels.items())
    return Ground(sorted(found, key=lambda host: (host.name, host.id)))


def _decide(scene: Scene, now: datetime, *, tick: bool) -> Ruling:
    """R4.6: the first step that has something to say."""
    demand = scene.demand
    if not demand.counts:
        return scene.ruling("")  # R4.12
    if demand.until is not None and demand.until > now:
        return _refill(scene) or scene.ruling("")  # R4.8
    if demand.spread and not scene.fits:
        return scene.ruling(_problem(scene))  # R4.7
    if missing := _missing(scene):
        return _fill(scene, missing, now, tick=tick)
    met = bool(demand.ticks or demand.until) and len(scene.fitting) >= scene.wanted
    cleared = (ClearFlags(demand.model),) if met else ()
    if tick and len(scene.fitting) >= scene.wanted:
        actions = _burst(scene) or _pressure(scene) or _scale_down(scene, now)
        if actions:
            reasons = (action.reason for action in actions if isinstance(action, LoadAnother | Retire))
            return scene.ruling("; ".join(reasons), *cleared, *actions)
    return scene.ruling(_at_rest(scene), *cleared)


def _renewed(scene: Scene, ruling: Ruling, now: datetime, *, tick: bool) -> Ruling:
    """The ruling, and how a former definition's replicas are replaced if it brings and retires none.

    Also while a cooldown lasts: that is about how many there are. After a load that failed it rests as long.
    """
    if any(isinstance(action, LoadAnother | Retire) for action in ruling.actions):
        return ruling
    known = Renewal(
        scene.demand.model,
        scene.revision,
        scene.rows,
        scene.fitting,
        scene.hosts,
        scene.replacing,
        scene.demand.spread,
    )
    rests = scene.failed_at is not None and scene.failed_at > now - COOLDOWN
    more = known.giving_way() or (known.successors() if tick and not rests else [])
    if not more:
        return ruling
    return scene.ruling(more[0].reason, *ruling.actions, *more)


def _missing(scene: Scene) -> int:
    """R4.7, R4.10: how many replicas are neither there nor on their way."""
    if scene.demand.spread:
        # A load that is for any node may get its slot on each of them; one that replaces has its node.
        waiting = len(scene.pinned - {row.node_id for row in scene.rows}) + len(scene.replacing)
        return 0 if scene.loads > scene.placed + waiting else len(_bare(scene))
    return max(scene.demand.minimum - len(scene.fitting) - scene.loads, 0)


def _bare(scene: Scene) -> list[Host]:
    """Nodes that a spread model is not on and no load is for, or that it is about to leave."""
    there = {row.node_id for row in scene.rows if row.state != "unloading"} | scene.pinned
    return [host for host in scene.fits if host.id not in there]


def _fill(scene: Scene, missing: int, now: datetime, *, tick: bool) -> Ruling:
    """R4.10: loads what is missing, as far as there is room, or says why not."""
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
    # After the first one: flags stay if nothing can be asked for.
    cleared = [ClearFlags(demand.model)] if demand.ticks or demand.until else []
    return scene.ruling(loads[0].reason, loads[0], *cleared, *loads[1:])


def _refill(scene: Scene) -> Ruling | None:
    """In a cooldown only what was there a moment ago is missed: that it could be had is known.

    A slot that is being freed will do: the load waits for it, and the next pass does not know of the loss.
    """
    lost = min(_missing(scene), scene.demand.seen - len(scene.serving))
    if lost <= 0 or not (scene.room > 0 or scene.leaving) or not scene.defined:
        return None
    if scene.demand.spread:
        loads = _loads(scene, lost)[:lost]
    else:
        said = f"{lost} of {scene.demand.seen} were lost: {lost} more, although it rests"
        loads = [LoadAnother(scene.demand.model, scene.only, said)] * lost
    return scene.ruling(loads[0].reason, *loads) if loads else None


def _loads(scene: Scene, missing: int) -> list[LoadAnother]:
    """As many as there is room for. A spread model has a load for each of its nodes."""
    model = scene.demand.model
    if scene.demand.spread:
        bare = [host for host in _bare(scene) if scene.free(host)]
        others = f" and {len(bare) - _NAMED} more" if len(bare) > _NAMED else ""
        reason = f"one on each of {len(scene.fits)} nodes wanted, none on "
        reason += ", ".join(host.name for host in bare[:_NAMED]) + others
        return [LoadAnother(model, frozenset({host.id}), reason, pinned=True) for host in bare]
    more = min(missing, scene.room)
    has = len(scene.fitting)
    reason = f"at least {scene.demand.minimum} wanted, {has} there and {scene.loads} loading: {more} more"
    return [LoadAnother(model, scene.only, reason)] * more


def _problem(scene: Scene) -> str:
    """Why nothing can be loaded; empty if something can."""
    if not scene.defined:
        return _undefined(scene)
    if not scene.fits:
        selector = scene.demand.selector
        if selector is None:
            return "its node selector cannot be read, so it matches no node"
        labels = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        return f"no healthy node has {labels}" if labels else "there is no healthy node"
    room = any(scene.free(host) for host in _bare(scene)) if scene.demand.spread else scene.room > 0
    if room:
        return ""
    there = f"{len(scene.fitting)} there and {scene.loads} loading"
    nodes = f"{len(scene.fits)} {'node' if len(scene.fits) == 1 else 'nodes'} that it may run on"
    return f"{scene.wanted} wanted, {there}, but no free slot on the {nodes}"


def _unsatisfiable(scene: Scene, reason: str, now: datetime, *, pause: bool = True) -> Ruling:
    """R4.23: one tick more, and a cooldown after enough of them."""
    ticks = scene.demand.ticks + 1
    until = now + COOLDOWN if pause and ticks >= MOST_TICKS else None
    if until is not None:
        reason = f"{reason}; nothing is tried until {until:%H:%M:%S} UTC"
    return scene.ruling(reason, Unsatisfiable(scene.demand.model, ticks, until, reason))


def _may_grow(scene: Scene) -> bool:
    """Whether one more may be loaded beside those that serve, with none on its way."""
    # Whatever has a row may serve again, so it counts against the limit.
    there = len(scene.rows) + scene.loads - scene.placed
    below = scene.demand.maximum == 0 or there < scene.demand.maximum
    possible = scene.room > 0 and scene.defined and not scene.failure
    return bool(scene.serving) and below and possible and not scene.demand.spread and not scene.loads


def _burst(scene: Scene) -> list[Action]:
    """R4.11, R4.14: one more while every replica is busy, and none is on its way."""
    if not _may_grow(scene) or not all(row.in_flight > 0 for row in scene.serving):
        return []
    count = len(scene.serving)
    said = "the one replica is busy: one more" if count == 1 else f"all {count} replicas are busy: one more"
    return [LoadAnother(scene.demand.model, scene.only, said)]


def _pressure(scene: Scene) -> list[Action]:
    """R4.13: one more while requests are kept from the replica that remembers their prompt.

    All requests may begin with one text, and then a further replica ends no pressure. So a rule without a
    maximum has at most one more than it wants.
    """
    if not scene.pressed or not _may_grow(scene):
        return []
    if scene.demand.maximum == 0 and len(scene.rows) > max(scene.demand.minimum, 1):
        return []
    model, many = scene.demand.model, f"{scene.pressed} request{'' if scene.pressed == 1 else 's'}"
    said = f"{many} within a minute not sent to the replica that remembers the prompt: too busy; one more"
    return [LoadAnother(model, scene.only, said), EndPressure(model)]


def _scale_down(scene: Scene, now: datetime) -> list[Action]:
    """R4.17, R4.18: idle ones beyond the floor; those that the rule does not want there come first."""
    wanted = {row.id for row in scene.fitting}
    kept = {row.id for row in _first_of_each_node(scene)} if scene.demand.spread else set()
    idle = [row for row in scene.serving if not row.in_flight and now - row.idle_since > IDLE_FOR]
    idle = [row for row in idle if row.id not in kept]
    idle.sort(key=lambda row: (row.id in wanted, -row.index, row.idle_since, row.id))
    beyond = len(scene.serving) - max(scene.wanted, 1)
    spare = len(scene.fitting) - scene.wanted
    victims: list[Placed] = []
    for row in idle[: max(beyond, 0)]:
        if row.id in wanted:
            if spare <= 0:
                continue
            spare -= 1
        victims.append(row)
    if _would_burst(scene, victims):
        victims.pop()
    return [_retire(scene, row, now) for row in victims]


def _first_of_each_node(scene: Scene) -> Iterable[Placed]:
    """The replicas that a spread model keeps."""
    kept: dict[UUID, Placed] = {}
    for row in scene.fitting:
        kept.setdefault(row.node_id, row)
    return kept.values()


def _would_burst(scene: Scene, victims: Sequence[Placed]) -> bool:
    """Whether all that is left is busy, so that the next tick would load again what went."""
    gone = {row.id for row in victims}
    left = [row for row in scene.serving if row.id not in gone]
    below = scene.demand.maximum == 0 or len(left) < scene.demand.maximum
    return bool(victims) and not scene.demand.spread and below and all(row.in_flight for row in left)


def _retire(scene: Scene, row: Placed, now: datetime) -> Retire:
    minutes = int((now - row.idle_since).total_seconds() // 60)
    floor = max(scene.wanted, 1)
    which = f"replica {row.index} on {scene.hosts[row.node_id].name}"
    reason = f"{which} idle for {minutes} min and more than {floor} there: it is retired"
    return Retire(scene.demand.model, row.id, reason)


def _at_rest(scene: Scene) -> str:
    """Why nothing is done."""
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
