"""This process's edge on a socket, for clients that need one."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn

from localai_cluster.asgi import application
from localai_cluster.kit.connections import BoundedHead


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """Yield the address of an edge that is set up as by `manage.py serve`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(
            uvicorn.Config(application, http=BoundedHead, lifespan="off", log_config=None, access_log=False)
        )
        serving = asyncio.create_task(server._serve([listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
