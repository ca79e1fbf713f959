"""Pressure on models, as web processes report it: requests kept from the replica that remembers their prompt.

A process reports of a model all times that count, in a row of its own, so a report that is made twice changes
nothing. The replica pass adds up what is younger than the window, and younger than the load that it asked for
last because of it. A row that its process no longer renews grows old; the next report of another deletes it.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta

from nodes.models import ModelSchedulingConfig, PrefixPressure

WINDOW = timedelta(minutes=1)
"""C44: for how long a request counts."""
MOST_AHEAD = timedelta(seconds=10)
"""How far a process's clock may be ahead of the one that reads: what is later than that was never."""

REPORT = """
WITH old AS (
    DELETE FROM prefix_pressures WHERE id IN (
        SELECT id FROM prefix_pressures
         WHERE reported_at < %(since)s AND process_id <> %(process)s FOR UPDATE SKIP LOCKED
    )
)
INSERT INTO prefix_pressures (process_id, model_name, times, reported_at)
SELECT %(process)s, told.key, told.value, %(now)s FROM jsonb_each(%(told)s) AS told
    ON CONFLICT (model_name, process_id) DO UPDATE
       SET times = EXCLUDED.times, reported_at = EXCLUDED.reported_at
"""
"""One process's report: `told` has by model all times that count."""


def counts(models: Collection[str], now: datetime) -> dict[str, int]:
    """R3.19: how many count now, by model, 0 left out; two queries."""
    rows = PrefixPressure.objects.filter(model_name__in=models, reported_at__gte=now - WINDOW - MOST_AHEAD)
    found = list(rows.values_list("model_name", "times"))
    if not found:
        return {}
    ended = ModelSchedulingConfig.objects.filter(model_name__in=[model for model, _ in found])
    return counted(found, dict(ended.values_list("model_name", "pressure_ended_at")), now)


def counted(
    rows: Iterable[tuple[str, list[str]]], ended: Mapping[str, datetime | None], now: datetime
) -> dict[str, int]:
    """The same of these rows; pure."""
    found: dict[str, int] = {}
    for model, times in rows:
        over = ended.get(model)
        number = sum(_counts(datetime.fromisoformat(text), over, now) for text in times)
        if number:
            found[model] = found.get(model, 0) + number
    return found


def _counts(at: datetime, over: datetime | None, now: datetime) -> bool:
    return now - WINDOW <= at <= now + MOST_AHEAD and (over is None or at > over)
