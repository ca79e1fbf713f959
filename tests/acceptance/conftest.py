"""One cluster for the tests that leave it as they found it; those that kill things start their own."""

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, Process, running_cluster


class Shared:
    """A cluster with two web processes, two controllers, the task cluster and one worker."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.webs: list[Process] = [cluster.web(), cluster.web()]
        self.controllers = [cluster.controller(), cluster.controller()]
        self.tasks = cluster.tasks()
        self.worker = cluster.worker("one", self.webs[0])


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    """Started by the first test that asks."""
    with running_cluster() as cluster:
        yield Shared(cluster)


@pytest.fixture
def empty() -> Iterator[Cluster]:
    """A cluster of its own, servers only."""
    with running_cluster() as cluster:
        yield cluster
