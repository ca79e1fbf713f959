"""The scheduled tasks in real processes: alone, and in a controller; killed, hung, and stopped."""

# django-q2 carries no types.
# mypy: allow-untyped-calls

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django_q.models import OrmQ, Task
from django_q.tasks import async_task
from psycopg.conninfo import conninfo_to_dict

from localai_cluster.kit import clock, processes
from operations.changes.events import conninfo
from tests.conftest import eventually
from tests.support.cluster import ROOT
from tests.support.forking import MANAGE, Fork

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Fork]
ALONE, IN_A_CONTROLLER = ("qcluster",), ("controller", "--tasks")
EITHER = pytest.mark.parametrize("command", [ALONE, IN_A_CONTROLLER], ids=["alone", "in a controller"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process on the database of the test, and wait until it takes tasks."""
    running: list[Fork] = []
    here = conninfo_to_dict(conninfo())
    url = f"postgresql://{here['user']}@/{here['dbname']}?host={here['host']}"

    def start(*command: str) -> Fork:
        log = tmp_path / f"{len(running)}.log"
        child = Fork((*MANAGE, *command), env={**os.environ, "DATABASE_URL": url}, cwd=ROOT, log=log)
        running.append(child)
        eventually(
            lambda: "ready to run tasks" in log.read_text() or child.poll() is not None,
            seconds=60, what="it takes tasks",
        )  # fmt: skip
        assert child.poll() is None, log.read_text()
        return child

    yield start
    for child in running:
        processes.end_child(child, processes.group_of(child.pid, seconds=0))


def enqueue(name: str, code: str, **options: Any) -> None:
    """Queue a task that executes `code`."""
    async_task("builtins.exec", code, q_options={"group": name, **options})


def waiting(begun: Path, go: Path) -> str:
    """Return the code of a task that creates one file and waits for another."""
    wait = f"while not Path({str(go)!r}).exists(): time.sleep(0.01)"
    return f"import time; from pathlib import Path; Path({str(begun)!r}).touch()\n{wait}"


def outcomes() -> dict[str, bool]:
    """Whether each task that has ended succeeded, without the scheduled ones."""
    ended = Task.objects.values_list("group", "success")
    return {str(group): ok for group, ok in ended if ":" not in str(group)}


@EITHER
def test_a_hung_task_is_cut_and_those_behind_it_run(start: Start, command: tuple[str, ...]) -> None:
    """Item 5 of review 22: the limit holds in one process; the database lets go the lock."""
    child = start(*command)
    lock = "from django.db import connection; connection.cursor().execute('SELECT pg_advisory_lock(7)')"
    enqueue("hung", f"{lock}; connection.cursor().execute('SELECT pg_sleep(600)')", timeout=1)
    enqueue("next", lock)
    eventually(lambda: outcomes() == {"hung": False, "next": True}, seconds=60, what="both have ended")
    assert child.poll() is None


@EITHER
def test_a_task_that_ignores_its_limit_ends_the_process(start: Start, command: tuple[str, ...]) -> None:
    """It would block all others for ever. The supervisor starts the process again."""
    child = start(*command)
    enqueue("deaf", "import time\nwhile True:\n try: time.sleep(99)\n except BaseException: pass", timeout=1)
    enqueue("next", "")
    eventually(lambda: child.poll() is not None, seconds=60, what="it ends")
    assert child.returncode == 1
    OrmQ.objects.order_by("id")[0].delete()
    OrmQ.objects.update(lock=clock.now())
    start(*command)
    eventually(lambda: outcomes() == {"next": True}, seconds=60, what="others go on")


@EITHER
def test_what_a_killed_process_ran_is_handed_out_again(
    start: Start, command: tuple[str, ...], tmp_path: Path
) -> None:
    """Item 5 of review 22: after `kill -9`, once the claim of the killed one is over."""
    child, begun, go = start(*command), tmp_path / "begun", tmp_path / "go"
    enqueue("interrupted", waiting(begun, go))
    eventually(begun.exists, seconds=30, what="the task runs")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    go.touch()
    assert outcomes() == {}
    OrmQ.objects.update(lock=clock.now())
    start(*command)
    eventually(lambda: outcomes() == {"interrupted": True}, seconds=60, what="it is done")


@EITHER
def test_an_orderly_stop_lets_the_task_end(start: Start, command: tuple[str, ...], tmp_path: Path) -> None:
    child = start(*command)
    begun, go = tmp_path / "begun", tmp_path / "go"
    enqueue("last", waiting(begun, go))
    eventually(begun.exists, seconds=30, what="the task runs")
    child.terminate()
    go.touch()
    eventually(lambda: child.poll() is not None, seconds=30, what="it ends")
    assert child.returncode == 0
    assert outcomes() == {"last": True}
