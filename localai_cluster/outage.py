"""While the database cannot be reached: how an error tells it, and how little is said about it.

An outage is expected and ends by itself: code that needs the database tries again, and the rows decide what
goes on. Its tracebacks would only hide what else happened, so `OneLineOutages` makes each of them a warning
of one line, and recurring tasks leave a run out.
"""

import errno
import functools
import logging
from collections.abc import Callable

import django.db
import psycopg
import redis.exceptions

from localai_cluster import clock

log = logging.getLogger(__name__)

_KINDS = (
    django.db.OperationalError,
    django.db.InterfaceError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
)
_VALKEY_AWAY = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
"""It carries hints and counts; code that needs it goes on without, and its library logs that at length."""
_SERVER_ENDS = frozenset({"57P01", "57P02", "57P03"})
"""Shut down by an administrator, by a crash, or not yet up."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if `error`, or its cause, says that no space is left on a disk."""
    while error is not None:
        if isinstance(error, psycopg.errors.DiskFull):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def is_outage(error: BaseException | None) -> bool:
    """Whether `error` says that the database is not there or its disk is full, rather than that it refused a
    statement.
    """
    if not isinstance(error, _KINDS):
        return False
    if is_disk_full(error):
        return True
    state = getattr(error, "sqlstate", None) or getattr(error.__cause__, "sqlstate", None)
    # Without a state no server answered at all; class 08 is the connection itself.
    return state is None or state.startswith("08") or state in _SERVER_ENDS


class OneLineOutages(logging.Filter):
    """Replaces the traceback of an outage by its message and makes the record a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record."""
        error = record.exc_info[1] if record.exc_info else None
        if is_outage(error) or isinstance(error, _VALKEY_AWAY):
            record.msg, record.args = f"{record.getMessage()}: {error}", ()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return True


class RepeatLimit(logging.Filter):
    """Lets a few warnings of one kind through in a minute, fewer while they tell of an outage.

    A kind is a logger and its text before the values are filled in. The next line that passes says how many
    were left out.
    """

    MOST, MOST_IN_OUTAGE = 60, 2
    WINDOW = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line to leave out."""
        if record.levelno < logging.WARNING:
            return True
        limit = self.MOST_IN_OUTAGE if _tells_of_outage(record) else self.MOST
        key, now = (record.name, str(record.msg)), clock.monotonic()
        began, count = self._seen.get(key, (now, 0))
        if now - began < self.WINDOW:
            self._seen[key] = (began, count + 1)
            return count < limit
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = (now, 1)
        if count > limit:
            record.msg, record.args = f"{record.getMessage()} ({count - limit} more like it left out)", ()
        return True


def _tells_of_outage(record: logging.LogRecord) -> bool:
    errors = [record.exc_info[1]] if record.exc_info else []
    if isinstance(record.args, tuple):
        errors += [value for value in record.args if isinstance(value, BaseException)]
    return any(is_outage(error) or is_disk_full(error) for error in errors)


def left_out_in_an_outage(task: Callable[[], None]) -> Callable[[], None]:
    """A recurring task that an outage ends with one line: its next run finds all there is to do."""

    @functools.wraps(task)
    def run() -> None:
        try:
            task()
        except _KINDS as error:
            if not is_outage(error):
                raise
            log.warning("%s left out: %s", task.__qualname__, error)

    return run
