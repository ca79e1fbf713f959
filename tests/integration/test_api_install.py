"""Installs of backends on a node by REST (`contract/http-api.md` §2.10, §3.7)."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster import clock
from nodes.models import BackendNode
from operations.ledger import admission, lease, outcome
from operations.models import Operation
from operations.states import Event
from tests.support import api
from tests.support.effort import EFFORT

UNKNOWN = UUID("0d6f1f0e-0000-4000-8000-00000000dead")
pytestmark = pytest.mark.django_db


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
    for ending, keys in (("COMPLETE", {"completed"}), ("FAIL", {"error"})):
        url = install(node.id, {"backend": "mock"}).json()["statusUrl"]
        (work,) = lease.claim("test", now=clock.now(), lease=10, limit=1)
        event = getattr(Event, ending)
        error = "" if ending == "COMPLETE" else "no such backend"
        outcome.finish(work.id, work.fence, event, now=clock.now(), error=error)
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
    other = admission.OperationRequest(
        "backend_delete", key=f"node:{node.id}:mock", element="mock", actor="x"
    )
    admission.admit(other, now=clock.now())
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
@settings(max_examples=60 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_install_body_ends_in_202_or_400(body: dict[str, Any]) -> None:
    """Never a 500."""
    node = BackendNode.objects.first() or api.make_node()
    assert install(node.id, body).status_code in (202, 400)
