"""The mirror of the fleet against the rows: whatever was written, it sees what a full reading sees."""

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock
from nodes.decisions import fleet_cache, fleet_queries
from nodes.decisions.fleet_cache import FleetCache
from nodes.models import BackendNode, NodeLabel, NodeModel
from nodes.placement.choose import NO_NEED, Need, Selector, choose_node
from nodes.placement.explain import FleetView
from nodes.replicas.lifecycle import SERVES
from tests.support import hot
from tests.support.effort import EFFORT
from tests.support.replicas import columns

pytestmark = pytest.mark.django_db(transaction=True)

GB = 2**30
ANYTHING = FleetView((), NO_NEED)
NEED = Need(vram=2 * GB, vram_required=True)
SELECTOR = Selector("a", frozenset({("tier", "x")}))


def seen_alike(kept: FleetCache) -> None:
    for model, conflicts in (("a", frozenset({"b"})), ("b", frozenset[str]())):
        for selector in (Selector(model), SELECTOR):
            seen, decision = kept.decided(model, FleetView((), NEED, selector), conflicts=conflicts)
            by_rows = fleet_queries.read_fleet(model, selector=selector, conflicts=conflicts)
            assert sorted(seen.nodes, key=lambda one: one.name) == sorted(by_rows, key=lambda one: one.name)
            assert decision == choose_node(by_rows, need=NEED, selector=selector)


def write(chance: random.Random) -> None:
    """Any of the writes that placement notices."""
    node, now = chance.choice(list(BackendNode.objects.order_by("name"))), clock.now()
    self = BackendNode.objects.filter(pk=node.pk)
    rows = NodeModel.engines.filter(node=node)
    writes: list[Callable[[], Any]] = [
        lambda: hot.node(f"n{chance.randrange(10**9)}", available_vram=8 * GB, vram_read_at=now),
        lambda: place(chance, node, "a"),
        lambda: place(chance, node, "b"),
        lambda: rows.exclude(phase="departed").update(in_flight=chance.randrange(3)),
        lambda: rows.exclude(phase="reserved").update(**life(chance)),
        lambda: rows.filter(replica_index__gte=chance.randrange(99)).delete(),
        lambda: self.update(available_vram=GB, vram_read_at=now + timedelta(seconds=1)),
        lambda: self.update(drained_at=chance.choice([None, now])),
        lambda: node.label_set.update_or_create(key="tier", defaults={"value": chance.choice("xy")}),
        lambda: node.label_set.all().delete(),
        lambda: remove(node),
    ]
    chance.choice(writes)()


def life(chance: random.Random) -> dict[str, Any]:
    """Serving, being stopped, or out of sight."""
    return {**SERVES, "in_flight": 0, **columns(phase=chance.choice(["serving", "stopping", "departed"]))}


def place(chance: random.Random, node: BackendNode, model: str) -> None:
    needed = {"vram_needed": GB, "vram_seen": 8 * GB, "vram_seen_at": clock.now(), "loaded_at": clock.now()}
    index = chance.randrange(10**6)
    hot.replica(node, model, index, state=chance.choice(["loaded", "loading"]), **needed)


def remove(node: BackendNode) -> None:
    if BackendNode.objects.count() > 1:
        NodeModel.engines.filter(node=node).delete()
        NodeLabel.objects.filter(node=node).delete()
        BackendNode.objects.filter(pk=node.pk).delete()


@pytest.mark.parametrize("seed", range(2 * EFFORT))
def test_it_sees_what_a_full_reading_sees(seed: int) -> None:
    """After each of many writes, one by one and several in one transaction, also rolled back."""
    chance, kept = random.Random(seed), FleetCache()
    seen_alike(kept)
    hot.node("first")
    for _ in range(25):
        for _ in range(chance.randrange(1, 4)):
            write(chance)
        if chance.random() < 0.3:
            with transaction.atomic():
                write(chance)
                transaction.set_rollback(chance.random() < 0.5)
        seen_alike(kept)


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
        seen_alike(kept)
    looked.set()
    thread.join()
    seen_alike(kept)
    [it] = [one for one in kept.decided("a", ANYTHING)[0].nodes if one.id == node.pk]
    assert it.available_vram == GB


def test_a_look_is_one_statement_and_one_a_table_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, seen = FleetCache(), list[Any]()
    for number in range(20):
        hot.replica(hot.node(f"n{number}", available_vram=8 * GB))
    plain = fleet_queries.candidate

    def counted(row: Any, *given: Any, **options: Any) -> Any:
        seen.append(row)
        return plain(row, *given, **options)

    monkeypatch.setattr(fleet_queries, "candidate", counted)
    for changed, statements in ((20, 4), (0, 1), (1, 2)):
        seen.clear()
        if changed == 1:
            BackendNode.objects.filter(name="n3").update(available_vram=GB)
        with CaptureQueriesContext(connection) as queries:
            kept.decided("m", ANYTHING)
        assert (len(queries), len(seen)) == (statements, changed)


def test_it_begins_again_on_another_server_and_after_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, node = FleetCache(), hot.node("one")
    seen_alike(kept)
    kept._mark = kept._mark._replace(xid=2**40) if kept._mark else None  # of a server that was ahead
    BackendNode.objects.filter(pk=node.pk).update(available_vram=GB)
    seen_alike(kept)
    monkeypatch.setattr(fleet_cache._Copy, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kept.decided("a", ANYTHING)
    monkeypatch.undo()
    BackendNode.objects.filter(pk=node.pk).update(available_vram=2 * GB)
    seen_alike(kept)


def test_some_nodes_only() -> None:
    nodes = [hot.node(f"n{number}", available_vram=8 * GB) for number in range(3)]
    ids = [node.pk for node in nodes]
    seen, decision = FleetCache().decided("a", ANYTHING, only=ids[1:], besides=ids[2:])
    assert [one.id for one in seen.nodes] == ids[1:2]
    assert decision == choose_node(fleet_queries.read_fleet("a", only=ids[1:], besides=ids[2:]))


def test_what_may_be_rolled_back_is_not_followed() -> None:
    kept, node = FleetCache(), hot.node("one", available_vram=GB)
    seen_alike(kept)
    with transaction.atomic():
        BackendNode.objects.filter(pk=node.pk).update(available_vram=2 * GB)
        assert kept.decided("a", ANYTHING)[0].nodes[0].available_vram == 2 * GB
        transaction.set_rollback(True)
    seen_alike(kept)
