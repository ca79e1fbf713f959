"""`manage.py scheduling`: what it prints, stores and refuses."""

import json
from functools import partial

import pytest
from django.core.management import CommandError

from localai_cluster.accounts.models import AuditEntry
from localai_cluster.kit import clock
from nodes.models import ModelSchedulingConfig
from tests.support import api, command_line

pytestmark = pytest.mark.django_db
run = partial(command_line.run, "scheduling")


@pytest.mark.rule("R1.85", "http-2.12")
def test_a_rule_is_set_listed_and_deleted() -> None:
    said = run("set", "m", "--min", "1", "--max", "3", "--label", "tier=fast", "--label", "a=b=c")
    assert said == "m: node_selector={'tier': 'fast', 'a': 'b=c'}, min_replicas=1, max_replicas=3\n"
    run("set", "everywhere", "--spread")
    run("set", "routed", "--route-policy", "round_robin")
    ModelSchedulingConfig.objects.filter(model_name="m").update(
        wanted_replicas=1, reason="one\x1b[31m more", checked_at=clock.now()
    )
    _, first, second, third = run("list").splitlines()
    assert first.split() == ["everywhere", "one", "a", "node", "-", "-", "-", "-", "-"]
    assert second.split() == [
        "m",
        "1",
        "to",
        "3",
        '{"a":"b=c","tier":"fast"}',
        "1",
        "0",
        "0",
        "one?[31m",
        "more",
    ]
    assert third.split() == ["routed", "-", "-", "-", "-", "-", "-"]
    assert run("delete", "m") == "m: scheduling rule deleted\n"
    assert AuditEntry.objects.filter(kind="scheduling_rule.deleted").exists()
    assert ModelSchedulingConfig.objects.count() == 2


def test_json_is_the_answer_of_the_api() -> None:
    set_to = json.loads(run("set", "m", "--min", "2", "--json"))
    assert set_to == api.admin().get("/api/nodes/scheduling/m").json()
    assert json.loads(run("list", "--json")) == [set_to]
    assert json.loads(run("delete", "m", "--json")) == {"message": "scheduling rule deleted"}


def test_a_rule_goes_back_to_the_clusters_route_policy() -> None:
    """Routing fields that are not given stay."""
    run("set", "m", "--route-policy", "prefix_cache")
    assert json.loads(run("set", "m", "--min", "1", "--json"))["route_policy"] == "prefix_cache"
    run("set", "m", "--route-policy", "default")
    assert ModelSchedulingConfig.objects.get().route_policy == ""


def test_nothing_says_so() -> None:
    assert run("list") == "no scheduling rules\n"


@pytest.mark.rule("R4.47")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("set", "m", "--min", "3", "--max", "2"), "min_replicas must be <= max_replicas"),
        (("set", "m", "--spread", "--min", "1"), "mutually exclusive"),
        (("set", " ", "--min", "1"), "model_name is required"),
        (("set", "m", "--label", "tier"), "'tier' is not KEY=VALUE"),
        (("delete", "m"), "there is no scheduling rule for m"),
    ],
    ids=["min over max", "spread and min", "no name", "no label", "unknown"],
)
def test_what_is_wrong_is_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        run(*arguments)
    assert not ModelSchedulingConfig.objects.exists()
