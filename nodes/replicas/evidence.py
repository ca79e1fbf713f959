"""What is concluded about replicas from what is known of their engines: pure.

A worker's list of its processes comes first. Only where it says nothing, the engine's port counts. One look
never decides: a streak of misses does, or a miss after the worker has reported the engine's end by itself.
Streaks stand in the rows (`checks.py`), so that any process continues them.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from localai_cluster.messaging.messages import process_key
from localai_cluster.rpc.signs import Sign

MISSED_REPORTS = 2
"""C6."""
MISSED_PROBES = 3
"""C5, C17."""

Running = Collection[tuple[str, str]]
"""Process key and port ("": not said) of each engine that a worker lists."""


@dataclass(frozen=True)
class Suspect:
    """A replica whose engine is in question, as its row was when that was asked."""

    id: UUID
    node_id: UUID
    model_name: str
    replica_index: int
    address: str
    checked_at: datetime
    missed_reports: int = 0
    missed_probes: int = 0
    exit_reported: bool = False
    node_name: str = ""
    engine_token: str = field(default="", repr=False)
    weak_identity: bool = False

    @property
    def process_key(self) -> str:
        """The engine process on its worker."""
        return process_key(self.model_name, self.replica_index)


@dataclass(frozen=True)
class Finding:
    """What is to become of a replica's row. `alive`: its engine runs, for certain.

    `confirmed`: its worker says that the process has gone. Without that nothing answers where it was.
    """

    gone: bool = False
    alive: bool = False
    missed_reports: int = 0
    missed_probes: int = 0
    exit_reported: bool = False
    confirmed: bool = False


ALIVE = Finding(alive=True)


def lists(running: Running, key: str, address: str) -> bool:
    """Whether the process that the row stands for is among these.

    A worker names its own view of the host, so only the ports are compared: another port is another engine
    under the same key.
    """
    return (key, address.rpartition(":")[2]) in running or (key, "") in running


def judge(suspect: Suspect, listed: bool | None, port: Sign | None) -> Finding:
    """R4.34, R4.35, R4.39, R4.40: `listed` is the worker's word, None if it gave none; then `port` counts."""
    if listed or (listed is None and port is Sign.ALIVE):
        return ALIVE
    if listed is None and port is not Sign.UNREACHABLE:
        return Finding(missed_reports=suspect.missed_reports, exit_reported=suspect.exit_reported)
    reports = suspect.missed_reports + (listed is False)
    probes = suspect.missed_probes + 1 if listed is None else 0
    gone = suspect.exit_reported or reports >= MISSED_REPORTS or probes >= MISSED_PROBES
    return Finding(gone, False, reports, probes, suspect.exit_reported, gone and listed is False)
