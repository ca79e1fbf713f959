"""The state pass: replicas whose engines are gone leave, all others stay. The workers are played."""

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction
from django.db.models import F

from localai_cluster.kit import clock
from localai_cluster.kit.transactions import Lock
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.bus import NoResponders, RequestTimeout
from localai_cluster.rpc.messages import Sign
from nodes.models import BackendNode, NodeModel, ReplicaUse, WebProcess
from nodes.reconcilers import state_pass, tasks
from nodes.reconcilers.liveness import recount
from nodes.reconcilers.state_pass import StatePass
from nodes.replicas import checks, hooks, statements
from nodes.replicas.evidence import ALIVE, CheckResult
from nodes.replicas.hooks import RemovedReplica
from operations.changes import events
from tests.conftest import until
from tests.support import hot
from tests.support.backends import TOKEN
from tests.support.bus import NEVER, PlayedBus
from tests.support.fleet import at_once, unexpected
from tests.support.hot import in_thread
from tests.support.races import repeated
from tests.support.replicas import columns

pytestmark = pytest.mark.django_db(transaction=True)
LONG_AGO = timedelta(minutes=3)


class Stage:
    """Nodes with replicas that were last heard of three minutes ago, and what is said of their engines."""

    def __init__(self) -> None:
        self.bus = PlayedBus()
        self.ports: dict[str, Sign] = {}
        self.probed: list[str] = []

    async def node(self, name: str = "one", *, replicas: int = 1, **fields: Any) -> BackendNode:
        """With loaded replicas `echo#0` and so on."""
        return await in_thread(lambda: self.make(name, replicas, **fields))

    def make(self, name: str, replicas: int = 1, **fields: Any) -> BackendNode:
        made = hot.node(name, **fields)
        for index in range(replicas):
            hot.replica(made, index=index, updated_at=clock.now() - LONG_AGO)
        return made

    def lists(self, node: BackendNode, *engines: tuple[str, int, str] | Any) -> None:
        """What the node's worker says of its engines; one that is no engine is the reply itself."""
        reply = m.RunningReply(tuple(m.RunningModel(*one) for one in engines if isinstance(one, tuple)))
        other = [one for one in engines if not isinstance(one, tuple)]
        self.bus.replies[messages.subject("models.running", str(node.id))] = other[0] if other else reply

    def asked(self, node: BackendNode) -> int:
        return len(self.bus.asked[messages.subject("models.running", str(node.id))])

    async def probe(self, address: str, token: str, timeout: float) -> Sign:
        assert (token, timeout) == (TOKEN, 1.0)
        self.probed.append(address)
        return self.ports.get(address, Sign.UNREACHABLE)

    async def look(self) -> int:
        """One pass of one controller, and the time until the next."""
        found = await StatePass(self.bus).run_pass()
        await in_thread(a_tick_passes)
        return found


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(state_pass, "probe", made.probe)
    return made


def a_tick_passes() -> None:
    NodeModel.objects.update(checked_at=F("checked_at") - timedelta(seconds=30))


def rows() -> list[str]:
    return sorted(str(row) for row in NodeModel.objects.all())


async def change(node: BackendNode | None, **columns: Any) -> None:
    """Changes the rows of this node, or all of them."""
    changed = NodeModel.objects.all() if node is None else NodeModel.objects.filter(node=node)
    await in_thread(lambda: changed.update(**columns))


def only() -> NodeModel:
    return NodeModel.objects.get()


def heard_since() -> Any:
    return clock.now() - timedelta(seconds=60)


def claim() -> list[NodeModel]:
    return checks.claim_suspects(heartbeat_since=heard_since(), now=clock.now())


def ask() -> bool:
    return checks.request_checks(heartbeat_since=heard_since(), now=clock.now())


ENGINE = ("echo", 0, "127.0.0.1:50000")
ENDED = checks.ExitReport("echo#0", ENGINE[2])


class TestWorkersWord:
    @pytest.mark.rule("R4.24", "R4.32", "R4.33", "T-REC-41", "T-REC-42", "C3")
    async def test_what_it_lists_is_fresh_again(self, stage: Stage) -> None:
        """And it is not asked of what was heard of since."""
        node = await stage.node()
        stage.lists(node, ENGINE)
        await change(None, missed_reports=1)
        assert await stage.look() == 1
        row = await in_thread(only)
        assert (row.missed_reports, clock.now() - row.updated_at < LONG_AGO) == (0, True)
        assert (await stage.look(), stage.asked(node), stage.probed) == (0, 1, [])

    @pytest.mark.rule("R4.35", "R5.12", "T-REC-40", "T-REC-43", "R1.101", "R1.102")
    async def test_what_it_misses_twice_goes_and_nothing_else(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The hooks hear of it. Any process continues the streak, for it stands in the row (D-STREAKS)."""
        node = await stage.node(replicas=2)
        told: list[RemovedReplica] = []
        monkeypatch.setattr(hooks, "on_removed", [told.append])
        stage.lists(node, ("echo", 1, "127.0.0.1:50001"))
        await stage.look()
        assert await in_thread(rows) == ["echo#0", "echo#1"]
        await stage.look()
        assert (await in_thread(rows), told) == (["echo#1"], [RemovedReplica("echo", node.id, 0)])
        assert stage.probed == []

    async def test_another_engine_under_the_same_key_is_not_the_replicas(self, stage: Stage) -> None:
        node = await stage.node()
        stage.lists(node, ("echo", 0, "127.0.0.1:59999"))
        await stage.look()
        await stage.look()
        assert await in_thread(rows) == []

    @pytest.mark.rule("R4.34", "R4.5", "T-REC-44")
    @pytest.mark.parametrize(
        "reply",
        [RequestTimeout(""), NoResponders(""), b"{", m.RunningReply(error="busy"), RuntimeError("bug")],
        ids=["timeout", "nobody", "unreadable", "an error", "a defect"],
    )
    async def test_what_it_does_not_say_concludes_nothing(self, stage: Stage, reply: Any) -> None:
        """And what one node's worker does keeps no other from being judged."""
        odd, well = await stage.node("odd"), await stage.node("well")
        stage.lists(odd, reply)
        stage.lists(well, ENGINE)
        stage.ports = {ENGINE[2]: Sign.BUSY}
        for _ in range(4):
            await stage.look()
        assert await in_thread(rows) == ["echo#0", "echo#0"]
        assert stage.asked(well) == 1

    @pytest.mark.rule("R4.33", "R5.9", "R5.11", "T-REC-45", "T-REC-23")
    async def test_who_needs_no_question_is_not_asked(self, stage: Stage) -> None:
        """D-ONE-PROBE: fresh rows, no replicas yet or no more, nodes that are not healthy or are silent."""
        now = clock.now()
        nodes = [
            await stage.node("fresh", replicas=0),
            await stage.node("loading", replicas=0),
            await stage.node("draining", drained_at=now),
            await stage.node("unhealthy", unhealthy_at=now),
            await stage.node("silent", last_heartbeat=now - timedelta(seconds=70)),
        ]
        old = now - LONG_AGO
        await in_thread(lambda: hot.replica(nodes[0], updated_at=now))
        await in_thread(lambda: hot.replica(nodes[1], state="loading", address="", updated_at=old))
        await in_thread(lambda: hot.replica(nodes[1], index=1, state="unloading", updated_at=old))
        assert (await stage.look(), stage.bus.asked, stage.probed) == (0, {}, [])
        assert await in_thread(ask) is False

    async def test_a_worker_that_hangs_holds_up_no_other(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the limit what is known is written; the rest stays as it was."""
        monkeypatch.setattr(state_pass, "CHECK_LIMIT", 0.2)
        hanging, dead = await stage.node("hanging"), await stage.node("dead")
        stage.lists(hanging, NEVER)
        stage.lists(dead)
        await change(dead, missed_reports=1)
        await stage.look()
        left = await in_thread(only)
        assert (left.node_id, left.missed_reports, left.missed_probes) == (hanging.id, 0, 0)


class TestPort:
    """Where the worker says nothing."""

    @pytest.mark.rule("R4.37", "R4.39", "T-REC-24")
    async def test_an_answer_makes_it_fresh(self, stage: Stage) -> None:
        await stage.node()
        stage.ports = {ENGINE[2]: Sign.ALIVE}
        await change(None, missed_probes=2)
        await stage.look()
        row = await in_thread(only)
        assert (row.missed_probes, clock.now() - row.updated_at < LONG_AGO) == (0, True)

    @pytest.mark.rule("R4.39", "R5.11", "T-REC-28")
    async def test_a_busy_engine_is_kept_and_looked_at_again(self, stage: Stage) -> None:
        await stage.node()
        stage.ports = {ENGINE[2]: Sign.BUSY}
        await change(None, missed_probes=2)
        assert [await stage.look() for _ in range(3)] == [1, 1, 1]
        row = await in_thread(only)
        assert (row.missed_probes, clock.now() - row.updated_at >= LONG_AGO) == (0, True)

    @pytest.mark.rule(
        "R4.40", "R4.41", "R5.10", "R5.2", "T-REC-29", "T-REC-30", "T-HLT-12", "T-HLT-13", "C16"
    )
    async def test_an_unreachable_one_goes_with_the_third_miss_whatever_runs_there(
        self, stage: Stage
    ) -> None:
        """Its node stays healthy. No worker has said it, so its engine is stopped before the row goes."""
        node = await stage.node()
        await change(None, in_flight=7)
        left = []
        for _ in range(3):
            await stage.look()
            row = await in_thread(only)
            left.append(row.state)
        assert left == ["loaded", "loaded", "unloading"]
        assert (row.phase, row.reason, row.in_flight) == ("draining", "lost", 7)
        assert await in_thread(lambda: BackendNode.objects.get(pk=node.pk).status) == "healthy"


class TestLoop:
    async def test_a_hint_starts_a_look_and_none_waits_for_another(self, stage: Stage) -> None:
        """The worker of one node hangs; what is hinted meanwhile is looked at all the same."""
        hanging = await stage.node("hanging")
        stage.lists(hanging, NEVER)
        life = StatePass(stage.bus)
        running = asyncio.create_task(life.run())
        life.wake()

        await until(lambda: stage.asked(hanging) == 1)
        dead = await stage.node("dead")
        stage.lists(dead)
        await change(dead, exit_reported=True)
        life.wake()

        async def gone() -> bool:
            return len(await in_thread(rows)) == 1

        await until(gone)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def test_a_look_that_fails_is_not_the_last(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        life, looked = StatePass(stage.bus), asyncio.Event()
        failures = [DatabaseError("away"), RuntimeError("bug")]

        def fails(**_: Any) -> list[NodeModel]:
            if failures:
                raise failures.pop()
            looked.set()
            return []

        monkeypatch.setattr(checks, "claim_suspects", fails)
        running = asyncio.create_task(life.run())

        def tried() -> bool:
            life.wake()
            return looked.is_set()

        await until(tried)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [record.levelname for record in caplog.records if "engines" in record.getMessage()] == [
            "ERROR",
            "WARNING",
        ]


class TestExitThatWasReported:
    async def note(self, node: BackendNode, *ended: checks.ExitReport) -> int:
        async with hot.picker() as picker:
            return await checks.report_exits(picker._pool, node.id, ended)

    @pytest.mark.rule("worker-6")
    async def test_is_confirmed_by_the_worker_at_once(self, stage: Stage) -> None:
        """D-EXIT-TOLD. However fresh the row is; what waits for the node hears of its end."""
        node = await stage.node(replicas=2)
        await change(None, updated_at=clock.now())
        stage.lists(node, ("echo", 1, "127.0.0.1:50001"))
        assert await self.note(node, ENDED) == 1
        heard = events.listen(events.NODES)
        await anext(heard)
        assert await stage.look() == 1
        assert await in_thread(rows) == ["echo#1"]
        assert await asyncio.wait_for(anext(heard), 60) == (events.NODES, str(node.id))
        await heard.aclose()  # type: ignore[attr-defined]

    async def test_of_an_earlier_engine_at_the_same_address_ends_nothing(self, stage: Stage) -> None:
        """The report came late: the worker lists an engine under this key and port again."""
        node = await stage.node()
        stage.lists(node, ENGINE)
        await self.note(node, ENDED)
        await stage.look()
        assert not (await in_thread(only)).exit_reported

    @pytest.mark.parametrize(
        "ended",
        [("echo#1", ENGINE[2]), ("echo#0", "127.0.0.1:50009"), ("other#0", ENGINE[2])],
        ids=["index", "address", "model"],
    )
    async def test_of_another_engine_puts_nothing_in_question(self, stage: Stage, ended: Any) -> None:
        node, other = await stage.node(), await stage.node("other", replicas=0)
        assert await self.note(node, checks.ExitReport(*ended)) == 0
        assert await self.note(other, ENDED) == 0
        await change(
            None, **{name: value for name, value in columns("unloading").items() if name != "address"}
        )
        assert await self.note(node, ENDED) == 0
        assert not (await in_thread(only)).exit_reported

    async def test_waits_for_a_word_and_then_for_the_port(self, stage: Stage) -> None:
        node = await stage.node()
        await self.note(node, ENDED)
        stage.ports = {ENGINE[2]: Sign.BUSY}
        await stage.look()
        assert (await in_thread(only)).exit_reported
        stage.ports = {}
        await stage.look()
        assert (await in_thread(only)).reason == "lost"

    async def test_overtakes_a_look_that_began_before(self, stage: Stage) -> None:
        """That one asked before the engine ended: its answer does not make the row fresh."""
        node = await stage.node()
        (suspect,) = await in_thread(claim)
        await self.note(node, ENDED)
        await in_thread(lambda: checks.record_results({suspect: ALIVE}, now=clock.now()))
        assert (await in_thread(only)).exit_reported
        assert len(await in_thread(claim)) == 1


class TestRows:
    @pytest.mark.rule("R4.3")
    def test_a_row_is_claimed_by_one(self) -> None:
        Stage().make("one", 2)
        with psycopg.connect(hot.database_url()) as other:
            other.execute("SELECT 1 FROM node_models WHERE replica_index = 0 FOR UPDATE")
            assert [one.process_key for one in claim()] == ["echo#1"]
        assert [one.process_key for one in claim()] == ["echo#0"]
        assert claim() == []
        a_tick_passes()
        assert len(claim()) == 2

    @repeated
    def test_of_controllers_that_look_at_once_each_row_has_one(self) -> None:
        stage = Stage()
        for number in range(4):
            stage.make(f"n{number}", 3)
        results = at_once(*[claim] * 4)
        assert unexpected(results) == []
        assert sorted(one.id for found in results for one in found) == sorted(
            NodeModel.objects.values_list("pk", flat=True)
        )

    @repeated
    def test_passes_and_the_hot_path_take_rows_in_one_order(self) -> None:
        """Picks, outcomes and counts of the same rows at once: nobody waits in a circle."""
        stage = Stage()
        for number in range(4):
            stage.make(f"n{number}", 3)
        NodeModel.objects.update(in_flight=1)
        found = {one: CheckResult(gone=one.replica_index == 2, confirmed=True) for one in claim()}
        process = WebProcess.objects.create(host="h", pid=1)

        def settle() -> None:
            checks.record_results(found, now=clock.now())

        def release() -> None:
            with transaction.atomic(), connection.cursor() as cursor:
                about: dict[str, Any] = {
                    "process": process.pk,
                    "ids": [one.id for one in found],
                    "now": clock.now(),
                }
                cursor.execute(statements.LOCK_USED, about)
                cursor.execute(statements.RELEASE_ALL, about)

        assert unexpected(at_once(settle, release, recount, settle, release, recount)) == []
        # A row that somebody held was left for this one.
        recount()
        assert (NodeModel.objects.count(), recount()) == (8, 0)

    @pytest.mark.rule("T-REG-127", "T-REG-129")
    @pytest.mark.parametrize(
        "meanwhile",
        [{"address": "127.0.0.1:1"}, columns("unloading", address=ENGINE[2]), {"checked_at": None}],
        ids=["another engine", "being unloaded", "claimed again"],
    )
    @pytest.mark.parametrize(
        "found", [ALIVE, CheckResult(gone=True), CheckResult(missed_probes=1)], ids=["a", "g", "m"]
    )
    def test_an_outcome_is_of_the_row_that_was_claimed(
        self, meanwhile: dict[str, Any], found: CheckResult
    ) -> None:
        Stage().make("one")
        (suspect,) = claim()
        NodeModel.objects.update(**meanwhile)
        before = NodeModel.objects.values().get()
        assert checks.record_results({suspect: found}, now=clock.now()) == []
        assert NodeModel.objects.values().get() == before

    def test_an_outcome_is_not_of_a_row_that_took_the_place(self) -> None:
        node = Stage().make("one")
        (suspect,) = claim()
        NodeModel.objects.all().delete()
        hot.replica(node)
        assert checks.record_results({suspect: CheckResult(gone=True)}, now=clock.now()) == []
        assert rows() == ["echo#0"]

    def test_a_pick_during_the_look_keeps_its_time(self) -> None:
        Stage().make("one")
        (suspect,) = claim()
        picked = clock.now() + timedelta(seconds=5)
        NodeModel.objects.update(updated_at=picked)
        checks.record_results({suspect: ALIVE}, now=clock.now())
        assert only().updated_at == picked

    @pytest.mark.rule("R4.35")
    def test_who_is_not_in_question_any_more_loses_the_streak(self) -> None:
        """Its next miss is the first again."""
        node = Stage().make("one", 2)
        NodeModel.objects.update(missed_reports=1, missed_probes=2)
        NodeModel.objects.filter(replica_index=1).update(updated_at=clock.now())
        assert ask()
        found = NodeModel.objects.filter(node=node).order_by("replica_index")
        assert list(found.values_list("missed_reports", "missed_probes")) == [(1, 2), (0, 0)]

    @pytest.mark.parametrize("count", [1, 40])
    def test_a_pass_costs_the_same_for_few_and_for_many(
        self, count: int, django_assert_num_queries: Any
    ) -> None:
        stage = Stage()
        for number in range(count):
            stage.make(f"n{number}", 3)
        NodeModel.objects.filter(replica_index=2).update(missed_reports=1, updated_at=clock.now())
        with django_assert_num_queries(6):
            assert ask()
        NodeModel.objects.filter(replica_index=2).update(updated_at=clock.now() - LONG_AGO)
        with django_assert_num_queries(4):
            claimed = claim()
        findings = [CheckResult(gone=True, confirmed=True), ALIVE, CheckResult(missed_probes=1)]
        found = {one: findings[one.replica_index] for one in claimed}
        with django_assert_num_queries(11):
            assert len(checks.record_results(found, now=clock.now())) == count

    @pytest.mark.rule("R4.3", "C1", "R4.4", "C49")
    def test_the_schedule_wakes_controllers_if_something_is_in_question(self) -> None:
        Stage().make("one")
        with psycopg.connect(hot.database_url(), autocommit=True) as link:
            link.execute(f"LISTEN {checks.CHANNEL}")
            with psycopg.connect(hot.database_url()) as other:
                other.execute("SELECT pg_advisory_xact_lock(%s)", [int(Lock.STATE_PASS)])
                tasks.state_pass()
                assert list(link.notifies(timeout=0)) == []
            tasks.state_pass()
            assert [note.channel for note in link.notifies(timeout=10, stop_after=1)] == [checks.CHANNEL]


class TestCounts:
    def count(self, *, shares: tuple[int, ...], counted: int, **fields: Any) -> NodeModel:
        row = hot.replica(hot.node(), in_flight=counted, **fields)
        for number, share in enumerate(shares):
            process = WebProcess.objects.create(host="h", pid=number)
            ReplicaUse.objects.create(process=process, replica=row, count=share)
        return row

    @pytest.mark.rule("R4.42", "R4.43", "C7", "C8", "T-REC-34", "T-REC-39", "T-REG-128")
    def test_a_count_that_nobody_carries_is_taken_off(self) -> None:
        """D-RECOUNT: a process's row was deleted by hand, its shares went along; what others carry stays."""
        row = self.count(shares=(3, 2), counted=5)
        WebProcess.objects.filter(pid=0).delete()
        tasks.state_pass()
        assert only().in_flight == 2
        assert (recount(), only().updated_at) == (0, row.updated_at)

    @pytest.mark.rule("R4.43", "T-REC-35", "T-REC-36", "T-REC-37", "T-REC-38")
    @pytest.mark.parametrize(("shares", "counted"), [((3, 2), 5), ((0,), 0), ((), 0)])
    def test_a_true_count_stays_however_long_ago_the_last_pick_was(
        self, shares: tuple[int, ...], counted: int
    ) -> None:
        """Requests may run for hours; who carries them says so."""
        self.count(shares=shares, counted=counted, last_used=clock.now() - timedelta(hours=9))
        assert (recount(), only().in_flight) == (0, counted)

    def test_a_replica_that_is_being_used_is_left_for_the_next_pass(self) -> None:
        self.count(shares=(), counted=2)
        with psycopg.connect(hot.database_url()) as other:
            other.execute("SELECT 1 FROM node_models FOR UPDATE")
            assert recount() == 0
        assert (recount(), only().in_flight) == (1, 0)

    def test_a_share_that_was_added_before_the_lock_counts(self) -> None:
        """The sum is taken by a statement that began after the rows were locked."""
        row = self.count(shares=(1,), counted=9)
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        ReplicaUse.objects.filter(replica=row).update(count=4)
        assert (recount(), only().in_flight) == (1, 4)

    def test_a_departed_replica_has_no_count(self) -> None:
        """It is no replica any more, whatever shares its row still has."""
        self.count(shares=(2,), counted=0, phase="departed")
        assert recount() == 0
