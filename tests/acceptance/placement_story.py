"""`make placement-story`: plays docs/placement-story.md on five real workers and writes down every reason.

The GPUs are those of the workers' test setting. The engine is the example that answers at once. The models
are sparse GGUF files with a true header, so the product estimates them like any others. Each scene waits for
what it is about and then prints the new records of placement, what `explain` says and what the rules say.
Only a step that cannot go on ends it; a person compares `build/placement-story.txt` with the document.
"""

import os
import signal
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from localai_cluster.kit import clock
from tests.conftest import eventually
from tests.support.cluster import ROOT, Cluster, engines_of, running_cluster

SAID = ROOT / "build" / "placement-story.txt"
GIB = 2**30
WORKERS = {
    "attic": ("1x24GiB:17GiB", "tier=chat"),
    "barn": ("2x24GiB:17GiB", "tier=chat"),
    "cellar": ("1x24GiB+1x48GiB:17GiB", ""),
    "dock": ("4x16GiB:56GiB", ""),
    "eyrie": ("1x40GiB:17GiB", "tier=chat"),
}
"""Name -> GPUs and what each engine takes of them, labels."""
PATIENCE = 120.0
"""Seconds for what needs some passes."""
IDLE = 420.0
"""Until a replica that idles for five minutes is retired."""


@dataclass(frozen=True)
class Model:
    """A definition and its file."""

    name: str
    weights: int
    """GiB."""
    context: int = 8192
    embedding: int = 4096
    delay_ms: int = 0


MODELS = (
    Model("chat", 16, delay_ms=40),
    Model("solo", 16),
    Model("burst", 16, delay_ms=3000),
    Model("wide", 36, context=147_456, embedding=8192),
    Model("guest", 32, context=147_456, embedding=8192),
    Model("giant", 40, context=524_288, embedding=8192),
)


class Requests:
    """Requests for one model, several at a time without a pause, until the end of the block."""

    def __init__(self, teller: "Teller", model: str, at_once: int) -> None:
        self.answers: Counter[int] = Counter()
        self.dims: Counter[int] = Counter()
        self._teller, self._model = teller, model
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(at_once)]

    def __enter__(self) -> "Requests":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._over.is_set():
            answer = self._teller.cluster.embed(self._teller.web, model=self._model)
            self.answers[answer.status_code] += 1
            if answer.is_success:
                self.dims[len(answer.json()["data"][0]["embedding"])] += 1
            else:
                self._teller.say(f"A REQUEST FAILED: {answer.status_code} {answer.text}")


class Teller:
    """The cluster, and what was said."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.began = clock.monotonic()
        self._told = 0
        SAID.parent.mkdir(exist_ok=True)
        SAID.write_text("")
        self.web = cluster.web()
        self.controller, self.tasks = cluster.controller(), cluster.tasks()
        for name, (gpus, labels) in WORKERS.items():
            cluster.worker(name, self.web, LOCALAI_TEST_GPUS=gpus, LOCALAI_NODE_LABELS=labels)
        for model in MODELS:
            self.define(model)
        eventually(lambda: all(self.node(name)["status"] == "healthy" for name in WORKERS), what="healthy")

    def say(self, *words: object) -> None:
        """A line of the record."""
        line = f"[{clock.monotonic() - self.began:6.1f}] {' '.join(map(str, words))}"
        print(line, flush=True)
        with SAID.open("a") as file:
            file.write(line + "\n")

    def define(self, model: Model, **options: Any) -> None:
        """Writes the file of the model and its definition; `options` go to the engine."""
        write_weights(self.cluster, model)
        options = {"delay_ms": model.delay_ms, **options}
        lines = [f"name: {model.name}", "backend: echo", "embeddings: true", f"context_size: {model.context}"]
        lines += ["parameters:", f"  model: {model.name}.gguf", "options:"]
        lines += [f'  - "{key}:{value}"' for key, value in options.items()]
        draft = self.cluster.models / f"{model.name}.draft"
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(self.cluster.models / f"{model.name}.yaml")

    def get(self, path: str) -> Any:
        """What REST answers."""
        return self.cluster.get(self.web, path).json()

    def post(self, path: str, body: Any = None) -> Any:
        """Asks over REST and says so."""
        answer = self.cluster.post(self.web, path, body)
        self.say(f"POST {path} {body or ''} -> {answer.status_code}")
        return answer.json()

    def node(self, name: str) -> dict[str, Any]:
        """A node as the API tells it."""
        found = self.cluster.node(self.web, name)
        assert found is not None, f"{name} is not registered"
        return found

    def ask(self, model: str) -> None:
        """One request, and what came of it."""
        begun = clock.monotonic()
        answer = self.cluster.embed(self.web, model=model)
        text = "" if answer.is_success else answer.text
        self.say(
            f"a request for {model}: {answer.status_code} after {clock.monotonic() - begun:.1f} s {text}"
        )

    def explain(self, model: str) -> Any:
        """`GET /api/models/:model/explain`."""
        return self.get(f"/api/models/{model}/explain")

    def serving(self, model: str) -> set[str]:
        """The nodes where replicas of the model are loaded."""
        return {one["node"] for one in self.explain(model)["replicas"] if one["state"] == "loaded"}

    def rule(self, model: str) -> Any:
        """What the last pass made of the rule."""
        rules = {one["model_name"]: one for one in self.get("/api/nodes/scheduling")}
        return rules.get(model, {}).get("state", {})

    def reasons(self, *models: str) -> None:
        """Says the records since the last time; of these models replicas, rule, and what comes next."""
        names = [model.name for model in MODELS]
        records = {one["id"]: (name, one) for name in names for one in self.explain(name)["records"]}
        for id, (name, one) in sorted(records.items()):
            if id > self._told:
                self.say(record_text(name, one))
                self._told = id
        for name in models:
            told = self.explain(name)
            at = [f"#{one['replica_index']} {one['state']} on {one['node']}" for one in told["replicas"]]
            self.say(
                f"explain {name}: {', '.join(at) or 'no replica'}; the next request: {told['next']['says']}"
            )
            if self.rule(name):
                self.until_told(name)
                state = self.rule(name)
                figures = {key: state[key] for key in ("wanted", "current", "loading", "reason")}
                self.say(f"rule {name}: {figures}")

    def until_told(self, model: str) -> None:
        """Waits until the rule's pass has seen what serves now."""

        def seen() -> bool:
            return bool(self.rule(model)["current"] == len(self.serving(model)))

        eventually(seen, seconds=PATIENCE, what="the rule says so")

    def memory(self) -> None:
        """What is free on each GPU, by the last heartbeats."""
        for name in WORKERS:
            gpus = self.get(f"/api/nodes/{self.node(name)['id']}")["gpus"]
            free = [f"{one['free_vram'] / GIB:.0f} of {one['total_vram'] / GIB:.0f}" for one in gpus]
            self.say(f"{name}: GiB free {', '.join(free)}")


def record_text(model: str, one: dict[str, Any]) -> str:
    """A kept decision in a line, with the facts behind it."""
    at = f" on {one['node']}#{one['replica_index']}" if one["node"] else ""
    parts = [f"record {one['id']} {one['kind']} {model}: {one['outcome']}{at}: {one['reason']}"]
    if one["best"]:
        first = one["best"][0]
        parts.append(f"GPUs {first.get('gpus', [])}, needs {one['need']['vram'] / GIB:.1f} GiB")
        others = one["best"][2:]
        parts += [f"behind it {other['node']}: {other['against']}" for other in others]
    parts += [f"not {miss['node']}: {miss['reason']}" for miss in one["misses"]]
    parts += [f"evicts {gone['replica']}, idle since {gone['last_used']}" for gone in one["evicts"]]
    return "\n           ".join(parts)


def write_weights(cluster: Cluster, model: Model) -> None:
    """A GGUF file with a header and nothing behind it; it takes no room on the disk."""
    figures = {"block_count": 32, "embedding_length": model.embedding, "attention.head_count_kv": 8}
    pairs = [(f"llama.{key}".encode(), value) for key, value in figures.items()]
    packed = [struct.pack(f"<Q{len(key)}sII", len(key), key, 4, value) for key, value in pairs]
    with (cluster.models / f"{model.name}.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(packed)) + b"".join(packed))
        file.truncate(model.weights * GIB)


def minimums(one: Teller) -> None:
    """A rule wants two replicas of a model that was never asked for, on nodes with a label."""
    rule = {"model_name": "chat", "min_replicas": 2, "node_selector": {"tier": "chat"}}
    preview = one.post("/api/placement/plan", {"rule": rule})
    one.say(f"preview: {preview['says']}: {preview['loads']}")
    one.post("/api/nodes/scheduling", rule)
    eventually(lambda: len(one.serving("chat")) == 2, seconds=PATIENCE, what="the minimum is met")
    one.reasons("chat")


def best_fit(one: Teller) -> None:
    """A first request loads a model on the GPU that is left with the least."""
    one.ask("solo")
    one.reasons("solo")


def split(one: Teller) -> None:
    """A model larger than any free GPU is split over those of one node."""
    one.ask("wide")
    one.reasons("wide")
    one.memory()


def burst(one: Teller) -> None:
    """Slow requests keep every replica busy; the rule allows three."""
    one.post("/api/nodes/scheduling", {"model_name": "burst", "max_replicas": 3})
    with Requests(one, "burst", 6) as requests:
        eventually(lambda: len(one.serving("burst")) == 3, seconds=2 * PATIENCE, what="three serve")
        one.reasons("burst")
    one.say(f"answers: {dict(requests.answers)}")


def crash(one: Teller) -> None:
    """`kill -9` of an engine that a minimum wants."""
    node = sorted(one.serving("chat"))[0]
    before, pid = {row["id"] for row in one.explain("chat")["replicas"]}, engine_of(one, "chat", node)
    begun = clock.monotonic()
    os.kill(pid, signal.SIGKILL)
    one.say(f"kill -9 of chat's engine on {node}")
    eventually(lambda: new_and_serving(one, before), seconds=PATIENCE, what="two serve again")
    one.say(f"two serve again after {clock.monotonic() - begun:.1f} s")
    one.reasons("chat")


def engine_of(one: Teller, model: str, node: str) -> int:
    """The process of the model's engine on a node, by the port it was told to listen on."""
    query = """SELECT r.address FROM node_models r JOIN backend_nodes n ON n.id = r.node_id
        WHERE r.model_name = %s AND n.name = %s"""
    ((address,),) = one.cluster.rows(query, model, node)
    port = address.rpartition(":")[2].encode()
    for pid in engines_of(one.cluster.home / f"worker-{node}"):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if port in file.read():
                return pid
    raise AssertionError(f"no engine listens on {address}")


def new_and_serving(one: Teller, before: set[str]) -> bool:
    """Whether two replicas of `chat` serve, not both of them from before."""
    found = {row["id"] for row in one.explain("chat")["replicas"] if row["state"] == "loaded"}
    return len(found) == 2 and found != before


def drain(one: Teller) -> None:
    """A node is drained; its replica of `chat` has to go to another one."""
    with Requests(one, "chat", 2) as requests:
        one.post(f"/api/nodes/{one.node('eyrie')['id']}/drain", {"reason": "its fan is replaced"})
        elsewhere = {"attic", "barn"}
        eventually(lambda: one.serving("chat") == elsewhere, seconds=PATIENCE, what="two serve elsewhere")
        one.reasons("chat")
    one.say(f"answers meanwhile: {dict(requests.answers)}")
    one.post(f"/api/nodes/{one.node('eyrie')['id']}/resume")
    eventually(lambda: one.node("eyrie")["status"] == "healthy", what="eyrie is back")


def edit(one: Teller) -> None:
    """The definition of `chat` is edited while requests run: answers of 768 numbers become answers of 512."""
    with Requests(one, "chat", 4) as requests:
        former = revisions(one)
        eventually(lambda: requests.dims[768] > 20, what="requests run")
        one.define(MODELS[0], dims=512)
        one.say("chat.yaml is edited: dims:512")
        eventually(lambda: both_new(one, former), seconds=2 * PATIENCE, what="both are replaced")
        since = requests.dims[512]
        eventually(lambda: requests.dims[512] > since + 20, what="requests run")
        one.reasons("chat")
    one.say(f"answers: {dict(requests.answers)}, by length: {dict(requests.dims)}")


def revisions(one: Teller) -> list[str]:
    """By which definition each replica of `chat` was loaded, whatever its state."""
    query = "SELECT config_revision FROM node_models WHERE model_name = 'chat'"
    return [revision for (revision,) in one.cluster.rows(query)]


def both_new(one: Teller, former: list[str]) -> bool:
    """Whether two replicas of `chat` are left and neither is of the former definition."""
    found = revisions(one)
    return len(found) == 2 and set(found).isdisjoint(former)


def evict(one: Teller) -> None:
    """A model that fits nowhere beside what is loaded, and that may take the place of what is used least."""
    one.memory()
    one.ask("solo")
    one.ask("guest")
    one.reasons("guest", "wide")


def nowhere(one: Teller) -> None:
    """A model that no node could ever take."""
    one.ask("giant")
    one.reasons("giant")
    plan = one.post("/api/placement/plan", {"model": "giant", "nodes": [{"count": 1, "vram_gib": 160}]})
    for found in plan["decisions"]:
        one.say(f"plan with one node of 160 GiB: {found['outcome']} on {found['node']}: {found['reason']}")


def scale_down(one: Teller) -> None:
    """Five minutes after the burst one replica is enough."""
    eventually(lambda: len(one.serving("burst")) <= 1, seconds=IDLE, what="one is left")
    one.reasons("burst", "chat")
    one.memory()


def again(one: Teller) -> None:
    """Another process makes every stored decision again, from the rows alone."""
    script = (
        "from nodes.models import PlacementRecord as P; from nodes.loading import load_explanation as r;"
        " found = [(o.kind, r.replay(o), r.recorded_decision(o)) for o in P.objects.all()];"
        " print(len(found), 'records:', sum(a == b for _, a, b in found), 'made again alike,',"
        " sum(a is None for _, a, _ in found), 'without a snapshot,',"
        " [(k, b.reason) for k, a, b in found if a is not None and a != b], 'differ')"
    )
    one.say(one.cluster.manage("shell", "--no-imports", "-c", script))


SCENES = (minimums, best_fit, split, crash, drain, burst, edit, evict, nowhere, scale_down, again)


@contextmanager
def told() -> Iterator[Teller]:
    """A cluster that requires memory, and its five workers."""
    limits = {"LOCALAI_VRAM_POLICY": "require", "LOCALAI_MODEL_LOAD_WAIT": "40s"}
    with running_cluster(**limits) as cluster:
        yield Teller(cluster)


def main() -> int:
    """Plays the scenes in their order; 1 if one broke off."""
    broken = 0
    with told() as one:
        for scene in SCENES:
            one.say(f"== {scene.__name__}: {scene.__doc__}")
            try:
                scene(one)
            except Exception as error:
                broken = 1
                one.say(f"THE SCENE BROKE OFF: {error!r}")
                one.reasons(*(model.name for model in MODELS))
                one.memory()
    return broken


if __name__ == "__main__":
    sys.exit(main())
