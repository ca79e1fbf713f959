"""Heartbeats proved from memory: what that costs, how old it may be, and what a NOTIFY does at once."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import cancellation, clock
from nodes.api.heartbeats import HeartbeatApplication, HeartbeatAuthenticator
from nodes.gateway import gateway
from nodes.models import BackendNode
from nodes.registry import claims, heartbeats
from nodes.registry.heartbeats import IdentityCache
from nodes.registry.identity import WrongCredential
from operations.executor.work import WakeUps
from tests.conftest import until
from tests.support import api
from tests.support.beating import Counted, beat, made

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Actor(ActorKind.USER, "root")


class Hand:
    """A clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("nodes.registry.heartbeats.clock.monotonic", lambda: self.now)


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """The clock by which memory grows old."""
    return Hand(monkeypatch)


def beat_of(node: BackendNode, secret: str = api.SECRET, instance: str = "") -> heartbeats.Beat:
    return heartbeats.Beat(node.id, hash_secret(secret), clock.now(), instance)


@pytest.mark.rule("R1.32", "http-1.2")
async def test_a_beat_of_a_known_node_costs_no_statement(database: Counted, hand: Hand) -> None:
    """One statement for the whole fleet every five seconds, however many beat."""
    fleet = [await made(name=f"w{number}", secret=f"{number:064x}") for number in range(20)]
    gate = HeartbeatAuthenticator(lambda: database, IdentityCache())
    for _ in range(4):
        found = [await gate.prove(beat_of(node, f"{number:064x}")) for number, node in enumerate(fleet)]
        assert found == [None] * 20
        hand.now += 2.0
    assert database.statements == [heartbeats.ALL_IDENTITIES_SQL] * 2


@pytest.mark.rule("http-1.2")
async def test_a_revoked_secret_is_refused_within_five_seconds(database: Counted, hand: Hand) -> None:
    """The NOTIFY is lost: memory proves the beat a little longer, and never after five seconds."""
    node, gate = await made(), HeartbeatAuthenticator(lambda: database, IdentityCache())
    assert await gate.prove(beat_of(node)) is None
    await sync_to_async(claims.revoke)(node.id, actor=ROOT, now=clock.now())
    hand.now += heartbeats.IDENTITY_MAX_AGE - 0.01
    assert await gate.prove(beat_of(node)) is None
    hand.now += 0.01
    assert isinstance(await gate.prove(beat_of(node)), WrongCredential)


@pytest.mark.rule("http-1.2")
@pytest.mark.parametrize("heard", ["its id", "news may be missing"])
async def test_a_notify_ends_it_at_once(database: Counted, hand: Hand, heard: str) -> None:
    """Also after a lost connection, which may have swallowed the NOTIFY."""
    node, memory = await made(), IdentityCache()
    gate = HeartbeatAuthenticator(lambda: database, memory)
    assert await gate.prove(beat_of(node)) is None
    await sync_to_async(claims.revoke)(node.id, actor=ROOT, now=clock.now())
    hand.now += 0.1
    memory.forget(str(node.id) if heard == "its id" else "")
    assert isinstance(await gate.prove(beat_of(node)), WrongCredential)


@pytest.mark.rule("http-1.1", "http-1.2")
async def test_what_memory_does_not_know_is_looked_up(database: Counted, hand: Hand) -> None:
    """Another process registered a node, restarted one and rotated a third: none of them is refused."""
    old = [await made(name=name, secret=secret * 64) for name, secret in (("w1", "a"), ("w2", "b"))]
    gate = HeartbeatAuthenticator(lambda: database, IdentityCache())
    assert await gate.prove(beat_of(old[0])) is None
    new = await made(name="w3", secret="c" * 64)
    await BackendNode.objects.filter(pk=old[0].pk).aupdate(instance="1" * 32)
    await BackendNode.objects.filter(pk=old[1].pk).aupdate(fingerprint=hash_secret("d" * 64))
    calls = beat_of(new, "c" * 64), beat_of(old[0], instance="1" * 32), beat_of(old[1], "d" * 64)
    assert [await gate.prove(call) for call in calls] == [None, None, None]


@pytest.mark.parametrize("heard", ["its id", "news may be missing"])
async def test_what_changes_while_it_is_read_is_not_remembered(
    database: Counted, hand: Hand, heard: str
) -> None:
    """The rows are read, then the secret is revoked and heard of, then the rows are stored: not this one."""
    node, memory = await made(), IdentityCache()

    class Late(Counted):
        async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
            found = await super().fetch_rows(statement, parameters)
            hand.now += 0.1
            memory.forget(str(node.id) if heard == "its id" else "")
            return found

    await memory.refresh(Late(database.pool))
    assert not memory.accepts(beat_of(node))


async def test_a_fleet_that_changed_is_read_as_a_whole(database: Counted, hand: Hand) -> None:
    """An admin labels a thousand nodes: one statement, not one for each beat."""
    fleet = [await made(name=f"w{number}", secret=f"{number:064x}") for number in range(20)]
    memory = IdentityCache()
    gate = HeartbeatAuthenticator(lambda: database, memory)
    assert await gate.prove(beat_of(fleet[0], f"{0:064x}")) is None
    for node in fleet:
        memory.forget(str(node.id))
    for number, node in enumerate(fleet):
        assert await gate.prove(beat_of(node, f"{number:064x}")) is None
    assert database.statements == [heartbeats.ALL_IDENTITIES_SQL] * 2


@pytest.mark.rule("http-1.2")
async def test_a_revoked_secret_writes_nothing_meanwhile(application: HeartbeatApplication) -> None:
    """Memory lets it pass; the batched UPDATE proves it again."""
    node = await made()
    assert (await beat(application, node.id, {"available_ram": 1}))[0] == 200
    await sync_to_async(claims.revoke)(node.id, actor=ROOT, now=clock.now())
    before = await BackendNode.objects.aget(pk=node.pk)
    assert (await beat(application, node.id, {"available_ram": 2}))[0] == 200
    after = await BackendNode.objects.aget(pk=node.pk)
    assert (after.available_ram, after.last_heartbeat) == (1, before.last_heartbeat)


async def test_many_at_once_wait_for_one_statement(database: Counted) -> None:
    """The first beats after a quiet time read the identities together."""
    fleet = [await made(name=f"w{number}", secret=f"{number:064x}") for number in range(20)]
    gate = HeartbeatAuthenticator(lambda: database, IdentityCache())
    calls = (gate.prove(beat_of(node, f"{number:064x}")) for number, node in enumerate(fleet))
    assert await asyncio.gather(*calls) == [None] * 20
    assert database.statements == [heartbeats.ALL_IDENTITIES_SQL]


async def test_a_web_process_hears_of_a_change(database: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NOTIFY of a revoked secret reaches the memory of a process that listens, before its age does."""
    monkeypatch.setattr(heartbeats, "IDENTITY_MAX_AGE", 600.0)
    node, memory = await made(), heartbeats.identity_cache()
    listening = asyncio.create_task(gateway._listen_for_notifications(WakeUps()))
    try:

        async def remembered() -> bool:
            await memory.refresh(database)
            return memory.accepts(beat_of(node))

        await until(remembered)
        await sync_to_async(claims.revoke)(node.id, actor=ROOT, now=clock.now())
        await until(lambda: not memory.accepts(beat_of(node)))
    finally:
        await cancellation.cancel_and_wait(listening)
        memory.forget("")
