"""`manage.py serve`: one web process, daphne on `localai_cluster.asgi`.

daphne knows no lifespan, so this command opens what the process needs when the server is ready and, on
SIGTERM or SIGINT, stops accepting, sends websockets to another process, lets running requests end, gives
every count back and leaves with status 0. daphne also lets a websocket's application write without end to a
client that does not read, and keeps what clients send; here it waits, and keeps nothing.
"""

# daphne and Twisted carry no types.
# mypy: allow-untyped-calls

import asyncio
import errno
import gc
import logging
from typing import Any

import uvloop
from django.core.management.base import BaseCommand, CommandError

from localai_cluster import conf

# daphne makes its event loop while it is imported.
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

from daphne import server as daphne_server  # noqa: E402
from daphne.endpoints import build_endpoint_description_strings  # noqa: E402
from daphne.http_protocol import HTTPFactory, WebRequest  # noqa: E402
from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol  # noqa: E402
from twisted.internet import defer  # noqa: E402

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""How long running requests may take to end after the signal."""
LAST_ANSWER_SECONDS = 1.0
"""How long those who wait for a load may then take to say that they cannot wait here any more."""
RESTARTING = 1012
"""Close code for open websockets: connect again at once, there or elsewhere (RFC 6455 and IANA's list)."""
FAREWELL_SECONDS = 1.0
"""How long a websocket's client may take to answer that."""
LARGEST_BODY = 8 * 1024 * 1024
"""Bytes kept of a request's body, above every route's own limit; the rest is read and dropped."""
_BACKLOG = 1024


class BoundedRequest(WebRequest):
    """daphne reads a whole body before it asks the application; this keeps a huge one off the disk."""

    _kept = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Applications parse bodies themselves; Twisted would parse forms a second time.
        super().__init__(*args, **kwargs, parsePOSTFormSubmission=False)

    def handleContentChunk(self, data: bytes) -> None:
        """Keeps a piece of the body while there is room."""
        if self._kept <= LARGEST_BODY:
            self._kept += len(data)
            super().handleContentChunk(data)


class _Factory(HTTPFactory):
    def log(self, request: Any) -> None:
        """No access log of Twisted's: its lines would be formatted and thrown away."""

    def buildProtocol(self, addr: Any) -> Any:
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        return protocol


class _Pressure:
    """Whether a websocket's client reads what is sent: the transport says so (Twisted's push producer)."""

    def __init__(self, transport: Any) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        transport.unregisterProducer()  # the HTTP channel that the connection began as
        transport.registerProducer(self, True)

    def pauseProducing(self) -> None:
        """The transport's buffer is full."""
        self.reads.clear()

    def resumeProducing(self) -> None:
        """It is empty again."""
        self.reads.set()

    def stopProducing(self) -> None:
        """The connection is gone; nothing waits for it."""
        self.reads.set()


class WatchingSocket(WebSocketProtocol):
    """A client that watches: it has nothing to say, and a flood of what it says costs no memory."""

    pressure: _Pressure | None = None

    def onConnect(self, request: Any) -> Any:
        """Leaves out the header that daphne would fail to read; nobody here needs it."""
        request.headers.pop("sec-websocket-protocol", None)
        return super().onConnect(request)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        """Forgets it: daphne would keep it until the application has looked at it."""

    def onPing(self, payload: bytes) -> None:
        """Answers, unless earlier answers are not read."""
        if self.pressure is not None and self.pressure.reads.is_set():
            super().onPing(payload)


class _WebSocketFactory(WebSocketFactory):
    protocol = WatchingSocket


class OrderedServer(daphne_server.Server):
    """daphne with a stop that lets requests end."""

    def __init__(self, edge: Any, host: str, port: int) -> None:
        self._edge = edge
        self._ports: list[Any] = []
        self.refused: Exception | None = None
        self.failed = False
        endpoints = [
            f"{endpoint}:backlog={_BACKLOG}"
            for endpoint in build_endpoint_description_strings(host=host, port=port)
        ]
        super().__init__(
            edge,
            endpoints=endpoints,
            ready_callable=self._begin,
            request_buffer_size=LARGEST_BODY,
            server_name="",
            verbosity=0,
        )

    def listen_success(self, port: Any) -> None:
        """Remembers the port, to close it first."""
        super().listen_success(port)
        self._ports.append(port)

    def listen_error(self, failure: Any) -> None:
        """Remembers why there is no port."""
        self.refused = getattr(failure.value, "socketError", failure.value)
        self.stop()

    def _begin(self) -> None:
        from nodes.inference import gateway

        starting = asyncio.get_event_loop().create_task(gateway.start())
        starting.add_done_callback(self._begun)

    def _begun(self, starting: "asyncio.Task[None]") -> None:
        if starting.cancelled():
            return
        error = starting.exception()
        if error is not None:
            logger.error("The web process cannot start", exc_info=error)
            self.failed = True
            self.stop()
        # What is there now stays: without this each full collection walks all of Django, 50 ms at a time.
        gc.collect()
        gc.freeze()
        for address, port in self.listening_addresses:
            logger.info("Listening on http://%s:%s", address, port)

    async def handle_reply(self, protocol: Any, message: Any) -> None:
        """What an application sends; who sends to a client that does not read waits until it does."""
        kind = message["type"]
        if kind == "websocket.close" and _is_open(protocol):
            # Not daphne's way: its library refuses the codes that servers close with.
            protocol.sendCloseFrame(code=message.get("code") or 1000)
            return
        if kind == "websocket.send" and _is_open(protocol):
            # The limit on a message's size is meant for what comes in.
            limit, protocol.maxMessagePayloadSize = protocol.maxMessagePayloadSize, 0
            await super().handle_reply(protocol, message)
            protocol.maxMessagePayloadSize = limit
            await protocol.pressure.reads.wait()
            return
        await super().handle_reply(protocol, message)
        if kind == "websocket.accept" and _is_open(protocol):
            protocol.pressure = _Pressure(protocol.transport)

    def kill_all_applications(self) -> Any:
        """daphne's hook before the loop ends."""
        return defer.Deferred.fromFuture(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        from nodes.inference import gateway

        self._edge.stopping = True
        for port in self._ports:
            port.stopListening()
        requests, sockets = self._running()
        await self._send_away(sockets)
        if requests:
            _, late = await asyncio.wait(requests, timeout=DRAIN_SECONDS)
            if late:
                await gateway.end_waits()
                _, late = await asyncio.wait(late, timeout=LAST_ANSWER_SECONDS)
            for request in late:
                logger.warning("A request did not end within %.0f s and is cut", DRAIN_SECONDS)
                request.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await gateway.stop()

    async def _send_away(self, sockets: "list[asyncio.Future[None]]") -> None:
        """Closes the websockets, so that their clients connect elsewhere at once."""
        for protocol in list(self.connections):
            if _is_open(protocol):
                protocol.sendCloseFrame(code=RESTARTING)
        if sockets:
            _, late = await asyncio.wait(sockets, timeout=FAREWELL_SECONDS)
            for socket in late:
                socket.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _running(self) -> tuple[list["asyncio.Future[None]"], list["asyncio.Future[None]"]]:
        """What requests and websockets still run."""
        requests: list[asyncio.Future[None]] = []
        sockets: list[asyncio.Future[None]] = []
        for protocol, details in self.connections.items():
            task = details.get("application_instance")
            if task is not None and not task.done():
                (requests if isinstance(protocol, WebRequest) else sockets).append(task)
        return requests, sockets


def _is_open(protocol: Any) -> bool:
    """Whether this is a websocket whose handshake is done and that nobody has closed yet."""
    return isinstance(protocol, WebSocketProtocol) and protocol.state == protocol.STATE_OPEN


class Command(BaseCommand):
    """Serves until SIGTERM or SIGINT."""

    help = "Runs one web process on HOST and PORT."

    def handle(self, *args: Any, **options: Any) -> None:
        """Serves; raises CommandError when it cannot listen."""
        from localai_cluster.asgi import application

        # daphne builds its factories by name and offers no other way to choose them.
        vars(daphne_server).update(HTTPFactory=_Factory, WebSocketFactory=_WebSocketFactory)
        host, port = conf.cluster().host, conf.cluster().port
        server = OrderedServer(application, host, port)
        server.run()
        if server.refused is not None:
            raise CommandError(_refusal(server.refused, host, port))
        if server.failed:
            raise CommandError("the web process could not start; the line above says why")


def _refusal(error: Exception, host: str, port: int) -> str:
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; set PORT to a free one"
    return f"cannot listen on {host}:{port}: {error}"
