"""Credentials for the bus in a whole cluster: revoked at once, refreshed forever, and kept through kills."""

import os
import signal
from functools import partial

import psutil
import pytest

from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, is_ready
from tests.support.effort import swept


def on_bus(cluster: Cluster, worker: Process) -> bool:
    """Whether the worker has a connection to the NATS server."""
    links = psutil.Process(worker.child.pid).net_connections(kind="tcp")
    return any(
        link.raddr and link.raddr.port == cluster.nats.port for link in links if link.status == "ESTABLISHED"
    )


@pytest.mark.rule("nats-9.2", "nats-9.3")
def test_a_revoked_node_leaves_the_bus_within_five_seconds(empty: Cluster) -> None:
    """Also after a restart of the NATS server; its neighbour is not disturbed."""
    web = empty.web()
    empty.controller()
    bad, good = empty.worker("bad", web), empty.worker("good", web)
    for worker in (bad, good):
        eventually(partial(on_bus, empty, worker), seconds=20, what="both are on the bus")
    node = empty.node(web, "bad")
    assert node
    answer = empty.post(web, f"/api/nodes/{node['id']}/identity/revoke", {"reason": "stolen"})
    assert answer.status_code == 200, answer.text
    eventually(lambda: not on_bus(empty, bad), seconds=5, what="the revoked node is off the bus")
    empty.nats.stop()
    empty.nats.start(empty.reaper)
    eventually(lambda: on_bus(empty, good), seconds=30, what="the other one is back")
    eventually(lambda: "secret was revoked" in bad.output(), seconds=60, what="the worker says why")
    assert not on_bus(empty, bad)
    assert bad.alive, "its engines are not ended by a decision that an administrator may take back"


@swept
@pytest.mark.rule("nats-9.3")
def test_a_rotated_secret_costs_a_worker_a_moment_and_no_replica(empty: Cluster) -> None:
    web = empty.web()
    empty.controller()
    worker = empty.worker("w1", web)
    assert empty.embed(web).status_code == 200
    node = empty.node(web, "w1")
    assert node
    before = empty.rows("SELECT id FROM node_models")
    assert empty.post(web, f"/api/nodes/{node['id']}/identity/rotate").status_code == 200
    eventually(lambda: "secret replaced" in worker.output(), seconds=20, what="the secret is replaced")
    former = "SELECT count(*) FROM bus_credentials WHERE revoked_at IS NOT NULL"
    eventually(lambda: empty.rows(former) == [(1,)], seconds=20, what="the former credentials are revoked")
    eventually(lambda: on_bus(empty, worker), seconds=30, what="it is on the bus with new ones")
    assert empty.rows("SELECT id FROM node_models") == before
    assert empty.embed(web).status_code == 200


@swept
@pytest.mark.rule("nats-9.3")
def test_kills_while_credentials_live_for_seconds(empty: Cluster) -> None:
    """`kill -9` of the NATS server, of the web process and of the worker: the node is back within 30 s."""
    ttl = {"LOCALAI_NATS_WORKER_JWT_TTL": "10s"}
    web = empty.web(**ttl)
    empty.controller()
    worker = empty.worker("w1", web)
    assert empty.embed(web).status_code == 200
    for _ in range(3):
        os.kill(empty.nats.pid, signal.SIGKILL)
        empty.nats.start(empty.reaper)
        eventually(lambda: on_bus(empty, worker), seconds=30, what="back after the kill of NATS")
    port = str(web.port)
    web.kill()
    eventually(
        lambda: not on_bus(empty, worker), seconds=30, what="its credentials expire without a web process"
    )
    web = empty.spawn("web", "manage.py", "serve", port=int(port), env={"PORT": port, **ttl})
    eventually(lambda: is_ready(web), seconds=30, what="web is ready")
    eventually(lambda: on_bus(empty, worker), seconds=30, what="back after the kill of the web process")
    worker.kill()
    worker = empty.worker("w1", web)
    eventually(lambda: on_bus(empty, worker), seconds=30, what="back after the kill of the worker")
    eventually(lambda: empty.embed(web).status_code == 200, seconds=30, what="it serves")


def revoke(cluster: Cluster, web: Process, name: str) -> None:
    node = cluster.node(web, name)
    assert node
    answer = cluster.post(web, f"/api/nodes/{node['id']}/identity/revoke", {"reason": "stolen"})
    assert answer.status_code == 200, answer.text


@swept
@pytest.mark.rule("nats-9.2")
def test_a_revocation_survives_the_kill_of_everything_that_carries_it(empty: Cluster) -> None:
    """The rows are the truth: the controller that comes back first tells the NATS server."""
    web, controller = empty.web(), empty.controller()
    workers = {name: empty.worker(name, web) for name in ("one", "two", "three")}
    for worker in workers.values():
        eventually(partial(on_bus, empty, worker), seconds=20, what="all are on the bus")

    controller.kill()
    revoke(empty, web, "one")
    web.kill()
    controller = empty.controller()
    eventually(lambda: not on_bus(empty, workers["one"]), seconds=30, what="told by the next controller")

    web = empty.spawn("web", "manage.py", "serve", port=web.port, env={"PORT": str(web.port)})
    eventually(lambda: is_ready(web), seconds=30, what="web is ready")
    os.kill(empty.nats.pid, signal.SIGKILL)
    revoke(empty, web, "two")
    empty.nats.start(empty.reaper)
    eventually(partial(on_bus, empty, workers["three"]), seconds=30, what="the good one is back")
    told = "SELECT count(*) FROM bus_credentials WHERE revoked_at IS NOT NULL"
    assert empty.rows(told)[0][0] >= 2
    eventually(lambda: controller.output().count("revoked credentials of") >= 2, seconds=30, what="pushed")
    eventually(lambda: not on_bus(empty, workers["two"]), seconds=5, what="told by the same controller")
    assert not on_bus(empty, workers["one"]), "the first revocation is not forgotten with the second"
    assert on_bus(empty, workers["three"])
