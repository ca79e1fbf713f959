"""Several loads of a model at once, the slots that they take, and the nodes that the model's rule allows."""

import itertools
import random
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest
from django.db import transaction

from localai_cluster.kit import clock, conf, errors
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from nodes.decisions import fleet_cache
from nodes.definitions.files import Definition, parse_definition
from nodes.loading import load_placement, load_request
from nodes.loading.load_attempts import Attempt
from nodes.loading.load_request import (
    SCALE_UP,
    active_loads,
    load_on_other_node,
    request_of,
    request_scale_up,
)
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel, NodeModel
from nodes.models.replica import load_key
from nodes.placement.choose import NO_NEED, choose_node
from nodes.reconcilers import wake_ups
from nodes.replicas import fleet_queries, slots, unload_requests
from nodes.replicas.unload_requests import UnloadRequest
from operations.executor.work import Abandoned, Postpone, Work, write_batch
from operations.ledger import admission, attempts
from operations.ledger.admission import OperationRequest, Requester, admit
from operations.ledger.progress import Recorder
from operations.models import Event, Operation
from tests.support import hot
from tests.support.bus import PlayedBus
from tests.support.fleet import at_once, unexpected
from tests.support.loading import BACKEND, STARTED, Stage, loads, stage
from tests.support.races import ROUNDS
from tests.support.replicas import attempt

__all__ = ["loads", "stage"]
pytestmark = pytest.mark.django_db(transaction=True)


def another(model: str = "m", *only: UUID) -> Operation:
    return request_scale_up(model, allowed_nodes=only or None, actor="system", reason="1 of 2 replicas")


def joined(model: str = "m") -> admission.Admission:
    """As a request asks."""
    request = OperationRequest(load_request.KIND, key=load_key(model), element=model, by=Requester("key"))
    return admit(request, now=clock.now())


def unloaded(model: str = "m") -> admission.Admission:
    return unload_requests.unload(UnloadRequest(model, Requester("anna")), now=clock.now())


def end(operation: Operation) -> None:
    admission.cancel(operation.id, actor="test", now=clock.now())


class TestShares:
    @pytest.mark.rule("R2.16", "T-JOB-6")
    def test_a_request_joins_the_first_load_and_every_other_one_has_a_share_of_its_own(self) -> None:
        first = another()
        requested = joined()
        assert (requested.created, requested.operation.key) == (True, "model:m#0")
        assert joined() == admission.Admission(requested.operation, created=False)
        assert [first.key, another().key, another("n").key] == ["model:m#1", "model:m#2", "model:n#1"]
        end(first)
        assert another().key == "model:m#1", "the lowest that no active load has"
        loads = active_loads(["m", "n", "o"])
        assert (loads.counts, sum(loads.waiting.values())) == ({"m": 3, "n": 1, "o": 0}, 0)

    @pytest.mark.rule("R2.16", "T-JOB-4")
    def test_who_joins_a_load_under_way_waits_for_nothing_of_it(self) -> None:
        """Whatever rows its controller holds at that moment: node, place, rule."""
        work = claimed(joined().operation)
        rule({})
        hot.replica(hot.node(), "m", state="loading", owner=attempt(f"{work.id}:1"))
        with psycopg.connect(hot.database_url()) as controller:
            for model in (BackendNode, NodeModel, ModelSchedulingConfig):
                controller.execute(f"SELECT 1 FROM {model._meta.db_table} FOR UPDATE")
            again = joined()
        assert (again.created, again.operation.id) == (False, work.id)
        assert again.operation.status == "processing"

    def test_loads_of_any_number_of_models_are_counted_with_one_query(
        self, django_assert_num_queries: Any
    ) -> None:
        for number in range(3):
            another(f"m{number}")
        with django_assert_num_queries(1):
            assert active_loads([f"m{number}" for number in range(5)]).counts["m2"] == 1

    def test_a_load_elsewhere_is_the_one_that_requests_join(self) -> None:
        """Two upgrades that stop two replicas of a model want one replica elsewhere."""
        node = hot.node()
        assert load_on_other_node("m", node.id, None).key == "model:m#0"
        assert request_of(joined().operation).excluded_nodes == {node.id}

    @pytest.mark.parametrize("verb", ["unload", "delete"])
    def test_an_unload_and_the_loads_of_its_model_exclude_each_other(self, verb: str) -> None:
        hot.replica(hot.node(), "m")
        wish, ask = UnloadRequest("m", Requester("anna")), getattr(unload_requests, verb)
        one = another()
        with pytest.raises(errors.Conflict, match=str(one.id)):
            ask(wish, now=clock.now())
        end(one)
        operation = ask(wish, now=clock.now()).operation
        for load_it in (another, joined):
            with pytest.raises(errors.Conflict) as refusal:
                load_it()
            assert refusal.value.data["operation"] == operation.id, "a waiting request follows it"
        assert another("m#1").key == "model:m#1#1", "a model whose name looks like a share is another one"

    def test_what_is_not_loaded_but_being_loaded_is_a_conflict(self) -> None:
        one = another()
        with pytest.raises(errors.Conflict, match=str(one.id)):
            unloaded()

    def test_loads_and_unloads_never_begin_together_and_no_two_loads_share(self) -> None:
        hot.replica(hot.node(), "m")
        for _ in range(ROUNDS):
            jobs = [another] * 5 + [unloaded] * 3 + [joined] * 4
            random.Random(1).shuffle(jobs)
            results = at_once(*jobs)
            assert unexpected(results) == []
            active = Operation.objects.active()
            assert set(active.values_list("kind", flat=True)) in (
                {load_request.KIND},
                {unload_requests.UNLOAD_KIND},
            )
            expected = (
                ["model:m#all"] if active.filter(kind=unload_requests.UNLOAD_KIND).exists() else load_keys()
            )
            assert sorted(active.values_list("key", flat=True)) == expected
            for operation in active:
                end(operation)

    def test_a_failure_is_superseded_by_the_next_load_of_its_share_only(self) -> None:
        for operation in (another(), joined().operation):
            (claimed,) = attempts.claim("c", now=clock.now(), lease=60, limit=1)
            assert claimed.id == operation.id
            attempts.finish(claimed.id, claimed.fence, Event.FAIL, now=clock.now(), error="no")
        another()
        left = Operation.objects.filter(status="failed", dismissed_at=None)
        assert [one.key for one in left] == ["model:m#0"]


def load_keys() -> list[str]:
    return [f"model:m#{number}" for number in range(6)]


class TestSlots:
    @pytest.mark.rule("R1.63", "R2.44", "R1.64")
    def test_32_racers_on_8_nodes_get_different_places_and_no_node_is_over_its_cap(self) -> None:
        """Everyone decides from the same rows; who comes too late looks again, as `placing` does."""
        for number in range(8):
            hot.node(f"n{number}", max_replicas_per_model=number % 4 + 1)

        def race(number: int) -> slots.Slot | None:
            for looked in itertools.count():
                chosen = choose_node(fleet_cache.read_fleet("m")).node
                if chosen is None:
                    return None
                slot = slots.reserve(
                    chosen, "m", attempt=attempt(f"{number}:1"), backend="b", now=clock.now()
                )
                if isinstance(slot, slots.Slot):
                    return slot
                assert looked < 32, slot.reason
            raise AssertionError

        results = at_once(*(partial(race, number) for number in range(32)))
        assert [one for one in results if isinstance(one, Exception)] == []
        taken = [(slot.node_name, slot.replica_index) for slot in results if slot is not None]
        assert len(set(taken)) == len(taken) == 20
        assert Counter(name for name, _ in taken) == {f"n{n}": n % 4 + 1 for n in range(8)}
        assert all(index < int(name[1:]) % 4 + 1 for name, index in taken)

    @pytest.mark.rule("R1.63", "R2.44")
    def test_a_place_is_taken_as_the_rows_are_now_and_not_as_they_were(self) -> None:
        node = hot.node(max_replicas_per_model=2)
        (view,) = fleet_cache.read_fleet("m")
        hot.replica(node, "m", 0)
        slot = slots.reserve(view, "m", attempt=attempt("a:1"), backend="b", now=clock.now())
        assert isinstance(slot, slots.Slot)
        assert slot.replica_index == 1
        refused = slots.NoSlot("no free slot for this model")
        assert slots.reserve(view, "m", attempt=attempt("b:1"), backend="b", now=clock.now()) == refused
        NodeModel.objects.filter(replica_index=0).delete()
        BackendNode.objects.update(max_replicas_per_model=1)
        assert slots.reserve(view, "m", attempt=attempt("b:1"), backend="b", now=clock.now()) == refused, (
            "no more than 1"
        )

    @pytest.mark.rule("R1.67", "R1.62")
    def test_a_row_that_is_being_unloaded_keeps_its_slot(self) -> None:
        node = hot.node(max_replicas_per_model=2)
        hot.replica(node, "m", 0, state="unloading", stop_error="may still run")
        (view,) = fleet_cache.read_fleet("m")
        slot = slots.reserve(view, "m", attempt=attempt("a:1"), backend="b", now=clock.now())
        assert isinstance(slot, slots.Slot)
        assert slot.replica_index == 1
        assert NodeModel.objects.get(replica_index=0).stop_error == "may still run"


def rule(selector: Any, model: str = "m") -> None:
    # Not by the store: it refuses what cannot be read.
    ModelSchedulingConfig.objects.create(model_name=model, node_selector=selector)


def labelled(name: str, **labels: str) -> BackendNode:
    node = hot.node(name)
    for key, value in labels.items():
        NodeLabel.objects.create(node=node, key=key, value=value)
    return node


def definition() -> Definition:
    return parse_definition({"name": "m", "backend": "echo", "parameters": {"model": "m"}}, "m.yaml")


def claimed(operation: Operation) -> Work:
    (mine,) = attempts.claim("c", now=clock.now(), lease=60, limit=1)
    assert mine.id == operation.id
    return Work(mine, Recorder(write_batch))


async def placed(work: Work) -> Attempt:
    bus = PlayedBus()
    for id in await hot.in_thread(lambda: list(BackendNode.objects.values_list("id", flat=True))):
        bus.replies[messages.subject("backend.list", str(id))] = m.ListReply(())
    wanted = load_placement.LoadNeeds(definition(), NO_NEED)
    return await load_placement.reserve_slot(bus, work, wanted)


class TestPlacing:
    @pytest.mark.rule("R1.68", "R2.5", "T-ROU-9")
    async def test_a_load_goes_only_where_the_rule_allows(self) -> None:
        def given() -> Work:
            labelled("a", tier="slow")
            labelled("b", tier="fast", zone="x")
            labelled("c", zone="x")
            rule({"tier": "fast"})
            return claimed(joined().operation)

        work = await hot.in_thread(given)
        assert (await placed(work)).slot.node_name == "b"

    async def test_a_load_whose_best_node_answers_decides_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each decision reads the fleet; the reservation checks the node again under its lock."""
        decided, genuine = [], load_placement.decide

        def decide(*arguments: Any) -> Any:
            decided.append(genuine(*arguments))
            return decided[-1]

        monkeypatch.setattr(load_placement, "decide", decide)

        def given() -> Work:
            labelled("a", tier="fast")
            labelled("b", tier="fast")
            return claimed(joined().operation)

        attempt = await placed(await hot.in_thread(given))
        ((_, decision),) = decided
        assert decision.node is not None
        assert decision.node.id == attempt.slot.node_id

    @pytest.mark.parametrize(
        ("selector", "said"),
        [
            ({"tier": "fast"}, ": tier=fast"),
            (["tier"], ", which cannot be read"),
            ("{", ", which cannot be read"),
        ],
        ids=["none", "a list", "a text"],
    )
    @pytest.mark.rule("R1.69", "R2.5", "T-ROU-10")
    async def test_a_selector_that_nothing_matches_is_what_the_load_waits_for(
        self, selector: Any, said: str
    ) -> None:
        """D-SELECTOR-WAITS, D-SELECTOR: the sentence names both, and the wait ends by itself."""

        def given() -> Work:
            labelled("a", tier="slow")
            rule(selector)
            return claimed(joined().operation)

        work = await hot.in_thread(given)
        with pytest.raises(Postpone) as waits:
            await placed(work)
        assert (waits.value.reason, waits.value.waiting) == (
            f"no node matches the selector of model m{said}",
            True,
        )

    def test_a_label_wakes_the_load_that_waits_for_it(self) -> None:
        node, other = labelled("a"), labelled("b")
        rule({"tier": "fast"})
        operation = another("m", node.id)
        work = claimed(operation)
        hour = clock.now() + timedelta(hours=1)
        Operation.objects.update(needed_until=hour)
        attempts.put_back(*work.attempt, Event.WAIT, now=clock.now(), until=hour, reason="no node matches")
        assert wake_ups.wake_waiting_work([node.id]) == 0
        NodeLabel.objects.create(node=other, key="tier", value="fast")
        assert wake_ups.wake_waiting_work([other.id]) == wake_ups.wake_waiting_work(None) == 0, (
            "the load is not for this node"
        )
        NodeLabel.objects.create(node=node, key="tier", value="fast")
        assert wake_ups.wake_waiting_work([other.id]) == 0
        assert wake_ups.wake_waiting_work([other.id, node.id]) == 1

    def test_the_fleet_is_read_with_the_same_number_of_queries_whatever_its_size(
        self, django_assert_num_queries: Any
    ) -> None:
        rule({"tier": "fast", "zone": "x"})
        for size in (1, 5):
            for number in range(size):
                labelled(f"{size}-{number}", tier="fast", zone="x", rack=str(number))
            with django_assert_num_queries(5):
                selector = fleet_queries.selectors_of(["m", "n"])["m"]
                seen = fleet_cache.read_fleet("m", selector=selector)
            assert all(selector.matches(node.labels) for node in seen)


class TestAnother:
    def test_it_is_never_a_step_of_another_transaction(self) -> None:
        """That one would hold the counter of changes while it stands in the next model's line."""
        with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
            another()
        assert not Operation.objects.exists()

    async def test_it_is_carried_out_although_others_serve_and_on_one_of_its_nodes(self) -> None:
        def given() -> Work:
            hot.replica(hot.node("serves"), "m")
            hot.node("a", available_vram=9)
            mine = hot.node("mine")
            return claimed(another("m", mine.id))

        work = await hot.in_thread(given)
        assert request_of(work.operation).is_scale_up
        assert (await placed(work)).slot.node_name == "mine"

    async def test_without_a_place_it_waits_and_then_ends_with_both_reasons(self) -> None:
        def given() -> Work:
            node = hot.node("mine")
            hot.replica(node, "m")
            return claimed(another("m", node.id))

        work = await hot.in_thread(given)
        needed_until = work.operation.needed_until
        assert needed_until is not None
        cluster = conf.cluster()
        assert needed_until >= clock.now() + timedelta(seconds=cluster.install_timeout)
        with pytest.raises(Postpone) as waits:
            await placed(work)
        assert (waits.value.reason, waits.value.seconds) == (
            "no node can take it: 1 no free slot for this model",
            5,
        )
        await hot.in_thread(lambda: Operation.objects.update(needed_until=clock.now()))
        with pytest.raises(Abandoned) as ended:
            await placed(work)
        assert str(ended.value) == f"not possible in time (1 of 2 replicas); {waits.value.reason}"

    async def test_when_its_nodes_are_gone_it_says_so(self) -> None:
        def given() -> Work:
            hot.node("other")
            return claimed(another("m", UUID(int=1)))

        work = await hot.in_thread(given)
        with pytest.raises(Postpone, match="none of the nodes that it may use is registered"):
            await placed(work)


@pytest.mark.parametrize("more", [True, False], ids=["one more", "any"])
async def test_only_a_load_of_one_more_replica_is_carried_out_beside_one_that_serves(
    stage: Stage, loads: list[Any], more: bool
) -> None:
    await hot.in_thread(hot.replica, stage.two)
    stage.lists(stage.one, BACKEND)
    stage.installs(stage.one, STARTED)
    stage.work.operation.payload = {SCALE_UP: more}
    result = await stage.handler(stage.work)
    assert (result.get("node"), result.get("already_loaded")) == (("one", None) if more else (None, True))
