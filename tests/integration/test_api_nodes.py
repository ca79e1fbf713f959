"""Node routes for admins and for workers themselves: shapes, envelopes, refusals, constant query counts."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster import clock
from nodes import identity, services
from nodes.models import ApiKey, BackendNode, NodeModel
from operations import services as ledger
from operations.models import Operation
from operations.states import Event
from tests.support import api
from tests.support.environment import REGISTRATION_TOKEN

UNKNOWN = UUID("0d6f1f0e-0000-4000-8000-00000000dead")
pytestmark = pytest.mark.django_db

ADMIN_GETS = [
    "/api/nodes",
    "/api/nodes/models",
    "/api/nodes/{id}",
    "/api/nodes/{id}/models",
    "/api/operations",
]
ADMIN_POSTS = ["/api/nodes/{id}/approve", "/api/nodes/{id}/backends/install"]


def replica(node: BackendNode, name: str = "m", **fields: Any) -> NodeModel:
    return NodeModel.objects.create(
        node=node, model_name=name, **{"state": "loaded", "address": "127.0.0.1:1", **fields}
    )


def user_key(**rights: Any) -> str:
    user = get_user_model().objects.create_user("ann", password="x", **rights)
    return identity.create_api_key(user, "laptop")[1]


def always_and_sometimes(recorded: list[dict[str, Any]]) -> tuple[set[str], set[str]]:
    keys = [set(entry) for entry in recorded]
    return set.intersection(*keys), set.union(*keys)


def test_list_and_detail_have_the_recorded_fields() -> None:
    """§2.1, §2.3: names, presence and JSON types of the reference."""
    recorded = [e for example in api.examples("nodes-list")[:3] for e in example["body"]]
    always, sometimes = always_and_sometimes(recorded)
    node = api.make_node("gpu", total_vram=8, available_vram=8, vram_budget="50%", capability="nvidia")
    plain = api.make_node("plain", secret=api.OTHER_SECRET)
    replica(node, in_flight=3)
    replica(node, "n", state="loading")
    listed = api.admin().get("/api/nodes").json()
    assert [entry["name"] for entry in listed] == ["gpu", "plain"]
    for entry in listed:
        assert always <= set(entry) <= sometimes
        assert {k: type(v) for k, v in entry.items()} == {
            k: type(v) for k, v in _merged(recorded).items() if k in entry
        }
    assert (listed[0]["model_count"], listed[0]["in_flight_count"]) == (1, 3)
    assert "vram_budget" not in listed[1]
    assert api.admin().get(f"/api/nodes/{plain.id}").json() == listed[1]


def _merged(entries: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for entry in entries:
        merged |= entry
    return merged


def test_replicas_have_the_recorded_fields() -> None:
    """R1.61, §2.3: all states of a node, loaded ones on healthy nodes cluster-wide."""
    recorded = api.examples("models-on-node")[1]["body"][0]
    node = api.make_node()
    replica(node, backend_type="mock", config_revision="r", effective_options_hash="h")
    replica(node, "n", state="loading", address="")
    one, two = api.admin().get(f"/api/nodes/{node.id}/models").json()
    assert {k: type(v) for k, v in one.items()} == {k: type(v) for k, v in recorded.items()}
    assert two["state"] == "loading"
    assert [entry["model_name"] for entry in api.admin().get("/api/nodes/models").json()] == ["m"]
    services.deactivate(node.id, now=clock.now())
    assert api.admin().get("/api/nodes/models").json() == []


def test_statements_do_not_grow_with_the_number_of_nodes() -> None:
    """Lists cost the same number of queries for 3 and for 30 nodes."""
    counts = []
    for total in (3, 30):
        for number in range(BackendNode.objects.count(), total):
            replica(api.make_node(f"w{number}", secret=f"{number:064x}", labels={"a": "b"}))
        with CaptureQueriesContext(
            connection,
        ) as queries:
            for path in ("/api/nodes", "/api/nodes/models", "/api/operations"):
                assert api.admin().get(path).status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("path", ADMIN_GETS + ADMIN_POSTS)
def test_who_may_call_admin_routes(path: str) -> None:
    """§0.2: 401 with a challenge for nobody, 403 for a user who is no admin; nodes are neither."""
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
        refused = caller.get(path) if path in ADMIN_GETS else caller.post(path, {})
        assert refused.status_code == status
        assert refused.json()["error"]["type"] == kind
        assert status != 401 or refused["WWW-Authenticate"] == "Bearer"


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


SELF = [("POST", "drain"), ("POST", "deregister"), ("GET", "models")]


@pytest.mark.parametrize(("method", "action"), SELF)
def test_only_the_node_itself_uses_its_routes(method: str, action: str) -> None:
    """§1 with the identity of docs/architecture.md: 401 wrong, 403 another node or a person, 404 unknown."""
    node = api.make_node()
    other = api.make_node("w2", secret=api.OTHER_SECRET)

    def call(caller: api.Caller, node_id: Any) -> Any:
        path = f"/api/node/{node_id}/{action}"
        return caller.get(path) if method == "GET" else caller.post(path)

    for caller in (api.Caller(), api.bearer("x"), api.bearer(REGISTRATION_TOKEN)):
        refused = call(caller, node.id)
        assert refused.status_code == 401
        assert isinstance(refused.json()["error"], str)
    for known in (api.worker(api.OTHER_SECRET), api.admin()):
        assert call(known, node.id).status_code == 403
    for unknown in (uuid4(), "nope", "%00", "{}", "a" * 5000):
        assert call(api.worker(), unknown).status_code == 404
    assert call(api.worker(), node.id).status_code == 200
    assert api.node(other.id).status == "healthy"


def test_a_workers_way_out() -> None:
    """R1.19, R1.20, §1.7: the drain keeps the replicas to wait for, the record stays."""
    node = api.make_node()
    replica(node, in_flight=2)
    assert api.worker().post(f"/api/node/{node.id}/drain").json() == {"message": "node set to draining"}
    assert api.node(node.id).status == "draining"
    assert api.worker().get(f"/api/node/{node.id}/models").json()[0]["in_flight"] == 2
    assert api.worker().post(f"/api/node/{node.id}/deregister").status_code == 200
    left = api.node(node.id)
    assert (left.status, left.approved_at is not None, left.replicas.count()) == ("offline", True, 0)


@pytest.mark.parametrize(
    "path", ["/api/nodes/nope", f"/api/nodes/{UNKNOWN}", "/api/nodes/%00", "/api/nodes/%ED%A0%80"]
)
def test_unknown_ids_are_404(path: str) -> None:
    """§2.3: and so is a text that cannot be an id."""
    for suffix in ("", "/models"):
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


def install(node: Any, body: Any) -> Any:
    return api.admin().post(f"/api/nodes/{node}/backends/install", body)


def test_install_is_recorded_before_it_is_answered_and_joins_a_running_one() -> None:
    """§2.10, §3.7, O34: 202 with a status URL that works; a second request is the same operation."""
    node = api.make_node()
    first = install(node.id, {"backend": "local@mock"})
    assert first.status_code == 202
    assert set(first.json()) == set(api.examples("install")[0]["body"])
    again = install(node.id, {"backend": "mock"})
    assert (again.status_code, again.json()["deduplicated"]) == (202, True)
    assert again.json()["jobID"] == first.json()["jobID"]
    operation = Operation.objects.get()
    assert operation.key == f"node:{node.id}:mock"
    assert operation.actor == "static-key"
    assert operation.payload == {
        "backend": "local@mock",
        "uri": "",
        "name": "",
        "alias": "",
        "backend_galleries": "",
    }
    job = api.admin().get(first.json()["statusUrl"])
    assert {k: type(v) for k, v in job.json().items()} == {
        "progress": float,
        "message": str,
        "galleryElementName": str,
        "processed": bool,
        "deletion": bool,
        "queued": bool,
    }
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert (listed["jobID"], listed["name"], listed["fullName"]) == (
        first.json()["jobID"],
        "mock",
        "local@mock",
    )
    assert (listed["isQueued"], listed["nodeID"]) == (True, str(node.id))


def test_job_of_a_finished_operation() -> None:
    """§3.7: `completed` only on success, `error` only on failure."""
    node = api.make_node()
    for outcome, keys in (("COMPLETE", {"completed"}), ("FAIL", {"error"})):
        url = install(node.id, {"backend": "mock"}).json()["statusUrl"]
        (work,) = ledger.claim("test", now=clock.now(), lease=10, limit=1)
        event = getattr(Event, outcome)
        error = "" if outcome == "COMPLETE" else "no such backend"
        ledger.finish(work.id, work.fence, event, now=clock.now(), error=error)
        job = api.admin().get(url).json()
        assert job["processed"]
        assert set(job) & {"completed", "error"} == keys


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "backend"),
        ({"backend": ""}, 400, "backend"),
        (["x"], 400, "body"),
        (b"{bad", 400, "body"),
        ({"backend": "../../etc"}, 400, "backend"),
        ({"backend": "a/b"}, 400, "backend"),
        ({"backend": "a@b@c"}, 400, "backend"),
        ({"backend": "a b"}, 400, "backend"),
        ({"backend": ".hidden"}, 400, "backend"),
        ({"backend": 5}, 400, "backend"),
        ({"backend": "x" * 256}, 400, "backend"),
        ({"uri": "a\x00b"}, 400, "uri"),
        ({"uri": "https://user:secret@host/backend.tar"}, 400, "uri"),
        ({"uri": "/srv/x", "name": "../x"}, 400, "name"),
        ({"backend": "mock", "backend_galleries": "{broken"}, 202, ""),
        ({"uri": "/srv/gallery/mock", "name": "ext", "alias": "exta"}, 202, ""),
        ({"uri": "/srv/gallery/mock"}, 202, ""),
    ],
)
def test_install_bodies(body: Any, status: int, says: str) -> None:
    """§2.10, O37."""
    answer = install(api.make_node().id, body)
    assert answer.status_code == status, answer.content
    assert not says or says in api.message(answer)


def test_install_where_it_cannot_be() -> None:
    """The issue: unknown 404, pending and agent 409 with the reason; nothing is admitted."""
    assert install(uuid4(), {"backend": "mock"}).status_code == 404
    pending = install(api.make_node(approved=False).id, {"backend": "mock"})
    assert (pending.status_code, "pending" in api.message(pending)) == (409, True)
    agent = install(
        api.make_node("a", secret=api.OTHER_SECRET, node_type="agent", address="").id, {"backend": "m"}
    )
    assert (agent.status_code, "agent" in api.message(agent)) == (409, True)
    assert not Operation.objects.exists()


def test_another_kind_on_the_key_is_a_conflict() -> None:
    """O34."""
    node = api.make_node()
    other = ledger.OperationRequest("backend_delete", key=f"node:{node.id}:mock", element="mock", actor="x")
    ledger.admit(other, now=clock.now())
    assert install(node.id, {"backend": "mock"}).status_code == 409


@pytest.mark.parametrize("uid", ["nope", str(UNKNOWN), "%00", "urn:uuid:zz"])
def test_unknown_jobs_are_404(uid: str) -> None:
    """§3.7, "Build:": the reference answers `queued` for ever."""
    refused = api.admin().get(f"/api/backends/job/{uid}")
    assert refused.status_code == 404
    assert isinstance(refused.json()["error"], str)


@given(
    body=st.dictionaries(
        st.sampled_from(["backend", "uri", "name", "alias", "backend_galleries"]),
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text(), max_size=2),
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_install_body_ends_in_202_or_400(body: dict[str, Any]) -> None:
    """Never a 500."""
    node = BackendNode.objects.first() or api.make_node()
    assert install(node.id, body).status_code in (202, 400)
