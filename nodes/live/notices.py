"""Notices about the cluster itself, which every page shows.

Each notice has a stable id, a text that names the problem, and a hint how to repair it. Pure: the functions
convert facts to notices.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from localai_cluster import __version__
from localai_cluster.kit import periodic
from localai_cluster.kit.disk import DiskUsage
from localai_cluster.kit.env import is_weak_secret
from localai_cluster.kit.quantities import counted
from localai_cluster.kit.settings_table import ClusterSettings
from nodes.live.shapes import NOTICE
from nodes.registry.mass_silence import CurrentHold
from operations.executor.controllers import SILENCE_LIMIT, LastHeartbeats

Notice = dict[str, Any]
_SILENCE_LIMIT = timedelta(seconds=SILENCE_LIMIT)


@dataclass(frozen=True)
class ClusterFacts:
    """Facts about the cluster that determine the notices.

    `readable_since` is the end of the last database outage, or None: a controller that wrote nothing during
    an outage is not silent.
    """

    controllers: LastHeartbeats
    open_conflicts: int
    weak_nodes: int
    readable_since: datetime | None = None
    skewed_nodes: int = 0
    """Number of nodes whose worker is a stock worker or has another version than this server."""
    tasks_wait_since: datetime | None = None
    """Time since which the oldest due task has waited for a task process; None if no task waits."""
    redis_away: bool = False
    mass_hold: CurrentHold | None = None
    """The active mass-disruption hold, or None."""
    disk: DiskUsage | None = None
    """Usage of the disk with the server's data folder; None before the first reading."""


def _make_notice(name: str, level: str, text: str, hint: str) -> Notice:
    return NOTICE.of(id=name, level=level, text=text, hint=hint)


def database_notice(as_of: datetime | None) -> Notice:
    """Return the notice that the database is unreachable and pages show data of the time `as_of`."""
    age = f"data last updated at {as_of:%H:%M:%S} UTC" if as_of else "no data available yet"
    return _make_notice(
        "database-unreachable",
        "error",
        f"The database is unreachable; {age}.",
        "Check PostgreSQL and DATABASE_URL. This notice disappears when the database is back.",
    )


def active_notices(facts: ClusterFacts, settings: ClusterSettings, now: datetime) -> list[Notice]:
    """Return all current notices, the most severe first."""
    return [
        *disk_notices(facts.disk),
        *_controller_notices(facts, now),
        *_task_and_redis_notices(facts, now),
        *_silence_notices(facts),
        *_identity_notices(facts, settings),
        *_version_notices(facts),
        *_secret_notices(settings),
        *_keyless_notices(settings),
    ]


def disk_notices(usage: DiskUsage | None) -> list[Notice]:
    """Return a notice if the disk of the data folder is full. It does not depend on the database."""
    if usage is None or not usage.is_full:
        return []
    text = f"The disk of the server's data folder is full: {usage}."
    hint = "Free space there. What cannot be written until then is tried again or refused."
    return [_make_notice("disk-full", "error", text, hint)]


def _controller_notices(facts: ClusterFacts, now: datetime) -> list[Notice]:
    controllers = facts.controllers
    if _is_silent(controllers.at, facts, now):
        return [
            _make_notice(
                "no-controller",
                "error",
                "No controller is running; operations are paused.",
                "Start one with `manage.py controller`. Requested operations wait until then.",
            )
        ]
    if _is_silent(controllers.connected_at, facts, now):
        return [
            _make_notice(
                "nats-unreachable",
                "error",
                "NATS is unreachable; commands to workers are paused.",
                "Check the NATS server and LOCALAI_NATS_URL of the controllers.",
            )
        ]
    return []


def _task_and_redis_notices(facts: ClusterFacts, now: datetime) -> list[Notice]:
    notices = []
    waits = facts.tasks_wait_since
    if waits is not None:
        waits = max(moment for moment in (waits, facts.readable_since) if moment is not None)
        if now - waits > timedelta(seconds=periodic.MAX_TASK_WAIT_SECONDS):
            text = "No process runs scheduled tasks; nodes that fall silent and expired leases go unnoticed."
            hint = "Start `manage.py qcluster`. The page System health shows the schedules."
            notices.append(_make_notice("no-tasks", "error", text, hint))
    if facts.redis_away:
        text = "Redis or Valkey is unreachable; pages show operations late."
        notices.append(_make_notice("redis-unreachable", "error", text, "Check the server and REDIS_URL."))
    return notices


def _silence_notices(facts: ClusterFacts) -> list[Notice]:
    if facts.mass_hold is None:
        return []
    hint = "Check the network between this server and the workers. Nodes that are back by then are kept."
    return [_make_notice("mass-silence", "error", f"{facts.mass_hold}.", hint)]


def _is_silent(at: datetime | None, facts: ClusterFacts, now: datetime) -> bool:
    last_sign = max((moment for moment in (at, facts.readable_since) if moment is not None), default=None)
    return last_sign is None or now - last_sign > _SILENCE_LIMIT


def _identity_notices(facts: ClusterFacts, settings: ClusterSettings) -> list[Notice]:
    notices = []
    if facts.open_conflicts:
        conflicts = counted(facts.open_conflicts, "identity conflict")
        text = f"{conflicts}: another machine is claiming a registered node's name."
        hint = "Resolve it on the Nodes page. Until then the registered node keeps running."
        notices.append(_make_notice("identity-conflicts", "warning", text, hint))
    if settings.allow_shared_token_nodes:
        count = facts.weak_nodes
        text = "Workers that have only the shared token can register."
        if count:
            nodes, own = ("node has", "its") if count == 1 else ("nodes have", "their")
            text += f" {count} {nodes} no identity of {own} own."
        hint = "Unset LOCALAI_ALLOW_SHARED_TOKEN_NODES once all stock workers are upgraded."
        notices.append(_make_notice("shared-token-nodes", "warning", text, hint))
    return notices


def _version_notices(facts: ClusterFacts) -> list[Notice]:
    if not facts.skewed_nodes:
        return []
    runs = counted(facts.skewed_nodes, "node runs", "nodes run")
    text = f"{runs} another version than this server ({__version__}), or a stock worker."
    hint = "The Nodes page shows which. To upgrade a worker, run the line of Add a node there again."
    return [_make_notice("worker-versions", "warning", text, hint)]


def _keyless_notices(settings: ClusterSettings) -> list[Notice]:
    if not settings.keyless_networks:
        return []
    text = f"Programs in {', '.join(map(str, settings.keyless_networks))} may use the models without a key."
    hint = "Name the smallest networks in CLUSTER_KEYLESS_NETWORKS, or give programs keys and unset it."
    return [_make_notice("keyless-networks", "warning", text, hint)]


def _secret_notices(settings: ClusterSettings) -> list[Notice]:
    secrets = (
        ("weak-token", "worker token", "LOCALAI_REGISTRATION_TOKEN", (settings.registration_token,)),
        ("weak-key", "admin key", "LOCALAI_API_KEY", settings.api_keys),
    )
    return [
        _make_notice(
            name,
            "warning",
            f"The {secret} is weak: short or easy to guess.",
            f"Set {setting} to a long random value, or let `make run` generate one.",
        )
        for name, secret, setting, values in secrets
        if any(value and is_weak_secret(value) for value in values)
    ]
