"""What a controller counts: attempts at work and commands to workers. Its passes are in `passes`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from localai_cluster import clock
from localai_cluster.metrics.kinds import WORK, counter, gauge, seconds

ATTEMPTS = counter(
    "attempts",
    "Attempts at operations and, as `intent_…`, at their parts on nodes; `unrecorded`: the lease was lost, or"
    " the database did not take the outcome, so the work is taken up again.",
    "kind",
    "outcome",
)
ATTEMPT_SECONDS = seconds("attempt_duration_seconds", "How long an attempt took.", "kind", buckets=WORK)
RUNNING = gauge("attempts_running", "Attempts that this controller carries out now.", "queue")
COMMANDS = counter("commands", "Questions and commands to workers over the bus.", "command", "outcome")
COMMAND_SECONDS = seconds("command_duration_seconds", "How long the answer took.", "command", buckets=WORK)
BUS_CONNECTED = gauge("bus_connected", "1 while this controller is connected to the message bus.")
FIGURES = (ATTEMPTS, ATTEMPT_SECONDS, RUNNING, COMMANDS, COMMAND_SECONDS, BUS_CONNECTED)

UNRECORDED = "unrecorded"


@dataclass
class Told:
    """What became of an attempt, once that is recorded."""

    outcome: str = UNRECORDED


@contextmanager
def attempt(kind: str) -> Iterator[Told]:
    """Count its block as one attempt, which says its outcome."""
    began, told = clock.monotonic(), Told()
    try:
        yield told
    finally:
        ATTEMPTS.labels(kind, told.outcome).inc()
        ATTEMPT_SECONDS.labels(kind).observe(clock.monotonic() - began)


def command_ended(command: str, outcome: str, took: float) -> None:
    """One question to a worker has been answered, or not."""
    COMMANDS.labels(command, outcome).inc()
    COMMAND_SECONDS.labels(command).observe(took)
