"""Health verdicts of the system's parts: pure functions from facts to a state, a sentence and a hint.

`ok` needs no action, `warning` means degraded or soon degraded, `error` means that the part does not work.
`since` is null if unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from localai_cluster.kit.disk import DiskUsage
from localai_cluster.kit.periodic import MAX_TASK_WAIT_SECONDS, MAX_TRIGGER_DELAY
from localai_cluster.kit.quantities import counted
from nodes.registry.mass_silence import CurrentHold
from operations.executor import controllers

DISK_WARNING_FRACTION = 0.10
"""Free fraction of the disk below which the verdict is a warning."""
DISK_ERROR_FRACTION = 0.03
"""Free fraction of the disk below which the verdict is an error."""
_MAX_NAMED_FILES = 3
"""Maximum number of files that one sentence names."""
_MAX_TASK_WAIT = timedelta(seconds=MAX_TASK_WAIT_SECONDS)


class State(StrEnum):
    """Health of a part, in increasing severity."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Verdict:
    """Health verdict of one part of the system."""

    id: str
    name: str
    state: State
    text: str
    hint: str = ""
    since: datetime | None = None


@dataclass(frozen=True)
class Process:
    """A web process or a controller that has sent a heartbeat."""

    kind: str
    name: str
    version: str
    started_at: datetime
    seen_at: datetime
    bus_connected: bool = True


@dataclass(frozen=True)
class Schedule:
    """A recurring task. `last_ok` is True if its last run succeeded; None if it has not run yet."""

    id: int
    name: str
    cron: str
    paused: bool
    next_run: datetime | None
    last_run: datetime | None = None
    last_ok: bool | None = None


@dataclass(frozen=True)
class Work:
    """Counts of unfinished work. `oldest` is the creation time of the oldest unfinished item."""

    waiting: int = 0
    running: int = 0
    oldest: datetime | None = None


@dataclass(frozen=True)
class Facts:
    """Snapshot from which the verdicts are computed.

    `probes` maps a server's id to `ok` or its error, and to the time since which this process gets that
    result.
    """

    version: str
    database: str
    database_since: datetime | None
    """None while the database is unreachable; then `database` is empty."""
    probes: Mapping[str, tuple[str, datetime]]
    processes: Sequence[Process] = ()
    web_silent_after: float = controllers.SILENCE_LIMIT
    """Seconds without a heartbeat after which a web process counts as dead."""
    schedules: Sequence[Schedule] = ()
    tasks_wait_since: datetime | None = None
    tasks_ended_at: datetime | None = None
    workers: Mapping[str, int] = field(default_factory=dict)
    held: CurrentHold | None = None
    """The mass-disruption hold: nodes that became silent together and are not marked offline yet."""
    other_versions: int = 0
    """Approved workers that do not run this server's version."""
    operations: Work = Work()
    intents: Work = Work()
    failures: int = 0
    oldest_failure: datetime | None = None
    models_folder: str = ""
    """Reason why the folder of model definitions cannot be read; empty if it can."""
    broken_definitions: Mapping[str, str] = field(default_factory=dict)
    """Reason why a file cannot be used, by file name."""
    disk: DiskUsage | None = None
    """Usage of the data folder's disk; None if the disk did not respond in time."""
    data_dir: str = ""
    is_database_away: bool = False
    """True if the database is unreachable; then the fields from rows have their defaults."""


def verdicts(facts: Facts, now: datetime) -> list[Verdict]:
    """Return the verdict of every part, in the order of the page."""
    if facts.is_database_away:
        return [_database_away_verdict(facts), *_dependency_verdicts(facts), _disk_verdict(facts)]
    return [
        Verdict("database", "Database", State.OK, facts.database, since=facts.database_since),
        *_dependency_verdicts(facts),
        _web_verdict(facts, now),
        _controllers_verdict(facts, now),
        _tasks_verdict(facts, now),
        _schedules_verdict(facts, now),
        _workers_verdict(facts),
        _work_verdict(facts),
        _definitions_verdict(facts),
        _versions_verdict(facts, now),
        _disk_verdict(facts),
    ]


def _database_away_verdict(facts: Facts) -> Verdict:
    text, since = facts.probes.get("database", ("not asked", None))
    hint = "Check PostgreSQL and DATABASE_URL. What the other parts do is not known until then."
    if facts.disk is not None and facts.disk.is_full:
        text, hint = f"{text}; the disk is full: {facts.disk}", f"Free space on {facts.disk.mount}. {hint}"
    return Verdict("database", "Database", State.ERROR, text, hint, since)


def _dependency_verdicts(facts: Facts) -> list[Verdict]:
    return [
        _probe_verdict(
            facts, "nats", "NATS", "Commands to workers are paused. Check the server and LOCALAI_NATS_URL."
        ),
        _probe_verdict(
            facts, "redis", "Redis or Valkey", "Pages hear of changes later. Check the server and REDIS_URL."
        ),
    ]


def worst(parts: Sequence[Verdict]) -> State:
    """Return the most severe state of these verdicts."""
    return max((part.state for part in parts), key=list(State).index, default=State.OK)


def _probe_verdict(facts: Facts, id: str, name: str, hint: str) -> Verdict:
    text, since = facts.probes.get(id, ("not asked", None))
    if text == "ok":
        return Verdict(id, name, State.OK, "Reachable", since=since)
    return Verdict(id, name, State.ERROR, text, hint, since)


def _alive_processes(facts: Facts, kind: str, now: datetime) -> list[Process]:
    """Return the processes of a kind with a recent heartbeat; a row stays for some time after its process."""
    limit = facts.web_silent_after if kind == "web" else controllers.SILENCE_LIMIT
    silent = timedelta(seconds=limit)
    return [
        process for process in facts.processes if process.kind == kind and now - process.seen_at <= silent
    ]


def _web_verdict(facts: Facts, now: datetime) -> Verdict:
    processes = _alive_processes(facts, "web", now)
    since = min((process.started_at for process in processes), default=None)
    return Verdict(
        "web", "Web processes", State.OK, counted(len(processes), "process", "processes"), since=since
    )


def _controllers_verdict(facts: Facts, now: datetime) -> Verdict:
    processes = _alive_processes(facts, "controller", now)
    if not processes:
        last_seen_at = max(
            (process.seen_at for process in facts.processes if process.kind == "controller"), default=None
        )
        hint = "Start one with `manage.py controller`. Operations and schedules wait until then."
        return Verdict("controllers", "Controllers", State.ERROR, "none is running", hint, last_seen_at)
    text, since = counted(len(processes), "controller"), min(process.started_at for process in processes)
    disconnected = [process.name for process in processes if not process.bus_connected]
    if disconnected:
        hint = "Check NATS and LOCALAI_NATS_URL of these controllers."
        text = f"{text}; without NATS: {', '.join(disconnected)}"
        return Verdict("controllers", "Controllers", State.WARNING, text, hint, since)
    return Verdict("controllers", "Controllers", State.OK, text, since=since)


def _tasks_verdict(facts: Facts, now: datetime) -> Verdict:
    waits = facts.tasks_wait_since
    if waits is not None and now - waits > _MAX_TASK_WAIT:
        hint = "Start `manage.py qcluster`. Silent nodes and expired leases go unnoticed until then."
        return Verdict("tasks", "Scheduled tasks", State.ERROR, "no process runs them", hint, waits)
    ended = facts.tasks_ended_at
    text = "Running" if ended else "none has run yet"
    return Verdict("tasks", "Scheduled tasks", State.OK, text, since=ended)


def _schedules_verdict(facts: Facts, now: datetime) -> Verdict:
    running = [schedule for schedule in facts.schedules if not schedule.paused]
    late = [
        schedule
        for schedule in running
        if schedule.next_run is not None and now - schedule.next_run > MAX_TRIGGER_DELAY
    ]
    if late:
        hint = "Controllers trigger the schedules: start one, or look at its log."
        since = min(schedule.next_run for schedule in late if schedule.next_run is not None)
        return Verdict("schedules", "Schedules", State.ERROR, f"overdue: {_join_names(late)}", hint, since)
    failed = [schedule for schedule in running if schedule.last_ok is False]
    if failed:
        hint = "The admin has the reason under Failed tasks."
        since = min(schedule.last_run for schedule in failed if schedule.last_run is not None)
        return Verdict("schedules", "Schedules", State.WARNING, f"failed: {_join_names(failed)}", hint, since)
    paused = [schedule for schedule in facts.schedules if schedule.paused]
    if paused:
        hint = "Resume them in the admin under Scheduled tasks."
        return Verdict("schedules", "Schedules", State.WARNING, f"paused: {_join_names(paused)}", hint)
    if not facts.schedules:
        hint = "The first controller makes them."
        return Verdict("schedules", "Schedules", State.ERROR, "there are none", hint)
    return Verdict("schedules", "Schedules", State.OK, f"{len(running)} on time")


def _workers_verdict(facts: Facts) -> Verdict:
    counted = [f"{number} {status}" for status, number in sorted(facts.workers.items())]
    text = ", ".join(counted) or "no worker has registered"
    if facts.held:
        hint = "Check the network between this server and the workers. Nodes that are back by then are kept."
        return Verdict("workers", "Workers", State.ERROR, f"{text}; {facts.held}", hint, facts.held.since)
    if any(facts.workers.get(status) for status in ("offline", "unhealthy")):
        hint = "The Nodes page says since when and why."
        return Verdict("workers", "Workers", State.WARNING, text, hint)
    return Verdict("workers", "Workers", State.OK, text)


def _work_verdict(facts: Facts) -> Verdict:
    work, intents = facts.operations, facts.intents
    text = (
        f"{counted(work.running, 'operation')} running, {work.waiting} waiting; on nodes"
        f" {intents.running} running, {intents.waiting} waiting"
    )
    oldest = min((at for at in (work.oldest, intents.oldest) if at is not None), default=None)
    if facts.failures:
        text += f"; {counted(facts.failures, 'failure')} in the inbox"
        hint = "Retry or dismiss them in Activity, under Inbox."
        return Verdict("operations", "Operations", State.WARNING, text, hint, facts.oldest_failure)
    return Verdict("operations", "Operations", State.OK, text, since=oldest)


def _definitions_verdict(facts: Facts) -> Verdict:
    name, broken = "Model definitions", facts.broken_definitions
    if facts.models_folder:
        hint = "Check LOCALAI_MODELS_PATH on this web process's machine."
        return Verdict("models", name, State.ERROR, f"the models folder {facts.models_folder}", hint)
    if broken:
        listed = "; ".join(f"{file} {reason}" for file, reason in list(broken.items())[:_MAX_NAMED_FILES])
        suffix = f"; and {len(broken) - _MAX_NAMED_FILES} more" if len(broken) > _MAX_NAMED_FILES else ""
        hint = "Correct or remove the files: the models in them do not serve. The Models page lists them all."
        text = f"{counted(len(broken), 'file')} cannot be used: {listed}{suffix}"
        return Verdict("models", name, State.WARNING, text, hint)
    return Verdict("models", name, State.OK, "every file can be used")


def _versions_verdict(facts: Facts, now: datetime) -> Verdict:
    alive = [*_alive_processes(facts, "web", now), *_alive_processes(facts, "controller", now)]
    other_versions = sorted(
        {process.version for process in alive if process.version not in ("", facts.version)}
    )
    differences = [f"server processes also run {', '.join(other_versions)}"] if other_versions else []
    if facts.other_versions:
        differences.append(f"{counted(facts.other_versions, 'worker')} of another version")
    if differences:
        hint = "Restart the server processes on one version, and run the line of Add a node on those workers."
        return Verdict(
            "versions", "Versions", State.WARNING, f"{facts.version}; {'; '.join(differences)}", hint
        )
    return Verdict("versions", "Versions", State.OK, facts.version)


def _disk_verdict(facts: Facts) -> Verdict:
    name = "Disk of the data folder"
    if facts.disk is None:
        hint = "Check the disk or mount of CLUSTER_DATA_DIR on this web process's machine."
        return Verdict("disk", name, State.ERROR, f"{facts.data_dir} does not answer", hint)
    free_fraction = facts.disk.free / facts.disk.total if facts.disk.total else 0.0
    text = str(facts.disk)
    if free_fraction >= DISK_WARNING_FRACTION:
        return Verdict("disk", name, State.OK, text)
    state = State.ERROR if free_fraction < DISK_ERROR_FRACTION else State.WARNING
    return Verdict("disk", name, state, text, "Free space there, or move CLUSTER_DATA_DIR.")


def _join_names(schedules: Sequence[Schedule]) -> str:
    return ", ".join(schedule.name for schedule in schedules)
