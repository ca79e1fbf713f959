"""Registrations that arrive together: one transaction for all, and every caller its own answer."""

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock, errors, logs
from nodes.api import registrations
from nodes.api.registrations import Registrar
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeLabel, NodeModel
from nodes.registry import registration
from nodes.registry.claims import revoke
from nodes.registry.registration import Claim, Registration
from tests.support import api

pytestmark = pytest.mark.django_db(transaction=True)
ROOT = Actor(ActorKind.USER, "root")
FLEET = [f"w{number}" for number in range(12)]


@pytest.fixture(autouse=True)
def no_connection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A web process gives connections back to its pool; here each thread's own one is closed."""
    monkeypatch.setattr("channels.db.close_old_connections", connections.close_all)


def claim(name: str, secret: str | None = None, **fields: Any) -> Claim:
    told = Registration(name=name, address="127.0.0.1:1", labels={"tier": name}, **fields)
    secret = api.secret_of(name) if secret is None else secret
    return registration.claim(told, secret=secret, source_address="127.0.0.1")


def together(*claims: Claim) -> list[Any]:
    """Registers all of them at once, as if each had come with a request of its own."""

    async def run() -> list[Any]:
        registrar = Registrar()
        return await asyncio.gather(*map(registrar.register, claims), return_exceptions=True)

    return asyncio.run(run())


def names(found: list[Any]) -> list[str]:
    return [
        one.node.name if isinstance(one, registration.Registered) else type(one).__name__ for one in found
    ]


@pytest.mark.rule("R1.22", "R1.30", "http-1.1")
def test_a_fleet_costs_what_one_node_costs() -> None:
    """The number of statements does not depend on the number of nodes; each node gets what is its own."""
    spent = []
    for fleet in (FLEET[:1], FLEET[1:]):
        with CaptureQueriesContext(connection) as seen:
            registration.register_all([claim(name) for name in fleet], now=clock.now(), auto_approve=True)
        spent.append(len(seen))
    assert spent[0] == spent[1]
    labels = NodeLabel.objects.filter(key="tier").values_list("node__name", "value")
    assert dict(labels) == {name: name for name in FLEET}
    assert set(BackendNode.objects.values_list("status", "revision")) == {("healthy", 1)}
    assert NodeEvent.objects.filter(kind="registered").count() == len(FLEET)


@pytest.mark.rule("http-1.1", "R1.22")
def test_one_wrong_claim_harms_no_other() -> None:
    """A revoked secret among them: it is refused, the others register, and none of them twice."""
    node = api.make_node("old")
    revoke(node.id, actor=ROOT, now=clock.now())
    found = together(*map(claim, FLEET[:3]), claim("new", api.secret_of("old")), *map(claim, FLEET[3:6]))
    assert names(found) == [*FLEET[:3], "Forbidden", *FLEET[3:6]]
    assert not BackendNode.objects.filter(name="new").exists()
    assert set(BackendNode.objects.filter(name__in=FLEET).values_list("revision", flat=True)) == {1}


@pytest.mark.rule("http-1.1", "R1.22")
def test_a_conflict_among_them_is_recorded() -> None:
    """The claimant gets 409 and an admin sees the claim; the others register in the same transaction."""
    node = api.make_node("w0")
    found = together(claim("w1"), claim("w0", "f" * 64), claim("w2"))
    assert names(found) == ["w1", "Conflict", "w2"]
    assert NodeConflict.objects.get().node_id == node.id


@pytest.mark.rule("R1.22", "http-1.1")
def test_the_same_name_or_secret_twice() -> None:
    """They follow one another: the second finds what the first has made."""
    twice = together(claim("w1"), claim("w1"), claim("w1", "f" * 64), claim("w9", api.secret_of("w1")))
    assert names(twice) == ["w1", "w1", "Conflict", "Conflict"]
    assert BackendNode.objects.get().revision == 2


@pytest.mark.rule("R1.12", "R1.14")
def test_each_loses_the_replicas_that_it_does_not_list() -> None:
    """One lists its process, one does not say, one is new."""
    kept, lost = api.make_node("w1"), api.make_node("w2")
    for node in (kept, lost):
        NodeModel.objects.create(node=node, model_name="m", phase="serving", address="127.0.0.1:1")
    together(
        claim("w1", running_processes=[registration.Running("m#0", "127.0.0.1:1")]), claim("w2"), claim("w3")
    )
    assert list(NodeModel.objects.values_list("node__name", flat=True)) == ["w1"]


def test_each_event_names_its_own_request() -> None:
    """The timeline leads from a node to the log lines of its own registration."""
    claims = []
    for name in FLEET:
        with logs.with_request_id(f"request-of-{name}"):
            claims.append(claim(name))
    together(*claims)
    told = NodeEvent.objects.values_list("node_name", "request_id").distinct()
    assert set(told) == {(name, f"request-of-{name}") for name in FLEET}


async def test_a_row_that_somebody_holds_delays_its_own_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared transaction gives up on it; the others register while it goes on waiting."""
    monkeypatch.setattr(registrations, "SHARED_LOCK_TIMEOUT", 0.1)
    held = await sync_to_async(api.make_node)("w0")
    release = asyncio.Event()

    def hold(loop: asyncio.AbstractEventLoop, has_it: asyncio.Event) -> None:
        with transaction.atomic():
            BackendNode.objects.select_for_update().get(pk=held.pk)
            loop.call_soon_threadsafe(has_it.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)
        connection.close()

    has_it = asyncio.Event()
    holding = asyncio.create_task(asyncio.to_thread(hold, asyncio.get_running_loop(), has_it))
    await has_it.wait()
    registrar = Registrar()
    waiting = asyncio.create_task(registrar.register(claim("w0")))
    others = await asyncio.gather(*(registrar.register(claim(name)) for name in FLEET[1:4]))
    assert names(list(others)) == FLEET[1:4]
    assert not waiting.done()
    release.set()
    assert (await waiting).node.pk == held.pk
    await holding
    await sync_to_async(connections.close_all)()


def test_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every caller gets an answer."""

    def gone(*_: Any, **__: Any) -> None:
        raise errors.Unavailable("the database is unavailable")

    monkeypatch.setattr(registration, "register_all", gone)
    monkeypatch.setattr(registration, "register_one", gone)
    assert names(together(*map(claim, FLEET))) == ["Unavailable"] * len(FLEET)
