"""A worker on a stock frontend, on LocalAI Cluster, and where one takes the place of the other."""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localai_cluster.kit import clock
from localai_cluster.messaging.servers import Servers, parse_url
from localai_cluster.worker import check, registration
from localai_cluster.worker.config import Config, build
from localai_cluster.worker.control_plane import (
    CallFailed,
    ControlPlane,
    DowngradeRefused,
    Registered,
    ServerKind,
)
from localai_cluster.worker.engine_exits import Exits
from localai_cluster.worker.heartbeats import HeartbeatLoop
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.registration import NO_CREDENTIALS_PAUSE_SECONDS, BusCredentials
from tests.support.ports import free_port

CLUSTER, STOCK = ServerKind.CLUSTER, ServerKind.STOCK
URL = "http://frontend:8080"
HOUR = 3600
UNKNOWN_NODE = {"error": {"code": 404, "message": "node not found", "type": "node_error"}}


class Server:
    """Answers as a stock frontend, or as LocalAI Cluster, with a node that may be unknown."""

    def __init__(self, kind: ServerKind = STOCK) -> None:
        self.kind = kind
        self.token = "tok"
        self.status = "healthy"
        self.is_known = True
        self.gives_fingerprint = True
        self.calls: list[tuple[str, str, int]] = []

    def respond(self, request: httpx.Request) -> httpx.Response:
        """Answer, and note the route, the credential and the status."""
        status, body = self._answer(request)
        route, bearer = request.url.path.rpartition("/")[2], request.headers.get("authorization", "")
        self.calls.append((route, bearer.removeprefix("Bearer "), status))
        return httpx.Response(status, json=body)

    def _answer(self, request: httpx.Request) -> tuple[int, Any]:
        route, bearer = request.url.path.rpartition("/")[2], request.headers.get("authorization", "")
        if route == "register":
            if bearer != f"Bearer {self.token}":
                return 401, {"error": "invalid registration token"}
            if json.loads(request.content).get("name") == "":
                return 400, {"error": {"message": "name is required"}}
            self.is_known = True
            secret = request.headers["x-localai-node-secret"]
            proof = {"fingerprint": hashlib.sha256(secret.encode()).hexdigest()}
            return 201, {"id": "n", "status": self.status} | (
                proof if self.kind is CLUSTER and self.gives_fingerprint else {}
            )
        if self.kind is STOCK and bearer != f"Bearer {self.token}":
            return 401, {"error": "invalid registration token"}
        if self.kind is CLUSTER and len(bearer) != len("Bearer ") + 64:
            return 401, {"error": "invalid node credential"}
        if route == "models" and "/00000000-" in request.url.path:
            return (200, []) if self.kind is STOCK else (404, UNKNOWN_NODE)
        if not self.is_known:
            return 404, UNKNOWN_NODE
        return 200, {"message": "ok"}

    def routes(self, *statuses: int) -> list[str]:
        """The routes that were called, only those with these statuses if any are given."""
        return [route for route, _, status in self.calls if not statuses or status in statuses]


def connect(folder: Path, server: Server, **options: bool) -> ControlPlane:
    client = httpx.AsyncClient(transport=httpx.MockTransport(server.respond))
    return ControlPlane(URL, "tok", NodeIdentity(folder), "1f" * 16, client, **options)


@pytest.mark.parametrize(("kind", "credential"), [(STOCK, "tok"), (CLUSTER, "secret")])
async def test_every_call_carries_the_credential_of_the_server(
    tmp_path: Path, kind: ServerKind, credential: str
) -> None:
    """D-IDENTITY."""
    server = Server(kind)
    control_plane = connect(tmp_path, server)
    control_plane.kind = (await control_plane.register({})).kind
    assert control_plane.kind is kind
    await control_plane.heartbeat("n", {})
    await control_plane.drain("n")
    await control_plane.in_flight("n")
    await control_plane.deregister("n")
    expected = NodeIdentity(tmp_path).secret if credential == "secret" else credential
    assert {bearer for _, bearer, _ in server.calls[1:]} == {expected}


async def test_a_server_is_asked_for_its_kind_with_a_secret_of_no_node(tmp_path: Path) -> None:
    """Whoever answers now may be another one, so the node's own secret stays here."""
    server = Server(CLUSTER)
    await connect(tmp_path, server).register({})
    server.kind, server.calls = STOCK, []
    with pytest.raises(DowngradeRefused):
        await connect(tmp_path, server).register({})
    [(_, bearer, _)] = server.calls
    assert len(bearer) == 64
    assert bearer != NodeIdentity(tmp_path).secret


@pytest.mark.parametrize(
    "body", [{}, {"error": "no such page"}, {"error": {"message": "node not found"}}, []]
)
async def test_a_server_that_answers_every_path_with_404_is_not_localai(tmp_path: Path, body: Any) -> None:
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(404, json=body)))
    control_plane = ControlPlane(URL, "tok", NodeIdentity(tmp_path), "1f" * 16, client)
    with pytest.raises(CallFailed, match="is not LocalAI"):
        await control_plane.knows_secrets()


async def test_a_data_folder_of_an_older_worker_serves_no_stock_frontend(tmp_path: Path) -> None:
    """It has no record of the servers that have accepted its secret, so any may have."""
    NodeIdentity(tmp_path)
    (tmp_path / "node-servers").unlink()
    server = Server(STOCK)
    with pytest.raises(DowngradeRefused):
        await connect(tmp_path, server).register({})
    assert server.routes() == ["models"]
    server.kind = CLUSTER
    assert (await connect(tmp_path, server).register({})).kind is CLUSTER
    assert NodeIdentity(tmp_path).is_accepted_by(URL)
    assert not NodeIdentity(tmp_path).is_accepted_by("http://other")


async def test_a_server_that_has_accepted_the_secret_is_not_served_with_the_token(tmp_path: Path) -> None:
    """D-IDENTITY: also after a restart of the worker; another server may be a stock one."""
    server = Server(CLUSTER)
    await connect(tmp_path, server).register({})
    server.kind = STOCK
    control_plane = connect(tmp_path, server)
    for _ in range(3):
        with pytest.raises(DowngradeRefused, match="--allow-stock-frontend"):
            await control_plane.register({})
    # Not even once: a node that has just registered counts as healthy there.
    assert server.routes() == ["register", "models", "models", "models"]
    assert (await connect(tmp_path, server, allow_stock=True).register({})).kind is STOCK
    with pytest.raises(DowngradeRefused):
        await connect(tmp_path, server).register({})
    server.kind = CLUSTER
    assert (await control_plane.register({})).kind is CLUSTER


@pytest.mark.parametrize("kind", [STOCK, CLUSTER])
async def test_an_older_cluster_is_recognised_while_the_node_awaits_its_approval(
    tmp_path: Path, kind: ServerKind
) -> None:
    """It answers a pending node as a stock frontend does; only it knows secrets."""
    server = Server(kind)
    server.status, server.gives_fingerprint = "pending", False
    assert (await connect(tmp_path, server).register({})).kind is kind
    assert NodeIdentity(tmp_path).is_accepted_by(URL) == (kind is CLUSTER)


async def test_a_server_of_an_older_version_is_recognised_by_the_bus_that_it_names(tmp_path: Path) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(201, json={"id": "n", "status": "healthy", "nats_url": "nats://n:4222"})

    client = httpx.AsyncClient(transport=httpx.MockTransport(respond))
    control_plane = ControlPlane(URL, "tok", NodeIdentity(tmp_path), "1f" * 16, client)
    assert (await control_plane.register({})).kind is CLUSTER
    assert NodeIdentity(tmp_path).is_accepted_by("http://FRONTEND:8080/elsewhere")
    assert not NodeIdentity(tmp_path).is_accepted_by("https://frontend:8080")


async def test_a_worker_waits_for_the_server_that_has_accepted_it_without_an_end(tmp_path: Path) -> None:
    server = Server(CLUSTER)
    await connect(tmp_path, server).register({})
    server.kind = STOCK
    pauses: list[float] = []

    async def body() -> dict[str, Any]:
        return {}

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 200:
            server.kind = CLUSTER

    registered = await registration.register(connect(tmp_path, server), body, sleep)
    assert registered.kind is CLUSTER
    assert set(pauses) == {60.0}


class Bus:
    """Notes what it is to dial."""

    def __init__(self) -> None:
        self.dialled: list[Servers | None] = []
        self.connected = False

    def use(self, servers: Servers | None) -> None:
        self.dialled.append(servers)


def credentials(bus: Bus, url: str = "nats://n:4222", register_once: Any = None) -> BusCredentials:
    return BusCredentials(bus, parse_url(url) if url else None, None, register_once)  # type: ignore[arg-type]


@pytest.mark.rule("W4", "nats-9.1", "nats-9.3")
@pytest.mark.parametrize("status", ["healthy", "draining", "unhealthy", "offline", ""])
def test_without_credentials_the_bus_is_dialled_by_its_url_alone(status: str) -> None:
    bus = Bus()
    chosen = credentials(bus)
    chosen.adopt(Registered("n", status, STOCK))
    assert bus.dialled == [parse_url("nats://n:4222")]
    assert chosen.problem == ""


@pytest.mark.rule("W4")
@pytest.mark.parametrize("kind", [STOCK, CLUSTER])
def test_only_a_pending_node_waits(kind: ServerKind) -> None:
    bus = Bus()
    chosen = credentials(bus)
    chosen.adopt(Registered("n", "pending", kind))
    assert bus.dialled == [None]
    assert chosen.problem == "this node is awaiting approval by an administrator"


@pytest.mark.rule("W4", "nats-9.1")
def test_a_worker_that_requires_credentials_never_dials_without() -> None:
    bus = Bus()
    servers = parse_url("nats://n:4222")
    chosen = BusCredentials(bus, servers, None, None, require_auth=True)  # type: ignore[arg-type]
    chosen.adopt(Registered("n", "healthy", STOCK))
    assert bus.dialled == [None]
    assert "LOCALAI_NATS_REQUIRE_AUTH is set" in chosen.problem


@pytest.mark.parametrize(
    ("registered", "reason"),
    [
        (Registered("n", "healthy", STOCK), "reported no address of the message bus; set LOCALAI_NATS_URL"),
        (Registered("n", "healthy", STOCK, nats_jwt="x"), "a JWT without its seed"),
    ],
)
def test_what_keeps_it_off_the_bus_is_named(registered: Registered, reason: str) -> None:
    bus = Bus()
    chosen = credentials(bus, url="")
    chosen.adopt(registered)
    assert not any(bus.dialled)
    assert reason in chosen.problem
    assert "approval" not in chosen.problem


@asynccontextmanager
async def in_background(*work: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
        assert not [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's clock shows the time of the event loop, which looptime advances."""
    running = asyncio.get_running_loop()
    monkeypatch.setattr(clock, "monotonic", running.time)


@pytest.mark.looptime
@pytest.mark.rule("nats-9.3")
@pytest.mark.usefixtures("virtual_time")
async def test_a_bus_that_wants_credentials_makes_no_worker_flood_a_frontend_that_gives_none() -> None:
    """A stock frontend forgets the replicas with each registration. The bus is dialled on."""
    bus, registrations = Bus(), []

    async def register_once() -> None:
        registrations.append(clock.monotonic())
        chosen.adopt(Registered("n", "healthy", STOCK))

    chosen = credentials(bus, register_once=register_once)
    chosen.adopt(Registered("n", "healthy", STOCK))
    async with in_background(chosen.run()):
        for _ in range(HOUR + 1):
            await asyncio.sleep(1)
            chosen.refused()
        assert "requires credentials" in chosen.problem
        assert len(registrations) == HOUR / NO_CREDENTIALS_PAUSE_SECONDS
        bus.connected = True
        await asyncio.sleep(HOUR)
        assert len(registrations) == HOUR / NO_CREDENTIALS_PAUSE_SECONDS, "it was let in meanwhile"


class Life:
    """The loops of a worker against a server, on the bus or off it."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.control_plane = connect(folder, server)
        self.bus = Bus()
        self.bus.connected = True
        self.credentials = credentials(self.bus, register_once=self.register)
        self.registrations = 0
        callbacks = (self.measure, self.register, self.register, self.unsubscribe, Exits("h"))
        self.heartbeats = HeartbeatLoop(self.control_plane, self.off_bus, 10.0, lambda: "n", *callbacks)

    def off_bus(self) -> str:
        return "" if self.bus.connected else "the message bus is not connected"

    async def measure(self) -> dict[str, Any]:
        return {"available_ram": 1}

    async def register(self) -> None:
        self.registrations += 1
        registered = await self.control_plane.register({"name": "n"})
        self.control_plane.kind = registered.kind
        self.credentials.adopt(registered)

    async def unsubscribe(self) -> None:
        raise AssertionError("no other process is this node")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.register()
        async with in_background(self.heartbeats.run(), self.credentials.run()):
            yield


@pytest.mark.looptime
@pytest.mark.usefixtures("virtual_time")
async def test_an_hour_on_a_stock_frontend_is_one_registration_and_a_heartbeat_each_interval(
    tmp_path: Path,
) -> None:
    """D-IDENTITY: a second registration would delete the node's replicas there."""
    server = Server(STOCK)
    life = Life(tmp_path, server)
    async with life.running():
        await asyncio.sleep(HOUR + 5)
    assert server.routes(200) == ["heartbeat"] * 360
    assert server.routes(201) == ["register"]
    assert len(server.calls) == 361


@pytest.mark.looptime
@pytest.mark.usefixtures("virtual_time")
async def test_a_stock_frontend_that_rejects_the_token_gets_no_registration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker names the reason, and goes on when the token is accepted again."""
    server = Server(STOCK)
    life = Life(tmp_path, server)
    async with life.running():
        server.token = "another"
        await asyncio.sleep(HOUR)
        assert life.registrations == 1
        assert life.heartbeats.problem == "the control plane refuses the registration token"
        assert "Check LOCALAI_REGISTRATION_TOKEN" in caplog.text
        server.token = "tok"
        await asyncio.sleep(20)
        assert life.heartbeats.problem == ""
    assert life.registrations == 1


@pytest.mark.looptime
@pytest.mark.usefixtures("virtual_time")
async def test_a_lost_bus_and_an_unknown_node_on_a_stock_frontend(tmp_path: Path) -> None:
    """Silence without the bus, no registration when it is back; one for a node that is not known."""
    server = Server(STOCK)
    life = Life(tmp_path, server)
    async with life.running():
        life.bus.connected = False
        await asyncio.sleep(HOUR)
        assert server.routes() == ["register"]
        life.bus.connected = True
        await asyncio.sleep(HOUR)
        assert set(server.routes()[1:]) == {"heartbeat"}
        server.is_known = False
        await asyncio.sleep(HOUR)
    assert server.routes(404) == ["heartbeat"]
    assert life.registrations == 2


@pytest.mark.looptime
@pytest.mark.usefixtures("virtual_time")
async def test_a_worker_follows_when_localai_cluster_takes_the_place_of_a_stock_frontend(
    tmp_path: Path,
) -> None:
    server = Server(STOCK)
    life = Life(tmp_path, server)
    async with life.running():
        server.kind, server.is_known = CLUSTER, False
        await asyncio.sleep(120)
        assert life.control_plane.kind is CLUSTER
        assert life.heartbeats.problem == ""
    assert life.registrations == 2


@pytest.mark.looptime
@pytest.mark.usefixtures("virtual_time")
async def test_a_worker_waits_while_a_stock_frontend_is_in_the_place_of_localai_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(CLUSTER)
    life = Life(tmp_path, server)
    async with life.running():
        server.kind = STOCK
        await asyncio.sleep(HOUR)
        assert server.routes(201) == ["register"]
        assert life.control_plane.kind is CLUSTER
        assert "--allow-stock-frontend" in life.heartbeats.problem
        server.kind = CLUSTER
        await asyncio.sleep(120)
        assert life.heartbeats.problem == ""
    assert server.routes(201) == ["register"]
    assert all(level < logging.CRITICAL for _, level, _ in caplog.record_tuples)


def config(folder: Path, **given: str) -> Config:
    return build({"register_to": URL, "data_dir": str(folder), **given}, {})


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server that `check` meets."""
    server, real = Server(), httpx.AsyncClient

    def client(**_: Any) -> httpx.AsyncClient:
        return real(transport=httpx.MockTransport(server.respond))

    monkeypatch.setattr(httpx, "AsyncClient", client)
    return server


async def reached(servers: Servers) -> str:
    return ""


async def test_the_check_names_the_kind_of_the_server_and_registers_nothing(
    tmp_path: Path, checked: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "connection_problem", reached)
    given = {"registration_token": "tok", "nats_url": "nats://n:4222"}
    lines = await check.report_connections(config(tmp_path, **given), NodeIdentity(tmp_path))
    assert f"server: stock LocalAI at {URL}; all nodes share the registration token" in lines
    assert not [line for line in lines if isinstance(line, check.Problem)]
    checked.kind = CLUSTER
    lines = await check.report_connections(config(tmp_path, **given), NodeIdentity(tmp_path))
    assert f"server: LocalAI Cluster at {URL}; this node has its own secret" in lines
    assert checked.routes(200, 404) == ["models"]
    assert checked.routes(400) == ["register"] * 2, "without a name, so nothing is registered"
    given["registration_token"] = "other"
    lines = await check.report_connections(config(tmp_path, **given), NodeIdentity(tmp_path))
    assert [line for line in lines if isinstance(line, check.Problem) and "refuses the reg" in line]


async def test_the_check_leaves_no_file(tmp_path: Path, checked: Server) -> None:
    """Neither a secret nor a lock nor a folder: the first start makes them."""
    given = config(tmp_path / "new", find_ports="true", addr=f"127.0.0.1:{free_port(200) + 1}")
    checked.kind = CLUSTER
    lines = await check.report_connections(given, NodeIdentity(given.data_dir, read_only=True))
    lines += await check.report_machine(given)
    assert f"server: LocalAI Cluster at {URL}; this node has its own secret" in lines
    assert os.listdir(tmp_path) == []


async def test_the_check_names_what_is_wrong_on_a_stock_frontend(tmp_path: Path, checked: Server) -> None:
    identity = NodeIdentity(tmp_path)
    identity.record_acceptance(URL)
    lines = await check.report_connections(config(tmp_path), identity)
    problems = " ".join(line for line in lines if isinstance(line, check.Problem))
    for text in (
        "--allow-stock-frontend",
        "refuses the registration token",
        "stay closed",
        "LOCALAI_NATS_URL",
    ):
        assert text in problems
    lines = await check.report_connections(config(tmp_path, allow_stock_frontend="true"), identity)
    assert not [line for line in lines if "--allow-stock-frontend" in line]


async def test_the_check_names_bus_folder_and_galleries_that_cannot_be_used(
    tmp_path: Path, checked: Server
) -> None:
    index = tmp_path / "backends" / "index.yaml"
    index.parent.mkdir()
    index.write_text("- name: one\n")
    urls = {"good": index.as_uri(), "bad": (tmp_path / "other.yaml").as_uri(), "own": "cluster:index.yaml"}
    given = config(
        tmp_path,
        nats_url=f"nats://127.0.0.1:{free_port()}",
        backends_path=str(index.parent),
        backends_system_path=str(index),
        backend_galleries=json.dumps([{"name": name, "url": url} for name, url in urls.items()]),
    )
    lines = await check.report_connections(given, NodeIdentity(tmp_path)) + await check.report_machine(given)
    problems = " ".join(line for line in lines if isinstance(line, check.Problem))
    assert "gallery: good has 1 entries" in lines
    assert "gallery: own comes from the control plane, for registered nodes only" in lines
    for text in (
        "bus: nats://127.0.0.1:",
        "gallery: gallery bad cannot be read",
        "LOCALAI_BACKENDS_SYSTEM_PATH",
    ):
        assert text in problems


async def test_the_check_names_a_server_that_does_not_answer(tmp_path: Path) -> None:
    lines = await check.report_connections(
        build({"register_to": "http://127.0.0.1:1", "data_dir": str(tmp_path)}, {}), NodeIdentity(tmp_path)
    )
    assert [line for line in lines if isinstance(line, check.Problem) and "no answer from" in line]


def test_the_servers_are_remembered_in_a_file_that_must_be_readable(tmp_path: Path) -> None:
    identity = NodeIdentity(tmp_path)
    for url in (URL, URL, "https://other/path"):
        identity.record_acceptance(url)
    assert (tmp_path / "node-servers").read_text().split() == [URL, "https://other:443"]
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["node-secret", "node-servers"]'


async def test_a_call_that_fails_for_another_reason_says_nothing_of_the_kind(tmp_path: Path) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, json={"error": "not now"})

    client = httpx.AsyncClient(transport=httpx.MockTransport(respond))
    with pytest.raises(CallFailed, match="503"):
        await ControlPlane(URL, "tok", NodeIdentity(tmp_path), "1f" * 16, client).knows_secrets()
