"""The mirror of the fleet against the rows: whatever was written, it sees what a full reading sees."""

import threading
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from nodes.decisions import fleet_cache
from nodes.decisions.fleet_cache import FleetCache
from nodes.models import BackendNode, NodeLabel, NodeModel
from nodes.placement.choose import NO_NEED, Candidate, Need, Selector, choose_node
from nodes.placement.explain import FleetView
from nodes.replicas import reserved_memory
from nodes.replicas.engines import SERVING_COLUMNS
from tests.support import hot
from tests.support.effort import EFFORT
from tests.support.replicas import columns

pytestmark = pytest.mark.django_db(transaction=True)

GB = 2**30
ANYTHING = FleetView((), NO_NEED)
NEED = Need(vram=2 * GB, vram_required=True)
SELECTOR = Selector("a", frozenset({("tier", "x")}))


Step = tuple[str, int, int]
"""A write, which node it concerns, and a number that varies it."""


def assert_cache_equals_rows(cache: FleetCache) -> None:
    for model, conflicts in (("a", frozenset({"b"})), ("b", frozenset[str]())):
        for selector in (Selector(model), SELECTOR):
            view, decision = cache.decide(model, FleetView((), NEED, selector), conflicts=conflicts)
            fresh = fleet_cache.read_fleet(model, selector=selector, conflicts=conflicts)
            assert sorted(view.nodes, key=attrgetter("name")) == sorted(fresh, key=attrgetter("name"))
            assert decision == choose_node(fresh, need=NEED, selector=selector)
        for node in fresh:
            assert_node_equals_rows(node, model, conflicts)


def assert_node_equals_rows(node: Candidate, model: str, conflicts: frozenset[str]) -> None:
    """By the queries that the rest of the product uses."""
    row, engines = BackendNode.objects.get(pk=node.id), NodeModel.engines.filter(node=node.id)
    reservations = reserved_memory.by_node(engines).get(node.id, [])
    serving = NodeModel.objects.loaded().filter(node=node.id)
    occupying = NodeModel.objects.of(model).occupying().filter(node=node.id)
    assert node.free_vram == fleet_cache.effectively_free_bytes(vars(row), reservations)
    assert node.loaded == serving.count()
    assert node.in_flight == sum(engines.values_list("in_flight", flat=True))
    assert node.used_indices == set(occupying.values_list("replica_index", flat=True))
    assert node.conflicts == set(
        serving.filter(model_name__in=conflicts).values_list("model_name", flat=True)
    )


def place(node: BackendNode, model: str, number: int) -> None:
    needed = {"vram_needed": GB, "vram_seen": 8 * GB, "vram_seen_at": clock.now(), "loaded_at": clock.now()}
    state = "loaded" if number % 2 else "loading"
    index = NodeModel.engines.filter(node=node, model_name=model).count()
    if not NodeModel.engines.filter(node=node, model_name=model, replica_index=index).exists():
        hot.replica(node, model, index, state=state, **needed)


def move(node: BackendNode, number: int) -> None:
    """Serving, being stopped, or departed."""
    phase = ["serving", "stopping", "departed"][number % 3]
    rows = NodeModel.engines.filter(node=node).exclude(phase="reserved")
    rows.update(**{**SERVING_COLUMNS, "in_flight": 0, **columns(phase=phase)})


def remove(node: BackendNode) -> None:
    NodeModel.engines.filter(node=node).delete()
    NodeLabel.objects.filter(node=node).delete()
    BackendNode.objects.filter(pk=node.pk).delete()


WRITES: dict[str, Callable[[BackendNode, int], Any]] = {
    "register": lambda _, number: hot.node(f"n{uuid4()}", available_vram=8 * GB, vram_read_at=clock.now()),
    "place a": lambda node, number: place(node, "a", number),
    "place b": lambda node, number: place(node, "b", number),
    "count": lambda node, number: (
        NodeModel.engines.filter(node=node).exclude(phase="departed").update(in_flight=number % 3)
    ),
    "move": move,
    "delete replicas": lambda node, number: NodeModel.engines.filter(
        node=node, replica_index__gte=number % 3
    ).delete(),
    "read memory": lambda node, number: BackendNode.objects.filter(pk=node.pk).update(
        available_vram=number * GB, vram_read_at=clock.now() + timedelta(seconds=number - 5)
    ),
    "drain": lambda node, number: BackendNode.objects.filter(pk=node.pk).update(
        drained_at=clock.now() if number % 2 else None
    ),
    "label": lambda node, number: node.label_set.update_or_create(
        key="tier", defaults={"value": "xy"[number % 2]}
    ),
    "delete labels": lambda node, number: node.label_set.all().delete(),
    "remove": lambda node, number: remove(node),
}
"""Everything that placement notices."""
STEPS = st.lists(st.tuples(st.sampled_from(sorted(WRITES)), st.integers(0, 5), st.integers(0, 9)), max_size=4)


def write(steps: list[Step]) -> None:
    for name, position, number in steps:
        nodes = list(BackendNode.objects.order_by("name"))
        WRITES[name](nodes[position % len(nodes)] if nodes else hot.node("first"), number)


@settings(max_examples=8 * EFFORT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["autocommit", "commit", "roll back"]), STEPS), max_size=12))
def test_the_cache_equals_a_fresh_read_after_any_history(history: list[tuple[str, list[Step]]]) -> None:
    """Of writes one by one, and several in one transaction, also rolled back."""
    for node in BackendNode.objects.all():
        remove(node)
    cache = FleetCache()
    assert_cache_equals_rows(cache)
    for mode, steps in history:
        if mode == "autocommit":
            write(steps)
        else:
            with transaction.atomic():
                write(steps)
                transaction.set_rollback(mode == "roll back")
        assert_cache_equals_rows(cache)


def test_a_transaction_that_ends_late_is_seen() -> None:
    """Its number is older than looks that came before its end."""
    node, kept = hot.node("one", available_vram=8 * GB), FleetCache()
    begun, looked = threading.Event(), threading.Event()

    def late() -> None:
        try:
            with transaction.atomic():
                BackendNode.objects.filter(pk=node.pk).update(available_vram=GB)
                begun.set()
                assert looked.wait(timeout=30)
        finally:
            connection.close()

    thread = threading.Thread(target=late)
    thread.start()
    assert begun.wait(timeout=30)
    for number in range(5):
        hot.node(f"later-{number}")
        assert_cache_equals_rows(kept)
    looked.set()
    thread.join()
    assert_cache_equals_rows(kept)
    [it] = [one for one in kept.decide("a", ANYTHING)[0].nodes if one.id == node.pk]
    assert it.available_vram == GB


def test_a_look_is_one_statement_and_one_a_table_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = FleetCache(), list[Any]()
    for number in range(20):
        hot.replica(hot.node(f"n{number}", available_vram=8 * GB))
    plain = fleet_cache._Rows.candidate

    def counted(rows: Any, id: Any) -> Any:
        seen.append(id)
        return plain(rows, id)

    monkeypatch.setattr(fleet_cache._Rows, "candidate", counted)
    for changed, statements in ((20, 4), (0, 1), (1, 2)):
        seen.clear()
        if changed == 1:
            BackendNode.objects.filter(name="n3").update(available_vram=GB)
        with CaptureQueriesContext(connection) as queries:
            kept.decide("m", ANYTHING)
        assert (len(queries), len(seen)) == (statements, changed)


def test_it_begins_again_on_another_server_and_after_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, node = FleetCache(), hot.node("one")
    assert_cache_equals_rows(kept)
    kept._watermark = (
        kept._watermark._replace(xid=2**40) if kept._watermark else None
    )  # of a server that was ahead
    BackendNode.objects.filter(pk=node.pk).update(available_vram=GB)
    assert_cache_equals_rows(kept)
    monkeypatch.setattr(fleet_cache._TableCopy, "refresh", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept.decide("a", ANYTHING)
    monkeypatch.undo()
    BackendNode.objects.filter(pk=node.pk).update(available_vram=2 * GB)
    assert_cache_equals_rows(kept)


def test_a_decision_does_not_visit_nodes_that_no_longer_have_the_model() -> None:
    cache = FleetCache()
    replicas = [hot.replica(hot.node(f"n{number}", available_vram=8 * GB), "m") for number in range(3)]
    cache.decide("m", ANYTHING)
    assert len(cache._rows.model_facts("m", [], {}, {}, {}).used_indices) == 3
    NodeModel.objects.filter(pk__in=[replica.pk for replica in replicas[1:]]).delete()
    cache.decide("m", ANYTHING)
    assert list(cache._rows.model_facts("m", [], {}, {}, {}).used_indices) == [replicas[0].node_id]


def test_some_nodes_only() -> None:
    nodes = [hot.node(f"n{number}", available_vram=8 * GB) for number in range(3)]
    ids = [node.pk for node in nodes]
    seen, decision = FleetCache().decide("a", ANYTHING, allowed_nodes=ids[1:], excluded_nodes=ids[2:])
    assert [one.id for one in seen.nodes] == ids[1:2]
    assert decision == choose_node(fleet_cache.read_fleet("a", allowed_nodes=ids[1:], excluded_nodes=ids[2:]))


def test_what_may_be_rolled_back_is_not_followed() -> None:
    kept, node = FleetCache(), hot.node("one", available_vram=GB)
    assert_cache_equals_rows(kept)
    with transaction.atomic():
        BackendNode.objects.filter(pk=node.pk).update(available_vram=2 * GB)
        assert kept.decide("a", ANYTHING)[0].nodes[0].available_vram == 2 * GB
        transaction.set_rollback(True)
    assert_cache_equals_rows(kept)
