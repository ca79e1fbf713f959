"""POST /v1/files-fetch/<key>: the worker downloads a file of a model from the file's source.

The body is JSON with `url` (http://, https:// or hf://owner/repository@commit/path), `size` and `sha256`. The
response is a stream of JSON lines: `{"bytes", "total"}` each second, then `{"local_path"}` or `{"error"}`. A
file that waits for other downloads of the worker has `"waiting": true` in its lines.
The file appears under its key when it is complete and its hash is correct. If the client disconnects, the
download stops; a later request resumes it at the next byte, even if the worker was killed meanwhile. After an
error nothing of the file is left.

If no connection to the source is possible, the worker does not retry, because the client sends the file
instead; the last line then has `"unreachable": true`. If the source has sent a file of the right size with
another hash, the last line has `"changed": true`.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
import msgspec

from localai_cluster.kit import cancellation, failpoints, untrusted
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.kit.outbound import Outbound, SourceError, SourceUnreachable, host_of, parse_url
from localai_cluster.worker.cancellation import Halt
from localai_cluster.worker.config import Config
from localai_cluster.worker.download import (
    MAX_ARCHIVE_BYTES,
    Archive,
    DownloadFailed,
    Downloads,
    WrongHash,
    partial_path,
)
from localai_cluster.worker.exchange import Exchange, Refusal, is_digest
from localai_cluster.worker.files import disk
from localai_cluster.worker.files.disk import Threads
from localai_cluster.worker.files.keys import Folders, ResolvedKey
from localai_cluster.worker.files.locks import PathLocks
from localai_cluster.worker.source_files import BadSource, WorkCancelled

log = logging.getLogger(__name__)

MAX_REQUEST_LENGTH = 16 * 1024
PROGRESS_LINE_SECONDS = 1.0
"""Seconds between two lines of progress."""
SEND_TIMEOUT = 60.0
"""Seconds within which the client must accept a line."""
_HUB_URL_PATTERN = re.compile(r"hf://([\w.-]+/[\w.-]+)@([\w.-]+)/([^?#]+)", re.ASCII)


def outbound_of(config: Config) -> Outbound:
    """Return the client for sources of models; hosts in the settings may have private addresses."""
    galleries = (*config.galleries, *config.backend_galleries)
    addresses = [config.hugging_face_url, config.github_url, *(gallery.url for gallery in galleries)]
    hosts = {host for address in addresses if (host := host_of(address))}
    hosts |= {registry.host for registry in config.registries}
    credentials = {}
    if config.hugging_face_token and host_of(config.hugging_face_url):
        credentials[config.hugging_face_url] = f"Bearer {config.hugging_face_token}"
    return Outbound(hosts, credentials, verify=config.registry_ca)


class _RequestBody(msgspec.Struct):
    url: str
    size: int
    sha256: str


@dataclass
class _Fetch:
    """A file to download; `position` is the number of its bytes on disk."""

    key: ResolvedKey
    url: str
    address: str
    """Web address that `url` stands for."""
    size: int
    sha256: str
    position: int = 0
    has_begun: bool = False
    """True once its source was contacted."""
    is_unreachable: bool = False
    """True if the last attempt had no connection to the source."""
    halt: Halt = field(default_factory=Halt)


class Fetches:
    """Downloads files from their sources; `hub` is the base URL of Hugging Face or its mirror."""

    def __init__(self, downloads: Downloads, outbound: Outbound, hub: str) -> None:
        self._downloads, self._outbound, self._hub = downloads, outbound, hub

    async def receive(
        self, key: ResolvedKey, folders: Folders, exchange: Exchange, threads: Threads, locks: PathLocks
    ) -> None:
        """Handle one request. Raise Refusal for an invalid request, before the response has begun."""
        if key.folder != folders.models:
            raise Refusal(400, "invalid key: only files of models are fetched")
        fetch = await self._parse_request(key, exchange)
        await threads.run(disk.read_state, key.real)  # refuses what is no file before the answer has begun
        await exchange.start(200, {"content-type": "application/x-ndjson"})
        running = asyncio.create_task(self._run_fetch(fetch, threads, locks), name="fetch of a model's file")
        disconnect = asyncio.create_task(exchange.wait_disconnected())
        try:
            while not (running.done() or disconnect.done()):
                line: dict[str, object] = {"bytes": fetch.position, "total": fetch.size}
                is_waiting = self._downloads.is_full and not fetch.has_begun
                await _send_line(exchange, line | ({"waiting": True} if is_waiting else {}))
                await asyncio.wait(
                    {running, disconnect}, timeout=PROGRESS_LINE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            if not disconnect.done():
                await _send_line(exchange, running.result())
                await exchange.send(b"", more=False)
        except TimeoutError:
            log.info("fetch of %s: the client reads no more", key.local)
        finally:
            fetch.halt.set()
            await cancellation.cancel_and_wait(running, disconnect)

    async def _parse_request(self, key: ResolvedKey, exchange: Exchange) -> _Fetch:
        length = exchange.length
        if length is None or not exchange.header(b"content-length"):
            raise Refusal(411, "Content-Length is required")
        if length > MAX_REQUEST_LENGTH:
            raise Refusal(413, f"the body is longer than {MAX_REQUEST_LENGTH} bytes")
        text = b""
        while piece := await exchange.piece():
            text += piece
        if problem := untrusted.json_problem(text):
            raise Refusal(400, f"the body is {problem}")
        try:
            body = msgspec.json.decode(text, type=_RequestBody)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refusal(400, f"the body cannot be used: {error}") from None
        if not is_digest(body.sha256):
            raise Refusal(400, "sha256: 64 hex digits in lower case are needed")
        if not 1 <= body.size <= MAX_ARCHIVE_BYTES:
            raise Refusal(400, f"size: 1 to {MAX_ARCHIVE_BYTES} bytes are fetched")
        return _Fetch(key, body.url, self._resolve_url(body.url), body.size, body.sha256)

    def _resolve_url(self, url: str) -> str:
        """Return the web address of the file. Raise Refusal."""
        address = url
        if match := _HUB_URL_PATTERN.fullmatch(url):
            repository, commit, path = match.groups()
            address = f"{self._hub}/{repository}/resolve/{commit}/{quote(path)}"
        try:
            parse_url(address)
        except (InvalidInput, SourceError) as error:
            raise Refusal(400, f"url: {error.message}") from None
        return address

    async def _run_fetch(self, fetch: _Fetch, threads: Threads, locks: PathLocks) -> dict[str, object]:
        """Download the file unless it is already complete; return the last line of the response."""
        path = fetch.key.real
        try:
            async with locks.upload(path):
                if not await _has_complete_file(fetch, threads):
                    await threads.run(disk.prepare_folder, path, 0)
                    await self._download(fetch, threads)
        except Refusal as refusal:
            return {"error": refusal.answer.text.strip()}
        except WorkCancelled:
            return {"error": "the worker is shutting down"}
        except ClusterError as error:
            log.warning("fetch of %s: %s", fetch.key.local, error.message)
            # A shorter answer may come from a proxy of this network.
            has_changed = isinstance(error, WrongHash) and fetch.position == fetch.size
            facts = {"unreachable": fetch.is_unreachable, "changed": has_changed}
            return {"error": error.message, **{name: True for name, is_so in facts.items() if is_so}}
        except OSError as error:
            log.warning("fetch of %s: %s", fetch.key.local, error)
            return {"error": f"the file cannot be read or written: {error.strerror or error}"}
        return {"local_path": str(fetch.key.local)}

    async def _download(self, fetch: _Fetch, threads: Threads) -> None:
        def show(position: int, *_: object) -> None:
            fetch.position = min(position, fetch.size)

        @asynccontextmanager
        async def open_part(headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
            fetch.has_begun = True
            try:
                async with self._outbound.open(fetch.address, headers) as response:
                    fetch.is_unreachable = False
                    yield response
            except SourceError as error:
                fetch.is_unreachable = isinstance(error, SourceUnreachable)
                is_hopeless = error.permanent or (fetch.is_unreachable and not fetch.position)
                raise DownloadFailed(error.message, can_retry=not is_hopeless) from error

        partial = partial_of(fetch.key, fetch.sha256)
        archive = Archive(fetch.address, fetch.sha256, partial, open_part, fetch.size, "request")
        log.info("fetching %s bytes=%d", fetch.key.local, fetch.size)
        try:
            await self._downloads.fetch(archive, show, fetch.halt)
        except (DownloadFailed, BadSource, OSError):
            # The client sends the file instead, for which the disk may not have space beside this part.
            await threads.run(partial.unlink, True)
            raise
        failpoints.passed("worker.fetch:verified")
        await threads.run(disk.move_complete_file, partial, fetch.key.real, fetch.sha256)
        log.info("fetched %s bytes=%d", fetch.key.local, fetch.size)


def partial_of(key: ResolvedKey, sha256: str) -> Path:
    """Return the path of a fetch's partial file, which does not depend on the source address."""
    return partial_path(key.folder, str(key.real), "", sha256)


async def _has_complete_file(fetch: _Fetch, threads: Threads) -> bool:
    """Return True if the file is complete and has the hash."""
    path = fetch.key.real
    state = await threads.run(disk.read_state, path)
    if state.size != fetch.size or state.target:
        return False
    digest = state.digest or await threads.hash(disk.cached_hash, path, threads.stopped)
    return digest == fetch.sha256


async def _send_line(exchange: Exchange, line: Mapping[str, object]) -> None:
    async with asyncio.timeout(SEND_TIMEOUT):
        await exchange.send(json.dumps(line).encode() + b"\n", more=True)
