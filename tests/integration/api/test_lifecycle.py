"""Approve, reject, drain, resume and remove by REST (`contract/http-api.md` §2.4 to §2.6)."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model

from localai_cluster.accounts.models import ApiKey
from localai_cluster.accounts.principals import classify_credential, owner_of
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeEvent, NodeModel
from nodes.registry import lifecycle
from tests.support import api

pytestmark = pytest.mark.django_db

VERBS = [
    ("POST", "approve", {}),
    ("POST", "reject", {"reason": "x"}),
    ("POST", "drain", {}),
    ("POST", "resume", {}),
    ("POST", "stop", {}),
    ("POST", "identity/rotate", None),
    ("POST", "identity/revoke", {}),
    ("DELETE", "", None),
]
REASONED = [
    ("approve", False),
    ("drain", False),
    ("resume", False),
    ("stop", False),
    ("reject", True),
    ("identity/revoke", False),
]


def do(node: BackendNode, verb: str, body: Any = None) -> Any:
    return api.admin().post(f"/api/nodes/{node.id}/{verb}", body)


def pending(name: str = "w1", **fields: Any) -> BackendNode:
    return api.make_node(name, approved=False, **fields)


@pytest.mark.rule("R1.15", "http-2.6", "T-REG-5")
def test_approval_lets_a_pending_node_in() -> None:
    """The body of the sheet; who and why are kept."""
    node = pending()
    approved = do(node, "approve", {"reason": "bought yesterday"})
    assert (approved.status_code, approved.json()) == (
        200,
        {
            "id": str(node.id),
            "name": "w1",
            "node_type": "backend",
            "status": "healthy",
            "message": "node approved",
        },
    )
    now = api.node(node.id)
    assert (now.status, now.approved_by, now.approval_reason) == ("healthy", "static-key", "bought yesterday")


@pytest.mark.rule("R1.15", "http-2.6", "T-REG-7")
@pytest.mark.parametrize("state", ["healthy", "draining", "offline", "unhealthy"])
def test_approving_a_node_that_is_not_pending_is_400_and_names_its_state(state: str) -> None:
    """And changes nothing."""
    node = api.make_node()
    if state == "draining":
        do(node, "drain")
    elif state != "healthy":
        api.mark(node, {"offline": "silent"}.get(state, state))
    before = api.node(node.id).revision
    refused = do(node, "approve")
    assert (refused.status_code, state in api.message(refused)) == (400, True)
    assert api.node(node.id).revision == before


@pytest.mark.rule("http-2.6", "R1.31", "R1.3")
def test_an_agent_gets_its_token_with_its_approval() -> None:
    """Once, and it works; the node's own views never show it."""
    node = pending("agent-1", node_type="agent", address="")
    token = do(node, "approve").json()["api_token"]
    assert token.startswith("lai-")
    found = owner_of(classify_credential(token))
    assert found is not None
    assert found.kind == "user"
    shown = api.admin().get(f"/api/nodes/{node.id}").content + api.admin().get("/api/nodes").content
    assert token.encode() not in shown


@pytest.mark.rule("T-REG-6", "R1.15", "http-2.4", "http-2.5", "http-2.6")
@pytest.mark.parametrize(("method", "verb", "body"), VERBS, ids=[verb or "delete" for _, verb, _ in VERBS])
@pytest.mark.parametrize("node_id", ["nope", "00000000-0000-4000-8000-00000000dead", "%00"])
def test_unknown_nodes_are_404(method: str, verb: str, body: Any, node_id: str) -> None:
    """Where the reference answers 500 or 400; also with a body that could not be read."""
    path = f"/api/nodes/{node_id}/{verb}".removesuffix("/")
    for sent in (body, b"{"):
        refused = api.admin().send(method, path, sent)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, 404)


@pytest.mark.rule("http-2.5", "R1.18", "R1.19")
def test_drain_and_resume() -> None:
    """The messages of the sheet; the detail shows what remains of the drain."""
    node = api.make_node()
    api.replica(node, in_flight=2)
    before = clock.now()
    drained = do(node, "drain", {"reason": "new disk", "deadline_seconds": 90})
    assert (drained.status_code, drained.json()) == (200, {"message": "node set to draining"})
    shown = api.admin().get(f"/api/nodes/{node.id}").json()
    drain = shown["drain"]
    assert {name: drain[name] for name in ("by", "reason", "own", "in_flight", "replicas")} == {
        "by": "static-key",
        "reason": "new disk",
        "own": False,
        "in_flight": 2,
        "replicas": 1,
    }
    row = api.node(node.id)
    assert row.drain_deadline - row.drained_at == timedelta(seconds=90)
    assert row.drained_at >= before
    resumed = do(node, "resume", {"reason": "done"})
    assert (resumed.status_code, resumed.json()) == (200, {"message": "node resumed"})
    after = api.admin().get(f"/api/nodes/{node.id}").json()
    assert (after["status"], "drain" in after) == ("healthy", False)


@pytest.mark.rule("http-2.5", "R1.19")
@pytest.mark.parametrize("body", [None, {}, {"reason": None, "deadline_seconds": None}, {"more": [1]}])
def test_a_drain_needs_no_body(body: Any) -> None:
    """Workers and the UI send none or `{}`."""
    node = api.make_node()
    assert do(node, "drain", body).status_code == 200
    assert api.node(node.id).status == "draining"


@pytest.mark.parametrize("deadline", [-1, 2_592_001, 1.5, "60", True, 2**64])
def test_deadlines_are_bounded(deadline: Any) -> None:
    """400 naming the field; at most 30 days."""
    node = api.make_node()
    refused = do(node, "drain", {"deadline_seconds": deadline})
    assert (refused.status_code, "deadline_seconds" in api.message(refused)) == (400, True)
    assert api.node(node.id).status == "healthy"


@pytest.mark.parametrize(("verb", "required"), REASONED, ids=[verb for verb, _ in REASONED])
@pytest.mark.parametrize("reason", [5, ["x"], "x" * 256, "a\x00b"], ids=["number", "list", "long", "null"])
def test_bad_reasons_are_400(verb: str, required: bool, reason: Any) -> None:
    """Naming the field, for every verb that takes one."""
    node = pending()
    refused = do(node, verb, {"reason": reason})
    assert (refused.status_code, "reason" in api.message(refused)) == (400, True)
    assert NodeEvent.objects.exclude(kind="registered").exclude(kind="labels").count() == 0


@pytest.mark.rule("R1.18", "http-2.5")
@pytest.mark.parametrize(("approved", "state"), [(False, "pending"), (True, "healthy")])
def test_resuming_what_needs_no_resuming_is_409_and_names_the_state(approved: bool, state: str) -> None:
    """Resume never approves."""
    node = api.make_node(approved=approved)
    refused = do(node, "resume")
    assert (refused.status_code, state in api.message(refused)) == (409, True)
    assert refused.json()["error"]["type"] == "node_error"
    assert api.node(node.id).status == state


@pytest.mark.rule("R1.18")
@pytest.mark.parametrize("event", ["silent", "unhealthy"])
def test_the_detail_says_why_a_node_is_not_well(event: str) -> None:
    """Who, when and why of the fact behind the status, and nothing of facts that do not hold."""
    node = api.make_node()
    api.mark(node, event)
    shown = api.admin().get(f"/api/nodes/{node.id}").json()
    fact = {"silent": "offline"}.get(event, event)
    assert (shown["status"], shown[fact]["by"]) == (fact, "test")
    assert shown[fact]["reason"]
    assert shown["approval"]["by"] == "auto-approval"
    assert {"offline", "unhealthy", "drain", "rejected", "revoked"} & set(shown) == {fact}


def test_a_rejected_node_stays_pending_and_says_so() -> None:
    """A fact of its own, in list and detail; registering again does not clear it, approval does."""
    node = pending()
    assert do(node, "reject", {"reason": "unknown machine"}).json() == {"message": "node rejected"}
    api.make_node(approved=False)
    (listed,) = api.admin().get("/api/nodes").json()
    shown = api.admin().get(f"/api/nodes/{node.id}").json()
    for entry in (listed, shown):
        assert entry["status"] == "pending"
        assert (entry["rejected"]["by"], entry["rejected"]["reason"]) == ("static-key", "unknown machine")
    assert do(node, "approve").status_code == 200
    assert "rejected" not in api.admin().get(f"/api/nodes/{node.id}").json()


@pytest.mark.parametrize(
    "body", [None, {}, {"reason": ""}, {"reason": "  "}, {"reason": "\u200b"}, {"reason": None}]
)
def test_a_rejection_needs_a_reason(body: Any) -> None:
    """400 naming it."""
    refused = do(pending(), "reject", body)
    assert (refused.status_code, "reason" in api.message(refused)) == (400, True)


def test_only_a_pending_node_can_be_rejected() -> None:
    """409 naming the state."""
    refused = do(api.make_node(), "reject", {"reason": "x"})
    assert (refused.status_code, "healthy" in api.message(refused)) == (409, True)


def approve_many(ids: Any) -> Any:
    return api.admin().post("/api/nodes/approve", {"ids": ids})


def test_bulk_approval_does_what_it_can() -> None:
    """In the order asked for, each once; what is wrong with one does not stop the others."""
    one, two, healthy = pending("a"), pending("b"), api.make_node("c")
    unknown = uuid4()
    ids = [str(node) for node in (two.id, unknown, healthy.id, one.id, two.id)]
    answer = approve_many(ids).json()
    assert answer["approved"] == 2
    assert [entry["id"] for entry in answer["results"]] == ids[:4]
    assert answer["results"][0] == {"id": str(two.id), "name": "b", "status": "healthy"}
    assert answer["results"][1]["error"] == "node not found"
    assert "healthy" in answer["results"][2]["error"]
    assert [api.node(node.id).approved_by for node in (one, two)] == ["static-key"] * 2


@pytest.mark.rule("R1.15", "http-2.6")
def test_an_approval_holds_for_the_fingerprint_that_was_compared() -> None:
    """Another one by now is 409, and nothing happens; without one, the present one is let in."""
    node = pending()
    shown = api.node(node.id).fingerprint
    for other in ("f" * 64, ""):
        refused = do(node, "approve", {"fingerprint": other})
        assert (refused.status_code, "fingerprint" in api.message(refused)) == (409, True)
    assert (api.node(node.id).status, api.node(node.id).revision) == ("pending", node.revision)
    assert do(node, "approve", {"fingerprint": shown.upper()}).status_code == 200
    weak = pending("b")
    BackendNode.objects.filter(pk=weak.pk).update(fingerprint="", weak_identity=True)
    assert do(weak, "approve", {"fingerprint": ""}).status_code == 200


@pytest.mark.parametrize("fingerprint", ["x", "f" * 63, "g" * 64, 5, ["f" * 64], "f" * 64 + "\n"])
def test_a_fingerprint_that_cannot_be_is_400(fingerprint: Any) -> None:
    """Naming the field, for one node and for several."""
    node = pending()
    body = {"ids": [str(node.id)], "fingerprints": {str(node.id): fingerprint}}
    for refused in (
        do(node, "approve", {"fingerprint": fingerprint}),
        api.admin().post("/api/nodes/approve", body),
    ):
        assert (refused.status_code, "fingerprint" in api.message(refused)) == (400, True)
    assert api.node(node.id).status == "pending"


@pytest.mark.parametrize("fingerprints", [5, [], {"nope": "f" * 64}, {"\u0000": ""}])
def test_fingerprints_of_no_nodes_are_400(fingerprints: Any) -> None:
    """Naming the field."""
    refused = api.admin().post("/api/nodes/approve", {"ids": [str(uuid4())], "fingerprints": fingerprints})
    assert (refused.status_code, "fingerprints" in api.message(refused)) == (400, True)


def test_bulk_approval_compares_each_fingerprint() -> None:
    """A changed one stops its own node only."""
    one, two, three = pending("a"), pending("b"), pending("c")
    body = {
        "ids": [str(node.id) for node in (one, two, three)],
        "fingerprints": {str(one.id): "f" * 64, str(two.id): api.node(two.id).fingerprint},
    }
    answer = api.admin().post("/api/nodes/approve", body).json()
    assert answer["approved"] == 2
    assert "fingerprint" in answer["results"][0]["error"]
    assert [api.node(node.id).status for node in (one, two, three)] == ["pending", "healthy", "healthy"]


@pytest.mark.parametrize(
    "ids", [None, [], "x", ["nope"], [5], [None], [["x"]], {"a": 1}, [str(uuid4())] * 501]
)
def test_bulk_approval_of_no_ids_is_400(ids: Any) -> None:
    """Naming the field."""
    refused = approve_many(ids)
    assert (refused.status_code, "ids" in api.message(refused)) == (400, True)


@pytest.mark.rule("http-2.4", "R1.21", "T-REG-152")
def test_a_removed_node_is_gone_with_all_that_was_its_own() -> None:
    """Replicas, labels and conflicts; the timeline stays; the same name may come again as another node."""
    node = api.make_node(labels={"a": "b"})
    api.replica(node)
    gone = api.admin().delete(f"/api/nodes/{node.id}")
    assert (gone.status_code, gone.json()) == (200, {"message": "node deregistered"})
    assert not NodeModel.objects.exists()
    assert api.admin().get(f"/api/nodes/{node.id}").status_code == 404
    assert api.admin().get("/api/nodes").json() == []
    assert NodeEvent.objects.filter(node_id=node.id, kind="deregistered").count() == 1
    assert api.admin().delete(f"/api/nodes/{node.id}").status_code == 404
    assert api.make_node().id != node.id


@pytest.mark.rule("http-2.4", "R1.38")
def test_a_removed_agent_takes_its_user_and_key_along() -> None:
    """The token works no longer."""
    node = pending("agent-1", node_type="agent", address="")
    token = do(node, "approve").json()["api_token"]
    users = get_user_model().objects.count()
    assert api.admin().delete(f"/api/nodes/{node.id}").status_code == 200
    assert not owner_of(classify_credential(token)).is_authenticated
    assert (get_user_model().objects.count(), ApiKey.objects.count()) == (users - 1, 0)


def test_a_drain_that_stands_takes_over_a_new_deadline() -> None:
    """Author and time of the first one stay."""
    node = api.make_node()
    do(node, "drain", {"reason": "first"})
    since = api.node(node.id).drained_at
    do(node, "drain", {"deadline_seconds": 0})
    row = api.node(node.id)
    assert (row.drained_at, row.drain_reason) == (since, "first")
    assert row.drain_deadline <= clock.now()
    assert lifecycle.finish_drains(now=clock.now()) == 0, "it has no replicas"


@pytest.mark.rule("R1.31", "http-2.6")
def test_a_bulk_approval_gives_an_agents_token_once() -> None:
    """As approving it alone does: the plaintext is nowhere else."""
    agent = api.make_node("agent-1", node_type="agent", address="", approved=False)
    backend = api.make_node("w2", approved=False)
    answer = api.admin().post("/api/nodes/approve", {"ids": [str(agent.id), str(backend.id)]})
    first, second = answer.json()["results"]
    assert first["api_token"].startswith("lai-")
    assert "api_token" not in second
