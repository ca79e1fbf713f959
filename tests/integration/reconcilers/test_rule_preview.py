"""What a rule would do now, before it is saved: the same as the pass does after."""

import dataclasses
import json
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from localai_cluster.kit import clock
from nodes.models import ModelSchedulingConfig, NodeLabel, PlacementLog, PlacementRecord
from nodes.reconcilers import replicas
from nodes.scheduling import store
from nodes.scheduling.rules import Rule
from operations.models import Operation
from tests.support import api, hot

pytestmark = pytest.mark.django_db

PLAN = "/api/placement/plan"
GIB = 2**30


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> None:
    """A models folder that defines `m`."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path)
    (tmp_path / "m.yaml").write_text("name: m\nbackend: echo\nparameters: {model: m}\n")


def preview(*, nodes: Any = (), **rule: Any) -> Any:
    answer = api.admin().post(PLAN, {"rule": {"model_name": "m"} | rule, "nodes": list(nodes)})
    assert answer.status_code == 200, answer.content
    return answer.json()


@pytest.mark.rule("R4.10", "http-2.12")
def test_it_says_what_the_pass_then_does_and_writes_nothing() -> None:
    hot.node("a", available_vram=20 * GIB)
    hot.node("b", available_vram=9 * GIB)
    with CaptureQueriesContext(connection) as queries:
        told = preview(min_replicas=2)
    assert not [one for one in queries if one["sql"].startswith(("INSERT", "UPDATE", "DELETE"))]
    assert not ModelSchedulingConfig.objects.exists()
    assert not PlacementRecord.objects.exists()
    assert not PlacementLog.objects.exists()
    assert (told["replicas_now"], told["loading"], told["wanted"]) == (0, 0, 2)
    assert told["says"] == "2 wanted, 0 running, 0 loading: starting 2"
    assert told["loads"] == [
        {"node": "a", "why": "most VRAM available: 20.0 GiB against 9.0 GiB on b"},
        {"node": "b", "why": "the only node that can take it; the others: 1 no free slot for this model"},
    ]
    assert (told["retires"], told["unsatisfiable"], told["misses"]) == ([], None, [])
    assert told["rule"] == {
        "model_name": "m",
        "node_selector": {},
        "min_replicas": 2,
        "max_replicas": 0,
        "spread_all": False,
    }
    store.set_rule(Rule("m", min_replicas=2), clock.now())
    replicas.run_pass(tick=True)
    assert ModelSchedulingConfig.objects.get().reason == told["says"]
    assert Operation.objects.count() == len(told["loads"])


@pytest.mark.rule("R4.17")
def test_it_names_the_node_of_each_replica_that_it_would_retire() -> None:
    for name in ("a", "b"):
        hot.replica(hot.node(name), "m", last_used=clock.now() - timedelta(hours=1))
    told = preview(min_replicas=1)
    (retired,) = told["retires"]
    assert retired["node"] in ("a", "b")
    assert retired["why"].startswith(f"replica 0 on {retired['node']} idle for 60 min and more than 1 there")
    assert (told["replicas_now"], told["wanted"]) == (2, 1)


@pytest.mark.rule("R4.23", "R1.68")
def test_what_cannot_be_satisfied_is_counted_by_reason_and_more_nodes_would_help() -> None:
    node = hot.node("a")
    hot.node("b", drained_at=clock.now())
    NodeLabel.objects.create(node=node, key="tier", value="slow")
    told = preview(min_replicas=1, node_selector={"tier": "fast"})
    assert told["unsatisfiable"] == {"reason": "no healthy node has tier=fast", "counts": {"selector": 2}}
    assert {one["node"] for one in told["misses"]} == {"a", "b"}
    more = [{"count": 3, "vram_gib": 24, "labels": {"tier": "fast"}}]
    told = preview(min_replicas=2, node_selector={"tier": "fast"}, nodes=more)
    assert [one["node"] for one in told["loads"]] == ["(new 1)", "(new 2)"]
    assert told["unsatisfiable"] is None


def test_a_slot_is_not_all_that_a_load_needs(settings: Settings, tmp_path: Path) -> None:
    """The pass counts slots; placement says what the load would wait for. Nothing is evicted for it."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, vram_policy="require")
    (tmp_path / "m").write_bytes(bytes(4096))
    node = hot.node("a", available_vram=0, vram_read_at=clock.now())
    hot.replica(node, "other", vram_needed=9 * GIB)
    told = preview(min_replicas=1)
    assert told["loads"] == []
    assert told["unsatisfiable"]["counts"] == {"memory": 1}
    assert told["unsatisfiable"]["reason"].startswith("no node can take it: 1 without the VRAM it needs")
    assert [one["node"] for one in told["misses"]] == ["a"]


@pytest.mark.rule("R4.7")
def test_a_spread_rule_has_a_load_for_each_node() -> None:
    for name in ("a", "b"):
        hot.node(name)
    told = preview(spread_all=True, nodes=[{"count": 1}])
    assert [one["node"] for one in told["loads"]] == ["a", "b", "(new 1)"] or len(told["loads"]) == 3
    reason = "one on each of 3 nodes wanted: starting on (new 1), a, b"
    assert {one["why"] for one in told["loads"]} == {reason}
    assert told["wanted"] == 3


def test_only_the_first_loads_are_placed() -> None:
    told = preview(min_replicas=100, nodes=[{"count": 100}])
    assert (len(told["loads"]), told["left_out"]) == (64, 36)


@pytest.mark.rule("R1.85", "R1.86")
def test_a_cooldown_is_told_and_a_rule_that_only_routes_does_nothing() -> None:
    hot.node("a")
    store.set_rule(Rule("m", min_replicas=1), clock.now())
    until = clock.now() + timedelta(minutes=4)
    ModelSchedulingConfig.objects.update(unsatisfiable_until=until, unsatisfiable_ticks=3)
    told = preview(min_replicas=1)
    assert told["waits_until"] == until.isoformat()
    assert len(told["loads"]) == 1
    hot.replica(hot.node("b"), "m", in_flight=3)
    told = preview(route_policy="round_robin")
    assert (told["loads"], told["retires"], told["wanted"], told["replicas_now"]) == ([], [], 0, 1)
    assert told["says"].startswith("it says nothing of how many replicas")


def test_the_number_of_queries_is_the_same_for_any_fleet() -> None:
    counts = []
    for size in (1, 5):
        for number in range(size):
            node = hot.node(f"{size}-{number}", max_replicas_per_model=4)
            hot.replica(node, "other")
            NodeLabel.objects.create(node=node, key="tier", value="a")
        with CaptureQueriesContext(connection) as queries:
            preview(min_replicas=3, node_selector={"tier": "a"})
        counts.append(len(queries))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"rule": {}}, "model_name"),
        ({"rule": {"model_name": "m", "min_replicas": 3, "max_replicas": 2}}, "min_replicas"),
        ({"rule": {"model_name": "m", "spread_all": True, "min_replicas": 1}}, "spread_all"),
        ({"rule": {"model_name": "m"}, "model": "m"}, "model"),
        ({"rule": {"model_name": "m"}, "replicas": 2}, "replicas"),
        ({"rule": {"model_name": "m"}, "selector": {}}, "selector"),
        ({"rule": []}, "rule"),
    ],
    ids=str,
)
def test_a_body_that_cannot_be_meant_names_its_field(body: Any, field: str) -> None:
    answer = api.admin().post(PLAN, body)
    assert answer.status_code == 400, answer.content
    assert answer.json()["error"]["field"] == field


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("placement", "plan", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_line_asks_the_same() -> None:
    hot.node("a")
    rule = {"model_name": "m", "min_replicas": 3, "node_selector": {"tier": "fast"}}
    asked = ("--rule", json.dumps(rule), "--add-nodes", "2x24GiB,tier=fast")
    added = [{"count": 2, "vram_gib": 24, "labels": {"tier": "fast"}}]
    assert json.loads(run(*asked, "--json")) == preview(nodes=added, **rule)
    text = run(*asked)
    assert text.startswith("0 running, 0 loading, 3 wanted: 3 wanted, 0 running, 0 loading: starting 2")
    assert "load  (new 1)" in text
    assert "not possible: no healthy node has" in run("--rule", json.dumps(rule))
    with pytest.raises(CommandError, match="give a JSON object"):
        run("--rule", "m")
