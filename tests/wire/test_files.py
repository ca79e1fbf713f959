"""What installs, upgrades and deletes do to the files, and what they tell meanwhile (worker.md §8, §18)."""

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.wire.conftest import OpenNode
from tests.wire.node import Node, archive
from tests.wire.servers import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.rule("W22", "T-MGR-28", "worker-8.3")
async def test_a_delete_stops_removes_and_reports(node: Node) -> None:
    await asyncio.gather(node.load("doomed", "doomed-a"), node.load("doomed", "doomed-b", 3))
    gone = await node.ask("backend.delete", {"backend": "any@doomed"})
    assert (gone["success"], gone["reports_stopped_processes"]) == (True, True)
    assert sorted(gone["stopped_process_keys"]) == ["doomed-a#0", "doomed-b#3"]
    assert node.alive("doomed") == []
    assert not (node.backends / "doomed").exists()
    assert "doomed" not in await node.listed()
    system = node.folder / "system" / "given"
    system.mkdir(parents=True)
    (system / "run.sh").touch()
    for name in ("doomed", "given", "", "..", "../sources"):
        refused = await node.ask("backend.delete", {"backend": name})
        assert (refused["success"], refused["reports_stopped_processes"]) == (False, True), name
        assert refused["error"]
        assert "stopped_process_keys" not in refused
    assert (await node.listed())["given"]["is_system"]
    assert node.sources.exists()
    undecodable = await node.ask("backend.delete", b"{broken")
    assert undecodable["success"] is False
    assert "reports_stopped_processes" not in undecodable


@pytest.mark.rule("W23", "worker-18", "R6.2", "worker-8.2")
async def test_an_upgrade_replaces_the_files_and_starts_nothing(node: Node) -> None:
    """By the name of a meta backend, which the concrete one has as its alias."""
    source = node.source("cpu-engine")
    reply = await node.install("v1@Engine", backend_galleries=offered(node, source, "1"), model_id="up-a")
    assert reply["success"], reply
    reply = await node.install("engine", model_id="up-b")
    assert reply["success"], reply
    assert (await node.install("cpu-engine", model_id="up-b"))["address"] == reply["address"]
    assert (await node.listed())["cpu-engine"]["version"] == "1"
    (source / "fresh").touch()
    upgraded = await node.ask(
        "backend.upgrade", {"backend": "v2@engine", "backend_galleries": offered(node, source, "2")}
    )
    assert (upgraded["success"], upgraded["reports_stopped_processes"]) == (True, True)
    assert sorted(upgraded["stopped_process_keys"]) == ["up-a#0", "up-b#0"]
    assert node.alive("cpu-engine") == []
    assert (node.backends / "cpu-engine" / "fresh").exists()
    assert (await node.listed())["cpu-engine"]["version"] == "2"
    assert not {"up-a#0", "up-b#0"} & await node.running()
    gone = await node.ask("backend.delete", {"backend": "engine"})
    assert gone["success"], gone
    assert "cpu-engine" not in await node.listed()
    assert [path for path in node.backends.iterdir() if "engine" in path.name] == []


def offered(node: Node, source: Path, version: str) -> str:
    """A gallery with one meta backend and two builds, one of them for other machines."""
    shared = {"alias": "engine", "version": version}
    return node.gallery(
        f"v{version}",
        {"name": "engine", "capabilities": {"default": "cpu-engine", "nvidia": "cuda-engine"}},
        {"name": "cpu-engine", "uri": str(source), **shared},
        {"name": "cuda-engine", "uri": "/nowhere", **shared},
    )


@pytest.mark.rule("W23", "worker-18")
async def test_a_failed_upgrade_keeps_the_old_files(node: Node) -> None:
    """And reports what it stopped; the next load starts the old version."""
    await node.load("stable", "stable")
    empty = node.sources / "empty"
    empty.mkdir()
    for uri in (empty, node.sources / "gone"):
        failed = await node.ask("backend.upgrade", {"backend": "stable", "uri": str(uri), "name": "stable"})
        assert (failed["success"], failed["reports_stopped_processes"]) == (False, True)
        assert failed["error"]
    assert node.alive("stable") == []
    assert {path.name for path in node.backends.glob("stable*")} == {"stable"}
    again = await node.install("stable", model_id="stable")
    assert again["success"], again


@pytest.mark.rule("W18", "W23")
async def test_an_upgrade_by_an_alias_waits_for_an_install_by_the_name(node: Node) -> None:
    """D-BUILD-LOCK: no engine of the old files survives the upgrade."""
    gate = node.folder / "aliased"
    source = node.source("cpu-aliased", gate=str(gate))
    install = {"alias": "aliased", "name": "cpu-aliased", "model_id": "al"}
    installing = asyncio.create_task(node.install("cpu-aliased", source, **install))
    await until(lambda: node.notes("cpu-aliased", "started"), "the engine starts")
    request = {"backend": "aliased", "uri": str(source), "name": "cpu-aliased", "alias": "aliased"}
    upgrading = asyncio.create_task(node.ask("backend.upgrade", request))
    await node.ask("backend.list", {})
    gate.touch()
    installed, upgraded = await asyncio.gather(installing, upgrading)
    assert installed["success"], installed
    assert upgraded["success"], upgraded
    assert upgraded["stopped_process_keys"] == ["al#0"]
    assert node.alive("cpu-aliased") == []


@pytest.mark.rule("worker-8", "worker-18")
async def test_a_delete_leaves_no_engine_of_an_install_that_waited(node: Node) -> None:
    """D-BUILD-LOCK: the delete ends the first start, so that the second begins while the files go."""
    source = node.source("raced", gate=str(node.folder / "never"))
    first = asyncio.create_task(node.install("raced", source, model_id="ra"))
    await until(lambda: node.notes("raced", "started"), "the first engine starts")
    second = asyncio.create_task(node.install("raced", model_id="rb"))
    await node.ask("backend.list", {})
    gone = await node.ask("backend.delete", {"backend": "raced"})
    assert gone["success"], gone
    assert [reply["success"] for reply in await asyncio.gather(first, second)] == [False, False]
    assert node.alive("raced") == []
    assert not {"ra#0", "rb#0"} & await node.running()
    assert list(node.backends.glob("raced*")) == []


@pytest.mark.rule("worker-18", "nats-4", "nats-4.7", "worker-18.1")
async def test_the_list_says_which_archive_is_installed(node: Node) -> None:
    """D-DIGEST: the archive's SHA-256, whether or not the gallery gives one."""
    content = archive(node.source("packed"))
    uri = node.control_plane.serve("packed.tar.gz", content)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    galleries = node.gallery(
        "hashed", {"name": "packed", "uri": uri, "version": "3", "sha256": digest.removeprefix("sha256:")}
    )
    (node.sources / "local.tar.gz").write_bytes(content)
    replies = await asyncio.gather(
        node.install("packed", backend_galleries=galleries),
        node.install("unhashed", uri=uri, name="unhashed"),
        node.install("local", node.sources / "local.tar.gz"),
    )
    assert [reply["success"] for reply in replies] == [True] * 3, replies
    listed = await node.listed()
    assert [listed[name].get("digest") for name in ("packed", "unhashed", "local")] == [digest] * 3
    assert listed["packed"]["version"] == "3"


@pytest.mark.rule("W24", "A56", "O68", "R6.10", "C45", "nats-4.3")
async def test_an_operation_is_told_its_progress_until_the_reply(open_node: OpenNode) -> None:
    """At most one event in 250 ms, and the last bytes always, also of an install that fails in the end."""
    node = await open_node(LOCALAI_WORKER_DOWNLOAD_RATE="2500000")
    source = node.source("big", size=3_000_000)
    nameless = node.source("nameless", size=1_000_000)
    (nameless / "run.sh").unlink()
    events = await heard(node, "install", {"backend": "big", "uri": str(source), "op_id": "op.1"})
    assert len(events) >= 4
    shares = [event["percentage"] for event in events if event["phase"] == "downloading"]
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 100
    upgrade = {"backend": "big", "uri": str(source), "name": "big", "op_id": "op.2"}
    for command, request, success in (
        ("upgrade", upgrade, True),
        ("install", {"backend": "nameless", "uri": str(nameless), "op_id": "op.3"}, False),
    ):
        events = await heard(node, command, request, success)
        assert (events[-1]["phase"], events[-1]["percentage"]) == ("downloading", 100.0)
    assert await heard(node, "upgrade", {"backend": "big", "uri": str(nameless)}, False) == []


async def heard(node: Node, command: str, request: Any, success: bool = True) -> list[dict[str, Any]]:
    """The progress of a command; all of it came before the reply, and not more than one in a window."""
    events: list[dict[str, Any]] = []
    subscription = await node.nats.subscribe(node.subject("backend.install.*.progress"))

    async def collect() -> None:
        async for message in subscription.messages:
            operation = request["op_id"].replace(".", "-")
            assert message.subject == node.subject(f"backend.install.{operation}.progress")
            events.append(json.loads(message.data))

    collecting = asyncio.create_task(collect())
    begin = time.monotonic()
    reply = await node.ask(f"backend.{command}", request)
    taken = time.monotonic() - begin
    assert reply["success"] is success, reply
    # The server keeps the order of one connection: what was sent before the reply has arrived by now.
    await asyncio.sleep(0)
    count = len(events) + subscription.pending_msgs
    await node.ask("backend.list", {})
    await subscription.unsubscribe()
    await asyncio.wait([collecting])
    assert len(events) == count
    # The first goes out at once, and the last is flushed.
    assert len(events) <= taken / 0.25 + 2
    for event in events:
        assert (event["op_id"], event["node_id"]) == (request["op_id"], node.control_plane.node_id)
        assert event["backend"] == request["backend"]
        assert event["phase"] in ("resolving", "downloading", "extracting", "starting")
        assert 0 <= event["percentage"] <= 100
    return events
