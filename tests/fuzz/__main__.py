"""`make fuzz`: a cluster of its own, fuzzed by schemathesis as admin and as a node, with a fixed seed.

The document comes from the running product; every answer is compared with it: status, content type, headers,
schema, and no 5xx but a documented 503. A run counts only if every operation that the role may call was
answered with success at least once, no process ended, and no log holds a traceback.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import eventually
from tests.support.cluster import ADMIN_KEY, ROOT, TOKEN, Cluster, Process, running_cluster

CONFIG = Path(__file__).with_name("schemathesis.toml")
SECRET, OTHER_SECRET = "5" * 64, "6" * 64
INSTANCE = "1" * 32
"""The process in which all of these nodes say they are, as the dictionary of instances has it."""
CSRF = "f" * 32
BY_PASSWORD = ("POST /api/auth/login", "POST /api/auth/password")
"""What only a person's password opens."""
WITHOUT_ENGINE = ("/audio/", "/images/", "/tts")
"""Routes whose engines none of the examples is."""
COMMAND = [
    str(Path(sys.executable).with_name("schemathesis")),
    *("run", "openapi.json", "--report", "json", "--report-json-path", "report.json"),
]

Document = dict[str, Any]


@dataclass(frozen=True)
class Role:
    """Who fuzzes: its credential, the one it registers with, and what it should succeed at."""

    name: str
    credential: str
    registration: str
    may: Callable[[str], bool]


ROLES = (
    Role(
        "admin",
        ADMIN_KEY,
        ADMIN_KEY,
        lambda label: "/api/node/" not in label and label not in BY_PASSWORD,
    ),
    Role("node", SECRET, TOKEN, lambda label: "/api/node/" in label),
)


@dataclass(frozen=True)
class Stage:
    """The cluster and the ids that the cases are built from."""

    cluster: Cluster
    web: Process
    worker: str
    node: str
    pending: str
    job: str
    failure: str
    join_token: str
    """The id of one to revoke."""
    own: dict[str, str]
    """Nodes and conflicts that single operations have to themselves, by the name of their dictionary."""

    def write(self, folder: Path, role: Role) -> None:
        """Puts the document, the configuration and the dictionaries for `role` into `folder`."""
        folder.mkdir()
        document = self.cluster.get(self.web, "/api/schema")
        (folder / "openapi.json").write_bytes(document.raise_for_status().content)
        shutil.copy(CONFIG, folder)
        nodes = [self.node] if role.name == "node" else [self.worker, self.node, self.pending]
        for name, values in {
            "nodes": nodes,
            "jobs": [self.job],
            "failures": [self.failure],
            "secrets": [SECRET, OTHER_SECRET],
            "tokens": [TOKEN],
            "join_tokens": [self.join_token],
            **{name: [value] for name, value in self.own.items()},
        }.items():
            (folder / f"{name}.dict").write_text("".join(f'"{value}"\n' for value in values))


def register(web: Process, name: str, secret: str) -> str:
    """A node of the fuzz alone: no one listens behind it, so the cluster's own work goes elsewhere."""
    return str(knock(web, name, secret).raise_for_status().json()["id"])


def knock(web: Process, name: str, secret: str) -> httpx.Response:
    """The answer to a registration."""
    return httpx.post(
        f"{web.url}/api/node/register",
        json={"name": name, "node_type": "agent", "token": TOKEN},
        headers={
            "Authorization": f"Bearer {TOKEN}",
            "X-LocalAI-Node-Secret": secret,
            "X-LocalAI-Node-Instance": INSTANCE,
        },
    )


def prepare(cluster: Cluster) -> Stage:
    """Everything up, one worker with both models loaded, one approved and one pending node to play with."""
    offer_package(cluster)
    web = cluster.web()
    cluster.controller()
    cluster.tasks()
    cluster.worker("one", web)
    worker = (cluster.node(web, "one") or {})["id"]
    node, pending = register(web, "fuzz", SECRET), register(web, "fuzz-pending", "7" * 64)
    for known in (worker, node):
        cluster.post(web, f"/api/nodes/{known}/approve").raise_for_status()
    for model in ("echo", "minilm"):
        cluster.embed(web, model=model).raise_for_status()
    job = cluster.post(web, f"/api/nodes/{worker}/backends/install", {"backend": "echo"}).json()["jobID"]
    failure = failed_install(cluster, web, worker)
    token = cluster.post(web, "/api/join-tokens").raise_for_status().json()["id"]
    # Cases may bind a model to nodes that are not there: then each request for it waits as long as it may.
    asked = cluster.web(LOCALAI_MODEL_LOAD_WAIT="1s")
    return Stage(cluster, asked, worker, node, pending, job, failure, token, own_ids(cluster, web))


def offer_package(cluster: Cluster) -> None:
    """Something for machines to fetch that join; no one installs it here."""
    folder = cluster.home / "dist"
    folder.mkdir()
    (folder / "localai_cluster-0.1.0-py3-none-any.whl").write_bytes(b"a wheel")
    cluster.extra = {**cluster.extra, "CLUSTER_WHEEL_DIR": str(folder)}


def failed_install(cluster: Cluster, web: Process, worker: str) -> str:
    """An operation to dismiss: no one has this backend."""
    path = f"/api/nodes/{worker}/backends/install"
    job = str(cluster.post(web, path, {"backend": "nobody-has-it"}).json()["jobID"])
    eventually(lambda: "error" in cluster.get(web, f"/api/backends/job/{job}").json(), what="the failure")
    return job


OWN = {
    name: digit * 64
    for digit, name in zip(
        "abcdef01",
        ("edited", "doomed", "revoked", "rejected", "claimed", "rotated", "resumed", "left"),
        strict=True,
    )
}
"""Nodes that something is done to, each with its secret."""


def own_ids(cluster: Cluster, web: Process) -> dict[str, str]:
    """These nodes, and two conflicts about one of them."""
    ids = {name: register(web, f"fuzz-{name}", secret) for name, secret in OWN.items()}
    for name in ("edited", "resumed"):
        cluster.post(web, f"/api/nodes/{ids[name]}/approve").raise_for_status()
    own = {"Authorization": f"Bearer {OWN['resumed']}"}
    httpx.post(f"{web.url}/api/node/{ids['resumed']}/drain", headers=own).raise_for_status()
    for secret in ("8" * 64, "9" * 64):
        assert knock(web, "fuzz-claimed", secret).status_code == 409
    accepted, refused = (entry["id"] for entry in cluster.get(web, "/api/nodes/conflicts").json())
    return {**ids, "accepted": accepted, "refused": refused}


def fuzz(stage: Stage, role: Role) -> list[str]:
    """One run of schemathesis; prints what it said and answers what is wrong."""
    folder = stage.cluster.home / f"fuzz-{role.name}"
    stage.write(folder, role)
    values = {
        "FUZZ_CREDENTIAL": role.credential,
        "FUZZ_REGISTRATION": role.registration,
        "FUZZ_TOKEN": TOKEN,
        "FUZZ_CSRF": CSRF,
        "FUZZ_SECRET": SECRET,
        # A worker's own routes: the node that an operation has to itself, or the admin who may not.
        **{
            f"FUZZ_{name.upper()}": secret if role.name == "node" else role.credential
            for name, secret in OWN.items()
        },
    }
    done = subprocess.run(
        [*COMMAND, "--url", stage.web.url],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **values},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"--- as {role.name}\n{done.stdout}", flush=True)
    if not (folder / "report.json").exists():
        return [f"{role.name}: schemathesis ended with {done.returncode} and without a report"]
    document, report = (json.loads((folder / name).read_text()) for name in ("openapi.json", "report.json"))
    return [f"{role.name}: {what}" for what in judge(document, report, role, done.returncode)]


def judge(document: Document, report: Document, role: Role, code: int) -> Iterator[str]:
    """What is wrong with a run: what it found, and what it never got through to."""
    own = {label for label in labels(document) if role.may(label)}
    own -= {label for label in own if any(part in label for part in WITHOUT_ENGINE)}
    worked = {
        label
        for label, phases in report["valid_rates"].items()
        if any(rate["accepted"] for rate in phases.values())
    }
    cases, operations = report["test_cases"], report["operations"]
    print(
        f"{role.name}: {operations['tested']} operations, {cases['generated']} cases, "
        f"{cases['unique_failures']} failures, {report['running_time']:.0f} s; "
        f"{len(own & worked)} of its own {len(own)} operations succeeded",
        flush=True,
    )
    yield from (f"{label} never succeeded" for label in sorted(own - worked))
    yield from (f"{found['title']}: {found['count']}" for found in report["failures"] + report["errors"])
    if code or not report["complete"] or operations["tested"] != operations["total"]:
        yield f"exit code {code}, {operations['tested']} of {operations['total']} operations tested"


def labels(document: Document) -> Iterator[str]:
    """Every operation of the document as schemathesis names it, but for websockets."""
    for path, methods in document["paths"].items():
        if not path.startswith("/ws/"):
            yield from (f"{method.upper()} {path}" for method in methods)


def survivors(cluster: Cluster) -> Iterator[str]:
    """What the processes have to say for themselves afterwards."""
    for process in cluster.processes:
        if not process.alive:
            yield f"{process.name} ended"
        if "Traceback" in process.output():
            yield f"{process.name} logged a traceback"
            print(process.output()[process.output().index("Traceback") - 500 :][:6000])


SETTINGS = {
    "LOCALAI_AUTO_APPROVE_NODES": "false",
    "CLUSTER_FAILED_TOKENS": "1000000",
    "CLUSTER_NODE_STALE_AFTER": "1h",
    "CLUSTER_NODE_DOUBT_AFTER": "1h",
    "CLUSTER_NODE_GONE_AFTER": "1h",
}
"""No one is locked out for wrong guesses, and the nodes without a worker stay as they are."""


def main() -> int:
    """Both roles side by side, since each waits most of its time for heartbeats; the exit code."""
    with running_cluster(**SETTINGS) as cluster:
        stage = prepare(cluster)
        with ThreadPoolExecutor(len(ROLES)) as both:
            wrong = list(chain.from_iterable(both.map(partial(fuzz, stage), ROLES)))
        wrong += survivors(cluster)
    print("\n".join(wrong) or "fuzz: nothing found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
