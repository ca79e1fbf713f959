"""Judge whether engines still run, by their workers' lists and by probes of their ports. Pure.

A worker's list of its processes takes precedence; the engine's port counts only without a list. A single
check never decides. Several misses in a row are necessary, or one miss after the worker has reported the
engine's end. The rows store the numbers of misses (`checks.py`), so that any process can continue counting.
"""

from collections.abc import Collection
from dataclasses import dataclass

from localai_cluster.rpc.messages import Sign
from nodes.models import NodeModel

MISSED_REPORTS = 2
"""Number of consecutive lists without the engine after which it counts as ended (C6)."""
MISSED_PROBES = 3
"""Number of consecutive failed probes after which the engine counts as ended (C5, C17)."""

Running = Collection[tuple[str, str]]
"""Process key and port of each engine that a worker lists; "" if the port is not reported."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check of one engine, as it is stored in the replica's row.

    `alive`: the engine certainly runs. `gone`: the engine counts as ended. `confirmed`: the worker reports
    that the process has ended; otherwise nothing answers at its address.
    """

    gone: bool = False
    alive: bool = False
    missed_reports: int = 0
    missed_probes: int = 0
    exit_reported: bool = False
    confirmed: bool = False


ALIVE = CheckResult(alive=True)


def is_listed(running: Running, key: str, address: str) -> bool:
    """Return True if the worker's list has a process with this key and port.

    Only ports are compared, because the host of an address depends on the worker's network. Another port
    means that another engine has the key.
    """
    return (key, address.rpartition(":")[2]) in running or (key, "") in running


def judge(suspect: NodeModel, listed: bool | None, port: Sign | None) -> CheckResult:
    """Return the result of a check (R4.34, R4.35, R4.39, R4.40).

    `listed` is True if the worker lists the engine, None if it sent no list. Then `port` counts: True if the
    engine's port answers.
    """
    if listed or (listed is None and port is Sign.ALIVE):
        return ALIVE
    if listed is None and port is not Sign.UNREACHABLE:
        return CheckResult(missed_reports=suspect.missed_reports, exit_reported=suspect.exit_reported)
    reports = suspect.missed_reports + (listed is False)
    probes = suspect.missed_probes + 1 if listed is None else 0
    gone = suspect.exit_reported or reports >= MISSED_REPORTS or probes >= MISSED_PROBES
    return CheckResult(gone, False, reports, probes, suspect.exit_reported, gone and listed is False)
