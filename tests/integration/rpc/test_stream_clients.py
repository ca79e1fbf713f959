"""Both clients of text and vectors against real gRPC servers: grpcio's, and one in Go if it can be built."""

import asyncio
import operator
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest

from localai_cluster.kit import processes
from localai_cluster.rpc import errors
from localai_cluster.rpc.client import GRPC, HTTP2, BackendClient
from localai_cluster.rpc.messages import Message, PredictOptions, Reply
from localai_cluster.rpc.stream_client import MAX_MESSAGE_BYTES
from tests.benchmarks.engine import Engine, build, running
from tests.conftest import until
from tests.support.ports import free_port

pytestmark = pytest.mark.rule("grpc-PredictStream")
TOKEN = "engine-token"
PATIENCE = 600.0
"""Seconds; only for hangs."""
FOREVER = "3600000 1"
"""A script whose token comes in an hour."""
ENDLESS = "20 1000000"
"""A script with a token every 20 ms, for hours."""


@pytest.fixture(scope="module", params=["grpcio", "go"])
def is_go(request: pytest.FixtureRequest) -> bool:
    """True for the engine in Go, False for grpcio's server."""
    if request.param == "go" and (reason := build()):
        pytest.skip(reason)
    return bool(request.param == "go")


@pytest.fixture(scope="module")
def engine(is_go: bool, reaper: processes.ProcessReaper) -> Iterator[Engine]:
    """An engine for the tests that do not stop it."""
    with running(reaper, go=is_go, token=TOKEN) as started:
        yield started


class Caller:
    """The client of one engine."""

    def __init__(self, address: str, stream_client: str, token: str = TOKEN) -> None:
        self.client = BackendClient(address, token, counted=True, stream_client=stream_client)

    def stream(
        self, script: str, timeout: float | None = None, prompt: str = ""
    ) -> "aclosing[AsyncGenerator[Reply, None]]":
        """The replies to a script, read without a limit."""
        options = PredictOptions(Prompt=prompt, Messages=[Message(role="user", content=script)])
        self.replies = self.client.predict_stream(options, timeout)
        return aclosing(self.replies.within(PATIENCE, PATIENCE))

    async def read(self, script: str, timeout: float | None = None, prompt: str = "") -> list[Reply]:
        """All replies to a script."""
        async with self.stream(script, timeout, prompt) as replies:
            return [reply async for reply in replies]

    async def whole(self, script: str, first: float = PATIENCE) -> Reply:
        """The complete reply to a script, which comes within `first` seconds."""
        options = PredictOptions(Messages=[Message(role="user", content=script)])
        self.replies = self.client.predict(options)
        async with aclosing(self.replies.within(first, PATIENCE)) as replies:
            (reply,) = [reply async for reply in replies]
            return reply

    async def counts(self) -> tuple[int, int]:
        """Streams that run at the engine, and the tokens that it has sent."""
        count, sent = (await self.client.tokenize(PredictOptions(), PATIENCE)).tokens
        return count, sent

    async def wait_for(self, count: int) -> None:
        """Wait until so many streams run at the engine."""

        async def is_reached() -> bool:
            return (await self.counts())[0] == count

        await until(is_reached)


@pytest.fixture(params=[HTTP2, GRPC])
def stream_client(request: pytest.FixtureRequest) -> str:
    """Each implementation."""
    return str(request.param)


@asynccontextmanager
async def calling(address: str, stream_client: str, token: str = TOKEN) -> AsyncIterator[Caller]:
    """A client, closed at the end."""
    caller = Caller(address, stream_client, token)
    yield caller
    await caller.client.close()


@pytest.fixture
async def caller(engine: Engine, stream_client: str) -> AsyncIterator[Caller]:
    """A client of the shared engine."""
    async with calling(engine.address, stream_client) as started:
        yield started


async def test_messages_arrive_in_order_and_then_the_trailers(caller: Caller) -> None:
    replies = await caller.read("0 500")
    assert [reply.tokens for reply in replies] == list(range(1, 501))
    assert {reply.message for reply in replies} == {b" word"}
    assert await caller.replies.trailing("localai-cached-tokens") == "500"
    assert await caller.replies.trailing("nothing") == ""
    assert await caller.read("0 0") == []


@pytest.mark.rule("R2.76", "T-INF-25", "T-DL-23")
@pytest.mark.parametrize("tokens", [0, 3], ids=["at once", "after tokens"])
async def test_every_status_is_the_same_error(caller: Caller, tokens: int) -> None:
    """With its text, which is percent-encoded on the way; what came before is delivered."""
    text = "größer als 100%, 50%25\n\t→ x"
    for status in grpc.StatusCode:
        if status is grpc.StatusCode.OK:
            continue
        async with caller.stream(f"0 {tokens} 5 {status.value[0]} {text}") as replies:
            for _ in range(tokens):
                await anext(replies)
            with pytest.raises(errors.BackendError) as caught:
                await anext(replies)
        assert type(caught.value) is type(errors.translate_status(status, text)), status
        assert caught.value.message == text
    assert await caller.read("0 1")


@pytest.mark.rule("grpc-Predict", "grpc-Embedding", "T-INF-25")
async def test_a_response_of_one_message(caller: Caller) -> None:
    """With its trailers, its errors, and cancelled with its reader, in both implementations."""
    assert (await caller.whole("0 500 100")).message == b"w" * 50_000
    assert await caller.replies.trailing("localai-cached-tokens") == "500"
    assert len((await caller.whole("0 3 1000000")).message) == 3_000_000
    for status in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
    ):
        with pytest.raises(type(errors.translate_status(status, "größer"))) as caught:
            await caller.whole(f"0 3 5 {status.value[0]} größer")
        assert caught.value.message == "größer"
    vectors = await asyncio.gather(
        *(caller.client.embedding(PredictOptions(Embeddings="a cat"), PATIENCE) for _ in range(40))
    )
    assert {len(vector.embeddings) for vector in vectors} == {768}
    with pytest.raises(errors.DeadlineExceeded, match="nothing"):
        await caller.whole(FOREVER, 0.1)
    await caller.wait_for(0)
    reader = asyncio.create_task(caller.whole(FOREVER))
    await caller.wait_for(1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await caller.wait_for(0)


@pytest.mark.rule("worker-10.4")
async def test_the_engine_gets_the_token(engine: Engine, stream_client: str) -> None:
    for token in ("", "wrong"):
        async with calling(engine.address, stream_client, token) as stranger:
            with pytest.raises(errors.Unauthenticated, match="token required"):
                await stranger.read("0 1")


async def test_messages_may_be_large_but_not_larger_than_the_limit(caller: Caller) -> None:
    for size in (0, 1, 65_536, 3_000_000, MAX_MESSAGE_BYTES - 100):
        assert [len(reply.message) for reply in await caller.read(f"0 2 {size}")] == [size, size]
    with pytest.raises(errors.BackendFailed, match="Received message larger than max"):
        await caller.read(f"0 1 {MAX_MESSAGE_BYTES}")
    (reply,) = await caller.read("0 1", prompt="p" * 5_000_000)
    assert reply.prompt_tokens == 5_000_000
    with pytest.raises(errors.BackendFailed, match="Sent message larger than max"):
        await caller.read("0 1", prompt="p" * MAX_MESSAGE_BYTES)
    assert await caller.read("0 1")


async def test_a_deadline_ends_the_call_on_both_sides(caller: Caller) -> None:
    assert len(await caller.read("0 3", timeout=PATIENCE)) == 3
    with pytest.raises(errors.DeadlineExceeded):
        await caller.read(FOREVER, timeout=0.1)
    await caller.wait_for(0)
    replies = caller.client.predict_stream(PredictOptions(Prompt=FOREVER))
    with pytest.raises(errors.DeadlineExceeded, match="silent"):
        await anext(replies.within(0.1, PATIENCE, "the engine is silent"))
    await caller.wait_for(0)


async def test_a_cancelled_reader_cancels_its_call_and_no_other(caller: Caller) -> None:
    alone = asyncio.create_task(caller.read(FOREVER))
    await caller.wait_for(1)
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    await caller.wait_for(0)
    received = [0] * 40

    async def count(number: int) -> None:
        async with caller.stream(ENDLESS) as replies:
            async for _ in replies:
                received[number] += 1

    readers = [asyncio.create_task(count(number)) for number in range(40)]
    await caller.wait_for(40)
    for reader in readers[::2]:
        reader.cancel()
    await caller.wait_for(20)
    before = received[1::2]

    def have_gone_on() -> bool:
        return all(map(operator.gt, received[1::2], before)) or any(task.done() for task in readers[1::2])

    await until(have_gone_on)
    assert [task.done() for task in readers] == [True, False] * 20
    for reader in readers[1::2]:
        reader.cancel()
    await asyncio.wait(readers)
    await caller.wait_for(0)


async def test_an_engine_waits_for_a_reader_that_does_not_read(caller: Caller) -> None:
    """And for no other one: its connection still carries streams."""
    tokens, size = 2_000, 16_384
    before = (await caller.counts())[1]
    latest = -1

    async def is_blocked() -> bool:
        nonlocal latest
        previous, latest = latest, (await caller.counts())[1]
        return previous == latest

    async with caller.stream(f"0 {tokens} {size}") as replies:
        await anext(replies)
        await until(is_blocked, every=0.3)
        assert (latest - before) * size < 16 * 2**20
        assert len(await caller.read("0 100 1024")) == 100
        assert len([reply async for reply in replies]) == tokens - 1


async def test_streams_above_the_engines_limit_wait(
    is_go: bool, reaper: processes.ProcessReaper, stream_client: str
) -> None:
    with running(reaper, go=is_go, token=TOKEN, streams=2) as engine:
        async with calling(engine.address, stream_client) as caller, calling(engine.address, GRPC) as viewer:
            blocking = [asyncio.create_task(caller.read(FOREVER)) for _ in range(2)]
            await viewer.wait_for(2)
            waiting = [asyncio.create_task(caller.read("0 5")) for _ in range(4)]
            with pytest.raises(errors.DeadlineExceeded):
                await caller.read("0 5", timeout=0.1)
            waiting.pop().cancel()
            blocking.pop().cancel()
            assert [len(replies) for replies in await asyncio.gather(*waiting)] == [5, 5, 5]
            blocking.pop().cancel()
            await viewer.wait_for(0)


async def test_an_engine_that_stops_finishes_its_streams_and_its_successor_is_reached(
    is_go: bool, reaper: processes.ProcessReaper, stream_client: str
) -> None:
    port = free_port()
    async with calling(f"127.0.0.1:{port}", stream_client) as caller:
        with running(reaper, go=is_go, token=TOKEN, port=port) as engine:
            async with caller.stream("10 60") as replies:
                await anext(replies)
                engine.stop()
                assert len([reply async for reply in replies]) == 59
            await asyncio.to_thread(engine.process.wait)
            with pytest.raises(errors.Refused):
                await caller.read("0 1")
        with running(reaper, go=is_go, token=TOKEN, port=port) as engine:
            assert len(await caller.read("0 36")) == 36
            async with caller.stream("10 1000000") as replies:
                await anext(replies)
                engine.kill()
                with pytest.raises(errors.Lost):
                    _ = [reply async for reply in replies]
        with running(reaper, go=is_go, token=TOKEN, port=port):
            assert len(await caller.read("0 36")) == 36


async def test_a_closed_client_ends_its_calls_at_once_or_after_a_grace(
    engine: Engine, stream_client: str
) -> None:
    async with calling(engine.address, stream_client) as caller, calling(engine.address, GRPC) as viewer:
        reader = asyncio.create_task(caller.read(FOREVER))
        await viewer.wait_for(1)
        await caller.client.close()
        with pytest.raises(errors.Lost):
            await reader
        await viewer.wait_for(0)
    async with calling(engine.address, stream_client) as caller:
        async with caller.stream("10 30") as replies:
            await anext(replies)
            closing = asyncio.create_task(caller.client.close(PATIENCE))
            assert len([reply async for reply in replies]) == 29
        await closing
