"""What comes of a command to a worker, with the bus played by the test."""

import asyncio
import math
from typing import Any

import pytest

from localai_cluster import clock
from localai_cluster.messaging import messages as m
from localai_cluster.messaging import subjects
from localai_cluster.messaging.bus import BusError, NotConnected, RequestTimeout
from localai_cluster.messaging.bus import NoResponders as NobodyListens
from nodes.backends import commands
from nodes.backends.commands import Worker
from nodes.backends.outcomes import BusDown, Done, NoResponders, Refused, StillRunning, Unreadable
from tests.support.bus import NEVER, PlayedBus

LIST, INSTALL = subjects.backend_list("n"), subjects.backend_install("n")
HERE = m.ListReply((), instance="first")
STARTED = m.InstallReply(True, "127.0.0.1:7")


@pytest.fixture
def bus() -> PlayedBus:
    return PlayedBus()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses cost nothing; only our own connection's age is left as it is."""
    monkeypatch.setattr(commands, "PING_EVERY", 0.001)
    monkeypatch.setattr(commands, "_ASK_AGAIN", 0.0)
    monkeypatch.setattr(commands, "BUS_WAIT", 0.0)


def reconnected(bus: PlayedBus) -> None:
    """Our connection is new: workers may still be on their way back."""
    bus.generation, bus.connected_since = bus.generation + 1, clock.monotonic()


async def install(bus: PlayedBus) -> Any:
    found = Worker(bus, "n", "one").install(m.InstallRequest("echo"), timeout=30)
    return await asyncio.wait_for(found, 30)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (HERE, Done),
        (m.ListReply(error="disk gone"), Refused),
        (RequestTimeout("late"), StillRunning),
        (NobodyListens("nobody"), NoResponders),
        (b"[", Unreadable),
        (NotConnected("lost"), BusDown),
        (BusError("slow consumer"), BusDown),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_a_question_has_one_of_six_outcomes(bus: PlayedBus, reply: Any, outcome: type) -> None:
    bus.replies[LIST] = reply
    assert type(await Worker(bus, "n", "one").backends()) is outcome


async def test_a_refusal_carries_its_reason_and_the_reply(bus: PlayedBus) -> None:
    bus.replies |= {LIST: HERE, INSTALL: m.InstallReply(error="no such backend", interrupted=True)}
    refused = await install(bus)
    assert (refused.reason, refused.reply.interrupted) == ("no such backend", True)


async def test_our_own_lost_connection_does_not_end_a_command(bus: PlayedBus) -> None:
    """It is sent again when the bus is back; the worker joins the two."""

    def lost() -> Exception:
        reconnected(bus)
        return NotConnected("lost")

    bus.replies |= {LIST: [HERE, NobodyListens("early"), HERE], INSTALL: [lost, STARTED]}
    assert await install(bus) == Done(STARTED)
    assert len(bus.asked[INSTALL]) == 2


async def test_a_reply_that_was_lost_with_a_connection_is_asked_for_again(bus: PlayedBus) -> None:
    """The library may not notice that the connection is another one."""

    def here() -> m.ListReply:
        if len(bus.asked[LIST]) == 2:
            reconnected(bus)
        return HERE

    bus.replies |= {LIST: here, INSTALL: [NEVER, STARTED]}
    assert await install(bus) == Done(STARTED)


async def test_an_early_lack_of_a_listener_proves_nothing(bus: PlayedBus) -> None:
    """After a restart of NATS the workers come back some seconds after us."""
    reconnected(bus)
    absent = NobodyListens("early")
    bus.replies |= {LIST: [absent] * 5 + [HERE], INSTALL: [absent] * 5 + [STARTED]}
    assert await install(bus) == Done(STARTED)


async def test_a_worker_may_be_away_for_a_moment_while_a_command_runs(bus: PlayedBus) -> None:
    done = asyncio.Event()

    def here() -> Any:
        asked = len(bus.asked[LIST])
        if asked > 6:
            done.set()
        return NobodyListens("a moment") if asked % 2 == 0 else HERE

    async def reply() -> m.InstallReply:
        await done.wait()
        return STARTED

    bus.replies |= {LIST: here, INSTALL: reply}
    assert await install(bus) == Done(STARTED)


async def test_a_worker_that_is_not_there_is_told_at_once(bus: PlayedBus) -> None:
    """One question is enough while nothing was sent and our connection is old."""
    assert type(await install(bus)) is NoResponders
    assert len(bus.asked[LIST]) == 1


async def test_a_worker_that_vanishes_ends_the_command(bus: PlayedBus) -> None:
    bus.replies |= {LIST: [HERE, HERE, NobodyListens("gone")], INSTALL: NEVER}
    assert await install(bus) == NoResponders("node one stopped answering on the bus")


async def test_a_worker_that_never_comes_back_after_a_restart_of_the_bus(
    bus: PlayedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "SETTLED_AFTER", 0.05)
    reconnected(bus)
    assert type(await install(bus)) is NoResponders
    assert clock.monotonic() - bus.connected_since >= 0.05


async def test_a_restarted_worker_has_forgotten_the_command(bus: PlayedBus) -> None:
    bus.replies |= {LIST: [HERE, m.ListReply((), instance="second")], INSTALL: NEVER}
    assert await install(bus) == NoResponders("the worker of node one was restarted")


async def test_a_worker_without_this_command_does_not_respond(bus: PlayedBus) -> None:
    """It lists its backends, but nothing listens for the command, twice."""
    bus.replies[LIST] = HERE
    assert type(await install(bus)) is NoResponders
    assert len(bus.asked[INSTALL]) == 2


@pytest.mark.parametrize("pending", [NEVER, RequestTimeout("late")], ids=["no reply", "library"])
async def test_no_reply_in_time_is_no_failure(bus: PlayedBus, pending: Any) -> None:
    if pending is NEVER:
        bus.replies[LIST] = RequestTimeout("a frozen worker")
    else:
        bus.replies |= {LIST: HERE, INSTALL: pending}
    assert type(await install(bus)) is StillRunning


async def test_a_bus_that_stays_away_is_told(bus: PlayedBus) -> None:
    bus.connected_since = -math.inf
    bus.replies[LIST] = NotConnected("lost")
    assert type(await install(bus)) is BusDown
