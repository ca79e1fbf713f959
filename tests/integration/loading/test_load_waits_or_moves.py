"""A load that cannot go on at its node waits there, tries another one, or ends; it says why."""

import asyncio
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NoResponders, NotConnected, RequestTimeout
from localai_cluster.rpc.errors import Lost
from nodes.backends import intents
from nodes.commands import commands
from nodes.definitions.folder import Folder
from nodes.loading import load, load_placement
from nodes.loading.load_attempts import LoadFailed
from nodes.models import NodeBackend, NodeModel
from nodes.placement.load_times import from_payload
from nodes.replicas import engines
from nodes.replicas.stops import Stopper
from operations.executor.work import Abandoned, Postpone, WakeUps, in_thread
from operations.models import Operation
from tests.conftest import until
from tests.support import hot
from tests.support import intents as wished
from tests.support.bus import NEVER
from tests.support.loading import BACKEND, STARTED, Stage, left, loads, stage, stops

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)


def vanishes_while_installing(stage: Stage) -> Callable[[], bool]:
    def happens() -> bool:
        for held in wished.claim():
            failed = {(held.id, held.fence): (intents.Failed("worker gone"), ())}
            assert not intents.record_outcomes(failed, now=clock.now())
            return True
        return False

    return happens


async def test_a_load_leaves_a_worker_that_vanished_while_it_installed(stage: Stage) -> None:
    """Rule 4: the installation goes on when its worker is back; the load tries elsewhere meanwhile."""
    stage.lists(stage.one)
    stage.lists(stage.two, BACKEND)
    await hot.in_thread(stage.need_until)
    ended = await stage.play(vanishes_while_installing(stage))
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.seconds) == (True, 0), "the node rests, the load does not"
    assert ended.payload is not None
    assert list(from_payload(ended.payload)) == [stage.one.id]
    assert await hot.in_thread(NodeModel.objects.count) == 0


def refused_by(stage: Stage) -> None:
    """The first node's worker has refused to install the backend, for another load."""
    wished.ask(wished.INSTALL, stage.one)
    (held,) = wished.claim()
    assert not intents.record_outcomes(
        {(held.id, held.fence): (intents.Ended("no room"), ())}, now=clock.now()
    )


@pytest.mark.parametrize("since", ["now", "long-ago", "installed-since"])
async def test_a_node_that_refused_the_backend_of_late_comes_last(stage: Stage, since: str) -> None:
    """Review R9: after an engine's death the next load went there first, and failed to install again."""

    def happened() -> None:
        refused_by(stage)
        if since == "long-ago":
            ago = clock.now() - timedelta(hours=1)
            Operation.objects.filter(kind=wished.INSTALL).update(finished_at=ago)
        if since == "installed-since":
            NodeBackend.objects.create(node=stage.one, name="Echo")

    await hot.in_thread(happened)
    for node in (stage.one, stage.two):
        stage.lists(node, BACKEND)
    stage.installs(stage.one, m.InstallReply(error="one was asked"))
    stage.installs(stage.two, m.InstallReply(error="two was asked"))
    ended = await stage.play()
    assert f"{'two' if since == 'now' else 'one'} was asked" in str(ended)


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "waiting"])
@pytest.mark.parametrize("kind", [wished.UPGRADE, wished.DELETE])
@pytest.mark.rule("O34")
async def test_a_load_tries_elsewhere_while_its_backend_is_being_deleted(
    stage: Stage, kind: str, begun: bool
) -> None:
    """Another command on the backend keeps it from being installed; that is no failure of the load.

    A deletion that has not begun stands too: a load never takes the place of what somebody asked for.
    """
    asked: list[Operation] = []

    def busy() -> None:
        asked.append(wished.ask(kind, stage.one))
        if begun:
            wished.claim()
        stage.need_until()

    stage.lists(stage.one)
    stage.lists(stage.two, BACKEND)
    await hot.in_thread(busy)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    verb, state = kind.removeprefix("backend_"), "in progress" if begun else "waiting"
    assert ended.reason.startswith(f"{verb} echo on one is {state}")
    assert str(asked[0].id) in ended.reason
    await hot.in_thread(asked[0].refresh_from_db)
    assert asked[0].status == ("processing" if begun else "pending")
    assert ended.payload is not None
    assert list(from_payload(ended.payload)) == [stage.one.id]
    assert await hot.in_thread(NodeModel.objects.count) == 0


async def test_a_load_waits_while_the_models_folder_hangs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 4: the operation says why it waits and looks again; the controller goes on."""
    goes_on, plain = threading.Event(), os.scandir

    def hanging(path: Any) -> Any:
        goes_on.wait()
        return plain(path)

    monkeypatch.setattr("nodes.definitions.folder.os.scandir", hanging)
    stage.handler = load.LoadModel(stage.bus, Folder(stage.folder, limit=0.05), WakeUps())
    try:
        ended = await stage.play()
    finally:
        goes_on.set()
    assert isinstance(ended, Postpone), ended
    assert ("does not answer" in ended.reason, ended.seconds) == (True, 5.0)


async def test_a_load_ends_when_its_slot_is_gone(stage: Stage) -> None:
    """A node that fell silent, left or started again takes its rows away; those who wait for it stop.

    The worker here is a stock one: it does not name its process, so nothing else tells that it was restarted.
    """
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, NEVER)
    await hot.in_thread(stage.need_until)

    def silent() -> bool:
        if not stage.bus.asked[messages.subject("backend.install", str(stage.one.id))]:
            return False
        with transaction.atomic():
            return engines.depart(stage.one.id, now=clock.now()) > 0

    ended = await stage.play(silent)
    assert isinstance(ended, Postpone), ended
    await Stopper(stage.bus).run_pass()
    assert stage.bus.stops(stage.one.id) == ["echo#0"], "its engine may live on"


async def test_anyone_who_came_later_keeps_the_load_alive(stage: Stage) -> None:
    """The wish is read when the attempt ends, not when it began."""
    stage.lists(stage.one, BACKEND)
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended


async def test_an_engine_stopped_while_it_started_is_started_again(stage: Stage) -> None:
    """A stop meant for an earlier attempt may meet the engine of this one: no failure of the model."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, m.InstallReply(error="was stopped while it started", interrupted=True))
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended


@pytest.mark.parametrize("silence", ["no listener", "no answer"])
async def test_twelve_dead_nodes_cost_one_attempt_a_short_wait(
    stage: Stage, silence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead nodes that still count as healthy rank first; the one that lives gets the load all the same."""
    monkeypatch.setattr(load_placement, "ANSWER_WITHIN", 0.05)
    dead = [
        *(stage.one, stage.two),
        *[await hot.in_thread(partial(hot.node, f"dead-{number}", available_vram=9)) for number in range(10)],
    ]
    alive = await hot.in_thread(hot.node, "local")
    stage.lists(alive, BACKEND)
    stage.installs(alive, NEVER)
    for node in dead if silence == "no answer" else []:
        stage.bus.replies[messages.subject("backend.list", str(node.id))] = NEVER
    await hot.in_thread(stage.need_until)

    def placed() -> bool:
        return NodeModel.objects.filter(node=alive, state="loading").exists()

    attempt = asyncio.create_task(stage.handler(stage.work))

    async def started() -> bool:
        assert not attempt.done(), attempt.exception()
        return await hot.in_thread(placed)

    await until(started)
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    asked = [messages.subject("backend.list", str(node.id)) for node in dead]
    assert [len(stage.bus.asked[subject]) for subject in asked] == [1] * len(dead)


async def test_a_load_whose_nodes_are_all_silent_waits_and_says_so(stage: Stage) -> None:
    """Each node rests for longer and longer; the load looks when the first one has rested."""
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.reason) == (
        True,
        "no node can take it: 2 not answering or failed a moment ago",
    )
    assert 0 < ended.seconds <= 1
    assert ended.payload is not None
    known = from_payload(ended.payload)
    assert {id: setback.times for id, setback in known.items()} == {stage.one.id: 1, stage.two.id: 1}


@pytest.mark.rule("R2.49")
async def test_without_the_bus_no_node_is_blamed(stage: Stage) -> None:
    """This controller has lost its connection: nothing is known of the nodes, and no node's change helps."""
    for node in (stage.one, stage.two):
        stage.bus.replies[messages.subject("backend.list", str(node.id))] = NotConnected("lost")
    await hot.in_thread(stage.need_until)
    ended = await stage.play()
    assert isinstance(ended, Postpone), ended
    assert (ended.waiting, ended.payload) == (False, None)
    assert "message bus" in ended.reason


async def test_a_load_that_no_one_wants_any_more_says_so_at_its_next_look(stage: Stage) -> None:
    """Its end is the one that the pages tell beforehand."""
    ended = await stage.play()
    assert isinstance(ended, Abandoned), ended
    assert "2 not answering" in str(ended)


async def test_a_lost_bus_and_an_early_lack_of_a_listener_move_no_load(
    stage: Stage, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on with what it was told: the load stays with it."""
    monkeypatch.setattr(commands, "_RETRY_PAUSE_SECONDS", 0.0)

    def lost() -> Exception:
        stage.bus.generation += 1
        stage.bus.connected_since = clock.monotonic()
        return NotConnected("lost")

    listed = m.ListReply((BACKEND,))
    absent = NoResponders("early")
    stage.bus.replies[messages.subject("backend.list", str(stage.one.id))] = [listed, absent, absent, listed]
    stage.installs(stage.one, [lost, STARTED])
    assert (await stage.handler(stage.work))["node"] == "one"
    assert stage.bus.stops(stage.one.id) == []
    assert await hot.in_thread(left) == [], "the replica accounts for the engine"


async def test_a_start_that_takes_long_is_waited_for(stage: Stage, loads: list[Any]) -> None:
    """The time limit is no failure while the worker is there and a request waits."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, [RequestTimeout("late"), STARTED])
    await hot.in_thread(stage.need_until)
    assert (await stage.handler(stage.work))["node"] == "one"


async def test_only_deaths_of_the_engine_count_as_deaths(stage: Stage, loads: list[Any]) -> None:
    """Attempts that were put off for other reasons say nothing about the model."""
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    await hot.in_thread(stage.need_until)
    await in_thread(Operation.objects.update, attempts=9)
    for deaths in (1, 2):
        loads.append(Lost("the engine died"))
        ended = await stage.play()
        assert isinstance(ended, Postpone), ended
        assert ended.payload is not None
        assert ended.payload["engine_deaths"] == deaths
        # The node is not avoided here: what follows is about the count alone.
        await in_thread(Operation.objects.update, payload={"engine_deaths": deaths})
        await stops(stage)
    loads.append(Lost("the engine died"))
    ended = await stage.play()
    assert isinstance(ended, LoadFailed), ended
