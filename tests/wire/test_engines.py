"""Installs and the engines they start (worker.md §8.1, §9, §10)."""

import asyncio
import os
import signal

import pytest

from tests.wire.conftest import OpenNode
from tests.wire.node import Node, alive
from tests.wire.servers import TOKEN, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.rule("W8", "W9", "W10", "worker-8.6", "nats-4.7", "nats-4.8")
async def test_a_new_worker_has_nothing_and_an_unknown_backend_leaves_it_so(open_node: OpenNode) -> None:
    node = await open_node()
    listed, running = await asyncio.gather(node.ask("backend.list", {}), node.ask("models.running", b"null"))
    assert listed["backends"] in ([], None)
    assert "error" not in listed
    assert running["models"] == []
    assert "error" not in running
    galleries = node.gallery("empty", {"name": "other", "uri": "/nowhere"})
    unknown = [node.install("missing"), node.install("missing", backend_galleries=galleries, model_id="m")]
    broken = [node.ask("backend.install", body) for body in (b"{broken", b"", b'{"backend":7}')]
    for reply in await asyncio.gather(*unknown, *broken):
        assert reply["success"] is False
        assert reply["error"]
    assert await node.running() == set()
    assert await node.listed() == {}
    assert list(node.backends.iterdir()) == []


@pytest.mark.rule("W11", "W12", "W26")
@pytest.mark.rule("R6.2", "worker-8.1", "worker-10.2", "nats-4.1")
async def test_a_folder_is_installed_and_started_once(node: Node) -> None:
    """An engine gets one argument, its folder and the token; the same install again finds it running."""
    source = node.source("plain")
    first = await node.install("plain", source, model_id="org/plain")
    assert first["success"], first
    host, _, port = first["address"].rpartition(":")
    assert host == "localhost"
    assert node.base <= int(port) <= node.last_port
    assert await node.healthy(first["address"])
    assert not await node.healthy(first["address"], "wrong")
    assert not await node.healthy(first["address"], "")
    assert await node.install("plain", source, model_id="org/plain") == first
    [started] = node.notes("plain", "started")
    # D-ENGINE-LOOPBACK: this worker registers as localhost. A stock one always listens everywhere.
    assert started["argv"] in (["--addr", f"127.0.0.1:{port}"], ["--addr", f"0.0.0.0:{port}"])
    assert started["cwd"] == str(node.backends / "plain")
    assert started["env"]["LOCALAI_GRPC_AUTH_TOKEN"] == node.engine_token
    assert "org/plain#0" in await node.running()
    assert (await node.listed())["plain"]["uri"] == str(source)


async def test_an_engine_is_told_no_secret_of_the_worker(node: Node) -> None:
    """D-ENGINE-TOKEN: on our server; a stock worker's engines get the registration token."""
    address = await node.load("secretive", "secretive")
    environment = node.notes("secretive", "started")[0]["env"]
    assert TOKEN not in environment.values()
    assert not [name for name in environment if name.startswith("LOCALAI_NATS")]
    assert not await node.healthy(address, TOKEN)


@pytest.mark.rule("W13", "nats-4.8")
async def test_two_replicas_have_two_addresses(node: Node) -> None:
    node.source("pair")
    addresses = await asyncio.gather(node.load("pair", "pair", 0), node.load("pair", "pair", 1))
    assert len(set(addresses)) == 2
    assert {"pair#0", "pair#1"} <= await node.running()
    assert all(await asyncio.gather(*map(node.healthy, addresses)))


@pytest.mark.rule("W14", "worker-8.1")
async def test_another_backend_in_the_same_slot_replaces_the_engine(node: Node) -> None:
    await node.load("former", "slot")
    new = await node.load("latter", "slot")
    assert node.alive("former") == []
    assert await node.healthy(new)
    assert [note["event"] for note in node.notes("former")] == ["started", "free", "sigterm"]


@pytest.mark.rule("W15", "worker-8.1", "worker-9")
async def test_a_killed_engine_comes_back_on_another_port(node: Node) -> None:
    first = await node.load("killed", "killed")
    victim = node.notes("killed", "started")[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: not alive(victim), "the engine is dead")
    second = await node.load("killed", "killed")
    assert second != first
    assert await node.healthy(second)


@pytest.mark.rule("W16", "worker-8.6", "worker-10.3")
async def test_an_engine_that_leaves_at_once_fails_with_its_last_words(node: Node) -> None:
    words = "\n".join(f"line {number}" for number in range(30))
    reply = await node.install("leaving", node.source("leaving", exit=words), model_id="leaving")
    assert reply["success"] is False
    assert "address" not in reply
    said = reply["error"].splitlines()
    assert [line for line in said if line.startswith("line ")] == words.splitlines()[10:]
    assert "leaving#0" not in await node.running()
    assert "leaving" in await node.listed()


@pytest.mark.rule("W18", "nats-3")
async def test_a_slow_install_delays_only_its_own_backend(node: Node) -> None:
    """One lock a backend, held until the engine is ready."""
    gate = node.folder / "gate"
    source = node.source("slow", gate=str(gate))
    slow = [asyncio.create_task(node.install("slow", source, model_id=f"slow-{n}")) for n in range(2)]
    await until(lambda: node.notes("slow", "started"), "the first engine starts")
    await node.load("quick", "quick")
    assert "quick" in await node.listed()
    assert "quick#0" in await node.running()
    assert len(node.notes("slow", "started")) == 1
    assert not any(task.done() for task in slow)
    gate.touch()
    replies = await asyncio.gather(*slow)
    assert len({reply["address"] for reply in replies}) == 2, replies


@pytest.mark.rule("nats-4", "worker-7", "nats-4.1")
async def test_a_name_with_its_gallery_and_a_name_beside_an_address_mean_the_backend(node: Node) -> None:
    """`gallery@name` is `name`, with one lock; without a `backend` it is `name`, else the address's end."""
    source = node.source("named")
    galleries = node.gallery("mine", {"name": "named", "uri": str(source), "version": "1.2"})
    names = ("mine@named", "named", "mine@Named")
    requests = [
        node.install(name, backend_galleries=galleries, model_id=f"named-{n}") for n, name in enumerate(names)
    ]
    replies = await asyncio.gather(*requests)
    assert [reply["success"] for reply in replies] == [True] * 3, replies
    assert (await node.listed())["named"]["version"] == "1.2"
    by_name = await node.install("", node.source("anything"), name="mine@chosen")
    by_address = await node.install("", node.source("addressed"))
    assert by_name["success"], by_name
    assert by_address["success"], by_address
    assert {"chosen", "addressed", "named"} <= set(await node.listed())
    assert {"chosen#0", "addressed#0"} <= await node.running()


@pytest.mark.rule("nats-4")
async def test_a_backend_may_be_called_like_the_key_of_its_own_process(node: Node) -> None:
    """Names come from outside, so no two locks of one command may have one name."""
    reply = await asyncio.wait_for(node.install("#odd#0", node.source("#odd#0"), model_id="odd"), 60)
    assert reply["success"], reply
