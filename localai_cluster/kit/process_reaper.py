"""Process reaper: reads `/proc`, ends process groups, and ends the children of a dead owner.

The owner (`localai_cluster.kit.processes.ProcessReaper`) runs this file as a script with a pipe on its
standard input and registers the groups that it starts. The pipe closes when the owner ends for any reason;
then the reaper stops the groups that are still registered, the highest rank first, and every other process
that carries the owner's mark in its environment. Lines: `+<pgid> <start> <signal> <seconds> <leader|group>
<rank>` and `-<pgid>`. The mark is the script's argument.

The file imports only the standard library and nothing of this package: it runs isolated (`python -I -S`), so
that it starts in milliseconds and needs no virtual environment, which an upgrade may be replacing.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import sleep

POLL_SECONDS = 0.02
"""Seconds between two polls while waiting for processes to end. Limits are counted in polls."""

ORPHAN_SECONDS = 1.0
"""Seconds for the other processes of a group to end after the leader has ended."""

SCRIPT = os.path.realpath(__file__)

MARK_VARIABLE = "LOCALAI_CLUSTER_GUARD"
"""Environment variable with the owner's mark, in all processes that the owner starts."""


@dataclass(frozen=True)
class Stat:
    """The fields of `/proc/<pid>/stat` that this module uses. `start` is in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start: int

    @property
    def running(self) -> bool:
        """True unless the process is a zombie, which has ended and was not reaped yet."""
        return self.state not in "ZX"


@dataclass(frozen=True)
class Group:
    """A process group to end: its leader, the polite signal, and the seconds to wait after the signal."""

    pgid: int
    start: int
    polite: int = signal.SIGTERM
    seconds: float = 10.0
    whole: bool = True
    """True if the polite signal goes to the whole group, False if it goes to the leader only."""
    rank: int = 0


def stat(pid: int) -> Stat | None:
    """Return the process with this id; None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def processes() -> Iterator[Stat]:
    """Yield all running processes; a process that is reaped during the scan is omitted."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := stat(int(name))) and process.running:
            yield process


def is_still_running(process: Stat) -> bool:
    """Return True if this process still runs; another process with the same id does not count."""
    now = stat(process.pid)
    return now is not None and now.running and now.start == process.start


def marked_processes(mark: str) -> Iterator[Stat]:
    """Yield each running process whose environment has `mark` or `mark/<name>`.

    Processes whose environment we may not read are omitted; our own children are always readable.
    """
    variable = f"{MARK_VARIABLE}={mark}".encode()
    for process in processes():
        with suppress(OSError), open(f"/proc/{process.pid}/environ", "rb") as file:
            if any(word == variable or word.startswith(variable + b"/") for word in file.read().split(b"\0")):
                yield process


def group_with_descendants(group: Group) -> set[Stat]:
    """Return the members of `group` and all their descendants, in other sessions too.

    A reaper among the descendants is omitted, because it must clean up when its own owner ends.
    """
    leader = stat(group.pgid)
    if leader and leader.start != group.start:
        return set()  # the id has been reused
    all_processes = list(processes())
    members = {process for process in all_processes if group.pgid in (process.group, process.session)}
    size = -1
    while size != len(members):
        size = len(members)
        pids = {process.pid for process in members}
        members |= {process for process in all_processes if process.parent in pids}
    return {process for process in members if not _is_reaper(process.pid)}


def _is_reaper(pid: int, mark: str = "") -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return os.fsencode(SCRIPT) in words and (not mark or mark.encode() in words)


def reaper_of(mark: str) -> int | None:
    """Return the process id of the running reaper with this mark, or None."""
    return next((process.pid for process in processes() if _is_reaper(process.pid, mark)), None)


def send_group_signal(group: Group, number: int) -> None:
    """Send the signal `number` to the leader.

    If `group.whole` is set or the leader is dead, the whole group gets the signal.
    """
    leader = stat(group.pgid)
    with suppress(ProcessLookupError, PermissionError):
        if leader and leader.running and not group.whole:
            os.kill(group.pgid, number)
        else:
            os.killpg(group.pgid, number)


def kill(victims: set[Stat], number: int = signal.SIGKILL) -> None:
    """Send a signal to each of these processes, and to no process that has reused an id."""
    for victim in victims:
        if is_still_running(victim):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(victim.pid, number)


def end(group: Group, hurry: Callable[[], bool] = lambda: False) -> bool:
    """End `group` and its descendants: the polite signal, a bounded wait, SIGKILL.

    Return True if SIGKILL was not necessary. Block for little more than `group.seconds`. `hurry` is called at
    each poll; if it returns True, the wait ends.
    """
    members = group_with_descendants(group)
    if not members:
        return True
    send_group_signal(group, group.polite)
    polls, orphaned = round(group.seconds / POLL_SECONDS), False
    while polls > 0 and not hurry():
        # Read again at each poll: a member may have started further processes.
        members |= group_with_descendants(group)
        members = {process for process in members if is_still_running(process)}
        if not members:
            return True
        if not orphaned and group.pgid not in {process.pid for process in members}:
            # The leader, which would forward the signal to its children, is dead.
            orphaned = True
            polls = min(polls, round(ORPHAN_SECONDS / POLL_SECONDS))
            kill(members, signal.SIGTERM)
        polls -= 1
        sleep(POLL_SECONDS)
    for _ in range(50):
        kill(members | group_with_descendants(group))
        if not any(is_still_running(process) for process in members):
            break
        sleep(POLL_SECONDS)
    return False


def sweep(mark: str) -> int:
    """Send SIGKILL to every process that still has `mark`; return the number of processes."""
    killed = 0
    for _ in range(50):
        remaining = set(marked_processes(mark))
        if not remaining:
            break
        killed += len(remaining)
        kill(remaining)
        sleep(POLL_SECONDS)
    return killed


def parse(line: str, groups: dict[int, Group]) -> None:
    """Apply a line from the owner to `groups`: add or remove one process group."""
    words = line[1:].split()
    if line.startswith("-"):
        groups.pop(int(words[0]), None)
    elif line.startswith("+"):
        pgid, start, number = int(words[0]), int(words[1]), int(words[2])
        groups[pgid] = Group(pgid, start, number, float(words[3]), words[4] == "group", int(words[5]))


def line_for(group: Group) -> str:
    """Return the line that registers `group` with a process reaper."""
    reach = "group" if group.whole else "leader"
    return f"+{group.pgid} {group.start} {int(group.polite)} {group.seconds} {reach} {group.rank}\n"


def main() -> None:
    """Read the owner's lines until the owner has ended, then end the owner's remaining processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, Group] = {}
    for line in sys.stdin:
        # A line that the owner's death cut off is ignored.
        if line.endswith("\n"):
            parse(line, groups)
    for group in sorted(groups.values(), key=lambda group: group.rank, reverse=True):
        end(group)
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
