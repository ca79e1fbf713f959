"""The client of an engine: what its caller hears when the connection is closed under a call, and what a
health call says of the process."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from localai_cluster.rpc.client import BackendClient, probe
from localai_cluster.rpc.errors import Lost
from localai_cluster.rpc.messages import HealthMessage, Reply, Sign
from tests.support.ports import free_port


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


async def answering(reply: bytes, status: grpc.StatusCode | None = None) -> tuple[grpc.aio.Server, str]:
    """A process whose health call is answered like this."""

    async def health(request: object, context: Any) -> Reply:
        if status is not None:
            await context.abort(status, "not now")
        return Reply(message=reply)

    method = grpc.unary_unary_rpc_method_handler(
        health, request_deserializer=HealthMessage.FromString, response_serializer=Reply.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("backend.Backend", {"Health": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.mark.rule("R4.38", "R5.11", "T-REC-33", "C4")
@pytest.mark.parametrize(
    ("reply", "status", "sign"),
    [
        (b"OK", None, Sign.ALIVE),
        (b"starting", None, Sign.UNREACHABLE),
        (b"", grpc.StatusCode.UNAVAILABLE, Sign.UNREACHABLE),
        (b"", grpc.StatusCode.RESOURCE_EXHAUSTED, Sign.BUSY),
        (b"", grpc.StatusCode.UNAUTHENTICATED, Sign.BUSY),
        (b"", grpc.StatusCode.UNKNOWN, Sign.BUSY),
    ],
    ids=["ok", "not ok", "unavailable", "exhausted", "unauthenticated", "unknown"],
)
async def test_what_an_answer_says(reply: bytes, status: grpc.StatusCode | None, sign: Sign) -> None:
    """With the port's line: an answer that is not OK is no busy engine."""
    server, address = await answering(reply, status)
    try:
        assert await probe(address, "", 20) is sign
    finally:
        await server.stop(None)


@pytest.mark.rule("R4.38", "R5.11", "T-REC-33")
async def test_no_answer_is_busy_and_a_refusal_is_not(silent: str) -> None:
    assert await probe(silent, "", 0.3) is Sign.BUSY
    assert await probe(f"127.0.0.1:{free_port()}", "", 20) is Sign.UNREACHABLE
    assert await probe("no address", "", 20) is Sign.UNREACHABLE
