"""The commands of the bus against a real worker with small real engines."""

import asyncio
import functools
import json
import os
import signal
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localai_cluster.kit import clock, processes
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Message, NotConnected
from localai_cluster.messaging.messages import decode, encode
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import Unauthenticated
from nodes.commands import commands
from nodes.commands.outcomes import Done, Refused
from tests.conformance.worker_support import INBOX, TOKEN, Worker, ask, engines_of
from tests.conftest import until


class Node:
    """The worker as a control plane addresses it."""

    def __init__(self, bus: NatsBus, worker: Worker) -> None:
        self.bus = bus
        self.worker = worker
        self.id = worker.control_plane.node_id

    async def install(self, backend: str, uri: Path | str = "", **more: Any) -> m.InstallReply:
        request = m.InstallRequest(backend, uri=str(uri), **more)
        return await ask(self.bus, messages.subject("backend.install", self.id), request, m.InstallReply, 60)

    async def upgrade(self, backend: str, **more: Any) -> m.UpgradeReply:
        request = m.UpgradeRequest(backend, **more)
        return await ask(self.bus, messages.subject("backend.upgrade", self.id), request, m.UpgradeReply, 60)

    async def delete(self, backend: str) -> m.DeleteReply:
        return await ask(
            self.bus, messages.subject("backend.delete", self.id), m.DeleteRequest(backend), m.DeleteReply, 60
        )

    async def stop(self, target: str, **more: Any) -> None:
        await self.bus.publish(
            messages.subject("backend.stop", self.id), encode(m.StopBackend(target, **more))
        )

    async def stop_model(self, key: str, address: str, **more: Any) -> m.StopModelReply:
        request = m.StopModelRequest(process_key=key, expected_address=address, **more)
        return await ask(self.bus, messages.subject("model.stop", self.id), request, m.StopModelReply, 60)

    async def list(self) -> m.ListReply:
        return await ask(
            self.bus, messages.subject("backend.list", self.id), m.EmptyRequest(), m.ListReply, 30
        )

    async def running(self) -> set[str]:
        reply = await ask(
            self.bus, messages.subject("models.running", self.id), m.EmptyRequest(), m.RunningReply, 30
        )
        return {m.process_key(model.model_id, model.replica_index) for model in reply.models}

    async def runs(self, *keys: str) -> None:
        """Waits until exactly these processes run."""

        async def holds() -> bool:
            return await self.running() == set(keys)

        await until(holds, 30, f"only {keys} run")


@pytest.fixture
def node(bus: NatsBus, running: Worker) -> Node:
    return Node(bus, running)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


async def healthy(address: str, token: str) -> bool:
    client = BackendClient(address, token)
    try:
        return await client.health(5)
    finally:
        await client.close()


@pytest.mark.rule("worker-8.6", "T-UNL-36", "W10")
async def test_an_unknown_backend_is_a_failure_without_process(node: Node) -> None:
    """W10, and that no name reaches the file system as a path."""
    galleries = node.worker.gallery({"name": "other", "uri": "other"})
    for name in ("missing", "../../etc", "..", ".hidden", "/etc", "", "a\0b", "x" * 5000, "n.install-tmp"):
        reply = await node.install(name, backend_galleries=galleries)
        assert not reply.success
        assert reply.error
        reply = await node.install(name)
        assert not reply.success
    for uri in ("/etc", "../x", "oci://registry.example/x", str(node.worker.sources / "gone")):
        reply = await node.install("x", uri)
        assert not reply.success, uri
    assert await node.running() == set()
    assert list(node.worker.backends.iterdir()) == []


@pytest.mark.rule("worker-8.1", "worker-10.2", "worker-10.4", "T-UNL-35", "W11", "W12", "W26")
async def test_install_starts_once_with_a_plain_environment(node: Node) -> None:
    """W11, W12, W26: address, the same process again, argv, cwd, token, nothing of the worker's secrets.

    D-ENGINE-TOKEN: the token is the worker's own; the engine neither gets nor accepts the registration token.
    D-ENGINE-LOOPBACK (review P13): the worker registers as localhost, so its engine listens there only.
    """
    source = node.worker.source("engine")
    reply = await node.install("engine", source, model_id="org/m")
    assert reply.success, reply.error
    host, _, port = reply.address.partition(":")
    assert host == "localhost"
    assert int(port) >= node.worker.base + 1
    assert await healthy(reply.address, node.worker.engine_token)
    for other in ("wrong", "", TOKEN):
        with pytest.raises(Unauthenticated):
            await healthy(reply.address, other)
    begin = clock.monotonic()
    again = await node.install("engine", source, model_id="org/m")
    assert again == reply
    assert clock.monotonic() - begin < 10
    assert len(engines_of(node.worker.folder)) == 1
    facts = node.worker.started("engine", reply.address)
    assert facts["argv"] == ["--addr", f"127.0.0.1:{port}"]
    assert facts["cwd"] == str(node.worker.backends / "engine")
    assert facts["env"]["LOCALAI_GRPC_AUTH_TOKEN"] == node.worker.engine_token
    assert TOKEN.encode() not in environment_of(facts["pid"])
    allowed = {"LOCALAI_GRPC_AUTH_TOKEN", "LOCALAI_CLUSTER_GUARD", "PATH", "HOME", "LANG", "PWD", "LC_CTYPE"}
    assert set(facts["env"]) <= allowed
    assert ".venv" not in facts["env"]["PATH"]
    assert await node.running() == {"org/m#0"}


@pytest.mark.rule("worker-8.4", "worker-9", "W13", "W19", "W25")
async def test_replicas_stops_and_ports(node: Node) -> None:
    """W13, W19, W25: two replicas; stop one, a model, a backend, everything; ports rest."""
    source = node.worker.source("engine")
    first = await node.install("engine", source, model_id="m")
    second = await node.install("engine", source, model_id="m", replica_index=1)
    third = await node.install("engine", source, model_id="other")
    assert first.success
    assert third.success
    assert len({first.address, second.address, third.address}) == 3
    await node.runs("m#0", "m#1", "other#0")
    await node.stop("m#1")
    await node.runs("m#0", "other#0")
    await until(lambda: node.worker.events("engine", second.address) == ["free", "sigterm"])
    fourth = await node.install("engine", source, model_id="new")
    assert fourth.address not in (first.address, second.address, third.address)
    await node.stop("m")
    await node.runs("other#0", "new#0")
    await node.bus.publish(messages.subject("backend.stop", node.id), b"{broken")
    await node.stop("nobody")
    assert await node.running() == {"other#0", "new#0"}
    await node.stop("engine", force=True)
    await node.runs()
    await until(lambda: node.worker.events("engine", fourth.address) == ["sigterm"])
    last = await node.install("engine", source, model_id="last")
    assert last.success, last.error
    await node.bus.publish(messages.subject("backend.stop", node.id), b"null")
    await node.runs()


@pytest.mark.rule("worker-8.1", "W14")
async def test_another_backend_in_the_same_slot_replaces_it(node: Node) -> None:
    """W14."""
    old = await node.install("one", node.worker.source("one"), model_id="m")
    new = await node.install("two", node.worker.source("two"), model_id="m")
    assert new.success, new.error
    assert new.address != old.address
    assert len(engines_of(node.worker.folder)) == 1
    assert await healthy(new.address, node.worker.engine_token)


@pytest.mark.rule("worker-8.1", "worker-9", "W15")
async def test_a_process_killed_from_outside_comes_back_elsewhere(node: Node) -> None:
    """W15: the old port is in quarantine."""
    source = node.worker.source("engine")
    first = await node.install("engine", source, model_id="m")
    victim = processes.ProcessIdentity.of(node.worker.started("engine", first.address)["pid"])
    assert victim
    os.kill(victim.pid, signal.SIGKILL)
    await until(lambda: not victim.alive)
    second = await node.install("engine", source, model_id="m")
    assert second.success, second.error
    assert second.address != first.address


@pytest.mark.rule("worker-8.6", "worker-10.3", "W16")
async def test_an_engine_that_exits_tells_its_last_words(node: Node) -> None:
    """W16: stderr in the error, port released, the files stay."""
    words = "\n".join(f"line {number}" for number in range(30))
    reply = await node.install("broken", node.worker.source("broken", exit=words), model_id="m")
    assert not reply.success
    assert "line 29" in reply.error
    assert "line 9" not in reply.error.splitlines()
    assert "exit 3" in reply.error
    assert await node.running() == set()
    assert [b.name for b in (await node.list()).backends] == ["broken"]


async def test_a_slow_install_delays_no_other_and_the_same_one_joins(bus: NatsBus, worker: Worker) -> None:
    """W18, W24, F3: real rising bytes, other work goes on, the same request again joins."""
    node = await capped(bus, worker)
    slow, quick = worker.source("slow", size=5_000_000), worker.source("quick")
    events: list[m.ProgressEvent] = []

    async def collect(message: Message) -> None:
        events.append(decode(message.payload, m.ProgressEvent))

    await bus.subscribe(messages.install_progress(node.id, "op.1"), collect, limit=1)
    tasks = [
        asyncio.create_task(node.install("slow", slow, op_id="op.1", install_only=True)) for _ in range(2)
    ]
    await until(lambda: events)
    assert (await node.list()).backends == ()
    assert await node.running() == set()
    assert not any(task.done() for task in tasks)
    replies = await asyncio.gather(*tasks)
    assert replies == [m.InstallReply(True), m.InstallReply(True)]
    sizes = [event.current_bytes for event in events]
    assert len(set(sizes)) >= 5
    assert sizes == sorted(sizes)
    assert sizes[-1] == events[-1].total_bytes > 5_000_000
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert {event.op_id for event in events} == {"op.1"}
    assert {event.node_id for event in events} == {node.id}
    assert "op=op.1 backend=slow joins the running command" in worker.log.read_text()
    assert await node.running() == set()
    started = await node.install("quick", quick)
    assert started.success, started.error


async def begin_slow_install(node: Node, source: Path) -> "asyncio.Task[m.InstallReply]":
    """An install on a worker whose rate is capped, once its first bytes have moved."""
    staged = node.worker.backends / "slow.install-tmp"
    task = asyncio.create_task(node.install("slow", source, op_id="op", install_only=True))
    await until(lambda: staged.is_dir() and any(staged.iterdir()), what="the copy begins")
    return task


async def capped(bus: NatsBus, worker: Worker) -> Node:
    worker.launch(LOCALAI_WORKER_DOWNLOAD_RATE="1500000")
    await until(lambda: "connected to the message bus" in worker.log.read_text())
    return Node(bus, worker)


@pytest.mark.rule("T-UNL-36")
async def test_the_control_plane_cancels_an_install_and_hears_of_both(bus: NatsBus, worker: Worker) -> None:
    """Its own command ends with the worker's refusal, and nothing of the backend remains."""
    node = await capped(bus, worker)
    control = commands.Worker(bus, node.id, "one")
    source = worker.source("slow", size=150_000_000)
    request = m.InstallRequest("slow", uri=str(source), op_id="op.1", install_only=True)
    installing = asyncio.create_task(control.install(request, timeout=600))
    await until(lambda: list(worker.backends.glob("slow.install-tmp/*")), what="the copy begins")
    assert await control.cancel("op.1") == Done(m.CancelReply(True, found=True))
    assert await installing == Refused("cancelled", m.InstallReply(error="cancelled"))
    assert list(worker.backends.iterdir()) == []
    assert await control.cancel("op.1") == Done(m.CancelReply(True, found=False))
    assert "Traceback" not in worker.log.read_text()


async def test_a_command_sent_again_after_the_bus_was_lost_joins(bus: NatsBus, worker: Worker) -> None:
    """The install goes on while the bus is away; the same command, sent again, gets its one reply."""
    node = await capped(bus, worker)
    task = await begin_slow_install(node, worker.source("slow", size=4_000_000))
    generation = bus.generation
    worker.nats.stop()
    with pytest.raises(NotConnected):
        await task
    await worker.nats.start()
    await bus.wait_connected(after=generation)
    await until(lambda: worker.log.read_text().count("connected to the message bus") == 2)
    assert (await node.install("slow", worker.sources / "slow", op_id="op", install_only=True)).success
    text = worker.log.read_text()
    assert text.count("install started") == 1
    assert "joins the running command" in text


async def test_a_stopping_worker_gives_the_copy_up_at_once(bus: NatsBus, worker: Worker) -> None:
    """Work in threads is cancellable: no reply, nothing half made, exit 0 long before its end."""
    node = await capped(bus, worker)
    task = await begin_slow_install(node, worker.source("slow", size=150_000_000))
    begin = clock.monotonic()
    assert worker.process
    worker.process.terminate()
    assert await worker.ended() == 0
    assert clock.monotonic() - begin < 60
    assert list(worker.backends.iterdir()) == []
    assert not task.done()
    task.cancel()
    assert "Traceback" not in worker.log.read_text()


async def test_a_copy_cut_by_a_kill_is_tidied_at_the_next_start(bus: NatsBus, worker: Worker) -> None:
    node = await capped(bus, worker)
    task = await begin_slow_install(node, worker.source("slow", size=150_000_000))
    worker.kill()
    task.cancel()
    assert [path.name for path in worker.backends.iterdir()] == ["slow.install-tmp"]
    worker.launch()
    await until(lambda: not list(worker.backends.iterdir()))


@pytest.mark.rule("nats-3", "W18")
async def test_two_installs_of_one_backend_run_one_after_the_other(node: Node) -> None:
    """W18: the second finds the first's work done."""
    source = node.worker.source("engine", size=3_000_000)
    replies = await asyncio.gather(*(node.install("engine", source, model_id=f"m{n}") for n in range(3)))
    assert all(reply.success for reply in replies), replies
    assert len({reply.address for reply in replies}) == 3
    log = worker_log(node)
    assert [log.count(f"load of m{n} started") for n in range(3)] == [1, 1, 1]
    assert "install started" not in log


def worker_log(node: Node) -> str:
    return node.worker.log.read_text()


@pytest.mark.rule("nats-4.5", "W21")
async def test_exact_stops(node: Node) -> None:
    """W21: unknown key, wrong address, right address in both forms."""
    reply = await node.install("engine", node.worker.source("engine"), model_id="m")
    port = reply.address.rpartition(":")[2]
    unknown = await node.stop_model("x#0", reply.address)
    assert (unknown.matched, unknown.freed, unknown.terminated) == (False, False, True)
    wrong = await node.stop_model("m#0", "localhost:1")
    assert (wrong.matched, wrong.terminated) == (True, False)
    assert wrong.error
    assert wrong.address == f"127.0.0.1:{port}"
    assert await node.running() == {"m#0"}
    right = await node.stop_model("m#0", reply.address)
    assert (right.matched, right.freed, right.terminated, right.error) == (True, True, True, "")
    assert engines_of(node.worker.folder) == []
    again = await node.install("engine", model_id="m")
    local = f"127.0.0.1:{again.address.rpartition(':')[2]}"
    forced = await node.stop_model("m#0", local, force=True)
    assert (forced.freed, forced.terminated) == (False, True)


async def test_install_waits_for_a_stop_under_way(node: Node) -> None:
    """worker.md §21: after a stop the next install of that key waits and starts, instead of failing."""
    source = node.worker.source("engine", free_seconds=1)
    first = await node.install("engine", source, model_id="m")
    await node.stop("m#0")
    await until(lambda: node.worker.events("engine", first.address))
    second = await node.install("engine", source, model_id="m")
    assert second.success, second.error
    assert second.address != first.address


@pytest.mark.rule("worker-8.6", "worker-10.3")
async def test_a_stop_during_start_ends_the_start(node: Node) -> None:
    """worker.md §10.3: before answering, check that the process is still wanted; the reply says why not."""
    source = node.worker.source("engine", mute=True)
    starting = asyncio.create_task(node.install("engine", source, model_id="m"))
    await until(lambda: engines_of(node.worker.folder))
    await node.stop("m#0", force=True)
    reply = await starting
    assert (reply.success, reply.interrupted) == (False, True)
    assert engines_of(node.worker.folder) == []


@pytest.mark.rule("worker-8.3", "W22")
async def test_delete_stops_and_removes(node: Node) -> None:
    """W22: keys reported, folder gone; not installed and system backends are failures."""
    reply = await node.install("engine", node.worker.source("engine"), model_id="m")
    assert reply.success, reply.error
    gone = await node.delete("engine")
    assert gone == m.DeleteReply(True, "", ("m#0",), True)
    assert not (node.worker.backends / "engine").exists()
    assert engines_of(node.worker.folder) == []
    assert (await node.list()).backends == ()
    assert not (await node.delete("engine")).success
    system = node.worker.folder / "system" / "sys"
    system.mkdir(parents=True)
    (system / "run.sh").touch()
    refused = await node.delete("sys")
    assert not refused.success
    assert refused.reports_stopped_processes
    assert system.exists()
    assert [(b.name, b.is_system) for b in (await node.list()).backends] == [("sys", True)]
    for name in ("..", "", "../engine"):
        assert not (await node.delete(name)).success


@pytest.mark.rule("worker-8.2", "W23")
async def test_gallery_install_and_upgrade(node: Node) -> None:
    """W23, worker.md §18.3: meta entry, prefix stripped, any case; upgrade replaces files, starts nothing."""
    source = node.worker.source("cpu-engine-v1")
    galleries = node.worker.gallery(
        {"name": "engine", "capabilities": {"default": "cpu-engine"}},
        {"name": "cpu-engine", "alias": "engine", "uri": "cpu-engine-v1", "version": "1"},
        {"name": "cuda-engine", "alias": "engine", "uri": "nowhere"},
    )
    reply = await node.install("local@Engine", model_id="m", backend_galleries=galleries)
    assert reply.success, reply.error
    listed = (await node.list()).backends
    assert [(b.name, b.version, b.uri) for b in listed] == [("cpu-engine", "1", "cpu-engine-v1")]
    (source / "fresh").touch()
    done = await node.upgrade("engine", backend_galleries=galleries)
    assert done.success, done.error
    assert done.stopped_process_keys == ("m#0",)
    assert (node.worker.backends / "cpu-engine" / "fresh").exists()
    assert await node.running() == set()
    wrong = await node.install("cuda-engine", backend_galleries=galleries)
    assert not wrong.success
    assert "capability" in wrong.error


@pytest.mark.rule("worker-18.5")
async def test_an_archive_by_its_address_is_installed_and_started(node: Node) -> None:
    """Ours: downloaded over HTTP, unpacked and started under the name of the archive."""
    source = node.worker.source("engine")
    served = node.worker.sources.parent / "served"
    served.mkdir()
    with tarfile.open(served / "engine.tgz", "w:gz") as archive:
        archive.add(source, ".")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=served)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}/engine.tgz"
        request = m.InstallRequest("", uri=uri, model_id="m")
        reply = await ask(node.bus, messages.subject("backend.install", node.id), request, m.InstallReply, 60)
        await asyncio.to_thread(server.shutdown)
    assert reply.success, reply.error
    assert [(b.name, b.uri) for b in (await node.list()).backends] == [("engine", uri)]
    assert await node.running() == {"m#0"}


async def test_a_failed_upgrade_still_reports_and_keeps_the_files(node: Node) -> None:
    """nats.md §4.2: both stop fields on failures too."""
    reply = await node.install("engine", node.worker.source("engine"), model_id="m")
    assert reply.success, reply.error
    failed = await node.upgrade("engine", uri=str(node.worker.sources / "gone"))
    assert not failed.success
    assert failed.stopped_process_keys == ("m#0",)
    assert failed.reports_stopped_processes
    assert (node.worker.backends / "engine" / "run.sh").exists()


@pytest.mark.rule("O10", "worker-8.1", "nats-4.1")
async def test_install_only_starts_nothing_and_force_reinstalls(node: Node) -> None:
    """Our `install_only`; nats.md §6.3: `force` = stop, reinstall, start."""
    source = node.worker.source("engine")
    assert await node.install("engine", source, install_only=True) == m.InstallReply(True)
    assert engines_of(node.worker.folder) == []
    first = await node.install("engine", model_id="m")
    (source / "fresh").touch()
    forced = await node.install("engine", source, model_id="m", force=True)
    assert forced.success, forced.error
    assert forced.address != first.address
    assert (node.worker.backends / "engine" / "fresh").exists()
    assert node.worker.events("engine", first.address) == []


@pytest.mark.rule("nats-4.9", "nats-4.10", "W31")
async def test_unload_frees_and_model_delete_stays_inside(node: Node) -> None:
    """nats.md §4.9, §4.10, W31."""
    reply = await node.install("engine", node.worker.source("engine"), model_id="m")
    unload = messages.subject("model.unload", node.id)
    for name in ("m", "unknown"):
        freed = await ask(node.bus, unload, m.UnloadRequest(name), m.UnloadReply, 60)
        assert freed.success, freed.error
    assert node.worker.events("engine", reply.address) == ["free"]
    (node.worker.models / "org" / "big").mkdir(parents=True)
    (node.worker.models / "one.gguf").touch()
    results = {}
    for name in ("../worker.log", "", ".", "/etc", "org/big", "one", "nothing"):
        request = m.DeleteModelRequest(name)
        answer = await ask(
            node.bus, messages.subject("model.delete", node.id), request, m.DeleteModelReply, 60
        )
        results[name] = answer.success
    assert [name for name, success in results.items() if success] == ["org/big", "one", "nothing"]
    assert node.worker.log.exists()
    assert [path.name for path in node.worker.models.iterdir()] == ["org"]


@pytest.mark.rule("R6.9", "nats-4.3", "W24")
async def test_no_progress_without_operation_and_instance_is_told(node: Node) -> None:
    """W24; our extension `instance`."""
    seen: list[Message] = []

    async def collect(message: Message) -> None:
        seen.append(message)

    await node.bus.subscribe(f"{messages.subject('backend.install', node.id)}.*.progress", collect)
    reply = await node.install("engine", node.worker.source("engine"), install_only=True)
    assert reply.success
    listed = json.loads(
        await node.bus.request(messages.subject("backend.list", node.id), b"{}", 5, inbox=INBOX)
    )
    running = json.loads(
        await node.bus.request(messages.subject("models.running", node.id), b"null", 5, inbox=INBOX)
    )
    assert listed["instance"] == running["instance"] != ""
    assert seen == []
