"""What an upgrade and a deletion make of each outcome of their commands; the bus is played by the test."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings

from localai_cluster.kit import clock, conf
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import Message, NoResponders, NotConnected, RequestTimeout
from localai_cluster.messaging.messages import decode, encode, encode_galleries
from nodes.backends import intents
from nodes.backends.intents import Intent
from nodes.commands import commands
from nodes.models import BackendNode, NodeBackend, NodeModel, PendingBackendOp
from operations.models import OperationTarget
from tests.support import hot
from tests.support.intents import DELETE, UPGRADE, ask, claim, limits, quick
from tests.support.intents import Stage as OneIntent

pytestmark = pytest.mark.django_db(transaction=True)

ECHO = m.InstalledBackend(name="echo", version="1.0.0", gallery_url="file:///srv/index.yaml", uri="/srv/echo")
KINDS = [UPGRADE, DELETE]


class Stage(OneIntent):
    """A node that has echo and runs two replicas of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lists(ECHO)
        earlier = clock.now() - timedelta(minutes=1)
        self.replicas = [
            hot.replica(self.node, name, backend_type="echo", updated_at=earlier)
            for name in ("one#two", "other")
        ]

    def runs(self, *models: m.RunningModel) -> None:
        self.bus.replies[messages.subject("models.running", str(self.node.id))] = m.RunningReply(models)

    async def left(self) -> set[str]:
        """The models whose replicas have a row."""
        rows = NodeModel.objects.values_list("model_name", flat=True)
        return await hot.in_thread(lambda: set(rows))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    quick(monkeypatch)
    return Stage()


def ended(part: OperationTarget) -> tuple[str, str]:
    """How the part and its operation ended."""
    return part.status, part.operation.status


SUCCESS, ERROR = ("success", "completed"), ("error", "failed")


def stopped(*keys: str, success: bool = True, reports: bool = True, error: str = "") -> m.UpgradeReply:
    return m.UpgradeReply(success, error, keys, reports)


@pytest.mark.rule(
    "T-UNL-20", "T-UNL-15", "A58", "nats-4.2", "A55", "O17", "O67", "R6.2", "R6.7", "R6.29", "R4.28"
)
async def test_an_upgrade_is_sent_once_by_its_own_subject(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cluster's galleries, whatever the request names."""
    limits(monkeypatch, 5000)
    cluster = replace(settings.CLUSTER, galleries=[{"name": "ours", "url": "https://images.test/i.yaml"}])
    monkeypatch.setattr(settings, "CLUSTER", cluster)
    intent = await hot.in_thread(lambda: stage.begins(UPGRADE, galleries="[]"))
    stage.answers(stopped())
    assert ended(await stage.carries_out(intent)) == SUCCESS
    (sent,) = stage.sent
    galleries = encode_galleries([m.Gallery("https://images.test/i.yaml", "ours")])
    wanted = m.UpgradeRequest("echo", backend_galleries=galleries, op_id=str(intent.row.operation_id))
    assert decode(sent, m.UpgradeRequest) == wanted
    assert 5000 < stage.bus.waits[stage.subject][0] <= 10000
    assert not stage.bus.asked[messages.subject("backend.install", str(stage.node.id))]


@pytest.mark.rule("nats-4.6", "R6.30", "T-MGR-31")
async def test_a_deletion_names_the_backend_and_ends_with_a_fresh_list(stage: Stage) -> None:
    def gone() -> m.UpgradeReply:
        stage.lists()
        return stopped()

    node_id = stage.node.id
    await hot.in_thread(lambda: NodeBackend.objects.create(node_id=node_id, name="echo"))
    intent = await hot.in_thread(stage.begins, DELETE)
    stage.answers(gone)
    part = await stage.carries_out(intent)
    assert (ended(part), part.reason) == (SUCCESS, "removed")
    assert [decode(sent, m.DeleteRequest).backend for sent in stage.sent] == ["echo"]
    assert not await hot.in_thread(lambda: NodeBackend.objects.filter(node_id=node_id).exists())


@pytest.mark.rule("A52", "A53", "A54", "T-UNL-22", "A55", "A74", "O66", "O67", "R6.7", "R6.9", "nats-4.3")
async def test_an_upgrade_listens_to_progress_before_it_is_sent(stage: Stage) -> None:
    intent = await hot.in_thread(stage.begins, UPGRADE)
    op_id, node_id = str(intent.row.operation_id), str(stage.node.id)
    subject = messages.install_progress(node_id, op_id)

    async def reported() -> m.UpgradeReply:
        event = m.ProgressEvent(op_id, node_id, "echo", current_bytes=3, total_bytes=12)
        await stage.bus.handlers[messages.install_progress_everywhere(op_id)](
            Message(subject, encode(event), False)
        )
        return stopped(success=False, error="no room")

    stage.answers(reported)
    part = await stage.carries_out(intent)
    operation = part.operation
    assert (part.current_bytes, part.total_bytes, part.percentage) == (3, 12, 25)
    assert (operation.current_bytes, operation.total_bytes, operation.progress) == (3, 12, 25)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reply", "left"),
    [
        (stopped("one#two#0"), {"other"}),
        (stopped("one#two#0", "other#0"), set()),
        (stopped("one#two#0", success=False, error="cannot be killed"), {"other"}),
        (stopped("one#two#1", "one#two", "#0", "other#-1", "other#x"), {"one#two", "other"}),
        (stopped(), {"one#two", "other"}),
        (stopped("one#two#0", "other#0", reports=False), {"one#two", "other"}),
    ],
    ids=["one", "both", "of a refusal", "no keys of ours", "none", "not reported"],
)
@pytest.mark.rule("nats-6.2", "T-UNL-23", "T-UNL-24", "T-UNL-25", "T-UNL-26", "T-UNL-27")
@pytest.mark.rule("T-UNL-28", "T-UNL-29", "T-UNL-30", "T-UNL-31", "T-UNL-32")
@pytest.mark.rule("R6.14")
async def test_exactly_the_replicas_that_are_reported_lose_their_rows(
    stage: Stage, kind: str, reply: m.UpgradeReply, left: set[str]
) -> None:
    intent = await hot.in_thread(stage.begins, kind)
    stage.answers(reply)
    part = await stage.carries_out(intent)
    assert (ended(part), part.error) == (SUCCESS if reply.success else ERROR, reply.error)
    assert await stage.left() == left


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rule("nats-6.2")
async def test_a_replica_that_came_during_the_command_keeps_its_row(stage: Stage, kind: str) -> None:
    """It has the key of one that was stopped, but another engine."""

    async def replaced() -> m.UpgradeReply:
        def replace() -> None:
            NodeModel.objects.filter(model_name="other").delete()
            hot.replica(stage.node, "other", backend_type="echo")

        await hot.in_thread(replace)
        return stopped("one#two#0", "other#0")

    intent = await hot.in_thread(stage.begins, kind)
    stage.answers(replaced)
    await stage.carries_out(intent)
    assert await stage.left() == {"other"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pending", [RequestTimeout("late"), NotConnected("lost")], ids=["late", "bus"])
async def test_it_goes_on_while_there_is_no_answer(stage: Stage, kind: str, pending: Exception) -> None:
    """Neither the time limit nor our own lost connection ends it."""
    intent = await hot.in_thread(stage.begins, kind)
    stage.answers(pending, pending, stopped("other#0"))
    part = await stage.carries_out(intent)
    while part.status == "queued":
        part = await stage.again()
    assert (ended(part), part.attempts) == (SUCCESS, 0)
    assert len(stage.sent) == 3
    assert await stage.left() == {"one#two"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (stopped(success=False, error="no room"), "no room"),
        (m.UpgradeReply(), "no reason"),
        (b"[", "cannot be read"),
    ],
    ids=["refused", "without a word", "unreadable"],
)
@pytest.mark.rule("O38", "O108", "R4.26", "R4.28", "R6.29", "T-MGR-24", "nats-6.1")
async def test_an_answer_that_is_no_success_fails_it_with_the_reason(
    stage: Stage, kind: str, reply: Any, says: str
) -> None:
    intent = await hot.in_thread(stage.begins, kind)
    stage.answers(reply)
    part = await stage.carries_out(intent)
    assert (ended(part), says in part.error) == (ERROR, True)
    assert await stage.left() == {"one#two", "other"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rule("A3", "A5", "R1.112", "O15", "O75", "R4.30", "nats-6.1")
async def test_it_is_put_off_when_its_worker_is_gone(stage: Stage, kind: str) -> None:
    intent = await hot.in_thread(stage.begins, kind)
    stage.bus.replies.clear()
    part = await stage.carries_out(intent)
    row = await stage.row(intent)
    assert row is not None
    assert (part.status, row.attempts, row.last_error) == ("queued", 1, "node one is not responding")
    assert (await hot.in_thread(BackendNode.objects.get)).status == "unhealthy"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rule("R1.109", "R6.18", "O14", "T-MGR-4", "R6.30")
async def test_it_waits_for_a_node_that_is_offline_and_sends_nothing(stage: Stage, kind: str) -> None:
    def asked() -> OperationTarget:
        BackendNode.objects.update(offline_at=clock.now())
        assert not claim_of(stage, kind)
        return OperationTarget.objects.select_related("operation").get()

    part = await hot.in_thread(asked)
    assert (part.status, part.waits_for_node, part.reason) == ("queued", True, "node one is offline")
    assert part.operation.status == "waiting_for_nodes"
    assert not stage.bus.asked


def claim_of(stage: Stage, kind: str) -> list[Intent]:
    ask(kind, BackendNode.objects.get(pk=stage.node.id))
    return claim()


@pytest.mark.rule("nats-6.3", "T-UNL-21", "A55", "O17", "O67")
@pytest.mark.parametrize(
    ("reply", "fails"), [(m.InstallReply(True), ""), (m.InstallReply(error="no room"), "no room")]
)
@pytest.mark.rule("R6.7", "R6.8", "R6.29", "R4.28", "T-MGR-23")
async def test_a_worker_without_the_command_gets_a_forced_install(
    stage: Stage, reply: m.InstallReply, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same operation and the time limit of an upgrade; nothing is known of what was stopped."""
    cluster = replace(settings.CLUSTER, install_timeout=1000, upgrade_timeout=5000)
    monkeypatch.setattr(settings, "CLUSTER", cluster)
    intent = await hot.in_thread(stage.begins, UPGRADE)
    install = messages.subject("backend.install", str(stage.node.id))
    stage.bus.replies[install] = reply
    part = await stage.carries_out(intent)
    assert (ended(part), part.error) == (ERROR if fails else SUCCESS, fails)
    (sent,) = stage.bus.asked[install]
    wanted = m.InstallRequest("echo", force=True, op_id=str(intent.row.operation_id), install_only=True)
    assert decode(sent, m.InstallRequest) == wanted
    assert 5000 < stage.bus.waits[install][0] <= 10000
    assert await stage.left() == {"one#two", "other"}


async def test_a_worker_of_ours_that_does_not_listen_yet_gets_no_forced_install(stage: Stage) -> None:
    """It has just been restarted: the upgrade is sent again."""
    intent = await hot.in_thread(stage.begins, UPGRADE)
    stage.lists(ECHO, instance="first")
    part = await stage.carries_out(intent)
    assert (part.status, "is not responding" in part.reason) == ("queued", True)
    assert not stage.bus.asked[messages.subject("backend.install", str(stage.node.id))]


SAME = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (SAME, SAME, "nothing changed: 1.0.0 was installed before"),
        (SAME, SAME.replace("a", "b"), ""),
        ("", "", ""),
        (SAME, "", ""),
    ],
    ids=["same", "another", "unknown", "not-any-more"],
)
@pytest.mark.rule("O17")
async def test_an_upgrade_changed_nothing_if_version_and_digest_are_the_same(
    stage: Stage, before: str, after: str, says: str
) -> None:
    """Review R8: an image may change under an equal version; an unknown digest is not equal."""

    def installed() -> Intent:
        NodeBackend.objects.create(node=stage.node, name="echo", version="1.0.0", digest=before)
        return stage.begins(UPGRADE)

    intent = await hot.in_thread(installed)
    stage.lists(replace(ECHO, digest=after))
    stage.answers(stopped())
    part = await stage.carries_out(intent)
    assert (ended(part), part.reason) == (SUCCESS, says)


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ([], "echo is not installed on one"),
        ([m.InstalledBackend("echo", is_system=True)], "came with the machine"),
        ([m.InstalledBackend("echo", uri="/srv/echo")], "by its address"),
    ],
    ids=["absent", "system", "external"],
)
@pytest.mark.rule("http-2.10", "O17", "R6.28", "T-MGR-21")
async def test_an_upgrade_that_cannot_be_stops_no_engine(
    stage: Stage, listed: list[m.InstalledBackend], says: str
) -> None:
    intent = await hot.in_thread(stage.begins, UPGRADE)
    stage.lists(*listed)
    part = await stage.carries_out(intent)
    assert (ended(part), says in part.error) == (ERROR, True)
    assert not stage.sent


@pytest.mark.rule("R6.30")
async def test_deleting_what_is_not_there_is_done(stage: Stage) -> None:
    intent = await hot.in_thread(stage.begins, DELETE)
    stage.lists()
    stage.answers(stopped(success=False, error='backend "echo" is not installed'))
    part = await stage.carries_out(intent)
    assert (ended(part), part.reason) == (SUCCESS, "was not installed")


async def test_a_refused_deletion_of_which_nothing_is_known_is_tried_again(stage: Stage) -> None:
    """The list that would tell does not come. The attempt counts: this must not go on without an end."""

    def refuse() -> m.UpgradeReply:
        stage.bus.replies[messages.subject("backend.list", str(stage.node.id))] = NoResponders("gone")
        return stopped(success=False, error="not installed")

    intent = await hot.in_thread(stage.begins, DELETE)
    stage.answers(refuse)
    part = await stage.carries_out(intent)
    row = await stage.row(intent)
    assert row is not None
    assert (part.status, row.attempts) == ("queued", 1)
    assert "does not say what is installed" in part.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rule("R6.22")
async def test_a_controller_that_dies_between_command_and_record_loses_nothing(
    stage: Stage, kind: str
) -> None:
    """The worker's first report died with it. The next attempt repeats the command and compares the rows."""
    first = await hot.in_thread(stage.begins, kind)

    def passed_on() -> Intent:
        PendingBackendOp.objects.update(lease_until=clock.now() - timedelta(seconds=1))
        assert intents.reap(now=clock.now()) == (1, 0)
        return stage.claimed()

    second = await hot.in_thread(passed_on)
    stage.runs(m.RunningModel("other", 0, "127.0.0.1:50000"))
    if kind == DELETE:
        stage.lists()
        stage.answers(stopped(success=False, error='backend "echo" is not installed'))
    else:
        stage.answers(stopped())
    part = await stage.carries_out(first)
    assert part.status == "running_on_worker", "an answer to the lost attempt changes nothing"
    assert await stage.row(second) is not None
    part = await stage.carries_out(second)
    assert ended(part) == SUCCESS
    assert await stage.left() == {"other"}
    assert await stage.row(second) is None


@pytest.mark.rule("C22", "C23", "C21")
def test_the_time_limits_are_those_of_the_contract() -> None:
    assert conf.cluster().install_timeout == conf.cluster().upgrade_timeout == 900
    assert commands.DELETE_TIMEOUT == 120
