"""The checks of a control plane (worker.md §22, W33 to W42), driven by scripted workers.

Any server can be held to them (`tests/wire/server.py`). They take minutes: time limits and silence are real.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from tests.wire.fake_worker import SILENT, FakeWorker, claims_of, started
from tests.wire.server import Server
from tests.wire.servers import ControlPlane, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not {"TEST_EFFORT", "WIRE_SERVER"} & set(os.environ),
        reason="`make sweep` plays it; so does WIRE_SERVER",
    ),
]

CONTENT = os.urandom(3_000_000)
MODELS = ("cold", "again", "cut", "late", "full", "gone")
INSTALL_LIMIT, LOAD_LIMIT, JWT_HOURS = 4, 5, 2
Join = Callable[..., Awaitable[FakeWorker]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """A server with a gallery, one definition for each test, short limits and approval by hand."""
    tested, gallery = Server(tmp_path_factory.mktemp("server")), ControlPlane()
    await gallery.start()
    names = ("wire-engine", "wire-slow", "wire-waits", "wire-old")
    entries = [{"name": name, "uri": "http://127.0.0.1:9/none.tar.gz"} for name in names]
    url = gallery.serve("index.yaml", json.dumps(entries).encode())
    for number, name in enumerate(MODELS):
        tested.define(name, "wire-engine", CONTENT + bytes([number]))
    try:
        await tested.start(
            LOCALAI_BACKEND_GALLERIES=json.dumps([{"name": "wire", "url": url}]),
            LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT=f"{INSTALL_LIMIT}s",
            LOCALAI_NATS_MODEL_LOAD_TIMEOUT=f"{LOAD_LIMIT}s",
            LOCALAI_NATS_WORKER_JWT_TTL=f"{JWT_HOURS}h",
        )
        yield tested
    finally:
        tested.stop()
        await gallery.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def join(server: Server) -> AsyncIterator[Join]:
    """Starts an approved worker; it leaves with its test, so that each test has the fleet to itself."""
    workers: list[FakeWorker] = []

    async def join_one(name: str, *deaf: str, disk: int | None = None) -> FakeWorker:
        options = {} if disk is None else {"disk": disk}
        worker = FakeWorker(server.url, server.token, server.nats, name, **options)
        worker.deaf.update(deaf)
        workers.append(worker)
        await started(worker, server.approve)
        await until(lambda: is_status(server, worker, "healthy"), f"{name} is healthy")
        return worker

    yield join_one
    for worker in workers:
        await worker.call(f"/api/node/{worker.id}/deregister", {})
        await worker.stop()


async def is_status(server: Server, worker: FakeWorker, status: str) -> bool:
    return await server.status(worker.id) == status


async def install(server: Server, worker: FakeWorker, backend: str) -> int:
    """The status of an administrator's install."""
    answer = await server.ask("POST", f"/api/nodes/{worker.id}/backends/install", {"backend": backend})
    return answer.status


async def loads(server: Server, model: str) -> None:
    answer = await server.embed(model)
    assert answer.status == 200, answer


@pytest.mark.rule("W33")
async def test_a_name_has_one_id_and_wrong_tokens_and_unknown_ids_are_refused(server: Server) -> None:
    """At the exact paths, without a redirect."""
    worker = FakeWorker(server.url, server.token, server.nats, "wire-33")
    first, again = await worker.register(), await worker.register()
    assert first["id"] == again["id"]
    for action in ("heartbeat", "deregister"):
        assert (await worker.call(f"/api/node/{worker.id}/{action}", {})).status == 200
    unknown = "/api/node/00000000-0000-4000-8000-000000000000/heartbeat"
    assert (await worker.call(unknown, {})).status == 404
    body = worker.body()
    assert (await worker.call("/api/node/register", body | {"token": "wrong"})).status == 401
    for header in ("Bearer wrong", "", f"Basic {server.token}"):
        assert (await worker.call("/api/node/register", body, Authorization=header)).status == 401


@pytest.mark.rule("W34")
async def test_only_an_approved_node_is_told_to_install(server: Server) -> None:
    worker = FakeWorker(server.url, server.token, server.nats, "wire-34")
    assert (await worker.register())["status"] == "pending"
    await install(server, worker, "wire-engine")
    assert worker.commands("backend.install") == []
    try:
        await started(worker, server.approve)
        assert await install(server, worker, "wire-engine") in (200, 202)
        await until(lambda: worker.commands("backend.install"), "the install comes")
        assert worker.commands("backend.install")[0]["backend"] == "wire-engine"
    finally:
        await worker.call(f"/api/node/{worker.id}/deregister", {})
        await worker.stop()


@pytest.mark.rule("W35")
async def test_credentials_allow_the_nodes_own_subjects_and_no_others(server: Server, join: Join) -> None:
    """The inbox may be the node's own (nats.md §9.2 *Build*)."""
    worker = await join("wire-35")
    if "nats_jwt" not in worker.registered:
        pytest.skip("the server mints no credentials")
    claims = claims_of(worker.registered["nats_jwt"])
    prefix = f"nodes.{worker.id}"
    publish, subscribe = (claims["nats"][side]["allow"] for side in ("pub", "sub"))
    inbox = publish[-1]
    assert inbox.startswith("_INBOX.")
    assert publish == [f"{prefix}.backend.install.*.progress", f"{prefix}.files.>", inbox]
    assert subscribe == [f"{prefix}.>", inbox]
    assert claims["exp"] - claims["iat"] == JWT_HOURS * 3600
    await worker.nats.publish("nodes.another.backend.stop", b"null")
    await worker.nats.subscribe("nodes.another.>")
    await worker.nats.flush()
    await until(lambda: len(worker.nats_errors) >= 2, "both are refused")
    assert all("permissions violation" in error.lower() for error in worker.nats_errors)


@pytest.mark.rule("W36", "W37")
async def test_a_cold_load_installs_stages_and_loads_and_the_next_one_sends_no_file(
    server: Server, join: Join
) -> None:
    """D-STAGE-FIRST, D-LOADS-LISTED: files may come first, and the install may have an operation's id."""
    worker = await join("wire-36")
    await loads(server, "cold")
    # A backend that is missing may be installed first, by an operation of its own.
    requests = [body for body in worker.commands("backend.install") if body.get("model_id")]
    assert len(requests) == 1, requests
    [request] = requests
    assert (request["backend"], request["model_id"], request.get("replica_index", 0)) == (
        "wire-engine",
        "cold",
        0,
    )
    assert isinstance(json.loads(request["backend_galleries"]), list)
    [put] = worker.of("PUT")
    assert put.name == "models/cold/cold.bin"
    assert worker.of("HEAD")[0].name == put.name
    [loaded] = worker.of("grpc", name="LoadModel")
    metadata, body = loaded.body
    assert metadata["authorization"] == f"Bearer {server.token}"
    assert b"/srv/models/cold/cold.bin" in body
    install_at = worker.of("command", name="backend.install")[0].at
    assert max(install_at, put.at) < loaded.at
    await server.ask("POST", f"/api/nodes/{worker.id}/models/unload", {"model_name": "cold"})

    async def is_unloaded() -> bool:
        return await server.replicas(worker.id) == []

    await until(is_unloaded, "the model is unloaded", 60)
    await loads(server, "cold")
    assert len(worker.of("grpc", name="LoadModel")) == 2
    assert len(worker.of("PUT")) == 1, "the file was there"


@pytest.mark.rule("W37")
async def test_a_cut_upload_goes_on_where_the_worker_says(server: Server, join: Join) -> None:
    worker = await join("wire-37")
    worker.files.cut_after = 1_000_000
    await loads(server, "cut")
    first, second = worker.of("PUT", name="models/cut/cut.bin")
    last = len(CONTENT)
    assert first.body["content-range"] == f"bytes 0-{last}/{last + 1}"
    assert second.body["content-range"] == f"bytes 1000000-{last}/{last + 1}"
    assert worker.files.stored["models/cut/cut.bin"] == CONTENT + bytes([MODELS.index("cut")])


@pytest.mark.rule("W38")
async def test_an_install_that_outlasts_its_limit_is_in_progress_until_the_worker_lists_it(
    server: Server, join: Join
) -> None:
    worker = await join("wire-38")
    worker.replies["backend.install"] = lambda _: SILENT
    assert await install(server, worker, "wire-slow") in (200, 202)

    async def is_on_worker() -> bool:
        shown = await server.operation("wire-slow")
        parts = (shown or {}).get("nodes") or []
        assert not (shown or {}).get("error"), shown
        return any(part["status"] == "running_on_worker" for part in parts)

    await until(is_on_worker, "it is shown as in progress", 30)
    # It has finished: it lists the backend, and answers at once if it is asked again (D-INTENT-ENDS).
    installed = {"name": "wire-slow", "is_system": False, "is_meta": False}
    worker.replies["backend.list"] = lambda _: {"backends": [installed]}
    del worker.replies["backend.install"]

    async def has_ended() -> bool:
        shown = await server.operation("wire-slow")
        assert not (shown or {}).get("error"), shown
        return shown is None

    await until(has_ended, "the list ends it", 120)


@pytest.mark.rule("W38")
async def test_a_node_that_nobody_listens_for_is_not_healthy(server: Server, join: Join) -> None:
    worker = await join("wire-38b", "backend.install", "backend.upgrade", "backend.list", "models.running")
    assert await install(server, worker, "wire-waits") in (200, 202)

    async def is_noticed() -> bool:
        shown = await server.operation("wire-waits")
        return await server.status(worker.id) != "healthy" or "no worker listens" in json.dumps(shown)

    await until(is_noticed, "the node counts as unhealthy", 60)


@pytest.mark.rule("W39")
async def test_an_upgrade_falls_back_to_an_install_by_force(server: Server, join: Join) -> None:
    worker = await join("wire-39", "backend.upgrade")
    installed = {"name": "wire-old", "is_system": False, "is_meta": False, "version": "1"}
    worker.replies["backend.list"] = lambda _: {"backends": [installed]}
    assert (await server.ask("GET", f"/api/nodes/{worker.id}/backends")).status == 200
    answer = await server.ask("POST", f"/api/nodes/{worker.id}/backends/upgrade", {"backend": "wire-old"})
    if answer.status == 404:
        answer = await server.ask("POST", "/api/backends/upgrade/wire-old")
    assert answer.status in (200, 202), answer
    await until(lambda: worker.commands("backend.install"), "the install comes", 60)
    request = worker.commands("backend.install")[0]
    assert (request["backend"], request["force"]) == ("wire-old", True)


@pytest.mark.rule("W40")
async def test_rows_go_by_a_report_that_counts_and_by_two_lists_without_the_model(
    server: Server, join: Join
) -> None:
    """A report without `reports_stopped_processes` removes nothing, nor does an unanswered request."""
    worker = await join("wire-40")
    running = [{"model_id": "gone", "replica_index": 0, "address": f"127.0.0.1:{worker.engine_port}"}]
    worker.replies["models.running"] = lambda _: {"models": running}
    await loads(server, "gone")
    row = ("gone", 0, "loaded")
    assert await server.replicas(worker.id) == [row]
    stopped = {"success": True, "stopped_process_keys": ["gone#0"]}
    worker.replies["backend.delete"] = lambda _: stopped
    await server.ask("POST", f"/api/nodes/{worker.id}/backends/delete", {"backend": "wire-old"})
    await until(lambda: worker.commands("backend.delete"), "the delete comes", 60)
    assert await server.replicas(worker.id) == [row]
    worker.replies["models.running"] = lambda _: SILENT
    asked = len(worker.commands("models.running"))
    await until(lambda: len(worker.commands("models.running")) >= asked + 2, "it is asked again", 180)
    assert await server.replicas(worker.id) == [row]
    worker.replies["models.running"] = lambda _: {"models": []}

    async def is_gone() -> bool:
        return await server.replicas(worker.id) == []

    await until(is_gone, "two lists without it", 180)
    assert len(worker.commands("models.running")) >= asked + 3
    worker.replies["models.running"] = lambda _: {"models": running}
    await loads(server, "gone")
    worker.replies["backend.delete"] = lambda _: stopped | {"reports_stopped_processes": True}
    await server.ask("POST", f"/api/nodes/{worker.id}/backends/delete", {"backend": "wire-old"})
    await until(is_gone, "the report counts", 60)


@pytest.mark.rule("W41")
async def test_a_full_node_is_not_chosen_and_a_silent_one_is_offline(server: Server, join: Join) -> None:
    """A node whose disk is unknown is chosen."""
    full = await join("wire-41-full", disk=1_000_000)
    unknown = await join("wire-41-unknown", disk=0)
    await loads(server, "full")
    assert full.of("PUT") == []
    assert len(unknown.of("PUT")) == 1
    await full.silence()
    await until(lambda: is_status(server, full, "offline"), "a minute of silence", 100)
    assert (await full.heartbeat()).status == 200
    await until(lambda: is_status(server, full, "healthy"), "a heartbeat", 30)


@pytest.mark.rule("W42")
async def test_a_load_beyond_its_deadline_has_exactly_its_process_stopped(server: Server, join: Join) -> None:
    """This worker knows no `model.stop`."""
    worker = await join("wire-42")
    worker.load_gate.clear()
    client = asyncio.create_task(server.embed("late"))
    await until(lambda: worker.of("grpc", name="LoadModel"), "the load", 60)
    await until(lambda: worker.commands("backend.stop"), "the stop", 90)
    assert {body["backend"] for body in worker.commands("backend.stop")} == {"late#0"}
    worker.load_gate.set()
    assert (await client).status >= 500
