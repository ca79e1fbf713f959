"""Faults under a backend's install, upgrade and deletion, with real processes: each ends in the right state.

The message bus is cut, the database restarted, the worker frozen or killed, a controller killed. The faults
of a usual run are short; `make sweep` makes them longer than the limits after which a node is given up.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from signal import SIGCONT, SIGSTOP
from typing import Any

import httpx
import pytest

from tests.acceptance.test_inventory import backends
from tests.conftest import eventually
from tests.support.cluster import Cluster, Process, running_cluster
from tests.support.effort import EFFORT, swept

LONG = EFFORT > 1
OUTAGE = 60.0 if LONG else 6.0
"""Longer than the command in any case; in a sweep also than a node's silence may last."""
FREEZE = 90.0 if LONG else 4.0
COPY_SECONDS = 4
"""How long an install takes on this worker."""


class Place:
    """Two controllers and one slow worker; all faults happen to them, one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.web = cluster.web()
        self.controllers = [cluster.controller(), cluster.controller()]
        cluster.tasks()
        size = sum(path.lstat().st_size for path in (cluster.gallery / "echo").rglob("*") if path.is_file())
        self.rate = str(size // COPY_SECONDS)
        self.worker = self.start_worker()
        node = cluster.node(self.web, "one")
        assert node is not None
        self.node_id: str = node["id"]
        self.folder = cluster.home / "worker-one" / "backends"

    def start_worker(self) -> Process:
        return self.cluster.worker("one", self.web, LOCALAI_WORKER_DOWNLOAD_RATE=self.rate)

    def healthy(self) -> bool:
        node = self.cluster.node(self.web, "one")
        return node is not None and node["status"] == "healthy"

    def ask(self, verb: str) -> str:
        """Orders it; where to look."""
        url = f"/api/nodes/{self.node_id}/backends/{verb}"
        asked = self.cluster.post(self.web, url, {"backend": "echo"})
        assert asked.status_code == 202, asked.text
        return str(asked.json()["statusUrl"])

    def job(self, url: str) -> dict[str, Any]:
        """What the operation says; nothing while the web process cannot."""
        try:
            answer = self.cluster.get(self.web, url)
        except httpx.TransportError:
            return {}
        found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        return found

    def copying(self) -> bool:
        """Whether the worker is in the middle of an install or upgrade."""
        staged = self.folder / "echo.install-tmp"
        return staged.is_dir() and any(staged.iterdir())

    def copy_seen(self, url: str) -> str:
        """What the worker is seen at: "copying", "" before, or "ended" if nobody looked meanwhile."""
        return "copying" if self.copying() else "ended" if self.job(url).get("processed") else ""

    def ended(self, url: str, *installed: str) -> None:
        """It is completed; the worker has just that, and nothing half made; no work is owned any more."""
        eventually(lambda: self.job(url).get("processed"), seconds=60, what="the operation has ended")
        job = self.job(url)
        assert job.get("completed"), job
        assert "error" not in job
        assert sorted(path.name for path in self.folder.iterdir()) == sorted(installed)
        eventually(
            lambda: backends(self.cluster, self.web, self.node_id)[0] == list(installed),
            seconds=30,
            what="the pages tell what is there",
        )
        active = (
            "SELECT kind, status FROM operations WHERE status NOT IN ('completed', 'failed', 'cancelled')"
        )
        assert self.cluster.rows(active) == []

    def clean(self) -> None:
        """Healthy, and without a backend, for the next fault."""
        eventually(self.healthy, seconds=60, what="the node is healthy")
        if "echo" in [path.name for path in self.folder.iterdir()]:
            self.ended(self.ask("delete"))


@pytest.fixture(scope="module")
def cluster_of_place() -> Iterator[Place]:
    """Started once; a fault that leaves anything behind fails the next test too."""
    with running_cluster(CLUSTER_INSTALL_WAIT="1h") as cluster:
        yield Place(cluster)


@pytest.fixture
def place(cluster_of_place: Place) -> Place:
    """With no backend installed."""
    cluster_of_place.clean()
    return cluster_of_place


@contextmanager
def stopped(place: Place, server: str) -> Iterator[None]:
    """A server is killed, and comes back."""
    found = getattr(place.cluster, server)
    os.kill(found.pid, 9)
    try:
        yield
    finally:
        found.start(place.cluster.reaper)


def lasts(seconds: float) -> None:
    """The length of a fault: nothing to wait for, as nothing can happen meanwhile."""
    time.sleep(seconds)


def under_way(place: Place, verb: str) -> str:
    """Order it and wait until the worker is in the middle of its copy; where to look.

    The machine may not run this process for all seconds of a copy, which is then ordered again.
    """
    for _ in range(5):
        url = place.ask(verb)
        if eventually(partial(place.copy_seen, url), seconds=20, what="the copy has begun") == "copying":
            return url
        place.ended(url, "echo")
        if verb == "install":
            place.clean()
    raise AssertionError("five copies were not seen")


@contextmanager
def copied_once(place: Place, verb: str = "install") -> Iterator[str]:
    """A command in the middle of its copy, and where to look; in the end this very copy is installed."""
    url = under_way(place, verb)
    copy = (place.folder / "echo.install-tmp").stat().st_ino
    yield url
    place.ended(url, "echo")
    assert (place.folder / "echo").stat().st_ino == copy, "the files were copied again"


@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(OUTAGE, marks=swept)], ids=["a second", "longer than the command"]
)
@pytest.mark.rule("A78")
def test_the_bus_is_cut_while_an_install_runs(place: Place, seconds: float) -> None:
    """The worker goes on. It is asked again: within the copy that joins, later it finds the files."""
    with copied_once(place) as url, stopped(place, "nats"):
        lasts(seconds)
        assert not place.job(url).get("processed"), "the outcome is not known yet"


@swept
def test_the_database_is_restarted_while_an_install_runs(place: Place) -> None:
    with copied_once(place), stopped(place, "postgres"):
        lasts(2.0)


@swept
@pytest.mark.parametrize("what", ["install", pytest.param("upgrade", marks=swept)])
def test_the_worker_is_frozen_in_a_command(place: Place, what: str) -> None:
    """It goes on where it was, however long it was silent."""
    if what == "upgrade":
        place.ended(place.ask("install"), "echo")
    with copied_once(place, what) as url:
        place.worker.child.send_signal(SIGSTOP)
        try:
            lasts(FREEZE)
            assert not place.job(url).get("processed"), "a worker that may go on has not failed"
        finally:
            place.worker.child.send_signal(SIGCONT)


@pytest.mark.parametrize("what", [pytest.param("install", marks=swept), "upgrade"])
@pytest.mark.rule("A78", "A77")
def test_the_worker_is_killed_in_a_command(place: Place, what: str) -> None:
    """The next process of the node is asked again; what was half made is gone."""
    if what == "upgrade":
        place.ended(place.ask("install"), "echo")
        former = (place.folder / "echo").stat().st_ino
    url = under_way(place, what)
    place.worker.kill()
    place.worker = place.start_worker()
    place.ended(url, "echo")
    if what == "upgrade":
        assert (place.folder / "echo").stat().st_ino != former


@swept
def test_the_worker_is_killed_in_a_deletion(place: Place) -> None:
    place.ended(place.ask("install"), "echo")
    place.worker.child.send_signal(SIGSTOP)
    url = place.ask("delete")
    place.worker.kill()
    place.worker = place.start_worker()
    place.ended(url)


@pytest.mark.parametrize("victim", [0, 1], ids=["one controller", "the other controller"])
@pytest.mark.rule("A69", "A78", "H5")
def test_a_controller_is_killed_while_an_install_runs(place: Place, victim: int) -> None:
    """Whichever of them had it: the other one takes over, and the worker carries on with the same copy."""
    with copied_once(place):
        place.controllers[victim].kill()
    place.controllers[victim] = place.cluster.controller()


@swept
def test_everything_is_restarted_at_once(place: Place) -> None:
    """Bus, database and both controllers go in the middle of an install, and come back."""
    with copied_once(place):
        for controller in place.controllers:
            controller.kill()
        with stopped(place, "postgres"), stopped(place, "nats"), stopped(place, "valkey"):
            lasts(1.0)
        place.controllers = [place.cluster.controller() for _ in place.controllers]
