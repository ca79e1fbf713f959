"""Workers that are killed, and workers that only seem to be, with real processes."""

import signal
from typing import Any

import pytest

from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, running_cluster
from tests.support.effort import swept


@swept
@pytest.mark.rule("R5.4", "I13")
def test_a_killed_worker_is_missed_on_the_bus_and_a_living_one_is_never_offline() -> None:
    """Issue 22, item 7. The other worker lives through restarts of NATS and a sleep of the controller."""
    with running_cluster() as cluster:
        web, controller = cluster.web(), cluster.controller()
        killed, _ = cluster.worker("killed", web), cluster.worker("alive", web)
        killed.kill()
        eventually(lambda: status(cluster, web, "killed") == "unhealthy", seconds=60, what="it is in doubt")
        eventually(lambda: status(cluster, web, "killed") == "offline", seconds=120, what="it is offline")
        for kind in ("marked_unhealthy", "fell_silent"):
            ((cause,),) = cluster.rows(
                "SELECT cause FROM node_events WHERE node_name = 'killed' AND kind = %s", kind
            )
            assert cause.endswith(", and nothing listens for it on the bus"), cause
        for _ in range(3):
            cluster.nats.stop()
            cluster.nats.start()
            controller.child.send_signal(signal.SIGSTOP)
            heard = beat(cluster)
            eventually(lambda: beat(cluster) > heard, seconds=60, what="it is on the bus again")  # noqa: B023
            controller.child.send_signal(signal.SIGCONT)
        cluster.worker("killed", web)
        eventually(lambda: status(cluster, web, "killed") == "healthy", seconds=60, what="it is back")
        assert status(cluster, web, "alive") == "healthy"
        assert not cluster.rows(
            "SELECT 1 FROM node_events WHERE node_name = 'alive' AND kind = 'fell_silent'"
        )


def beat(cluster: Cluster) -> Any:
    ((at,),) = cluster.rows("SELECT last_heartbeat FROM backend_nodes WHERE name = 'alive'")
    return at


def status(cluster: Cluster, web: Process, name: str) -> str:
    node = cluster.node(web, name)
    return str(node["status"]) if node else ""
