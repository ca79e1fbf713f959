"""What is installed where, with real workers: as soon as the installation ends, and after a restart."""

import shutil
import signal
from datetime import datetime, timedelta
from typing import Any

import pytest

from localai_cluster.kit import clock
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process
from tests.support.effort import swept


def backends(cluster: Cluster, web: Process, node_id: str) -> tuple[list[str], Any]:
    """The names on a node, and since when that is known."""
    answer = cluster.get(web, f"/api/nodes/{node_id}/backends")
    assert answer.status_code == 200, answer.text
    return [entry["name"] for entry in answer.json()], answer.headers.get("x-as-of")


OLDER = "UPDATE backend_nodes SET inventory_at = inventory_at - interval '2 minutes' RETURNING name"


@swept
@pytest.mark.rule("http-2.10", "http-4.1")
def test_what_is_installed_where(empty: Cluster) -> None:
    """Two controllers and two web processes: everyone sees the same, and no one waits for a worker."""
    web, other = empty.web(), empty.web()
    for _ in range(2):
        empty.controller()
    worker = empty.worker("w1", web)
    node = empty.node(web, "w1")
    assert node is not None
    at = node["id"]
    eventually(lambda: backends(empty, web, at)[1], seconds=20, what="the first list")
    job = empty.post(web, f"/api/nodes/{at}/backends/install", {"backend": "echo"}).json()
    eventually(lambda: empty.get(other, job["statusUrl"]).json().get("completed"), what="echo is installed")
    assert backends(empty, other, at)[0] == ["echo"]
    entries = empty.get(other, "/api/backends").json()["backends"]
    assert {one["name"] for one in entries if one["nodes"]} == {"echo"}

    worker.child.send_signal(signal.SIGSTOP)
    assert empty.rows(OLDER) == [("w1",)]
    began = clock.monotonic()
    assert backends(empty, web, at)[0] == ["echo"]
    assert clock.monotonic() - began < 10, "a page does not wait for a frozen worker"
    worker.child.send_signal(signal.SIGCONT)
    worker.kill()
    shutil.rmtree(empty.home / "worker-w1" / "backends" / "echo")
    restarted = clock.now() - timedelta(seconds=1)
    empty.worker("w1", web)
    eventually(lambda: backends(empty, web, at)[0] == [], seconds=20, what="the list after a restart")
    assert datetime.fromisoformat(backends(empty, other, at)[1]) > restarted
