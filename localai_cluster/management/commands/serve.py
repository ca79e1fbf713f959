"""`manage.py serve`: one web process, uvicorn on `localai_cluster.asgi`; `web_processes.py` runs several.

On SIGTERM or SIGINT it stops accepting, closes websockets so that their clients connect to another process,
lets running requests end, refuses the requests that still wait for a load, ends streams with an error,
releases all in-flight counts and exits with status 0. `CLUSTER_SERVER=daphne` serves with daphne, which has
neither that shutdown nor back-pressure.
"""

# daphne carries no types.
# mypy: allow-untyped-calls

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from localai_cluster.kit import clock, conf, settings_table

# Before NumPy is imported: OpenBLAS would start a thread per processor, and we compute no matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import uvicorn

from localai_cluster.asgi import application
from localai_cluster.edge import Edge
from localai_cluster.kit.connections import BoundedHead, WatchingSocket, server_config
from localai_cluster.kit.tls import TlsFiles
from localai_cluster.management import schema_version, web_processes
from nodes.gateway import endpoint, gateway

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""Seconds after the signal for running requests to end."""
LAST_ANSWER_SECONDS = 1.0
"""Further seconds for requests that have not ended to send their error response."""
_CANCEL_EVERY_SECONDS = 0.1
FAREWELL_SECONDS = 1.0
"""Seconds for a websocket's client to read the close code 1012, after which it reconnects."""
MAX_MESSAGE_BYTES = 64 * 1024
"""Maximum bytes of a websocket client's message; its content is ignored."""
GC_THRESHOLD = 10_000
"""Number of new objects (a few megabytes) after which the garbage collector runs."""
_PING_EVERY, _PONG_WITHIN = 20.0, 30.0
_KEEP_ALIVE_SECONDS = 75


class OrderedServer(uvicorn.Server):
    """uvicorn's server with the product's own order of shutdown."""

    def __init__(self, edge: Edge, tls: TlsFiles, parent: socket.socket | None = None) -> None:
        self._edge, self._parent = edge, parent
        self._scheme = "https" if tls else "http"
        super().__init__(
            server_config(
                edge,
                loop="uvloop",
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_ping_interval=_PING_EVERY,
                ws_ping_timeout=_PONG_WITHIN,
                lifespan="on",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                ssl_certfile=tls.certificate or None,
                ssl_keyfile=tls.key or None,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, exempt its objects from garbage collection, and log the addresses."""
        await super().startup(sockets)
        # The present objects are permanent: otherwise each full collection traverses Django, for 50 ms. Among
        # them is 1 % of garbage, and to collect it first would take longer than that.
        gc.freeze()
        # Requests under way are no garbage: at Python's limit of 700 the collector reads them many times.
        gc.set_threshold(GC_THRESHOLD)
        for listening in sockets or ():
            logger.info("Listening on %s://%s:%s", self._scheme, *listening.getsockname()[:2])
        if self._parent is not None:
            asyncio.get_running_loop().add_reader(self._parent, self._stop_without_parent)
            with contextlib.suppress(BrokenPipeError):  # gone already, which the reader sees
                self._parent.send(b"\0")

    def _stop_without_parent(self) -> None:
        """Stop in order, because the parent has closed its end of the link.

        The parent never sends, so a readable link means that the parent has ended.
        """
        assert self._parent is not None
        asyncio.get_running_loop().remove_reader(self._parent)
        logger.warning("The parent of this web process is gone; it stops")
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end within the limits; uvicorn waits for them and ends the lifespan last."""
        self._edge.stopping = True
        limits = asyncio.create_task(self._hold_to_limits())
        await super().shutdown(sockets)
        limits.cancel()

    async def _hold_to_limits(self) -> None:
        await asyncio.sleep(FAREWELL_SECONDS)
        self._cut(WatchingSocket)
        await asyncio.sleep(DRAIN_SECONDS - FAREWELL_SECONDS)
        # Not once: a request may still receive its body and begin to wait for an engine after that.
        end = clock.monotonic() + LAST_ANSWER_SECONDS
        while clock.monotonic() < end:
            endpoint.cancel_all_answers()
            await asyncio.sleep(_CANCEL_EVERY_SECONDS)
        for request in list(self.server_state.tasks):
            logger.warning("A request did not end within %.0f s and is cut", DRAIN_SECONDS)
            request.cancel()
        self._cut(BoundedHead)

    def _cut(self, kind: type) -> None:
        """Abort connections of this kind, including those whose clients do not read."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, kind):
                connection.transport.abort()


class Command(BaseCommand):
    """Serves until SIGTERM or SIGINT."""

    help = "Serves on HOST and PORT with one web process or several."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        web_processes.add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Serve. Raise CommandError if the process cannot listen or start."""
        gc.enable()
        cluster = conf.cluster()
        number = cluster.web_processes if options["processes"] is None else options["processes"]
        if not 1 <= number <= settings_table.MAX_WEB_PROCESSES:
            raise CommandError(f"--processes must be from 1 to {settings_table.MAX_WEB_PROCESSES}")
        schema_version.refuse_other(cluster.database_url)
        if options["inherited"]:
            listening, parent = (socket.socket(fileno=number) for number in options["inherited"])
            _serve(listening, parent)
            return
        if cluster.server == "daphne" and number > 1:
            raise CommandError("daphne serves with one process: use CLUSTER_SERVER=uvicorn, or --processes 1")
        listening = web_processes.listen(cluster.host, cluster.port)
        if cluster.server == "daphne" and cluster.web_tls:
            raise CommandError(
                "daphne does not serve HTTPS here: unset CLUSTER_TLS_CERT, or use CLUSTER_SERVER=uvicorn"
            )
        if cluster.server == "daphne":
            listening.close()
            serve_with_daphne(cluster.host, cluster.port)
            return
        _serve(listening)


def _serve(listening: socket.socket, parent: socket.socket | None = None) -> None:
    # uvicorn raises the signal again after its shutdown; ignore it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        OrderedServer(application, conf.cluster().web_tls, parent).run([listening])
    except SystemExit as ended:
        raise CommandError("the web process could not start; the lines above say why") from ended


def serve_with_daphne(host: str, port: int) -> None:
    """Serve until a signal, which ends all requests at once, because daphne lacks lifespan."""
    import uvloop

    # daphne creates its event loop at import.
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
