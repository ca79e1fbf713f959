"""How the parts of the system are: pure, from what was read to a state, a sentence and what to do.

`ok` needs nobody; `warning` is degraded or soon will be; `error` is missing. `since` is null where unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from localai_cluster.disk import DiskUsage
from localai_cluster.periodic import SILENT_AFTER
from nodes.registry.mass_silence import Held
from operations.executor import controllers

OVERDUE = timedelta(seconds=30)
"""How late a schedule may be triggered."""
LITTLE_DISK, NO_DISK = 0.10, 0.03
"""Shares of the disk."""
_MOST_NAMED = 3
"""Files that one sentence names."""
_TASKS_WAIT = timedelta(seconds=SILENT_AFTER)


class State(StrEnum):
    """From well to bad."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Verdict:
    """One part of the system."""

    id: str
    name: str
    state: State
    text: str
    hint: str = ""
    since: datetime | None = None


@dataclass(frozen=True)
class Process:
    """A web process or a controller that has been heard."""

    kind: str
    name: str
    version: str
    started_at: datetime
    seen_at: datetime
    bus_connected: bool = True


@dataclass(frozen=True)
class Schedule:
    """A recurring task. `last_ok`: whether its last run ended well; None if there was none."""

    id: int
    name: str
    cron: str
    paused: bool
    next_run: datetime | None
    last_run: datetime | None = None
    last_ok: bool | None = None


@dataclass(frozen=True)
class Work:
    """What is to be done. `oldest`: since when the oldest of it has been there."""

    waiting: int = 0
    running: int = 0
    oldest: datetime | None = None


@dataclass(frozen=True)
class Facts:
    """What was read. `probes`: `ok` or what is wrong, and since when this process has known that."""

    version: str
    database: str
    database_since: datetime | None
    """Empty and None while the database is away."""
    probes: Mapping[str, tuple[str, datetime]]
    processes: Sequence[Process] = ()
    web_silent_after: float = controllers.SILENT_AFTER
    """Seconds without a sign of life after which a web process is thought to be gone."""
    schedules: Sequence[Schedule] = ()
    tasks_wait_since: datetime | None = None
    tasks_ended_at: datetime | None = None
    workers: Mapping[str, int] = field(default_factory=dict)
    held: Held | None = None
    """Nodes that fell silent together and are kept."""
    other_versions: int = 0
    """Approved workers that do not run this server's version."""
    operations: Work = Work()
    intents: Work = Work()
    failures: int = 0
    oldest_failure: datetime | None = None
    models_folder: str = ""
    """The reason why the folder of model definitions cannot be read, if so."""
    broken_definitions: Mapping[str, str] = field(default_factory=dict)
    """By file: the reason why it cannot be used."""
    disk: DiskUsage | None = None
    """None if the disk did not answer in time."""
    data_dir: str = ""
    is_database_away: bool = False
    """Then nothing that is read from rows is known."""


def verdicts(facts: Facts, now: datetime) -> list[Verdict]:
    """Every part, in the order of the page."""
    if facts.is_database_away:
        return [_database_away(facts), *_reached(facts), _disk(facts)]
    return [
        Verdict("database", "Database", State.OK, facts.database, since=facts.database_since),
        *_reached(facts),
        _web(facts, now),
        _controllers(facts, now),
        _tasks(facts, now),
        _schedules(facts, now),
        _workers(facts),
        _work(facts),
        _definitions(facts),
        _versions(facts, now),
        _disk(facts),
    ]


def _database_away(facts: Facts) -> Verdict:
    said, since = facts.probes.get("database", ("not asked", None))
    hint = "Check PostgreSQL and DATABASE_URL. What the other parts do is not known until then."
    if facts.disk is not None and facts.disk.is_full:
        said, hint = f"{said}; the disk is full: {facts.disk}", f"Free space on {facts.disk.mount}. {hint}"
    return Verdict("database", "Database", State.ERROR, said, hint, since)


def _reached(facts: Facts) -> list[Verdict]:
    return [
        _probe(
            facts, "nats", "NATS", "Commands to workers are paused. Check the server and LOCALAI_NATS_URL."
        ),
        _probe(
            facts, "redis", "Redis or Valkey", "Pages hear of changes later. Check the server and REDIS_URL."
        ),
    ]


def worst(found: Sequence[Verdict]) -> State:
    """The state of the whole."""
    return max((one.state for one in found), key=list(State).index, default=State.OK)


def _probe(facts: Facts, id: str, name: str, hint: str) -> Verdict:
    said, since = facts.probes.get(id, ("not asked", None))
    if said == "ok":
        return Verdict(id, name, State.OK, "answers", since=since)
    return Verdict(id, name, State.ERROR, said, hint, since)


def _alive(facts: Facts, kind: str, now: datetime) -> list[Process]:
    """Those that were heard lately; a row outlives its process for some time."""
    limit = facts.web_silent_after if kind == "web" else controllers.SILENT_AFTER
    silent = timedelta(seconds=limit)
    return [one for one in facts.processes if one.kind == kind and now - one.seen_at <= silent]


def _web(facts: Facts, now: datetime) -> Verdict:
    there = _alive(facts, "web", now)
    since = min((one.started_at for one in there), default=None)
    return Verdict("web", "Web processes", State.OK, _number(len(there), "process", "processes"), since=since)


def _controllers(facts: Facts, now: datetime) -> Verdict:
    there = _alive(facts, "controller", now)
    if not there:
        heard = max((one.seen_at for one in facts.processes if one.kind == "controller"), default=None)
        hint = "Start one with `manage.py controller`. Operations and schedules wait until then."
        return Verdict("controllers", "Controllers", State.ERROR, "none is running", hint, heard)
    text, since = _number(len(there), "controller"), min(one.started_at for one in there)
    cut = [one.name for one in there if not one.bus_connected]
    if cut:
        hint = "Check NATS and LOCALAI_NATS_URL of these controllers."
        text = f"{text}; without NATS: {', '.join(cut)}"
        return Verdict("controllers", "Controllers", State.WARNING, text, hint, since)
    return Verdict("controllers", "Controllers", State.OK, text, since=since)


def _tasks(facts: Facts, now: datetime) -> Verdict:
    waits = facts.tasks_wait_since
    if waits is not None and now - waits > _TASKS_WAIT:
        hint = "Start `manage.py qcluster`. Silent nodes and expired leases go unnoticed until then."
        return Verdict("tasks", "Scheduled tasks", State.ERROR, "no process takes them", hint, waits)
    ended = facts.tasks_ended_at
    text = "carried out" if ended else "none has run yet"
    return Verdict("tasks", "Scheduled tasks", State.OK, text, since=ended)


def _schedules(facts: Facts, now: datetime) -> Verdict:
    running = [one for one in facts.schedules if not one.paused]
    late = [one for one in running if one.next_run is not None and now - one.next_run > OVERDUE]
    if late:
        hint = "Controllers trigger the schedules: start one, or look at its log."
        since = min(one.next_run for one in late if one.next_run is not None)
        return Verdict("schedules", "Schedules", State.ERROR, f"overdue: {_names(late)}", hint, since)
    failed = [one for one in running if one.last_ok is False]
    if failed:
        hint = "The admin has the reason under Failed tasks."
        since = min(one.last_run for one in failed if one.last_run is not None)
        return Verdict("schedules", "Schedules", State.WARNING, f"failed: {_names(failed)}", hint, since)
    paused = [one for one in facts.schedules if one.paused]
    if paused:
        hint = "Resume them in the admin under Scheduled tasks."
        return Verdict("schedules", "Schedules", State.WARNING, f"paused: {_names(paused)}", hint)
    if not facts.schedules:
        hint = "The first controller makes them."
        return Verdict("schedules", "Schedules", State.ERROR, "there are none", hint)
    return Verdict("schedules", "Schedules", State.OK, f"{len(running)} on time")


def _workers(facts: Facts) -> Verdict:
    counted = [f"{number} {status}" for status, number in sorted(facts.workers.items())]
    text = ", ".join(counted) or "no worker has registered"
    if facts.held:
        hint = "Check the network between this server and the workers. Those that are heard by then stay."
        return Verdict("workers", "Workers", State.ERROR, f"{text}; {facts.held}", hint, facts.held.since)
    if any(facts.workers.get(status) for status in ("offline", "unhealthy")):
        hint = "The Nodes page says since when and why."
        return Verdict("workers", "Workers", State.WARNING, text, hint)
    return Verdict("workers", "Workers", State.OK, text)


def _work(facts: Facts) -> Verdict:
    work, intents = facts.operations, facts.intents
    text = (
        f"{_number(work.running, 'operation')} running, {work.waiting} waiting; on nodes"
        f" {intents.running} running, {intents.waiting} waiting"
    )
    oldest = min((at for at in (work.oldest, intents.oldest) if at is not None), default=None)
    if facts.failures:
        text += f"; {_number(facts.failures, 'failure')} in the inbox"
        hint = "Retry or dismiss them in Activity, under Inbox."
        return Verdict("operations", "Operations", State.WARNING, text, hint, facts.oldest_failure)
    return Verdict("operations", "Operations", State.OK, text, since=oldest)


def _definitions(facts: Facts) -> Verdict:
    name, broken = "Model definitions", facts.broken_definitions
    if facts.models_folder:
        hint = "Check LOCALAI_MODELS_PATH on this web process's machine."
        return Verdict("models", name, State.ERROR, f"the models folder {facts.models_folder}", hint)
    if broken:
        listed = "; ".join(f"{file} {reason}" for file, reason in list(broken.items())[:_MOST_NAMED])
        more = f"; and {len(broken) - _MOST_NAMED} more" if len(broken) > _MOST_NAMED else ""
        hint = "Correct or remove the files: the models in them do not serve. The Models page lists them all."
        text = f"{_number(len(broken), 'file')} cannot be used: {listed}{more}"
        return Verdict("models", name, State.WARNING, text, hint)
    return Verdict("models", name, State.OK, "every file can be used")


def _versions(facts: Facts, now: datetime) -> Verdict:
    alive = [*_alive(facts, "web", now), *_alive(facts, "controller", now)]
    others = sorted({one.version for one in alive if one.version not in ("", facts.version)})
    said = [f"server processes also run {', '.join(others)}"] if others else []
    if facts.other_versions:
        said.append(f"{_number(facts.other_versions, 'worker')} of another version")
    if said:
        hint = "Restart the server processes on one version, and run the line of Add a node on those workers."
        return Verdict("versions", "Versions", State.WARNING, f"{facts.version}; {'; '.join(said)}", hint)
    return Verdict("versions", "Versions", State.OK, facts.version)


def _disk(facts: Facts) -> Verdict:
    name = "Disk of the data folder"
    if facts.disk is None:
        hint = "Check the disk or mount of CLUSTER_DATA_DIR on this web process's machine."
        return Verdict("disk", name, State.ERROR, f"{facts.data_dir} does not answer", hint)
    share = facts.disk.free / facts.disk.total if facts.disk.total else 0.0
    text = str(facts.disk)
    if share >= LITTLE_DISK:
        return Verdict("disk", name, State.OK, text)
    state = State.ERROR if share < NO_DISK else State.WARNING
    return Verdict("disk", name, state, text, "Free space there, or move CLUSTER_DATA_DIR.")


def _number(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _names(found: Sequence[Schedule]) -> str:
    return ", ".join(one.name for one in found)
