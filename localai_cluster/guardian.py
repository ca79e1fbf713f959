"""What is in `/proc`, how a process group is ended, and the guardian that outlives its owner to do just that.

The owner (`localai_cluster.procs.Guardian`) runs this file as a script with a pipe on its standard input and
tells it which groups it has started. The pipe closes when the owner ends, however it ends; then the guardian
stops the groups still named, the highest rank first, and all else that carries the owner's mark in its
environment. Lines: `+<pgid> <start> <signal> <seconds> <leader|group> <rank>` and `-<pgid>`. The mark is
its argument.

Only the standard library, and nothing of this package: the script runs isolated (`python -I -S`), so that it
starts in milliseconds and needs no virtual environment that somebody may just be replacing.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import sleep

POLL_SECONDS = 0.02
"""How often a wait for processes to disappear looks again; waits count looks, they read no clock."""

ORPHAN_SECONDS = 1.0
"""How long those get who are left of a group after its leader has ended."""

SCRIPT = os.path.realpath(__file__)

MARK_VARIABLE = "LOCALAI_CLUSTER_GUARD"
"""Environment variable that names the owner's guardian in everything the owner starts."""


@dataclass(frozen=True)
class Stat:
    """One line of `/proc/<pid>/stat`, as far as it is needed. `start` is in clock ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start: int

    @property
    def running(self) -> bool:
        """False for a process that has ended and only waits to be reaped."""
        return self.state not in "ZX"


@dataclass(frozen=True)
class Group:
    """A process group to end: who leads it and how it likes to be asked."""

    pgid: int
    start: int
    polite: int = signal.SIGTERM
    seconds: float = 10.0
    whole: bool = True
    """Whether the polite signal goes to the whole group or to its leader only."""
    rank: int = 0


def stat(pid: int) -> Stat | None:
    """The process with this id, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def processes() -> Iterator[Stat]:
    """Everything that runs now; what is reaped while we look is left out."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := stat(int(name))) and found.running:
            yield found


def same(found: Stat) -> bool:
    """Whether this very process still runs; a later process with the same id does not count."""
    now = stat(found.pid)
    return now is not None and now.running and now.start == found.start


def marked(mark: str) -> Iterator[Stat]:
    """Every running process whose environment carries `mark`, or `mark` with a name behind a slash.

    Only processes that we may look into are found, which those we started are.
    """
    whole = f"{MARK_VARIABLE}={mark}".encode()
    for found in processes():
        with suppress(OSError), open(f"/proc/{found.pid}/environ", "rb") as file:
            if any(word == whole or word.startswith(whole + b"/") for word in file.read().split(b"\0")):
                yield found


def family(group: Group) -> set[Stat]:
    """The members of `group` and all their descendants, in sessions of their own too.

    Another guardian among them is left out: it has its own work to do when its owner ends.
    """
    leader = stat(group.pgid)
    if leader and leader.start != group.start:
        return set()  # the number belongs to somebody else by now
    everything = list(processes())
    members = {one for one in everything if group.pgid in (one.group, one.session)}
    size = -1
    while size != len(members):
        size = len(members)
        known = {one.pid for one in members}
        members |= {one for one in everything if one.parent in known}
    return {one for one in members if not _is_guardian(one.pid)}


def _is_guardian(pid: int, mark: str = "") -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return os.fsencode(SCRIPT) in words and (not mark or mark.encode() in words)


def guardian_of(mark: str) -> int | None:
    """The process id of the running guardian with this mark."""
    return next((one.pid for one in processes() if _is_guardian(one.pid, mark)), None)


def ask(group: Group, number: int) -> None:
    """Sends `number` to the leader, or to the whole group where it wants that or has lost its leader."""
    leader = stat(group.pgid)
    with suppress(ProcessLookupError, PermissionError):
        if leader and leader.running and not group.whole:
            os.kill(group.pgid, number)
        else:
            os.killpg(group.pgid, number)


def kill(victims: set[Stat], number: int = signal.SIGKILL) -> None:
    """A signal for exactly these processes."""
    for one in victims:
        if same(one):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, number)


def end(group: Group, hurry: Callable[[], bool] = lambda: False) -> bool:
    """Ends `group` and what it started: the polite signal, a bounded wait, SIGKILL.

    Returns True when the polite signal was enough. Blocks for at most `group.seconds` and a moment; `hurry`
    is asked all the while and cuts the wait short.
    """
    seen = family(group)
    if not seen:
        return True
    ask(group, group.polite)
    looks, orphaned = round(group.seconds / POLL_SECONDS), False
    while looks > 0 and not hurry():
        # Looked at again each time: a member may have started others since.
        seen |= family(group)
        seen = {one for one in seen if same(one)}
        if not seen:
            return True
        if not orphaned and group.pgid not in {one.pid for one in seen}:
            # No process is left that would pass the wish on.
            orphaned = True
            looks = min(looks, round(ORPHAN_SECONDS / POLL_SECONDS))
            kill(seen, signal.SIGTERM)
        looks -= 1
        sleep(POLL_SECONDS)
    for _ in range(50):
        kill(seen | family(group))
        if not any(same(one) for one in seen):
            break
        sleep(POLL_SECONDS)
    return False


def sweep(mark: str) -> int:
    """SIGKILL for every process that still carries `mark`; returns how many there were."""
    killed = 0
    for _ in range(50):
        left = set(marked(mark))
        if not left:
            break
        killed += len(left)
        kill(left)
        sleep(POLL_SECONDS)
    return killed


def parse(line: str, groups: dict[int, Group]) -> None:
    """Applies one line of the owner to `groups`."""
    words = line[1:].split()
    if line.startswith("-"):
        groups.pop(int(words[0]), None)
    elif line.startswith("+"):
        pgid, start, number = int(words[0]), int(words[1]), int(words[2])
        groups[pgid] = Group(pgid, start, number, float(words[3]), words[4] == "group", int(words[5]))


def line_for(group: Group) -> str:
    """The line that tells a guardian about `group`."""
    reach = "group" if group.whole else "leader"
    return f"+{group.pgid} {group.start} {int(group.polite)} {group.seconds} {reach} {group.rank}\n"


def main() -> None:
    """Reads the owner's lines until it is gone, then ends what it left behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, Group] = {}
    for line in sys.stdin:
        # A line cut off by the owner's death is no line.
        if line.endswith("\n"):
            parse(line, groups)
    for group in sorted(groups.values(), key=lambda one: one.rank, reverse=True):
        end(group)
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
