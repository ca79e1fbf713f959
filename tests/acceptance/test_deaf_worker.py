"""A worker that sends heartbeats but is deaf on the bus: its work ends with a reason (review R1)."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

from localai_cluster.embedded.nats import nats_binary
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, running_cluster
from tests.support.ports import free_port

WAIT = timedelta(seconds=20)


@contextmanager
def another_bus() -> Iterator[str]:
    """The URL of a NATS server that is not the cluster's, and lets everybody in."""
    port = free_port()
    server = subprocess.Popen(
        [nats_binary(), "-a", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.rule("A7", "A63", "H6", "H7", "O78", "R1.118")
def test_work_for_a_worker_on_the_wrong_bus_is_given_up_and_succeeds_on_the_right_one() -> None:
    """It waited for ever: never sent, because its node is unhealthy, and never stale, because it beats."""
    with running_cluster(CLUSTER_INSTALL_WAIT="20s") as cluster, another_bus() as url:
        web = cluster.web()
        cluster.controller()
        cluster.tasks()
        worker = cluster.worker("deaf", web, LOCALAI_NATS_URL=url)
        eventually(lambda: status(cluster, web) == "healthy", seconds=30, what="it beats")
        node = cluster.node(web, "deaf")
        assert node is not None
        order = f"/api/nodes/{node['id']}/backends/install"
        id = str(cluster.post(web, order, {"backend": "echo"}).json()["jobID"])

        eventually(lambda: "it waits until" in reason(cluster, web, id), seconds=60, what="it says the time")
        said = reason(cluster, web, id)
        until = datetime.fromisoformat(re.sub(r".*until (.*) UTC.*", r"\1+00:00", said))
        assert status(cluster, web) == "unhealthy"

        eventually(lambda: job(cluster, web, id)["processed"], seconds=90, what="it is given up")
        failed = job(cluster, web, id)
        assert failed["error"].startswith("given up: node deaf is unhealthy since "), failed
        assert "it sends heartbeats, but does not answer on the bus" in failed["error"]
        assert failed["nodes"][0]["attempts"] >= 1
        ((finished, unhealthy, heartbeat),) = cluster.rows(
            "SELECT o.finished_at, n.unhealthy_at, n.last_heartbeat FROM operations o, backend_nodes n"
            " WHERE o.id = %s",
            id,
        )
        assert finished >= until
        assert heartbeat > unhealthy + WAIT / 2, "it was heard all the time"

        worker.kill()
        cluster.worker("deaf", web)
        eventually(lambda: status(cluster, web) == "healthy", seconds=60, what="it is on the right bus")
        again = str(cluster.post(web, f"/api/operations/{id}/retry", {}).json()["jobID"])
        eventually(lambda: job(cluster, web, again)["processed"], seconds=60, what="it is installed")
        assert job(cluster, web, again)["completed"]


def status(cluster: Cluster, web: Process) -> str:
    """The node's status."""
    node = cluster.node(web, "deaf")
    return "" if node is None else str(node["status"])


def job(cluster: Cluster, web: Process, id: str) -> dict[str, Any]:
    """The operation."""
    answer: dict[str, Any] = cluster.get(web, f"/api/backends/job/{id}").json()
    return answer


def reason(cluster: Cluster, web: Process, id: str) -> str:
    """The message of the operation."""
    return str(job(cluster, web, id).get("message", ""))
