"""Which process has which figures, and their text.

Every process also says what it is, and what the system knows of it (`process_…`: processor, memory, files).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from localai_cluster import __version__
from localai_cluster.metrics import controller, passes, web, worker
from localai_cluster.metrics.kinds import PREFIX

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FIGURES: Mapping[str, tuple[MetricWrapperBase, ...]] = {
    "web": web.FIGURES,
    "controller": (*controller.FIGURES, *passes.FIGURES),
    "tasks": passes.FIGURES,
    "worker": worker.FIGURES,
}
"""By process."""


class Build(Collector):
    """What this process is."""

    NAME = PREFIX + "build_info"
    MEANING = "Always 1: which process this is, and of which version."
    LABELS = ("process", "version")

    def __init__(self, process: str) -> None:
        self._process = process

    def collect(self) -> Iterable[Metric]:
        """One sample."""
        family = GaugeMetricFamily(self.NAME, self.MEANING, labels=self.LABELS)
        family.add_metric([self._process, __version__], 1)
        return [family]


@cache
def registry(process: str) -> CollectorRegistry:
    """The figures of a process of this kind."""
    made = CollectorRegistry()
    made.register(Build(process))
    ProcessCollector(registry=made)
    for figure in FIGURES[process]:
        made.register(figure)
    return made


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """What there is."""
        return self._families


def text(process: str, more: Sequence[Metric] = ()) -> bytes:
    """All figures of a process, and `more`, as Prometheus reads them."""
    return generate_latest(registry(process)) + generate_latest(_Families(more))
