"""Upgrades and deletions of a backend on a node by REST (`contract/http-api.md` §2.10)."""

from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from nodes.models import BackendNode, PendingBackendOp
from operations.models import Operation
from tests.support import api
from tests.support.effort import EFFORT
from tests.support.environment import REGISTRATION_TOKEN
from tests.support.fleet import at_once
from tests.support.intents import claim

pytestmark = pytest.mark.django_db
VERBS = ["upgrade", "delete"]


def ask(verb: str, node: Any, body: Any) -> Any:
    return api.admin().post(f"/api/nodes/{node}/backends/{verb}", body)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.rule("http-2.10", "O38", "A38", "A39", "R6.36")
def test_it_is_recorded_before_it_is_answered_and_joins_a_running_one(verb: str) -> None:
    node = api.make_node()
    first = ask(verb, node.id, {"backend": "local@mock"})
    assert first.status_code == 202, first.content
    again = ask(verb, node.id, {"backend": "mock"})
    assert (again.status_code, again.json()["deduplicated"]) == (202, True)
    assert again.json()["jobID"] == first.json()["jobID"]
    operation = Operation.objects.get()
    assert (operation.kind, operation.key) == (f"backend_{verb}", f"node:{node.id}:mock")
    assert (operation.payload["backend"], operation.payload["gallery"]) == ("mock", "")
    assert operation.actor == "static-key"
    assert [target.node_name for target in operation.targets.all()] == [node.name]
    job = api.admin().get(first.json()["statusUrl"]).json()
    assert job["deletion"] == (verb == "delete")
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    wanted = {"upgrade": ("upgrade", False), "delete": ("deletion", True)}[verb]
    assert (listed["taskType"], listed["isDeletion"]) == wanted
    assert (listed["isBackend"], listed["nodeID"], listed["name"]) == (True, str(node.id), "mock")


@pytest.mark.parametrize("asked", ["install", *VERBS])
@pytest.mark.parametrize("active", ["install", *VERBS])
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "waiting"])
@pytest.mark.rule("O34", "R1.114")
def test_a_different_command_on_a_backend_of_a_node_waits_for_the_first(
    active: str, asked: str, begun: bool
) -> None:
    """Review R10: both are listed, in the order of the requests, and the second says what it waits for."""
    node = api.make_node()
    job = ask(active, node.id, {"backend": "mock"}).json()["jobID"]
    if begun:
        claim()
    answer = ask(asked, node.id, {"backend": "mock"})
    assert answer.status_code == 202
    if asked == active:
        assert answer.json()["jobID"] == job
        return
    listed = api.admin().get("/api/operations").json()["operations"]
    by_job = {entry["jobID"]: entry for entry in listed}
    assert by_job.keys() == {job, answer.json()["jobID"]}
    word = {"delete": "removal"}.get(active, active)
    assert by_job[answer.json()["jobID"]]["waitsFor"] == f"waits for the {word} of mock by static-key on w1"


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("O34")
def test_simultaneous_requests_leave_one_row_for_each_command() -> None:
    """Real transactions: equal ones joined, or took the place of one that a different one followed."""
    node = api.make_node()
    verbs = ["install", "upgrade", "delete"] * 4
    answers = at_once(*(partial(ask, verb, node.id, {"backend": "mock"}) for verb in verbs))
    assert {answer.status_code for answer in answers} == {202}
    active = Operation.objects.active()
    assert sorted(active.values_list("kind", flat=True)) == [
        "backend_delete", "backend_install", "backend_upgrade",
    ]  # fmt: skip
    rows = {intent.id for intent in PendingBackendOp.objects.all()}
    assert {operation.targets.get().intent_id for operation in active} == rows
    jobs = {answer.json()["jobID"] for answer in answers}
    assert jobs == {str(id) for id in Operation.objects.values_list("id", flat=True)}
    ended = Operation.objects.exclude(pk__in=active)
    assert {operation.targets.get().status for operation in ended} <= {"superseded"}


@pytest.mark.rule("O17", "http-2.10")
def test_an_upgrade_of_what_the_node_does_not_list_is_refused() -> None:
    """Review R10."""
    node = api.make_node()
    BackendNode.objects.update(inventory_at=clock.now())
    answer = ask("upgrade", node.id, {"backend": "mock"})
    assert answer.status_code == 409
    assert "mock is not installed on w1" in api.message(answer)
    assert not Operation.objects.exists()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"backend": ""},
        {"backend": None},
        {"backend": 5},
        {"backend": ["mock"]},
        {"backend": "../../etc"},
        {"backend": "a/b"},
        {"backend": "a@b@c"},
        {"backend": "mock\n"},
        {"backend": ".hidden"},
        {"backend": "x" * 256},
        {"uri": "/srv/mock"},
    ],
)
def test_a_body_that_names_no_backend_is_refused_by_its_field(verb: str, body: Any) -> None:
    answer = ask(verb, api.make_node().id, body)
    assert (answer.status_code, "backend" in api.message(answer)) == (400, True)
    assert not Operation.objects.exists()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("body", [["x"], b"{bad", b""])
def test_what_is_no_object_is_refused(verb: str, body: Any) -> None:
    assert ask(verb, api.make_node().id, body).status_code == 400


@pytest.mark.rule("A20", "O21")
@pytest.mark.parametrize("verb", ["install", *VERBS])
def test_where_it_cannot_be(verb: str) -> None:
    """One rule for all: unknown 404, pending and agent 409 with the reason; nothing is admitted."""
    assert ask(verb, uuid4(), {"backend": "mock"}).status_code == 404
    assert ask(verb, "nope", {"backend": "mock"}).status_code == 404
    pending = ask(verb, api.make_node(approved=False).id, {"backend": "mock"})
    assert (pending.status_code, "pending" in api.message(pending)) == (409, True)
    agent = api.make_node("a", secret=api.OTHER_SECRET, node_type="agent", address="")
    refused = ask(verb, agent.id, {"backend": "m"})
    assert (refused.status_code, "agent" in api.message(refused)) == (409, True)
    assert not Operation.objects.exists()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("credential", [api.SECRET, REGISTRATION_TOKEN, "wrong"])
def test_no_node_and_no_token_may(verb: str, credential: str) -> None:
    path = f"/api/nodes/{api.make_node().id}/backends/{verb}"
    assert api.bearer(credential).post(path, {"backend": "mock"}).status_code in (401, 403)
    assert not Operation.objects.exists()


@given(body=st.dictionaries(st.sampled_from(["backend", "x"]), st.none() | st.integers() | st.text()))
@settings(max_examples=60 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("verb", VERBS)
def test_any_body_ends_in_202_or_400(verb: str, body: dict[str, Any]) -> None:
    """Never a 500."""
    node = BackendNode.objects.first() or api.make_node()
    assert ask(verb, node.id, body).status_code in (202, 400)
