"""Rows of replicas against a real PostgreSQL: written, counted, picked, removed, and what outlives them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction

from localai_cluster.kit import clock
from nodes.decisions import fleet_cache
from nodes.gateway.request import InferenceRequest, Replica
from nodes.models import BackendNode, ModelLoadInfo, NodeModel
from nodes.registry import lifecycle
from nodes.replicas import engines, hooks, slots
from nodes.replicas.hooks import ALL_REPLICAS, RemovedReplica
from nodes.replicas.slots import Slot
from tests.support import hot
from tests.support.fleet import approved, register
from tests.support.replicas import attempt, publish

pytestmark = pytest.mark.django_db(transaction=True)

REVISION = "0123456789ab"


@pytest.fixture
def heard() -> Iterator[list[RemovedReplica]]:
    """What the hooks are told."""
    told: list[RemovedReplica] = []
    hooks.on_removed.append(told.append)
    yield told
    hooks.on_removed.remove(told.append)


def reserved(node: BackendNode, model: str, mark: str) -> Slot:
    (view,) = fleet_cache.read_fleet(model, allowed_nodes=[node.pk])
    slot = slots.reserve(view, model, attempt=attempt(mark), backend="llama-cpp", now=clock.now())
    assert isinstance(slot, Slot)
    return slot


def loaded(node: BackendNode, model: str, address: str, **options: Any) -> NodeModel:
    mark = f"{model}:{address}"
    slot = reserved(node, model, mark)
    assert publish(
        slot, attempt(mark), address=address, backend="llama-cpp", options=options, revision=REVISION
    )
    return NodeModel.objects.get(pk=slot.id)


def picks(model: str, times: int = 1, *, release: bool = False) -> list[Replica | None]:
    """One pick after the other by one web process."""

    async def scenario() -> list[Replica | None]:
        taken: list[Replica | None] = []
        async with hot.picker() as picker:
            for _ in range(times):
                taken.append(await picker.acquire(InferenceRequest(model=model)))
                if release and taken[-1] is not None:
                    picker.release(taken[-1])
                    await picker.settle()
            return taken

    return asyncio.run(scenario())


@pytest.mark.rule("R1.55", "R1.93", "T-REG-12", "T-REG-59", "T-REG-63")
def test_a_replica_keeps_the_row_that_held_its_slot() -> None:
    """Publishing changes the placeholder in place; a second replica has a row, an index and an address of
    its own."""
    node = hot.node(max_replicas_per_model=2)
    slot = reserved(node, "chat", "chat:1")
    before = NodeModel.objects.get(pk=slot.id)
    assert (before.state, before.address, before.in_flight) == ("loading", "", 0)
    now = clock.now()
    assert publish(
        slot, attempt("chat:1"), address="10.0.0.1:50051", backend="llama-cpp",
        options={"ContextSize": 4096}, revision=REVISION, now=now,
    )  # fmt: skip
    row = NodeModel.objects.get(pk=slot.id)
    assert (row.state, row.address, row.in_flight, row.last_used) == ("loaded", "10.0.0.1:50051", 0, now)
    assert (row.model_options, row.config_revision) == ({"ContextSize": 4096}, REVISION)
    second = loaded(node, "chat", "10.0.0.1:50052")
    assert (row.replica_index, second.replica_index) == (0, 1)
    assert second.pk != row.pk
    with pytest.raises(IntegrityError), transaction.atomic():
        hot.replica(node, "chat")


@pytest.mark.rule("R1.55", "R1.63", "R1.96", "T-REG-98")
def test_an_attempt_that_was_overtaken_publishes_nothing() -> None:
    """Only the mark that holds the slot makes it a replica, and only once."""
    node = hot.node()
    slot = reserved(node, "chat", "chat:2")
    values: dict[str, Any] = {"backend": "b", "options": {}, "revision": REVISION, "now": clock.now()}
    assert not publish(slot, attempt("chat:1"), address="10.0.0.1:1", **values)
    assert NodeModel.objects.get(pk=slot.id).address == ""
    assert publish(slot, attempt("chat:2"), address="10.0.0.1:2", **values)
    assert not publish(slot, attempt("chat:2"), address="10.0.0.1:3", **values)
    assert NodeModel.objects.get(pk=slot.id).address == "10.0.0.1:2"
    assert ModelLoadInfo.objects.count() == 1


@pytest.mark.rule("R1.56", "R1.101", "R1.102", "T-REG-64", "T-REG-69")
def test_removing_one_replica_leaves_its_sibling(heard: list[RemovedReplica]) -> None:
    """The hooks hear the exact index, once."""
    node = hot.node()
    first, second = (hot.replica(node, "chat", index, state="unloading") for index in (0, 1))
    assert engines.confirm_end(first.pk)
    assert not engines.confirm_end(first.pk)
    assert list(NodeModel.objects.values_list("pk", flat=True)) == [second.pk]
    assert heard == [RemovedReplica("chat", node.pk, 0)]


@pytest.mark.rule("R1.56", "R1.102", "R1.103", "T-REG-65", "T-REG-70", "T-REG-150")
def test_removing_all_of_a_node_leaves_other_nodes(heard: list[RemovedReplica]) -> None:
    """Every index of every model goes; each model is announced once, with a negative index, after commit."""
    node, other = hot.node("one"), hot.node("two")
    for index in (0, 1):
        hot.replica(node, "chat", index)
    hot.replica(node, "embed")
    kept = hot.replica(other, "chat")
    with transaction.atomic():
        assert engines.depart(node.pk, now=clock.now()) == 3
        assert heard == []
    assert sorted(heard) == [
        RemovedReplica("chat", node.pk, ALL_REPLICAS),
        RemovedReplica("embed", node.pk, ALL_REPLICAS),
    ]
    assert list(NodeModel.objects.values_list("pk", flat=True)) == [kept.pk]
    assert not NodeModel.objects.serving().of("embed").exists()


@pytest.mark.rule("R1.103", "R1.105", "T-REG-71", "T-ADP-6")
def test_removals_need_no_hook_and_serve_every_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one nothing fails; of several each is called, also after one that fails."""
    node = hot.node()
    monkeypatch.setattr(hooks, "on_removed", [])
    assert engines.confirm_end(hot.replica(node, index=0, state="unloading").pk)
    told: list[str] = []

    def broken(_: RemovedReplica) -> None:
        raise RuntimeError("this one cannot")

    monkeypatch.setattr(hooks, "on_removed", [lambda _: told.append("a"), broken, lambda _: told.append("b")])
    assert engines.confirm_end(hot.replica(node, index=1, state="unloading").pk)
    assert told == ["a", "b"]


@pytest.mark.rule("R1.57", "R1.60", "R1.79", "R1.81", "T-REG-18", "T-REG-66", "T-ADP-22", "R1.59")
def test_a_pick_counts_in_exactly_one_row() -> None:
    """It moves `last_used` and `updated_at` of the row that was picked, and no other."""
    node, before = hot.node(), clock.now()
    hot.replica(node, index=0, in_flight=0, updated_at=hot.EPOCH)
    hot.replica(node, index=1, in_flight=0, updated_at=hot.EPOCH)
    (picked,) = picks("echo")
    assert picked is not None
    assert (picked.node_id, picked.address) == (node.pk, "127.0.0.1:50000")
    taken, left = NodeModel.objects.order_by("replica_index")
    assert (taken.pk, taken.in_flight, left.in_flight) == (picked.id, 1, 0)
    assert min(taken.last_used, taken.updated_at) >= before
    assert (left.last_used, left.updated_at) == (hot.EPOCH + timedelta(seconds=1), hot.EPOCH)


@pytest.mark.rule(
    "R1.58", "R1.60", "T-REG-57", "T-REG-58", "T-REG-149", "R2.72", "T-INF-2", "T-ROU-41", "T-ROU-45"
)
def test_a_release_counts_out_and_never_below_zero() -> None:
    """It moves neither `last_used` nor `updated_at`; a row that has gone or is at zero is no error."""
    row = hot.replica(hot.node())

    async def scenario() -> list[int]:
        seen: list[int] = []

        async def look() -> None:
            await picker.settle()
            seen.append(await hot.in_thread(lambda: NodeModel.objects.get(pk=row.pk).in_flight))

        async with hot.picker() as picker:
            one, two = [await picker.acquire(InferenceRequest(model="echo")) for _ in range(2)]
            assert one is not None
            assert two is not None
            await look()
            between = await hot.in_thread(lambda: NodeModel.objects.get(pk=row.pk))
            picker.release(one)
            await look()
            after = await hot.in_thread(lambda: NodeModel.objects.get(pk=row.pk))
            assert (between.last_used, between.updated_at) == (after.last_used, after.updated_at)
            picker.release(two)
            await look()
            await hot.in_thread(lambda: NodeModel.objects.filter(pk=row.pk).update(in_flight=0))
            assert await picker.acquire(InferenceRequest(model="echo")) is not None
            await hot.in_thread(lambda: NodeModel.objects.filter(pk=row.pk).delete())
            picker.release(one)
            await picker.settle()
        return seen

    assert asyncio.run(scenario()) == [2, 1, 0]


@pytest.mark.rule("R1.79", "T-REG-19", "T-REG-20", "T-REG-31")
def test_the_less_busy_node_wins_and_unhealthy_ones_do_not_count() -> None:
    """A model that is nowhere loaded gets nothing."""
    busy, calm = hot.node("busy"), hot.node("calm", available_vram=1)
    away = hot.node("away", offline_at=clock.now())
    hot.replica(busy, in_flight=3)
    hot.replica(calm, in_flight=1, last_used=clock.now())
    hot.replica(away)
    (picked,) = picks("echo")
    assert picked is not None
    assert picked.node_id == calm.pk
    assert picks("nowhere") == [None]


@pytest.mark.rule("R1.78", "T-REG-22")
def test_nine_picks_visit_each_of_three_idle_replicas() -> None:
    """The memory of their nodes decides only the first time."""
    for number, memory in enumerate((8, 16, 64)):
        hot.replica(hot.node(f"n{number}", available_vram=memory), last_used=hot.EPOCH, index=number)
    visited = Counter(one.node_id for one in picks("echo", 9, release=True) if one is not None)
    assert sorted(visited.values()) == [3, 3, 3]


@pytest.mark.rule(
    *(
        "R1.61",
        "R1.66",
        "R1.76",
        "T-REG-147",
        "T-REG-148",
        "T-REG-153",
        "T-REG-154",
        "T-REG-155",
        "T-REG-156",
    ),
    *("T-REG-157", "T-ADP-23"),
)
def test_serving_replicas_are_the_loaded_ones_of_healthy_nodes() -> None:
    """A node's own list has its rows in every state."""
    assert not NodeModel.objects.serving().exists()
    one, two = hot.node("one"), hot.node("two")
    away = hot.node("away", offline_at=clock.now())
    serving = {hot.replica(one).pk, hot.replica(two).pk}
    for state in ("loading", "unloading", "staging"):
        hot.replica(one, f"is-{state}", state=state)
    hot.replica(away)
    assert set(NodeModel.objects.serving().values_list("pk", flat=True)) == serving
    assert one.replicas.count() == 4
    assert NodeModel.objects.of("echo").loaded().count() == 3


@pytest.mark.rule("R1.84", "T-REG-29", "T-REG-30", "T-REG-32")
def test_of_each_serving_replica_its_index_and_its_requests_are_known() -> None:
    """What a choice among them is made by: each with its own index, restricted to nodes, never null."""
    one, two = hot.node("one", max_replicas_per_model=2), hot.node("two")
    for node, index, requests in ((one, 0, 3), (one, 1, 5), (two, 0, 7)):
        hot.replica(node, index=index, in_flight=requests)
    hot.replica(hot.node("away", offline_at=clock.now()))
    hot.replica(two, index=1, state="unloading")
    serving = NodeModel.objects.of("echo").serving().order_by("node__name", "replica_index")
    columns = ("node__name", "replica_index", "in_flight")
    assert list(serving.values_list(*columns)) == [("one", 0, 3), ("one", 1, 5), ("two", 0, 7)]
    assert list(serving.filter(node__in=[two.pk]).values_list(*columns)) == [("two", 0, 7)]
    assert list(NodeModel.objects.of("nowhere").serving()) == []


def registered_again(_: BackendNode) -> None:
    register(now=clock.now(), auto_approve=True, running_processes=())


def marked_offline(node: BackendNode) -> None:
    lifecycle.deactivate(node.pk, now=clock.now())


def not_listed(node: BackendNode) -> None:
    assert engines.end_unlisted(node.pk, [], before=clock.now() + timedelta(seconds=1))


@pytest.mark.rule("R1.92", "R1.100", "T-REG-102", "T-REG-131", "T-REG-132")
@pytest.mark.parametrize("ends", [registered_again, marked_offline, not_listed], ids=lambda one: one.__name__)
def test_how_it_was_loaded_outlives_whatever_ends_its_replicas(ends: Callable[[BackendNode], None]) -> None:
    """And the revision is the definition's: no row of any node has it alone."""
    node = approved(now=clock.now())
    loaded(node, "chat", "127.0.0.1:7", ContextSize=2048)
    ends(node)
    assert not NodeModel.objects.exists()
    assert ModelLoadInfo.objects.get().model_options == {"ContextSize": 2048}


@pytest.mark.rule("R1.90", "R1.92", "T-REG-88", "T-REG-89", "T-REG-92")
def test_how_a_model_was_loaded_outlives_its_replicas() -> None:
    """One record a model; the last load wins; a model without a name has none."""
    node = hot.node(max_replicas_per_model=2)
    loaded(node, "chat", "10.0.0.1:1", ContextSize=2048)
    loaded(node, "chat", "10.0.0.1:2", ContextSize=4096)
    with transaction.atomic():
        assert engines.depart(node.pk, now=clock.now()) == 2
    (info,) = ModelLoadInfo.objects.all()
    assert (info.model_name, info.backend_type) == ("chat", "llama-cpp")
    assert info.model_options == {"ContextSize": 4096}
    with pytest.raises(IntegrityError), transaction.atomic():
        ModelLoadInfo.objects.create(model_name="", backend_type="llama-cpp")
