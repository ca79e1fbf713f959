"""Factories of Prometheus metrics: common name prefix, base units and histogram buckets.

A metric is created without a registry: `registries` registers it with the processes that have it.
"""

# Some functions of the library carry no types.
# mypy: allow-untyped-calls

import os

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics, values

PREFIX = "localai_cluster_"
REQUEST_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)
"""Histogram buckets in seconds for requests: from a warm response to a cold load."""
WORK_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
"""Histogram buckets in seconds for work: from one query to an installation of many gigabytes."""

SHARED_FOLDER = os.environ.get("PROMETHEUS_MULTIPROC_DIR", "")
"""Folder in which the web processes of one address share metrics, "" for a single process."""
if SHARED_FOLDER:
    _index = os.environ.get("LOCALAI_CLUSTER_WEB_INDEX", "0")
    values.ValueClass = values.MultiProcessValue(lambda: _index)

# Otherwise the library adds the creation time of each counter; `process_start_time_seconds` is sufficient.
disable_created_metrics()


def counter(name: str, meaning: str, *labels: str) -> Counter:
    """Return a new counter, without a registry."""
    return Counter(PREFIX + name, meaning, labels, registry=None)


def gauge(name: str, meaning: str, *labels: str) -> Gauge:
    """Return a new gauge, without a registry."""
    return Gauge(PREFIX + name, meaning, labels, registry=None, multiprocess_mode="livesum")


def seconds(name: str, meaning: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
    """Return a new histogram of durations, without a registry."""
    return Histogram(PREFIX + name, meaning, labels, buckets=buckets, registry=None)
