"""Which replica a pick chooses: the statement, its pure twin and the ORM agree; wishes of requests count."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from nodes.gateway.request import InferenceRequest, Replica
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel
from nodes.models.scheduling import MAX_SELECTOR_LABELS
from nodes.replicas import fleet_queries, statements
from tests.support import hot
from tests.support.effort import EFFORT
from tests.support.picks import acquire, raw
from tests.support.policy import Candidate, spread

__all__ = ["raw"]
pytestmark = pytest.mark.django_db(transaction=True)


def orm_twin(model: str, now: datetime) -> NodeModel:
    """One pick through the ORM, in the words of R1.78 and R1.79; the caller's transaction holds the lock."""
    row = (
        NodeModel.objects.serving()
        .of(model)
        .select_for_update(of=("self",))
        .order_by("in_flight", "last_used", "-node__available_vram", "id")[0]
    )
    NodeModel.objects.filter(pk=row.pk).update(in_flight=row.in_flight + 1, last_used=now)
    return row


def test_only_loaded_replicas_on_healthy_backend_nodes() -> None:
    """R1.79: neither loading rows nor pending, draining, offline or agent nodes are picked."""
    now = clock.now()
    hot.replica(hot.node("pending", approved_at=None))
    hot.replica(hot.node("drained", drained_at=now))
    hot.replica(hot.node("offline", offline_at=now))
    hot.replica(hot.node("agent", node_type="agent"))
    good = hot.node("good")
    hot.replica(good, index=0, state="loading")
    hot.replica(good, model="other", index=1)

    async def scenario() -> Replica | None:
        async with hot.picker() as picker:
            return await picker.acquire(InferenceRequest(model="echo"))

    assert asyncio.run(scenario()) is None


FACTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)),
    min_size=0,
    max_size=5,
)


@pytest.mark.rule("R1.78")
@settings(max_examples=40 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(facts=FACTS, requests=st.integers(0, 12))
def test_statement_and_pure_twin_agree(
    raw: psycopg.Connection[Any], facts: list[tuple[int, int, int]], requests: int
) -> None:
    """R1.78: the SQL spreads exactly as the pure function does, on the same data."""
    now = clock.now()
    candidates = [
        Candidate(uuid4(), in_flight, now - timedelta(seconds=idle), vram) for in_flight, idle, vram in facts
    ]
    try:
        for number, candidate in enumerate(candidates):
            insert(raw, number, candidate, now)
        owner = uuid4()
        raw.execute(statements.ANNOUNCE, about(owner, now))
        rows = psycopg.RawCursor(raw).execute(statements.EXCHANGE, wanted(owner, requests, now)).fetchall()
    finally:
        raw.rollback()
    assert {row[0]: row[4] for row in rows} == dict(spread(candidates, requests, now))


@pytest.mark.parametrize("requests", [1, 30])
def test_more_replicas_than_are_locked(raw: psycopg.Connection[Any], requests: int) -> None:
    """R1.78: the choice is among all of them, also by what the same statement counts out."""
    now, chance, owner = clock.now(), random.Random(1), uuid4()
    candidates = [
        Candidate(uuid4(), chance.randrange(1, 4), now - timedelta(seconds=chance.randrange(90)), 0)
        for _ in range(statements.EXTRA_REPLICAS + 30)
    ]
    released = sorted(candidates, key=lambda one: one.in_flight)[-5:]
    try:
        for number, candidate in enumerate(candidates):
            insert(raw, number, candidate, now)
        raw.execute(statements.ANNOUNCE, about(owner, now))
        for one in released:
            raw.execute(HOLD, (owner, one.id, one.in_flight))
        values = str(owner), now.isoformat(), json.dumps(exchanged(released, requests))
        rows = psycopg.RawCursor(raw).execute(statements.EXCHANGE, values).fetchall()
    finally:
        raw.rollback()
    after = [replace(one, in_flight=0) if one in released else one for one in candidates]
    assert {row[0]: row[4] for row in rows} == dict(spread(after, requests, now))


@pytest.mark.rule("R1.78", "T-REG-24")
def test_orm_twin_agrees() -> None:
    """R1.78, R1.79: picks by the statement and picks through the ORM choose the same rows in the same
    state."""
    for number in range(4):
        on = hot.node(f"n{number}", available_vram=number % 2)
        hot.replica(on, index=number, in_flight=number % 3, last_used=hot.EPOCH)
    now = clock.now()
    before = [
        Candidate(row.pk, row.in_flight, row.last_used, row.node.available_vram)
        for row in NodeModel.objects.select_related("node")
    ]
    with transaction.atomic():
        by_orm = Counter(orm_twin("echo", now).pk for _ in range(11))
        transaction.set_rollback(True)

    async def scenario() -> Counter[UUID]:
        async with hot.picker() as picker:
            return Counter(
                replica.id for replica in await asyncio.gather(*(acquire(picker) for _ in range(11)))
            )

    assert asyncio.run(scenario()) == by_orm == spread(before, 11, now)


def about(owner: UUID, now: datetime) -> dict[str, Any]:
    return {"process": owner, "host": "h", "pid": 1, "started": now, "now": now, "version": "1"}


HOLD = "INSERT INTO replica_uses (process_id, replica_id, count) VALUES (%s, %s, %s)"


def exchanged(released: Sequence[Candidate], requests: int) -> dict[str, Any]:
    picks = [{"ask": 0, "scope": -1, "model": "echo", "key": "", "n": requests}] if requests else []
    return {
        "keys": [],
        "releases": [{"id": str(one.id), "n": one.in_flight} for one in released],
        "picks": picks,
    }


def wanted(owner: UUID, requests: int, now: datetime) -> tuple[str, str, str]:
    return str(owner), now.isoformat(), json.dumps(exchanged([], requests))


def insert(raw: psycopg.Connection[Any], number: int, candidate: Candidate, now: datetime) -> None:
    node = BackendNode(name=f"n{number}", name_key=f"n{number}", address="a:1", approved_at=now)
    node.available_vram = candidate.available_vram
    row = NodeModel(
        id=candidate.id, node=node, model_name="echo", address=f"a:{number}", phase="serving",
        in_flight=candidate.in_flight, last_used=candidate.last_used,
    )  # fmt: skip
    for model in (node, row):
        fields = [field for field in model._meta.local_concrete_fields if not field.generated]
        values = [field.get_db_prep_save(getattr(model, field.attname), connection) for field in fields]
        names = ", ".join(f'"{field.column}"' for field in fields)
        marks = ", ".join(["%s"] * len(fields))
        raw.execute(f"INSERT INTO {model._meta.db_table} ({names}) VALUES ({marks})", values)


def pick(**wish: Any) -> Replica | None:
    """What one pick of `echo` with this wish gets."""

    async def scenario() -> Replica | None:
        async with hot.picker() as picker:
            return await picker.acquire(InferenceRequest(model="echo", **wish))

    return asyncio.run(scenario())


@pytest.mark.rule("R1.79", "T-REG-21", "T-REG-23")
def test_only_candidates_are_picked() -> None:
    """A node that is no candidate gets nothing, however idle it is; without any candidate there is none."""
    calm, busy = hot.node("calm"), hot.node("busy")
    hot.replica(calm)
    wanted = hot.replica(busy, in_flight=9)
    picked = pick(candidates=frozenset({busy.pk}))
    assert picked is not None
    assert picked.id == wanted.pk
    assert pick(candidates=frozenset({hot.node("empty").pk})) is None
    assert pick(candidates=frozenset()) is None


@pytest.mark.rule("R1.80", "T-REG-25", "T-REG-26", "T-REG-27", "T-REG-28")
def test_the_preferred_replica_is_picked_however_busy_it_is() -> None:
    """Exactly that node and index; one that does not serve or is no candidate leaves the usual order."""
    one, two = hot.node("one"), hot.node("two")
    hot.replica(one, index=0)
    hot.replica(one, index=1, in_flight=9)
    hot.replica(two, index=0, in_flight=5)
    hot.replica(two, index=1, state="loading")

    def got(**wish: Any) -> tuple[UUID, int]:
        picked = pick(**wish)
        assert picked is not None
        return picked.node_id, picked.index

    assert got() == (one.pk, 0)
    assert got(preferred=(one.pk, 1)) == (one.pk, 1)
    assert got(preferred=(two.pk, 0)) == (two.pk, 0)
    assert got(preferred=(two.pk, 1)) == (one.pk, 0)
    assert got(preferred=(uuid4(), 0)) == (one.pk, 0)
    assert got(preferred=(one.pk, 1), candidates=frozenset({two.pk})) == (two.pk, 0)


@pytest.mark.rule("R2.10", "T-ROU-12", "R2.4")
def test_a_replica_outside_the_selector_gets_no_request() -> None:
    """The rule as it is stored now; a selector that cannot be read chooses no node (R1.69)."""
    east, west = hot.node("east"), hot.node("west")
    for node, zone in ((east, "east"), (west, "west")):
        NodeLabel.objects.create(node=node, key="zone", value=zone)
        NodeLabel.objects.create(node=node, key="tier", value="fast")
        hot.replica(node)
    many = {f"key-{number}": "x" for number in range(MAX_SELECTOR_LABELS + 1)}
    NodeLabel.objects.bulk_create(NodeLabel(node=west, key=key, value="x") for key in many)
    rule = ModelSchedulingConfig.objects.create(model_name="echo")
    west_only = {"zone": "west", "tier": "fast"}
    for selector, expected in (
        ({}, {east.pk, west.pk}),
        (west_only, {west.pk}),
        (many, {west.pk}),
        ({"zone": "north"}, set()),
        (["zone"], set()),
        ({"zone": 1}, set()),
    ):
        ModelSchedulingConfig.objects.filter(pk=rule.pk).update(node_selector=selector)
        picked = [pick() for _ in range(4)]
        assert {one.node_id for one in picked if one is not None} == expected
        assert fleet_queries.is_served("echo") == bool(expected)


def test_requests_with_different_wishes_share_a_statement() -> None:
    """Each gets its own, and all are counted, also where two wishes meet in one replica."""
    one, two = hot.node("one"), hot.node("two")
    first = hot.replica(one, in_flight=0)
    hot.replica(two, in_flight=0, index=1)
    wishes: list[dict[str, Any]] = [
        {"preferred": (one.pk, 0)},
        {"candidates": frozenset({one.pk})},
        {"candidates": frozenset({two.pk})},
        {},
    ]

    async def scenario() -> tuple[list[Replica | None], int]:
        async with hot.picker() as picker:
            before = picker.connection.executed
            asked = [picker.acquire(InferenceRequest(model="echo", **wish)) for wish in wishes for _ in "ab"]
            return await asyncio.gather(*asked), picker.connection.executed - before

    picked, executed = asyncio.run(scenario())
    nodes = [one_of.node_id for one_of in picked if one_of is not None]
    assert nodes[:6] == [one.pk] * 4 + [two.pk] * 2
    assert len(nodes) == 8
    assert executed <= 2
    assert hot.counts()[first.address] == nodes.count(one.pk)
