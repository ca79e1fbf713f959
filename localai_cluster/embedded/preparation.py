"""Checks before the servers start, and the preparation of the database after.

The operator's own PostgreSQL, NATS or Redis are checked first: one clear line if one is down, which never
contains a URL, since URLs contain credentials. Then a process checks the settings and prepares the database.

`main` runs `check` of the settings, `migrate` and `bootstrap` of `manage.py` in one process, since starting
Django takes a second. It checks the settings at once; then it prints `CHECKED_LINE` and waits for a line on
standard input, by when the servers run. After the migration it prints `MIGRATED_LINE`, and server processes
may start. A failure is one line on standard output and exit code 1.
"""

import asyncio
import gc
import io
import ssl
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import psycopg

from localai_cluster.embedded.resources import SetupError
from localai_cluster.kit import clock, processes
from localai_cluster.kit.errors import InvalidInput

SERVER_CHECK_TIMEOUT = 5
"""Seconds that a server may take to respond to a check."""


def check_database(url: str) -> None:
    """Raise SetupError unless a connection to the database succeeds."""
    try:
        psycopg.connect(url, connect_timeout=SERVER_CHECK_TIMEOUT).close()
    except psycopg.Error as error:
        raise SetupError(
            f"DATABASE_URL: cannot connect to PostgreSQL: {_error_on_one_line(error)}.",
            "Start it or fix the URL, or unset DATABASE_URL to use the bundled PostgreSQL.",
        ) from None


def check_redis(url: str) -> None:
    """Raise SetupError unless the Redis or Valkey server responds to PING."""
    import redis

    try:
        with redis.Redis.from_url(
            url, socket_connect_timeout=SERVER_CHECK_TIMEOUT, socket_timeout=SERVER_CHECK_TIMEOUT
        ) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise SetupError(
            f"REDIS_URL: cannot connect to Redis: {_error_on_one_line(error)}.",
            "Start it or fix the URL, or unset REDIS_URL to use the bundled Valkey.",
        ) from None


def check_nats(url: str, account_seed: str, tls: ssl.SSLContext | None) -> None:
    """Raise SetupError unless one of the NATS servers accepts a user of the cluster's account."""
    from localai_cluster.kit import nkeys
    from localai_cluster.messaging import nats
    from localai_cluster.messaging.servers import mint_service, parse_url

    problem = "LOCALAI_NATS_URL"
    try:
        credentials = mint_service(
            nkeys.from_seed(account_seed, "account"), "check", now=clock.now().timestamp()
        )
        complaint = asyncio.run(
            nats.connection_problem(replace(parse_url(url), credentials=credentials, tls=tls))
        )
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


def _error_on_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")[:300]


CHECKED_LINE = "checked"
"""Line that the process prints when the settings are valid."""
MIGRATED_LINE = "migrated"
"""Line that the process prints when the database has the schema of this version."""
PASSWORD_CHANGED_LINE = "user 'admin' has another password than the settings say"
"""Line that `bootstrap` prints if the admin no longer has the initial password."""
PREPARATION_TIMEOUT = 300.0


class Preparation:
    """The child process that runs `main`. Call `wait_checked`, `migrate` and `finish` in this order."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._child = processes.spawn(
            [sys.executable, "-m", "localai_cluster.embedded.preparation", "prepare"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_checked(self) -> None:
        """Wait until the child process has checked the settings. Raise SetupError if one is wrong."""
        self._read_output(until=CHECKED_LINE)

    def migrate(self) -> None:
        """Let the child process migrate the database. Raise SetupError if the migration fails."""
        assert self._child.stdin
        with suppress(BrokenPipeError):  # it has ended, and its output says why
            self._child.stdin.write(b"\n")
            self._child.stdin.flush()
        self._read_output(until=MIGRATED_LINE)

    def finish(self) -> str:
        """Wait for the end of the child process; return its output. Raise SetupError if it fails."""
        return self._read_output()

    def _read_output(self, until: str = "") -> str:
        """Return the child process's output up to the line `until`, or to its end."""
        assert self._child.stdout
        is_late, lines = threading.Event(), []
        limit = threading.Timer(PREPARATION_TIMEOUT, self._end_child, [is_late])
        limit.start()
        try:
            for line in self._child.stdout:
                lines.append(line.decode(errors="replace").strip())
                if until and lines[-1] == until:
                    return "\n".join(lines[:-1])
            self._child.wait()
        finally:
            limit.cancel()
        if is_late.is_set():
            raise SetupError(
                f"The migration took longer than {PREPARATION_TIMEOUT:.0f} s.",
                "See what blocks the database.",
            )
        if until or self._child.returncode:
            raise _preparation_error("\n".join(lines))
        return "\n".join(lines)

    def _end_child(self, is_late: threading.Event) -> None:
        is_late.set()
        processes.end_child(self._child, processes.group_of(self._child.pid))

    def interrupt(self) -> None:
        """End the child process without a wait. Safe in a signal handler.

        A method that waits for its output then raises SetupError.
        """
        self._child.terminate()

    def close(self) -> None:
        """End the child process if it is still running."""
        if self._child.poll() is None:
            processes.end_child(self._child, processes.group_of(self._child.pid))
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()


def _preparation_error(output: str) -> SetupError:
    return SetupError(
        (output.strip().splitlines() or ["The database cannot be prepared."])[-1], "Then run again."
    )


def error_line(said: str) -> str:
    """Return the line of a command's output that states the error.

    This is the line of a failed check, else the last line.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for index, line in enumerate(lines):
        if "(cluster.E" in line:
            hint = "".join(following for following in lines[index + 1 : index + 2] if "HINT" in following)
            return f"{line} {hint}".strip()
    # PostgreSQL adds the whole row that it refused, secrets and all.
    facts = [line for line in lines if not line.startswith(("DETAIL:", "CONTEXT:"))]
    return facts[-1] if facts else "no output"


def main() -> int:
    """Run the steps of the preparation in order; return the exit code."""
    gc.disable()  # it ends before it has anything to collect
    import django
    from django.core.checks import Tags
    from django.core.management import CommandError, call_command
    from django.db import Error as DatabaseError

    name = "check"
    try:
        django.setup()
        call_command("check", tags=[Tags.security], stdout=io.StringIO())
        call_command("bootstrap", "--check")
        sys.stdout.write(f"{CHECKED_LINE}\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            return 1  # the start was given up
        name = "migrate"
        call_command("migrate", verbosity=0, interactive=False)
        sys.stdout.write(f"{MIGRATED_LINE}\n")
        sys.stdout.flush()
        name = "bootstrap"
        call_command("bootstrap")
    except (CommandError, DatabaseError, OSError) as error:
        sys.stdout.write(f"`manage.py {name}` failed: {error_line(str(error))}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
