"""Short, idempotent tasks that django-q2 runs for the fleet."""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from asgiref.sync import async_to_sync

from localai_cluster.accounts import audit
from localai_cluster.kit import clock, conf, periodic
from localai_cluster.kit.outage import skip_during_outage
from localai_cluster.kit.periodic import RecurringTask
from localai_cluster.kit.transactions import Lock, try_lock, try_lock_across
from nodes.backends import upgrade_state
from nodes.definitions import store
from nodes.definitions.folder import FolderUnresponsive
from nodes.downloads import partial_files
from nodes.figures import store as figures
from nodes.loading import load_info
from nodes.loading.files_in_use import in_folder_thread, paths_of_active_imports
from nodes.models import PlacementLog, PlacementRecord, StoredResponse
from nodes.reconcilers import intents, replicas
from nodes.reconcilers.liveness import Limits, apply, observe, plan_liveness, recount
from nodes.registry import bus_credentials, joining, lifecycle, pending, timeline
from nodes.replicas import checks, unload_requests

# Every 5 s, not every 15 (C14): a dead web process's counts must be true again within 30 s.
SCHEDULES = [
    RecurringTask("nodes: liveness", "nodes.reconcilers.tasks.liveness", "* * * * * */5"),
    # C1. What it asks for is done by controllers, which are on the bus.
    RecurringTask("nodes: state pass", "nodes.reconcilers.tasks.state_pass", "* * * * * */30"),
    RecurringTask("nodes: ended drains", "nodes.reconcilers.tasks.finish_drains", "* * * * * */5"),
    # C1; between two ticks the controllers run the pass after each change (`replicas.py`).
    RecurringTask("nodes: replicas", "nodes.reconcilers.tasks.scale", "* * * * * */30"),
    RecurringTask("nodes: figures", "nodes.reconcilers.tasks.sample_figures", "* * * * * */10"),
    RecurringTask("nodes: figures of past hours", "nodes.reconcilers.tasks.pack_figures", "* * * * * 25"),
    RecurringTask("nodes: timeline", "nodes.reconcilers.tasks.prune_timeline", "*/10 * * * * 0"),
    RecurringTask("nodes: stale intents", "nodes.reconcilers.tasks.clean_intents", "* * * * * */15"),
    # Every six hours (C47); the first one is a controller's, ten seconds after it starts.
    RecurringTask("backends: upgrade check", "nodes.reconcilers.tasks.check_upgrades", "23 */6 * * * 0"),
]


PRUNE_CHUNK_ROWS = 5000
PRUNE_SECONDS = 5.0
"""Time limit of one run of `prune_timeline`: the tasks of a process wait for each other."""
PACK_SECONDS = 1.0
"""Time limit of one run of `pack_figures`, which continues a minute later."""

log = logging.getLogger(__name__)


@skip_during_outage
def liveness() -> None:
    """Run one liveness pass (R5.1); return at once if another process holds the lock."""
    with try_lock(Lock.LIVENESS) as locked:
        if not locked:
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


@skip_during_outage
def state_pass() -> None:
    """Wake the controllers to check suspect engines, and correct the in-flight counts of replicas.

    The pass also reports engines that do not stop, and learns model sizes from the memory readings of nodes.
    Returns at once if another process holds the lock.
    """
    with try_lock_across(Lock.STATE_PASS) as locked:
        if not locked:
            return
        now = clock.now()
        checks.request_checks(
            heartbeat_since=now - timedelta(seconds=conf.cluster().node_stale_after), now=now
        )
        corrected = recount()
        load_info.learn_from_readings(now=now)
    if stuck_engines := unload_requests.report_stuck(now=now):
        log.warning("%d engines could not be stopped: see the operations", stuck_engines)
    if corrected:
        log.warning("counts of running requests corrected on %d replicas", corrected)


@skip_during_outage
def finish_drains() -> None:
    """End the finished drains; return at once if another process holds the lock."""
    with try_lock(Lock.DRAINS) as locked:
        ended = lifecycle.finish_drains(now=clock.now()) if locked else 0
    if ended:
        log.info("drains: the replicas of %d nodes have gone", ended)


@skip_during_outage
def scale() -> None:
    """Run one tick of the replica pass (R4.1); return at once if another process holds the lock (R4.2)."""
    replicas.run_pass(tick=True)


@skip_during_outage
def sample_figures() -> None:
    """Store a sample of the figures of all nodes. A second process would write the same rows."""
    now = clock.now()
    figures.store_samples(heard_since=now - timedelta(seconds=conf.cluster().node_stale_after), now=now)


@skip_during_outage
def pack_figures() -> None:
    """Aggregate figures of past hours and days, and delete old ones; return at once if the lock is held."""
    figures.maintain(now=clock.now(), limit=PACK_SECONDS)


@skip_during_outage
def prune_timeline() -> None:
    """Delete rows past their retention. Return at once if another process holds the lock.

    These are events, join tokens, audit entries, failed runs of tasks, decision records and their snapshots,
    stored responses that were not used, old revisions of definitions, expired bus credentials, pending nodes
    that have been silent for a day, and abandoned downloads. Decision records and snapshots are also limited
    by their size, because a fleet may make a decision every second. Each chunk is a transaction; the next run
    continues after `PRUNE_SECONDS`.
    """
    now, cluster = clock.now(), conf.cluster()
    before = now - timedelta(seconds=cluster.event_retention)
    snapshots_before = now - timedelta(seconds=cluster.snapshot_retention)
    prunes: list[tuple[Callable[..., int], datetime]] = [
        (prune, before) for prune in (timeline.prune, joining.prune, audit.prune, periodic.prune_failures)
    ]
    responses_before = now - timedelta(seconds=cluster.response_retention)
    prunes.append((StoredResponse.objects.prune, responses_before))
    prunes += [(prune, now - store.RETENTION) for prune in (store.prune_revisions, store.prune_deleted)]
    for rows, oldest in ((PlacementRecord.objects, before), (PlacementLog.objects, snapshots_before)):
        prunes.append(
            (rows.prune, max(oldest, rows.retention_cutoff(cluster.decision_storage_limit) or oldest))
        )
    deadline = clock.monotonic() + PRUNE_SECONDS
    for prune, since in prunes:
        while _prune_chunk(prune, since) == PRUNE_CHUNK_ROWS and clock.monotonic() < deadline:
            pass
    bus_credentials.prune(now)
    if expired := pending.expire(now=now):
        log.info("%d pending nodes were silent for a day and are removed", expired)
    remove_old_partials(now)


def remove_old_partials(now: datetime) -> None:
    """Delete the partial files of abandoned downloads, unless the models folder does not respond."""
    models, keep = conf.cluster().models_path, paths_of_active_imports()
    try:
        removed = async_to_sync(in_folder_thread)(partial_files.remove_old_partials, models, now, keep)
    except (FolderUnresponsive, OSError) as error:
        log.warning(
            "cannot remove old partial downloads from the models folder; the next run tries again: %s", error
        )
        return
    if removed:
        log.info("%d abandoned downloads are removed", removed)


@skip_during_outage
def check_upgrades() -> None:
    """Request an upgrade check (R6.35); nothing happens if one is requested already."""
    with try_lock(Lock.UPGRADE_CHECK) as locked:
        if locked:
            upgrade_state.request_check()


def _prune_chunk(prune: Callable[..., int], before: datetime) -> int:
    with try_lock(Lock.TIMELINE) as locked:
        return prune(before=before, limit=PRUNE_CHUNK_ROWS) if locked else 0


@skip_during_outage
def clean_intents() -> None:
    """End intents whose node cannot take them; return at once if another process holds the lock."""
    intents.end_stale_intents(now=clock.now())
