"""The worker process from registration to its end: what it tells the control plane, and when."""

import asyncio
import hashlib
import re
import signal
import stat
from functools import partial

import pytest

from localai_cluster.kit import clock
from localai_cluster.kit.nkeys import group_characters
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.nats import NatsBus
from tests.conformance.worker_support import (
    INBOX,
    TOKEN,
    NatsServer,
    StubControlPlane,
    Worker,
    ask,
    engines_of,
)
from tests.conftest import until
from tests.support.simulator import script


async def probe(port: int, path: str) -> int:
    """Status of a GET; 0 when no one listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return int(line.split()[1])


async def started(running: Worker, bus: NatsBus) -> m.InstallReply:
    """An engine that the worker has started on command."""
    request = m.InstallRequest("engine", uri=str(running.source("engine")), model_id="m")
    subject = messages.subject("backend.install", running.control_plane.node_id)
    reply = await ask(bus, subject, request, m.InstallReply, 60)
    assert reply.success, reply.error
    return reply


@pytest.mark.rule("W1", "W2", "worker-5.1", "I16")
async def test_registration_tells_what_the_contract_says(
    worker: Worker, control_plane: StubControlPlane
) -> None:
    """And our node secret: mode 0600, in a header, never in the log."""
    worker.launch()
    await until(lambda: control_plane.seen("/register"))
    call = control_plane.seen("/register")[0]
    assert (call.method, call.path) == ("POST", "/api/node/register")
    assert call.headers["authorization"] == f"Bearer {TOKEN}"
    assert call.headers["content-type"] == "application/json"
    body = call.body
    assert body["token"] == TOKEN
    assert body["name"] == "w1"
    assert body["address"] == f"localhost:{worker.base + 1}"
    assert body["http_address"] == f"localhost:{worker.base}"
    assert body["labels"] == {"tier": "t1", "node.replica-slots": "1"}
    assert "node_type" not in body
    assert body["running_processes"] == []
    assert re.fullmatch("[0-9a-f]{64}", body["engine_token"])
    assert re.fullmatch("[0-9a-f]{32}", call.headers["x-localai-node-instance"])
    assert body["total_ram"] > body["available_ram"] > 0
    assert body["total_disk"] > 0
    assert {"total_vram", "available_vram", "gpu_vendor", "gpu_compute_capability", "capability"} <= set(body)
    secret_file = worker.folder / "node-secret"
    secret = secret_file.read_text().strip()
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert len(secret) == 64
    assert call.headers["x-localai-node-secret"] == secret
    await until(lambda: control_plane.seen("/heartbeat"))
    text = worker.log.read_text()
    assert f"fingerprint={group_characters(hashlib.sha256(secret.encode()).hexdigest())}" in text
    assert TOKEN not in text
    assert secret not in text
    assert body["engine_token"] not in text
    assert "p%40ss" not in text
    assert "p@ss" not in text


def registered_since(control_plane: StubControlPlane, before: int) -> bool:
    return len(control_plane.seen("/register")) > before


async def test_each_process_makes_another_token_for_its_engines(
    worker: Worker, control_plane: StubControlPlane
) -> None:
    """What one process told is worth nothing after its end."""
    for _ in range(2):
        before = len(control_plane.seen("/register"))
        worker.launch()
        await until(partial(registered_since, control_plane, before))
        worker.kill()
    first, second = (call.body["engine_token"] for call in control_plane.seen("/register"))
    assert first != second


@pytest.mark.rule("W3", "worker-5.2")
async def test_refused_registration_is_tried_again(worker: Worker, control_plane: StubControlPlane) -> None:
    """After about 2 s, then 4 s."""
    control_plane.refusals = [500, 401]
    worker.launch()
    await until(lambda: len(control_plane.seen("/register")) == 3, 20)
    first, second, third = (call.at for call in control_plane.seen("/register"))
    assert 1.9 < second - first < 3.5
    assert 3.9 < third - second < 6
    assert "LOCALAI_REGISTRATION_TOKEN" in worker.log.read_text()


@pytest.mark.rule("W5", "worker-6")
async def test_heartbeats(worker: Worker, control_plane: StubControlPlane) -> None:
    """The first one interval after start, proved by the node's own secret; real figures."""
    worker.launch()
    await until(lambda: len(control_plane.seen("/heartbeat")) >= 3)
    beat = control_plane.seen("/heartbeat")[0]
    assert beat.at - control_plane.seen("/register")[0].at >= 0.3
    assert beat.path == "/api/node/node.a%201%2Ab/heartbeat"
    secret = (worker.folder / "node-secret").read_text().strip()
    assert beat.headers["authorization"] == f"Bearer {secret}"
    assert "available_vram" not in beat.body
    assert 0 < beat.body["available_disk"] < beat.body["total_disk"]
    assert beat.body["available_ram"] > 0


@pytest.mark.rule("W6", "worker-6")
async def test_a_silent_bus_silences_the_heartbeat(
    worker: Worker, control_plane: StubControlPlane, nats: NatsServer
) -> None:
    """No heartbeat while NATS is down; /readyz 503, /healthz 200; both recover."""
    worker.launch()
    await until(lambda: control_plane.seen("/heartbeat"))
    assert await probe(worker.base, "/readyz") == 200
    nats.stop()

    async def unready() -> bool:
        return await probe(worker.base, "/readyz") == 503

    await until(unready)
    count = len(control_plane.seen("/heartbeat"))
    assert await probe(worker.base, "/healthz") == 200
    assert await probe(worker.base, "/other") == 404
    await until(lambda: "no heartbeat" in worker.log.read_text())
    assert len(control_plane.seen("/heartbeat")) <= count + 1
    await nats.start()
    count = len(control_plane.seen("/heartbeat"))
    await until(lambda: len(control_plane.seen("/heartbeat")) > count)
    assert await probe(worker.base, "/readyz") == 200


@pytest.mark.rule("W7", "W8", "W9", "R6.1", "nats-2.1", "nats-3")
async def test_every_subject_has_a_listener_and_no_other_node(
    running: Worker, bus: NatsBus, control_plane: StubControlPlane
) -> None:
    """And that a broken body is answered in that subject's error shape."""
    node = control_plane.node_id
    assert (
        await ask(bus, messages.subject("backend.list", node), m.EmptyRequest(), m.ListReply, 30)
    ).backends == ()
    listed = await bus.request(messages.subject("models.running", node), b"", 5, inbox=INBOX)
    assert b'"models":[]' in listed
    assert m.RunningReply().models == ()
    for subject, kind in (
        (messages.subject("backend.install", node), m.InstallReply),
        (messages.subject("backend.upgrade", node), m.UpgradeReply),
        (messages.subject("backend.delete", node), m.DeleteReply),
        (messages.subject("backend.cancel", node), m.CancelReply),
        (messages.subject("model.unload", node), m.UnloadReply),
        (messages.subject("model.delete", node), m.DeleteModelReply),
    ):
        reply = await bus.request(subject, b"{broken", 5, inbox=INBOX)
        assert b'"success":false' in reply, kind
    assert b'"terminated":false' in await bus.request(
        messages.subject("model.stop", node), b"{", 5, inbox=INBOX
    )
    prefix = messages.node_prefix(node)
    assert prefix == "nodes.node-a-1-b"
    listening = [subject for subject in await running.nats.subscriptions() if subject.startswith("nodes.")]
    assert sorted(listening) == sorted(f"{prefix}.{ending}" for ending in script.ALL)


@pytest.mark.rule("worker-5.2")
async def test_an_unknown_node_registers_again_and_listens_under_its_new_id(
    running: Worker, bus: NatsBus, control_plane: StubControlPlane
) -> None:
    """D-AGAIN-ON-404, D-REREGISTER-ROWS: a 404 heartbeat leads to a registration that tells what runs; a
    changed id to new subscriptions."""
    reply = await started(running, bus)
    control_plane.heartbeat_status, control_plane.node_id = 404, "second"
    await until(lambda: len(control_plane.seen("/register")) == 2)
    control_plane.heartbeat_status = 200
    await until(lambda: [c for c in control_plane.seen("/heartbeat") if "second" in c.path])
    assert (
        await ask(bus, messages.subject("backend.list", "second"), m.EmptyRequest(), m.ListReply, 30)
    ).error == ""
    again = control_plane.seen("/register")[1].body
    assert again["running_processes"] == [{"process_key": "m#0", "address": reply.address}]


async def test_every_process_has_an_id_of_its_own(
    running: Worker, bus: NatsBus, control_plane: StubControlPlane
) -> None:
    """D-INSTANCE: one id for all calls of a process and its replies, another after a restart."""
    listed = await ask(
        bus, messages.subject("backend.list", control_plane.node_id), m.EmptyRequest(), m.ListReply, 30
    )
    await until(lambda: control_plane.seen("/heartbeat"))
    first = {call.headers["x-localai-node-instance"] for call in control_plane.calls}
    assert first == {listed.instance}
    running.kill()
    control_plane.calls.clear()
    running.launch()
    await until(lambda: control_plane.seen("/heartbeat"))
    second = {call.headers["x-localai-node-instance"] for call in control_plane.calls}
    assert len(second) == 1
    assert second.isdisjoint(first)


async def test_an_admin_replaces_the_secret_of_a_running_worker(
    running: Worker, control_plane: StubControlPlane
) -> None:
    path = running.folder / "node-secret"
    former = path.read_text().strip()
    control_plane.rotating = True
    rotation = (await until(lambda: control_plane.seen("/rotate")))[0]
    assert rotation.headers["authorization"] == f"Bearer {former}"
    secret = rotation.headers["x-localai-node-new-secret"]
    await until(lambda: path.read_text().strip() == secret)
    count = len(control_plane.seen("/heartbeat"))
    await until(lambda: len(control_plane.seen("/heartbeat")) > count)
    assert control_plane.seen("/heartbeat")[-1].headers["authorization"] == f"Bearer {secret}"
    assert len(control_plane.seen("/register")) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.with_name("node-secret.next").exists()
    assert secret not in running.log.read_text()


async def test_a_copied_data_folder_is_told_and_does_not_register_again(
    running: Worker, control_plane: StubControlPlane
) -> None:
    control_plane.heartbeat_status = 409
    await until(lambda: len(control_plane.seen("/heartbeat")) > 3)

    async def unready() -> bool:
        return await probe(running.base, "/readyz") == 503

    await until(unready)
    assert len(control_plane.seen("/register")) == 1
    assert worker_says(running, "data folder has been copied") == 1
    control_plane.heartbeat_status = 200

    async def ready() -> bool:
        return await probe(running.base, "/readyz") == 200

    await until(ready)


async def test_a_revoked_worker_says_what_to_do_and_keeps_quiet(
    running: Worker, control_plane: StubControlPlane
) -> None:
    control_plane.refusals, control_plane.heartbeat_status = [403], 401
    await until(lambda: worker_says(running, "delete the file node-secret in its data folder") == 1)
    assert len(control_plane.seen("/register")) == 2
    assert "administrator approve it" in running.log.read_text()
    assert running.process
    assert running.process.poll() is None


def worker_says(worker: Worker, text: str) -> int:
    return worker.log.read_text().count(text)


@pytest.mark.rule("W32", "worker-19")
async def test_a_stop_message_ends_the_worker_in_order(
    running: Worker, bus: NatsBus, control_plane: StubControlPlane
) -> None:
    """Drain, models poll, deregister, backends gone, exit 0."""
    reply = await started(running, bus)
    control_plane.in_flight = [1, 0]
    await bus.publish(messages.subject("stop", control_plane.node_id), b"null")
    assert await running.ended() == 0
    paths = [call.path.rpartition("/")[2] for call in control_plane.calls if "heartbeat" not in call.path]
    assert paths == ["register", "drain", "models", "models", "deregister"]
    assert running.events("engine", reply.address) == ["free", "sigterm"]
    assert engines_of(running.folder) == []


@pytest.mark.rule("worker-19")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_it_in_the_same_order(
    running: Worker, control_plane: StubControlPlane, number: signal.Signals
) -> None:
    """D-SIGNALS: the full sequence on signals."""
    assert running.process
    running.process.send_signal(number)
    assert await running.ended() == 0
    assert control_plane.seen("/drain")
    assert control_plane.seen("/deregister")
    assert "Traceback" not in running.log.read_text()


async def test_a_second_signal_hurries(running: Worker, control_plane: StubControlPlane) -> None:
    control_plane.in_flight = [1] * 60
    assert running.process
    running.process.send_signal(signal.SIGTERM)
    await until(lambda: control_plane.seen("/models"))
    begin = clock.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert await running.ended() == 0
    assert clock.monotonic() - begin < 30


async def test_a_killed_worker_leaves_no_engine(
    running: Worker, bus: NatsBus, control_plane: StubControlPlane
) -> None:
    """Issue part 3: leaves no orphan when killed; the next start tidies and keeps its identity."""
    await started(running, bus)
    assert len(engines_of(running.folder)) == 1
    secret = (running.folder / "node-secret").read_text()
    (running.backends / "half.install-tmp").mkdir()
    (running.backends / "engine").rename(running.backends / "engine.install-backup")
    running.kill()
    await until(lambda: not engines_of(running.folder))
    running.launch()
    await until(lambda: len(control_plane.seen("/register")) == 2)
    await until(lambda: (running.backends / "engine" / "run.sh").exists())
    assert not (running.backends / "half.install-tmp").exists()
    assert (running.folder / "node-secret").read_text() == secret


async def test_one_data_folder_has_one_worker(running: Worker) -> None:
    first = running.process
    running.launch()
    assert await running.ended() == 2
    running.process = first
    assert "another worker uses" in running.log.read_text()


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("LOCALAI_ADDR", "nonsense", "--addr"),
        ("LOCALAI_NATS_URL", "http://user:hush@x", "nats://host:4222"),
        ("LOCALAI_REGISTER_TO", "", "Use the URL of the control plane"),
        ("LOCALAI_WORKER_DOWNLOAD_RATE", "-1", "bytes per second"),
        ("LOCALAI_BACKEND_GALLERIES", "{", "JSON list"),
        ("LOCALAI_HEARTBEAT_INTERVAL", "soon", "10s"),
        ("LOCALAI_HTTP_ADDR", "192.0.2.1:50050", "cannot listen on 192.0.2.1:50050: Cannot assign"),
        ("LOCALAI_REGISTRATION_TOKEN_FILE", "/nowhere", "cannot read /nowhere"),
    ],
)
async def test_a_wrong_setting_is_one_line_with_its_fix(
    worker: Worker, setting: str, value: str, words: str
) -> None:
    worker.environment.pop("LOCALAI_REGISTRATION_TOKEN")
    worker.launch(**{setting: value})
    assert await worker.ended() == 2
    lines = worker.log.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert setting in lines[0]
    assert words in lines[0]
    assert "hush" not in lines[0]
