"""Passes that run again and again: those of controllers, and the schedules that the task cluster runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from localai_cluster import clock
from localai_cluster.metrics.kinds import WORK, counter, seconds

PASSES = counter("passes", "Passes that have ended, by name and outcome (`ok`, `failed`).", "name", "outcome")
PASS_SECONDS = seconds("pass_duration_seconds", "How long a pass took.", "name", buckets=WORK)
FIGURES = (PASSES, PASS_SECONDS)


def ended(name: str, took: float, *, ok: bool) -> None:
    """One pass has ended."""
    PASSES.labels(name, "ok" if ok else "failed").inc()
    PASS_SECONDS.labels(name).observe(took)


@contextmanager
def counted(name: str) -> Iterator[None]:
    """Count its block as one pass; what raises has failed."""
    began, ok = clock.monotonic(), False
    try:
        yield
        ok = True
    finally:
        ended(name, clock.monotonic() - began, ok=ok)
