"""Node routes for admins: shapes of list, detail and replicas; who may call what; envelopes."""

from datetime import datetime
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.accounts.models import ApiKey
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeEvent, NodeLabel
from nodes.registry import labels, lifecycle, overrides
from tests.support import api
from tests.support.environment import REGISTRATION_TOKEN

UNKNOWN = UUID("0d6f1f0e-0000-4000-8000-00000000dead")
pytestmark = pytest.mark.django_db

ADMIN_GETS = [
    "/api/nodes",
    "/api/nodes/models",
    "/api/nodes/{id}",
    "/api/nodes/{id}/models",
    "/api/nodes/{id}/labels",
    "/api/nodes/{id}/events",
    "/api/nodes/{id}/conflicts",
    "/api/nodes/conflicts",
    "/api/nodes/{id}/backends",
    "/api/backends",
    "/api/operations",
]
ADMIN_POSTS = [
    "/api/nodes/approve",
    "/api/nodes/{id}/approve",
    "/api/nodes/{id}/reject",
    "/api/nodes/{id}/drain",
    "/api/nodes/{id}/resume",
    "/api/nodes/{id}/identity/rotate",
    "/api/nodes/{id}/identity/revoke",
    "/api/nodes/{id}/conflicts/{id}/accept",
    "/api/nodes/{id}/conflicts/{id}/refuse",
    "/api/nodes/{id}/backends/install",
]
ADMIN_EDITS = [
    ("PUT", "/api/nodes/{id}/labels"),
    ("PATCH", "/api/nodes/{id}/labels"),
    ("DELETE", "/api/nodes/{id}/labels/x"),
    ("PUT", "/api/nodes/{id}/max-replicas-per-model"),
    ("DELETE", "/api/nodes/{id}/max-replicas-per-model"),
    ("PUT", "/api/nodes/{id}/vram-budget"),
    ("DELETE", "/api/nodes/{id}/vram-budget"),
    ("PUT", "/api/nodes/{id}/disk-quota"),
    ("DELETE", "/api/nodes/{id}/disk-quota"),
    ("DELETE", "/api/nodes/{id}"),
]
ADMIN_ROUTES = [("GET", path) for path in ADMIN_GETS] + [("POST", path) for path in ADMIN_POSTS] + ADMIN_EDITS


def user_key(**rights: Any) -> str:
    user = get_user_model().objects.create_user("ann", password="x", **rights)
    return principals.create_api_key(user, "laptop")[1]


def always_and_sometimes(recorded: list[dict[str, Any]]) -> tuple[set[str], set[str]]:
    keys = [set(entry) for entry in recorded]
    return set.intersection(*keys), set.union(*keys)


@pytest.mark.rule("http-2.1", "http-2.3", "R1.3", "T-REG-37")
def test_list_and_detail_have_the_recorded_fields() -> None:
    """§2.1, §2.3: names, presence and JSON types of the reference."""
    recorded = [e for example in api.examples("nodes-list")[:3] for e in example["body"]]
    always, sometimes = always_and_sometimes(recorded)
    node = api.make_node("gpu", total_vram=8, available_vram=8, vram_budget="50%", capability="nvidia")
    plain = api.make_node("plain", secret=api.OTHER_SECRET)
    api.replica(node, in_flight=3)
    api.replica(node, "n", state="loading")
    listed = api.admin().get("/api/nodes").json()
    assert [entry["name"] for entry in listed] == ["gpu", "plain"]
    for entry in listed:
        assert always <= set(entry) <= sometimes
        assert {k: type(v) for k, v in entry.items()} == {
            k: type(v) for k, v in _merged(recorded).items() if k in entry
        }
    assert (listed[0]["model_count"], listed[0]["in_flight_count"]) == (1, 3)
    assert "vram_budget" not in listed[1]
    detail = api.admin().get(f"/api/nodes/{plain.id}").json()
    assert {name: detail.pop(name) for name in listed[1]} == listed[1]
    assert set(detail) == {
        "approval",
        "identity",
        "revision",
        "overrides",
        "label_sources",
        "inventory",
        "gpus",
        "system",
        "model_bytes",
    }


def _merged(entries: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for entry in entries:
        merged |= entry
    return merged


@pytest.mark.rule("http-2.3", "R1.61", "T-REG-147")
def test_replicas_have_the_recorded_fields() -> None:
    """R1.61, §2.3: all states of a node, loaded ones on healthy nodes cluster-wide."""
    recorded = api.examples("models-on-node")[1]["body"][0]
    node = api.make_node()
    api.replica(node, backend_type="mock", config_revision="r", effective_options_hash="h")
    api.replica(node, "n", state="loading", address="")
    one, two = api.admin().get(f"/api/nodes/{node.id}/models").json()
    assert {k: type(v) for k, v in one.items()} == {k: type(v) for k, v in recorded.items()}
    assert two["state"] == "loading"
    assert [entry["model_name"] for entry in api.admin().get("/api/nodes/models").json()] == ["m"]
    lifecycle.deactivate(node.id, now=clock.now())
    assert api.admin().get("/api/nodes/models").json() == []


@pytest.mark.rule("http-2.3", "R1.107", "T-REG-38")
def test_the_detail_of_a_node_without_labels_has_an_empty_object() -> None:
    """Non-null; and no fact that does not hold."""
    node = api.make_node(approved=False)
    NodeLabel.objects.all().delete()
    shown = api.admin().get(f"/api/nodes/{node.id}").json()
    assert shown["labels"] == {}
    assert not {"approval", "rejected", "revoked", "drain", "offline", "unhealthy"} & set(shown)
    assert None not in shown.values()


@pytest.mark.rule("http-2.3", "R1.45", "R1.47", "R1.40")
def test_the_detail_says_who_overrode_what_and_where_labels_come_from() -> None:
    """Only what is overridden now, by the last who did; unknown once the timeline has forgotten."""
    node = api.make_node(labels={"rack": "7"})
    at = f"/api/nodes/{node.id}"
    assert api.admin().get(at).json()["overrides"] == {}
    api.admin().put(f"{at}/max-replicas-per-model", {"value": 2})
    overrides.set_vram_budget(node.id, "50%", actor=Actor(ActorKind.USER, "ann"), now=clock.now())
    overrides.set_vram_budget(node.id, "60%", actor=Actor(ActorKind.USER, "bob"), now=clock.now())
    api.admin().patch(f"{at}/labels", {"tier": "fast"})
    shown = api.admin().get(at).json()
    assert {name: entry["by"] for name, entry in shown["overrides"].items()} == {
        "max_replicas_per_model": "static-key",
        "vram_budget": "bob",
    }
    last = NodeEvent.objects.filter(actor="bob").values_list("at", flat=True)
    assert datetime.fromisoformat(shown["overrides"]["vram_budget"]["at"]) == last[0]
    assert {k: v for k, v in shown["label_sources"].items() if k in ("rack", "tier", "node.name")} == {
        "rack": "worker",
        "tier": "admin",
        "node.name": "auto",
    }
    assert set(shown["label_sources"]) == set(shown["labels"])
    assert shown["inventory"] == {"at": None, "error": ""}
    api.admin().delete(f"{at}/max-replicas-per-model")
    NodeEvent.objects.all().delete()
    assert api.admin().get(at).json()["overrides"] == {"vram_budget": {"by": "", "at": None}}


def test_a_detail_costs_the_same_for_any_history() -> None:
    """A node with one event, and one with many labels and overrides."""
    node = api.make_node()
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(connection) as queries:
            assert api.admin().get(f"/api/nodes/{node.id}").status_code == 200
        counts.append(len(queries))
        for value in range(1, 9):
            overrides.set_replica_cap(node.id, value, actor=Actor(ActorKind.USER, "ann"), now=clock.now())
            labels.edit_labels(
                node.id, {f"k{value}": "v"}, actor=Actor(ActorKind.USER, "ann"), now=clock.now()
            )
    assert counts[0] == counts[1] <= 8


def test_the_revision_moves_with_every_change() -> None:
    """Two admins who edit one node can tell that the other was faster."""
    node = api.make_node()
    seen = [api.admin().get(f"/api/nodes/{node.id}").json()["revision"]]
    for body in ({"a": "1"}, {"a": "1"}, {"b": "1"}):
        api.admin().patch(f"/api/nodes/{node.id}/labels", body)
        seen.append(api.admin().get(f"/api/nodes/{node.id}").json()["revision"])
    assert [after - before for before, after in pairwise(seen)] == [1, 0, 1]


EDITS = [
    ("PUT", "labels", {"a": "1"}),
    ("PATCH", "labels", {"a": "1"}),
    ("DELETE", "labels/a", None),
    ("PUT", "max-replicas-per-model", {"value": 3}),
    ("DELETE", "max-replicas-per-model", None),
    ("PUT", "vram-budget", {"value": "50%"}),
    ("DELETE", "vram-budget", None),
    ("PUT", "disk-quota", {"value": "50%"}),
    ("DELETE", "disk-quota", None),
]


@pytest.mark.parametrize(("method", "what", "body"), EDITS)
def test_an_edit_can_name_the_revision_that_it_was_decided_on(method: str, what: str, body: Any) -> None:
    """409 naming `revision` if somebody was faster, and nothing is written; 400 for no revision."""
    node = api.make_node(labels={"a": "0"})
    overrides.set_replica_cap(node.id, 7, actor=Actor(ActorKind.USER, "ann"), now=clock.now())
    overrides.set_vram_budget(node.id, "7%", actor=Actor(ActorKind.USER, "ann"), now=clock.now())
    overrides.set_disk_quota(node.id, "7%", actor=Actor(ActorKind.USER, "ann"), now=clock.now())
    before, at = api.node(node.id).revision, f"/api/nodes/{node.id}/{what}?revision="
    for revision, status in (("x", 400), ("-1", 400), (str(before - 1), 409)):
        refused = api.admin().send(method, at + revision, body)
        assert (refused.status_code, refused.json()["error"]["field"]) == (status, "revision")
    assert api.node(node.id).revision == before
    assert api.admin().send(method, f"{at}{before}", body).status_code in (200, 204)
    assert api.node(node.id).revision == before + 1


@pytest.mark.parametrize(
    ("method", "what", "body", "field"),
    [
        ("PUT", "labels", {"": "1"}, "labels"),
        ("PATCH", "labels", {"a": 5}, "labels.a"),
        ("PATCH", "labels", {"a": "\u200b"}, "labels.a"),
        ("PUT", "max-replicas-per-model", {"value": 0}, "value"),
        ("PUT", "max-replicas-per-model", {}, "value"),
        ("PUT", "vram-budget", {"value": "120%"}, "value"),
        ("PUT", "disk-quota", {"value": "120%"}, "value"),
        ("POST", "reject", {}, "reason"),
        ("POST", "approve", {"fingerprint": "f" * 64}, "fingerprint"),
    ],
)
def test_a_refusal_names_the_field_that_is_wrong(method: str, what: str, body: Any, field: str) -> None:
    """A page shows the message where it was typed."""
    refused = api.admin().send(method, f"/api/nodes/{api.make_node(approved=False).id}/{what}", body)
    assert refused.status_code in (400, 409)
    assert refused.json()["error"]["field"] == field


def test_lists_of_replicas_and_operations_cost_the_same_for_any_number() -> None:
    """3 and 30 nodes; the list of nodes has its own test."""
    counts = []
    for total in (3, 30):
        for number in range(BackendNode.objects.count(), total):
            api.replica(api.make_node(f"w{number}", secret=f"{number:064x}"))
        with CaptureQueriesContext(connection) as queries:
            for path in ("/api/nodes/models", "/api/operations"):
                assert api.admin().get(path).status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_who_may_call_admin_routes(method: str, path: str) -> None:
    """§0.2: 401 with a challenge without a credential, 403 for a user who is no admin; nodes are neither."""
    node = api.make_node(approved=False)
    path = path.format(id=node.id)
    key = user_key()
    for caller, status, kind in [
        (api.Caller(), 401, "invalid_request_error"),
        (api.bearer("wrong"), 401, "invalid_request_error"),
        (api.bearer("lac-wrong"), 401, "invalid_request_error"),
        (api.worker(), 401, "invalid_request_error"),
        (api.bearer(REGISTRATION_TOKEN), 401, "invalid_request_error"),
        (api.bearer(key), 403, "authorization_error"),
        (api.Caller(**{"x-api-key": key}), 403, "authorization_error"),
    ]:
        refused = caller.send(method, path, None if method == "GET" else {})
        assert refused.status_code == status
        assert refused.json()["error"]["type"] == kind
        assert status != 401 or refused["WWW-Authenticate"] == "Bearer"
    assert api.node(node.id).revision == node.revision


def test_an_admins_api_key_costs_one_query_and_ends_with_its_revocation() -> None:
    """Keys are stored as hashes; staff are admins."""
    key = user_key(is_staff=True)
    caller = api.Caller(**{"x-api-key": key})
    with CaptureQueriesContext(connection) as queries:
        assert caller.get("/api/nodes/models").status_code == 200
    assert len([q for q in queries if "api_keys" in q["sql"]]) == 1
    assert key not in str(ApiKey.objects.values())
    ApiKey.objects.update(revoked_at=clock.now())
    assert caller.get("/api/nodes/models").status_code == 401


def test_a_session_needs_the_csrf_token_to_change_something() -> None:
    """Cookies alone may read; a state-changing request proves that it comes from our page."""
    node = api.make_node(approved=False)
    caller = api.Caller()
    caller.client.force_login(get_user_model().objects.create_superuser("root", password="x"))
    assert caller.get("/api/nodes").status_code == 200
    refused = caller.post(f"/api/nodes/{node.id}/approve")
    assert refused.status_code == 403
    assert api.node(node.id).status == "pending"
    caller.client.get("/admin/logout/")
    token = "t" * 32
    caller.client.cookies["csrftoken"] = token
    assert caller.post(f"/api/nodes/{node.id}/approve", **{"X-CSRFToken": token}).status_code == 200
    assert api.node(node.id).approved_by == "root"


@pytest.mark.rule("T-REG-39", "http-2.3")
@pytest.mark.parametrize(
    "path", ["/api/nodes/nope", f"/api/nodes/{UNKNOWN}", "/api/nodes/%00", "/api/nodes/%ED%A0%80"]
)
def test_unknown_ids_are_404(path: str) -> None:
    """§2.3: and so is a text that cannot be an id."""
    for suffix in ("", "/models", "/labels", "/events", "/conflicts"):
        refused = api.admin().get(path + suffix)
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "node_error")
    for action in ("approve", "backends/install"):
        assert api.admin().post(f"{path}/{action}", {"backend": "x"}).status_code == 404


def test_unknown_paths_and_methods_are_json() -> None:
    """§0.4: unknown API paths are non-2xx and nested."""
    for path in ("/api/nope", "/api/", "/api", "/api/nodes/x/y/z", "/nope"):
        refused = api.admin().get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, 404)
    assert api.admin().client.put("/api/nodes", headers=api.admin().headers).status_code == 405
