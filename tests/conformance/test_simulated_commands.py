"""The control plane's command layer towards many workers, and towards workers of the reference."""

import asyncio
from typing import Any

import httpx
import pytest

from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import encode_galleries
from localai_cluster.messaging.nats import NatsBus
from nodes.commands import commands
from nodes.commands.commands import Worker
from nodes.commands.outcomes import Done, NoCommandListener, NoResponders, Outcome, Refused
from tests.conformance.conftest import Play
from tests.conformance.worker_support import NatsServer
from tests.conftest import until
from tests.support.simulator import Act, SimulatedWorker
from tests.support.simulator.script import MEBIBYTE, STOCK

IMAGE = (16 * MEBIBYTE, 57 * MEBIBYTE, 5 * MEBIBYTE)
MANY = 1000
GALLERIES = encode_galleries(
    (m.Gallery("http://a/index.yaml", "local"), m.Gallery("http://b/i.yaml", "more"))
)


def worker(bus: NatsBus, simulated: SimulatedWorker) -> Worker:
    return Worker(bus, simulated.node_id, simulated.name)


def asked(**more: Any) -> m.InstallRequest:
    return m.InstallRequest(**{"backend": "echo", "install_only": True, "op_id": "op", **more})


async def names_of(bus: NatsBus, simulated: SimulatedWorker) -> list[str]:
    listed = await worker(bus, simulated).backends()
    assert isinstance(listed, Done)
    return [entry.name for entry in listed.reply.backends]


async def test_a_thousand_installs_are_in_flight_at_once(
    play: Play, bus: NatsBus, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waits for another: all have arrived before the first is answered, each once, on one connection."""
    async with play(MANY, beat_every=60, backend_install=Act(seconds=3600, ticks=2)) as simulated:
        heard: set[str] = set()

        async def install(one: SimulatedWorker) -> Outcome[m.InstallReply]:
            def on_progress(event: m.ProgressEvent) -> None:
                heard.add(event.node_id)

            return await worker(bus, one).install(asked(), timeout=3600, on_progress=on_progress)

        running = [asyncio.create_task(install(one)) for one in simulated.workers]
        # 2 s on a machine with nothing else to do; how long it takes is the benchmark's matter.
        await until(lambda: simulated.count("backend.install") == MANY, what="all have arrived")
        assert {one.count("backend.install") for one in simulated.workers} == {1}
        await until(lambda: len(heard) == MANY, what="each has reported")
        assert not any(task.done() for task in running)
        async with httpx.AsyncClient() as client:
            links = (await client.get(f"http://127.0.0.1:{nats.port + 1}/connz")).json()["connections"]
        assert sorted(link["name"] for link in links) == ["simulated fleet", "test"]
        # A thousand answers at once take longer than one on a busy machine.
        monkeypatch.setattr(commands, "CANCEL_TIMEOUT", 60.0)
        cancels = (worker(bus, one).cancel("op") for one in simulated.workers)
        assert {type(outcome) for outcome in await asyncio.gather(*cancels)} == {Done}
        outcomes = await asyncio.gather(*running)
        assert {outcome.reason for outcome in outcomes if isinstance(outcome, Refused)} == {"cancelled"}
        assert len(outcomes) == MANY


@pytest.mark.rule("nats-4", "nats-4.1")
async def test_identical_installs_of_one_slot_are_one_round_trip(play: Play, bus: NatsBus) -> None:
    """All get the progress and the outcome; another slot, backend or address is another command."""
    heard: list[int] = []

    async def install(number: int, **more: Any) -> Outcome[m.InstallReply]:
        def on_progress(event: m.ProgressEvent) -> None:
            heard.append(number)

        request = m.InstallRequest(**{"backend": "echo", "model_id": "m", "op_id": f"op{number}", **more})
        return await worker(bus, one).install(request, timeout=60, on_progress=on_progress)

    async with play(backend_install=Act(seconds=1, ticks=2)) as simulated:
        one = simulated.workers[0]
        same = await asyncio.gather(*(install(number) for number in range(5)))
        assert len({outcome.reply.address for outcome in same if isinstance(outcome, Done)}) == 1
        assert (len(same), one.count("backend.install")) == (5, 1)
        assert set(heard) == set(range(5))
        others: tuple[dict[str, Any], ...] = (
            {"replica_index": 1},
            {"model_id": "n"},
            {"backend": "two"},
            {"uri": "/srv/echo"},
        )
        await asyncio.gather(*(install(number, **more) for number, more in enumerate(others)))
        assert one.count("backend.install") == 1 + len(others)
        assert isinstance(await install(9), Done)
        assert one.count("backend.install") == 2 + len(others), "a later one asks again"


@pytest.mark.rule("nats-4", "T-UNL-35", "nats-4.1")
@pytest.mark.parametrize("stock", [True, False], ids=["stock", "ours"])
@pytest.mark.parametrize(
    ("request_", "name"),
    [
        ({"backend": "", "uri": "oci://quay.io/org/engine:v1"}, "engine"),
        ({"backend": "", "uri": "/srv/engine"}, "engine"),
        ({"backend": "", "uri": "http://host/g/engine.tar.gz?x=1"}, "engine"),
        ({"backend": "", "uri": "/srv/engine", "name": "mine"}, "mine"),
        ({"backend": "local@mock", "backend_galleries": GALLERIES}, "mock"),
        ({"backend": "", "name": "mock"}, "mock"),
    ],
    ids=["image", "folder", "archive", "named", "gallery", "name alone"],
)
async def test_a_command_names_what_the_worker_will_find(
    play: Play, bus: NatsBus, stock: bool, request_: dict[str, Any], name: str
) -> None:
    """§4.1: an address alone, or a name after its gallery, fails on a stock worker once all has come."""
    async with play(stock=stock) as simulated:
        one = simulated.workers[0]
        for command in (asked(**request_), asked(**request_, force=True)):
            assert isinstance(await worker(bus, one).install(command, timeout=60), Done)
        assert await names_of(bus, one) == [name]
        upgrade = m.UpgradeRequest(**request_)
        assert isinstance(await worker(bus, one).upgrade(upgrade, timeout=60), Done)
        assert isinstance(await worker(bus, one).delete(f"local@{name}"), Done)
        assert await names_of(bus, one) == []


@pytest.mark.rule("nats-4", "nats-6")
async def test_a_forced_install_in_place_of_an_upgrade_names_it_too(
    play: Play, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RECONNECT_GRACE", 0.0)
    async with play(stock=True, knows=frozenset(STOCK) - {"backend.upgrade"}) as simulated:
        one = simulated.workers[0]
        outcome = await worker(bus, one).upgrade(m.UpgradeRequest("", uri="/srv/engine"), timeout=60)
        assert isinstance(outcome, Done)
        assert await names_of(bus, one) == ["engine"]
        sent = simulated.received("backend.install")[0].body
        assert (sent["backend"], sent["name"], sent["force"]) == ("engine", "engine", True)


@pytest.mark.rule("nats-4")
@pytest.mark.parametrize("stock", [True, False], ids=["stock", "ours"])
async def test_the_percentage_of_an_image_of_several_layers_rises(
    play: Play, bus: NatsBus, stock: bool
) -> None:
    """§4.3: a stock worker counts each layer from 0. Shown is the whole image, in every layer."""
    shown: list[float] = []

    def on_progress(event: m.ProgressEvent) -> None:
        shown.append(event.percentage)

    async with play(stock=stock, backend_install=Act(seconds=1, ticks=40, layers=IMAGE)) as simulated:
        one = worker(bus, simulated.workers[0])
        assert isinstance(await one.install(asked(), timeout=60, on_progress=on_progress), Done)
    assert shown == sorted(shown)
    assert (shown[-1], len(shown)) == (100, 40)
    assert shown[-2] > 90, "the layers add up"


async def test_a_cancel_tells_a_stock_worker_from_one_that_is_gone(play: Play, bus: NatsBus) -> None:
    async with play(stock=True) as simulated:
        one = simulated.workers[0]
        assert isinstance(await worker(bus, one).cancel("op"), NoCommandListener)
        await one.deafen()
        outcome = await worker(bus, one).cancel("op")
        assert type(outcome) is NoResponders
