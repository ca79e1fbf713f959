"""Our worker on a bus in operator mode: who gets in, and what new credentials may cost (nats.md §9)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from localai_cluster.embedded.nats import BusKeys, EmbeddedNats
from localai_cluster.kit import clock, nkeys
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import UNQUEUED, BusError, Message, NoResponders, RequestTimeout
from localai_cluster.messaging.nats import NatsBus, connection_problem
from localai_cluster.messaging.servers import (
    Credentials,
    Servers,
    mint_service,
    mint_worker,
    parse_url,
    revoking_token,
)
from nodes.registry.bus_credentials import Revocations
from tests.conformance.worker_support import NatsServer, StubControlPlane, Worker
from tests.conftest import until
from tests.support.bus import ask
from tests.support.ports import free_port

NODE = "2bade988-0b3a-4400-83eb-e2cf86d9429a"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    with EmbeddedNats(tmp_path / "nats", port=free_port(), keys=BusKeys.generate()) as server:
        yield server


def as_service(server: EmbeddedNats, *, system: bool = False) -> Servers:
    account = server.keys.system if system else server.keys.account
    credentials = mint_service(account, "test", now=clock.now().timestamp())
    return replace(parse_url(server.url), credentials=credentials)


def as_node(server: EmbeddedNats, node_id: str, lifetime: float = 600) -> Servers:
    return replace(parse_url(server.url), credentials=minted(server, node_id, lifetime))


def minted(server: EmbeddedNats, node_id: str, lifetime: float = 600) -> Credentials:
    now = clock.now().timestamp()
    return mint_worker(
        server.keys.account, nkeys.generate("user"), "backend", node_id, now=now, lifetime=lifetime
    )


async def joined(servers: Servers) -> NatsBus:
    bus = NatsBus(servers, name="test")
    bus.start()
    await asyncio.wait_for(bus.wait_connected(), 30)
    return bus


@pytest.fixture
async def controller(server: EmbeddedNats) -> AsyncIterator[NatsBus]:
    bus = await joined(as_service(server))
    yield bus
    await bus.close()


@pytest.fixture
async def system(server: EmbeddedNats) -> AsyncIterator[NatsBus]:
    bus = await joined(as_service(server, system=True))
    yield bus
    await bus.close()


async def revoke(server: EmbeddedNats, system: NatsBus, public_key: str) -> None:
    account = server.keys.account.public_key
    lookup = f"$SYS.REQ.ACCOUNT.{account}.CLAIMS.LOOKUP"
    current = (await system.request(lookup, b"", 30, inbox="_INBOX.test")).decode()
    until = int(clock.now().timestamp()) + 3600
    token = revoking_token(server.keys.operator, current, {public_key: until}, now=clock.now().timestamp())
    reply = await system.request("$SYS.REQ.CLAIMS.UPDATE", token.encode(), 30, inbox="_INBOX.test")
    assert b'"code":200' in reply


async def listed(bus: NatsBus, node_id: str, timeout: float = 30) -> m.ListReply:
    subject = messages.subject("backend.list", node_id)
    return await ask(bus, subject, m.EmptyRequest(), m.ListReply, timeout, inbox=messages.inbox(node_id))


@pytest.mark.rule("T-JWT-3", "nats-9.1")
async def test_no_one_is_let_in_without_credentials_of_the_account(server: EmbeddedNats) -> None:
    """Anonymous, with a password, with another account's JWT, with an expired one, with another's seed."""
    stranger = BusKeys.generate()
    url = parse_url(server.url)
    now = clock.now().timestamp()
    forged = mint_worker(stranger.account, nkeys.generate("user"), "backend", NODE, now=now, lifetime=600)
    expired = mint_worker(
        server.keys.account, nkeys.generate("user"), "backend", NODE, now=now - 60, lifetime=30
    )
    swapped = Credentials(minted(server, NODE).jwt, forged.seed)
    tried = [url, replace(url, user="worker", password="x")]
    tried += [replace(url, credentials=one) for one in (forged, expired, swapped)]
    assert [bool(await connection_problem(one)) for one in tried] == [True] * len(tried)
    assert await connection_problem(as_node(server, NODE)) == ""


@pytest.mark.rule("T-JWT-1", "T-JWT-2", "nats-5", "nats-9.2", "W35")
async def test_a_worker_answers_and_reports_under_its_own_name(
    server: EmbeddedNats, controller: NatsBus
) -> None:
    worker = await joined(as_node(server, NODE))

    async def answer(message: Message) -> bytes:
        return b"{}"

    await worker.subscribe(messages.subject("backend.list", NODE), answer)
    await worker.subscribe(messages.subject("backend.cancel", NODE), answer)
    assert await listed(controller, NODE) == m.ListReply()
    cancel, inbox = messages.subject("backend.cancel", NODE), messages.inbox(NODE)
    assert (
        await ask(controller, cancel, m.CancelRequest("op"), m.CancelReply, 30, inbox=inbox)
        == m.CancelReply()
    )
    seen: list[str] = []

    async def note(message: Message) -> None:
        seen.append(message.subject)

    await controller.subscribe(messages.install_progress(NODE, "op1"), note)
    await worker.publish(messages.install_progress(NODE, "op1"), b"{}")
    await until(lambda: seen, what="the progress arrives")
    with pytest.raises(NoResponders):
        await listed(controller, "another")
    await worker.close()


@pytest.mark.rule("T-JWT-4", "nats-9.2", "W35")
async def test_no_worker_reads_or_forges_the_replies_to_another(
    server: EmbeddedNats, controller: NatsBus
) -> None:
    """Item 20 of the measured failures: with `_INBOX.>` for all, every worker could do both."""
    victim, thief = await joined(as_node(server, NODE)), await joined(as_node(server, "thief"))
    stolen: list[str] = []

    async def steal(message: Message) -> bytes:
        stolen.append(message.subject)
        return b'{"backends": [{"name": "forged"}]}'

    for subject in ("_INBOX.>", f"_INBOX.{NODE}.>", "nodes.>", messages.subject("backend.list", NODE), ">"):
        await thief.subscribe(subject, steal)
    replies: list[str] = []

    async def answer(message: Message) -> bytes:
        return b'{"backends": [{"name": "true"}]}'

    await victim.subscribe(messages.subject("backend.list", NODE), answer)
    for _ in range(20):
        replies += [entry.name for entry in (await listed(controller, NODE)).backends]
    assert replies == ["true"] * 20
    assert stolen == []
    for bus in (victim, thief):
        await bus.close()


@pytest.mark.rule("nats-9.3", "nats-1")
async def test_new_credentials_take_over_without_losing_or_doubling_a_message(
    server: EmbeddedNats, controller: NatsBus
) -> None:
    worker = await joined(as_node(server, NODE))
    handled: list[bytes] = []

    async def answer(message: Message) -> bytes:
        handled.append(message.payload)
        return message.payload

    await worker.subscribe("nodes." + NODE + ".echo", answer, limit=1)
    asked, done = 0, asyncio.Event()

    async def keep_asking() -> None:
        nonlocal asked
        while not done.is_set():
            payload = b"%d" % asked
            asked += 1
            assert (
                await controller.request(f"nodes.{NODE}.echo", payload, 30, inbox=messages.inbox(NODE))
                == payload
            )

    asking = asyncio.create_task(keep_asking())
    for _ in range(5):
        worker.use(as_node(server, NODE))
        await until(partial(more_than, handled, len(handled) + 50))
    done.set()
    await asking
    assert handled == [b"%d" % number for number in range(asked)], "each exactly once, in order"
    assert worker.generation == 1, "no loss was noticed"
    await worker.close()


@pytest.mark.rule("nats-9.3")
async def test_a_revoked_user_is_out_at_once_and_others_stay(
    server: EmbeddedNats, system: NatsBus, controller: NatsBus
) -> None:
    refusals: list[None] = []
    servers = as_node(server, NODE)
    bad, good = (
        NatsBus(servers, name="bad", on_refused=lambda: refusals.append(None)),
        await joined(as_node(server, "n2")),
    )
    bad.start()
    await asyncio.wait_for(bad.wait_connected(), 30)
    assert servers.credentials
    await revoke(server, system, servers.credentials.public_key)
    await until(lambda: not bad.connected, what="the connection is closed")
    await until(lambda: refusals, what="the next attempt is refused")
    assert (good.connected, good.generation, controller.generation) == (True, 1, 1)
    server.stop()
    server.start()
    assert await connection_problem(servers), "the server remembers it over a restart"
    assert await connection_problem(as_node(server, NODE)) == "", "the node's next credentials are good"
    for bus in (bad, good):
        await bus.close()


async def test_the_server_reports_whose_connection_has_ended(
    server: EmbeddedNats, system: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 22, item 7: a killed worker is probed at once, not when its heartbeat is late."""
    gone: list[str] = []
    monkeypatch.setattr("localai_cluster.bus_access.operator_key", lambda: None)
    revocations = Revocations(gone.append)
    advisories = f"$SYS.ACCOUNT.{server.keys.account.public_key}.DISCONNECT"
    await system.subscribe(advisories, revocations._receive_disconnect, limit=UNQUEUED)
    servers = as_node(server, NODE)
    worker = await joined(servers)
    await worker.close()
    assert servers.credentials
    user = servers.credentials.public_key
    await until(lambda: user in gone, what="the user is named")
    await revocations._receive_disconnect(Message(advisories, b'{"client": 1}', False))


def more_than(items: list[bytes], count: int) -> bool:
    return len(items) > count


class Approval:
    """What a control plane with an account key answers; `lifetime` 0: the node is pending."""

    def __init__(self, server: EmbeddedNats, control_plane: StubControlPlane) -> None:
        self.server, self.control_plane, self.lifetime = server, control_plane, 600.0
        control_plane.node_id = NODE
        control_plane.credentials = self.answer

    def answer(self) -> dict[str, str]:
        if not self.lifetime:
            return {"status": "pending"}
        made = minted(self.server, NODE, self.lifetime)
        return {"nats_jwt": made.jwt, "nats_user_seed": made.seed, "nats_url": self.server.url}

    @property
    def registrations(self) -> int:
        return len(self.control_plane.seen("/register"))


@pytest.fixture
def approval(server: EmbeddedNats, control_plane: StubControlPlane) -> Approval:
    return Approval(server, control_plane)


@pytest.fixture
def alone(worker: Worker) -> Worker:
    """A worker that is not told where the bus is."""
    del worker.environment["LOCALAI_NATS_URL"]
    return worker


@pytest.fixture
def nats(tmp_path: Path) -> NatsServer:
    """The worker fixture wants one; this suite has its own server."""
    return NatsServer(tmp_path)


def connections(worker: Worker, port: int) -> int:
    assert worker.process
    links = psutil.Process(worker.process.pid).net_connections(kind="tcp")
    return sum(bool(link.raddr) and link.raddr.port == port for link in links)


async def answers(controller: NatsBus) -> bool:
    try:
        await listed(controller, NODE)
    except BusError:
        return False
    return True


@pytest.mark.rule("W4", "nats-9.3")
async def test_a_pending_worker_has_no_connection_until_it_is_approved(
    alone: Worker, approval: Approval, controller: NatsBus, server: EmbeddedNats
) -> None:
    approval.lifetime = 0
    alone.launch()
    await until(lambda: approval.registrations >= 3, 60, "it asks again")
    assert connections(alone, server.port) == 0
    assert not await answers(controller)
    assert not approval.control_plane.seen("/heartbeat")
    approval.lifetime = 600
    await until(lambda: answers(controller), 30, "it is on the bus")
    await until(lambda: approval.control_plane.seen("/heartbeat"), what="its heart beats")


@pytest.mark.rule("nats-9.3", "nats-10")
async def test_a_worker_refreshes_at_three_quarters_and_keeps_a_running_command(
    alone: Worker, approval: Approval, controller: NatsBus
) -> None:
    """An install that takes longer than the credentials live is answered by a later connection."""
    approval.lifetime = 8  # on a busy machine the worker refreshes late, and then its requests are lost
    source = alone.source("slow", size=800_000)
    alone.launch(LOCALAI_WORKER_DOWNLOAD_RATE="50000")
    await until(lambda: answers(controller), 30, "it is on the bus")
    request = m.InstallRequest(backend="slow", uri=str(source), name="slow", model_id="m")
    start = asyncio.create_task(
        ask(
            controller,
            messages.subject("backend.install", NODE),
            request,
            m.InstallReply,
            120,
            inbox=messages.inbox(NODE),
        )
    )
    failures = []
    while not start.done():
        try:
            await listed(controller, NODE)
        except BusError as error:
            failures.append(error)
    assert (await start).success
    assert failures == []
    first, *refreshes = approval.control_plane.seen("/register")
    assert len(refreshes) >= 2
    assert all("running_processes" in call.body for call in refreshes), "so that no replica is dropped"
    assert all(
        call.headers["x-localai-node-instance"] == first.headers["x-localai-node-instance"]
        for call in refreshes
    )
    gaps = [later.at - sooner.at for sooner, later in zip([first, *refreshes], refreshes, strict=False)]
    assert min(gaps) >= 0.7 * approval.lifetime


@pytest.mark.rule("nats-9.3")
async def test_a_worker_that_was_out_too_long_comes_back_by_itself(
    alone: Worker,
    approval: Approval,
    controller: NatsBus,
    server: EmbeddedNats,
    control_plane: StubControlPlane,
) -> None:
    """The reference's is deaf forever when bus and control plane are both away as its credentials expire."""
    approval.lifetime = 2
    alone.launch()
    await until(lambda: answers(controller), 30, "it is on the bus")
    server.stop()
    await control_plane.stop()
    expired_at = clock.monotonic() + approval.lifetime
    await until(lambda: clock.monotonic() > expired_at, what="its credentials have expired")
    server.start()
    await until(
        lambda: "Authorization" in alone.log.read_text() or "Expired" in alone.log.read_text(),
        60,
        "it is refused",
    )
    approval.lifetime = 600
    await control_plane.start()
    await until(lambda: answers(controller), 60, "it is back")


@pytest.mark.rule("nats-9.3")
async def test_a_worker_whose_node_is_pending_again_leaves_the_bus(
    alone: Worker, approval: Approval, controller: NatsBus, server: EmbeddedNats
) -> None:
    approval.lifetime = 4
    alone.launch()
    await until(lambda: answers(controller), 30, "it is on the bus")
    approval.lifetime = 0
    await until(lambda: connections(alone, server.port) == 0, 30, "it has left")
    with pytest.raises((NoResponders, RequestTimeout)):
        await listed(controller, NODE)
