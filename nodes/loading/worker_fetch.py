"""A worker fetches a file of a model from its source itself, instead of getting it from the control plane.

That is the policy `worker` (`CLUSTER_DOWNLOAD_ON`, or `download_on` of a definition). It needs a file that an
import has fetched, unchanged, from an address that workers read, and a worker that has the route
(`localai_cluster/worker/files/fetches.py`), which a stock worker lacks. A failure costs nothing but time: the
file is then sent.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from urllib.parse import quote

import httpx
import msgspec

from localai_cluster.kit import clock, conf, names, untrusted
from nodes.definitions import rows
from nodes.definitions.files import Definition
from nodes.models import ModelDefinition
from nodes.placement import deadlines
from nodes.registry.dial_targets import reason_of

CAN_FETCH = "X-File-Fetch"
"""Header with which a worker says that it has the route."""
STALL = 60.0
"""Seconds without a new byte after which the file is sent instead."""
_ROUTE = "/v1/files-fetch/"
_SCHEMES = ("https://", "http://", "hf://")
_LONGEST_LINE, _LONGEST_WORDS = 16 * 1024, 300
_QUERY = re.compile(r"\?\S*")


@dataclass(frozen=True)
class FileSource:
    """The lasting address of a file, and its hash."""

    url: str
    sha256: str


class FetchFailed(Exception):
    """The worker could not fetch the file; the text gives the reason."""


class _AnswerLine(msgspec.Struct):
    bytes: int = 0
    local_path: str = ""
    error: str = ""


def sources_of(definition: Definition) -> dict[str, FileSource]:
    """Return the files of the definition that workers are to fetch, by path; at most one query."""
    policy = definition.download_on or conf.cluster().download_on
    if policy != "worker" or not definition.source.startswith(rows.SOURCE):
        return {}
    row = ModelDefinition.objects.filter(name=definition.name, deleted_at__isnull=True)
    files = row.values_list("files", flat=True).first() or ()
    return {
        file["path"]: FileSource(file["source"], file["sha256"])
        for file in files
        if file["source"].startswith(_SCHEMES) and file["sha256"]
    }


async def fetch(
    client: httpx.AsyncClient,
    key: str,
    source: FileSource,
    size: int,
    on_position: Callable[[int], None],
) -> str:
    """Have the worker fetch a file; return its path there. `on_position` gets the bytes that are there.

    Raise FetchFailed.
    """
    body = {"url": source.url, "size": size, "sha256": source.sha256}
    limit, position = STALL + deadlines.hashing_limit(size), 0
    try:
        async with (
            asyncio.timeout(limit) as watch,
            client.stream("POST", _ROUTE + quote(key), json=body) as response,
        ):
            async for line in _lines(response):
                if line.error:
                    raise FetchFailed(_words(line.error))
                if line.local_path:
                    return line.local_path
                if position < line.bytes <= size:
                    position = line.bytes
                    on_position(position)
                    watch.reschedule(clock.monotonic() + limit)
    except TimeoutError:
        raise FetchFailed(f"no further byte for {limit:.0f} s") from None
    except httpx.HTTPError as error:
        raise FetchFailed(f"the connection to its worker was lost ({reason_of(error)})") from error
    raise FetchFailed("its worker ended the answer early")


async def _lines(response: httpx.Response) -> AsyncIterator[_AnswerLine]:
    """Yield the lines of an answer from an untrusted worker. Raise FetchFailed."""
    buffer = b""
    async for piece in response.aiter_raw():
        *lines, buffer = (buffer + piece).split(b"\n")
        if len(buffer) > _LONGEST_LINE or any(len(line) > _LONGEST_LINE for line in lines):
            raise FetchFailed("its worker sent a line that is too long")
        if response.status_code == 200:
            for line in lines:
                yield _parsed(line)
    if response.status_code != 200:
        raise FetchFailed(f"its worker refused: {_words(buffer.decode('utf-8', 'replace'))}")


def _parsed(line: bytes) -> _AnswerLine:
    try:
        if not untrusted.json_problem(line):
            return msgspec.json.decode(line, type=_AnswerLine)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise FetchFailed("its worker sent a line that is no progress")


def _words(text: str) -> str:
    """Return the worker's words on one line, without the query of an address, which may be a signature."""
    return names.readable(_QUERY.sub("", text))[:_LONGEST_WORDS].strip() or "no reason given"
