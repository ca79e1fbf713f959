"""The base of the bundled servers: prepare, argv, ready, settle, and how to stop them.

The supervisor runs these steps for `make run`; `start` and `stop` run them for tests and small tools. The
`check_…` functions examine the operator's own servers instead, before anything starts: one clear line if one
is down. Messages never contain URLs, since URLs contain credentials.
"""

import asyncio
import signal
import ssl
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import psycopg
import redis

from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock, nkeys, processes
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.messaging import nats
from localai_cluster.messaging.servers import mint_service, parse_url

LOOK_AGAIN_SECONDS = 0.02


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls until `condition` is true or `seconds` have passed; returns whether it became true. Blocks."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() >= deadline:
            return False
        time.sleep(LOOK_AGAIN_SECONDS)
    return True


class EmbeddedServer(ABC):
    """A bundled server on one directory. The caller ensures that nothing else uses the directory."""

    name: str
    polite: int = signal.SIGTERM
    seconds: float = 10.0
    whole = False
    """Whether the polite signal goes to the whole process group or to the server's first process only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._child: subprocess.Popen[bytes] | None = None
        self._guardian: processes.Guardian | None = None

    @abstractmethod
    def prepare(self) -> None:
        """Prepares the directory for a start and cleans up after a killed run; `SetupError` if it cannot."""

    @abstractmethod
    def argv(self) -> list[str]:
        """The command; it contains no secret."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for the other processes, including credentials."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it answers. Returns within a second and never raises."""

    def settle(self) -> None:  # noqa: B027 - most servers have nothing to settle
        """Runs once, after the first successful start."""

    def keeps_line(self, line: str) -> bool:
        """Whether a line of its output belongs in the common log."""
        return bool(line)

    @property
    def pid(self) -> int:
        """The process id of the child that `start` has started."""
        assert self._child
        return self._child.pid

    def start(self, guardian: processes.Guardian | None = None, *, seconds: float = 30.0) -> str:
        """Starts the server and waits until it is ready; returns its URL. `SetupError` if it fails."""
        self.stop()
        self.prepare()
        log = self.directory / f"{self.name}.log"
        with log.open("wb") as file:
            self._child = child = processes.spawn(
                self.argv(),
                env=plain_environment() | (guardian.env if guardian else {}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        if guardian:
            guardian.add(child.pid, polite=self.polite, seconds=self.seconds, whole=self.whole)
            self._guardian = guardian
        if (
            not wait_for(lambda: child.poll() is not None or self.ready(), seconds)
            or child.poll() is not None
        ):
            self.stop()
            raise SetupError(f"{self.name} failed to start: {last_line(log)}", f"See {log}.")
        self.settle()
        return self.url

    def stop(self) -> bool:
        """Stops the server; True if it stopped without SIGKILL. Does nothing if it is not running."""
        child, self._child = self._child, None
        if child is None:
            return True
        group = processes.group_of(child.pid, polite=self.polite, seconds=self.seconds, whole=self.whole)
        politely = processes.end_child(child, group)
        if self._guardian:
            self._guardian.discard(child.pid)
        return politely

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def plain_environment() -> dict[str, str]:
    """An environment without any of the operator's settings or secrets."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C",
        "TZ": "UTC",
    }


def last_line(log: Path) -> str:
    """The last non-empty line, for a one-line message."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "no output"


SECONDS = 5


def check_database(url: str) -> None:
    """Raises `SetupError` unless a connection succeeds."""
    try:
        psycopg.connect(url, connect_timeout=SECONDS).close()
    except psycopg.Error as error:
        raise SetupError(
            f"DATABASE_URL: cannot connect to PostgreSQL: {_one_line(error)}.",
            "Start it or fix the URL, or unset DATABASE_URL to use the bundled PostgreSQL.",
        ) from None


def check_redis(url: str) -> None:
    """Raises `SetupError` unless it answers PING."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=SECONDS, socket_timeout=SECONDS) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise SetupError(
            f"REDIS_URL: cannot connect to Redis: {_one_line(error)}.",
            "Start it or fix the URL, or unset REDIS_URL to use the bundled Valkey.",
        ) from None


def check_nats(url: str, account_seed: str, tls: ssl.SSLContext | None) -> None:
    """Raises `SetupError` unless one of the servers takes a user of the account."""
    problem = "LOCALAI_NATS_URL"
    try:
        credentials = mint_service(
            nkeys.from_seed(account_seed, "account"), "check", now=clock.now().timestamp()
        )
        complaint = asyncio.run(nats.complaint(replace(parse_url(url), credentials=credentials, tls=tls)))
    except InvalidInput as error:
        complaint = error.message
    except ValueError as error:
        problem, complaint = "LOCALAI_NATS_ACCOUNT_SEED", str(error)
    if complaint:
        raise SetupError(
            f"{problem}: cannot connect to NATS: {complaint}.",
            "Start it, fix the URL and set LOCALAI_NATS_ACCOUNT_SEED to a key of its account, or unset "
            "LOCALAI_NATS_URL to use the bundled NATS.",
        )


CHECKS: dict[str, Callable[[str], None]] = {
    "DATABASE_URL": check_database,
    "REDIS_URL": check_redis,
}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")[:300]
