"""Histories of replicas with real processes, through public interfaces.

Controllers, workers and engines are killed and stopped for a while in any order, while requests, unloads and
drains go on. Once that ends, each engine has its row, each row its engine, and nothing is under way.
"""

import os
import signal
import threading
from contextlib import suppress
from random import Random
from typing import Any

import httpx

from localai_cluster.kit import clock
from tests.acceptance.test_cold_load import write_model
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, engines_of, running_cluster
from tests.support.effort import swept
from tests.sweep import SHOWN

HISTORIES, STEPS = 10, 14
MODELS = ("m", "n")
NODES = ("one", "two")
SETTLES_WITHIN = 240.0
"""Seconds, on a busy machine; a worker that was killed during a start holds a slot for a minute."""
STEPS_OF = (
    ["requests"] * 5
    + ["unloads"] * 3
    + ["kills_controller", "kills_worker", "kills_engine"] * 2
    + ["freezes_controller", "freezes_worker", "thaws", "drains", "resumes"]
)
LEFT = """
SELECT n.name, r.model_name, r.phase, r.reason, r.in_flight, r.stop_error
  FROM node_models r JOIN backend_nodes n ON n.id = r.node_id WHERE r.phase <> 'serving' OR r.in_flight > 0
"""
ACTIVE = "SELECT kind, element, status, message FROM operations WHERE finished_at IS NULL"
SERVING = "SELECT count(*) FROM node_models r JOIN backend_nodes n ON n.id = r.node_id WHERE n.name = %s"


class Stage:
    """Two controllers, two workers, and the requests under way."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.web = cluster.web()
        self.tasks = cluster.tasks()
        self.controllers = [cluster.controller(), cluster.controller()]
        self.workers = {name: cluster.worker(name, self.web) for name in NODES}
        self.frozen: list[Process] = []
        self.threads: list[threading.Thread] = []
        for model in MODELS:
            write_model(cluster, model, load_seconds=1, delay_ms=300)

    def step(self, dice: Random) -> None:
        """Something happens."""
        what = dice.choice(STEPS_OF)
        print(f"  {what}", flush=True)
        getattr(self, what)(dice)

    def requests(self, dice: Random) -> None:
        """A request begins."""
        self._begin("/v1/embeddings", {"model": dice.choice(MODELS), "input": "a"})

    def unloads(self, dice: Random) -> None:
        """An operator has a model unloaded."""
        self._begin("/backend/shutdown", {"model": dice.choice(MODELS)})

    def drains(self, dice: Random) -> None:
        """An operator drains a node."""
        self._begin(f"/api/nodes/{self._node(dice.choice(NODES))}/drain")

    def resumes(self, dice: Random) -> None:
        """An operator resumes a node."""
        self._begin(f"/api/nodes/{self._node(dice.choice(NODES))}/resume")

    def kills_controller(self, dice: Random) -> None:
        """A controller dies and is started again."""
        number = dice.randrange(2)
        self.controllers[number].kill()
        self.controllers[number] = self.cluster.controller()

    def kills_worker(self, dice: Random) -> None:
        """A worker dies with its engines and is started again."""
        name = dice.choice(NODES)
        self.workers[name].kill()
        home = self.cluster.home / f"worker-{name}"
        eventually(lambda: not engines_of(home), seconds=60, what="its engines end with it")
        self.workers[name] = self.cluster.worker(name, self.web)

    def kills_engine(self, dice: Random) -> None:
        """An engine dies."""
        engines = [pid for name in NODES for pid in engines_of(self.cluster.home / f"worker-{name}")]
        if engines:
            with suppress(ProcessLookupError):
                os.kill(dice.choice(sorted(engines)), signal.SIGKILL)

    def freezes_controller(self, dice: Random) -> None:
        """A controller stands still: what it knows grows old."""
        self._freeze(dice.choice(self.controllers))

    def freezes_worker(self, dice: Random) -> None:
        """A worker stands still: its replies come late."""
        self._freeze(self.workers[dice.choice(NODES)])

    def thaws(self, dice: Random | None = None) -> None:
        """What stood still goes on."""
        for process in self.frozen:
            if process.alive:
                process.child.send_signal(signal.SIGCONT)
        self.frozen = []

    def converges(self) -> str:
        """Faults stop; return what is left in the end, empty if nothing is."""
        self.thaws()
        for thread in self.threads:
            thread.join(SETTLES_WITHIN)
        for name in NODES:
            self._post(f"/api/nodes/{self._node(name)}/resume")
        with suppress(AssertionError):
            eventually(lambda: not self.left(), seconds=SETTLES_WITHIN, what="nothing is left to be done")
        return self.left()

    def left(self) -> str:
        """Return what is under way, or an engine or a row too many."""
        left: list[Any] = [*self.cluster.rows(LEFT), *self.cluster.rows(ACTIVE)]
        for name in NODES:
            ((rows,),) = self.cluster.rows(SERVING, name)
            if len(engines := engines_of(self.cluster.home / f"worker-{name}")) != rows:
                left.append(f"{len(engines)} engines and {rows} rows on {name}")
        return "; ".join(map(str, left))

    def _freeze(self, process: Process) -> None:
        if process.alive:
            process.child.send_signal(signal.SIGSTOP)
            self.frozen.append(process)

    def _node(self, name: str) -> str:
        ((id,),) = self.cluster.rows("SELECT id FROM backend_nodes WHERE name = %s", name)
        return str(id)

    def _begin(self, path: str, body: Any = None) -> None:
        thread = threading.Thread(target=self._post, args=(path, body))
        thread.start()
        self.threads.append(thread)

    def _post(self, path: str, body: Any = None) -> None:
        with suppress(httpx.TransportError):
            self.cluster.post(self.web, path, body, timeout=SETTLES_WITHIN)


@swept
def test_histories_with_processes_converge() -> None:
    """Print the seed of each that fails."""
    failed = {}
    with running_cluster(LOCALAI_MODEL_LOAD_WAIT="30s", CLUSTER_UNLOAD_GRACE="2s") as cluster:
        stage = Stage(cluster)
        for seed in range(HISTORIES):
            dice, began = Random(seed), clock.monotonic()
            print(f"history with processes {seed}", flush=True)
            for _ in range(STEPS):
                stage.step(dice)
            if left := stage.converges():
                failed[seed] = left
            print(
                f"| with processes, seed {seed}: {left or 'converged'} ({clock.monotonic() - began:.0f} s)",
                flush=True,
            )
    print(f"{SHOWN}histories with processes {HISTORIES}  steps {STEPS}  failures {len(failed)}")
    assert not failed, failed
