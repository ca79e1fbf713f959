"""Unloading and deleting models with real workers, through the public interfaces: what stops, what stays."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.acceptance.test_cold_load import write_model
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, engines_of
from tests.support.effort import swept

STATE = "SELECT state, stop_attempts, in_flight FROM node_models WHERE model_name = %s AND state IS NOT NULL"
DIED = "SELECT count(*) FROM operations WHERE kind = 'model_unload' AND lost_leases > 0"


class Call:
    """A request under way."""

    def __init__(self, ask: Callable[[], httpx.Response]) -> None:
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(ask()))
        self._thread.start()

    @property
    def answer(self) -> httpx.Response:
        """Its answer, waited for."""
        self._thread.join(240)
        return self._answers[0]

    @property
    def over(self) -> bool:
        return bool(self._answers)


class Stage:
    """One web process, one controller, one worker that has the model `served` loaded."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.cluster = cluster
        self.web = cluster.web()
        self.controller = cluster.controller()
        self.worker = cluster.worker("w1", self.web)
        self.home = cluster.home / "worker-w1"
        node = cluster.node(self.web, "w1")
        assert node is not None
        self.at = f"/api/nodes/{node['id']}/models"
        write_model(cluster, "served", **options)
        assert cluster.embed(self.web, model="served").status_code == 200

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.cluster.post(self.web, path, body, timeout=240)

    @property
    def states(self) -> list[tuple[Any, ...]]:
        """State, stops sent and requests of each replica."""
        return self.cluster.rows(STATE, "served")

    def busy(self) -> Call:
        """A request that runs on the replica."""
        call = Call(lambda: self.cluster.embed(self.web, model="served", timeout=240))
        eventually(lambda: self.states and self.states[0][2] == 1, what="the request runs")
        return call


@pytest.mark.rule("http-2.11", "R6.11", "T-UNL-37", "nats-4.5", "nats-4.10")
def test_a_model_is_loaded_watched_unloaded_and_deleted(empty: Cluster) -> None:
    stage = Stage(empty)
    unloaded = stage.post(f"{stage.at}/unload", model_name="served")
    assert (unloaded.status_code, unloaded.json()["message"]) == (200, "model unloaded from node"), (
        unloaded.text
    )
    assert stage.states == []
    assert engines_of(stage.home) == []
    again = stage.post(f"{stage.at}/unload", model_name="served")
    assert (again.status_code, "not loaded on node w1" in again.text) == (404, True)
    assert stage.post("/backend/shutdown", model="served").status_code == 404

    loaded = stage.post("/backend/load", model="served")
    assert (loaded.status_code, loaded.json()["loaded"]) == (200, ["served"]), loaded.text
    monitor = empty.get(stage.web, "/backend/monitor?model=served").json()
    assert [one["node_name"] for one in monitor["replicas"]] == ["w1"]
    shutdown = stage.post("/backend/shutdown", model="served")
    assert (shutdown.status_code, engines_of(stage.home)) == (200, [])
    assert empty.get(stage.web, "/backend/monitor?model=served").status_code == 404

    staged = stage.home / "models" / "served"
    staged.mkdir()
    (staged / "weights.bin").write_bytes(b"x")
    assert empty.embed(stage.web, model="served").status_code == 200
    deleted = stage.post(f"{stage.at}/delete", model_name="served")
    assert (deleted.status_code, staged.exists(), engines_of(stage.home)) == (200, False, []), deleted.text
    assert stage.states == []
    absent = stage.post("/api/nodes/models/delete", model_name="served")
    assert absent.status_code == 200, absent.text


@swept
@pytest.mark.rule("nats-4.5")
def test_a_running_request_ends_well_and_a_new_one_waits_for_the_unload_and_loads_again(
    empty: Cluster,
) -> None:
    stage = Stage(empty, delay_ms=4000)
    before = engines_of(stage.home)
    running = stage.busy()
    unload = Call(lambda: stage.post("/backend/shutdown", model="served"))
    eventually(lambda: stage.states[0][0] == "unloading", what="it leaves the picks")
    late = Call(lambda: empty.embed(stage.web, model="served", timeout=240))
    assert running.answer.status_code == 200, running.answer.text
    assert unload.answer.status_code == 200, unload.answer.text
    assert late.answer.status_code == 200, late.answer.text
    assert not set(before) & set(engines_of(stage.home))
    assert [state for state, _, _ in stage.states] == ["loaded"]


@swept
@pytest.mark.rule("nats-4.5")
def test_a_deadline_of_nothing_cuts_the_request(empty: Cluster) -> None:
    stage = Stage(empty, delay_ms=60_000)
    stage.busy()
    before = set(engines_of(stage.home))
    unload = stage.post(f"{stage.at}/unload", model_name="served", deadline_seconds=0)
    assert unload.status_code == 200, unload.text
    # The request that was cut may have the model loaded again at once.
    assert before
    assert not before & set(engines_of(stage.home))


@swept
def test_a_controller_killed_between_the_statement_and_the_command(empty: Cluster) -> None:
    """The rows say what is left to do; the next controller does it, once."""
    stage = Stage(empty, delay_ms=8000)
    running = stage.busy()
    unload = Call(lambda: stage.post(f"{stage.at}/unload", model_name="served"))
    eventually(lambda: stage.states[0][:2] == ("unloading", 0), what="it leaves the picks")
    stage.controller.kill()
    assert running.answer.status_code == 200
    assert stage.states[0][:2] == ("unloading", 0)
    stage.controller = empty.controller()
    assert unload.answer.status_code == 200, unload.answer.text
    assert (stage.states, engines_of(stage.home)) == ([], [])
    assert empty.rows(DIED) == [(1,)]


@swept
@pytest.mark.rule("C27", "R6.4")
def test_measured_14_a_frozen_worker_answers_late_and_the_unload_succeeds(empty: Cluster) -> None:
    stage = Stage(empty)
    os.kill(stage.worker.child.pid, signal.SIGSTOP)
    try:
        unload = Call(lambda: stage.post(f"{stage.at}/unload", model_name="served"))
        eventually(lambda: stage.states[0][1] >= 2, seconds=120, what="it is asked a second time")
        assert not unload.over
    finally:
        os.kill(stage.worker.child.pid, signal.SIGCONT)
    assert unload.answer.status_code == 200, unload.answer.text
    assert (stage.states, engines_of(stage.home)) == ([], [])


@pytest.mark.rule("R6.11", "T-UNL-6", "T-UNL-38")
def test_measured_3_of_two_nodes_the_dead_one_is_named_and_the_other_is_unloaded(empty: Cluster) -> None:
    stage = Stage(empty)
    second: Process = empty.worker("w2", stage.web)
    copy = """
        INSERT INTO node_models (id, node_id, model_name, replica_index, address, phase, in_flight, last_used,
          backend_type, model_options, config_revision, effective_options_hash, created_at, updated_at)
        SELECT gen_random_uuid(), n.id, 'served', 0, '127.0.0.1:1', 'serving', 0, r.last_used, 'echo',
          '{}', '', '', r.created_at, r.updated_at
        FROM node_models r, backend_nodes n WHERE n.name = 'w2' RETURNING id
    """
    empty.rows(copy)
    second.kill()
    answer = stage.post("/api/nodes/models/unload", model_name="served")
    assert answer.status_code == 502, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith("w2: ")
    assert "w1" not in message
    assert engines_of(stage.home) == []
    assert [state for state, _, _ in stage.states] in (["unloading"], []), "its node may be offline by now"
