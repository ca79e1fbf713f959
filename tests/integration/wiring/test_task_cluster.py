"""The task cluster as a process, with one of its own processes killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from psycopg.conninfo import conninfo_to_dict

from localai_cluster.kit import processes
from operations.changes.events import conninfo
from tests.conftest import eventually
from tests.support.cluster import ROOT

pytestmark = pytest.mark.django_db(transaction=True)

PROCESSES = 4
"""Two workers, the monitor and the pusher, in the order of their start."""
WORKER, MONITOR = 0, 2


def guarded(first: int) -> list[int]:
    """The process ids of what the sentinel guards, once all of it runs."""
    assert processes.stat(first)
    for sentinel in [one.pid for one in processes.processes() if one.parent == first]:
        found = sorted(one.pid for one in processes.processes() if one.parent == sentinel)
        if len(found) == PROCESSES:
            return found
    return []


@pytest.fixture
def started() -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    running: list[subprocess.Popen[str]] = []
    here = conninfo_to_dict(conninfo())
    url = f"postgresql://{here['user']}@/{here['dbname']}?host={here['host']}"

    def start() -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "manage.py", "qcluster"],
            cwd=ROOT, env={**os.environ, "DATABASE_URL": url}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        running.append(child)
        return child

    yield start
    for child in running:
        processes.end_child(child, processes.group_of(child.pid, seconds=0))  # type: ignore[arg-type]
        child.communicate()


@pytest.mark.parametrize("victim", [WORKER, MONITOR], ids=["a worker", "the monitor"])
def test_a_killed_process_ends_the_task_cluster_so_that_it_is_started_anew(
    started: Callable[[], "subprocess.Popen[str]"], victim: int
) -> None:
    """Review X10: it held the lock of a queue for ever. No task ran, and a stop took over a minute."""
    child = started()
    before = eventually(lambda: guarded(child.pid), seconds=30, what="the task cluster is whole")
    os.kill(before[victim], signal.SIGKILL)
    eventually(lambda: child.poll() is not None, seconds=10, what="it ends")
    assert child.returncode == 1
    assert not [one for one in processes.processes() if one.pid in before]


def test_a_stop_right_after_a_kill_is_quick(started: Callable[[], "subprocess.Popen[str]"]) -> None:
    """Review X10: the sentinel looks every half second, and the stop may come before."""
    child = started()
    before = eventually(lambda: guarded(child.pid), seconds=30, what="the task cluster is whole")
    os.kill(before[WORKER], signal.SIGKILL)
    child.terminate()
    eventually(lambda: child.poll() is not None, seconds=8, what="it ends")
    assert not [one for one in processes.processes() if one.pid in before]


def test_an_orderly_stop_has_status_0(started: Callable[[], "subprocess.Popen[str]"]) -> None:
    child = started()
    eventually(lambda: guarded(child.pid), seconds=30, what="the task cluster is whole")
    child.terminate()
    eventually(lambda: child.poll() is not None, seconds=15, what="it ends")
    assert child.returncode == 0
