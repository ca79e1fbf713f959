"""The engine client against a real engine process, started by its run.sh in an all but empty environment."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from localai_cluster.rpc import errors
from localai_cluster.rpc.client import BackendClient, ClientPool
from localai_cluster.rpc.messages import EMBEDDING_LAYOUT_FINAL, ModelOptions, PredictOptions, StatusResponse
from tests.conftest import until
from tests.support.backends import TOKEN, Backend, gallery, load, ready, running_backend, start
from tests.support.ports import free_port

LIMIT = 10.0


def text(value: str, identity: str = "") -> PredictOptions:
    """A request to embed `value`."""
    return PredictOptions(Embeddings=value, ModelIdentity=identity)


@pytest_asyncio.fixture
async def backend() -> AsyncIterator[Backend]:
    """An echo engine without a model."""
    async with running_backend("echo") as running:
        yield running


@pytest_asyncio.fixture
async def client(backend: Backend) -> AsyncIterator[BackendClient]:
    """A client that shares the engine's token."""
    client = BackendClient(backend.address, TOKEN, counted=True)
    yield client
    await client.close()


async def test_a_model_from_load_to_free(client: BackendClient) -> None:
    """The life of a model: nothing loaded, loaded (twice is harmless), answering, freed."""
    with pytest.raises(errors.ModelNotLoaded):
        await client.embedding(text("a cat"), LIMIT)
    assert (await client.status(LIMIT)).state == StatusResponse.UNINITIALIZED
    for _ in range(2):
        result = await client.load_model(ModelOptions(Model="m", Options=["dims:16"]), LIMIT)
        assert result.success
    assert (await client.status(LIMIT)).state == StatusResponse.READY
    answer = await client.embedding(text("a cat", "m"), LIMIT)
    assert (answer.dim, len(answer.embeddings), answer.layout) == (16, 16, EMBEDDING_LAYOUT_FINAL)
    assert answer.prompt_tokens == answer.tokens == 2
    assert answer == await client.embedding(text("a cat", "m"), LIMIT)
    assert answer != await client.embedding(text("a dog", "m"), LIMIT)
    assert (await client.free(LIMIT)).success
    with pytest.raises(errors.ModelNotLoaded):
        await client.embedding(text("a cat", "m"), LIMIT)


async def test_completions(client: BackendClient) -> None:
    """Predict answers at once what PredictStream answers in pieces; the token ids are counted."""
    await client.load_model(ModelOptions(Model="m"), LIMIT)
    prompt = PredictOptions(Prompt="one two three", ModelIdentity="m")
    whole = await anext(aiter(client.predict(prompt, LIMIT)))
    pieces = [reply.message async for reply in client.predict_stream(prompt, LIMIT)]
    assert whole.message == b"".join(pieces) == b"one two three"
    assert len(pieces) == 3
    assert (await client.tokenize(prompt, LIMIT)).length == 3


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x"])
@pytest.mark.rule("worker-10.4")
async def test_every_method_needs_the_token(backend: Backend, token: str) -> None:
    """A process started with a token rejects calls without it, Health included."""
    stranger = BackendClient(backend.address, token, counted=True)
    calls = [
        stranger.health(LIMIT),
        stranger.load_model(ModelOptions(Model="m"), LIMIT),
        stranger.embedding(text("a cat"), LIMIT),
        anext(aiter(stranger.predict(PredictOptions(Prompt="a"), LIMIT))),
        stranger.tokenize(PredictOptions(Prompt="a"), LIMIT),
        stranger.status(LIMIT),
        stranger.free(LIMIT),
        anext(aiter(stranger.predict_stream(PredictOptions(Prompt="a"), LIMIT))),
    ]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [errors.Unauthenticated] * len(calls)
    await stranger.close()


@pytest.mark.rule("T-INF-28")
async def test_an_engine_refuses_a_request_for_another_model(client: BackendClient) -> None:
    """ModelIdentity: a port that another model took over is noticed before any work is done."""
    await client.load_model(ModelOptions(Model="m"), LIMIT)
    with pytest.raises(errors.IdentityMismatch, match="'m' is loaded, not 'other'"):
        await client.embedding(text("a cat", "other"), LIMIT)
    assert (await client.embedding(text("a cat", ""), LIMIT)).embeddings, "one that names no model is served"


async def test_a_refused_load_is_an_answer(client: BackendClient) -> None:
    """LoadModel: `success` false carries the reason, and nothing is loaded."""
    result = await client.load_model(ModelOptions(Model="m", Options=["refuse_load:too large"]), LIMIT)
    assert (result.success, result.message) == (False, "too large")
    with pytest.raises(errors.ModelNotLoaded):
        await client.embedding(text("a cat"), LIMIT)


@pytest.mark.rule("worker-10.4")
async def test_a_long_text_passes(client: BackendClient) -> None:
    """The message limit is 50 MB both ways, not the library's 4 MB."""
    await client.load_model(ModelOptions(Model="m"), LIMIT)
    assert (await client.embedding(text("word " * 1_200_000), LIMIT)).tokens == 1_200_000


async def test_a_late_answer_is_a_timeout(client: BackendClient) -> None:
    """Every call has a deadline."""
    await client.load_model(ModelOptions(Model="m", Options=["delay_ms:60000"]), LIMIT)
    with pytest.raises(errors.DeadlineExceeded):
        await client.embedding(text("a cat"), 0.1)


async def test_a_killed_engine_is_told_from_an_absent_one(backend: Backend, client: BackendClient) -> None:
    """A broken connection is Lost, a closed port Refused; a new process at the address is reached at once."""
    await client.load_model(ModelOptions(Model="m", Options=["delay_ms:60000"]), LIMIT)
    waiting = asyncio.ensure_future(client.embedding(text("a cat"), LIMIT))

    async def arrived() -> bool:
        return (await client.status(LIMIT)).memory.breakdown["embedding_calls"] == 1

    await until(arrived)
    backend.kill()
    with pytest.raises(errors.Lost):
        await waiting
    for _ in range(20):
        with pytest.raises(errors.Refused):
            await client.embedding(text("a cat"), LIMIT)

    port = int(backend.address.rpartition(":")[2])
    successor = start("echo", port, backend.log)
    try:
        await ready(successor)
        assert await client.health(LIMIT)
    finally:
        successor.kill()


async def test_a_pool_keeps_one_client_an_address(backend: Backend) -> None:
    """The least recently used client goes first; a forgotten one is made again."""
    pool = ClientPool(limit=2)
    first = pool.get(backend.address, TOKEN)
    assert pool.get("127.0.0.1:1", TOKEN) is not first
    assert pool.get(backend.address, TOKEN) is first
    pool.get("127.0.0.1:2", TOKEN)
    assert pool.get(backend.address, TOKEN) is first
    pool.forget(backend.address, TOKEN)
    assert pool.get(backend.address, TOKEN) is not first
    assert await pool.get(backend.address, TOKEN).health(LIMIT)
    await pool.close()


async def test_a_pool_keeps_one_client_a_token(backend: Backend) -> None:
    """Two nodes may claim one address: neither calls with the other's token, nor loses its own client."""
    pool = ClientPool()
    mine = pool.get(backend.address, TOKEN)
    with pytest.raises(errors.Unauthenticated):
        await pool.get(backend.address, "another").health(LIMIT)
    with pytest.raises(errors.Unauthenticated):
        await pool.get(backend.address).health(LIMIT)
    pool.forget(backend.address, "another")
    assert pool.get(backend.address, TOKEN) is mine
    assert await mine.health(LIMIT)
    await pool.close()


@pytest.mark.parametrize("address", ["unix:/tmp/x", "dns:///127.0.0.1:1", "127.0.0.1", ""])
def test_a_client_reads_no_scheme_in_an_address(address: str) -> None:
    """A row of an earlier version may hold anything: the replica at no address is refused, and so goes."""
    with pytest.raises(errors.Refused, match="host:port"):
        ClientPool().get(address, TOKEN)


async def test_leaving_a_stream_cancels_it(backend: Backend, client: BackendClient) -> None:
    """A client that goes away must not keep the engine at work: the next pieces are never made."""
    await load(backend, "m", "delay_ms:20")
    stream = client.predict_stream(PredictOptions(Prompt="word " * 10_000), LIMIT)
    async with aclosing(aiter(stream)) as pieces:
        assert (await anext(pieces)).message == b"word"

    async def over() -> bool:
        return (await client.status(LIMIT)).memory.breakdown["streams_open"] == 0

    await until(over)


async def test_a_taken_port_is_one_clear_line(backend: Backend, tmp_path: Path) -> None:
    """A second engine never shares the port of the first."""
    second = start("echo", int(backend.address.rpartition(":")[2]), tmp_path / "log")
    assert second.process.wait(timeout=LIMIT) == 1
    assert second.log.read_text().strip().startswith("cannot listen on 0.0.0.0:")
    assert len(second.log.read_text().splitlines()) == 1


async def test_sigterm_ends_it_cleanly(backend: Backend) -> None:
    """Exit 0, nothing on stderr but its own lines."""
    backend.process.send_signal(signal.SIGTERM)
    assert backend.process.wait(timeout=LIMIT) == 0
    assert "Traceback" not in backend.log.read_text()


def start_under_a_shell(log: Path) -> tuple[Backend, psutil.Process]:
    """An engine as the child of a shell: the shell (as `process`) and the engine itself."""
    address = f"127.0.0.1:{free_port()}"
    script = f'"{gallery()}/echo/run.sh" --addr {address} & echo $!; wait'
    environment = {"PATH": os.defpath, "LOCALAI_GRPC_AUTH_TOKEN": TOKEN}
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["sh", "-c", script], env=environment, stdout=subprocess.PIPE, stderr=out, start_new_session=True
        )
    assert shell.stdout is not None
    with shell.stdout as lines:
        return Backend(address, shell, log), psutil.Process(int(lines.readline()))


async def test_it_follows_its_parent(tmp_path: Path) -> None:
    """An engine whose worker was killed leaves by itself (worker.md 10.2)."""
    parent, engine = start_under_a_shell(tmp_path / "log")

    try:
        await ready(parent)
        parent.kill()
        await until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        assert "the parent process is gone" in parent.log.read_text()
    finally:
        parent.kill()
        if engine.is_running():
            engine.kill()


def test_it_does_not_start_open(tmp_path: Path) -> None:
    """Without a token in the environment an engine refuses to serve anyone."""
    backend = start("echo", free_port(), tmp_path / "log", token="")
    assert backend.process.wait(timeout=LIMIT) == 2
    assert "LOCALAI_GRPC_AUTH_TOKEN is not set" in backend.log.read_text()


def test_a_wrong_interpreter_is_named(tmp_path: Path) -> None:
    """The wheels fit one Python version; the line says which."""
    folder = tmp_path / "echo"
    folder.mkdir()
    shutil.copy(gallery() / "echo" / "run.sh", folder)
    (folder / "python-version").write_text("3.99\n")
    (folder / "python-path").write_text("/nowhere/python3.99\n")
    backend = start("echo", free_port(), tmp_path / "log", folder=folder)
    assert backend.process.wait(timeout=LIMIT) == 1
    assert backend.log.read_text() == (
        "This engine needs Python 3.99: put python3.99 on PATH, or assemble the gallery again.\n"
    )


def test_the_broken_engine_says_why(tmp_path: Path) -> None:
    """Thirty lines on stderr and status 3, for all who report failures."""
    backend = start("broken", free_port(), tmp_path / "log")
    assert backend.process.wait(timeout=LIMIT) == 3
    assert backend.log.read_text().splitlines()[-1] == "broken: line 30 of 30"
    assert len(backend.log.read_text().splitlines()) == 30
