"""Heartbeats: R1.32 to R1.36, R5.5, R5.7, identity, and one statement for all that come together."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from asgiref.sync import sync_to_async
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock, errors
from nodes.api.heartbeats import BeatWriter, HeartbeatApplication, HeartbeatAuthenticator
from nodes.models import BackendNode, NodeEvent
from nodes.registry import claims, heartbeats, lifecycle, overrides
from nodes.registry.heartbeats import IdentityCache
from operations.changes.events import NODES, conninfo
from tests.conftest import until
from tests.support import api
from tests.support.beating import Counted, beat, made, now_of

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Actor(ActorKind.USER, "root")


@pytest.mark.rule("R1.32", "R1.33", "http-1.2", "worker-6", "T-REG-84", "T-REG-143")
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


@pytest.mark.rule("R1.35", "http-1.2")
@pytest.mark.parametrize("body", [None, b"", {}, b"  ", {"available_vram": None}])
async def test_an_empty_beat_is_a_sign_of_life(application: HeartbeatApplication, body: Any) -> None:
    """R1.35."""
    node = await made()
    assert (await beat(application, node.id, body))[0] == 200
    assert (await now_of(node)).last_heartbeat != node.last_heartbeat


BUDGETS: list[tuple[Any, ...]] = [
    ("50%", {"available_vram": 90}, 50, 50),
    ("50%", {"available_vram": 190, "total_vram": 60}, 30, 30),
    ("50%", {"available_vram": 190, "total_vram": 400}, 200, 190),
    ("50%", {"total_vram": 60}, 30, 30),
    ("50%", {"total_vram": 400}, 200, 50),
    ("50%", {"total_vram": 0}, 0, 50),
    ("80B", {"available_vram": 90, "total_vram": 60}, 60, 60),
    ("80B", {"available_vram": 190, "total_vram": 400}, 80, 80),
    ("", {"available_vram": 190, "total_vram": 400}, 0, 190),
    ("nonsense", {"available_vram": 190, "total_vram": 400}, 0, 190),
]
"""Budget of a node with 100 bytes, what it reports, its ceiling and its free memory afterwards."""


@pytest.mark.rule("R1.36", "http-1.2")
async def test_budgets_cap_and_follow_the_total(database: Counted) -> None:
    """With its "Port:" line: a share of a new total is a new ceiling; one UPDATE for all of them."""
    at = clock.now()
    nodes = [
        await made(name=f"w{number}", total_vram=100, available_vram=100, vram_budget=text)
        for number, (text, *_) in enumerate(BUDGETS)
    ]
    reported = [
        heartbeats.Beat(n.id, n.fingerprint, at, **case[1]) for n, case in zip(nodes, BUDGETS, strict=True)
    ]
    assert set((await heartbeats.record(database, reported)).values()) == {None}
    for node, (text, body, *expected) in zip(nodes, BUDGETS, strict=True):
        stored = await now_of(node)
        assert [stored.vram_budget_bytes, stored.available_vram] == expected, (text, body)
    assert [text for text in database.statements if "UPDATE" in text] == [heartbeats.WRITE_SQL]


@pytest.mark.rule("R1.36", "R1.47")
async def test_an_override_that_comes_between_wins(database: Counted) -> None:
    """The budget is read before the batch is written; if it has changed meanwhile the new one stays."""
    node = await made(total_vram=100, available_vram=100, vram_budget="50%")

    class Late(Counted):
        async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
            found = await super().fetch_rows(statement, parameters)
            if statement != heartbeats.WRITE_SQL:
                await sync_to_async(overrides.set_vram_budget)(node.id, "20%", actor=ROOT, now=clock.now())
            return found

    reported = heartbeats.Beat(node.id, node.fingerprint, clock.now(), total_vram=200, available_vram=200)
    await heartbeats.record(Late(database.pool), [reported])
    stored = await now_of(node)
    assert (stored.vram_budget, stored.vram_budget_bytes, stored.available_vram) == ("20%", 20, 20)


EARLIER, LATER = timedelta(seconds=-1), timedelta(seconds=1)
RESERVATIONS: list[tuple[Any, ...]] = [
    ("never", None, {"available_vram": 60}, 0),
    ("before the beat", EARLIER, {"available_vram": 60}, 0),
    ("at once", timedelta(0), {"available_vram": 60}, 0),
    ("after the beat", LATER, {"available_vram": 60}, 7),
    ("no free memory told", EARLIER, {"available_ram": 60}, 7),
    ("nothing told", EARLIER, {}, 7),
]
"""When 7 bytes were reserved, as seen from the beat; what the beat tells; what stays reserved."""


@pytest.mark.rule("R1.33", "R1.53", "http-1.2", "worker-6")
async def test_a_beat_clears_reservations_that_were_there_before_it(database: Counted) -> None:
    """D-RESERVATION: what was reserved after the figure came in is not in the figure."""
    at = clock.now()
    for number, (case, reserved, body, left) in enumerate(RESERVATIONS):
        node = await made(name=f"w{number}", total_vram=100)
        moment = None if reserved is None else at + reserved
        await BackendNode.objects.filter(pk=node.pk).aupdate(reserved_vram=7, reserved_at=moment)
        await heartbeats.record(database, [heartbeats.Beat(node.id, node.fingerprint, at, **body)])
        assert (await now_of(node)).reserved_vram == left, case


@pytest.mark.rule("R1.33")
async def test_a_merged_beat_clears_what_its_figure_knew(database: Counted) -> None:
    """The free VRAM of the first beat does not become newer because a second one without any follows."""
    node, at = await made(total_vram=100), clock.now()
    await BackendNode.objects.filter(pk=node.pk).aupdate(reserved_vram=7, reserved_at=at + LATER)
    first = heartbeats.Beat(node.id, node.fingerprint, at, available_vram=60)
    second = heartbeats.Beat(node.id, node.fingerprint, at + 2 * LATER, available_ram=1)
    await heartbeats.record(database, [second.after(first)])
    stored = await now_of(node)
    assert (stored.available_vram, stored.reserved_vram, stored.available_ram) == (60, 7, 1)


@pytest.mark.rule("R1.34", "R1.16", "http-1.2")
@pytest.mark.parametrize("approved", [False, True])
async def test_pending_and_offline_nodes_store_the_time_only(
    application: HeartbeatApplication, approved: bool
) -> None:
    """R1.34, R5.7: a worker that deregistered stays offline although it beats once more."""
    node = await made(approved=approved)
    if approved:
        await sync_to_async(lifecycle.deactivate)(node.id, now=clock.now())
    assert (await beat(application, node.id, {"available_ram": 5}))[0] == 200
    stored = await now_of(node)
    assert stored.status == ("offline" if approved else "pending")
    assert stored.available_ram == 0
    assert stored.last_heartbeat != node.last_heartbeat


@pytest.mark.rule("R1.16")
async def test_a_silent_node_comes_back_by_its_beat(application: HeartbeatApplication) -> None:
    """R5.5: at once, without waiting for a pass, and anyone who waits for a node is told."""
    node = await made()
    await BackendNode.objects.filter(pk=node.pk).aupdate(offline_at=clock.now(), offline_recovers=True)
    async with await psycopg.AsyncConnection.connect(
        await sync_to_async(conninfo)(), autocommit=True
    ) as listener:
        await listener.execute(f"LISTEN {NODES}")
        assert (await beat(application, node.id))[0] == 200
        heard = [note.payload async for note in listener.notifies(timeout=60, stop_after=1)]
    assert heard == [str(node.id)]
    assert (await now_of(node)).status == "healthy"


async def silent() -> BackendNode:
    """A node that has fallen silent; its own beat brings it back."""
    node = await made()
    await BackendNode.objects.filter(pk=node.pk).aupdate(offline_at=clock.now(), offline_recovers=True)
    return node


async def heard(node: BackendNode) -> list[tuple[str, str]]:
    rows = NodeEvent.objects.filter(node_id=node.pk, kind="heard_again")
    return [row async for row in rows.values_list("status_before", "status_after")]


@pytest.mark.rule("R1.16")
async def test_coming_back_is_told_once(application: HeartbeatApplication, database: Counted) -> None:
    """However many beats come, in one batch or in the next: one event, and one new revision."""
    node = await silent()
    answers = await asyncio.gather(*(beat(application, node.id, {"available_ram": i}) for i in range(5)))
    assert {status for status, _ in answers} == {200}
    again = heartbeats.Beat(node.id, node.fingerprint, clock.now())
    assert await heartbeats.record(database, [again]) == {again.key: None}
    assert await heard(node) == [("offline", "healthy")]
    assert (await now_of(node)).revision == node.revision + 1


_BLOCKED = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.mark.rule("R1.16")
async def test_two_processes_that_hear_a_node_tell_it_once(database: Counted) -> None:
    """Both see it silent; the one that waits for the row is overtaken, its beat goes with the next batch."""
    node = await silent()
    one = heartbeats.Beat(node.id, node.fingerprint, clock.now())
    batch = heartbeats._write_parameters([heartbeats._encode(one, "")])

    async with await psycopg.AsyncConnection.connect(await sync_to_async(conninfo)()) as first:
        await first.execute(heartbeats.WRITE_SQL, batch)
        writer = BeatWriter(lambda: database, interval=0.01)
        writer.add(replace(one, available_ram=7))
        await until(lambda: database.pool.fetch_rows(_BLOCKED, {}))
        await first.commit()
        await writer._batches.idle()
    assert await heard(node) == [("offline", "healthy")]
    assert (await now_of(node)).available_ram == 7


async def test_beats_gather_into_one_statement(database: Counted) -> None:
    """docs/architecture.md: at most one UPDATE a second a process; the first after a quiet second at once."""
    nodes = [await made(name=f"w{i}", secret=f"{i:064x}") for i in range(40)]
    application = HeartbeatApplication(lambda: database, IdentityCache())
    answers = await asyncio.gather(
        *(beat(application, n.id, {"available_ram": i}, secret=f"{i:064x}") for i, n in enumerate(nodes))
    )
    assert {status for status, _ in answers} == {200}
    written = [text for text in database.statements if "UPDATE" in text]
    assert written in (
        [heartbeats.WRITE_SQL],
        [heartbeats.WRITE_SQL] * 2,
    )  # the first to be proved may go ahead
    assert len(database.statements) - len(written) <= 3
    stored = {n.name: n.available_ram async for n in BackendNode.objects.all()}
    assert stored == {f"w{i}": i for i in range(40)}


async def test_the_second_batch_waits_and_a_node_is_one_row(database: Counted) -> None:
    """Beats that come while the interval runs are one more statement; the same node's beats are one row."""
    node = await made()
    writer = BeatWriter(lambda: database, interval=0.3)
    fingerprint = hash_secret(api.SECRET)
    started = clock.monotonic()
    writer.add(heartbeats.Beat(node.id, fingerprint, clock.now(), available_ram=1))
    await writer._batches.idle()
    for figure in range(5):
        writer.add(heartbeats.Beat(node.id, fingerprint, clock.now(), available_disk=figure))
    await writer._batches.idle()
    assert clock.monotonic() - started >= 0.3
    assert database.statements == [heartbeats.WRITE_SQL] * 2
    assert (await now_of(node)).available_disk == 4


async def test_an_answer_does_not_wait_for_the_batch(database: Counted) -> None:
    """Proved is answered: the row follows with the batch. What was revoked in between writes nothing."""
    node = await made()
    writer = BeatWriter(lambda: database, interval=0.3)
    writer.add(heartbeats.Beat(node.id, hash_secret(api.SECRET), clock.now(), available_ram=1))
    await writer._batches.idle()
    gate = HeartbeatAuthenticator(lambda: database, IdentityCache())
    late = heartbeats.Beat(node.id, hash_secret(api.SECRET), clock.now(), available_ram=2)
    assert await gate.prove(late) is None
    writer.add(late)
    await sync_to_async(claims.revoke)(node.id, actor=ROOT, now=clock.now())
    await writer._batches.idle()
    stored = await now_of(node)
    assert (stored.available_ram, stored.status) == (1, "pending")


async def test_a_lost_batch_costs_one_beat(database: Counted) -> None:
    """The database goes away between proof and batch: nothing is raised, the next beat is written."""
    node = await made()

    class Flickering(Counted):
        gone = True

        async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
            if self.gone:
                self.gone = False
                raise psycopg.OperationalError("gone")
            return await super().fetch_rows(statement, parameters)

    flickering = Flickering(database.pool)
    writer = BeatWriter(lambda: flickering, interval=0.01)
    for figure in (1, 2):
        writer.add(heartbeats.Beat(node.id, hash_secret(api.SECRET), clock.now(), available_ram=figure))
        await writer._batches.idle()
    assert flickering.statements == [heartbeats.WRITE_SQL]
    assert (await now_of(node)).available_ram == 2


async def test_the_database_is_away() -> None:
    """A refusal that says when to come back, not an error."""

    class Away:
        async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
            raise psycopg.OperationalError("gone")

    status, body = await beat(HeartbeatApplication(Away, IdentityCache()), uuid4())
    assert (status, body["error"]["type"]) == (503, "node_error")


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
)
NAMES = st.sampled_from(["available_vram", "total_vram", "available_ram", "total_disk", "gpu_vendor", "x"])


@given(st.dictionaries(NAMES, VALUES))
def test_reading_ends_in_storable_values_or_names_a_field(body: dict[str, Any]) -> None:
    """One bad beat must never spoil the batch of everyone else."""
    refusal, figures = None, {}
    try:
        figures = heartbeats.parse_heartbeat(body)
    except errors.InvalidInput as error:
        refusal = error
    assert refusal is None or refusal.field in body
    entry = heartbeats.Beat(uuid4(), "f", clock.now(), **figures)
    assert json.dumps(figures).encode("utf-8")
    assert all(v in (None, []) or isinstance(v, str) or 0 <= v < 2**63 for v in figures.values())
    assert entry.after(entry) == entry


@given(ram=st.none() | st.integers(0, 9))
def test_a_later_beat_fills_its_gaps_from_the_earlier_one(ram: int | None) -> None:
    """Two beats of a node in one batch are one row: later figures, and what only the earlier one had."""
    node, at = uuid4(), clock.now()
    early = heartbeats.Beat(node, "f", at, available_ram=1, total_disk=5)
    late = heartbeats.Beat(node, "f", at + timedelta(seconds=1), available_ram=ram)
    merged = late.after(early)
    assert merged.at == late.at
    assert (merged.available_ram, merged.total_disk) == (1 if ram is None else ram, 5)
