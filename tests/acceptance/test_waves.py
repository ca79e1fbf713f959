"""Upgrades in waves with real servers: no request fails, and no kill or choice leaves one half-way."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.acceptance.test_cold_load import write_model
from tests.acceptance.test_operations import bus_of, ended, job, parts
from tests.conftest import eventually
from tests.support.cluster import TOKEN, Cluster, Process, running_cluster
from tests.support.effort import swept
from tests.support.simulator import Act, Fleet, Script, fleet

REPLICAS = (
    "SELECT n.name FROM node_models r JOIN backend_nodes n ON n.id = r.node_id WHERE r.state = 'loaded'"
)
LOAD_BESIDES = """
from localai_cluster.kit import clock
from operations.ledger import admission
besides = {besides!r}
wanted = admission.OperationRequest(
    "model_load",
    key="model:served#0",
    element="served",
    by=admission.Requester("test"),
    payload={{"besides": besides}},
)
admission.admit(wanted, now=clock.now())
"""
TURNS = """
SELECT node_name, started_at, finished_at FROM operation_targets WHERE operation_id = %s ORDER BY started_at
"""


class Requests:
    """Requests one after the other, by several callers, until told to stop; how each was answered."""

    def __init__(self, cluster: Cluster, web: Process, model: str, callers: int = 2) -> None:
        self.answers: list[int] = []
        self._enough = threading.Event()
        asked = (cluster, web, model)
        self._callers = [threading.Thread(target=self._ask, args=asked) for _ in range(callers)]
        for caller in self._callers:
            caller.start()

    def _ask(self, cluster: Cluster, web: Process, model: str) -> None:
        while not self._enough.is_set():
            self.answers.append(cluster.embed(web, model=model).status_code)

    def end(self) -> None:
        """Returns when the last one is answered."""
        self._enough.set()
        for caller in self._callers:
            caller.join()


@contextmanager
def under_requests(cluster: Cluster, web: Process, model: str) -> Iterator[Requests]:
    requests = Requests(cluster, web, model)
    try:
        yield requests
    finally:
        requests.end()


def waves(cluster: Cluster, web: Process, backend: str, **body: Any) -> str:
    """Starts an upgrade in waves on all nodes; answers its id."""
    started = cluster.post(web, f"/api/backends/upgrade/{backend}", {"waves": {}, **body})
    assert started.status_code == 200, started.text
    id: str = started.json()["jobID"]
    return id


def listed(cluster: Cluster, web: Process, id: str) -> dict[str, Any]:
    """The operation as the live list has it."""
    found = cluster.get(web, "/api/operations").json()["operations"]
    return next(one for one in found if one["jobID"] == id)


@pytest.mark.rule("UW26")
def test_no_request_fails_while_the_backend_of_three_nodes_is_upgraded(empty: Cluster) -> None:
    web = empty.web()
    empty.controller()
    names = ["w1", "w2", "w3"]
    for name in names:
        empty.worker(name, web)
    installed = empty.post(web, "/api/backends/install/echo", {}).json()["jobID"]
    assert ended(empty, web, installed).get("completed")
    write_model(empty, "served")
    while len(on := [name for (name,) in empty.rows(REPLICAS)]) < len(names):
        nodes = (empty.node(web, name) for name in on)
        besides = [node["id"] for node in nodes if node is not None]
        empty.manage("shell", "-c", LOAD_BESIDES.format(besides=besides))
        count = len(on)
        more = partial(more_than, empty, count)
        eventually(more, seconds=60, what="another replica")
    with under_requests(empty, web, "served") as requests:
        id = waves(empty, web, "echo")
        eventually(lambda: job(empty, web, id)["processed"], seconds=120, what="the upgrade has ended")
        said = job(empty, web, id)
    assert said.get("completed"), said
    assert set(requests.answers) == {200}
    turns = empty.rows(TURNS, id)
    assert sorted(name for name, _, _ in turns) == names
    assert all(before[2] <= after[1] for before, after in pairwise(turns)), turns
    assert empty.rows("SELECT count(*) FROM node_models WHERE owner_kind = 'intent'") == [(0,)]


def more_than(cluster: Cluster, count: int) -> bool:
    return len(cluster.rows(REPLICAS)) > count


SCRIPTS = [
    Script({"backend.upgrade": [Act(refuse="no such image"), Act(refuse="no such image"), Act(seconds=1)]}),
    Script({"backend.upgrade": Act(seconds=1)}),
    Script({"backend.upgrade": Act(seconds=1)}),
]
CANARY, SECOND, THIRD = "simulated-0", "simulated-1", "simulated-2"


@swept
@pytest.mark.rule("UW26")
async def test_choices_kills_and_cancellation_between_waves() -> None:
    with running_cluster() as cluster:
        web = await asyncio.to_thread(cluster.web)
        controllers = [await asyncio.to_thread(cluster.controller) for _ in range(2)]
        nodes = fleet(web.url, TOKEN, 3, bus=bus_of(cluster), script=lambda number: SCRIPTS[number])
        async with nodes as simulated:
            installed = await asyncio.to_thread(cluster.post, web, "/api/backends/install/llama-cpp", {})
            await asyncio.to_thread(ended, cluster, web, installed.json()["jobID"])
            await asyncio.to_thread(stopped_after_the_canary, cluster, web, simulated)
            await asyncio.to_thread(continued_after_the_canary, cluster, web, simulated)
            await asyncio.to_thread(killed_between_waves, cluster, web, controllers)
            await asyncio.to_thread(cancelled_in_wave_2, cluster, web, simulated)


def asks(cluster: Cluster, web: Process, id: str) -> bool:
    return bool(listed(cluster, web, id)["waves"]["state"] == "asks")


def stopped_after_the_canary(cluster: Cluster, web: Process, simulated: Fleet) -> None:
    id = waves(cluster, web, "llama-cpp")
    eventually(lambda: asks(cluster, web, id), what="the canary has failed")
    answer = cluster.post(web, f"/api/operations/{id}/waves", {"choice": "stop"})
    assert answer.status_code == 200, answer.text
    said = job(cluster, web, id)
    assert parts(said) == {CANARY: "error", SECOND: "cancelled", THIRD: "cancelled"}
    assert (said["state"], said["error"]) == ("failed", f"{CANARY}: no such image")
    assert len(simulated.received("backend.upgrade")) == 1


def continued_after_the_canary(cluster: Cluster, web: Process, simulated: Fleet) -> None:
    id = waves(cluster, web, "llama-cpp")
    eventually(lambda: asks(cluster, web, id), what="the canary has failed again")
    assert len(simulated.received("backend.upgrade")) == 2
    answer = cluster.post(web, f"/api/operations/{id}/waves", {"choice": "continue"})
    assert answer.status_code == 200, answer.text
    said = ended(cluster, web, id)
    assert parts(said) == {CANARY: "error", SECOND: "success", THIRD: "success"}


def killed_between_waves(cluster: Cluster, web: Process, controllers: list[Process]) -> None:
    id = waves(cluster, web, "llama-cpp")
    eventually(lambda: parts(job(cluster, web, id))[CANARY] == "success", what="the canary is done")
    controllers[0].kill()
    controllers[1].kill()
    cluster.controller()
    eventually(lambda: job(cluster, web, id)["processed"], seconds=60, what="the upgrade has ended")
    said = job(cluster, web, id)
    assert set(parts(said).values()) == {"success"}, said
    turns = cluster.rows(TURNS, id)
    assert all(before[2] <= after[1] for before, after in pairwise(turns)), turns


def cancelled_in_wave_2(cluster: Cluster, web: Process, simulated: Fleet) -> None:
    second, third = (worker.machine for worker in simulated.workers[1:])
    second.script = Script({"backend.upgrade": Act(seconds=120)})
    sent, before = second.counts["backend.upgrade"], third.counts["backend.upgrade"]
    id = waves(cluster, web, "llama-cpp")
    eventually(lambda: second.counts["backend.upgrade"] > sent, what="wave 2 is under way")
    assert cluster.post(web, f"/api/operations/{id}/cancel", {}).status_code == 200
    eventually(lambda: simulated.count("backend.cancel"), what="the worker is asked to stop")
    eventually(lambda: not cluster.rows("SELECT 1 FROM pending_backend_ops"), what="nothing is left to do")
    said = job(cluster, web, id)
    assert parts(said) == {CANARY: "success", SECOND: "cancelled", THIRD: "cancelled"}
    assert third.counts["backend.upgrade"] == before


@swept
@pytest.mark.parametrize("confirmed", [False, True])
def test_a_last_replica_goes_only_when_it_is_named(empty: Cluster, confirmed: bool) -> None:
    web = empty.web()
    empty.controller()
    empty.worker("w1", web)
    write_model(empty, "served")
    assert empty.embed(web, model="served").status_code == 200
    body: dict[str, Any] = {"waves": {}} | ({"last_replicas": ["served"]} if confirmed else {})
    eventually(lambda: empty.rows("SELECT 1 FROM node_backends WHERE name = 'echo'"), what="it is listed")
    answer = empty.post(web, "/api/backends/upgrade/echo", body)
    if confirmed:
        assert ended(empty, web, answer.json()["jobID"]).get("completed")
        assert empty.rows(REPLICAS) == []
    else:
        assert (answer.status_code, answer.json()["last_replicas"]) == (409, ["served"])
        assert empty.rows(REPLICAS) == [("w1",)]
