"""Who may speak for a node, as an admin sees and decides it by REST: conflicts, rotation, revocation."""

from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeConflict, RevokedSecret
from tests.support import api

pytestmark = pytest.mark.django_db


def claim(name: str = "w1", secret: str = api.OTHER_SECRET, address: str = "10.9.9.9:1") -> None:
    """Somebody registers under the name with another secret and is refused."""
    refused = api.register(api.registration(name, address=address), secret=secret)
    assert refused.status_code == 409


def conflicts(where: Any = "") -> list[dict[str, Any]]:
    path = f"/api/nodes/{where}/conflicts" if where else "/api/nodes/conflicts"
    found: list[dict[str, Any]] = api.admin().get(path).json()
    return found


def decide(node: Any, conflict: Any, verdict: str) -> Any:
    return api.admin().post(f"/api/nodes/{node}/conflicts/{conflict}/{verdict}")


def test_the_approval_page_shows_who_it_is() -> None:
    """Fingerprint, source address, first seen; nothing that is not known."""
    node = api.make_node(approved=False)
    identity = api.admin().get(f"/api/nodes/{node.id}").json()["identity"]
    created = api.node(node.id).created_at.isoformat().replace("+00:00", "Z")
    assert identity == {
        "weak": False,
        "fingerprint": hash_secret(api.SECRET),
        "source_address": "127.0.0.1",
        "first_seen": created,
        "bound_at": created,
        "open_conflicts": 0,
    }


def test_a_conflict_shows_both_addresses() -> None:
    """In the whole fleet's list, in the node's, and as a count; the node goes on meanwhile."""
    node, other = api.make_node(), api.make_node("w2")
    claim()
    claim()
    (conflict,) = conflicts()
    assert conflicts(node.id) == [conflict]
    assert conflicts(other.id) == []
    assert {name: conflict[name] for name in ("node_id", "node_name", "kind", "state", "count")} == {
        "node_id": str(node.id),
        "node_name": "w1",
        "kind": "secret",
        "state": "open",
        "count": 2,
    }
    assert (conflict["advertised_address"], conflict["fingerprint"]) == (
        "10.9.9.9:1",
        hash_secret(api.OTHER_SECRET),
    )
    assert (conflict["source_address"], conflict["node_source_address"]) == ("127.0.0.1", "127.0.0.1")
    detail = api.admin().get(f"/api/nodes/{node.id}").json()
    assert (detail["open_conflicts"], detail["identity"]["open_conflicts"]) == (1, 1)
    assert api.worker().get(f"/api/node/{node.id}/models").status_code == 200


def test_accepting_makes_the_claimant_the_node() -> None:
    """From then on the former secret is refused, and the conflict is closed."""
    node = api.make_node()
    claim()
    accepted = decide(node.id, conflicts()[0]["id"], "accept")
    assert (accepted.status_code, accepted.json()) == (200, {"message": "conflict accepted"})
    assert conflicts() == []
    (decided,) = conflicts(node.id)
    assert (decided["state"], decided["decided_by"]) == ("accepted", "static-key")
    assert api.register(api.registration(), secret=api.SECRET).status_code == 403
    assert api.register(api.registration(), secret=api.OTHER_SECRET).status_code == 201


def test_refusing_leaves_the_node_as_it_is() -> None:
    """The claimant goes on being refused; deciding once more is 409."""
    node = api.make_node()
    claim()
    (conflict,) = conflicts()
    assert decide(node.id, conflict["id"], "refuse").json() == {"message": "conflict refused"}
    claim()
    assert conflicts() == []
    assert decide(node.id, conflict["id"], "refuse").status_code == 409
    assert api.register(api.registration(), secret=api.SECRET).status_code == 201


@pytest.mark.parametrize("verdict", ["accept", "refuse"])
def test_unknown_conflicts_and_those_of_others_are_404(verdict: str) -> None:
    """Unknown node, unknown conflict, another node's conflict."""
    node, other = api.make_node(), api.make_node("w2")
    claim()
    known = conflicts()[0]["id"]
    for where, which in [
        (uuid4(), known),
        ("nope", known),
        (node.id, uuid4()),
        (node.id, "nope"),
        (other.id, known),
    ]:
        assert decide(where, which, verdict).status_code == 404
    assert conflicts()[0]["state"] == "open"


def test_a_conflict_that_cannot_be_accepted_says_what_to_do() -> None:
    """The shared token never takes over a node with a secret."""
    node = api.make_node()
    conflict = NodeConflict.objects.create(node=node, kind="token", claim="10.0.0.9")
    refused = decide(node.id, conflict.pk, "accept")
    assert (refused.status_code, "deregister" in api.message(refused)) == (409, True)
    assert conflicts()[0]["state"] == "open"


@pytest.mark.parametrize("where", ["nope", "00000000-0000-4000-8000-00000000dead"])
def test_conflicts_of_an_unknown_node_are_404(where: str) -> None:
    """Not an empty list."""
    assert api.admin().get(f"/api/nodes/{where}/conflicts").status_code == 404


def test_what_is_empty_is_omitted_and_what_is_secret_is_not_shown() -> None:
    """An address or a hash of a name is no fingerprint."""
    node = api.make_node()
    for kind, shown in [("token", set()), ("name", {"claimed_name"}), ("instance", {"instance"})]:
        NodeConflict.objects.all().delete()
        NodeConflict.objects.create(
            node=node, kind=kind, claim="c" * 32, claimed_name="w9" if kind == "name" else ""
        )
        (conflict,) = conflicts()
        optional = {
            "fingerprint",
            "instance",
            "claimed_name",
            "advertised_address",
            "decided_at",
            "decided_by",
        }
        assert optional & set(conflict) == shown


def test_conflicts_come_latest_first_and_in_pages() -> None:
    """The same pages as the list of nodes."""
    node = api.make_node()
    for number in range(5):
        NodeConflict.objects.create(node=node, kind="secret", claim=f"{number}", last_at=clock.now())
    answer = api.admin().get("/api/nodes/conflicts?limit=2")
    assert [entry["fingerprint"] for entry in answer.json()] == ["4", "3"]
    assert (answer["X-Total-Count"], 'rel="next"' in answer["Link"]) == ("5", True)
    refused = api.admin().get(f"/api/nodes/{node.id}/conflicts?state=open")
    assert (refused.status_code, api.message(refused).startswith("state")) == (400, True)


def identity(node: BackendNode, verb: str, body: Any = None) -> Any:
    return api.admin().post(f"/api/nodes/{node.id}/identity/{verb}", body)


def test_a_rotation_is_asked_for_and_shown() -> None:
    """Asking twice keeps the first time; the secret is good for nothing else until then."""
    node = api.make_node()
    assert identity(node, "rotate").json() == {"message": "rotation requested"}
    since = api.admin().get(f"/api/nodes/{node.id}").json()["identity"]["rotation_requested_at"]
    assert identity(node, "rotate").status_code == 200
    assert api.admin().get(f"/api/nodes/{node.id}").json()["identity"]["rotation_requested_at"] == since
    assert api.worker().get(f"/api/node/{node.id}/models").status_code == 401


def test_there_is_nothing_to_rotate_without_a_secret() -> None:
    """409 for a node that is known by the shared token."""
    node = api.make_node()
    BackendNode.objects.update(fingerprint="", weak_identity=True)
    assert identity(node, "rotate").status_code == 409


def test_a_revoked_node_is_pending_and_has_no_identity() -> None:
    """At once: the secret is refused everywhere; the detail says who revoked it, when and why."""
    node = api.make_node()
    api.replica(node)
    assert identity(node, "revoke", {"reason": "laptop stolen"}).json() == {"message": "identity revoked"}
    assert api.worker().get(f"/api/node/{node.id}/models").status_code == 401
    assert api.register(api.registration(), secret=api.SECRET).status_code == 403
    shown = api.admin().get(f"/api/nodes/{node.id}").json()
    assert (shown["status"], shown["model_count"]) == ("pending", 0)
    assert (shown["revoked"]["by"], shown["revoked"]["reason"]) == ("static-key", "laptop stolen")
    assert not {"fingerprint", "instance"} & set(shown["identity"])
    assert RevokedSecret.objects.get().node_id == node.id
    refused = identity(node, "revoke")
    assert (refused.status_code, "pending" in api.message(refused)) == (409, True)
