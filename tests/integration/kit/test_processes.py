"""The reaper and the ending of groups, with real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localai_cluster.kit import clock, processes
from tests.conftest import eventually

HOLDER = """
import sys
from localai_cluster import procs
mark, kind = sys.argv[1:3]
reaper = procs.ProcessReaper(mark)
scripts = {
    "forks": "sleep 1000 & sleep 1000",
    "deaf": "trap '' TERM; while :; do sleep 0.05; done",
    "session": "setsid sleep 1000 & wait",
}
children = []
for kind in kind.split(","):
    child = procs.spawn(["/bin/sh", "-c", scripts[kind]], env={"PATH": "/usr/bin:/bin", **reaper.env})
    if "unregistered" not in sys.argv:
        reaper.add(child.pid, seconds=0.3)
    children.append(child)
print(reaper.pid, *(child.pid for child in children), flush=True)
children[0].wait()
"""


@pytest.fixture
def mark() -> Iterator[str]:
    name = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    yield name
    processes.sweep(name)


def hold(mark: str, *words: str) -> tuple["subprocess.Popen[str]", list[int]]:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mark, *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout
    pids = [int(word) for word in owner.stdout.readline().split()]
    owner.stdout.close()
    return owner, pids


def gone(pids: list[int]) -> bool:
    return not any((found := processes.stat(pid)) and found.running for pid in pids)


def carrying(mark: str) -> set[int]:
    return {one.pid for one in processes.marked_processes(mark)}


@pytest.mark.parametrize("kind", ["forks", "deaf", "session", "forks,deaf,session"])
def test_the_reaper_ends_the_groups_of_a_killed_owner(mark: str, kind: str) -> None:
    owner, pids = hold(mark, kind)
    eventually(lambda: len(carrying(mark)) > len(pids) - 1)
    owner.kill()
    owner.wait()
    eventually(lambda: gone(pids) and not carrying(mark))


def test_a_child_that_was_never_registered_is_found_by_its_mark(mark: str) -> None:
    owner, pids = hold(mark, "forks", "unregistered")
    owner.kill()
    owner.wait()
    eventually(lambda: gone(pids) and not carrying(mark))


def test_the_reaper_is_deaf_to_the_terminal_and_replaced_when_killed(mark: str) -> None:
    with processes.ProcessReaper(mark) as reaper:
        child = processes.spawn(["sleep", "1000"], env={"PATH": os.environ["PATH"], **reaper.env})
        reaper.add(child.pid)
        first = reaper.pid
        eventually(lambda: _ignores(first, signal.SIGTERM))
        os.kill(first, signal.SIGTERM)
        os.kill(first, signal.SIGINT)
        assert processes.ProcessIdentity.of(first)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: reaper.pid != first)
    # The successor was told the whole list, so closing it ends the child.
    assert child.wait(30) == -signal.SIGTERM


def test_reapers_that_keep_ending_are_replaced_more_slowly(mark: str) -> None:
    """The first at once, the next after a while; each is reported, and closing waits for none of it."""
    codes: list[int] = []
    with processes.ProcessReaper(mark, replaced=codes.append) as reaper:
        os.kill(reaper.pid, signal.SIGKILL)
        eventually(lambda: len(codes) == 1)
        begun = clock.monotonic()
        os.kill(reaper.pid, signal.SIGKILL)
        eventually(lambda: len(codes) == 2)
        assert clock.monotonic() - begun >= processes.FIRST_DELAY
        os.kill(reaper.pid, signal.SIGKILL)
    assert codes == [-signal.SIGKILL] * 2


def _ignores(pid: int, number: int) -> bool:
    ignored = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")
    )
    return bool(int(ignored.split()[1], 16) & (1 << (number - 1)))


def test_a_discarded_group_is_left_alone(mark: str) -> None:
    child = processes.spawn(["sleep", "1000"])
    with processes.ProcessReaper(mark) as reaper:
        reaper.add(child.pid)
        reaper.discard(child.pid)
    assert child.poll() is None
    assert processes.end_child(child, processes.group_of(child.pid))


def test_a_foreign_process_with_a_used_number_is_not_touched() -> None:
    child = processes.spawn(["sleep", "1000"])
    found = processes.stat(child.pid)
    assert found
    assert processes.end(processes.Group(child.pid, found.start - 1))
    assert child.poll() is None
    child.kill()
    child.wait()


def test_end_waits_politely_then_kills_and_tells_which(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = processes.spawn(["/bin/sh", "-c", f"trap '' TERM; : > {ready}; while :; do sleep 0.05; done"])
    eventually(ready.exists)
    assert not processes.end_child(child, processes.group_of(child.pid, seconds=0.2))
    assert child.returncode == -signal.SIGKILL
