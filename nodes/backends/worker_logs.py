"""The output of a worker's engines, read and followed over its HTTP server (http-api §2.13).

Only the registered address is dialled (`registry/dial_targets.py`): redirects are not followed and proxies of
the environment are not used. The reply is untrusted: its size and time are bounded, and only messages of the
expected shape are forwarded.

`/ws/nodes/:id/backend-logs/:model` sends the messages to a browser. The node must exist before the handshake
is answered; a later failure closes the socket with 1011 and the reason. Messages of the client are not
forwarded, because a worker ignores them.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote
from uuid import UUID

import httpx
import msgspec
from channels.db import database_sync_to_async
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from localai_cluster.kit import errors, untrusted
from localai_cluster.web.sockets import FAILED_CODE, Scope, TopicEnded
from nodes.models import BackendNode
from nodes.registry import dial_targets
from nodes.registry.dial_targets import Contact, HttpServer, NotReachable

ANSWER_LIMIT = 15.0
"""Seconds for a complete reply (operations-and-ui.md 1.19)."""
HANDSHAKE_LIMIT = 10.0
MAX_REPLY_BYTES = 16 * 1024 * 1024
"""Maximum bytes of a reply or a message; our workers store less (`kit/settings_table.py`)."""
READ_AHEAD = 4
"""Number of messages that are read in advance for a slow reader."""
PING_EVERY, PONG_WITHIN = 30.0, 90.0
MAX_NAME_LENGTH = 512
_LOGS_PATH = "/v1/backend-logs"
T = TypeVar("T")
_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$"
_Time = Annotated[str, msgspec.Meta(pattern=_TIME, max_length=40)]


class LateReply(errors.ClusterError):
    """A worker has not answered in time."""

    status = 504
    code = "worker_late"
    permanent = False


class LogLine(msgspec.Struct):
    """One line of `stdout` or `stderr`."""

    timestamp: _Time
    stream: Literal["stdout", "stderr"]
    text: str


class _Initial(msgspec.Struct, tag_field="type", tag="initial"):
    lines: list[LogLine]


class _Line(msgspec.Struct, tag_field="type", tag="line"):
    line: LogLine


_NAMES_DECODER = msgspec.json.Decoder(list[str])
_LINES_DECODER = msgspec.json.Decoder(list[LogLine])
_MESSAGE_DECODER = msgspec.json.Decoder(_Initial | _Line)


class _ParallelLimit:
    """Limit of parallel requests for logs in this process. A request above the limit is refused."""

    def __init__(self, most: int, participle: str) -> None:
        self.most = most
        self._participle = participle
        self._used = 0

    @contextlib.contextmanager
    def acquire(self) -> Iterator[None]:
        """Count one request until the `with` block ends; raise Unavailable at the limit."""
        if self._used >= self.most:
            raise errors.Unavailable(f"too many logs are being {self._participle}", retry_after=5.0)
        self._used += 1
        try:
            yield
        finally:
            self._used -= 1


READERS, FOLLOWERS = _ParallelLimit(8, "read"), _ParallelLimit(64, "followed")


async def models(server: HttpServer) -> list[str]:
    """Return the ids of the models with output on the worker. Raise NotReachable, LateReply, Unavailable."""
    return _decode(server, _NAMES_DECODER, await _get(server, _LOGS_PATH))


async def lines(server: HttpServer, name: str) -> list[Any]:
    """Return the output of all engines of a model, or of one replica if the name is `model#n`.

    Raise NotReachable, LateReply, Unavailable.
    """
    log_lines = _decode(server, _LINES_DECODER, await _get(server, _path(name)))
    return [msgspec.to_builtins(line) for line in log_lines]


async def follow(server: HttpServer, name: str) -> AsyncGenerator[str, None]:
    """Yield the worker's messages: first the existing lines, then each new one.

    End with NotReachable, LateReply or AddressRefused, also if this side closes. Raise Unavailable before the
    first message if too many logs are followed.
    """
    url = f"ws://{server.contact.address}{_path(name)}/ws"
    with FOLLOWERS.acquire():
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT):
                opened = await dial_targets.open_socket(server)
            async with (
                _Dialled(
                    url,
                    sock=opened,
                    additional_headers=_bearer(server.contact),
                    open_timeout=HANDSHAKE_LIMIT,
                    close_timeout=1.0,
                    ping_interval=PING_EVERY,
                    ping_timeout=PONG_WITHIN,
                    max_size=MAX_REPLY_BYTES,
                    max_queue=READ_AHEAD,
                    compression=None,
                    proxy=None,
                    user_agent_header=None,
                ) as socket,
                contextlib.aclosing(_messages(server, socket)) as messages,
            ):
                async for message in messages:
                    yield message
        except InvalidStatus as error:
            raise _status_error(server, error.response.status_code) from error
        except ConnectionClosed as error:
            raise NotReachable(f"node {server.node}: its worker has ended the stream") from error
        except TimeoutError as error:
            raise _late_error(server, HANDSHAKE_LIMIT) from error
        except (OSError, InvalidHandshake) as error:
            raise _no_reply_error(server, error) from error


class _Dialled(connect):
    """A connection to the given address only."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Refuse redirects."""
        return exc


async def _messages(server: HttpServer, socket: ClientConnection) -> AsyncGenerator[str, None]:
    while True:
        message = await socket.recv()
        if not isinstance(message, str):
            raise _unreadable_error(server)
        _decode(server, _MESSAGE_DECODER, message.encode())
        yield message


async def _get(server: HttpServer, path: str) -> bytes:
    """Return the body of a reply with status 200."""
    with READERS.acquire():
        try:
            async with (
                asyncio.timeout(ANSWER_LIMIT),
                dial_targets.client_of(server) as client,
                client.stream("GET", path, timeout=None) as response,
            ):
                if response.status_code != 200:
                    raise _status_error(server, response.status_code)
                body = await untrusted.read_at_most(response.aiter_raw(), MAX_REPLY_BYTES)
        except TimeoutError as error:
            raise _late_error(server, ANSWER_LIMIT) from error
        except httpx.HTTPError as error:
            raise _no_reply_error(server, error) from error
    if len(body) > MAX_REPLY_BYTES:
        raise NotReachable(f"node {server.node}: its worker's answer is over {MAX_REPLY_BYTES // 2**20} MiB")
    return body


def _path(name: str) -> str:
    return f"{_LOGS_PATH}/{quote(name, safe='')}"


def _bearer(contact: Contact) -> dict[str, str]:
    return {"Authorization": f"Bearer {contact.token}"} if contact.token else {}


def _decode(server: HttpServer, decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise _unreadable_error(server) from None


def _unreadable_error(server: HttpServer) -> errors.ClusterError:
    return NotReachable(f"node {server.node}: its worker's answer is no log")


def _no_reply_error(server: HttpServer, error: Exception) -> errors.ClusterError:
    off = " The node is offline." if server.status == "offline" else ""
    return NotReachable(
        f"node {server.node}: its worker does not answer at {server.contact.address}"
        f" ({dial_targets.reason_of(error)}).{off}"
    )


def _late_error(server: HttpServer, limit: float) -> errors.ClusterError:
    return LateReply(f"node {server.node}: its worker has not answered within {limit:g} s")


def _status_error(server: HttpServer, status: int) -> errors.ClusterError:
    meaning = {
        401: "it refuses our token; if it has just started, it registers a new one in a moment",
        404: "it is of a version that has no logs",
        503: "too many read its logs already",
    }
    reason = meaning.get(status, f"it answers {status}")
    return NotReachable(f"node {server.node}: its worker cannot be read: {reason}")


async def admit(scope: Scope) -> None:
    """Raise NotFound for an unknown node, InvalidInput for an invalid model name."""
    node, model = _node_and_model(scope)
    if node is None or not await database_sync_to_async(BackendNode.objects.filter(pk=node).exists)():
        raise errors.NotFound("node not found")
    if len(model) > MAX_NAME_LENGTH:
        raise errors.InvalidInput(f"the model's name is over {MAX_NAME_LENGTH} characters")


async def output(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield the messages of the worker; the iteration ends with the error."""
    node, model = _node_and_model(scope)
    assert node is not None
    try:
        server = await database_sync_to_async(dial_targets.http_server)(node)
        async with contextlib.aclosing(follow(server, model)) as messages:
            async for message in messages:
                yield message
    except errors.ClusterError as error:
        raise TopicEnded(FAILED_CODE, error.message) from error


def _node_and_model(scope: Scope) -> tuple[UUID | None, str]:
    kwargs = scope["url_route"]["kwargs"]
    try:
        return UUID(kwargs["node_id"]), kwargs["model"]
    except ValueError:
        return None, kwargs["model"]
