"""A worker is stopped from the control plane, with real processes (review R12)."""

import pytest

from tests.conftest import eventually
from tests.support.cluster import running_cluster


@pytest.mark.rule("nats-4.11", "T-UNL-40")
def test_a_worker_that_is_stopped_leaves_and_its_process_ends() -> None:
    """The node stays registered, offline, until its machine starts the worker again."""
    with running_cluster() as cluster:
        web = cluster.web()
        cluster.controller()
        worker = cluster.worker("one", web)
        node = cluster.node(web, "one")
        assert node is not None
        asked = cluster.post(web, f"/api/nodes/{node['id']}/stop", {"reason": "moves"})
        assert asked.status_code == 202, asked.text
        job = asked.json()["statusUrl"]
        eventually(lambda: cluster.get(web, job).json()["processed"], seconds=60, what="it has stopped")
        assert cluster.get(web, job).json()["completed"]
        eventually(lambda: not worker.alive, seconds=60, what="its process has ended")
        left = cluster.node(web, "one")
        assert left is not None
        assert left["status"] == "offline"
