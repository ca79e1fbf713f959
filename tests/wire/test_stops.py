"""Stopping engines, freeing them, deleting models, and the end of the worker (worker.md §8.4, §8.5, §19)."""

import asyncio

import pytest

from tests.wire.conftest import OpenNode
from tests.wire.node import Node, alive
from tests.wire.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.rule("W19", "worker-8.4")
async def test_a_stop_means_a_replica_a_model_a_backend_or_everything(open_node: OpenNode) -> None:
    node = await open_node()
    for backend in ("one", "two"):
        node.source(backend)
    wanted = [("one", "m", 0), ("one", "m", 1), ("one", "m", 2), ("one", "k", 0), ("two", "m-2", 0)]
    await asyncio.gather(*(node.load(*each) for each in wanted))
    await node.publish_stop({"backend": "m#1"})
    await node.runs("m#0", "m#2", "k#0", "m-2#0")
    for ignored in (b"{broken", b'{"backend":["m"]}', {"backend": "nobody"}):
        await node.publish_stop(ignored)
    await node.publish_stop({"backend": "m"})
    await node.runs("k#0", "m-2#0")
    await node.publish_stop({"backend": "one"})
    await node.runs("m-2#0")
    for everything in (b"null", b"", {"backend": "", "force": True}):
        await asyncio.gather(node.load("one", "k"), node.load("two", "n"))
        await node.publish_stop(everything)
        await node.runs()
    await until(lambda: not node.alive("one") + node.alive("two"), "all engines are gone")


@pytest.mark.rule("W20", "worker-8.4", "worker-8.5")
async def test_a_polite_stop_frees_first_and_a_forced_one_does_not(node: Node) -> None:
    """And the signal reaches the whole group."""
    for backend, force in (("polite", False), ("forced", True)):
        address = await node.load(backend, backend, child=True)
        await until(lambda b=backend: node.notes(b, "child started"), "the child runs")  # type: ignore[misc]
        reply = await node.stop_model(f"{backend}#0", address, force=force)
        assert (reply["matched"], reply["freed"], reply["terminated"]) == (True, not force, True)
        events = [note["event"] for note in node.notes(backend)]
        assert "child sigterm" in events
        order = [event for event in events if event in ("free", "sigterm")]
        assert order == (["sigterm"] if force else ["free", "sigterm"])
        assert node.alive(backend) == []
        assert not [note for note in node.notes(backend, "child started") if alive(note["pid"])]


@pytest.mark.rule("W21")
async def test_an_exact_stop_stops_only_what_it_names(node: Node) -> None:
    address = await node.load("exact", "exact")
    unknown = await node.stop_model("nothing#0", address)
    assert (unknown["matched"], unknown["terminated"]) == (False, True)
    wrong = await node.stop_model("exact#0", "localhost:1")
    assert (wrong["matched"], wrong["freed"], wrong["terminated"]) == (True, False, False)
    assert wrong["error"]
    assert await node.healthy(address)
    right = await node.stop_model("exact#0", wrong["address"])
    assert (right["matched"], right["terminated"], right["process_key"]) == (True, True, "exact#0")
    assert node.alive("exact") == []
    assert "exact#0" not in await node.running()
    advertised = await node.stop_model("exact#0", await node.load("exact", "exact"))
    assert (advertised["matched"], advertised["terminated"]) == (True, True)
    broken = await node.ask("model.stop", b"{broken")
    assert (broken["matched"], broken["terminated"]) == (False, False)
    assert broken["error"]


@pytest.mark.rule("nats-4")
@pytest.mark.parametrize("free", ["works", "missing"])
async def test_an_unload_frees_the_model_and_keeps_the_engine(node: Node, free: str) -> None:
    """D-UNLOAD: success too for an engine that does not offer `Free`, and for an unknown model."""
    address = await node.load(f"free-{free}", f"free-{free}", free=free)
    for request in ({"model_name": f"free-{free}"}, {"model_name": "x", "address": address}):
        assert await node.ask("model.unload", request) == {"success": True}
    assert await node.ask("model.unload", {"model_name": "unknown"}) == {"success": True}
    assert len(node.notes(f"free-{free}", "free")) == (2 if free == "works" else 0)
    assert await node.healthy(address)


@pytest.mark.rule("W31", "T-MGR-27")
async def test_a_model_delete_removes_staged_files_and_nothing_else(node: Node) -> None:
    for path in ("org/big/model.gguf", "kept/model.gguf"):
        (node.models / path).parent.mkdir(parents=True)
        (node.models / path).touch()
    (node.models / "link").symlink_to(node.sources)
    names = ("../sources", "../x", "", ".", "/etc", "link/../..", "org/../../sources", "org/big", "unknown")
    replies = await asyncio.gather(*(node.ask("model.delete", {"model_name": name}) for name in names))
    for name, reply in zip(names, replies, strict=True):
        assert reply["success"] is (name in ("org/big", "unknown")), (name, reply)
        assert reply["success"] or reply["error"]
    assert not (node.models / "org" / "big").exists()
    assert (node.models / "kept" / "model.gguf").exists()
    assert node.sources.exists()


@pytest.mark.rule("W32", "worker-19")
async def test_a_stop_of_the_node_drains_waits_deregisters_and_ends(open_node: OpenNode) -> None:
    node = await open_node()
    address = await node.load("last", "last")
    node.control_plane.in_flight = [2, 1]
    for _ in range(2):
        await node.nats.publish(node.subject("stop"), b"null")
    await until(lambda: node.control_plane.seen("/drain"), "the worker drains")
    assert await node.healthy(address)
    process = node.process
    assert process
    await until(lambda: process.poll() is not None, "the worker ends", 30)
    assert process.returncode == 0
    steps = [call.path.rpartition("/")[2] for call in node.control_plane.calls]
    assert [step for step in steps if step in ("drain", "models", "deregister")] == [
        "drain",
        "models",
        "models",
        "models",
        "deregister",
    ]
    assert node.alive("last") == []
    assert [note["event"] for note in node.notes("last")] == ["started", "free", "sigterm"]
