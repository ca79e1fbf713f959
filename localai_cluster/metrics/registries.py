"""The metrics of each kind of process, and their text format.

Every process also exposes its build and its resource usage (`process_…`: processor, memory, files). Several
web processes of one address expose the sums of all, whichever of them a scrape reaches, and no resource
usage.
"""

# Some functions of the library carry no types.
# mypy: allow-untyped-calls

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Info, Metric, ProcessCollector, generate_latest
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


BUILD_NAME = PREFIX + "build"
BUILD_MEANING = "Always 1; the labels are the process and its version."


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
    build = Info(BUILD_NAME, BUILD_MEANING, registry=metrics_registry)
    build.info({"process": process, "version": __version__})
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
