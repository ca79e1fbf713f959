"""The cluster that browsers look at: two web processes, three real workers, backends small enough to watch.

Worker `fine` copies as fast as it can, `slow` at a set rate, `failing` has no access to the backends until
`repair` gives it. Nodes are approved by hand, so that a test can do it in the browser.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import yaml

from localai_cluster.kit import processes
from tests.conftest import eventually
from tests.support.cluster import ADMIN, Cluster, Process, running_cluster

GALLERY = "gallery/index.yaml"
USER, PASSWORD = "admin", "a-password-for-browsers-only"
BACKEND_BYTES = 12_000_000
LARGE_BACKEND, LARGE_BACKEND_BYTES = "closing", 60_000_000
"""A page is left and opened again while this one is installed, also on a busy machine."""
SLOW_RATE = 4_000_000
"""Bytes a second: an install takes the slow worker three seconds, the large one fifteen."""
BACKENDS = (
    "rolling", "closing", "cutting", "striped", "doomed", "quick", "present", "calm", "renewed",
    "aged", "parted", "byhand", "batch",
)  # fmt: skip
"""One for each test that installs something, so that none meets another's."""
PICTURED = ("llama-cpp", "vllm", "whisper", "piper")
"""Those that pictures show."""
WORKERS = ("fine", "slow", "failing")

Cookies = Sequence[Any]
"""As a browser context takes them: name, value, url."""


class Fleet:
    """A running cluster and its parts; nodes by name."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.sources = cluster.home / "engines"
        self.gallery = write_gallery(cluster.home / GALLERY, self.sources, cluster.gallery)
        self.webs: list[Process] = []
        self.workers: dict[str, Process] = {}
        cluster.manage("bootstrap", CLUSTER_ADMIN_PASSWORD=PASSWORD)

    def start(self, webs: int = 2, workers: Sequence[str] = WORKERS) -> None:
        """Starts the processes and approves the workers."""
        self.webs = [self.cluster.web() for _ in range(webs)]
        self.controller = self.cluster.controller()
        for name in workers:
            self.workers[name] = self.worker(name)
        ids = [self.id(name) for name in workers]
        if ids:
            assert self.post("/api/nodes/approve", {"ids": ids}).status_code == 200
        eventually(lambda: all(self.node(name)["status"] == "healthy" for name in workers), what="healthy")

    def worker(self, name: str) -> Process:
        """A worker of that name, registered."""
        sources = self._locked if name == "failing" else self.sources
        roots = f"{self.gallery.parent}:{sources}:{self.cluster.gallery}"
        more = {
            "LOCALAI_HEARTBEAT_INTERVAL": "1s",
            "LOCALAI_WORKER_SOURCE_ROOTS": str(roots),
            "LOCALAI_WORKER_DOWNLOAD_RATE": str(SLOW_RATE if name == "slow" else 0),
        }
        return self.cluster.worker(name, self.webs[0], wait=True, **more)

    @cached_property
    def _locked(self) -> Path:
        """Where the failing worker may read: a link to nothing much, until it is repaired."""
        link, nothing = self.cluster.home / "sources-of-failing", self.cluster.home / "nothing"
        nothing.mkdir()
        link.symlink_to(nothing)
        return link

    def repair(self) -> None:
        """Gives the failing worker what it lacked."""
        self._point(self.sources)

    def publish(self, backend: str, version: str, source: Path | None = None) -> None:
        """The gallery has this version of a backend from now on; `source` is its folder, if that changes."""
        entries = yaml.safe_load(self.gallery.read_text())
        for entry in entries:
            if entry["name"] == backend:
                entry |= {"version": version} | ({"uri": str(source)} if source else {})
        written = self.gallery.with_suffix(".new")
        written.write_text(yaml.safe_dump(entries, sort_keys=False))
        written.rename(self.gallery)

    def break_again(self) -> None:
        """And takes it away again."""
        self._point(self.cluster.home / "nothing")

    def _point(self, target: Path) -> None:
        self._locked.unlink()
        self._locked.symlink_to(target)

    def id(self, name: str) -> str:
        """The id of a node."""
        return str(self.node(name)["id"])

    def node(self, name: str) -> dict[str, Any]:
        """A node as the API tells it."""
        found = self.cluster.node(self.webs[0], name)
        assert found is not None, f"{name} is not registered"
        return found

    def get(self, path: str) -> httpx.Response:
        """GET as the static admin."""
        return self.cluster.get(self.webs[0], path)

    def post(self, path: str, body: Any = None) -> httpx.Response:
        """POST as the static admin."""
        return self.cluster.post(self.webs[0], path, body)

    def put(self, path: str, body: Any) -> httpx.Response:
        """PUT as the static admin."""
        return httpx.put(f"{self.webs[0].url}{path}", json=body, headers=ADMIN, timeout=120)

    def delete(self, path: str) -> httpx.Response:
        """DELETE as the static admin."""
        return httpx.delete(f"{self.webs[0].url}{path}", headers=ADMIN, timeout=120)

    def install(self, node: str, backend: str) -> str:
        """Asks for an install; answers the operation's id."""
        reply = self.post(f"/api/nodes/{self.id(node)}/backends/install", {"backend": backend})
        assert reply.status_code == 202, reply.text
        return str(reply.json()["jobID"])

    def ended(self, job: str) -> bool:
        """Whether the operation has ended."""
        return bool(self.get(f"/api/backends/job/{job}").json()["processed"])

    def remove(self, name: str) -> None:
        """Deregisters a node."""
        assert self.delete(f"/api/nodes/{self.id(name)}").is_success

    def resume_all(self) -> None:
        """Puts the workers into service again, no matter what a test has done to them."""
        for name in self.workers:
            if self.node(name)["status"] == "draining":
                assert self.post(f"/api/nodes/{self.id(name)}/resume").is_success
        eventually(
            lambda: all(self.node(name)["status"] == "healthy" for name in self.workers), what="healthy"
        )

    def settle(self) -> None:
        """Waits until nothing runs and puts every failure away: the next test begins with an empty strip."""

        def quiet() -> bool:
            found = self.get("/api/operations").json()["operations"]
            for operation in found:
                if operation["status"] == "failed":
                    self.post(f"/api/operations/{operation['jobID']}/dismiss")
            return not found

        eventually(quiet, seconds=30, what="every operation has ended")

    def sign_out_everywhere(self, cookies: Cookies) -> None:
        """Ends the session behind these cookies, as its age would."""
        key = next(cookie["value"] for cookie in cookies if cookie["name"] == "sessionid")
        assert self.cluster.rows(
            "DELETE FROM django_session WHERE session_key = %s RETURNING session_key", key
        )


def write_gallery(index: Path, folder: Path, other: Path) -> Path:
    """A gallery of small backends under `folder` beside the example engine; answers its index."""
    index.parent.mkdir()
    entries = []
    for name in (*BACKENDS, *PICTURED):
        place = folder / name
        (place / "lib").mkdir(parents=True)
        (place / "run.sh").write_text("#!/bin/sh\nexit 1\n")
        (place / "run.sh").chmod(0o755)
        with (place / "lib" / "libengine.so").open("wb") as file:
            file.truncate(LARGE_BACKEND_BYTES if name == LARGE_BACKEND else BACKEND_BYTES)
        entries.append({"name": name, "uri": str(place), "version": "1.0.0", "description": f"Runs {name}."})
    entries.append(
        {"name": "echo", "uri": str(other / "echo"), "version": "1.0.0", "description": "Answers."}
    )
    index.write_text(yaml.safe_dump(entries, sort_keys=False))
    return index


@contextmanager
def running_fleet(
    webs: int = 2, workers: Sequence[str] = WORKERS, *, tasks: bool = False, **more: str
) -> Iterator[Fleet]:
    """A cluster with these parts; gone afterwards."""
    with running_cluster(LOCALAI_AUTO_APPROVE_NODES="false", **more) as cluster:
        galleries = [{"name": "local", "url": (cluster.home / GALLERY).as_uri()}]
        cluster.extra = {**cluster.extra, "LOCALAI_BACKEND_GALLERIES": json.dumps(galleries)}
        fleet = Fleet(cluster)
        fleet.start(webs, workers)
        if tasks:
            cluster.tasks()
        else:
            # Nobody takes them, and every page would say so.
            pause = "UPDATE django_q_schedule SET repeats = 0 RETURNING id"
            eventually(lambda: cluster.rows(pause), what="the schedules are there")
            cluster.rows("DELETE FROM django_q_ormq RETURNING id")
        yield fleet


@contextmanager
def seeded(cluster: Cluster, nodes: int, operations: int, seconds: float, *more: str) -> Iterator[None]:
    """Writes that many nodes and operations and keeps them moving until the end of the block."""
    words = ["--nodes", str(nodes), "--operations", str(operations), "--seconds", str(seconds), "--force"]
    words += more
    process = cluster.spawn("seeding", "-m", "tests.support.seeding", *words, env={"LOG_LEVEL": "WARNING"})

    def there() -> bool:
        assert process.alive or "seeded" in process.output(), process.story()
        return "seeded" in process.output()

    eventually(there, seconds=90, what="the fleet is seeded")
    try:
        yield
    finally:
        processes.end_child(process.child, processes.group_of(process.child.pid, seconds=10.0))
        cluster.processes.remove(process)


def sign_in(url: str, name: str = USER, password: str = PASSWORD) -> Cookies:
    """The cookies of a new session, as a browser context takes them; ports do not matter to cookies."""
    with httpx.Client(base_url=url, timeout=120) as client:
        client.get("/api/auth/status")
        sent = {"X-CSRFToken": client.cookies["csrftoken"], "Origin": url}
        reply = client.post("/api/auth/login", json={"username": name, "password": password}, headers=sent)
        assert reply.status_code == 200, reply.text
        return [{"name": key, "value": value, "url": url} for key, value in client.cookies.items()]


def make_user(
    cluster: Cluster, name: str, password: str, *, generated: bool = False, admin: bool = True
) -> None:
    """One more person; with a password that has to be changed first, if it was generated."""
    script = (
        "from django.contrib.auth import get_user_model;"
        " from localai_cluster.accounts.models import InitialPassword;"
        f" user = get_user_model().objects.create_user({name!r}, None, {password!r},"
        f" is_staff={admin!r}, is_superuser={admin!r});"
        f" {generated!r} and InitialPassword.objects.create(user=user)"
    )
    cluster.manage("shell", "--no-imports", "-c", script)
