"""What comes of a command to a worker, with the bus played by the test."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock, names
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import BusError, ConnectionLost, Message, NotConnected, RequestTimeout
from localai_cluster.messaging.bus import NoResponders as NoListener
from localai_cluster.messaging.messages import encode
from nodes.backends import node_commands
from nodes.commands import commands
from nodes.commands.commands import Worker
from nodes.commands.outcomes import (
    BusDown,
    Done,
    NoCommandListener,
    NoResponders,
    NotSent,
    Refused,
    Restarted,
    StillRunning,
    Unreadable,
)
from tests.conftest import until
from tests.support.bus import NEVER, PlayedBus
from tests.support.effort import EFFORT
from tests.support.message_faults import faulty

LIST, INSTALL = messages.subject("backend.list", "n"), messages.subject("backend.install", "n")
HERE = m.ListReply((), instance="first")
STARTED = m.InstallReply(True, "127.0.0.1:7")


@pytest.fixture
def bus() -> PlayedBus:
    return PlayedBus()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses cost nothing; only our own connection's age is left as it is."""
    monkeypatch.setattr(commands, "PING_EVERY", 0.001)
    monkeypatch.setattr(commands, "_RETRY_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(commands, "BUS_WAIT", 0.0)


def reconnected(bus: PlayedBus) -> None:
    """Our connection is new: workers may still be on their way back."""
    bus.generation, bus.connected_since = bus.generation + 1, clock.monotonic()


REQUESTS: dict[str, Callable[[Worker], Awaitable[Any]]] = {
    "backend.install": lambda worker: worker.install(m.InstallRequest("echo"), timeout=30),
    "backend.upgrade": lambda worker: worker.upgrade(m.UpgradeRequest("echo"), timeout=30),
    "backend.delete": lambda worker: worker.delete("echo"),
    "backend.cancel": lambda worker: worker.cancel("op"),
    "backend.list": lambda worker: worker.backends(),
    "models.running": lambda worker: worker.running(),
    "model.stop": lambda worker: worker.stop_model("m#0", "h:1"),
    "model.unload": lambda worker: worker.unload_model("m", "h:1"),
    "model.delete": lambda worker: worker.delete_model("m"),
}


def test_every_command_with_a_reply_is_held_to_it() -> None:
    assert set(REQUESTS) == {command for command, (_, reply) in m.COMMANDS.items() if reply}


@pytest.mark.rule("nats-6.1")
@pytest.mark.parametrize("command", REQUESTS)
@given(data=st.data())
@settings(max_examples=10 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_reply_with_a_fault_is_unreadable_and_its_field_is_named(
    command: str, data: st.DataObject
) -> None:
    """Never an outcome of the worker: what it did is unknown."""
    reply = m.COMMANDS[command][1]
    assert reply is not None
    body, field = data.draw(faulty(reply))
    bus = PlayedBus()
    bus.replies |= {LIST: HERE, messages.subject(command, "n"): json.dumps(body).encode()}
    outcome = await asyncio.wait_for(REQUESTS[command](Worker(bus, "n", "one")), 30)
    assert isinstance(outcome, Unreadable)
    assert f" {field}: expected " in outcome.reason


async def install(bus: PlayedBus) -> Any:
    found = Worker(bus, "n", "one").install(m.InstallRequest("echo"), timeout=30)
    return await asyncio.wait_for(found, 30)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (HERE, Done),
        (m.ListReply(error="disk gone"), Refused),
        (RequestTimeout("late"), StillRunning),
        (NoListener("m"), NoResponders),
        (b"[", Unreadable),
        (NotConnected("lost"), BusDown),
        (BusError("slow consumer"), BusDown),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
@pytest.mark.rule("nats-6.1")
async def test_a_question_has_one_of_six_outcomes(bus: PlayedBus, reply: Any, outcome: type) -> None:
    bus.replies[LIST] = reply
    assert type(await Worker(bus, "n", "one").backends()) is outcome


@pytest.mark.rule("R6.6", "T-UNL-17")
async def test_a_refusal_carries_its_reason_and_the_reply(bus: PlayedBus) -> None:
    bus.replies |= {LIST: HERE, INSTALL: m.InstallReply(error="no such backend", interrupted=True)}
    refused = await install(bus)
    assert (refused.reason, refused.reply.interrupted) == ("no such backend", True)


@pytest.mark.parametrize(
    ("more", "heard"),
    [
        ({}, True),
        ({"op_id": "another"}, False),
        ({"op_id": ""}, False),
        ({"node_id": "another"}, False),
        ({"node_id": ""}, False),
        ({"file_name": "x" * 16_384}, False),
    ],
    ids=["mine", "another operation", "no operation", "another node", "no node", "too large"],
)
@pytest.mark.rule("nats-4.3")
async def test_progress_counts_only_for_its_own_operation_and_node(
    bus: PlayedBus, more: dict[str, Any], heard: bool
) -> None:
    """Anyone who may publish on one subject reports for no one else, and no novels."""
    events: list[m.ProgressEvent] = []

    def on_progress(event: m.ProgressEvent) -> None:
        events.append(event)

    async def published() -> m.InstallReply:
        subject = messages.install_progress("n", "op")
        fields = {"op_id": "op", "node_id": "n", "backend": "echo"} | more
        heard_on = messages.install_progress_everywhere("op")
        await bus.handlers[heard_on](Message(subject, encode(m.ProgressEvent(**fields)), False))
        return STARTED

    bus.replies |= {LIST: HERE, INSTALL: published}
    request = m.InstallRequest("echo", op_id="op")
    await Worker(bus, "n", "one").install(request, timeout=30, on_progress=on_progress)
    assert bool(events) is heard


@pytest.mark.rule("nats-4.3", "nats-6.1", "I6")
@given(data=st.data())
@settings(max_examples=30 * EFFORT)
async def test_progress_with_a_fault_or_out_of_order_or_repeated_or_late_changes_no_outcome(
    data: st.DataObject,
) -> None:
    """What can be read and is of this command is shown within its bounds, the rest is left out."""
    count = data.draw(st.integers(1, 6))
    valid = [
        encode(m.ProgressEvent("op", "n", "echo", "f", "1", "2", 100 * seq / count, "", seq, count, seq))
        for seq in range(1, count + 1)
    ]
    faults = [
        json.dumps({"op_id": "op", "node_id": "n"} | {name: body[name] for name in {path}}).encode()
        for body, path in data.draw(st.lists(faulty(m.ProgressEvent), max_size=4))
    ]
    others = [encode(m.ProgressEvent("op", "other", "echo", percentage=50.0)), b"null", b"", b"[" * 9_000]
    repeated = data.draw(st.lists(st.sampled_from(valid), max_size=3))
    sent = data.draw(st.permutations([*valid, *repeated, *faults, *others]))
    in_time = data.draw(st.integers(0, len(sent)))
    heard: list[m.ProgressEvent] = []
    bus, subject = PlayedBus(), messages.install_progress("n", "op")
    handlers: list[Any] = []

    async def publish(bodies: list[bytes]) -> None:
        for body in bodies:
            await handlers[0](Message(subject, body, False))

    async def published() -> m.InstallReply:
        handlers.append(bus.handlers[messages.install_progress_everywhere("op")])
        await publish(sent[:in_time])
        return STARTED

    bus.replies |= {LIST: HERE, INSTALL: published}
    request = m.InstallRequest("echo", op_id="op")
    outcome = await Worker(bus, "n", "one").install(request, timeout=30, on_progress=heard.append)
    await publish(sent[in_time:])
    assert outcome == Done(STARTED)
    assert [encode(event) for event in heard] == [body for body in sent[:in_time] if body in valid]
    node: Any = SimpleNamespace(id="n", name="one")
    shown = [node_commands.tick(node, event) for event in heard]
    assert all(0 <= tick.percentage <= 100 and tick.current_bytes <= tick.total_bytes for tick in shown)


@pytest.mark.rule("A54", "A57", "O66")
@pytest.mark.parametrize("command", ["install", "upgrade"])
@pytest.mark.parametrize(("op_id", "listens"), [("op", True), ("op", False), ("", True)])
async def test_progress_is_listened_to_while_the_command_runs_and_only_if_someone_wants_it(
    bus: PlayedBus, command: str, op_id: str, listens: bool
) -> None:
    """D-RETRY-PROGRESS: without an operation or a listener nothing is subscribed."""
    during: list[list[str]] = []

    def on_progress(event: m.ProgressEvent) -> None: ...

    async def running() -> m.UpgradeReply:
        during.append(list(bus.handlers))
        return m.UpgradeReply(True)

    bus.replies |= {LIST: HERE, INSTALL: running, messages.subject("backend.upgrade", "n"): running}
    request = (m.InstallRequest if command == "install" else m.UpgradeRequest)("echo", op_id=op_id)
    send: Any = getattr(Worker(bus, "n", "one"), command)
    await send(request, timeout=30, on_progress=on_progress if listens else None)
    assert during == [[messages.install_progress_everywhere("op")] if op_id and listens else []]
    assert bus.handlers == {}


@pytest.mark.parametrize(
    ("op_id", "listens"), [("op", True), ("", True), ("op", False)], ids=["heard", "no operation", "no one"]
)
@pytest.mark.rule("R6.9", "R6.27", "nats-4.3", "T-UNL-18", "T-UNL-19", "T-MGR-12", "T-MGR-13")
async def test_progress_is_heard_while_a_command_with_an_operation_runs_and_somebody_listens(
    bus: PlayedBus, op_id: str, listens: bool
) -> None:
    """Each report once, in order; what cannot be read is left out. A silent worker succeeds as well."""
    shares: list[float] = []

    def on_progress(event: m.ProgressEvent) -> None:
        shares.append(event.percentage)

    async def published() -> m.InstallReply:
        subject = messages.install_progress("n", op_id or "-")
        for handler in list(bus.handlers.values()):
            for share in (10.0, 100.0):
                event = m.ProgressEvent(op_id, "n", "echo", percentage=share, seq=1)
                await handler(Message(subject, encode(event), False))
            await handler(Message(subject, b"[", False))
        return STARTED

    bus.replies |= {LIST: HERE, INSTALL: published}
    request = m.InstallRequest("echo", op_id=op_id)
    listener = on_progress if listens else None
    outcome = await Worker(bus, "n", "one").install(request, timeout=30, on_progress=listener)
    assert outcome == Done(STARTED)
    assert shares == ([10.0, 100.0] if op_id and listens else [])
    assert bus.handlers == {}, "nobody listens any more"


async def test_a_refusal_is_cut_and_made_readable(bus: PlayedBus) -> None:
    """Its beginning and its end stay: what happened, and the engine's last words."""
    said = "died\n\x1b[2J\u202e" + "x" * 500_000 + "\nKeyError: 'y'"
    bus.replies |= {LIST: HERE, INSTALL: m.InstallReply(error=said)}
    reason = (await install(bus)).reason
    assert len(reason) <= names.MAX_TEXT_LENGTH + 3
    assert (reason[:8], reason[-14:]) == ("died\n [2", "\nKeyError: 'y'")
    assert not {"\x1b", "\u202e"} & set(reason)


async def test_a_reply_larger_than_a_message_may_be_is_not_read(bus: PlayedBus) -> None:
    bus.replies |= {LIST: HERE, INSTALL: b'{"success": true, "address": "' + b"x" * 2**20 + b'"}'}
    assert isinstance(await install(bus), Unreadable)


async def test_our_own_lost_connection_does_not_end_a_command(bus: PlayedBus) -> None:
    """It is sent again when the bus is back; the worker joins the two."""

    def lost() -> Exception:
        reconnected(bus)
        return NotConnected("lost")

    bus.replies |= {LIST: [HERE, NoListener("early"), HERE], INSTALL: [lost, STARTED]}
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
    absent = NoListener("early")
    bus.replies |= {LIST: [absent] * 5 + [HERE], INSTALL: [absent] * 5 + [STARTED]}
    assert await install(bus) == Done(STARTED)


async def test_a_worker_may_be_away_for_a_moment_while_a_command_runs(bus: PlayedBus) -> None:
    done = asyncio.Event()

    def here() -> Any:
        asked = len(bus.asked[LIST])
        if asked > 6:
            done.set()
        return NoListener("a moment") if asked % 2 == 0 else HERE

    async def reply() -> m.InstallReply:
        await done.wait()
        return STARTED

    bus.replies |= {LIST: here, INSTALL: reply}
    assert await install(bus) == Done(STARTED)


@pytest.mark.rule("R6.3", "T-UNL-17", "nats-6.1")
async def test_a_worker_that_is_not_there_is_told_at_once(bus: PlayedBus) -> None:
    """Two questions are enough while nothing was sent and our connection is old."""
    assert type(await install(bus)) is NoResponders
    assert len(bus.asked[LIST]) == 2


@pytest.mark.rule("A3", "nats-6.1")
async def test_a_worker_between_two_connections_is_not_taken_for_gone(bus: PlayedBus) -> None:
    """Review R13: one "no responders" on our established connection proves nothing; it dials again."""
    bus.replies |= {LIST: [NoListener("a moment"), HERE], INSTALL: STARTED}
    assert await install(bus) == Done(STARTED)
    bus.replies[LIST] = [NoListener("a moment"), HERE]
    assert isinstance(await Worker(bus, "n", "one").contact(), Done)


async def test_a_worker_that_vanishes_ends_the_command(bus: PlayedBus) -> None:
    bus.replies |= {LIST: [HERE, HERE, NoListener("gone")], INSTALL: NEVER}
    assert await install(bus) == NoResponders("node one stopped answering on the bus")


async def test_a_worker_that_never_comes_back_after_a_restart_of_the_bus(
    bus: PlayedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RECONNECT_GRACE", 0.05)
    reconnected(bus)
    assert type(await install(bus)) is NoResponders
    assert clock.monotonic() - bus.connected_since >= 0.05


async def test_a_restarted_worker_has_forgotten_the_command(bus: PlayedBus) -> None:
    bus.replies |= {LIST: [HERE, m.ListReply((), instance="second")], INSTALL: NEVER}
    assert await install(bus) == Restarted("the worker of node one was restarted")


async def test_a_worker_without_this_command_does_not_respond(bus: PlayedBus) -> None:
    """It lists its backends, but nothing listens for the command, twice."""
    bus.replies[LIST] = HERE
    assert type(await install(bus)) is NoCommandListener
    assert len(bus.asked[INSTALL]) == 2


UPGRADE, DELETE = messages.subject("backend.upgrade", "n"), messages.subject("backend.delete", "n")
STOCK = m.ListReply()
STOPPED = m.UpgradeReply(True, "", ("m#0",), True)


async def upgrade(bus: PlayedBus) -> Any:
    request = m.UpgradeRequest("echo", backend_galleries="[]", op_id="op")
    return await asyncio.wait_for(Worker(bus, "n", "one").upgrade(request, timeout=30), 30)


async def delete(bus: PlayedBus) -> Any:
    return await asyncio.wait_for(Worker(bus, "n", "one").delete("echo"), 30)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (STOPPED, Done),
        (m.UpgradeReply(False, "no room", ("m#0",), True), Refused),
        (m.UpgradeReply(), Refused),
        (RequestTimeout("late"), StillRunning),
        (b"[", Unreadable),
    ],
    ids=["done", "refused", "without a word", "late", "unreadable"],
)
@pytest.mark.parametrize(("send", "subject"), [(upgrade, UPGRADE), (delete, DELETE)])
@pytest.mark.rule("R6.3", "nats-6.1")
async def test_an_upgrade_and_a_deletion_have_the_same_outcomes(
    bus: PlayedBus, send: Any, subject: str, reply: Any, outcome: type
) -> None:
    """A refusal carries its report too."""
    bus.replies |= {LIST: HERE, subject: reply}
    found = await send(bus)
    assert type(found) is outcome
    if isinstance(found, Done | Refused):
        assert found.reply.stopped_process_keys == reply.stopped_process_keys
        assert found.reply.reports_stopped_processes == reply.reports_stopped_processes


@pytest.mark.rule("nats-6.3", "R6.3", "R6.8", "R6.29")
@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (m.InstallReply(True, "127.0.0.1:7"), Done(m.UpgradeReply(True))),
        (m.InstallReply(error="no room"), Refused("no room", m.UpgradeReply(error="no room"))),
        (RequestTimeout("late"), StillRunning("node one did not answer within 30 s")),
    ],
    ids=["done", "refused", "late"],
)
async def test_an_old_worker_gets_a_forced_install_in_place_of_an_upgrade(
    bus: PlayedBus, reply: Any, outcome: Any
) -> None:
    """What it has stopped is not known then."""
    bus.replies |= {LIST: STOCK, INSTALL: reply}
    assert await upgrade(bus) == outcome
    (sent,) = bus.asked[INSTALL]
    wanted = m.InstallRequest("echo", backend_galleries="[]", force=True, op_id="op", install_only=True)
    assert sent == encode(wanted)


async def test_an_old_worker_that_vanished_during_an_upgrade_gets_no_forced_install(bus: PlayedBus) -> None:
    """It has heard the command: what it knows is no question."""
    gone = NoListener("gone")
    bus.replies |= {LIST: [STOCK, gone, gone, STOCK], UPGRADE: NEVER, INSTALL: STARTED}
    assert type(await upgrade(bus)) is NoResponders
    assert not bus.asked[INSTALL]


@pytest.mark.rule("R6.3", "T-UNL-16", "nats-6.1")
async def test_no_reply_in_time_is_no_failure(bus: PlayedBus) -> None:
    bus.replies |= {LIST: HERE, INSTALL: RequestTimeout("late")}
    assert type(await install(bus)) is StillRunning


async def test_a_frozen_worker_is_sent_no_command(bus: PlayedBus) -> None:
    """It does not answer the question before: nothing was begun, so nothing may still be running."""
    bus.replies |= {LIST: RequestTimeout("a frozen worker"), INSTALL: STARTED}
    assert type(await install(bus)) is NotSent
    assert not bus.asked[INSTALL]


@pytest.mark.rule("T-UNL-17")
async def test_a_bus_that_stays_away_is_told(bus: PlayedBus) -> None:
    bus.connected_since = -math.inf
    bus.replies[LIST] = NotConnected("lost")
    assert type(await install(bus)) is BusDown


@pytest.mark.parametrize(
    ("lost", "outcome"), [(ConnectionLost("lost"), StillRunning), (NotConnected("down"), BusDown)], ids=str
)
@pytest.mark.rule("R6.3", "T-UNL-17")
async def test_a_command_that_was_sent_may_be_running_though_the_bus_stays_away(
    bus: PlayedBus, lost: BusError, outcome: type
) -> None:
    bus.replies |= {LIST: [HERE, NotConnected("lost")], INSTALL: lost}
    assert type(await install(bus)) is outcome


@pytest.mark.rule("R6.3")
async def test_a_worker_that_freezes_after_the_command_may_be_running_it(bus: PlayedBus) -> None:
    bus.replies |= {LIST: [HERE, RequestTimeout("frozen")], INSTALL: ConnectionLost("lost")}
    assert type(await install(bus)) is StillRunning


@pytest.mark.parametrize(
    ("send", "verb", "seconds"),
    [
        (lambda worker: worker.backends(), "backend.list", 30),
        (lambda worker: worker.running(), "models.running", 10),
        (lambda worker: worker.stop_model("echo#0", "h:1"), "model.stop", 10),
        (lambda worker: worker.unload_model("echo", "h:1"), "model.unload", 30),
        (lambda worker: worker.delete_model("echo"), "model.delete", 30),
        (lambda worker: worker.delete("echo"), "backend.delete", 120),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.rule("C23", "C24", "C25", "C26", "C27", "R6.4", "nats-2.1")
async def test_a_worker_has_as_long_to_answer_as_the_contract_says(
    bus: PlayedBus, send: Any, verb: str, seconds: int
) -> None:
    """A deletion has asked for the list before, which took a moment of its time."""
    bus.replies |= {LIST: HERE, f"nodes.n.{verb}": RequestTimeout("late")} if verb != "backend.list" else {}
    await send(Worker(bus, "n", "one"))
    assert seconds / 2 < bus.waits[f"nodes.n.{verb}"][0] <= seconds


CANCEL = messages.subject("backend.cancel", "n")


@pytest.mark.parametrize(
    ("replies", "outcome"),
    [
        ({CANCEL: m.CancelReply(True, found=True)}, Done),
        ({CANCEL: m.CancelReply(error="still being stopped")}, Refused),
        ({CANCEL: RequestTimeout("late")}, StillRunning),
        ({CANCEL: NotConnected("lost")}, BusDown),
        ({LIST: m.ListReply()}, NoCommandListener),
        ({LIST: HERE}, NoCommandListener),
        ({}, NoResponders),
    ],
    ids=["done", "refused", "late", "no bus", "stock worker", "older worker of ours", "gone"],
)
async def test_a_cancel_is_asked_once_and_says_where_it_cannot_be(
    bus: PlayedBus, replies: dict[str, Any], outcome: type
) -> None:
    """A stock worker has no subject for it (contract/README.md)."""
    bus.replies |= replies
    found = await Worker(bus, "n", "one").cancel("op")
    assert type(found) is outcome
    assert bus.asked[CANCEL] == [b'{"op_id":"op"}']
    if isinstance(found, NoCommandListener):
        assert found.reason == "the worker of node one cannot cancel; what it has begun goes on"


class TestStops:
    """Subjects and payloads of the commands on engines and models (`contract/nats.md` §4)."""

    @pytest.mark.parametrize(
        ("target", "force", "payload"),
        [
            ("", False, b"null"),
            ("", True, b'{"backend":"","force":true}'),
            ("echo", False, b'{"backend":"echo"}'),
            ("echo#1", True, b'{"backend":"echo#1","force":true}'),
        ],
    )
    @pytest.mark.rule("R6.5", "T-UNL-7", "T-UNL-8", "T-UNL-9", "nats-4.4")
    async def test_a_stop_is_published_with_what_there_is_to_say(
        self, bus: PlayedBus, target: str, force: bool, payload: bytes
    ) -> None:
        await Worker(bus, "n", "one").stop(target, force=force)
        assert bus.published == [("nodes.n.backend.stop", payload)]

    @pytest.mark.rule("T-UNL-11", "T-UNL-40", "T-UNL-41", "R6.4", "nats-4.11")
    async def test_a_node_is_asked_to_stop_without_a_reply(self, bus: PlayedBus) -> None:
        await Worker(bus, "a.b", "one").stop_node()
        assert bus.published == [("nodes.a-b.stop", b"null")]

    @pytest.mark.parametrize(
        ("reply", "outcome"),
        [
            (m.UnloadReply(True), Done),
            (m.UnloadReply(error="engine busy"), Refused),
            (b'{"success":"yes"}', Unreadable),
            (RequestTimeout("late"), StillRunning),
            (NoListener("no one"), NoResponders),
            (NotConnected("lost"), BusDown),
        ],
        ids=lambda value: getattr(value, "__name__", type(value).__name__),
    )
    @pytest.mark.rule("R6.13", "C25", "nats-4.9", "nats-4.10")
    async def test_unload_and_delete_of_a_model_have_the_six_outcomes(
        self, bus: PlayedBus, reply: Any, outcome: type
    ) -> None:
        bus.replies |= {"nodes.n.model.unload": reply, "nodes.n.model.delete": reply}
        worker = Worker(bus, "n", "one")
        unloaded, deleted = await worker.unload_model("echo", "h:1"), await worker.delete_model("echo")
        assert (type(unloaded), type(deleted)) == (outcome, outcome)
        assert bus.asked["nodes.n.model.unload"] == [b'{"model_name":"echo","address":"h:1"}']
        assert bus.asked["nodes.n.model.delete"] == [b'{"model_name":"echo"}']

    @pytest.mark.rule("T-UNL-10", "nats-4.5")
    async def test_an_exact_stop_names_model_key_and_address(self, bus: PlayedBus) -> None:
        """D-UNLOAD-HONEST: ours has no use for what else the message may say."""
        await Worker(bus, "n", "one").stop_model("org/llama#2", "h:1")
        sent = m.StopModelRequest("org/llama", "org/llama#2", "h:1")
        assert bus.asked["nodes.n.model.stop"] == [encode(sent)]
        whole = encode(m.StopModelRequest("org/llama", "org/llama#2", "h:1", True, "r7"))
        assert whole.endswith(b',"expected_address":"h:1","force":true,"config_revision":"r7"}')

    @pytest.mark.rule("nats-4.9")
    async def test_an_address_that_is_not_known_is_left_out(self, bus: PlayedBus) -> None:
        await Worker(bus, "n", "one").unload_model("echo", "")
        assert bus.asked["nodes.n.model.unload"] == [b'{"model_name":"echo"}']


@pytest.mark.rule("R2.48", "T-ROU-26", "T-ROU-27", "nats-4.1")
async def test_identical_starts_under_way_are_one_request(bus: PlayedBus) -> None:
    """Whichever operation asks; another model or replica is another one. Who leaves takes nobody along."""
    answer = asyncio.Event()

    async def slowly() -> m.InstallReply:
        await answer.wait()
        return STARTED

    bus.replies[INSTALL], bus.replies[LIST] = slowly, HERE
    worker = Worker(bus, "n", "one")

    def asks(model: str = "m", index: int = 0, operation: str = "") -> "asyncio.Task[Any]":
        request = m.InstallRequest("echo", model_id=model, replica_index=index, op_id=operation)
        return asyncio.create_task(worker.install(request, timeout=30))

    same = [asks(operation=str(number)) for number in range(5)]
    others = [asks("n"), asks(index=1)]

    await until(lambda: len(bus.asked[INSTALL]) >= 3)
    left = same.pop()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    answer.set()
    outcomes = await asyncio.gather(*same, *others)
    assert outcomes == [Done(STARTED)] * 6
    assert len(bus.asked[INSTALL]) == 3
