"""The log format of every process, with the id of the request that a line belongs to.

`request_id` is a context variable: the ASGI edge sets it for a request, the executor for an operation (which
stores the id of the request that created it), and threads and tasks inherit it. `RequestIdFilter` adds it to
every record. A worker's lines carry the operation's id, which leads to the request's.
"""

import logging
import os
import re
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
    """Attribute the log lines of the block to this request."""
    token = request_id.set(identifier)
    try:
        yield
    finally:
        request_id.reset(token)


def new_request_id(offered: str = "") -> str:
    """Return the caller's own id if it is short and harmless, otherwise a new one."""
    return offered if _ACCEPTABLE.match(offered) else os.urandom(16).hex()


class NoExpectedRefusals(logging.Filter):
    """Drops the framework's lines for a 503 and a 404.

    The code that raises a 503 logs the reason where it matters. A 404 is the caller's business: the
    reference's pages ask every few seconds for what this product does not have.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "status_code", 0) not in (404, 503)


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class OneLine(logging.Formatter):
    """Keeps a message on one line, so that an engine's output cannot look like lines of ours."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the formatted line with escaped line breaks; a traceback follows unchanged."""
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def handler(stream: TextIO) -> logging.Handler:
    """Return a handler that writes our format to `stream`, for a process without Django's settings."""
    stream_handler = logging.StreamHandler(stream)
    stream_handler.setFormatter(OneLine(LINE, TIME, style="{"))
    stream_handler.addFilter(RequestIdFilter())
    return stream_handler
