"""Base class of the bundled servers, and the supervisor of the programs of `make run`.

The supervisor runs these steps for `make run`; `start` and `stop` run them for tests and small tools. It
starts programs in order, restarts them with back-off, and stops them by rank, the highest first: a stop
signal, a bounded wait, then SIGKILL for what is left of the process group. Each program is one child in its
own session, known to the process reaper, and one thread per program waits for its end.
"""

import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from localai_cluster.embedded.resources import SetupError
from localai_cluster.embedded.terminal import Log
from localai_cluster.kit import backoff, clock, processes
from localai_cluster.kit.processes import describe_exit

POLL_SECONDS = 0.02


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until `condition` is true or `seconds` have passed; return True if it became true. Blocks."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


class EmbeddedServer(ABC):
    """A bundled server with its files in `directory`. Nothing else may use the directory."""

    name: str
    polite: int = signal.SIGTERM
    seconds: float = 10.0

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._child: subprocess.Popen[bytes] | None = None
        self._reaper: processes.ProcessReaper | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the directory for a start and clean up after a killed run. Raise SetupError."""

    @abstractmethod
    def argv(self) -> list[str]:
        """Return the command line; it contains no secret."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The server's URL for other processes, including credentials."""

    @abstractmethod
    def ready(self) -> bool:
        """Return True if the server responds, within a second. Never raise."""

    def settle(self) -> None:  # noqa: B027 - most servers have nothing to settle
        """Complete the set-up once, after the first successful start."""

    def keeps_line(self, line: str) -> bool:
        """Return True if the common log shows this line of the server's output."""
        return bool(line)

    @property
    def pid(self) -> int:
        """Process id of the child that `start` has started."""
        assert self._child
        return self._child.pid

    def start(self, reaper: processes.ProcessReaper | None = None, *, seconds: float = 30.0) -> str:
        """Start the server, wait until it is ready, and return its URL. Raise SetupError if it fails."""
        self.stop()
        self.prepare()
        log = self.directory / f"{self.name}.log"
        with log.open("wb") as file:
            self._child = child = processes.spawn(
                self.argv(),
                env=plain_environment() | (reaper.env if reaper else {}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        if reaper:
            reaper.add(child.pid, polite=self.polite, seconds=self.seconds, whole=False)
            self._reaper = reaper
        if (
            not wait_for(lambda: child.poll() is not None or self.ready(), seconds)
            or child.poll() is not None
        ):
            self.stop()
            raise SetupError(f"{self.name} failed to start: {last_line(log)}", f"See {log}.")
        self.settle()
        return self.url

    def stop(self) -> bool:
        """Stop the server if it is running; return True if it stopped without SIGKILL."""
        child, self._child = self._child, None
        if child is None:
            return True
        group = processes.group_of(child.pid, polite=self.polite, seconds=self.seconds, whole=False)
        politely = processes.end_child(child, group)
        if self._reaper:
            self._reaper.discard(child.pid)
        return politely

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def plain_environment() -> dict[str, str]:
    """Return an environment without the operator's settings and secrets."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "TZ": "UTC",
    }


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log file, for a one-line message."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "no output"


FIRST_DELAY, MAX_DELAY = 1.0, 30.0
STEADY_SECONDS = 60.0
"""Seconds that a child must run so that its next restart delay is `FIRST_DELAY` again."""


def _do_nothing() -> None:
    pass


def _return_true(*_: str) -> bool:
    return True


@dataclass(frozen=True)
class Program:
    """A program that the supervisor runs. It calls `prepare` before each start, `settle` after the first."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    rank: int = 0
    polite: int = signal.SIGTERM
    seconds: float = 15.0
    prepare: Callable[[], None] = _do_nothing
    settle: Callable[[], None] = _do_nothing
    ready: Callable[[], bool] = _return_true
    keeps_line: Callable[[str], bool] = _return_true

    @classmethod
    def of(cls, server: EmbeddedServer, rank: int) -> "Program":
        """Prepare a bundled server's directory and return the server as a program."""
        server.prepare()
        return cls(
            name=server.name,
            argv=server.argv(),
            env=plain_environment(),
            rank=rank,
            polite=server.polite,
            seconds=server.seconds,
            prepare=server.prepare,
            settle=server.settle,
            ready=server.ready,
            keeps_line=server.keeps_line,
        )


def count_failures(earlier: int, uptime: float) -> int:
    """Return the number of consecutive failures, which includes the child process that has just ended.

    `uptime` is in seconds; after `STEADY_SECONDS` the count restarts.
    """
    return 1 if uptime >= STEADY_SECONDS else earlier + 1


def restart_delay(failures: int) -> float:
    """Return the seconds to wait before a restart after `failures` consecutive failures."""
    return backoff.delay(failures, first=FIRST_DELAY, longest=MAX_DELAY)


class _Supervised:
    """A program and its current child process. `lock` is held for a start or stop, never during a wait."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None
        self.group: processes.Group | None = None
        self.since = 0.0


class Supervisor:
    """Starts, restarts and stops programs."""

    def __init__(self, log: Log, reaper: processes.ProcessReaper) -> None:
        self._log, self._reaper = log, reaper
        self._programs: dict[str, _Supervised] = {}
        self._stopping = threading.Event()
        self._hurry = threading.Event()

    def pids(self) -> dict[str, int]:
        """Return the process ids of the running programs, by name."""
        return {name: kept.child.pid for name, kept in self._programs.items() if kept.child}

    def start(
        self, program: Program, *, seconds: float = 60.0, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Start `program`, wait until it is ready, and keep it running from then on.

        Raise SetupError if the program ends before it is ready.
        """
        self.launch(program)
        self.settle(program, seconds=seconds, cancelled=cancelled)

    def launch(self, program: Program) -> None:
        """Start `program` without a wait; call `settle` afterwards. Raise SetupError if the start fails."""
        kept = self._programs[program.name] = _Supervised(program)
        self._spawn_child(kept)

    def settle(
        self, program: Program, *, seconds: float = 60.0, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until a program that `launch` started is ready, and keep it running from then on.

        Raise SetupError if the program ends before it is ready.
        """
        kept = self._programs[program.name]
        child = kept.child
        assert child
        up = wait_for(lambda: cancelled() or child.poll() is not None or program.ready(), seconds)
        if cancelled():
            return
        if not up or child.poll() is not None:
            reason = (
                f"no answer within {seconds:.0f} s"
                if child.poll() is None
                else describe_exit(child.returncode)
            )
            hint = f"See its output above ({program.name} |)."
            raise SetupError(f"{program.name} failed to start ({reason}).", hint)
        program.settle()
        threading.Thread(
            target=self._keep_running, args=(kept,), name=f"keep-{program.name}", daemon=True
        ).start()

    def hurry(self) -> None:
        """End all waits for orderly stops, including current waits."""
        self._hurry.set()

    def stop(self) -> list[str]:
        """Stop all programs, the highest rank first; return the names of programs that SIGKILL had to end."""
        self._stopping.set()
        killed = []
        for kept in sorted(self._programs.values(), key=lambda one: one.program.rank, reverse=True):
            with kept.lock:
                child, group = kept.child, kept.group
            if not child or not group:
                continue
            if not processes.end_child(child, group, self._hurry.is_set):
                killed.append(kept.program.name)
            self._reaper.discard(child.pid)
        return killed

    def _mark_for(self, program: Program) -> str:
        return f"{self._reaper.mark}/{program.name}"

    def _spawn_child(self, kept: _Supervised) -> None:
        program = kept.program
        program.prepare()
        with kept.lock:
            if self._stopping.is_set():
                return
            try:
                child = processes.spawn(
                    program.argv,
                    env={**program.env, processes.MARK_VARIABLE: self._mark_for(program)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                raise SetupError(
                    f"{program.name} cannot be started: {error}.", "Run `make install`."
                ) from error
            kept.group = self._reaper.add(
                child.pid,
                polite=program.polite,
                seconds=program.seconds,
                whole=False,
                rank=program.rank,
            )
            kept.child, kept.since = child, clock.monotonic()
        assert child.stdout
        self._log.follow(program.name, child.stdout, program.keeps_line)

    def _keep_running(self, kept: _Supervised) -> None:
        failures = 0
        while True:
            child, group = kept.child, kept.group
            assert child
            assert group
            code = child.wait()
            if self._stopping.is_set():
                return
            failures = count_failures(failures, clock.monotonic() - kept.since)
            delay = restart_delay(failures)
            self._log.say(
                "run", f"{kept.program.name} ended ({describe_exit(code)}), restarting in {delay:.0f} s"
            )
            # Its children may have outlived it, some of them in their own sessions.
            processes.end(group, self._hurry.is_set)
            processes.sweep(self._mark_for(kept.program))
            self._reaper.discard(child.pid)
            failures = self._restart_until_started(kept, failures)
            if self._stopping.is_set():
                return

    def _restart_until_started(self, kept: _Supervised, failures: int) -> int:
        """Restart the program until a start succeeds; return the number of consecutive failures."""
        while not self._stopping.wait(restart_delay(failures)):
            try:
                self._spawn_child(kept)
            except (SetupError, OSError) as error:
                failures += 1
                delay = restart_delay(failures)
                self._log.say("run", f"{error} {kept.program.name}: retrying in {delay:.0f} s")
                continue
            wait_for(lambda: self._is_ready_or_ended(kept), 60)
            self._log.say("run", f"{kept.program.name} restarted")
            break
        return failures

    def _is_ready_or_ended(self, kept: _Supervised) -> bool:
        ended = kept.child is None or kept.child.poll() is not None
        return self._stopping.is_set() or ended or kept.program.ready()
