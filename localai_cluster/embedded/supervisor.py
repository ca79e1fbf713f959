"""Keeps a handful of programs running: in order up, in order down, restarted with backoff in between.

Every program is one child in a session of its own, known to the guardian. One thread a program waits for its
end and starts it again; `stop` takes the programs down by rank, the highest first, each with its polite
signal, a bounded wait and SIGKILL for whatever is left of its group.
"""

import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from localai_cluster import clock, procs
from localai_cluster.embedded.log import Log
from localai_cluster.embedded.places import Trouble
from localai_cluster.embedded.server import Server, plain_environment, wait_for

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0
STEADY_SECONDS = 60.0
"""A child that was up this long starts again after the first delay, whatever happened before."""


def _nothing() -> None:
    pass


def _yes() -> bool:
    return True


def _every_line(line: str) -> bool:
    return True


@dataclass(frozen=True)
class Program:
    """What to run and how: `prepare` before each start, `settle` once after the first."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    rank: int = 0
    polite: int = signal.SIGTERM
    seconds: float = 15.0
    whole: bool = False
    prepare: Callable[[], None] = _nothing
    settle: Callable[[], None] = _nothing
    ready: Callable[[], bool] = _yes
    shown: Callable[[str], bool] = _every_line

    @classmethod
    def of(cls, server: Server, rank: int) -> "Program":
        """An embedded server as a program. Its directory is prepared first, since the command may name it."""
        server.prepare()
        return cls(
            name=server.name,
            argv=server.argv(),
            env=plain_environment(),
            rank=rank,
            polite=server.polite,
            seconds=server.seconds,
            whole=server.whole,
            prepare=server.prepare,
            settle=server.settle,
            ready=server.ready,
            shown=server.shown,
        )


def next_delay(previous: float, uptime: float) -> float:
    """Seconds until the next start of a child that was up for `uptime` and last waited `previous`."""
    if uptime >= STEADY_SECONDS or previous <= 0:
        return FIRST_DELAY
    return min(previous * 2, LONGEST_DELAY)


def how_it_ended(code: int) -> str:
    """`exit code 1`, or the signal by name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class _Kept:
    """One program and its present child. The lock covers start and end, never a wait for the program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None
        self.group: procs.Group | None = None
        self.since = 0.0


class Supervisor:
    """Starts, keeps and stops programs."""

    def __init__(self, log: Log, guardian: procs.Guardian) -> None:
        self._log, self._guardian = log, guardian
        self._kept: dict[str, _Kept] = {}
        self._stopping = threading.Event()
        self._hurry = threading.Event()

    def pids(self) -> dict[str, int]:
        """The running children by name."""
        return {name: kept.child.pid for name, kept in self._kept.items() if kept.child}

    def start(
        self, program: Program, *, seconds: float = 60.0, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Starts `program`, waits until it is ready, keeps it from then on. `Trouble` when it ends first."""
        self.launch(program)
        self.settle(program, seconds=seconds, cancelled=cancelled)

    def launch(self, program: Program) -> None:
        """Starts `program` and does not wait; `settle` must follow. `Trouble` when it cannot be started."""
        kept = self._kept[program.name] = _Kept(program)
        self._spawn(kept)

    def settle(
        self, program: Program, *, seconds: float = 60.0, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits until a launched program is ready and keeps it from then on. `Trouble` when it ends first."""
        kept = self._kept[program.name]
        child = kept.child
        assert child
        up = wait_for(lambda: cancelled() or child.poll() is not None or program.ready(), seconds)
        if cancelled():
            return
        if not up or child.poll() is not None:
            said = f"no answer in {seconds:.0f} s" if child.poll() is None else how_it_ended(child.returncode)
            mend = f"Its lines above ({program.name} |) say why."
            raise Trouble(f"{program.name} does not start ({said}).", mend)
        program.settle()
        threading.Thread(target=self._keep, args=(kept,), name=f"keep-{program.name}", daemon=True).start()

    def hurry(self) -> None:
        """Cuts every polite wait short, those under way too."""
        self._hurry.set()

    def stop(self) -> list[str]:
        """Ends every program, the highest rank first; returns the names of those that had to be killed."""
        self._stopping.set()
        killed = []
        for kept in sorted(self._kept.values(), key=lambda one: one.program.rank, reverse=True):
            with kept.lock:
                child, group = kept.child, kept.group
            if not child or not group:
                continue
            if not procs.end_child(child, group, self._hurry.is_set):
                killed.append(kept.program.name)
            self._guardian.discard(child.pid)
        return killed

    def _mark(self, program: Program) -> str:
        return f"{self._guardian.mark}/{program.name}"

    def _spawn(self, kept: _Kept) -> None:
        program = kept.program
        program.prepare()
        with kept.lock:
            if self._stopping.is_set():
                return
            try:
                child = procs.spawn(
                    program.argv,
                    env={**program.env, procs.MARK_VARIABLE: self._mark(program)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                raise Trouble(f"{program.name} cannot be started: {error}.", "Run `make install`.") from error
            kept.group = self._guardian.add(
                child.pid,
                polite=program.polite,
                seconds=program.seconds,
                whole=program.whole,
                rank=program.rank,
            )
            kept.child, kept.since = child, clock.monotonic()
        assert child.stdout
        self._log.follow(program.name, child.stdout, program.shown)

    def _keep(self, kept: _Kept) -> None:
        delay = 0.0
        while True:
            child, group = kept.child, kept.group
            assert child
            assert group
            code = child.wait()
            if self._stopping.is_set():
                return
            delay = next_delay(delay, clock.monotonic() - kept.since)
            self._log.say(
                "run", f"{kept.program.name} ended ({how_it_ended(code)}), starts again in {delay:.0f} s"
            )
            # Its own children may have outlived it, some of them in sessions of their own.
            procs.end(group, self._hurry.is_set)
            procs.sweep(self._mark(kept.program))
            self._guardian.discard(child.pid)
            delay = self._start_again(kept, delay)
            if self._stopping.is_set():
                return

    def _start_again(self, kept: _Kept, delay: float) -> float:
        while not self._stopping.wait(delay):
            try:
                self._spawn(kept)
            except (Trouble, OSError) as error:
                delay = next_delay(delay, 0)
                self._log.say("run", f"{error} {kept.program.name}: next try in {delay:.0f} s")
                continue
            wait_for(lambda: self._is_up(kept), 60)
            self._log.say("run", f"{kept.program.name} started again")
            break
        return delay

    def _is_up(self, kept: _Kept) -> bool:
        ended = kept.child is None or kept.child.poll() is not None
        return self._stopping.is_set() or ended or kept.program.ready()
