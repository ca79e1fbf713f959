"""The metrics of each kind of process, and their text format.

Every process also exposes its build and its resource usage (`process_…`: processor, memory, files). Several
web processes of one address expose the sums of all, whichever of them a scrape reaches, and no resource
usage.
"""

# Some functions of the library carry no types.
# mypy: allow-untyped-calls

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from localai_cluster import __version__
from localai_cluster.metrics import controller, passes, web, worker
from localai_cluster.metrics.kinds import PREFIX, SHARED_FOLDER

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FIGURES: Mapping[str, tuple[MetricWrapperBase, ...]] = {
    "web": web.FIGURES,
    "controller": (*controller.FIGURES, *passes.FIGURES),
    "tasks": passes.FIGURES,
    "worker": worker.FIGURES,
}
"""Metrics of each kind of process."""


class Build(Collector):
    """Prometheus collector of `build_info`: kind and version of this process."""

    NAME = PREFIX + "build_info"
    MEANING = "Always 1; the labels are the process and its version."
    LABELS = ("process", "version")

    def __init__(self, process: str) -> None:
        self._process = process

    def collect(self) -> Iterable[Metric]:
        """Return the metric with its only sample."""
        family = GaugeMetricFamily(self.NAME, self.MEANING, labels=self.LABELS)
        family.add_metric([self._process, __version__], 1)
        return [family]


class _SharedCollector(Collector):
    """Prometheus collector of the sums over the web processes of one address.

    The library's files also hold metrics of other kinds of processes; those are omitted.
    """

    def __init__(self, figures: Iterable[MetricWrapperBase]) -> None:
        self._names = {family.name for figure in figures for family in figure.describe()}
        self._files = MultiProcessCollector(None, SHARED_FOLDER)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics summed over the web processes."""
        web.refresh()
        return [family for family in self._files.collect() if family.name in self._names]


@cache
def registry(process: str) -> CollectorRegistry:
    """Return a registry with the metrics of this kind of process."""
    metrics_registry = CollectorRegistry()
    metrics_registry.register(Build(process))
    if SHARED_FOLDER:
        metrics_registry.register(_SharedCollector(FIGURES[process]))
        return metrics_registry
    ProcessCollector(registry=metrics_registry)
    for figure in FIGURES[process]:
        metrics_registry.register(figure)
    return metrics_registry


class _FixedCollector(Collector):
    """Prometheus collector of given metrics."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the given metrics."""
        return self._families


def text(process: str, additional: Sequence[Metric] = ()) -> bytes:
    """Return the metrics of this process and the `additional` ones in Prometheus' text format.

    If `process` is "", only the additional metrics are returned.
    """
    own = generate_latest(registry(process)) if process else b""
    return own + generate_latest(_FixedCollector(additional))
