"""Selectors over the registry (`contract/scheduling.md` §1J): which nodes have the labels asked for."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.accounts import actors
from localai_cluster.kit import clock, errors
from nodes.models import BackendNode, ModelSchedulingConfig, NodeLabel
from nodes.registry import lifecycle
from nodes.registry.labels import edit_labels
from nodes.scheduling.rules import Rule, check_rule
from tests.support import api
from tests.support.effort import EFFORT

pytestmark = pytest.mark.django_db


def node(name: str, labels: dict[str, str], **fields: Any) -> BackendNode:
    made = api.make_node(name, **fields)
    edit_labels(made.id, labels, drop=None, actor=actors.STATIC_KEY, now=clock.now())
    return made


def matching(selector: Any) -> list[str]:
    return sorted(BackendNode.objects.matching(selector).values_list("name", flat=True))


@pytest.mark.rule("T-REG-40", "R1.68")
def test_a_selector_with_two_keys_matches_only_the_node_having_both() -> None:
    """Each at exactly that value."""
    node("both", {"tier": "fast", "zone": "a"})
    node("one", {"tier": "fast"})
    node("else", {"tier": "fast", "zone": "ab"})
    assert matching({"tier": "fast", "zone": "a"}) == ["both"]
    assert matching({"tier": "fast", "zone": "A"}) == []


@pytest.mark.rule("T-REG-41", "R1.68")
def test_a_selector_with_no_match_returns_nothing() -> None:
    """Neither an unknown key nor an empty value is a wildcard."""
    node("one", {"tier": "fast"})
    assert matching({"gpu": "yes"}) == []
    assert matching({"tier": ""}) == []


@pytest.mark.rule("T-REG-42", "R1.68")
@pytest.mark.parametrize("selector", [{}, {"tier": "fast"}])
def test_a_selector_ignores_nodes_that_are_not_healthy(selector: dict[str, str]) -> None:
    """Pending, unhealthy, draining and offline ones, and agents, no matter what labels they have."""
    labels = {"tier": "fast"}
    node("well", labels)
    node("new", labels, approved=False)
    node("agent", labels, node_type="agent", address="")
    api.mark(node("ill", labels), "unhealthy")
    api.mark(node("gone", labels), "silent")
    lifecycle.drain(node("busy", labels).id, actor=actors.STATIC_KEY, now=clock.now())
    assert matching(selector) == ["well"]


@pytest.mark.rule("T-REG-43", "R1.68")
def test_a_node_with_more_labels_still_matches() -> None:
    """Extra labels are fine."""
    node("one", {"tier": "fast", "zone": "a", "x": "y"})
    assert matching({"tier": "fast"}) == ["one"]


@pytest.mark.rule("T-REG-44", "R1.68")
def test_the_empty_selector_matches_all_healthy_backend_nodes() -> None:
    """Without labels too."""
    node("one", {"tier": "fast"})
    node("two", {})
    assert matching({}) == ["one", "two"]


# What can be read at all is decided without a database: tests/unit/models/test_selectors.py.
UNREADABLE = ["tier=fast", ["tier"], {"tier": 5}]


@pytest.mark.rule("R1.69")
@pytest.mark.parametrize("selector", UNREADABLE, ids=str)
def test_a_stored_selector_that_cannot_be_read_matches_nothing(selector: Any) -> None:
    """The reference takes it for "any node"."""
    node("one", {"tier": "fast"})
    rule = ModelSchedulingConfig.objects.create(model_name="m")
    ModelSchedulingConfig.objects.update(node_selector=selector)
    rule.refresh_from_db()
    assert matching(rule.node_selector) == []


def test_no_selector_at_all_matches_nothing() -> None:
    """The column is never null; a caller may be wrong."""
    node("one", {})
    assert matching(None) == []


@pytest.mark.rule("R1.69")
@pytest.mark.parametrize("selector", UNREADABLE, ids=str)
def test_a_selector_that_cannot_be_read_is_refused_when_written(selector: Any) -> None:
    """Naming the field."""
    with pytest.raises(errors.InvalidInput) as refused:
        check_rule(Rule("m", node_selector=selector))
    assert refused.value.field == "node_selector"


@pytest.mark.rule("R1.69")
@pytest.mark.parametrize("selector", [{}, {"tier": "fast"}, {"models/x:1@y": ""}])
def test_a_readable_selector_is_accepted_when_written(selector: dict[str, str]) -> None:
    """Any key and value that a label can have."""
    check_rule(Rule("m", node_selector=selector))


LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "1", "2"]), max_size=3)


@given(fleet=st.lists(LABELS, max_size=4), selector=LABELS)
@settings(max_examples=40 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.rule("R1.68")
def test_matching_is_having_every_pair(fleet: list[dict[str, str]], selector: dict[str, str]) -> None:
    """Against the same question in Python."""
    BackendNode.objects.all().delete()
    now = clock.now()
    nodes = [
        BackendNode(name=f"n{n}", name_key=f"n{n}", address="x:1", approved_at=now) for n in range(len(fleet))
    ]
    BackendNode.objects.bulk_create(nodes)
    NodeLabel.objects.bulk_create(
        NodeLabel(node=made, key=key, value=value)
        for made, labels in zip(nodes, fleet, strict=True)
        for key, value in labels.items()
    )
    expected = [f"n{n}" for n, labels in enumerate(fleet) if selector.items() <= labels.items()]
    assert matching(selector) == expected
