"""Metrics of a controller: attempts at operations, and commands to workers. `passes` has those of passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from localai_cluster.kit import clock
from localai_cluster.metrics.kinds import WORK_BUCKETS, counter, gauge, seconds

ATTEMPTS = counter(
    "attempts",
    "Attempts at operations and, as `intent_…`, at their parts on nodes; `unrecorded`: the lease was lost, or"
    " the database did not take the outcome, so the work is taken up again.",
    "kind",
    "outcome",
)
ATTEMPT_SECONDS = seconds("attempt_duration_seconds", "Duration of an attempt.", "kind", buckets=WORK_BUCKETS)
ATTEMPTS_RUNNING = gauge("attempts_running", "Attempts that this controller carries out now.", "queue")
COMMANDS = counter("commands", "Questions and commands to workers over the bus.", "command", "outcome")
COMMAND_SECONDS = seconds(
    "command_duration_seconds", "How long the answer took.", "command", buckets=WORK_BUCKETS
)
BUS_CONNECTED = gauge("bus_connected", "1 while this controller is connected to the message bus.")
FIGURES = (ATTEMPTS, ATTEMPT_SECONDS, ATTEMPTS_RUNNING, COMMANDS, COMMAND_SECONDS, BUS_CONNECTED)

UNRECORDED_OUTCOME = "unrecorded"


@dataclass
class AttemptResult:
    """Outcome of an attempt. It is `UNRECORDED_OUTCOME` until the database has it."""

    outcome: str = UNRECORDED_OUTCOME


@contextmanager
def count_attempt(kind: str) -> Iterator[AttemptResult]:
    """Count the block as one attempt. The block sets `outcome` of the yielded object."""
    started_at, result = clock.monotonic(), AttemptResult()
    try:
        yield result
    finally:
        ATTEMPTS.labels(kind, result.outcome).inc()
        ATTEMPT_SECONDS.labels(kind).observe(clock.monotonic() - started_at)


def command_ended(command: str, outcome: str, took: float) -> None:
    """Count a command to a worker that took `took` seconds, with or without a reply."""
    COMMANDS.labels(command, outcome).inc()
    COMMAND_SECONDS.labels(command).observe(took)
