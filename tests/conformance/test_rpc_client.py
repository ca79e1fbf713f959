"""The client of an engine: what its caller hears when the connection is closed under a call."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import Lost


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def test_a_call_whose_client_is_closed_is_lost_and_cancels_no_other(silent: str) -> None:
    """A worker's start of an engine that ended under a probe once went without a reply because of it."""
    client = BackendClient(silent)
    call = asyncio.create_task(client.health(60))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(Lost):
        await call
    assert not call.cancelled()


async def test_a_caller_that_is_cancelled_hears_so(silent: str) -> None:
    client = BackendClient(silent)
    call = asyncio.create_task(client.health(60))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await client.close()
