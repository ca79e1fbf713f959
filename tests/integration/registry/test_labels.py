"""Labels, selectors and admin overrides at the registry itself: R1.40 to R1.50, R1.68, R1.69."""

from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.kit import errors
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel
from nodes.registry import lifecycle, overrides
from nodes.registry.labels import edit_labels
from tests.support.fleet import (
    ANNA,
    NOW,
    OTHER_SECRET,
    ROOT,
    approved,
    beat,
    beat_of,
    later,
    own_secret,
    register,
    row,
    told,
)

pytestmark = pytest.mark.django_db
GB = 10**9


@pytest.fixture
def node() -> BackendNode:
    """An approved node with 16 GB of VRAM."""
    return approved(total_vram=16 * GB, available_vram=16 * GB, labels={"tier": "fast"})


def labels(node: BackendNode) -> dict[str, str]:
    """The labels that are not the registry's own."""
    rows = NodeLabel.objects.filter(node=node).exclude(source=NodeLabel.Source.AUTO)
    return dict(rows.values_list("key", "value"))


def replace_all(node: BackendNode, wanted: dict[str, str]) -> dict[str, str]:
    return edit_labels(node.pk, wanted, drop=None, actor=ROOT, now=NOW)


def merge(node: BackendNode, wanted: dict[str, str]) -> dict[str, str]:
    return edit_labels(node.pk, wanted, actor=ROOT, now=NOW)


# --- labels


@pytest.mark.rule("R1.40", "T-REG-33", "T-REG-34", "T-REG-35", "T-REG-36")
def test_labels_are_set_overwritten_removed_and_replaced(node: BackendNode) -> None:
    """Every verb answers what is there afterwards."""
    assert replace_all(node, {"a": "1", "b": "2"}) == {"a": "1", "b": "2"}
    assert merge(node, {"a": "3"}) == {"a": "3", "b": "2"}
    assert edit_labels(node.pk, {}, drop=("a",), actor=ROOT, now=NOW) == {"b": "2"}
    assert edit_labels(node.pk, {}, drop=("a",), actor=ROOT, now=NOW) == {"b": "2"}
    assert replace_all(node, {"c": ""}) == {"c": ""}
    assert replace_all(node, {}) == {}


@pytest.mark.rule("R1.40")
def test_the_registrys_own_labels_come_back_with_the_next_registration(node: BackendNode) -> None:
    replace_all(node, {"tier": "gold"})
    register(total_vram=16 * GB, available_vram=16 * GB, labels={"tier": "fast"}, now=later(1))
    found = dict(NodeLabel.objects.filter(node=node).values_list("key", "value"))
    assert found == {"tier": "gold", "gpu.vram": "8GB", "node.name": "w1", "node.replica-slots": "1"}


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"": "x"}, "labels"),
        ({" ": "x"}, "labels"),
        ({"k" * 129: "x"}, "labels"),
        ({"k": "v" * 256}, "labels.k"),
        ({"k\u200b": "v"}, "labels"),
        ({"k": "v\u202e"}, "labels.k"),
        ({"k": "v\x00"}, "labels.k"),
        ({"k": "\ud800"}, "labels.k"),
        ({f"k{number}": "" for number in range(65)}, "labels"),
    ],
    ids=["empty", "blank", "long key", "long value", "zero width", "bidi", "null", "surrogate", "many"],
)
def test_labels_that_cannot_be(node: BackendNode, wanted: dict[str, str], field: str) -> None:
    """400 naming the key; nothing is stored of them."""
    for verb in (replace_all, merge):
        with pytest.raises(errors.InvalidInput) as refused:
            verb(node, wanted)
        assert refused.value.field == field
    with pytest.raises(errors.InvalidInput):
        register("w2", secret=OTHER_SECRET, labels=wanted)
    assert labels(node) == {"tier": "fast"}
    assert BackendNode.objects.count() == 1


def test_a_node_has_128_labels_at_most(node: BackendNode) -> None:
    for start in (0, 60):
        merge(node, {f"k{number}": "" for number in range(start, start + 60)})
    with pytest.raises(errors.InvalidInput, match="at most 128"):
        merge(node, {f"k{number}": "" for number in range(200, 210)})


def test_unknown_nodes() -> None:
    for drop in (None, ()):
        with pytest.raises(errors.NotFound):
            edit_labels(uuid4(), {"a": "b"}, drop=drop, actor=ROOT, now=NOW)
    with pytest.raises(errors.NotFound):
        edit_labels(uuid4(), {}, drop=("a",), actor=ROOT, now=NOW)
    for override in (overrides.reset_replica_cap, overrides.reset_vram_budget):
        with pytest.raises(errors.NotFound):
            override(uuid4(), actor=ROOT, now=NOW)


@pytest.mark.rule("R1.40", "R1.45", "R1.46", "R1.47", "R1.48", "R1.87")
def test_what_ends_cooldowns_and_what_does_not(node: BackendNode) -> None:
    """Label verbs and new overrides do, handing one back does not."""
    ending: list[Any] = [
        lambda: replace_all(node, {"a": "1"}),
        lambda: merge(node, {"b": "1"}),
        lambda: edit_labels(node.pk, {}, drop=("b",), actor=ROOT, now=NOW),
        lambda: overrides.set_replica_cap(node.pk, 3, actor=ROOT, now=NOW),
        lambda: overrides.set_vram_budget(node.pk, "50%", actor=ROOT, now=NOW),
    ]
    keeping: list[Any] = [
        lambda: overrides.reset_replica_cap(node.pk, actor=ROOT, now=NOW),
        lambda: overrides.reset_vram_budget(node.pk, actor=ROOT, now=NOW),
    ]
    rule = ModelSchedulingConfig.objects.create(model_name="m")
    for work, kept in [(work, False) for work in ending] + [(work, True) for work in keeping]:
        ModelSchedulingConfig.objects.update(unsatisfiable_until=NOW)
        work()
        rule.refresh_from_db()
        assert (rule.unsatisfiable_until is not None) is kept


@pytest.mark.rule("R1.41", "R1.44")
def test_the_registrys_own_labels_never_stop_a_registration() -> None:
    """However long the name and however many labels there are already."""
    name, vendor = "n" * 255, "v" * 32
    own = {f"w{number}": "" for number in range(64)}
    node = approved(name, labels=own)
    merge(node, {f"a{number}": "" for number in range(62)})
    register(name, labels=own, gpu_vendor=vendor, total_vram=GB, max_replicas_per_model=9, now=later(1))
    found = dict(NodeLabel.objects.filter(node=node).values_list("key", "value"))
    assert len(found) == 130
    assert (found["node.name"], found["gpu.vendor"], found["gpu.vram"]) == (name, vendor, "0GB")


# --- selectors


@pytest.fixture
def fleet() -> dict[str, BackendNode]:
    """Healthy nodes with different labels, and some that are no targets."""
    wanted = {
        "both": {"tier": "fast", "zone": "a", "extra": "1"},
        "one": {"tier": "fast"},
        "other": {"tier": "fast", "zone": "b"},
        "ill": {"tier": "fast", "zone": "a"},
        "pending": {"tier": "fast", "zone": "a"},
    }
    nodes = {
        name: register(name, secret=own_secret(name), labels=own, auto_approve=name != "pending").node
        for name, own in wanted.items()
    }
    nodes["agent"] = register(
        "agent",
        secret=own_secret("agent"),
        labels={"tier": "fast", "zone": "a"},
        node_type="agent",
        address="",
        auto_approve=True,
    ).node
    lifecycle.mark_unhealthy(nodes["ill"].pk, actor=ROOT, now=NOW, reason="x")
    return nodes


def chosen(selector: Any) -> list[str]:
    return [node.name for node in BackendNode.objects.matching(selector)]


@pytest.mark.rule("R1.68", "R1.1", "T-REG-40", "T-REG-41", "T-REG-42", "T-REG-43", "T-REG-44")
@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ({"tier": "fast", "zone": "a"}, ["both"]),
        ({"tier": "slow"}, []),
        ({"tier": "fast"}, ["both", "one", "other"]),
        ({}, ["both", "one", "other"]),
        ({"tier": "FAST"}, []),
        ({"tier": "fas"}, []),
        ({"node.name": "one"}, ["one"]),
    ],
)
def test_a_selector_chooses_healthy_backends_with_every_label(
    selector: dict[str, str], names: list[str]
) -> None:
    """Exact values; more labels do no harm; an empty one chooses all healthy backends."""
    assert chosen(selector) == names


@pytest.mark.rule("R1.69")
@pytest.mark.usefixtures("fleet")
@pytest.mark.parametrize("selector", [None, "{", "tier=fast", [], 7, {"tier": 1}, {"tier": None}, {"": "x"}])
def test_a_stored_selector_that_cannot_be_read_chooses_nothing(selector: Any) -> None:
    assert chosen(selector) == []


def test_a_selector_is_one_query(fleet: dict[str, BackendNode], django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        assert chosen({"tier": "fast", "zone": "a", "extra": "1"}) == ["both"]
    assert len(fleet) == 6


# --- replica cap


@pytest.mark.rule("R1.45", "R1.46")
def test_a_replica_cap_is_set_and_handed_back(node: BackendNode) -> None:
    overrides.set_replica_cap(node.pk, 4, actor=ROOT, now=NOW)
    stored = row(node)
    assert (stored.max_replicas_per_model, stored.max_replicas_per_model_manually_set) == (4, True)
    assert NodeLabel.objects.get(node=node, key="node.replica-slots").value == "4"
    overrides.reset_replica_cap(node.pk, actor=ROOT, now=NOW)
    stored = row(node)
    assert (stored.max_replicas_per_model, stored.max_replicas_per_model_manually_set) == (4, False)
    assert NodeLabel.objects.get(node=node, key="node.replica-slots").value == "4"


@pytest.mark.rule("R1.45")
@pytest.mark.parametrize("value", [0, -1, 10_001, 2**64])
def test_a_cap_that_cannot_be(node: BackendNode, value: int) -> None:
    with pytest.raises(errors.InvalidInput) as refused:
        overrides.set_replica_cap(node.pk, value, actor=ROOT, now=NOW)
    assert refused.value.field == "value"
    assert not row(node).max_replicas_per_model_manually_set


@pytest.mark.rule("R1.3", "T-REG-59")
def test_the_cap_is_one_unless_somebody_says_more() -> None:
    assert row(register().node).max_replicas_per_model == 1


# --- VRAM budget


@pytest.mark.rule("R1.47", "R1.36", "T-REG-104", "T-REG-105")
def test_a_budget_caps_what_is_available_at_once(node: BackendNode) -> None:
    """The total stays; raising the budget shows with the next heartbeat only."""
    overrides.set_vram_budget(node.pk, "50%", actor=ROOT, now=NOW)
    stored = row(node)
    assert (stored.vram_budget, stored.vram_budget_bytes, stored.vram_budget_manually_set) == (
        "50%",
        8 * GB,
        True,
    )
    assert (stored.total_vram, stored.available_vram) == (16 * GB, 8 * GB)
    beat(beat_of(node, at=later(1), available_vram=15 * GB))
    assert row(node).available_vram == 8 * GB
    overrides.set_vram_budget(node.pk, "75%", actor=ROOT, now=later(2))
    assert (row(node).vram_budget_bytes, row(node).available_vram) == (12 * GB, 8 * GB)
    beat(beat_of(node, at=later(3), available_vram=15 * GB))
    assert row(node).available_vram == 12 * GB


@pytest.mark.rule("R1.47")
def test_an_empty_budget_is_an_admins_no_cap(node: BackendNode) -> None:
    overrides.set_vram_budget(node.pk, "  ", actor=ROOT, now=NOW)
    register(total_vram=16 * GB, available_vram=16 * GB, vram_budget="50%", now=later(1))
    stored = row(node)
    assert (stored.vram_budget, stored.vram_budget_bytes, stored.vram_budget_manually_set) == ("", 0, True)
    assert stored.available_vram == 16 * GB


@pytest.mark.rule("R1.48", "T-REG-107")
def test_a_budget_is_handed_back(node: BackendNode) -> None:
    overrides.set_vram_budget(node.pk, "8GB", actor=ROOT, now=NOW)
    overrides.reset_vram_budget(node.pk, actor=ROOT, now=NOW)
    stored = row(node)
    assert (stored.vram_budget, stored.vram_budget_bytes, stored.vram_budget_manually_set) == ("", 0, False)
    assert stored.available_vram == 8 * GB
    beat(beat_of(node, at=later(1), available_vram=15 * GB))
    assert row(node).available_vram == 15 * GB


@pytest.mark.rule("R1.49")
@pytest.mark.parametrize("text", ["101%", "-1", "5 ib", "many", "1.5", "x" * 33, "\x00"])
def test_a_budget_that_cannot_be(node: BackendNode, text: str) -> None:
    with pytest.raises(errors.InvalidInput) as refused:
        overrides.set_vram_budget(node.pk, text, actor=ROOT, now=NOW)
    assert refused.value.field == "value"
    assert not row(node).vram_budget_manually_set


@pytest.mark.rule("R1.36", "R1.50")
def test_a_share_follows_the_total_when_the_worker_reports_another(node: BackendNode) -> None:
    overrides.set_vram_budget(node.pk, "50%", actor=ROOT, now=NOW)
    beat(beat_of(node, at=later(1), total_vram=4 * GB, available_vram=4 * GB))
    assert (row(node).vram_budget_bytes, row(node).available_vram) == (2 * GB, 2 * GB)


# --- what is told


def test_overrides_and_labels_are_told_once_each_and_only_if_something_changed(node: BackendNode) -> None:
    before = len(told(node))
    for _ in range(2):
        overrides.set_replica_cap(node.pk, 4, actor=ANNA, now=later(1))
        overrides.set_vram_budget(node.pk, "8GB", actor=ANNA, now=later(1))
        merge(node, {"tier": "gold", "a": "b"})
        edit_labels(node.pk, {}, drop=("a",), actor=ANNA, now=later(1))
        edit_labels(node.pk, {}, actor=ANNA, now=later(1))
        overrides.reset_vram_budget(node.pk, actor=ANNA, now=later(1))
        overrides.reset_replica_cap(node.pk, actor=ANNA, now=later(1))
    events = told(node)[before:]
    said = [(event.kind, event.cause) for event in events]
    once = [
        ("override", "set"),
        ("override", "set"),
        ("labels", ""),
        ("labels", ""),
        ("override", "reset to worker default"),
        ("override", "reset to worker default"),
    ]
    again = [("override", "set"), ("override", "set"), ("labels", ""), ("labels", "")]
    assert said == once + again + [("override", "reset to worker default")] * 2
    assert events[0].actor == "anna"
    assert events[0].detail == {
        "max_replicas_per_model": {"from": 1, "to": 4},
        "max_replicas_per_model_manually_set": {"from": False, "to": True},
    }
    assert events[2].detail == {"set": {"tier": "gold", "a": "b"}, "removed": []}
    assert events[3].detail == {"set": {}, "removed": ["a"]}
    assert {event.status_after for event in events} == {"healthy"}


def test_a_label_that_only_changes_hands_is_no_news(node: BackendNode) -> None:
    """The admin says what the worker said: from now on it is the admin's."""
    before = len(told(node))
    merge(node, {"tier": "fast"})
    assert len(told(node)) == before
    assert NodeLabel.objects.get(node=node, key="tier").source == "admin"
