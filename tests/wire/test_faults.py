"""Kills, cuts and full disks, one by one and in seeded histories: afterwards nothing is left over.

Seconds of an outage are those of the machine: nothing can happen meanwhile that a test could wait for.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.wire.histories import History
from tests.wire.node import Node, alive
from tests.wire.servers import NatsServer, until

IS_SWEPT = "TEST_EFFORT" in os.environ
swept = pytest.mark.skipif(not IS_SWEPT, reason="`make sweep` plays it")


@asynccontextmanager
async def opened(folder: Path, **more: str) -> AsyncIterator[tuple[Node, NatsServer]]:
    """A worker with a bus of its own."""
    server = NatsServer(folder)
    node = Node(folder / "node", server)
    try:
        await server.start()
        await node.start(LOCALAI_HEARTBEAT_INTERVAL="100ms", **more)
        yield node, server
    finally:
        await node.stop()
        server.stop()


async def beats(node: Node) -> None:
    """Waits until some more heartbeats were accepted."""
    count = sum(call.status == 200 for call in node.frontend.seen("/heartbeat"))
    await until(
        lambda: sum(call.status == 200 for call in node.frontend.seen("/heartbeat")) > count + 2, "it beats"
    )


@pytest.mark.rule("W6", "nats-9.3")
@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=swept)])
async def test_a_cut_of_the_bus_ends_no_engine_and_no_command(tmp_path: Path, seconds: float) -> None:
    """HTTP is up meanwhile. The worker installs on, and answers if the bus is back in time."""
    async with opened(tmp_path) as (node, server):
        address = await node.load("steady", "steady")
        gate = node.folder / "gate"
        slow = asyncio.create_task(node.install("slow", node.source("slow", gate=str(gate)), model_id="slow"))
        await until(lambda: node.notes("slow", "started"), "the engine starts")
        server.stop()
        await asyncio.sleep(seconds)
        silent = len(node.frontend.seen("/heartbeat"))
        if seconds < 10:
            gate.touch()
        await server.start()
        await until(node.answers, "it obeys commands", 30)
        await beats(node)
        assert len(node.frontend.seen("/register")) == 1
        assert await node.healthy(address)
        if seconds < 10:
            assert (await slow)["success"]
            await node.runs("steady#0", "slow#0")
        else:
            slow.cancel()
            await node.runs("steady#0")
        assert silent < seconds * 10 + 20, "no heartbeat without the bus"
        assert len(node.notes("steady", "started")) == 1


async def test_a_cut_of_http_alone_ends_nothing(tmp_path: Path) -> None:
    """The bus is up: commands are obeyed; the heartbeats come back with the server."""
    async with opened(tmp_path) as (node, _):
        await node.frontend.stop()
        node.frontend.drops = True
        await node.frontend.start()
        await until(lambda: node.frontend.calls[-1].status == 0, "it misses it")
        address = await node.load("steady", "steady")
        node.frontend.drops = False
        await beats(node)
        assert len(node.frontend.seen("/register")) == 1
        assert await node.healthy(address)


@pytest.mark.parametrize("is_committed", [False, True], ids=["refused", "committed"])
async def test_a_worker_killed_in_a_rotation_is_the_same_node(tmp_path: Path, is_committed: bool) -> None:
    """Before the server has the new secret, and after that without having heard so."""
    async with opened(tmp_path) as (node, _):
        former = node.control_plane.secret

        def die(commit: Callable[[], None]) -> None:
            if is_committed:
                commit()
            node.kill()

        node.control_plane.at_rotation = die
        node.control_plane.wants_rotation = True
        await until(lambda: node.control_plane.seen("/rotate"), "it replaces its secret")
        node.control_plane.at_rotation = lambda commit: commit()
        assert (node.control_plane.secret != former) is is_committed
        node.launch()
        await until(node.answers, "the worker answers", 30)
        await beats(node)
        stored = (node.folder / "node-secret").read_text().strip()
        assert stored == node.control_plane.secret
        node.control_plane.wants_rotation = True
        await until(lambda: node.control_plane.secret != stored, "it rotates again")
        await beats(node)


@pytest.mark.rule("W15", "worker-9")
async def test_an_engine_that_keeps_its_port_is_ended_and_the_next_start_has_another(tmp_path: Path) -> None:
    """A child in a session of its own takes the port; D-WORKER-START: a port in use is given to none."""
    async with opened(tmp_path) as (node, _):
        first = await node.load("away", "away", away=True)
        [started] = node.notes("away", "started")
        os.kill(started["pid"], signal.SIGKILL)
        await until(lambda: not alive(started["pid"]), "the engine is dead")
        second = await node.load("away", "away")
        assert second != first
        assert await node.healthy(second)
        port = second.rpartition(":")[2]
        await until(lambda: set(node.pids().values()) == {port}, "the first child is gone")
        await node.stop_model("away#0", second)
        await until(lambda: not node.pids(), "nothing is left")


SEEDS = range(50 if IS_SWEPT else 2)


@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_is_left_over_by_a_history_of_faults(tmp_path: Path, seed: int) -> None:
    """Engines, ports, folders and secret are those that the worker says, whatever happened."""
    history = History(tmp_path, seed)
    try:
        await history.begin()
        await history.play(steps=8)
        await history.settle()
        await history.end()
    except BaseException:
        print(f"seed {seed}:", *history.steps, history.node.said, sep="\n")
        raise
    finally:
        await history.close()
