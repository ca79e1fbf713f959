"""Heartbeats: R1.32 to R1.36, R5.5, R5.7, identity, and one statement for all that come together."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster import clock, errors
from nodes import beats, services
from nodes.api.heartbeats import BeatWriter, HeartbeatApplication
from nodes.identity import hash_secret
from nodes.models import BackendNode
from nodes.routing.pool import Pool
from operations.events import NODES, conninfo
from tests.support import api
from tests.support.environment import REGISTRATION_TOKEN

pytestmark = pytest.mark.django_db(transaction=True)


class Counted:
    """A pool that writes down the statements it is asked for."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.statements: list[str] = []

    async def rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
        self.statements.append(statement)
        return await self.pool.rows(statement, parameters)


@pytest.fixture
async def database() -> AsyncIterator[Counted]:
    """The test database through the web process's own pool."""
    pool = Pool(await sync_to_async(conninfo)())
    await pool.open()
    yield Counted(pool)
    await pool.close()
    await sync_to_async(connections.close_all)()


@pytest.fixture
def application(database: Counted) -> HeartbeatApplication:
    """The ASGI application over the test database."""
    return HeartbeatApplication(lambda: database)


async def beat(
    application: HeartbeatApplication,
    node_id: Any,
    body: Any = None,
    *,
    secret: str | None = api.SECRET,
    content_type: str = "application/json",
    method: str = "POST",
) -> tuple[int, Any]:
    """Sends one beat; answers status and body."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", content_type.encode())]
    if secret is not None:
        headers.append((b"authorization", f"Bearer {secret}".encode()))
    messages = [{"type": "http.request", "body": raw, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    path = f"/api/node/{node_id}/heartbeat"
    await application({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def made(**fields: Any) -> BackendNode:
    return await sync_to_async(api.make_node)(**fields)


async def now_of(node: BackendNode) -> BackendNode:
    return await BackendNode.objects.aget(pk=node.pk)


async def test_figures_are_stored(application: HeartbeatApplication) -> None:
    """R1.32, R1.33: what was reported, an explicit zero of the disk too; the reservation ends."""
    node = await made(total_disk=9, available_disk=9, total_vram=100, gpu_vendor="amd")
    await BackendNode.objects.filter(pk=node.pk).aupdate(reserved_vram=7)
    body = {"available_vram": 60, "available_ram": 4, "available_disk": 0, "gpu_vendor": "", "extra": [1]}
    assert await beat(application, node.id, body) == (200, {"message": "heartbeat recorded"})
    stored = await now_of(node)
    assert (stored.available_vram, stored.reserved_vram, stored.available_ram) == (60, 0, 4)
    assert (stored.total_disk, stored.available_disk, stored.gpu_vendor) == (9, 0, "amd")
    assert stored.last_heartbeat is not None
    assert node.last_heartbeat is not None
    assert stored.last_heartbeat > node.last_heartbeat


@pytest.mark.parametrize("body", [None, b"", {}, b"  ", {"available_vram": None}])
async def test_an_empty_beat_is_a_sign_of_life(application: HeartbeatApplication, body: Any) -> None:
    """R1.35."""
    node = await made()
    assert (await beat(application, node.id, body))[0] == 200
    assert (await now_of(node)).last_heartbeat != node.last_heartbeat


async def test_budgets_cap_and_follow_the_total(application: HeartbeatApplication) -> None:
    """R1.36 with its "Port:" line: a share of a new total is a new ceiling."""
    node = await made(total_vram=100, available_vram=100, vram_budget="50%")
    await beat(application, node.id, {"available_vram": 90})
    assert (await now_of(node)).available_vram == 50
    await beat(application, node.id, {"available_vram": 190, "total_vram": 60})
    stored = await now_of(node)
    assert (stored.vram_budget_bytes, stored.available_vram) == (30, 30)


@pytest.mark.parametrize("approved", [False, True])
async def test_pending_and_offline_nodes_store_the_time_only(
    application: HeartbeatApplication, approved: bool
) -> None:
    """R1.34, R5.7: a worker that deregistered stays offline although it beats once more."""
    node = await made(approved=approved)
    if approved:
        await sync_to_async(services.deactivate)(node.id, now=clock.now())
    assert (await beat(application, node.id, {"available_ram": 5}))[0] == 200
    stored = await now_of(node)
    assert stored.status == ("offline" if approved else "pending")
    assert stored.available_ram == 0
    assert stored.last_heartbeat != node.last_heartbeat


async def test_a_silent_node_comes_back_by_its_beat(application: HeartbeatApplication) -> None:
    """R5.5: at once, without waiting for a pass, and whoever waits for a node is told."""
    node = await made()
    await BackendNode.objects.filter(pk=node.pk).aupdate(offline_at=clock.now(), offline_recovers=True)
    async with await psycopg.AsyncConnection.connect(
        await sync_to_async(conninfo)(), autocommit=True
    ) as listener:
        await listener.execute(f"LISTEN {NODES}")
        assert (await beat(application, node.id))[0] == 200
        heard = [note.payload async for note in listener.notifies(timeout=10, stop_after=1)]
    assert heard == [str(node.id)]
    assert (await now_of(node)).status == "healthy"


async def test_beats_gather_into_one_statement(database: Counted) -> None:
    """docs/architecture.md: at most one UPDATE a second a process; the first after a quiet second at once."""
    nodes = [await made(name=f"w{i}", secret=f"{i:064x}") for i in range(40)]
    application = HeartbeatApplication(lambda: database)
    answers = await asyncio.gather(
        *(beat(application, n.id, {"available_ram": i}, secret=f"{i:064x}") for i, n in enumerate(nodes))
    )
    assert {status for status, _ in answers} == {200}
    assert database.statements == [beats.WRITE]
    stored = {n.name: n.available_ram async for n in BackendNode.objects.all()}
    assert stored == {f"w{i}": i for i in range(40)}


async def test_the_second_batch_waits_and_everybody_is_answered(database: Counted) -> None:
    """Beats that come while the interval runs are one more statement; the same node's beats are one row."""
    node = await made()
    writer = BeatWriter(lambda: database, interval=0.3)
    fingerprint = hash_secret(api.SECRET)
    first = beats.Beat(node.id, fingerprint, clock.now(), available_ram=1)
    assert await writer.write(first) is None
    later = [beats.Beat(node.id, fingerprint, clock.now(), available_disk=i) for i in range(5)]
    started = clock.monotonic()
    assert await asyncio.gather(*(writer.write(entry) for entry in later)) == [None] * 5
    assert clock.monotonic() - started > 0.2
    assert database.statements == [beats.WRITE] * 2
    assert (await now_of(node)).available_disk == 4


async def test_refusals(application: HeartbeatApplication) -> None:
    """§1.2 with the identity of docs/architecture.md: 401 flat, 403 another node, 404 unknown."""
    node = await made()
    other = await made(name="w2", secret=api.OTHER_SECRET)
    before = (await now_of(node)).last_heartbeat
    cases = [
        (node.id, None, 401),
        (node.id, "x", 401),
        (node.id, REGISTRATION_TOKEN, 401),
        (uuid4(), "x", 401),
        (node.id, api.OTHER_SECRET, 403),
        (uuid4(), api.SECRET, 404),
        ("nope", api.SECRET, 404),
    ]
    answers = await asyncio.gather(*(beat(application, n, {}, secret=s) for n, s, _ in cases))
    assert [status for status, _ in answers] == [status for _, _, status in cases]
    assert isinstance(answers[0][1]["error"], str)
    assert answers[-1][1]["error"]["type"] == "node_error"
    assert (await now_of(node)).last_heartbeat == before
    right, wrong = await asyncio.gather(
        beat(application, other.id, secret=api.OTHER_SECRET), beat(application, other.id, secret="x")
    )
    assert (right[0], wrong[0]) == (200, 401)
    assert (await beat(application, node.id, method="GET"))[0] == 405


async def test_stock_workers_beat_with_the_shared_token(
    application: HeartbeatApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCALAI_ALLOW_SHARED_TOKEN_NODES: for weakly known nodes only, and only while it is on."""
    allowing = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    monkeypatch.setattr(settings, "CLUSTER", allowing)
    weak = await made(secret="")
    strong = await made(name="w2")
    assert (await beat(application, weak.id, secret=REGISTRATION_TOKEN))[0] == 200
    assert (await beat(application, strong.id, secret=REGISTRATION_TOKEN))[0] == 403
    assert (await beat(application, uuid4(), secret=REGISTRATION_TOKEN))[0] == 404
    monkeypatch.setattr(settings, "CLUSTER", replace(allowing, allow_shared_token_nodes=False))
    assert (await beat(application, weak.id, secret=REGISTRATION_TOKEN))[0] == 401


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{bad", 400, "body"),
        (b"[1]", 400, "body"),
        (b"[" * 60_000, 400, "body"),
        ({"available_ram": -1}, 400, "available_ram"),
        ({"available_ram": 1.0}, 400, "available_ram"),
        ({"available_ram": True}, 400, "available_ram"),
        ({"available_vram": 2**63}, 400, "available_vram"),
        ({"total_disk": "9"}, 400, "total_disk"),
        ({"gpu_vendor": "a\x00"}, 400, "gpu_vendor"),
        ({"gpu_vendor": "\ud800"}, 400, "gpu_vendor"),
        ({"gpu_vendor": 3}, 400, "gpu_vendor"),
        (b" " * (64 * 1024 + 1), 413, "64 kB"),
    ],
)
async def test_hostile_bodies(application: HeartbeatApplication, body: Any, status: int, says: str) -> None:
    """Ours, where the reference ignores garbage: 400 naming the field."""
    refused = await beat(application, uuid4(), body)
    assert refused[0] == status
    assert says in refused[1]["error"]["message"]
    assert (await beat(application, uuid4(), b"a=b", content_type="text/plain"))[0] == 400


async def test_the_database_is_away() -> None:
    """A refusal that says when to come back, not an error."""

    class Away:
        async def rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
            raise psycopg.OperationalError("gone")

    status, body = await beat(HeartbeatApplication(Away), uuid4())
    assert (status, body["error"]["type"]) == (503, "node_error")


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
)
NAMES = st.sampled_from(["available_vram", "total_vram", "available_ram", "total_disk", "gpu_vendor", "x"])


@given(st.dictionaries(NAMES, VALUES))
def test_reading_ends_in_storable_values_or_names_a_field(body: dict[str, Any]) -> None:
    """One bad beat must never spoil the batch of everybody else."""
    refusal, figures = None, {}
    try:
        figures = beats.read(body)
    except errors.InvalidInput as error:
        refusal = error
    assert refusal is None or refusal.field in body
    entry = beats.Beat(uuid4(), "f", clock.now(), **figures)
    assert json.dumps(figures).encode("utf-8")
    assert all(v is None or isinstance(v, str) or 0 <= v < 2**63 for v in figures.values())
    assert entry.after(entry) == entry


@given(ram=st.none() | st.integers(0, 9))
def test_a_later_beat_fills_its_gaps_from_the_earlier_one(ram: int | None) -> None:
    """Two beats of a node in one batch are one row: later figures, and what only the earlier one had."""
    node, at = uuid4(), clock.now()
    early = beats.Beat(node, "f", at, available_ram=1, total_disk=5)
    late = beats.Beat(node, "f", at + timedelta(seconds=1), available_ram=ram)
    merged = late.after(early)
    assert merged.at == late.at
    assert (merged.available_ram, merged.total_disk) == (1 if ram is None else ram, 5)
