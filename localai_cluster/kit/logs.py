"""The log format of every process. Each line has the id of the request that caused it.

`request_id` is a context variable. The ASGI edge sets it for a request, and the executor for an operation,
which stores the id of the request that created it; threads and tasks inherit the variable. `RequestIdFilter`
adds the id to every record. A worker's lines have the operation's id, and the operation has the request's id.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="-")

LINE_FORMAT = "{asctime} {levelname:<7} {name} [{request_id}] {message}"
TIME_FORMAT = "%H:%M:%S"


@contextmanager
def with_request_id(identifier: str) -> Iterator[None]:
    """Set this request id for the log lines of the block."""
    token = request_id.set(identifier)
    try:
        yield
    finally:
        request_id.reset(token)


class NoExpectedRefusals(logging.Filter):
    """Logging filter that drops the web framework's lines for responses 503 and 404.

    The code that raises a 503 logs the reason itself. A 404 concerns only the caller: the reference's pages
    poll routes that this product does not have.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return getattr(record, "status_code", 0) not in (404, 503)


class RequestIdFilter(logging.Filter):
    """Logging filter that adds `request_id` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class OneLineFormatter(logging.Formatter):
    """Formatter that keeps each message on one line: output of engines cannot imitate our log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the formatted line with escaped line breaks. A traceback follows unescaped."""
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def create_handler(stream: TextIO) -> logging.Handler:
    """Return a handler with our log format for `stream`, for a process without Django's settings."""
    stream_handler = logging.StreamHandler(stream)
    stream_handler.setFormatter(OneLineFormatter(LINE_FORMAT, TIME_FORMAT, style="{"))
    stream_handler.addFilter(RequestIdFilter())
    return stream_handler
