"""A NATS server for each file, one worker that its tests share, and workers of their own.

The tests of a file run in one event loop. Those that share a worker use backends and models of their own.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.wire.node import Node
from tests.wire.servers import NatsServer

OpenNode = Callable[..., Awaitable[Node]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OpenNode]:
    """Starts a worker of one's own: `await open_node(ports=…, LOCALAI_…=…)`."""
    home: Path = tmp_path_factory.mktemp("wire")
    async with AsyncExitStack() as stack:
        server = NatsServer(home)
        stack.callback(server.stop)
        await server.start()

        async def open_one(ports: int = 40, **more: str) -> Node:
            node = Node(tmp_path_factory.mktemp("node"), server, ports)
            # Several workers share the bus.
            node.control_plane.node_id += f"-{node.base}"
            stack.push_async_callback(node.stop)
            await node.start(**more)
            return node

        yield open_one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(open_node: OpenNode) -> Node:
    """The worker that the tests of a file share."""
    return await open_node()
