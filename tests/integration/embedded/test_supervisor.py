"""The supervisor over tiny children: order, restart with backoff, ordered and hurried stop."""

import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.server import (
    FIRST_DELAY,
    MAX_DELAY,
    STEADY_SECONDS,
    Program,
    Supervisor,
    count_failures,
    restart_delay,
    wait_for,
)
from localai_cluster.embedded.terminal import Log
from localai_cluster.kit import processes
from localai_cluster.kit.processes import describe_exit

SLEEPER = "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.02; done"
DEAF = "trap '' TERM; echo up; while :; do sleep 0.02; done"


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def reaper() -> Iterator[processes.ProcessReaper]:
    with processes.ProcessReaper() as one:
        yield one


@pytest.fixture
def supervisor(output: io.StringIO, reaper: processes.ProcessReaper) -> Iterator[Supervisor]:
    one = Supervisor(Log(output), reaper)
    yield one
    one.hurry()
    one.stop()


def shell(
    name: str, script: str, *, rank: int = 0, seconds: float = 5, ready: Callable[[], bool] | None = None
) -> Program:
    return Program(
        name, ["/bin/sh", "-c", script], {"PATH": os.environ["PATH"]}, rank=rank, seconds=seconds,
        ready=ready or (lambda: True),
    )  # fmt: skip


def says(output: io.StringIO, *words: str) -> Callable[[], bool]:
    return lambda: any(all(word in line for word in words) for line in output.getvalue().splitlines())


def test_every_line_stands_behind_its_name(supervisor: Supervisor, output: io.StringIO) -> None:
    supervisor.start(shell("web", "echo one; echo two >&2; exec sleep 100"))
    assert wait_for(says(output, "two"), 30)
    assert output.getvalue() == "web        | one\nweb        | two\n"


def test_a_killed_child_starts_again_and_the_log_says_so(supervisor: Supervisor, output: io.StringIO) -> None:
    supervisor.start(shell("web", SLEEPER))
    first = supervisor.pids()["web"]
    os.kill(first, signal.SIGKILL)
    assert wait_for(says(output, "web ended (signal SIGKILL), restarting in 1 s"), 30)
    assert wait_for(says(output, "web restarted"), 60)
    assert supervisor.pids()["web"] != first


def test_what_a_killed_child_has_started_goes_with_it(
    supervisor: Supervisor, output: io.StringIO, tmp_path: Path
) -> None:
    """Like django-q2's main process, whose children outlive it."""
    note = tmp_path / "grandchild"
    supervisor.start(
        shell(
            "tasks",
            f"setsid sleep 1000 & echo $! > {note}; wait",
            ready=lambda: note.exists() and note.read_text() != "",
        )
    )
    grandchild = int(note.read_text())
    note.unlink()
    os.kill(supervisor.pids()["tasks"], signal.SIGKILL)
    assert wait_for(says(output, "tasks restarted"), 60)
    found = processes.stat(grandchild)
    assert found is None or not found.running or found.session != grandchild


def test_stop_takes_the_highest_rank_first_and_waits_for_it(
    supervisor: Supervisor, output: io.StringIO
) -> None:
    for rank, name in enumerate(("postgres", "tasks", "web", "worker")):
        supervisor.start(shell(name, SLEEPER, rank=rank, ready=says(output, f"{name} ", "up")))
    assert supervisor.stop() == []
    assert wait_for(lambda: output.getvalue().count("bye") == 4, 30)
    said = [line.split()[0] for line in output.getvalue().splitlines() if line.endswith("bye")]
    assert said == ["worker", "web", "tasks", "postgres"]


def test_a_child_deaf_to_the_polite_signal_is_killed(supervisor: Supervisor, output: io.StringIO) -> None:
    supervisor.start(shell("deaf", DEAF, seconds=0.2, ready=says(output, "up")))
    assert supervisor.stop() == ["deaf"]


def test_a_second_wish_to_stop_cuts_the_waits_short(supervisor: Supervisor, output: io.StringIO) -> None:
    supervisor.start(shell("deaf", DEAF, seconds=1000, ready=says(output, "up")))
    supervisor.hurry()
    assert supervisor.stop() == ["deaf"]


def test_a_child_that_does_not_come_up_is_one_clear_line(supervisor: Supervisor) -> None:
    with pytest.raises(
        SetupError, match=r"web failed to start \(exit code 3\)\. See its output above"
    ) as caught:
        supervisor.start(shell("web", "exit 3", ready=lambda: False))
    assert "\n" not in str(caught.value)


def test_backoff_doubles_up_to_its_limit_and_is_forgotten_after_a_steady_minute() -> None:
    failures, delays = 0, []
    for _ in range(7):
        failures = count_failures(failures, uptime=0.1)
        delays.append(restart_delay(failures))
    assert delays == [FIRST_DELAY, 2, 4, 8, 16, MAX_DELAY, MAX_DELAY]
    assert count_failures(failures, STEADY_SECONDS) == 1


def test_how_it_ended_names_the_signal() -> None:
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(-9) == "signal SIGKILL"
