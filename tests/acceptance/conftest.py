"""One cluster for the tests that leave it as they found it; those that kill things start their own."""

from collections.abc import Iterator

import pytest

from tests.support.cluster import SCRAPER, Cluster, Process, running_cluster
from tests.support.ports import free_port


class Shared:
    """A cluster with two web processes, two controllers, the task cluster and one worker."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.webs: list[Process] = [cluster.web(), cluster.web()]
        at = f"127.0.0.1:{free_port()}"
        self.controllers = [
            cluster.controller(CLUSTER_CONTROLLER_METRICS_ADDRESS=at),
            cluster.controller(),
        ]
        self.tasks = cluster.tasks()
        self.worker = cluster.worker("one", self.webs[0], LOCALAI_WORKER_METRICS_TOKEN=SCRAPER)
        self.metrics = {
            "web": self.webs[0].url,
            "controller": f"http://{at}",
            "tasks": f"http://{cluster.extra['CLUSTER_TASKS_METRICS_ADDRESS']}",
        }
        """Where server processes serve their figures."""


@pytest.fixture(scope="package")
def shared() -> Iterator[Shared]:
    """Started by the first test that asks; idle, it would cost other tests a tenth of a processor."""
    tasks = f"127.0.0.1:{free_port()}"
    with running_cluster(LOCALAI_METRICS_TOKEN=SCRAPER, CLUSTER_TASKS_METRICS_ADDRESS=tasks) as cluster:
        yield Shared(cluster)


@pytest.fixture
def empty() -> Iterator[Cluster]:
    """A cluster of its own, servers only."""
    with running_cluster() as cluster:
        yield cluster
