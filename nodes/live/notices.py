"""What an operator should know about the cluster itself, whatever page is open.

Each notice has an id that stays, a text that says what is the matter, and a hint that says what to do about
it. Pure: from facts to sentences.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from localai_cluster.env import weak_secret
from nodes.live.shapes import NOTICE
from operations.executor.controllers import SILENT_AFTER, Seen

Notice = dict[str, Any]
_SILENCE = timedelta(seconds=SILENT_AFTER)


@dataclass(frozen=True)
class ClusterFacts:
    """What a look found. `readable_since` = since when the database has been answering this process.

    A controller that wrote nothing while the database was away is not silent; None when there was no outage.
    """

    controllers: Seen
    open_conflicts: int
    weak_nodes: int
    readable_since: datetime | None = None


@dataclass(frozen=True)
class Told:
    """The settings that notices are about."""

    registration_token: str
    api_key: str
    allow_shared_token_nodes: bool


def _notice(name: str, level: str, text: str, hint: str) -> Notice:
    return NOTICE.of(id=name, level=level, text=text, hint=hint)


def unreachable(as_of: datetime | None) -> Notice:
    """The database cannot be read; what everybody sees is older than it looks."""
    seen = f"what you see is as of {as_of:%H:%M:%S} UTC" if as_of else "nothing can be shown yet"
    return _notice(
        "database-unreachable",
        "error",
        f"The database cannot be reached; {seen}.",
        "Look at PostgreSQL and DATABASE_URL; this goes by itself when it answers again.",
    )


def notices(facts: ClusterFacts, told: Told, now: datetime) -> list[Notice]:
    """All that holds, the worst first."""
    return [*_engine(facts, now), *_identity(facts, told), *_secrets(told)]


def _engine(facts: ClusterFacts, now: datetime) -> list[Notice]:
    """Whether anybody carries operations out and reaches the workers."""
    seen = facts.controllers
    if _silent(seen.at, facts, now):
        return [
            _notice(
                "no-controller",
                "error",
                "No controller runs: nothing will be carried out.",
                "Start one: `manage.py controller`; what was asked for waits until then.",
            )
        ]
    if _silent(seen.connected_at, facts, now):
        return [
            _notice(
                "nats-unreachable",
                "error",
                "NATS cannot be reached: commands to workers wait.",
                "Look at the NATS server and LOCALAI_NATS_URL of the controllers.",
            )
        ]
    return []


def _silent(at: datetime | None, facts: ClusterFacts, now: datetime) -> bool:
    heard = max((one for one in (at, facts.readable_since) if one is not None), default=None)
    return heard is None or now - heard > _SILENCE


def _identity(facts: ClusterFacts, told: Told) -> list[Notice]:
    found = []
    if facts.open_conflicts:
        number = facts.open_conflicts
        what = "1 identity conflict is open" if number == 1 else f"{number} identity conflicts are open"
        text = f"{what}: somebody claims to be a node that is known by another secret."
        hint = "Decide on the Nodes page; until then the node goes on as it was."
        found.append(_notice("identity-conflicts", "warning", text, hint))
    if told.allow_shared_token_nodes:
        count = facts.weak_nodes
        text = "Workers that know only the shared token are admitted"
        text += f"; {count} {'node proves' if count == 1 else 'nodes prove'} no identity of their own."
        hint = "Unset LOCALAI_ALLOW_SHARED_TOKEN_NODES once no stock worker is left."
        found.append(_notice("shared-token-nodes", "warning", text, hint))
    return found


def _secrets(told: Told) -> list[Notice]:
    secrets = (
        ("weak-token", "worker token", "LOCALAI_REGISTRATION_TOKEN", told.registration_token),
        ("weak-key", "admin key", "LOCALAI_API_KEY", told.api_key),
    )
    return [
        _notice(
            name,
            "warning",
            f"The {what} is weak: it is short or easily guessed.",
            f"Set {setting} to a long random value, or leave it to `make run`.",
        )
        for name, what, setting, value in secrets
        if value and weak_secret(value)
    ]
