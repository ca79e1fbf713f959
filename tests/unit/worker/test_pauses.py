"""A worker that did not run for a while does not begin what may have been given up meanwhile."""

import dataclasses
import json
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Message
from localai_cluster.messaging.messages import decode, encode
from localai_cluster.worker import commands
from localai_cluster.worker.commands import CATCH_UP_SECONDS, PAUSE_THRESHOLD_SECONDS, Commands, Pauses
from localai_cluster.worker.install_commands import InstallCommands
from tests.conftest import until
from tests.support.bus import PlayedBus
from tests.support.effort import EFFORT
from tests.support.message_faults import faulty

PAUSED = PAUSE_THRESHOLD_SECONDS + 1


def ticked(*, after: float) -> tuple[Pauses, float]:
    """Pauses whose last tick came so late, and when that was."""
    found = Pauses()
    found.tick(began := clock.since_boot())
    found.tick(began + after)
    return found, began + after


@pytest.mark.parametrize(
    ("after", "arrived", "late"),
    [
        (1.0, -0.5, False),
        (1.0, 0.5, False),
        (PAUSE_THRESHOLD_SECONDS, -0.5, False),
        (PAUSED, -0.5, True),
        (PAUSED, 0.5, True),
        (PAUSED, CATCH_UP_SECONDS, True),
        (PAUSED, CATCH_UP_SECONDS + 0.1, False),
        (1.0, PAUSED, True),
    ],
    ids=[
        "between two ticks", "after a tick", "a busy machine", "before the pause", "read first after it",
        "read with it", "sent afterwards", "read before the tick that notices",
    ],
)  # fmt: skip
@pytest.mark.rule("nats-6.1")
def test_what_may_have_been_sent_before_a_pause(after: float, arrived: float, late: bool) -> None:
    """The message is read so many seconds after the last tick."""
    found, last = ticked(after=after)
    assert found.may_precede(last + arrived) == late


@pytest.mark.rule("nats-6.1")
async def test_a_pause_is_noticed_and_over_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ticks go on for as long as the worker lives."""
    monkeypatch.setattr(commands, "_TICK_SECONDS", 0.001)
    found = Pauses()
    found._ticked_at -= PAUSED

    async with found.watched():
        await until(lambda: not found.may_precede(clock.since_boot()))


REQUESTS: dict[str, tuple[object, Any]] = {
    messages.subject("backend.install", "n"): (m.InstallRequest("b", install_only=True), m.InstallReply),
    messages.subject("backend.upgrade", "n"): (m.UpgradeRequest("b"), m.UpgradeReply),
    messages.subject("backend.delete", "n"): (m.DeleteRequest("b"), m.DeleteReply),
}


async def handlers(found: Pauses) -> dict[str, Any]:
    """Those of a worker that has nothing else: whatever begins fails."""
    bus = PlayedBus()
    nothing = cast(Any, None)
    installs = InstallCommands(*[nothing] * 6)
    await Commands(nothing, bus, nothing, nothing, installs, "i", found, lambda: None, nothing).subscribe("n")
    return bus.handlers


@pytest.mark.parametrize("subject", REQUESTS)
@pytest.mark.rule("nats-6.1", "H15")
async def test_a_late_command_is_not_begun_and_may_be_asked_again(subject: str) -> None:
    """A frozen worker carried out on waking what had been given up long before."""
    found, last = ticked(after=PAUSED)
    request, kind = REQUESTS[subject]
    handle = (await handlers(found))[subject]
    late = decode(await handle(Message(subject, encode(request), True, last)), kind)
    assert (late.success, late.interrupted) == (False, True)
    begun = await handle(Message(subject, encode(request), True, last + PAUSED - 1))
    assert not decode(begun, kind).interrupted


@pytest.mark.rule("nats-6.1")
async def test_late_questions_are_answered_and_a_late_removal_of_files_is_not() -> None:
    """Who asks for a removal asks again until it is answered."""
    found, last = ticked(after=PAUSED)
    told = await handlers(found)
    remove = messages.subject("model.delete", "n")
    assert await told[remove](Message(remove, encode(m.DeleteModelRequest("m")), True, last)) is None
    running = messages.subject("models.running", "n")
    assert await told[running](Message(running, b"{}", True, last)) is not None


async def test_what_waits_when_another_server_is_served_is_never_begun() -> None:
    """The former server's messages may still be in the queue of a subscription that has ended."""
    found, last = ticked(after=1.0)
    bus, stops = PlayedBus(), []
    nothing = cast(Any, None)
    installs = InstallCommands(*[nothing] * 6)
    served = Commands(nothing, bus, nothing, nothing, installs, "i", found, lambda: stops.append(1), nothing)
    await served.subscribe("n")
    former = dict(bus.handlers)
    await served.unsubscribe()
    await served.subscribe("n")
    for handle in former.values():
        assert await handle(Message("nodes.n.x", b"{}", True, last)) is None
    assert stops == []
    stop = messages.subject("stop", "n")
    await bus.handlers[stop](Message(stop, b"", False, last))
    assert stops == [1]


@pytest.mark.rule("nats-1", "nats-3")
@given(data=st.data())
@settings(max_examples=20 * EFFORT, deadline=None)
@pytest.mark.parametrize("command", [name for name in m.COMMANDS if dataclasses.fields(m.COMMANDS[name][0])])
async def test_a_message_with_a_fault_is_refused_once_and_touches_nothing(
    command: str, data: st.DataObject
) -> None:
    """The worker has neither files nor engines here: whatever it touched would be an internal error."""
    request, reply = m.COMMANDS[command]
    body, field = data.draw(faulty(request))
    subject = messages.subject(command, "n")
    found, last = ticked(after=1.0)
    answer = await (await handlers(found))[subject](Message(subject, json.dumps(body).encode(), True, last))
    if reply is None:
        assert answer is None
        return
    refused = decode(answer, reply)
    assert refused.error.startswith(f"{field}: expected ")
    assert (getattr(refused, "success", False), getattr(refused, "terminated", False)) == (False, False)
