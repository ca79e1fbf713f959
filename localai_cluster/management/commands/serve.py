"""`manage.py serve`: one web process, uvicorn on `localai_cluster.asgi`.

On SIGTERM or SIGINT it stops accepting, closes websockets so that their clients connect to another process,
lets running requests end, sends away those who still wait for an answer, ends streams by an error, gives
every count back and leaves with status 0. `CLUSTER_SERVER=daphne` serves with daphne, which has neither that
stop nor back-pressure.
"""

# daphne carries no types.
# mypy: allow-untyped-calls

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from localai_cluster import conf

# Before NumPy is imported: its library would start a thread for each processor, for matrices we do not have.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import uvicorn

from localai_cluster.asgi import application
from localai_cluster.connections import BoundedHead, WatchingSocket
from localai_cluster.edge import Edge
from localai_cluster.tls import TlsFiles
from nodes.inference import endpoint, gateway, streams

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""How long running requests may take to end after the signal."""
LAST_ANSWER_SECONDS = 1.0
"""How long those who wait for a load may then take to say that they cannot wait here any more."""
FAREWELL_SECONDS = 1.0
"""How long a websocket's client may take to read that it must connect elsewhere (1012)."""
LARGEST_MESSAGE = 64 * 1024
"""Bytes of a message from a websocket's client, which has nothing to say."""
_PING_EVERY, _PONG_WITHIN = 20.0, 30.0
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 1024


class OrderedServer(uvicorn.Server):
    """uvicorn with a stop in our order."""

    def __init__(self, edge: Edge, tls: TlsFiles) -> None:
        self._edge = edge
        self._scheme = "https" if tls else "http"
        super().__init__(
            uvicorn.Config(
                edge,
                loop="uvloop",
                http=BoundedHead,
                ws=WatchingSocket,
                ws_max_size=LARGEST_MESSAGE,
                ws_ping_interval=_PING_EVERY,
                ws_ping_timeout=_PONG_WITHIN,
                ws_per_message_deflate=False,
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                ssl_certfile=tls.certificate or None,
                ssl_keyfile=tls.key or None,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open what the process needs, then return."""
        await super().startup(sockets)
        # What is there now stays: without this each full collection walks all of Django, 50 ms at a time.
        gc.collect()
        gc.freeze()
        for listening in sockets or ():
            logger.info("Listening on %s://%s:%s", self._scheme, *listening.getsockname()[:2])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets requests end, within limits; uvicorn waits for them and ends the lifespan last."""
        self._edge.stopping = True
        limits = asyncio.create_task(self._hold_to_limits())
        await super().shutdown(sockets)
        limits.cancel()

    async def _hold_to_limits(self) -> None:
        await asyncio.sleep(FAREWELL_SECONDS)
        self._cut(WatchingSocket)
        await asyncio.sleep(DRAIN_SECONDS - FAREWELL_SECONDS)
        await gateway.end_waits()
        endpoint.end_all()
        streams.end_all()
        await asyncio.sleep(LAST_ANSWER_SECONDS)
        for request in list(self.server_state.tasks):
            logger.warning("A request did not end within %.0f s and is cut", DRAIN_SECONDS)
            request.cancel()
        self._cut(BoundedHead)

    def _cut(self, kind: type) -> None:
        """End connections of this kind, also those whose clients do not read."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, kind):
                connection.transport.abort()


class Command(BaseCommand):
    """Serves until SIGTERM or SIGINT."""

    help = "Runs one web process on HOST and PORT."

    def handle(self, *args: Any, **options: Any) -> None:
        """Serves; raises CommandError when it cannot listen or start."""
        cluster = conf.cluster()
        listening = listen(cluster.host, cluster.port)
        if cluster.server == "daphne" and cluster.web_tls:
            raise CommandError(
                "daphne does not serve HTTPS here: unset CLUSTER_TLS_CERT, or use CLUSTER_SERVER=uvicorn"
            )
        if cluster.server == "daphne":
            listening.close()
            serve_with_daphne(cluster.host, cluster.port)
            return
        # uvicorn raises the signal once more after its stop; by then it has been obeyed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        try:
            OrderedServer(application, cluster.web_tls).run([listening])
        except SystemExit as ended:
            raise CommandError("the web process could not start; the lines above say why") from ended


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises CommandError that says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} on {host} is in use; set PORT to a free one") from error
        raise CommandError(f"cannot listen on {host}:{port}: {error}") from error


def serve_with_daphne(host: str, port: int) -> None:
    """Serve until a signal, which ends everything at once: daphne knows no lifespan."""
    import uvloop

    # daphne makes its event loop while it is imported.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    from daphne.endpoints import build_endpoint_description_strings
    from daphne.server import Server as DaphneServer

    starting: list[asyncio.Task[None]] = []
    DaphneServer(
        application,
        build_endpoint_description_strings(host=host, port=port),
        ready_callable=lambda: starting.append(asyncio.get_event_loop().create_task(gateway.start())),
        server_name="",
        verbosity=0,
    ).run()
