"""While the database cannot be reached: how an error tells it, and how little is said about it.

An outage is expected and ends by itself: code that needs the database tries again, and the rows decide what
goes on. Its tracebacks would only hide what else happened, so `OneLineOutages` makes each of them a warning
of one line, and recurring tasks leave a run out.
"""

import functools
import logging
from collections.abc import Callable

import django.db
import psycopg
import redis.exceptions

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


def is_outage(error: BaseException | None) -> bool:
    """Whether `error` says that the database is not there, rather than that it refused a statement."""
    if not isinstance(error, _KINDS):
        return False
    state = getattr(error, "sqlstate", None) or getattr(error.__cause__, "sqlstate", None)
    # Without a state no server answered at all; class 08 is the connection itself.
    return state is None or state.startswith("08") or state in _SERVER_ENDS


class OneLineOutages(logging.Filter):
    """Replaces the traceback of an outage by its message and makes the record a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps every record."""
        error = record.exc_info[1] if record.exc_info else None
        if is_outage(error) or isinstance(error, _VALKEY_AWAY):
            record.msg, record.args = f"{record.getMessage()}: {error}", ()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return True


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
