"""Metrics of recurring passes, in controllers and in scheduled tasks."""

from collections.abc import Iterator
from contextlib import contextmanager

from localai_cluster.kit import clock
from localai_cluster.metrics.kinds import WORK_BUCKETS, counter, seconds

PASSES = counter("passes", "Passes that have ended, by name and outcome (`ok`, `failed`).", "name", "outcome")
PASS_SECONDS = seconds("pass_duration_seconds", "How long a pass took.", "name", buckets=WORK_BUCKETS)
FIGURES = (PASSES, PASS_SECONDS)


def record_pass(name: str, took: float, *, ok: bool) -> None:
    """Count a pass that took `took` seconds."""
    PASSES.labels(name, "ok" if ok else "failed").inc()
    PASS_SECONDS.labels(name).observe(took)


@contextmanager
def count_pass(name: str) -> Iterator[None]:
    """Count the block as one pass. It has failed if the block raises."""
    started_at, ok = clock.monotonic(), False
    try:
        yield
        ok = True
    finally:
        record_pass(name, clock.monotonic() - started_at, ok=ok)
