"""Have a worker fetch a file of a model from its source, instead of sending the file to the worker.

This is the policy `worker`, for files with a source that workers can read (`recorded_files.py`). It requires
a file that is unchanged since its import, and a worker with the fetch route
(`localai_cluster/worker/files/fetches.py`), which a stock worker lacks. A failure costs only time: the
control plane then sends the file. A source that the node could not reach is recorded, and not tried again for
a while.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from urllib.parse import quote
from uuid import UUID

import httpx
import msgspec
from django.db import IntegrityError

from localai_cluster.kit import clock, names, untrusted
from nodes.definitions.recorded_files import FileSource
from nodes.models import UnreachedSource
from nodes.placement import load_times
from nodes.registry.dial_targets import reason_of

CAN_FETCH = "X-File-Fetch"
"""Header of a response with which a worker announces the fetch route."""
STALL_SECONDS = 60.0
"""Seconds without a new byte after which the file is sent instead."""
MAX_WAIT_SECONDS = 3600.0
"""Seconds for which a worker may say that it downloads other files first."""
UNREACHED_LIFETIME = timedelta(minutes=10)
"""Time for which a node does not try again a source that it could not reach."""
_ROUTE_PREFIX = "/v1/files-fetch/"
_MAX_LINE_LENGTH, _MAX_MESSAGE_LENGTH = 16 * 1024, 300
_QUERY_PATTERN = re.compile(r"\?\S*")


class FetchFailed(Exception):
    """The worker could not fetch the file; the text gives the reason."""

    def __init__(
        self,
        reason: str,
        *,
        is_unreachable: bool = False,
        lost_worker: bool = False,
        has_changed: bool = False,
    ) -> None:
        super().__init__(reason)
        self.is_unreachable = is_unreachable
        """True if the worker had no connection to the source."""
        self.lost_worker = lost_worker
        """True if the connection to the worker was lost, which proves nothing about the source."""
        self.has_changed = has_changed
        """True if the source has sent another file of this size."""


class _AnswerLine(msgspec.Struct):
    bytes: int = 0
    local_path: str = ""
    error: str = ""
    unreachable: bool = False
    changed: bool = False
    waiting: bool = False


def unreached_hosts(node_id: UUID, *, now: datetime) -> dict[str, datetime]:
    """Return the hosts of sources that the node could not reach lately, with the time. One query."""
    rows = UnreachedSource.objects.filter(node_id=node_id, seen_at__gt=now - UNREACHED_LIFETIME)
    return dict(rows.values_list("host", "seen_at"))


def skip_reason(host: str, seen_at: datetime) -> str:
    """Return why files of this host are not fetched now."""
    until = seen_at + UNREACHED_LIFETIME
    return f"it did not reach {host} at {seen_at:%H:%M} UTC and tries again from {until:%H:%M} on"


def record_unreached(node_id: UUID, host: str, *, now: datetime) -> None:
    """Record that the node could not reach the source; remove expired records."""
    UnreachedSource.objects.filter(seen_at__lte=now - UNREACHED_LIFETIME).delete()
    row = UnreachedSource(node_id=node_id, host=host, seen_at=now)
    with suppress(IntegrityError):  # the node has been removed
        UnreachedSource.objects.bulk_create(
            [row], update_conflicts=True, unique_fields=["node", "host"], update_fields=["seen_at"]
        )


async def fetch(
    client: httpx.AsyncClient,
    key: str,
    source: FileSource,
    size: int,
    on_position: Callable[[int], None],
) -> str:
    """Make a worker fetch a file; return its path on the worker.

    `on_position` is called with the number of fetched bytes. Raise FetchFailed.
    """
    body = {"url": source.url, "size": size, "sha256": source.sha256}
    limit, position = STALL_SECONDS + load_times.hashing_limit(size), 0
    last_wait = clock.monotonic() + MAX_WAIT_SECONDS
    try:
        async with (
            asyncio.timeout(limit) as watch,
            client.stream("POST", _ROUTE_PREFIX + quote(key), json=body) as response,
        ):
            async for line in _read_lines(response):
                if line.error:
                    reason = _readable_reason(line.error)
                    raise FetchFailed(reason, is_unreachable=line.unreachable, has_changed=line.changed)
                if line.local_path:
                    return line.local_path
                has_moved = position < line.bytes <= size
                if has_moved:
                    position = line.bytes
                    on_position(position)
                if has_moved or (line.waiting and clock.monotonic() < last_wait):
                    watch.reschedule(clock.monotonic() + limit)
    except TimeoutError:
        raise FetchFailed(f"no further byte for {limit:.0f} s") from None
    except httpx.HTTPError as error:
        reason = f"the connection to its worker was lost ({reason_of(error)})"
        raise FetchFailed(reason, lost_worker=True) from error
    raise FetchFailed("its worker ended the answer early", lost_worker=True)


async def _read_lines(response: httpx.Response) -> AsyncIterator[_AnswerLine]:
    """Yield the decoded lines of a worker's response, which is not trusted. Raise FetchFailed."""
    if response.status_code != 200:
        refusal = await untrusted.read_at_most(response.aiter_raw(), _MAX_LINE_LENGTH)
        raise FetchFailed(f"its worker refused: {_readable_reason(refusal.decode('utf-8', 'replace'))}")
    buffer = b""
    async for piece in response.aiter_raw():
        *lines, buffer = (buffer + piece).split(b"\n")
        if len(buffer) > _MAX_LINE_LENGTH or any(len(line) > _MAX_LINE_LENGTH for line in lines):
            raise FetchFailed("its worker sent a line that is too long")
        for line in lines:
            yield _parse_line(line)


def _parse_line(line: bytes) -> _AnswerLine:
    try:
        if not untrusted.json_problem(line):
            return msgspec.json.decode(line, type=_AnswerLine)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise FetchFailed("its worker sent a line that is no progress")


def _readable_reason(text: str) -> str:
    """Return the worker's reason on one line, without query strings of URLs: they may be signatures."""
    return (
        names.to_readable_text(_QUERY_PATTERN.sub("", text))[:_MAX_MESSAGE_LENGTH].strip()
        or "no reason given"
    )
