"""Routing by prefix through the edge: scripted engines, rows, and what other processes are told."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from pytest_django import Settings

from localai_cluster.asgi import application
from localai_cluster.kit import clock, errors
from localai_cluster.kit.database_pool import Pool
from localai_cluster.kit.errors import Unavailable
from localai_cluster.messaging.nats import NatsBus
from localai_cluster.messaging.servers import parse_url
from nodes.gateway import gateway
from nodes.gateway.prefix_routing import PrefixRouter, PrefixService
from nodes.gateway.prefix_table import prompt_chain
from nodes.gateway.prefix_updates import PrefixObserved
from nodes.gateway.request import InferenceRequest, Replica
from nodes.loading import load_request
from nodes.models import ModelSchedulingConfig, PrefixPressure
from nodes.reconcilers import replicas
from nodes.replicas import engines, hooks
from nodes.replicas.hooks import ALL_REPLICAS, RemovedReplica
from nodes.scheduling import pressure, store
from nodes.scheduling.rules import Rule
from operations.changes import events
from operations.models import Operation, Status
from tests.conformance.worker_support import NatsServer
from tests.conftest import until
from tests.support import hot
from tests.support.answering import CHAT, definitions
from tests.support.scripted import Scripted, running, words

__all__ = ["definitions"]
pytestmark = pytest.mark.django_db(transaction=True)

NODE = UUID(int=9)


def body(system: str, question: str = "and now?") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages}


LAW, COOKING = body("You know the law. " * 60), body("You cook. " * 100)


@asynccontextmanager
async def two_engines(prefixes: PrefixRouter) -> AsyncIterator[tuple[hot.Client, list[Scripted], Any]]:
    """Two replicas of `m` on two nodes."""
    engines = [Scripted(words("Yes.")), Scripted(words("No."))]
    async with AsyncExitStack() as stack:
        picker = await stack.enter_async_context(hot.serving(prefixes))
        for number, engine in enumerate(engines):
            address = await stack.enter_async_context(running(engine))
            await hot.in_thread(
                lambda n=number, a=address: hot.replica(hot.node(f"n{n}", id=UUID(int=n + 1)), "m", address=a)
            )
        yield hot.Client(application), engines, picker


async def say(client: hot.Client, asked: dict[str, Any]) -> None:
    reply = await client.post(CHAT, asked)
    assert reply is not None
    assert reply.status == 200, reply.body


@pytest.mark.rule("R3.7", "R3.17", "T-ROU-29", "T-ROU-30", "T-CTX-10", "T-CTX-12", "T-PFX-56")
def test_a_prompt_goes_where_its_beginning_was() -> None:
    """Each beginning stays with its replica, for one statement in and one out, as without prefixes."""
    told: list[Any] = []

    async def scenario() -> tuple[list[int], int]:
        prefixes = PrefixRouter(300.0, told.append)
        async with two_engines(prefixes) as (client, engines, picker):
            await say(client, LAW)
            await say(client, COOKING)
            for question in ("one", "two", "three"):
                before = picker.connection.executed
                for asked in (LAW, COOKING):
                    messages = [asked["messages"][0], {"role": "user", "content": question}]
                    await say(client, asked | {"messages": messages})
                await picker.settle()
                assert picker.connection.executed - before <= 4
            return [len(engine.asked) for engine in engines], picker.connection.executed

    counts, _ = asyncio.run(scenario())
    assert counts == [4, 4]
    first = told[0]
    assert isinstance(first, PrefixObserved)
    prompt = "".join(f"{one['role']}\n{one['content']}\n" for one in LAW["messages"])
    assert (first.model, first.chain, first.replica) == ("m", prompt_chain("m", prompt.encode()), 0)
    assert len(told) == 8, "each question is new at its end"


@pytest.mark.rule("R3.1", "T-ROU-28", "T-CTX-11", "T-CTX-13")
@pytest.mark.parametrize("how", ["switched off", "by rule"])
def test_without_it_prompts_do_not_count(settings: Settings, how: str) -> None:
    """R3.1: routing is that of R1.78, and nothing is remembered."""
    if how == "switched off":
        settings.CLUSTER = dataclasses.replace(settings.CLUSTER, prefix_cache=False)
    else:
        ModelSchedulingConfig.objects.create(model_name="m", route_policy="round_robin")
    prefixes = hot.alone()

    async def scenario() -> list[int]:
        async with two_engines(prefixes) as (client, engines, _):
            for _ in range(4):
                await say(client, LAW)
            return [len(engine.asked) for engine in engines]

    assert asyncio.run(scenario()) == [2, 2]
    assert prefixes.entries() == 0


@pytest.mark.rule("R3.23", "R3.21", "T-ROU-37", "T-PFX-50", "R1.106", "R1.102")
def test_a_removed_replica_is_forgotten_by_every_process() -> None:
    """Every process may remove the row: a NOTIFY of the same transaction tells it."""
    prefixes = hot.alone()

    def hot_place() -> tuple[UUID, int] | None:
        request = InferenceRequest(model="m", chain=(1, 2, 3))
        prefixes.set_preferred_replica(request)
        return request.preferred

    def remove() -> None:
        node = hot.node(id=NODE)
        gone = hot.replica(node, "m", state="unloading")
        assert engines.confirm_end(gone.pk)

    async def scenario() -> None:
        async with hot.serving(prefixes):
            # The listener forgets everything once, when it has connected.
            prefixes._affinity.observe("other", (1,), (NODE, 0), clock.monotonic())
            await until(lambda: prefixes.entries() == 0)
            for index in range(2):
                prefixes._affinity.observe("m", (1, 2, 3)[: 3 - index], (NODE, index), clock.monotonic())
            assert hot_place() == (NODE, 0)
            await hot.in_thread(remove)
            await until(lambda: hot_place() == (NODE, 1))

    asyncio.run(scenario())


async def test_a_process_that_has_started_keeps_what_it_learns(settings: Settings) -> None:
    """The first connection for notifications clears the tables, so it comes before the first request."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, database_url=hot.database_url())

    def notify() -> None:
        events.notify(hooks.CHANNEL, hooks.encode(RemovedReplica("m", NODE, 1)))

    await gateway.start()
    try:
        running = gateway._running_resources
        assert running is not None
        assert running.by_prefix is not None
        prefixes = running.by_prefix.prefixes
        land(prefixes, b"law " * 200)
        removed = prompt_chain("m", b"cook " * 200)
        prefixes._affinity.observe("m", removed, (NODE, 1), clock.monotonic())
        assert advised(prefixes, b"cook " * 200) == (NODE, 1)
        await hot.in_thread(notify)
        await until(lambda: advised(prefixes, b"cook " * 200) is None)
        assert advised(prefixes, b"law " * 200) == (NODE, 0)
    finally:
        await gateway.stop()


@pytest.mark.rule("R3.20", "R3.21", "R3.23", "T-PFX-52", "T-PFX-53", "T-PFX-55", "nats-7.4")
async def test_processes_tell_each_other_over_the_bus(tmp_path: Path) -> None:
    """What one learns the others know, from the end of their start on; a removal is heard by all; nobody
    hears himself; without a bus each goes on alone, and together again when it is back."""
    server = NatsServer(tmp_path)
    await server.start()
    services = []
    for number in range(2):
        bus = NatsBus(parse_url(server.url), name=f"web {number}", echo=False)
        bus.start()
        services.append(PrefixService(300.0, bus))
        await services[-1].start(None, uuid4())  # type: ignore[arg-type]  # nothing is reported
    one, two = services
    try:
        land(one.prefixes, b"law " * 200)
        await until(lambda: two.prefixes.entries() == one.prefixes.entries() > 0)
        assert advised(two.prefixes, b"law " * 200) == (NODE, 0)
        two._outbox.queue_removal(RemovedReplica("m", NODE, ALL_REPLICAS))
        await until(lambda: advised(one.prefixes, b"law " * 200) is None)
        assert advised(two.prefixes, b"law " * 200) == (NODE, 0), "it hears of its own removals by NOTIFY"

        server.stop()
        await until(lambda: not one._bus.connected and not two._bus.connected)
        land(one.prefixes, b"cook " * 200)
        assert advised(one.prefixes, b"cook " * 200) == (NODE, 0)
        assert advised(two.prefixes, b"cook " * 200) is None
        await server.start()
        for service in services:
            await service._bus.wait_connected(after=1)
        land(one.prefixes, b"sing " * 200)
        await until(lambda: advised(two.prefixes, b"sing " * 200) == (NODE, 0))
    finally:
        for service in services:
            await service.stop()
        server.stop()
    assert not hooks.on_removed


def land(prefixes: PrefixRouter, prompt: bytes) -> None:
    request = asked(prompt)
    prefixes.set_preferred_replica(request)
    request.is_prefix_cached, request.replica = False, Replica(uuid4(), NODE, 0, "m", "a:1")
    prefixes.record_pick(request)


def advised(prefixes: PrefixRouter, prompt: bytes) -> tuple[UUID, int] | None:
    request = asked(prompt)
    prefixes.set_preferred_replica(request)
    return request.preferred


def asked(prompt: bytes) -> InferenceRequest:
    return InferenceRequest(model="m", chain=prompt_chain("m", prompt))


# --- pressure


def kept_away(prefixes: PrefixRouter, times: int = 1) -> None:
    """So many requests did not get the replica that remembers them."""
    for _ in range(times):
        request = asked(b"law " * 200)
        request.preferred, request.cached_ratio, request.is_prefix_cached = (NODE, 0), 1.0, True
        request.replica = Replica(uuid4(), NODE, 1, "m", "a:1")
        prefixes.record_pick(request)


def report(prefixes: PrefixRouter, process: UUID) -> None:
    async def scenario() -> None:
        opened = Pool(hot.database_url())
        await opened.open()
        try:
            await prefixes.report_pressure(opened, process)
        finally:
            await opened.close()

    asyncio.run(scenario())


def loads() -> int:
    return Operation.objects.filter(kind=load_request.KIND, element="m").count()


@pytest.fixture
def crowd() -> None:
    """A rule for up to four, and two replicas with room for more: one of them idle."""
    node = hot.node(max_replicas_per_model=9)
    hot.replica(node, "m", index=0, last_used=clock.now(), in_flight=1)
    hot.replica(node, "m", index=1, last_used=clock.now())
    store.set_rule(Rule("m", min_replicas=1, max_replicas=4), clock.now())


@pytest.mark.rule("R4.13", "R3.19", "T-REC-9", "T-REC-11", "T-REC-13", "T-PFX-45")
def test_pressure_of_all_processes_loads_one_more_once(crowd: None, settings: Settings) -> None:
    """R4.13: what processes report adds up; a report made twice counts once; what led to a load is over."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, prefix_pressure=3)
    (one, first), (two, second) = ((hot.alone(), uuid4()), (hot.alone(), uuid4()))
    kept_away(one, 2)
    report(one, first)
    one._unreported.add("m")
    report(one, first)
    assert pressure.pressure_by_model(["m"], clock.now()) == {"m": 2}
    replicas.run_pass(tick=True)
    assert loads() == 0
    kept_away(two)
    report(two, second)
    assert pressure.pressure_by_model(["m", "n"], clock.now()) == {"m": 3}
    replicas.run_pass(tick=True)
    assert loads() == 1
    rule = ModelSchedulingConfig.objects.get()
    assert rule.reason.startswith("3 requests within a minute")
    assert rule.pressure_ended_at is not None
    Operation.objects.update(status=Status.COMPLETED, finished_at=clock.now())
    one._unreported.add("m")
    report(one, first)
    replicas.run_pass(tick=True)
    assert loads() == 1, "told again, but over"
    kept_away(one, 3)
    report(one, first)
    replicas.run_pass(tick=True)
    assert loads() == 2


@pytest.mark.rule("R4.13", "R4.16", "T-REC-12")
def test_a_load_that_is_refused_keeps_the_pressure(
    crowd: None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R4.13: only what was asked for ends it. R4.16: a threshold of 0 means 1."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, prefix_pressure=0)
    prefixes = hot.alone()
    kept_away(prefixes)
    report(prefixes, uuid4())

    def refuse(*_: Any, **__: Any) -> None:
        raise errors.Conflict("the model is being unloaded")

    with monkeypatch.context() as patched:
        patched.setattr(load_request, "request_scale_up", refuse)
        replicas.run_pass(tick=True)
    rule = ModelSchedulingConfig.objects.get()
    assert rule.reason.endswith("refused: the model is being unloaded")
    assert rule.pressure_ended_at is None
    replicas.run_pass(tick=True)
    assert loads() == 1


@pytest.mark.rule("R3.19")
def test_reports_that_nobody_renews_are_deleted_by_the_next_one() -> None:
    """Of processes that have ended; a report that was lost is made again whole."""
    old, prefixes = uuid4(), hot.alone()
    ago = clock.now() - 3 * pressure.PRESSURE_WINDOW
    PrefixPressure.objects.create(process_id=old, model_name="m", times=[ago.isoformat()], reported_at=ago)
    assert pressure.pressure_by_model(["m"], clock.now()) == {}
    kept_away(prefixes, 2)

    async def cut() -> None:
        with pytest.raises(Unavailable):
            await prefixes.report_pressure(_Cut(), uuid4())  # type: ignore[arg-type]

    asyncio.run(cut())
    report(prefixes, uuid4())
    (row,) = PrefixPressure.objects.all()
    assert (row.process_id != old, len(row.times)) == (True, 2)
    before = row.reported_at
    report(prefixes, uuid4())
    assert PrefixPressure.objects.get().reported_at == before, "nothing new, nothing written"


class _Cut:
    async def run(self, *_: Any) -> int:
        raise Unavailable
