"""Metrics of a worker: heartbeats, commands, engines."""

from collections.abc import Iterator
from contextlib import contextmanager

from localai_cluster.kit import clock
from localai_cluster.metrics.kinds import WORK_BUCKETS, counter, gauge, seconds

HEARTBEATS = counter(
    "worker_heartbeats",
    "Heartbeats, by outcome; `off_bus`: not sent, because the message bus is not connected.",
    "outcome",
)
COMMANDS = counter(
    "worker_commands",
    "Commands of controllers that were answered (`ok`, `refused`, `failed`).",
    "command",
    "outcome",
)
COMMAND_SECONDS = seconds(
    "worker_command_duration_seconds", "How long the answer took.", "command", buckets=WORK_BUCKETS
)
ENGINE_STARTS = counter("worker_engine_starts", "Engines that were started (`ok`, `failed`).", "outcome")
ENGINE_START_SECONDS = seconds(
    "worker_engine_start_duration_seconds", "Until an engine was ready.", buckets=WORK_BUCKETS
)
ENGINE_CRASHES = counter("worker_engine_crashes", "Engines that ended although nothing had stopped them.")
RUNNING_ENGINES = gauge("worker_engines", "Engines that run, starting ones included.")
BUS_CONNECTED = gauge("worker_bus_connected", "1 while the worker is connected to the message bus.")
FIGURES = (
    HEARTBEATS,
    COMMANDS,
    COMMAND_SECONDS,
    ENGINE_STARTS,
    ENGINE_START_SECONDS,
    ENGINE_CRASHES,
    RUNNING_ENGINES,
    BUS_CONNECTED,
)


def command_ended(command: str, outcome: str, took: float) -> None:
    """Count a command that took `took` seconds."""
    COMMANDS.labels(command, outcome).inc()
    COMMAND_SECONDS.labels(command).observe(took)


@contextmanager
def count_start() -> Iterator[None]:
    """Count the block as the start of one engine. It has failed if the block raises."""
    started_at, outcome = clock.monotonic(), "failed"
    try:
        yield
        outcome = "ok"
        ENGINE_START_SECONDS.observe(clock.monotonic() - started_at)
    finally:
        ENGINE_STARTS.labels(outcome).inc()
