"""Log lines of one form in every process, each with the id of the request it belongs to.

`request_id` is a context variable: the ASGI edge sets it for a request, the executor for an operation (which
keeps the id of the request that asked for it), and it follows through threads and tasks. `RequestIdFilter`
puts it on every record. A worker's lines carry the operation's id, which leads to the request's.
"""

import logging
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="-")

LINE = "{asctime} {levelname:<7} {name} [{request_id}] {message}"
TIME = "%H:%M:%S"

_ACCEPTABLE = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


@contextmanager
def of_request(identifier: str) -> Iterator[None]:
    """What happens inside belongs to this request."""
    token = request_id.set(identifier)
    try:
        yield
    finally:
        request_id.reset(token)


def new_request_id(offered: str = "") -> str:
    """The caller's own id if it is short and harmless, else a new one."""
    return offered if _ACCEPTABLE.match(offered) else uuid.uuid4().hex


class NoExpectedRefusals(logging.Filter):
    """Drops the framework's own line for a 503: the code that answers one has said why, where it matters."""

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "status_code", 0) != 503


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class OneLine(logging.Formatter):
    """Keeps a message on one line: what an engine printed must not look like lines of ours."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The formatted line with its line breaks shown; a traceback follows as it is."""
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def handler(stream: TextIO) -> logging.Handler:
    """Write our lines to `stream`, for a process without Django's settings."""
    made = logging.StreamHandler(stream)
    made.setFormatter(OneLine(LINE, TIME, style="{"))
    made.addFilter(RequestIdFilter())
    return made
