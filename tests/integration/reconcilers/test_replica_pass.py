"""The replica pass on PostgreSQL: what it sees, what it asks for, and what the rules say afterwards."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.accounts import actors
from localai_cluster.kit import clock, errors
from localai_cluster.kit.transactions import Lock, try_lock_across
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from localai_cluster.messaging.messages import decode
from nodes.definitions import folder
from nodes.gateway.request import InferenceRequest
from nodes.loading import load_request
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel
from nodes.models.replica import load_key
from nodes.reconcilers import replicas, tasks
from nodes.reconcilers.tasks import SCHEDULES
from nodes.registry import labels
from nodes.replicas import drains, terminations, unload_requests
from nodes.scheduling import passes, store
from nodes.scheduling.passes import clear_cooldowns
from nodes.scheduling.rules import Rule
from nodes.scheduling.snapshot import RuleDecision, Unsatisfiable
from operations.changes import events
from operations.executor.work import Work, write_batch
from operations.ledger import admission, attempts
from operations.ledger.progress import Recorder
from operations.models import Operation, Status
from tests.conftest import until
from tests.support import api, hot
from tests.support.bus import PlayedBus
from tests.support.races import after, holding
from tests.support.replicas import columns

pytestmark = pytest.mark.django_db

commits = pytest.mark.django_db(transaction=True)
"""For what another connection must see."""

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> Path:
    """A models folder that defines `m`."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    define(tmp_path, "m")
    return tmp_path


def define(path: Path, *names: str) -> None:
    for name in names:
        (path / f"{name}.yaml").write_text(f"name: {name}\nbackend: echo\nparameters: {{model: {name}}}\n")


def rule(minimum: int = 0, maximum: int = 0, *, model: str = "m", **fields: Any) -> None:
    store.set_rule(Rule(model, min_replicas=minimum, max_replicas=maximum, **fields), clock.now())


def stored(model: str = "m") -> ModelSchedulingConfig:
    return ModelSchedulingConfig.objects.get(model_name=model)


def loads(model: str = "m") -> list[Operation]:
    return list(Operation.objects.filter(kind=load_request.KIND, element=model).order_by("created_at"))


def ends(operation: Operation, status: Status, error: str = "", *, behind: float = 0.0) -> None:
    """End it, by a controller whose clock is `behind` by so many seconds."""
    operation.status, operation.error = status, error
    operation.finished_at = clock.now() - timedelta(seconds=behind)
    operation.save()
    with transaction.atomic():
        events.emit([operation])


# --- loads


@pytest.mark.rule("R4.10", "R4.21", "R2.64", "R1.86", "T-REG-49", "T-REC-22", "T-ROU-13")
def test_a_minimum_of_a_model_that_was_never_served_is_loaded() -> None:
    """From its definition, without a first request (item 11 of what the reference was seen to fail)."""
    hot.node("one")
    rule(1)
    assert replicas.run_pass(tick=True)
    (asked,) = loads()
    assert (asked.actor, asked.status) == ("system", Status.PENDING)
    assert stored().reason == "1 wanted, 0 running, 0 loading: starting 1"
    for _ in range(2):
        assert replicas.run_pass(tick=True)
    assert loads() == [asked]
    assert (stored().loading_replicas, stored().reason, stored().unsatisfiable_ticks) == (1, "1 loading", 0)
    hot.replica(BackendNode.objects.get(), "m", last_used=clock.now())
    ends(asked, Status.COMPLETED)
    replicas.run_pass(tick=True)
    assert (stored().current_replicas, stored().reason) == (1, "satisfied: 1 there")


@pytest.mark.rule("R4.7", "R1.86", "T-REG-53", "R4.12", "R4.6")
def test_rules_that_only_route_are_left_alone(models: Path) -> None:
    define(models, "all")
    rule(model="routed", node_selector={"tier": "a"})
    rule(model="all", spread_all=True)
    rule(0, 2, model="most")
    rule(1, model="least")
    assert [desired_state.model for desired_state in passes.read_desired_states()] == ["all", "least", "most"]
    replicas.run_pass(tick=True)
    assert (stored("routed").checked_at, stored("all").reason) == (None, "there is no healthy node")


@pytest.mark.rule("R4.15", "R1.68", "T-REC-8")
def test_a_load_is_for_any_node_that_the_rule_chooses_when_it_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was not there yet when the pass looked may take it; placement reads the selector."""
    fits, _ = hot.node("fits"), hot.node("other")
    NodeLabel.objects.create(node=fits, key="tier", value="a")
    rule(1, node_selector={"tier": "a"})
    asked: list[Any] = []
    monkeypatch.setattr(
        load_request, "request_scale_up", lambda model, **wish: asked.append(wish["allowed_nodes"])
    )
    replicas.run_pass(tick=True)
    assert asked == [None]


@pytest.mark.rule("R4.22", "R1.66")
def test_what_an_unhealthy_node_has_is_replaced() -> None:
    sick, _ = hot.node("sick", unhealthy_at=clock.now()), hot.node("well")
    hot.replica(sick, "m")
    rule(1)
    replicas.run_pass(tick=False)
    assert len(loads()) == 1
    assert stored().current_replicas == 0


@pytest.mark.rule("R1.62", "R4.10")
def test_the_engine_of_a_failed_load_takes_no_slot_however_long_it_does_not_stop() -> None:
    hot.replica(hot.node(max_replicas_per_model=1), "m", phase="stopping", reason="load_failed")
    rule(1)
    replicas.run_pass(tick=True)
    assert [load.status for load in loads()] == [Status.PENDING]
    assert stored().unsatisfiable_ticks == 0


@pytest.mark.rule("R4.5", "R4.15")
def test_a_refusal_is_said_and_stops_no_other_model(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal ends this model's requests; flags stay when nothing was asked for."""
    define(models, "bad", "worse")
    hot.node("one", max_replicas_per_model=3)
    for name in ("bad", "m", "worse"):
        rule(2, model=name)
    ModelSchedulingConfig.objects.update(unsatisfiable_ticks=1)
    ask, asked = load_request.request_scale_up, []

    def refuses(model: str, **fields: Any) -> Operation:
        asked.append(model)
        if model == "bad":
            raise errors.Conflict("model_unload of bad is in progress")
        if model == "worse":
            raise ZeroDivisionError
        return ask(model, **fields)

    monkeypatch.setattr(load_request, "request_scale_up", refuses)
    replicas.run_pass(tick=True)
    assert asked == ["bad", "m", "m", "worse"]
    assert stored("bad").reason.endswith("starting 2; refused: model_unload of bad is in progress")
    assert stored("worse").reason.endswith("starting 2; it failed: see the log")
    assert [stored(name).unsatisfiable_ticks for name in ("bad", "m", "worse")] == [1, 0, 1]


@commits
def test_a_rule_shows_what_is_there_now_not_what_the_last_pass_found() -> None:
    """Review R14: for up to 30 s it said "running 0, loading 0" beside a running replica."""
    node = hot.node("one")
    rule(1)

    def shown() -> tuple[int, int, int]:
        state = api.admin().get("/api/nodes/scheduling/m").json()["state"]
        return state["wanted"], state["current"], state["loading"]

    revisions = [store.rules_revision()]
    replicas.run_pass(tick=True)
    assert shown() == (1, 0, 1), "the load that the pass has asked for"
    revisions.append(store.rules_revision())
    hot.replica(node, "m")
    revisions.append(store.rules_revision())
    (load_of_m,) = loads()
    ends(load_of_m, Status.COMPLETED)
    assert shown() == (1, 1, 0)
    assert len({*revisions, store.rules_revision()}) == 4, "pages read the rules again each time"
    assert store.LOAD_KIND == load_request.KIND


# --- what cannot be had


@pytest.mark.rule("R4.23", "R4.8", "C9", "C10", "R1.87", "T-REC-17")
def test_what_cannot_be_had_is_counted_shown_and_rests() -> None:
    rule(1)
    for ticks in (1, 2, 3, 3, 3):
        replicas.run_pass(tick=True)
        assert stored().unsatisfiable_ticks == ticks
    shown = api.admin().get("/api/nodes/scheduling/m").json()
    assert shown["unsatisfiable_until"] > clock.now().isoformat()
    assert shown["state"].keys() == {"wanted", "current", "loading", "reason", "at"}
    assert shown["state"]["reason"].startswith("there is no healthy node; nothing is tried until")
    assert shown["state"]["wanted"] == 1
    assert loads() == []


@pytest.mark.rule("R1.88", "R4.23", "T-REC-18", "T-REC-20")
def test_an_event_that_clears_the_flags_ends_the_cooldown() -> None:
    """A label here; the other events clear them in the same way."""
    node = hot.node("one")
    rule(1, node_selector={"tier": "a"})
    for _ in range(3):
        replicas.run_pass(tick=True)
    assert stored().unsatisfiable_until
    labels.edit_labels(node.id, {"tier": "a"}, drop=None, actor=actors.CONTROLLER, now=clock.now())
    replicas.run_pass(tick=False)
    assert (len(loads()), stored().unsatisfiable_ticks, stored().unsatisfiable_until) == (1, 0, None)


@pytest.mark.rule("R1.87", "R1.88")
def test_flags_that_were_cleared_during_a_pass_are_not_set_by_it() -> None:
    """A node that registers between the look and the write must not wait for a cooldown."""
    rule(1)
    ModelSchedulingConfig.objects.update(unsatisfiable_ticks=2)
    (seen,) = passes.read_desired_states()
    with transaction.atomic():
        clear_cooldowns(clock.now())
    flags = Unsatisfiable("m", 3, clock.now() + HOUR, "full")
    passes.write_results([RuleDecision("m", 1, 0, 0, "full", (flags,))], {"m": seen}, clock.now())
    assert (stored().unsatisfiable_ticks, stored().checked_at) == (0, None)


@pytest.mark.rule("R4.21")
def test_a_rule_for_a_model_without_definition_says_so_until_there_is_one(models: Path) -> None:
    hot.node("one")
    rule(1, model="later")
    replicas.run_pass(tick=True)
    assert stored("later").reason == "no model later is defined in the models folder"
    assert (stored("later").unsatisfiable_ticks, stored("later").unsatisfiable_until) == (1, None)
    define(models, "later")
    folder._folder.cache_clear()  # which looks once a second
    replicas.run_pass(tick=True)
    assert len(loads("later")) == 1
    assert stored("later").unsatisfiable_ticks == 0


def test_a_load_that_failed_counts_once_and_is_repeated() -> None:
    hot.node("one")
    rule(1)
    replicas.run_pass(tick=True)
    ends(loads()[0], Status.FAILED, "the engine refused")
    assert replicas.run_pass(tick=False)
    assert len(loads()) == 1
    replicas.run_pass(tick=True)
    assert len(loads()) == 2
    assert stored().unsatisfiable_ticks == 1
    assert stored().reason.endswith("the last load failed: the engine refused")
    replicas.run_pass(tick=True)
    assert stored().unsatisfiable_ticks == 1


@pytest.mark.rule("R4.23", "C9")
def test_each_failed_load_counts_once_whatever_the_clock_of_its_controller() -> None:
    """It seemed older than the pass that had requested the load: the model was loaded again without end."""
    hot.node("one")
    rule(1)
    replicas.run_pass(tick=True)
    for ticks, behind in ((1, 2.0), (2, 4.0), (3, 3.0)):
        ends(loads()[-1], Status.FAILED, "refused", behind=behind)
        replicas.run_pass(tick=False)
        assert len(loads()) == ticks
        replicas.run_pass(tick=True)
        assert stored().unsatisfiable_ticks == ticks
    assert stored().unsatisfiable_until
    assert len(loads()) == 3


def test_a_dismissed_failure_lets_no_former_one_count_again() -> None:
    hot.node("one")
    rule(1)
    replicas.run_pass(tick=True)
    for suffix in ("0", "1"):
        ends(loads()[-1], Status.FAILED, "refused")
        Operation.objects.filter(pk=loads()[-1].pk).update(key=load_key("m", f"ended {suffix}"))
        replicas.run_pass(tick=True)
    assert stored().unsatisfiable_ticks == 2
    ends(loads()[-1], Status.CANCELLED)
    Operation.objects.filter(pk=loads()[1].pk).update(dismissed_at=clock.now())
    replicas.run_pass(tick=True)
    assert stored().unsatisfiable_ticks == 0


@pytest.mark.rule("R1.85")
def test_an_edit_forgets_what_was_made_of_the_former_rule() -> None:
    rule(1)
    replicas.run_pass(tick=True)
    assert "state" in api.admin().get("/api/nodes/scheduling/m").json()
    rule(2)
    assert "state" not in api.admin().get("/api/nodes/scheduling/m").json()
    assert stored().unsatisfiable_ticks == 1


# --- scale-down


def idle(node: BackendNode, index: int, **fields: Any) -> NodeModel:
    return hot.replica(node, "m", index, last_used=clock.now() - HOUR, **fields)


@pytest.mark.rule("R4.17", "R4.18", "R4.19", "T-REC-6")
def test_an_idle_replica_leaves_the_picks_and_is_unloaded_exactly() -> None:
    """It is an operation for this one replica; its row stays until its engine is gone."""
    node = hot.node("one", max_replicas_per_model=2)
    kept, gone = idle(node, 0), idle(node, 1)
    rule(1)
    replicas.run_pass(tick=True)
    (operation,) = Operation.objects.all()
    assert (operation.kind, operation.actor, operation.node_id) == ("model_unload", "system", node.id)
    assert operation.payload["replica_index"] == 1
    assert operation.payload["reason"] == stored().reason
    gone.refresh_from_db()
    assert (gone.state, gone.owner_id) == ("unloading", operation.id)
    replicas.run_pass(tick=True)
    kept.refresh_from_db()
    assert (kept.state, Operation.objects.count()) == ("loaded", 1)


@commits
@pytest.mark.rule("R4.19")
async def test_the_unload_stops_this_engine_and_then_the_row_goes() -> None:
    """Key and address name the process; the other replica is not touched (D-SCALE-EXACT)."""
    node = await hot.in_thread(lambda: hot.node("one", max_replicas_per_model=2))
    kept = await hot.in_thread(lambda: idle(node, 0))
    await hot.in_thread(lambda: idle(node, 1))
    await hot.in_thread(lambda: rule(1))
    await hot.in_thread(lambda: replicas.run_pass(tick=True))
    (operation,) = await hot.in_thread(lambda: attempts.claim("c", now=clock.now(), lease=60, limit=1))
    bus = PlayedBus()
    stop = messages.subject("model.stop", str(node.id))
    bus.replies[stop] = m.StopModelReply(matched=True, freed=True, terminated=True)
    await asyncio.wait_for(unload_requests.UnloadModel(bus)(Work(operation, Recorder(write_batch))), 60)
    (request,) = [decode(body, m.StopModelRequest) for body in bus.asked[stop]]
    assert (request.process_key, request.expected_address) == ("m#1", "127.0.0.1:50001")
    assert await hot.in_thread(NodeModel.objects.get) == kept


@pytest.mark.rule("R4.18")
def test_a_replica_serves_again_when_somebody_cancels_its_unload_in_time() -> None:
    replica, _ = idle(hot.node("one"), 0), idle(hot.node("two"), 0)
    replicas.retire_replica(replica.pk, "idle", clock.now())
    admission.cancel(Operation.objects.get().id, actor="anna", now=clock.now())
    assert [one.id for one in drains.return_abandoned()] == [replica.pk]
    assert NodeModel.objects.filter(state="loaded").count() == 2


@pytest.mark.rule("R4.17", "R2.52")
def test_a_replica_stays_when_an_eviction_took_the_other_one_since_the_plan() -> None:
    rule(1)
    replica, other = idle(hot.node("one"), 0), idle(hot.node("two"), 0)
    terminations.evict([other.pk], now=clock.now())
    with pytest.raises(errors.Conflict, match="another replica of the model has gone"):
        replicas.retire_replica(replica.pk, "idle", clock.now())
    assert NodeModel.objects.get(pk=replica.pk).state == "loaded"


@pytest.mark.rule("R4.18", "R1.58")
@pytest.mark.parametrize(
    ("column", "value"),
    [("in_flight", 1), ("last_used", None), ("last_released_at", None), ("phase", "draining")],
    ids=["busy", "began", "ended", "draining"],
)
def test_a_replica_that_is_used_before_its_row_is_locked_stays(column: str, value: Any) -> None:
    """The plan was made a moment ago; the row decides. A time without value is now."""
    replica = idle(hot.node("one"), 0)
    changed = columns(phase=value) if column == "phase" else {column: value or clock.now()}
    NodeModel.objects.filter(pk=replica.pk).update(**changed)
    with pytest.raises(errors.Conflict, match="in use again"):
        replicas.retire_replica(replica.pk, "idle", clock.now())
    assert not Operation.objects.exists()
    assert NodeModel.objects.get().phase == changed.get("phase", "serving")


@commits
@pytest.mark.rule("R4.18", "R1.79")
def test_a_request_that_is_being_counted_in_keeps_its_replica() -> None:
    """The pass waits for the row, and then sees the request that has just come."""
    replica = idle(hot.node("one"), 0)
    picked = holding("UPDATE node_models SET in_flight = in_flight + 1 WHERE id = %s", replica.pk)
    (refused,) = after(picked, lambda: replicas.retire_replica(replica.pk, "idle", clock.now()))
    assert isinstance(refused, errors.Conflict)
    assert (NodeModel.objects.get().state, Operation.objects.count()) == ("loaded", 0)


@pytest.mark.rule("R4.18")
def test_a_replica_stays_when_its_unload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both or neither: the row leaves the picks in the transaction that makes the operation."""
    replica = idle(hot.node("one"), 0)

    def refuses(*_: Any, **__: Any) -> Any:
        raise errors.Conflict("busy")

    monkeypatch.setattr(drains, "drain_for_unload", refuses)
    with pytest.raises(errors.Conflict):
        replicas.retire_replica(replica.pk, "idle", clock.now())
    assert (NodeModel.objects.get().state, Operation.objects.count()) == ("loaded", 0)


@commits
@pytest.mark.rule("R4.18", "R1.58", "R1.60")
async def test_the_end_of_a_request_is_what_idleness_counts_from() -> None:
    """A pick moves `last_used`, a release `last_released_at`, and nothing else of the two."""
    replica = await hot.in_thread(lambda: idle(hot.node("one"), 0, address="127.0.0.1:50000"))
    async with hot.picker() as picker:
        request = InferenceRequest(model="m")
        picked = await picker.acquire(request)
        assert picked is not None
        began = await hot.in_thread(lambda: NodeModel.objects.get(pk=replica.pk))
        assert (began.last_released_at, began.in_flight) == (None, 1)
        picker.release(picked)
        await picker.settle()
        ended = await hot.in_thread(lambda: NodeModel.objects.get(pk=replica.pk))
        assert ended.last_released_at is not None
        assert ended.last_released_at >= began.last_used == ended.last_used
        assert ended.updated_at == began.updated_at
        assert ended.idle_since == ended.last_released_at


# --- one at a time, and a constant number of queries


def elsewhere() -> list[bool]:
    """What a pass of another process answers."""
    looked: list[bool] = []

    def look() -> None:
        try:
            looked.append(replicas.run_pass(tick=True))
        finally:
            connection.close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return looked


@commits
@pytest.mark.rule("R4.2", "R4.3")
def test_a_pass_is_left_out_while_another_process_is_at_it() -> None:
    """Try and skip: no process waits for the pass of another one."""
    rule(1)
    with try_lock_across(Lock.REPLICAS) as mine:
        assert mine
        assert elsewhere() == [False]
    assert stored().checked_at is None
    tasks.scale()
    assert stored().checked_at is not None


@commits
@pytest.mark.rule("R4.2", "R4.5")
def test_a_pass_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is gone too, so another process may be at it; the task says so in one line."""
    hot.node("one")
    rule(1)

    def cut(*_: Any, **__: Any) -> Operation:
        with psycopg.connect(hot.database_url()) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
        return Operation.objects.get()

    monkeypatch.setattr(load_request, "request_scale_up", cut)
    tasks.scale()
    connection.close()
    assert stored().checked_at is None


@commits
@pytest.mark.rule("R4.2")
def test_the_lock_is_free_after_a_pass_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rule(1)
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "plan", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            replicas.run_pass(tick=True)
    assert elsewhere() == [True]
    assert stored().checked_at is not None


async def test_a_change_is_looked_at_at_once_and_again_if_another_process_was_at_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tick would do the same within 30 s."""
    looks: Iterator[bool | Exception] = iter([OperationalError("away"), False, True])
    seen: list[bool] = []

    def look(*, tick: bool) -> bool:
        seen.append(tick)
        outcome = next(looks)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(replicas, "run_pass", look)
    monkeypatch.setattr(replicas, "GATHER_SECONDS", 0.0)
    made = replicas.ReplicaPass()
    running = asyncio.create_task(made.run())
    try:
        made.wake()
        await until(lambda: len(seen) == 1)
        made.wake()
        await until(lambda: len(seen) == 3)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert seen == [False] * 3


@pytest.mark.rule("R4.1", "C1")
def test_the_tick_comes_every_thirty_seconds() -> None:
    assert [one.cron for one in SCHEDULES if one.function.endswith(".tasks.scale")] == ["* * * * * */30"]


@pytest.mark.rule("R4.1")
def test_a_pass_takes_the_same_number_of_queries_for_any_number_of_rules_and_nodes() -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as context:
            replicas.run_pass(tick=True)
        return len(context)

    def more(first: int, count: int) -> None:
        for number in range(first, first + count):
            node = hot.node(f"n{number}")
            NodeLabel.objects.create(node=node, key="tier", value="a")
            hot.replica(node, f"m{number}", last_used=clock.now())
            rule(1, model=f"m{number}", node_selector={"tier": "a"})

    more(0, 1)
    few = queries()
    more(1, 12)
    assert queries() == few <= 17
