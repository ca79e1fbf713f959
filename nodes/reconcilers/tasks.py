"""Short, idempotent tasks that django-q2 runs for the fleet."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from localai_cluster import clock, conf
from localai_cluster.accounts import audit
from localai_cluster.locks import Lock, try_lock
from localai_cluster.outage import left_out_in_an_outage
from nodes.backends import upgrade_state
from nodes.reconcilers import intents, replicas, stuck
from nodes.reconcilers.liveness import Limits, apply, observe, plan_liveness
from nodes.registry import bus_credentials, joining, pending, samples, services, timeline
from nodes.replicas import checks, fleet_log, reasons, recount

PRUNED_AT_ONCE = 5000

log = logging.getLogger(__name__)


@left_out_in_an_outage
def liveness() -> None:
    """One liveness pass (R5.1); at once if another process is at it."""
    with try_lock(Lock.LIVENESS) as mine:
        if not mine:
            return
        now, cluster = clock.now(), conf.cluster()
        limits = Limits(
            node=cluster.node_stale_after, web=cluster.web_stale_after, hold=cluster.mass_silence_hold
        )
        plan = plan_liveness(observe(), now, limits)
        nodes, processes = apply(plan, now, limits)
    if plan.hold and plan.hold.since == now:
        log.error("liveness: %d of %d nodes are silent together and kept", len(plan.held), plan.of)
    if nodes or processes:
        log.warning("liveness: marked %d nodes offline, removed %d dead web processes", nodes, processes)


@left_out_in_an_outage
def state_pass() -> None:
    """Has controllers look at engines in question, corrects counts of requests, tells of engines that stay.

    At once if another process is at it.
    """
    with try_lock(Lock.STATE_PASS) as mine:
        if not mine:
            return
        now = clock.now()
        checks.ask(heard_since=now - timedelta(seconds=conf.cluster().node_stale_after), now=now)
        corrected = recount.recount()
    if told := stuck.tell(now=now):
        log.warning("%d engines could not be stopped: see the operations", told)
    if corrected:
        log.warning("counts of running requests corrected on %d replicas", corrected)


@left_out_in_an_outage
def finish_drains() -> None:
    """Ends the drains that are over; at once if another process is at it."""
    with try_lock(Lock.DRAINS) as mine:
        ended = services.finish_drains(now=clock.now()) if mine else 0
    if ended:
        log.info("drains: the replicas of %d nodes have gone", ended)


@left_out_in_an_outage
def scale() -> None:
    """One tick of the replica pass (R4.1); at once if another process is at it (R4.2)."""
    replicas.look(tick=True)


@left_out_in_an_outage
def keep_samples() -> None:
    """Keeps this minute's memory of all nodes; another process at it would write the same."""
    samples.keep(now=clock.now())


@left_out_in_an_outage
def prune_timeline() -> None:
    """Deletes events, join tokens, audit, reasons of placement and what those saw, past their retention.

    The last two are bounded by their size too: a fleet may make a decision every second. A chunk a
    transaction; at once if another process is at it. Expired credentials for the bus go with them, and
    pending nodes that have been silent for a day.
    """
    now, cluster = clock.now(), conf.cluster()
    before = now - timedelta(seconds=cluster.event_retention)
    snapshots_before = now - timedelta(seconds=cluster.snapshot_retention)
    kept = [(prune, before) for prune in (timeline.prune, joining.prune, audit.prune)]
    kept.append((reasons.prune, _later(before, reasons.fitting_since(cluster.decision_space))))
    kept.append((fleet_log.prune, _later(snapshots_before, fleet_log.fitting_since(cluster.decision_space))))
    for prune, since in kept:
        while _chunk(prune, since) == PRUNED_AT_ONCE:
            pass
    bus_credentials.prune(now)
    if expired := pending.expire(now=now):
        log.info("%d pending nodes were silent for a day and are removed", expired)


@left_out_in_an_outage
def check_upgrades() -> None:
    """Asks a controller for a check (R6.35); one that is asked for already is the same one."""
    with try_lock(Lock.UPGRADE_CHECK) as mine:
        if mine:
            upgrade_state.ask()


def _later(one: datetime, other: datetime | None) -> datetime:
    return one if other is None else max(one, other)


def _chunk(prune: Callable[..., int], before: datetime) -> int:
    with try_lock(Lock.TIMELINE) as mine:
        return prune(before=before, limit=PRUNED_AT_ONCE) if mine else 0


@left_out_in_an_outage
def clean_intents() -> None:
    """Ends work on backends whose node cannot take it; at once if another process is at it."""
    intents.clean(now=clock.now())
