"""Pressure on models, reported by web processes: requests not sent to the replica that caches their prompt.

A process reports all counted times of a model in a row of its own, so a repeated report changes nothing. The
replica pass counts the times within the window and after its last scale-up for pressure. A row expires if its
process stops renewing it; the next report of another process deletes it.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from nodes.models import ModelSchedulingConfig, PrefixPressure

PRESSURE_WINDOW = timedelta(minutes=1)
"""Age up to which a request counts as pressure (C44)."""
MAX_CLOCK_LEAD = timedelta(seconds=10)
"""Maximum time by which another process's clock may be ahead; times beyond it are ignored."""

REPORT_PRESSURE_SQL = """
WITH old AS (
    DELETE FROM prefix_pressures WHERE id IN (
        SELECT id FROM prefix_pressures
         WHERE reported_at < %(since)s AND process_id <> %(process)s FOR UPDATE SKIP LOCKED
    )
)
INSERT INTO prefix_pressures (process_id, model_name, times, reported_at)
SELECT %(process)s, report.key, report.value, %(now)s FROM jsonb_each(%(times)s) AS report
    ON CONFLICT (model_name, process_id) DO UPDATE
       SET times = EXCLUDED.times, reported_at = EXCLUDED.reported_at
"""
"""Statement that stores the report of a process. Its parameter `times` maps each model to all counted
times."""


def pressure_by_model(models: Collection[str], now: datetime) -> dict[str, int]:
    """Return how many requests count as pressure (R3.19), for each model that has any. Two queries."""
    reports = PrefixPressure.objects.filter(
        model_name__in=models, reported_at__gte=now - PRESSURE_WINDOW - MAX_CLOCK_LEAD
    )
    rows = list(reports.values_list("model_name", "times"))
    if not rows:
        return {}
    ended = ModelSchedulingConfig.objects.filter(model_name__in=[model for model, _ in rows])
    return count_pressure(rows, dict(ended.values_list("model_name", "pressure_ended_at")), now)


def count_pressure(
    rows: Iterable[tuple[str, list[str]]], ended: Mapping[str, datetime | None], now: datetime
) -> dict[str, int]:
    """Count the reported requests of each model that count as pressure at `now`; pure."""
    totals: dict[str, int] = {}
    for model, times in rows:
        ended_at = ended.get(model)
        number = sum(_is_counted(datetime.fromisoformat(text), ended_at, now) for text in times)
        if number:
            totals[model] = totals.get(model, 0) + number
    return totals


def _is_counted(at: datetime, ended_at: datetime | None, now: datetime) -> bool:
    return now - PRESSURE_WINDOW <= at <= now + MAX_CLOCK_LEAD and (ended_at is None or at > ended_at)
