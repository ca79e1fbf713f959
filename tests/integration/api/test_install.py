"""Installs of backends on a node by REST (`contract/http-api.md` §2.10, §3.7)."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import OperationalError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.kit import clock
from nodes.api import cluster_backends, node_backends
from nodes.backends.intents import Ended, record_outcomes
from nodes.models import BackendNode, PendingBackendOp
from operations.models import Operation
from operations.targets import NO_ELIGIBLE_NODE
from tests.support import api
from tests.support.effort import EFFORT
from tests.support.intents import claim

UNKNOWN = UUID("0d6f1f0e-0000-4000-8000-00000000dead")
pytestmark = pytest.mark.django_db


def install(node: Any, body: Any) -> Any:
    return api.admin().post(f"/api/nodes/{node}/backends/install", body)


def is_recorded(node: BackendNode) -> None:
    """The operation and the intent of an install of `local@mock` on the node."""
    operation = Operation.objects.get()
    assert operation.key == f"node:{node.id}:mock"
    assert (operation.actor, operation.client_address) == ("static-key", "127.0.0.1")
    assert (operation.kind, operation.element, operation.node_id) == (
        "backend_install",
        "local@mock",
        node.id,
    )
    assert operation.payload == {
        "kind": "backend_install",
        "backend": "mock",
        "gallery": "local",
        "uri": "",
        "name": "",
        "alias": "",
        "galleries": "",
        "force": False,
        "all_nodes": False,
    }
    intent = PendingBackendOp.objects.get()
    assert (intent.op, intent.backend, intent.gallery, intent.operation_id) == (
        "install",
        "mock",
        "local",
        operation.id,
    )


@pytest.mark.rule("A16", "A17", "A19", "A25", "O1", "O2", "O3", "O30", "O33", "O35", "O36", "O87", "R6.36")
def test_install_is_recorded_before_it_is_answered_and_joins_a_running_one() -> None:
    """§2.10, §3.7, O34: 202 with a status URL that works; a second request is the same operation."""
    node = api.make_node()
    api.make_node("other", secret=api.OTHER_SECRET)
    first = install(node.id, {"backend": "local@mock"})
    assert first.status_code == 202
    assert first.json()["statusUrl"] == f"/api/backends/job/{first.json()['jobID']}"
    assert set(first.json()) == set(api.examples("install")[0]["body"])
    again = install(node.id, {"backend": "mock"})
    assert (again.status_code, again.json()["deduplicated"]) == (202, True)
    assert again.json()["jobID"] == first.json()["jobID"]
    is_recorded(node)
    job = api.admin().get(first.json()["statusUrl"])
    assert {k: type(v) for k, v in job.json().items()} == {
        "progress": float,
        "message": str,
        "galleryElementName": str,
        "processed": bool,
        "deletion": bool,
        "queued": bool,
        "state": str,
        "nodes": list,
    }
    said = job.json()
    assert (said["message"], said["queued"], said["deletion"]) == ("queued", True, False)
    assert (said["galleryElementName"], said["state"]) == ("local@mock", "queued")
    assert [part["node_id"] for part in said["nodes"]] == [str(node.id)]
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert (listed["jobID"], listed["name"], listed["fullName"]) == (
        first.json()["jobID"],
        "mock",
        "local@mock",
    )
    assert (listed["isQueued"], listed["nodeID"]) == (True, str(node.id))
    assert (listed["phase"], listed["cancellable"]) == ("queued", True)


@pytest.mark.rule("O24", "O29", "O62")
def test_job_of_a_finished_operation() -> None:
    """§3.7: `completed` only on success, `error` only on failure."""
    node = api.make_node()
    for error, keys in (("", {"completed"}), ("no such backend", {"error"})):
        url = install(node.id, {"backend": "mock"}).json()["statusUrl"]
        (intent,) = claim()
        record_outcomes({(intent.id, intent.fence): (Ended(error=error), ())}, now=clock.now())
        job = api.admin().get(url).json()
        assert job["processed"]
        assert set(job) & {"completed", "error"} == keys
        assert job.get("error", "") == error


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
        ({"uri": "oci://images.test/mock:1"}, 400, "name"),
        ({"uri": "images.test/mock:1"}, 400, "name"),
        ({"uri": "oci://images.test/mock:1", "name": "ext"}, 202, ""),
        ({"backend": "mock", "backend_galleries": "{broken"}, 202, ""),
        ({"uri": "/srv/gallery/mock", "name": "ext", "alias": "exta"}, 202, ""),
        ({"uri": "/srv/gallery/mock"}, 202, ""),
    ],
)
@pytest.mark.rule("A18", "O37", "R6.36")
def test_install_bodies(body: Any, status: int, says: str) -> None:
    """§2.10, O37."""
    answer = install(api.make_node().id, body)
    assert answer.status_code == status, answer.content
    assert not says or says in api.message(answer)


@pytest.mark.rule("O21", "O108", "R6.16", "R6.20", "T-MGR-7")
def test_install_where_it_cannot_be() -> None:
    """The issue: unknown 404, pending and agent 409 with the reason; nothing is admitted."""
    unknown = install(uuid4(), {"backend": "mock"})
    assert unknown.status_code == 404
    said = unknown.json()["error"]
    assert (said["code"], said["type"], bool(said["message"])) == (404, "node_error", True)
    pending = install(api.make_node(approved=False).id, {"backend": "mock"})
    assert (pending.status_code, "pending" in api.message(pending)) == (409, True)
    agent = install(
        api.make_node("a", secret=api.OTHER_SECRET, node_type="agent", address="").id, {"backend": "m"}
    )
    assert (agent.status_code, "agent" in api.message(agent)) == (409, True)
    assert not Operation.objects.exists()


@pytest.mark.rule("O37")
@pytest.mark.parametrize(("galleries", "said"), [("{broken", True), ("7", True), ("[]", False), ("", False)])
def test_galleries_that_are_no_list_are_ignored_with_a_warning(
    galleries: str, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    answer = install(api.make_node().id, {"backend": "mock", "backend_galleries": galleries})
    assert answer.status_code == 202
    assert PendingBackendOp.objects.get().galleries == ""
    assert ("backend_galleries is ignored" in caplog.text) == said


def test_the_log_does_not_repeat_what_may_hold_a_password(caplog: pytest.LogCaptureFixture) -> None:
    galleries = '{"url": "https://ann:s3cret@galleries.test/index.yaml"}'
    install(api.make_node().id, {"backend": "mock", "backend_galleries": galleries})
    assert "backend_galleries is ignored" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.rule("A22", "O35")
@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"uri": "/srv/gallery/mock", "name": "ext"}, "ext"),
        ({"uri": "/srv/gallery/mock"}, "/srv/gallery/mock"),
        ({"uri": "https://images.test:8080/a:b.tar", "alias": "x"}, "https://images.test:8080/a:b.tar"),
    ],
)
def test_the_key_of_an_install_by_address_has_its_name_or_the_address(body: Any, key: str) -> None:
    node = api.make_node()
    assert install(node.id, body).status_code == 202
    operation = Operation.objects.get()
    assert operation.key == f"node:{node.id}:{key}"
    assert (operation.node_id, PendingBackendOp.objects.get().backend) == (node.id, key)


@pytest.mark.rule("A18")
def test_without_the_database_it_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are the operation service."""

    def away(*_: object, **__: object) -> None:
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(node_backends, "admit", away)
    answer = install(api.make_node().id, {"backend": "mock"})
    assert (answer.status_code, api.message(answer)) == (503, "the database is unavailable")


@pytest.mark.rule("R6.36")
def test_an_operation_on_the_cluster_names_no_node_of_its_own() -> None:
    """Its parts do."""
    for name, secret in (("a", api.SECRET), ("b", api.OTHER_SECRET)):
        api.make_node(name, secret=secret)
    assert api.admin().post("/api/backends/install/mock", {}).status_code == 200
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert "nodeID" not in listed
    assert [part["node_name"] for part in listed["nodes"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("verb", "status", "error"),
    [
        ("install", "failed", NO_ELIGIBLE_NODE),
        ("upgrade", "failed", NO_ELIGIBLE_NODE),
        ("delete", "completed", ""),
    ],
)
@pytest.mark.rule("R6.20", "R6.28", "R6.30", "T-MGR-5", "T-MGR-22")
def test_without_a_node_that_it_is_for_nothing_is_sent(verb: str, status: str, error: str) -> None:
    """An upgrade is for the nodes that have the backend. What is nowhere is deleted."""
    if verb != "install":
        api.make_node()
    assert api.admin().post(f"/api/backends/{verb}/mock", {}).status_code == 200
    operation = Operation.objects.get()
    assert (operation.status, operation.error) == (status, error)
    assert not PendingBackendOp.objects.exists()


@pytest.mark.rule("R6.22")
def test_if_the_nodes_cannot_be_read_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    api.make_node()

    def away(_: Any) -> Any:
        raise OperationalError("the connection is lost")

    monkeypatch.setattr(cluster_backends, "select_all_nodes", away)
    answer = api.admin().post("/api/backends/delete/mock", {})
    assert (answer.status_code, answer.json()) == (503, {"error": "the database is unavailable"})
    assert not Operation.objects.exists()


@pytest.mark.rule("O34")
def test_another_wish_for_the_same_backend_is_a_conflict() -> None:
    """Of one command a node has one row for a backend. The refusal names its operation."""
    node = api.make_node()
    job = install(node.id, {"uri": "/srv/one", "name": "mock"}).json()["jobID"]
    for body in (
        {"backend": "mock"},
        {"uri": "/srv/two", "name": "mock"},
        {"uri": "/srv/one", "name": "mock", "alias": "m"},
    ):
        refused = install(node.id, body)
        assert refused.status_code == 409, body
        said = f"install mock on w1 is waiting, and asks for something else (operation {job})"
        assert api.message(refused) == said
    assert Operation.objects.count() == PendingBackendOp.objects.count() == 1


@pytest.mark.rule("O34", "R1.108", "A14", "O14")
def test_a_gallery_is_a_wish_and_the_list_of_galleries_is_none() -> None:
    node = api.make_node()
    listed = [f'[{{"name": "{name}", "url": "https://{name}/i.yaml"}}]' for name in ("a", "b")]
    first, again = (install(node.id, {"backend": "mock", "backend_galleries": text}) for text in listed)
    assert (again.status_code, again.json()["jobID"]) == (202, first.json()["jobID"])
    assert PendingBackendOp.objects.get().galleries == listed[1]
    assert install(node.id, {"backend": "local@mock"}).status_code == 409
    named = install(node.id, {"backend": "local@other"})
    assert install(node.id, {"backend": "other"}).json()["jobID"] == named.json()["jobID"]
    assert install(node.id, {"backend": "a@other"}).status_code == 409


@pytest.mark.rule("A1", "A59")
def test_a_draining_node_gets_no_command() -> None:
    node = api.make_node()
    BackendNode.objects.update(drained_at=clock.now())
    refused = install(node.id, {"backend": "mock"})
    assert (refused.status_code, api.message(refused)) == (409, "node w1 is draining")
    assert not Operation.objects.exists()


@pytest.mark.parametrize("uid", ["nope", str(UNKNOWN), "%00", "urn:uuid:zz"])
@pytest.mark.rule("A85", "O62")
def test_unknown_jobs_are_404(uid: str) -> None:
    """§3.7, "Build:": the reference answers `queued` forever."""
    refused = api.admin().get(f"/api/backends/job/{uid}")
    assert refused.status_code == 404
    assert isinstance(refused.json()["error"], str)


@given(
    body=st.dictionaries(
        st.sampled_from(["backend", "uri", "name", "alias", "backend_galleries"]),
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text(), max_size=2),
    )
)
@settings(max_examples=60 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_install_body_ends_in_202_or_400(body: dict[str, Any]) -> None:
    """Never a 500."""
    PendingBackendOp.objects.all().delete()
    Operation.objects.all().delete()
    node = BackendNode.objects.first() or api.make_node()
    assert install(node.id, body).status_code in (202, 400)
