"""What takes its time: the limits of a start, of a stop, and the rest of a port, all provoked at once.

The clock is the machine's, so engine and test may compare what they noted.
"""

import asyncio
import time
from typing import Any

import pytest
import pytest_asyncio

from tests.wire.conftest import OpenNode
from tests.wire.node import Node
from tests.wire.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, FREE, GRACE, QUARANTINE = 30.0, 5.0, 15.0, 15.0
SLACK, LAG = 60.0, 1.5
"""Seconds that a busy machine may take longer, and that an engine may be late to note what it saw."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(open_node: OpenNode) -> dict[str, Any]:
    """What came of each scene."""
    wide, narrow = await asyncio.gather(open_node(), open_node(ports=1))
    scenes = {"mute": mute(wide), "stubborn": stubborn(wide), "hanging": hanging(wide), "port": port(narrow)}
    outcomes = await asyncio.gather(*scenes.values())
    return dict(zip(scenes, outcomes, strict=True))


async def mute(node: Node) -> dict[str, Any]:
    """An engine that never serves."""
    begin = time.monotonic()
    reply = await node.install("mute", node.source("mute", gate="/nowhere"), model_id="mute")
    taken = time.monotonic() - begin
    return {"reply": reply, "taken": taken, "alive": node.alive("mute"), "running": await node.running()}


async def stubborn(node: Node) -> dict[str, Any]:
    """An engine that survives SIGTERM, stopped with a reply."""
    address = await node.load("stubborn", "stubborn", stubborn=True)
    stopping = asyncio.create_task(node.stop_model("stubborn#0", address))
    await until(lambda: node.notes("stubborn", "sigterm"), "the signal comes")
    running, again = await node.running(), await node.install("other", node.source("other"))
    reply = await stopping
    taken = time.monotonic() - node.notes("stubborn", "sigterm")[0]["at"]
    events = [note["event"] for note in node.notes("stubborn")]
    left = node.alive("stubborn")
    return {
        "reply": reply,
        "taken": taken,
        "alive": left,
        "events": events,
        "running": running,
        "other": again,
    }


async def hanging(node: Node) -> dict[str, Any]:
    """An engine whose `Free` never answers."""
    await node.load("hanging", "hanging", free="hang")
    await node.publish_stop({"backend": "hanging"})
    [signalled] = await until(lambda: node.notes("hanging", "sigterm"), "the signal comes", 20)
    [freed] = node.notes("hanging", "free")
    await until(lambda: not node.alive("hanging"), "the engine is gone")
    return {"taken": signalled["at"] - freed["at"]}


async def port(node: Node) -> dict[str, Any]:
    """One port: an engine that leaves at once, one that is stopped, and one more."""
    refused = await node.install("leaving", node.source("leaving", exit="no"), model_id="leaving")
    [left] = node.notes("leaving", "started")
    first, refusals = await patiently(node, "good", "a")
    [one] = node.notes("good", "started")
    await node.stop_model("a#0", first["address"], force=True)
    [stopped] = node.notes("good", "sigterm")
    second, more = await patiently(node, "good", "b")
    two = node.notes("good", "started")[1]
    return {
        "refused": refused,
        "addresses": {first["address"], second["address"]},
        "rests": (one["at"] - left["at"], two["at"] - stopped["at"]),
        "refusals": refusals + more,
    }


async def patiently(node: Node, backend: str, model: str) -> tuple[dict[str, Any], list[str]]:
    """The first success of an install that is repeated, and the errors before it."""
    source = node.sources / backend
    if not source.exists():
        node.source(backend)
    errors: list[str] = []

    async def installed() -> dict[str, Any] | None:
        reply = await node.install(backend, source, model_id=model)
        if reply["success"]:
            return reply
        errors.append(reply["error"])
        return None

    return await until(installed, "a port is free", 40), errors


@pytest.mark.rule("W17", "worker-8.6", "worker-10.3")
async def test_an_engine_that_is_not_ready_in_time_is_killed(played: dict[str, Any]) -> None:
    scene = played["mute"]
    assert scene["reply"]["success"] is False
    assert "30" in scene["reply"]["error"]
    assert READY <= scene["taken"] <= READY + SLACK
    assert scene["alive"] == []
    assert "mute#0" not in scene["running"]


@pytest.mark.rule("W20", "worker-8.5", "nats-4.8")
async def test_an_engine_that_survives_the_signal_is_killed_after_its_grace(played: dict[str, Any]) -> None:
    """Meanwhile it does not count as running, and an install goes on."""
    scene = played["stubborn"]
    assert scene["events"] == ["started", "free", "sigterm"]
    assert GRACE - LAG <= scene["taken"] <= GRACE + SLACK
    assert (scene["reply"]["matched"], scene["reply"]["terminated"]) == (True, True)
    assert scene["alive"] == []
    assert "stubborn#0" not in scene["running"]
    assert scene["other"]["success"], scene["other"]


@pytest.mark.rule("W20", "worker-8.5")
async def test_a_free_without_answer_delays_the_signal_by_its_limit_only(played: dict[str, Any]) -> None:
    assert FREE - LAG <= played["hanging"]["taken"] <= FREE + SLACK


@pytest.mark.rule("W16", "W25", "worker-8.6", "worker-9")
async def test_a_released_port_rests_before_another_model_gets_it(played: dict[str, Any]) -> None:
    """After an engine that failed as after one that was stopped; the refusal names the range."""
    scene = played["port"]
    assert scene["refused"]["success"] is False
    assert len(scene["addresses"]) == 1
    assert all(QUARANTINE - LAG <= rest <= QUARANTINE + SLACK for rest in scene["rests"]), scene["rests"]
    [address] = scene["addresses"]
    assert all(address.rpartition(":")[2] in error for error in scene["refusals"])
    assert scene["refusals"]
