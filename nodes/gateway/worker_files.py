"""Files of one request on the worker of its replica (worker.md §14, "Request-time files").

Engines read and write files on their own machine: an input is stored there before the call, and an output is
fetched from the path that the worker allotted for it. Neither the protocol nor a stock worker can delete
files, so the files are truncated to 0 bytes when the request ends. Only the node's registered address is
used.
"""

import asyncio
import logging
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Any
from urllib.parse import quote

import httpx
import msgspec
from channels.db import database_sync_to_async
from django.db import DatabaseError

from localai_cluster.kit import clock, outage
from localai_cluster.kit.errors import ClusterError, Unavailable
from localai_cluster.rpc.errors import BackendError, BackendFailed, DeadlineExceeded
from nodes.gateway.request import InferenceRequest
from nodes.loading.wait import may_see_nodes
from nodes.registry import dial_targets
from nodes.registry.dial_targets import HttpServer, client_of

logger = logging.getLogger(__name__)

FILES_ROUTE = "/v1/files/"
"""Path of the worker's routes for files."""
INPUT_FOLDER = "ephemeral/inputs"
"""Folder of a request's input files on the worker."""
PIECE_BYTES = 256 * 1024
MAX_OUTPUT_BYTES = 256 * 1024 * 1024
"""Maximum bytes that an engine may write for one request."""
TRUNCATE_TIMEOUT_SECONDS = 10.0
"""Time limit for truncating the files of a request."""
_MAX_ANSWER_LENGTH = 64 * 1024
_WORKER_NAME = "the worker of the model's node"
"""Name of the worker in messages to callers who may not see nodes."""
_NO_FILES_MESSAGE = "takes and gives no files right now"


class FilesUnavailable(BackendError, Unavailable):
    """The worker of the replica does not accept or provide files at present."""

    code = "worker_files_unavailable"


class _UnavailableBeforeCall(FilesUnavailable):
    """The worker's files were unavailable before the engine was called. Another replica may succeed."""

    repeatable = True


class _FileLocation(msgspec.Struct):
    """The worker's response to a stored file: the path of the file on the worker."""

    local_path: str


_truncating_tasks: set["asyncio.Task[None]"] = set()


class WorkerFiles:
    """Files of one request on a worker, opened by `open_files`. Transfers must end by `deadline`."""

    def __init__(
        self, server: HttpServer, client: httpx.AsyncClient, deadline: float, *, shows_node: bool = False
    ) -> None:
        self._server = server
        self._client = client
        self._deadline = deadline
        self._shows_node = shows_node
        self._subject = f"node {server.node}: its worker" if shows_node else _WORKER_NAME
        self._folder = f"{INPUT_FOLDER}/{secrets.token_hex(4)}"
        self._keys: list[str] = []

    async def put(self, name: str, file: IO[bytes], size: int) -> str:
        """Upload a file. Return its path on the worker. `name` must be a valid file name."""
        key = f"{self._folder}/{name}"
        self._keys.append(key)
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        return self._path(await self._request_body("PUT", key, headers=headers, content=_read_pieces(file)))

    async def temp(self) -> str:
        """Create an empty file on the worker. Return its path on the worker."""
        path = self._path(await self._request_body("POST", "temp"))
        self._keys.append(_base_name(path))
        return path

    async def fetch(self, path: str) -> IO[bytes]:
        """Download a file that `temp` created. Return an unnamed temporary file, positioned at its start."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
        try:
            async with self._request("GET", _base_name(path), FilesUnavailable) as response:
                size = 0
                async for piece in response.aiter_raw(PIECE_BYTES):
                    size += len(piece)
                    if size > MAX_OUTPUT_BYTES:
                        raise BackendFailed(f"the engine wrote more than {MAX_OUTPUT_BYTES} bytes")
                    await asyncio.to_thread(file.write, piece)
            if not size:
                raise BackendFailed("the engine wrote nothing")
            file.seek(0)
            return file
        except OSError as error:
            file.close()
            raise Unavailable(f"what the engine wrote cannot be kept: {error.strerror}") from error
        except BaseException:
            file.close()
            raise

    async def truncate_all(self) -> None:
        """Truncate every file to 0 bytes; errors are logged."""
        try:
            async with asyncio.timeout(TRUNCATE_TIMEOUT_SECONDS):
                for key in self._keys:
                    await self._client.put(FILES_ROUTE + quote(key), content=b"")
        except (httpx.HTTPError, TimeoutError) as error:
            logger.info("node %s: files of a request stay on its worker: %r", self._server.node, error)

    async def _request_body(self, method: str, key: str, **options: Any) -> bytes:
        async with self._request(method, key, _UnavailableBeforeCall, **options) as response:
            body = b""
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > _MAX_ANSWER_LENGTH:
                    raise FilesUnavailable(f"{self._subject} sends too long an answer")
            return body

    @asynccontextmanager
    async def _request(
        self, method: str, key: str, failure: type[FilesUnavailable], **options: Any
    ) -> AsyncIterator[httpx.Response]:
        """Send a request; yield a response with status 200. Raise `failure` for any other outcome."""
        try:
            async with (
                asyncio.timeout(self._deadline - clock.monotonic()),
                self._client.stream(method, FILES_ROUTE + quote(key), **options) as response,
            ):
                if response.status_code != 200:
                    raise failure(f"{self._subject} answers {response.status_code} to {method} of a file")
                yield response
        except TimeoutError:
            raise DeadlineExceeded(f"{self._subject} has not answered in time") from None
        except httpx.HTTPError as error:
            logger.info("node %s: its worker does not answer: %r", self._server.node, error)
            # The error may contain addresses.
            reason = f": {error or type(error).__name__}" if self._shows_node else ""
            raise failure(f"{self._subject} does not answer{reason}") from error

    def _path(self, body: bytes) -> str:
        try:
            path = msgspec.json.decode(body, type=_FileLocation).local_path
        except msgspec.DecodeError:
            path = ""
        if _base_name(path) in ("", ".", "..") or not path.isprintable():
            raise FilesUnavailable(f"{self._subject} does not say where a file is")
        return path


@asynccontextmanager
async def open_files(request: InferenceRequest) -> AsyncIterator[WorkerFiles]:
    """Yield access to files on the picked replica's worker; truncate them afterwards, in the background."""
    assert request.replica is not None
    node_id, shows_node = request.replica.node_id, may_see_nodes(request.principal)
    try:
        server = await database_sync_to_async(dial_targets.http_server)(node_id)
    except ClusterError as error:
        logger.info("no files on the worker of node %s: %s", node_id, error.message)
        raise _UnavailableBeforeCall(
            error.message if shows_node else f"{_WORKER_NAME} {_NO_FILES_MESSAGE}"
        ) from error
    except DatabaseError as error:
        raise outage.unreachable_error() from error
    client = client_of(server)
    files = WorkerFiles(server, client, request.deadline, shows_node=shows_node)
    try:
        yield files
    finally:
        # In the background, because the request's client may have disconnected.
        task = asyncio.ensure_future(_truncate_and_close(files, client))
        _truncating_tasks.add(task)
        task.add_done_callback(_truncating_tasks.discard)


async def _truncate_and_close(files: WorkerFiles, client: httpx.AsyncClient) -> None:
    await files.truncate_all()
    await client.aclose()


def _base_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


async def _read_pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    # The file may be sent again, to a further replica.
    file.seek(0)
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece
