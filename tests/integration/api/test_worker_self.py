"""What a worker does for itself over HTTP: drain, resume, models, deregister, rotate; how it is proved."""

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeModel
from nodes.registry import claims, lifecycle
from tests.support import api
from tests.support.environment import API_KEY, REGISTRATION_TOKEN
from tests.support.replicas import columns

pytestmark = pytest.mark.django_db

ROOT = Actor(ActorKind.USER, "root")
FIRST, SECOND = "1" * 32, "2" * 32
"""Two processes of one worker."""
NEW = "c" * 64
TO_NEW: dict[str, Any] = {"X-LocalAI-Node-New-Secret": NEW}
VERBS = ("drain", "resume", "deregister", "models", "rotate", "")
"""Every route of a node's own but the heartbeat; the last one is the node itself."""


def call(node_id: Any, verb: str, caller: api.Caller | None = None, /, **headers: str) -> Any:
    """One call of a worker, by the method that its route has."""
    caller = caller or api.worker()
    path = f"/api/node/{node_id}/{verb}".rstrip("/")
    method = {"models": "GET", "": "DELETE"}.get(verb, "POST")
    return caller.client.generic(method, path, headers={**caller.headers, **headers})


def of_process(instance: str) -> dict[str, Any]:
    return {"X-LocalAI-Node-Instance": instance}


def started(instance: str = FIRST) -> UUID:
    """An approved node whose worker runs as this process."""
    answer = api.register(api.registration(), **of_process(instance))
    assert answer.status_code == 201, answer.content
    node_id = UUID(answer.json()["id"])
    if answer.json()["status"] == "pending":
        lifecycle.approve(node_id, actor=ROOT, now=clock.now())
    return node_id


def replica(node_id: UUID, in_flight: int = 0, **fields: Any) -> NodeModel:
    fields = columns(**({"model_name": "m", "address": "127.0.0.1:7"} | fields))
    return NodeModel.objects.create(node_id=node_id, in_flight=in_flight, **fields)


@pytest.mark.rule("http-1.3", "http-1.4", "R1.18", "R1.19")
def test_a_worker_drains_and_resumes_itself() -> None:
    """Its own drain is the worker's to take back."""
    node = api.make_node()
    drained = call(node.id, "drain")
    assert (drained.status_code, drained.json()) == (200, {"message": "node set to draining"})
    assert api.node(node.id).status == "draining"
    resumed = call(node.id, "resume")
    assert (resumed.status_code, resumed.json()) == (200, {"message": "node resumed"})
    assert api.node(node.id).status == "healthy"


@pytest.mark.rule("http-1.1", "http-1.6")
def test_a_worker_learns_the_kind_of_server_and_whether_its_token_is_good_without_registering() -> None:
    """A secret of no node is enough, and a registration without a name; neither leaves anything."""
    unknown = call(UUID(int=0), "models", api.worker("f" * 64))
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "node_error")
    assert api.register(api.registration(name="")).status_code == 400
    refused = api.register(api.registration(name=""), Authorization="Bearer wrong")
    assert refused.status_code == 401
    assert not BackendNode.objects.exists()


@pytest.mark.rule("http-1.4", "R1.18")
def test_resume_on_a_pending_node_is_refused() -> None:
    """D-RESUME-PENDING: the reference lets a worker bypass approval."""
    node = api.make_node(approved=False)
    refused = call(node.id, "resume")
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "node_error")
    assert "pending" in api.message(refused)
    assert api.node(node.id).status == "pending"


@pytest.mark.rule("http-1.4", "R1.18")
@pytest.mark.parametrize("state", ["an admin's drain", "unhealthy", "offline", "healthy"])
def test_a_worker_ends_nothing_but_its_own_drain(state: str) -> None:
    """D-RESUME-SELF: what an admin or the health pass has said is not the worker's to take back."""
    node = api.make_node()
    if state == "an admin's drain":
        lifecycle.drain(node.id, actor=ROOT, now=clock.now(), reason="new disk")
        call(node.id, "drain")
    elif state == "unhealthy":
        lifecycle.mark_unhealthy(node.id, actor=ROOT, now=clock.now(), reason="silent")
    elif state == "offline":
        call(node.id, "deregister")
    before = api.node(node.id)
    refused = call(node.id, "resume")
    assert refused.status_code == 409
    assert before.status in api.message(refused)
    assert api.node(node.id).status == before.status
    assert api.node(node.id).drained_by == before.drained_by


@pytest.mark.rule("http-1.3", "R1.19")
def test_a_pending_node_may_drain() -> None:
    """Seen: accepted; it stays pending, and the drain shows once it is approved."""
    node = api.make_node(approved=False)
    assert call(node.id, "drain").status_code == 200
    assert api.node(node.id).status == "pending"
    lifecycle.approve(node.id, actor=ROOT, now=clock.now())
    assert api.node(node.id).status == "draining"


@pytest.mark.rule("R1.20", "http-1.5")
@pytest.mark.parametrize("verb", ["deregister", ""])
def test_a_worker_that_leaves_keeps_its_record(verb: str) -> None:
    """POST deregister and DELETE are the same: offline, rows gone, approval kept."""
    node = api.make_node()
    replica(node.id, in_flight=1)
    gone = call(node.id, verb)
    assert (gone.status_code, gone.json()) == (200, {"message": "node deregistered"})
    stored = api.node(node.id)
    assert (stored.status, stored.approved_at is not None) == ("offline", True)
    assert not NodeModel.objects.exists()
    assert api.register(api.registration()).json()["status"] == "healthy"


@pytest.mark.rule("http-1.6")
def test_models_are_the_nodes_own_replicas() -> None:
    """An array with `in_flight`; `[]` without any."""
    node, other = api.make_node(), api.make_node("w2")
    assert call(node.id, "models").json() == []
    mine = replica(node.id, in_flight=2)
    replica(other.id)
    (row,) = call(node.id, "models").json()
    assert (row["id"], row["node_id"], row["in_flight"]) == (str(mine.id), str(node.id), 2)


@pytest.mark.rule("http-1.7", "http-1.1", "http-1.3", "http-1.5", "http-1.6")
def test_a_whole_life_from_start_to_stop() -> None:
    """Register, wait for approval, drain, poll until nothing is in flight, deregister; D-DRAIN-ROWS."""
    node_id = started()
    running = replica(node_id, in_flight=1)
    assert call(node_id, "drain", **of_process(FIRST)).status_code == 200
    assert [row["in_flight"] for row in call(node_id, "models", **of_process(FIRST)).json()] == [1]
    NodeModel.objects.filter(pk=running.pk).update(in_flight=0)
    assert sum(row["in_flight"] for row in call(node_id, "models", **of_process(FIRST)).json()) == 0
    assert call(node_id, "deregister", **of_process(FIRST)).status_code == 200
    assert api.node(node_id).status == "offline"
    assert started(SECOND) == node_id
    assert api.node(node_id).status == "healthy"


@pytest.mark.rule("http-1.3", "http-1.4", "http-1.5", "http-1.6")
@pytest.mark.parametrize("verb", VERBS)
def test_every_route_proves_the_node_in_its_url(verb: str) -> None:
    """D-IDENTITY: 401 for a wrong credential, 403 for another node or a person, 404 for an unknown id."""
    node = api.make_node()
    api.make_node("w2", secret=api.OTHER_SECRET)
    expected = [
        (node.id, api.Caller(), 401),
        (node.id, api.bearer("x"), 401),
        (node.id, api.bearer(REGISTRATION_TOKEN), 401),
        (node.id, api.worker("f" * 64), 401),
        (node.id, api.worker(api.OTHER_SECRET), 403),
        (node.id, api.bearer(API_KEY), 403),
        (uuid4(), api.worker(), 404),
        ("nope", api.worker(), 404),
        ("nope", api.bearer("x"), 401),
    ]
    answers = [call(node_id, verb, caller) for node_id, caller, _ in expected]
    assert [answer.status_code for answer in answers] == [status for _, _, status in expected]
    for answer in answers:
        error = answer.json()["error"]
        assert isinstance(error, str) if answer.status_code == 401 else error["type"] == "node_error"
        assert answer.has_header("WWW-Authenticate") == (answer.status_code == 401)
    assert api.node(node.id).status == "healthy"


@pytest.mark.rule("http-1.2", "http-1.5")
def test_a_worker_whose_node_was_removed_is_told_so() -> None:
    """D-AGAIN-ON-404: its secret is unknown by now, and 404 is what makes it register again."""
    node = api.make_node()
    lifecycle.deregister(node.id, actor=ROOT, now=clock.now())
    assert call(node.id, "models").status_code == 404
    assert api.register(api.registration()).status_code == 201


@pytest.mark.rule("http-1.4", "http-1.5")
@pytest.mark.parametrize("verb", ["drain", "resume", "deregister", "rotate"])
def test_only_the_method_of_the_route_is_answered(verb: str) -> None:
    """405, and no redirect to another path."""
    node = api.make_node()
    refused = api.worker().get(f"/api/node/{node.id}/{verb}")
    assert refused.status_code == 405
    assert api.worker().get(f"/api/node/{node.id}").status_code == 405


@pytest.mark.rule("http-1.1", "worker-5.3")
@pytest.mark.parametrize("verb", VERBS)
def test_a_copied_data_folder_is_a_visible_conflict(verb: str) -> None:
    """D-INSTANCE: after a restart, a call under the former process is refused and an admin sees it."""
    node_id = started(FIRST)
    assert started(SECOND) == node_id
    for _ in range(2):
        refused = call(node_id, verb, api.worker(), **of_process(FIRST))
        assert (refused.status_code, refused.json()["error"]["type"]) == (409, "node_error")
    conflict = NodeConflict.objects.get()
    assert (conflict.kind, conflict.count, conflict.claim) == ("instance", 2, FIRST)
    assert (conflict.source_address, conflict.node_source_address) == ("127.0.0.1", "127.0.0.1")
    # Counted on one row, or on two if the minute ended in between.
    assert sum(event.count for event in NodeEvent.objects.filter(kind="conflict")) == 2
    assert api.node(node_id).status == "healthy"


@pytest.mark.rule("http-1.1")
def test_a_restart_is_no_conflict_but_the_former_process_may_not_register() -> None:
    """A new id is a restart; the old one registering after it is a copy."""
    node_id = started(FIRST)
    assert started(SECOND) == node_id
    assert not NodeConflict.objects.exists()
    refused = api.register(api.registration(), **of_process(FIRST))
    assert refused.status_code == 409
    assert NodeConflict.objects.get().kind == "instance"
    assert call(node_id, "models", **of_process(SECOND)).status_code == 200


@pytest.mark.rule("http-1.1")
@pytest.mark.parametrize("told", ["x", "1" * 31, "1" * 33, "A" * 32, "1" * 32 + " ,2", "é" * 32])
def test_a_process_is_named_by_32_hex_digits(told: str) -> None:
    """400 naming the header, everywhere; after the credential."""
    node_id = started(FIRST)
    told_by = of_process(told)
    for refused in (api.register(api.registration(), **told_by), call(node_id, "models", **told_by)):
        assert refused.status_code == 400
        assert "X-LocalAI-Node-Instance" in api.message(refused)
    assert call(node_id, "models", api.bearer("x"), **told_by).status_code == 401


@pytest.mark.rule("http-1.1")
def test_a_worker_replaces_its_secret() -> None:
    """The new one counts at once, the old one never again; the change is in the timeline."""
    node_id = started()
    done = call(node_id, "rotate", **TO_NEW)
    assert (done.status_code, done.json()) == (200, {"message": "secret replaced"})
    assert call(node_id, "models").status_code == 401
    assert call(node_id, "models", api.worker(NEW)).status_code == 200
    assert api.register(api.registration(), NEW, **of_process(FIRST)).json()["id"] == str(node_id)
    assert api.register(api.registration("w9"), api.SECRET).status_code == 403
    assert NodeEvent.objects.filter(kind="rotated").count() == 1


@pytest.mark.rule("http-1.1")
def test_a_requested_rotation_leaves_one_thing_to_do() -> None:
    """401 with `rotate`, on every route but that one."""
    node_id = started()
    claims.request_rotation(node_id, actor=ROOT, now=clock.now())
    for verb in ("models", "drain", "resume", "deregister", ""):
        refused = call(node_id, verb)
        assert refused.status_code == 401
        assert refused.json() == {"error": refused.json()["error"], "rotate": True}
    assert "rotate" not in call(node_id, "models", api.bearer("x")).json()
    assert call(node_id, "rotate", **TO_NEW).status_code == 200
    assert call(node_id, "models", api.worker(NEW)).status_code == 200


@pytest.mark.rule("http-1.1")
@pytest.mark.parametrize(
    ("new", "status"),
    [(None, 400), ("", 400), ("C" * 64, 400), ("c" * 63, 400), (api.SECRET, 409), (api.OTHER_SECRET, 409)],
)
def test_a_new_secret_must_be_well_formed_and_unused(new: str | None, status: int) -> None:
    """400 naming the header; 409 for a secret that is some node's already."""
    node_id = started()
    api.make_node("w2", secret=api.OTHER_SECRET)
    headers: dict[str, Any] = {} if new is None else {"X-LocalAI-Node-New-Secret": new}
    refused = call(node_id, "rotate", **headers)
    assert refused.status_code == status
    assert status == 409 or "X-LocalAI-Node-New-Secret" in api.message(refused)
    assert call(node_id, "models").status_code == 200


@pytest.mark.rule("http-1.1")
def test_a_revoked_secret_is_refused_under_any_name() -> None:
    """One click of an admin; the worker may come back with a new secret, and is pending then."""
    node_id = started()
    claims.revoke(node_id, actor=ROOT, now=clock.now())
    assert call(node_id, "models").status_code == 401
    assert api.register(api.registration()).status_code == 403
    assert api.register(api.registration("w9"), api.SECRET).status_code == 403
    back = api.register(api.registration(), NEW).json()
    assert (back["id"], back["status"]) == (str(node_id), "pending")


@pytest.mark.rule("http-1.1")
def test_a_node_of_the_shared_token_has_no_secret_to_replace(settings: Any) -> None:
    """It becomes a strong one by registering with a secret, which an admin accepts."""
    settings.CLUSTER = replace(settings.CLUSTER, allow_shared_token_nodes=True)
    node_id = api.register(api.registration(), "").json()["id"]
    stock = api.bearer(REGISTRATION_TOKEN)
    refused = call(node_id, "rotate", stock, **TO_NEW)
    assert refused.status_code == 409
    assert call(node_id, "models", stock).status_code == 200
    assert BackendNode.objects.get().fingerprint == ""
