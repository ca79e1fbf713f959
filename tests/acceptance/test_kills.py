"""Kill -9 of everything, at the worst moment, with real processes."""

import os
import signal
import threading
from collections.abc import Callable

import httpx
import pytest

from localai_cluster.kit import clock
from tests.acceptance.test_cold_load import write_model
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, engines_of, running_cluster
from tests.support.effort import swept

DEADLINE = 60.0
"""LOCALAI_MODEL_LOAD_WAIT of these clusters, plus what the answer itself takes."""
LATE = 60.0
"""Seconds that an answer may be late on a machine that has something else to do."""


class Requests:
    """First requests under way in threads; each ends in a response or in a broken connection."""

    def __init__(self, cluster: Cluster, web: Process, model: str, count: int = 5) -> None:
        self.ended: list[tuple[httpx.Response | None, float]] = []
        self._threads = [threading.Thread(target=self._one, args=(cluster, web, model)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _one(self, cluster: Cluster, web: Process, model: str) -> None:
        started = clock.monotonic()
        try:
            answer: httpx.Response | None = cluster.embed(web, model=model, timeout=DEADLINE + LATE)
        except httpx.TransportError:
            answer = None
        self.ended.append((answer, clock.monotonic() - started))

    def results(self) -> list[tuple[httpx.Response | None, float]]:
        for thread in self._threads:
            thread.join(DEADLINE + 2 * LATE)
        return self.ended


def loading(cluster: Cluster) -> bool:
    """Whether the load has come as far as the copy of the backend."""
    copying = "kind = 'backend_install' AND status = 'processing' AND current_bytes > 0"
    return bool(cluster.rows(f"SELECT 1 FROM operations WHERE {copying}"))


class Stage:
    """A cluster whose cold load takes a few seconds, and how to bring each part back."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.web = cluster.web()
        self.controller = cluster.controller()
        self.tasks = cluster.tasks()
        size = sum(path.lstat().st_size for path in (cluster.gallery / "echo").rglob("*") if path.is_file())
        self.rate = str(size // 2)
        self.worker = self.start_worker()
        write_model(cluster, "cold", load_seconds=1)

    def start_worker(self) -> Process:
        return self.cluster.worker("one", self.web, LOCALAI_WORKER_DOWNLOAD_RATE=self.rate)

    def restart(self, name: str) -> None:
        """Kills one part and starts it again, as the supervisor does."""
        if name in ("postgres", "nats", "valkey"):
            server = getattr(self.cluster, name)
            os.kill(server.pid, 9)
            server.start(self.cluster.reaper)
            return
        getattr(self, name).kill()
        again: dict[str, Callable[[], Process]] = {
            "controller": self.cluster.controller,
            "tasks": self.cluster.tasks,
            "worker": self.start_worker,
            "web": lambda: self.cluster.spawn(
                "web", "manage.py", "serve", port=self.web.port, env={"PORT": str(self.web.port)}
            ),
        }
        setattr(self, name, again[name]())


@pytest.mark.parametrize(
    "victim",
    [
        "controller",
        *(
            pytest.param(name, marks=swept)
            for name in ("web", "tasks", "worker", "postgres", "nats", "valkey")
        ),
    ],
)
def test_a_cold_load_survives_the_kill_of(victim: str) -> None:
    """Every surviving request ends in time by success or 503 with Retry-After.

    Cut ones succeed when repeated.
    """
    with running_cluster(LOCALAI_MODEL_LOAD_WAIT=f"{DEADLINE:.0f}s") as cluster:
        stage = Stage(cluster)
        requests = Requests(cluster, stage.web, "cold")
        eventually(lambda: loading(cluster), seconds=20, what="the copy has begun")
        stage.restart(victim)
        for answer, took in requests.results():
            assert took <= DEADLINE + LATE
            if answer is None:
                assert victim == "web"
                continue
            assert answer.status_code in (200, 503), answer.text
            assert answer.status_code == 200 or int(answer.headers["Retry-After"]) >= 1
        eventually(lambda: ok(cluster, stage.web), seconds=90, what="a repeated request succeeds")
        nothing_left_behind(cluster)


@swept
def test_a_load_cut_by_the_database_goes_on_without_tasks() -> None:
    """Nothing waits for one process: a controller takes back what an outage made it let go of."""
    with running_cluster(LOCALAI_MODEL_LOAD_WAIT=f"{DEADLINE:.0f}s") as cluster:
        stage = Stage(cluster)
        os.killpg(stage.tasks.child.pid, signal.SIGKILL)
        requests = Requests(cluster, stage.web, "cold")
        eventually(lambda: loading(cluster), seconds=20, what="the copy has begun")
        stage.restart("postgres")
        answers = [answer for answer, _ in requests.results()]
        # Who looked while the database was away is told to come back.
        assert {answer and answer.status_code for answer in answers} <= {200, 503}
        eventually(lambda: ok(cluster, stage.web), seconds=60, what="the load goes on")


@swept
@pytest.mark.rule("O88")
def test_tasks_outlive_outages_from_their_start_on() -> None:
    """The process of the tasks may start before its database and outlives it."""
    done = "SELECT count(*) FROM django_q_task WHERE success"
    with running_cluster() as cluster:
        cluster.postgres.stop()
        tasks = cluster.tasks()
        eventually(lambda: "cannot take tasks" in tasks.output(), what="it looks for tasks")
        cluster.postgres.start(cluster.reaper)
        cluster.controller()
        eventually(lambda: cluster.rows(done) > [(0,)], seconds=30, what="a task is done")
        os.kill(cluster.postgres.pid, signal.SIGKILL)
        cluster.postgres.start(cluster.reaper)
        ((before,),) = cluster.rows(done)
        eventually(lambda: cluster.rows(done) > [(before,)], seconds=30, what="tasks go on")
        assert tasks.alive
        assert [line for line in tasks.output().splitlines() if "Traceback" in line] == []


def ok(cluster: Cluster, web: Process) -> bool:
    try:
        return cluster.embed(web, model="cold", timeout=DEADLINE + LATE).status_code == 200
    except httpx.TransportError:
        return False


def nothing_left_behind(cluster: Cluster) -> None:
    """I2, I8: no operation without an owner or a next look; no engine too many; nothing in flight."""
    idle = "SELECT coalesce(sum(in_flight), 0) FROM node_models"
    eventually(lambda: cluster.rows(idle) == [(0,)], seconds=30, what="in-flight returns to 0")
    active = (
        "SELECT kind, element, status FROM operations WHERE status = 'processing' AND lease_until < %s"
        " OR status IN ('pending', 'waiting_for_nodes') AND next_attempt_at < %s - interval '30 seconds'"
    )
    eventually(
        lambda: cluster.rows(active, clock.now(), clock.now()) == [], seconds=30, what="no orphaned operation"
    )
    stuck = (
        "SELECT i.op, i.backend FROM pending_backend_ops i JOIN backend_nodes n ON n.id = i.node_id"
        " WHERE i.lease_until < %s OR i.lease_until IS NULL AND n.status = 'healthy'"
        " AND i.next_retry_at < %s - interval '30 seconds'"
    )
    eventually(
        lambda: cluster.rows(stuck, clock.now(), clock.now()) == [], seconds=30, what="no orphaned intent"
    )
    eventually(lambda: len(engines_of(cluster.home / "worker-one")) == 1, seconds=30, what="one engine")


def test_in_flight_is_true_again_after_a_web_process_died() -> None:
    """Within 30 s after kill -9, by the liveness pass that the schedules run."""
    with running_cluster() as cluster:
        webs = [cluster.web(), cluster.web()]
        cluster.controller()
        cluster.tasks()
        cluster.worker("one", webs[0])
        write_model(cluster, "slow", delay_ms=60000)
        write_model(cluster, "cold")
        requests = Requests(cluster, webs[0], "slow", count=3)
        count = "SELECT in_flight FROM node_models WHERE model_name = 'slow'"
        eventually(lambda: cluster.rows(count) == [(3,)], seconds=30, what="three requests counted in")
        webs[0].kill()
        died = clock.monotonic()
        eventually(
            lambda: cluster.rows(count) == [(0,)], seconds=30, what="the dead process gives its counts back"
        )
        print(f"in-flight true again after {clock.monotonic() - died:.1f} s")
        assert all(answer is None for answer, _ in requests.results())
        assert cluster.rows("SELECT count(*) FROM web_processes") == [(1,)]


def test_a_killed_engine_is_removed_and_the_request_goes_on() -> None:
    """A replica that refuses the connection is removed; the same request loads again and is answered.

    One that gets no request goes within seconds too: its worker reports the end at once.
    """
    gone = "SELECT count(*) FROM node_models"
    with running_cluster() as cluster:
        web = cluster.web()
        cluster.controller()
        cluster.worker("one", web)
        assert cluster.embed(web).status_code == 200
        (engine,) = engines_of(cluster.home / "worker-one")
        os.kill(engine, 9)
        eventually(lambda: engine not in engines_of(cluster.home / "worker-one"), what="the engine is gone")
        answer = cluster.embed(web)
        assert answer.status_code == 200, answer.text
        (again,) = engines_of(cluster.home / "worker-one")
        assert again != engine
        assert cluster.rows(gone) == [(1,)]
        os.kill(again, 9)
        died = clock.monotonic()
        eventually(lambda: cluster.rows(gone) == [(0,)], seconds=10, what="the replica of the engine goes")
        print(f"the row is gone after {clock.monotonic() - died:.1f} s")
        assert cluster.embed(web).status_code == 200


@swept
def test_a_killed_worker_leaves_no_engine() -> None:
    """No orphan in /proc: the process reaper ends what the worker started."""
    with running_cluster() as cluster:
        web = cluster.web()
        cluster.controller()
        worker = cluster.worker("one", web)
        assert cluster.embed(web).status_code == 200
        assert engines_of(cluster.home / "worker-one")
        worker.kill()
        eventually(lambda: not engines_of(cluster.home / "worker-one"), seconds=20, what="no engine is left")
