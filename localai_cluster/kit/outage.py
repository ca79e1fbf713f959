"""Outages of the database: their detection in errors, their error for callers, and their short log lines.

An outage is expected and ends by itself: code that needs the database retries, and the rows decide how it
continues. Tracebacks of an outage would hide other errors, so `OneLineOutages` makes each of them a warning
of one line, and recurring tasks skip a run.
"""

import errno
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import django.db
import psycopg

from localai_cluster.kit import clock, disk
from localai_cluster.kit.errors import Unavailable

log = logging.getLogger(__name__)

_OUTAGE_ERRORS = (
    django.db.OperationalError,
    django.db.InterfaceError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    django.db.InternalError,
    psycopg.InternalError,
)
_SERVER_STOP_SQLSTATES = frozenset({"57P01", "57P02", "57P03", "25006"})
"""SQLSTATEs of a server that was shut down, has crashed, is starting, or is a standby that only reads."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if `error`, or its cause, means that a disk has no space left."""
    while error is not None:
        if isinstance(error, psycopg.errors.DiskFull):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def is_outage(error: BaseException | None) -> bool:
    """Return True if the database is unreachable or its disk is full; False if it refused a statement."""
    if not isinstance(error, _OUTAGE_ERRORS):
        return False
    if is_disk_full(error):
        return True
    state = getattr(error, "sqlstate", None) or getattr(error.__cause__, "sqlstate", None)
    # Without a state no server responded at all; class 08 is a connection error.
    return state is None or state.startswith("08") or state in _SERVER_STOP_SQLSTATES


def unreachable_error() -> Unavailable:
    """Return the error for callers while the database is unreachable."""
    return Unavailable(disk.with_disk_full_hint("the database is not reachable"), retry_after=2)


@contextmanager
def unavailable_on(*kinds: type[Exception]) -> Iterator[None]:
    """Raise Unavailable in place of an error of these kinds, because the database is unreachable."""
    try:
        yield
    except kinds as error:
        raise unreachable_error() from error


class OneLineOutages(logging.Filter):
    """Logging filter that makes the record of an outage a warning of one line, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten the record of an outage; return True."""
        error = record.exc_info[1] if record.exc_info else None
        # Not every process imports Valkey's library, and only one that does has its errors.
        library = sys.modules.get("redis.exceptions")
        valkey_errors = () if library is None else (library.ConnectionError, library.TimeoutError)
        if is_outage(error) or isinstance(error, valkey_errors):
            record.msg, record.args = f"{record.getMessage()}: {error}", ()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return True


class RepeatLimit(logging.Filter):
    """Logging filter that limits the warnings of one kind per minute, with a lower limit for outages.

    A kind is a logger and its message before formatting. The next logged line states how many were omitted.
    """

    MAX_LINES, MAX_LINES_IN_OUTAGE = 60, 2
    WINDOW_SECONDS = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line over the limit."""
        if record.levelno < logging.WARNING:
            return True
        limit = self.MAX_LINES_IN_OUTAGE if _is_about_outage(record) else self.MAX_LINES
        key, now = (record.name, str(record.msg)), clock.monotonic()
        began, count = self._seen.get(key, (now, 0))
        if now - began < self.WINDOW_SECONDS:
            self._seen[key] = (began, count + 1)
            return count < limit
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = (now, 1)
        if count > limit:
            record.msg, record.args = f"{record.getMessage()} ({count - limit} more like it left out)", ()
        return True


def _is_about_outage(record: logging.LogRecord) -> bool:
    errors = [record.exc_info[1]] if record.exc_info else []
    if isinstance(record.args, tuple):
        errors += [value for value in record.args if isinstance(value, BaseException)]
    return any(is_outage(error) or is_disk_full(error) for error in errors)


def skip_during_outage(task: Callable[[], None]) -> Callable[[], None]:
    """Decorate a recurring task: an outage ends the run with one log line, without an error.

    The next run of the task does the work.
    """

    @functools.wraps(task)
    def run() -> None:
        try:
            task()
        except _OUTAGE_ERRORS as error:
            if not is_outage(error):
                raise
            log.warning("%s left out: %s", task.__qualname__, error)

    return run
