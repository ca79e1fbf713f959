"""What an installation makes of each outcome of its command; the bus is played by the test."""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.conf import settings

from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Message, NotConnected, RequestTimeout
from localai_cluster.messaging.messages import decode, decode_galleries, encode
from nodes.backends import node_commands
from nodes.backends.installed import Build
from nodes.backends.intents import Intent
from nodes.models import BackendNode, PendingBackendOp
from operations.changes import feed
from operations.models import OperationTarget
from tests.conftest import until
from tests.support import hot
from tests.support.intents import INSTALL, Stage, limits, quick

pytestmark = pytest.mark.django_db(transaction=True)

INSTALLED = m.InstallReply(success=True)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    quick(monkeypatch)
    return Stage()


@pytest.mark.rule("R6.6", "R6.23", "R6.24", "R6.27", "R4.27", "R1.115", "T-UNL-14", "T-MGR-6")
@pytest.mark.rule("T-MGR-13", "nats-4.1")
async def test_the_whole_request_goes_to_its_node_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For no model and no replica, with the time limit that is set; a worker without progress succeeds."""
    limits(monkeypatch, 5000)
    await hot.in_thread(hot.node, "other")
    wish = {"uri": "oci://images.test/echo:1", "name": "echo", "alias": "e", "galleries": "[]", "force": True}
    intent = await hot.in_thread(lambda: stage.begins(INSTALL, **wish))
    stage.answers(INSTALLED)
    assert (await stage.carries_out(intent)).status == "success"
    (sent,) = stage.sent
    assert decode(sent, m.InstallRequest) == m.InstallRequest(
        "echo",
        backend_galleries="[]",
        uri="oci://images.test/echo:1",
        name="echo",
        alias="e",
        force=True,
        op_id=str(intent.row.operation_id),
        install_only=True,
    )
    assert {subject.split(".")[1] for subject in stage.bus.asked} == {str(stage.node.id)}
    # Twice: the second time limit follows the first at once.
    assert 5000 < stage.bus.waits[stage.subject][0] <= 10000


@pytest.mark.rule("R6.21", "R6.25", "T-MGR-14", "T-MGR-16")
async def test_progress_is_that_of_the_part_on_its_node(stage: Stage) -> None:
    """It stands there while the worker downloads, and the end keeps it."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    op_id, node_id = str(intent.row.operation_id), str(stage.node.id)
    subject = messages.install_progress(node_id, op_id)
    seen: dict[str, Any] = {}

    async def shown() -> bool:
        part = await hot.in_thread(OperationTarget.objects.get)
        seen.update(feed.target_as_dict(part))
        return bool(seen["percentage"] == 100)

    async def reported() -> m.InstallReply:
        event = m.ProgressEvent(
            op_id, node_id, "echo", "f", percentage=100, phase="downloading", current_bytes=2048,
            total_bytes=2048, seq=1,
        )  # fmt: skip
        heard_on = messages.install_progress_everywhere(op_id)
        await stage.bus.handlers[heard_on](Message(subject, encode(event), False))
        await until(shown)
        return INSTALLED

    stage.answers(reported)
    ended = feed.target_as_dict(await stage.carries_out(intent))
    downloading = {
        "node_id": node_id,
        "node_name": "one",
        "status": "downloading",
        "file_name": "f",
        "phase": "downloading",
        "percentage": 100,
        "current": "2.0 KiB",
        "total": "2.0 KiB",
    }
    assert seen.items() >= downloading.items()
    gone = {"phase", "status"}
    assert ended.items() >= {key: downloading[key] for key in downloading.keys() - gone}.items()
    assert (ended["status"], "phase" in ended) == ("success", False)


@pytest.mark.parametrize(
    ("command", "known", "listed", "proven"),
    [
        (node_commands.COMMAND, None, "1", True),
        (node_commands.COMMAND, None, None, False),
        (node_commands.COMMAND, "1", "1", False),
        (node_commands.UPGRADE, "1", "2", True),
        (node_commands.UPGRADE, "1", "1", False),
        (node_commands.UPGRADE, "1", None, False),
        (node_commands.DELETE, "1", None, True),
        (node_commands.DELETE, "1", "1", False),
    ],
)
@pytest.mark.rule("R6.33", "T-MGR-11")
def test_a_list_proves_only_what_it_did_not_show_before(
    command: node_commands.Command, known: str | None, listed: str | None, proven: bool
) -> None:
    """A backend that was there before, and an upgrade's old version, say nothing of a command under way."""
    row = PendingBackendOp(backend="echo")
    intent = Intent(row, BackendNode(), None if known is None else Build(known, ""))
    shown = None if listed is None else m.InstalledBackend("echo", version=listed)
    assert command.is_proven(intent, shown) is proven


@pytest.mark.parametrize("pending", [RequestTimeout("late"), NotConnected("lost")], ids=["late", "bus"])
async def test_it_goes_on_while_there_is_no_answer(stage: Stage, pending: Exception) -> None:
    """Neither the time limit nor our own lost connection ends it, or counts as a failure (R1.113)."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(pending, pending, INSTALLED)
    part = await stage.carries_out(intent)
    while part.status == "queued":
        assert part.operation.status == "pending"
        part = await stage.again()
    assert (part.status, part.operation.status, part.attempts) == ("success", "completed", 0)
    assert len(stage.sent) == 3


@pytest.mark.rule("O10")
@pytest.mark.parametrize("force", [False, True])
async def test_force_reaches_the_worker(stage: Stage, force: bool) -> None:
    stage.answers(INSTALLED)
    await stage.carries_out(await hot.in_thread(partial(stage.begins, INSTALL, force=force)))
    assert [decode(sent, m.InstallRequest).force for sent in stage.sent] == [force]


@pytest.mark.rule("O19", "R4.31", "R6.26", "T-MGR-8", "nats-6.1")
async def test_it_says_why_it_is_asked_again(stage: Stage) -> None:
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(RequestTimeout("late"), INSTALLED)
    part = await stage.carries_out(intent)
    assert part.reason == "node one did not answer within 1800 s; asking again"
    assert part.overdue_since is not None
    assert part.operation.message == part.reason


@pytest.mark.parametrize(
    ("reply", "says"),
    [(m.InstallReply(error="no such backend"), "no such backend"), (b"[", "cannot be read")],
    ids=["refused", "unreadable"],
)
@pytest.mark.rule("O15", "R4.27", "nats-6.1")
async def test_an_answer_that_is_no_success_fails_it(stage: Stage, reply: Any, says: str) -> None:
    """At once: the same command would be refused again."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.answers(reply)
    part = await stage.carries_out(intent)
    assert (part.status, part.operation.status) == ("error", "failed")
    assert says in part.error
    assert await stage.row(intent) is None


@pytest.mark.parametrize(
    ("event", "phase", "figures"),
    [
        (m.ProgressEvent(percentage=37.5), "downloading", (0, 0, 37.5)),
        (m.ProgressEvent(percentage=1e299, phase="\x1b[2J"), "downloading", (0, 0, 100)),
        (m.ProgressEvent(percentage=-1e299, phase="starting"), "starting", (0, 0, 0)),
        (m.ProgressEvent(current_bytes=-5, total_bytes=-7), "downloading", (0, 0, 0)),
        (m.ProgressEvent(current_bytes=9, total_bytes=4), "downloading", (4, 4, 100)),
        (m.ProgressEvent(current_bytes=2**63 - 1), "downloading", (2**62, 0, 0)),
    ],
)
def test_figures_of_progress_are_what_they_can_be(
    event: m.ProgressEvent, phase: str, figures: tuple[int, int, float]
) -> None:
    """A worker's numbers are a stranger's."""
    tick = node_commands.tick(hot.node(), event)
    assert (tick.phase, (tick.current_bytes, tick.total_bytes, tick.percentage)) == (phase, figures)


def test_a_label_of_progress_is_a_line_of_text() -> None:
    tick = node_commands.tick(hot.node(), m.ProgressEvent(file_name="a\n\u202e" + "x" * 100_000))
    assert len(tick.file_name) <= 512
    assert tick.file_name[:4] == "a  x"
    assert tick.message == tick.file_name


@pytest.mark.parametrize(
    ("fields", "sent", "withheld"),
    [
        ({}, [], ["file", "served"]),
        ({"source_address": "127.0.0.1"}, ["file"], ["served"]),
        ({"source_address": "192.0.2.7", "fingerprint": "f" * 64}, ["served"], ["file"]),
        ({"source_address": "::1", "fingerprint": "f" * 64}, ["file", "served"], []),
    ],
)
async def test_galleries_that_the_worker_cannot_read_are_not_sent(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
    sent: list[str],
    withheld: list[str],
) -> None:
    """nats.md §4.1: without any the field is left out, so the worker's own list counts."""
    listed: list[Any] = [
        {"name": "file", "url": "file:///srv/i.yaml"},
        {"name": "served", "url": "cluster:i.yaml"},
    ]
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, galleries=listed))
    await hot.in_thread(lambda: BackendNode.objects.filter(pk=stage.node.id).update(**fields))
    stage.answers(m.InstallReply(error="no such backend"))
    part = await stage.carries_out(await hot.in_thread(stage.begins, INSTALL))
    assert "no such backend" in part.error
    (asked,) = stage.sent
    field = decode(asked, m.InstallRequest).backend_galleries
    assert ([gallery.name for gallery in decode_galleries(field)] if field else []) == sent
    for name in ("file", "served"):
        assert (f"gallery {name} was not sent" in part.error) == (name in withheld)


@pytest.mark.rule("A3", "A5", "R4.30", "R1.112", "A77", "O15", "O75", "nats-6.1")
async def test_it_is_put_off_when_its_worker_is_gone(stage: Stage) -> None:
    """The node is unhealthy before the failure is recorded; the next attempt follows after half a minute."""
    intent = await hot.in_thread(stage.begins, INSTALL)
    stage.bus.replies.clear()
    part = await stage.carries_out(intent)
    row = await stage.row(intent)
    assert row is not None
    node = await hot.in_thread(BackendNode.objects.get)
    assert (node.status, row.attempts, row.last_error) == ("unhealthy", 1, "node one is not responding")
    assert (part.status, part.attempts, part.next_check_at) == ("queued", 1, row.next_retry_at)
    assert node.unhealthy_at is not None
    assert timedelta(seconds=30) <= row.next_retry_at - node.unhealthy_at < timedelta(seconds=60)
