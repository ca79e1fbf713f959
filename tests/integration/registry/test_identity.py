"""Who may speak for a node: claims, conflicts and their decision, copies, rotation, revocation, enrolment."""

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.accounts.actors import MAKE_RUN
from localai_cluster.accounts.principals import classify_credential, hash_secret, owner_of
from localai_cluster.kit import errors
from nodes.models import BackendNode, BusCredential, NodeConflict, RevokedSecret
from nodes.registry import claims, lifecycle
from nodes.registry.claims import MAX_CONFLICTS, MAX_INSTANCES
from tests.support.fleet import (
    ANNA,
    NOW,
    OTHER_SECRET,
    ROOT,
    SECRET,
    THIRD_SECRET,
    approved,
    beat,
    beat_of,
    kinds,
    later,
    register,
    replica,
    replicas,
    row,
    status,
    told,
)

pytestmark = pytest.mark.django_db

Kind = NodeConflict.Mismatch
ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32


@pytest.fixture
def weak_allowed(settings: Any) -> None:
    """Stock workers, which know the shared token only, are admitted."""
    settings.CLUSTER = replace(settings.CLUSTER, allow_shared_token_nodes=True)


def refused(**fields: Any) -> NodeConflict:
    """A registration that ends in a conflict; the conflict."""
    with pytest.raises(errors.Conflict):
        register(**fields)
    return NodeConflict.objects.latest("last_at")


def accept(conflict: NodeConflict, *, at: float = 60, **more: Any) -> BackendNode:
    return claims.accept_conflict(conflict.pk, actor=ANNA, now=later(at), **more)


def refuse(conflict: NodeConflict, *, at: float = 60, **more: Any) -> BackendNode:
    return claims.refuse_conflict(conflict.pk, actor=ANNA, now=later(at), **more)


# --- claims


@pytest.mark.rule("R1.3", "R1.22")
def test_registration_binds_the_fingerprint_of_a_secret() -> None:
    node = register().node
    stored = row(node)
    assert (stored.fingerprint, stored.weak_identity) == (hash_secret(SECRET), False)
    assert (stored.bound_at, stored.source_address) == (NOW, "10.0.0.1")


def test_a_known_name_with_another_secret_is_a_visible_conflict() -> None:
    """With both addresses; the original goes on as if nothing had happened."""
    node = approved()
    replica(node)
    before = row(node)
    conflict = refused(secret=OTHER_SECRET, source="10.6.6.6", address="10.6.6.6:1", now=later(1))
    assert (conflict.node_id, conflict.kind, conflict.state) == (node.pk, Kind.SECRET, "open")
    assert conflict.claim == hash_secret(OTHER_SECRET)
    assert (conflict.source_address, conflict.node_source_address) == ("10.6.6.6", "10.0.0.1")
    assert (conflict.advertised_address, conflict.first_at) == ("10.6.6.6:1", later(1))
    after = row(node)
    assert (after.revision, after.status, after.address) == (before.revision, "healthy", before.address)
    assert replicas(node) == ["m#0"]
    assert list(beat(beat_of(node, at=later(2))).values()) == [None]
    assert isinstance(next(iter(beat(beat_of(node, secret=OTHER_SECRET)).values())), errors.NotAuthenticated)


def test_a_claim_that_comes_again_is_counted() -> None:
    approved()
    for second in range(1, 4):
        conflict = refused(secret=OTHER_SECRET, source=f"10.6.6.{second}", now=later(second))
    assert NodeConflict.objects.count() == 1
    assert (conflict.count, conflict.first_at, conflict.last_at) == (3, later(1), later(3))
    assert conflict.source_address == "10.6.6.3"


def test_a_flood_of_claims_fills_nothing() -> None:
    """At most 32 open conflicts a node; the rest is counted on the last. Decided ones make room."""
    node = approved()
    for number in range(MAX_CONFLICTS + 3):
        refused(secret=f"{number:064x}", now=later(number))
    assert NodeConflict.objects.count() == MAX_CONFLICTS
    assert NodeConflict.objects.latest("last_at").count == 4
    refuse(NodeConflict.objects.earliest("first_at"))
    assert refused(secret=THIRD_SECRET, now=later(99)).claim == hash_secret(THIRD_SECRET)
    assert status(node) == "healthy"


def test_a_known_secret_under_another_name_is_a_conflict_of_its_node() -> None:
    node = approved()
    conflict = refused(name="w2", now=later(1))
    assert (conflict.node_id, conflict.kind, conflict.claimed_name) == (node.pk, Kind.NAME, "w2")
    assert not BackendNode.objects.filter(name="w2").exists()


def test_a_node_that_claims_another_nodes_name_is_a_conflict_of_that_one() -> None:
    """Any secret that it brings is another one."""
    approved()
    target = approved("w2", secret=OTHER_SECRET)
    conflict = refused(name="w2", secret=SECRET, now=later(1))
    assert (conflict.node_id, conflict.kind, conflict.claim) == (target.pk, Kind.SECRET, hash_secret(SECRET))
    with pytest.raises(errors.Conflict, match="already belongs to a node"):
        accept(conflict)
    assert NodeConflict.objects.get().state == "open"


def test_a_node_that_claims_the_name_of_one_without_identity_stays_itself() -> None:
    node, revoked = approved(), approved("w2", secret=OTHER_SECRET)
    claims.revoke(revoked.pk, actor=ROOT, now=NOW)
    conflict = refused(name="w2", secret=SECRET, now=later(1))
    assert (conflict.node_id, conflict.kind) == (node.pk, Kind.NAME)
    assert row(revoked).fingerprint == ""


@pytest.mark.usefixtures("weak_allowed")
def test_a_secret_for_a_node_known_by_the_shared_token_is_a_conflict() -> None:
    """Until an admin accepts it; from then on the token alone is refused."""
    node = approved(secret="")
    assert row(node).weak_identity
    conflict = refused(secret=SECRET, now=later(1))
    assert (conflict.kind, row(node).weak_identity) == (Kind.WEAK, True)
    assert register(secret="", now=later(2)).node.pk == node.pk
    accept(conflict)
    assert register(secret=SECRET, now=later(61)).node.pk == node.pk
    stored = row(node)
    assert (stored.weak_identity, stored.status) == (False, "healthy")
    assert refused(secret="", now=later(62)).kind == Kind.TOKEN


@pytest.mark.usefixtures("weak_allowed")
@pytest.mark.parametrize(
    "claimed",
    [
        {"source": "10.0.0.66", "address": "10.0.0.66:50051"},
        {"source": "10.0.0.66"},
        {"address": "10.0.0.66:50051"},
    ],
    ids=["elsewhere", "pretends", "diverts"],
)
def test_a_weak_node_at_another_address_is_a_conflict(claimed: dict[str, Any]) -> None:
    """Review X7: the shared token is no proof, so the address is; nothing of the node changes until an admin
    accepts. Then the worker there is the node, and credentials for the bus end."""
    node = approved(secret="")
    replica(node)
    before = row(node)
    conflict = refused(secret="", now=later(1), **claimed)
    assert (conflict.kind, conflict.node_id) == (Kind.ADDRESS, node.pk)
    assert (row(node).address, row(node).source_address) == (before.address, before.source_address)
    assert len(replicas(node)) == 1
    assert register(secret="", now=later(2)).node.pk == node.pk

    accept(conflict)
    assert (status(node), replicas(node)) == ("offline", [])
    assert not BusCredential.objects.filter(node_id=node.pk, revoked_at=None).exists()
    assert refused(secret="", now=later(61)).kind == Kind.ADDRESS
    registered = register(secret="", now=later(62), **claimed)
    assert (registered.node.pk, status(node)) == (node.pk, "healthy")
    assert registered.credentials is not None


@pytest.mark.usefixtures("weak_allowed")
def test_a_weak_node_that_restarts_at_its_address_is_none() -> None:
    """Another port, another spelling of its address, or not yet approved: no conflict."""
    node = approved(secret="")
    register(secret="", now=later(1), address="10.0.0.1:50099", source="::ffff:10.0.0.1")
    assert row(node).address == "10.0.0.1:50099"
    pending = register("w2", secret="").node
    register("w2", secret="", now=later(1), source="10.0.0.9", address="10.0.0.9:1")
    assert row(pending).address == "10.0.0.9:1"
    assert not NodeConflict.objects.exists()


@pytest.mark.usefixtures("weak_allowed")
def test_a_node_once_bound_never_falls_back_to_the_token() -> None:
    """Not even when its secret has been revoked; and no one can accept that."""
    node = approved()
    assert refused(secret="", now=later(1)).kind == Kind.TOKEN
    claims.revoke(node.pk, actor=ROOT, now=later(2))
    conflict = refused(secret="", now=later(3))
    assert conflict.kind == Kind.TOKEN
    with pytest.raises(errors.Conflict, match="cannot fall back"):
        accept(conflict)
    assert row(node).fingerprint == ""
    assert not row(node).weak_identity


# --- copies


def test_a_new_process_id_is_a_restart_and_an_old_one_a_conflict() -> None:
    node = approved(instance=ONE)
    register(instance=TWO, now=later(1))
    assert (row(node).instance, row(node).former_instances) == (TWO, [ONE])
    conflict = refused(instance=ONE, source="10.6.6.6", now=later(2))
    assert (conflict.kind, conflict.claim, conflict.node_id) == (Kind.INSTANCE, ONE, node.pk)
    claims.record_other_process(node.pk, ONE, source_address="10.6.6.6", now=later(3))
    assert NodeConflict.objects.get().count == 2
    assert (row(node).instance, status(node)) == (TWO, "healthy")
    with pytest.raises(errors.Conflict, match="stop one"):
        accept(conflict)


def test_a_process_that_registers_again_is_no_restart() -> None:
    node = approved(instance=ONE)
    register(instance=ONE, now=later(1))
    assert row(node).former_instances == []
    assert [event.cause for event in told(node, "registered")] == ["first registration"], "no news"


def test_former_processes_are_remembered_up_to_a_limit() -> None:
    node = approved(instance=ONE)
    for number in range(MAX_INSTANCES + 4):
        register(instance=f"{number:032x}", now=later(number + 1))
    stored = row(node)
    assert len(stored.former_instances) == MAX_INSTANCES
    assert stored.former_instances[0] == f"{MAX_INSTANCES + 2:032x}"


def test_a_call_of_a_node_that_is_gone_is_no_conflict() -> None:
    claims.record_other_process(uuid4(), ONE, source_address="10.6.6.6", now=NOW)
    assert not NodeConflict.objects.exists()


# --- decisions


def test_the_accepted_newcomer_is_the_node() -> None:
    """Id, approval and labels stay; the former worker and its replicas do not, its secret never counts again.

    Nothing is scheduled there before the newcomer has registered.
    """
    node = approved(labels={"tier": "fast"}, instance=ONE)
    replica(node)
    conflict = refused(secret=OTHER_SECRET, source="10.6.6.6", instance=TWO, now=later(1))
    handed = accept(conflict)
    assert handed.status == status(node) == "offline"
    assert replicas(node) == []
    refusals = beat(beat_of(node, instance=ONE, at=later(61)), beat_of(node, at=later(62)))
    assert all(isinstance(refusal, errors.NotAuthenticated) for refusal in refusals.values())
    with pytest.raises(errors.Forbidden, match="revoked"):
        register(secret=SECRET, now=later(61))
    again = register(secret=OTHER_SECRET, source="10.6.6.6", instance=TWO, now=later(62)).node
    stored = row(node)
    assert (again.pk, stored.status, stored.source_address) == (node.pk, "healthy", "10.6.6.6")
    assert (stored.instance, stored.former_instances) == (TWO, [])
    assert stored.label_set.filter(key="tier").exists()


def test_a_beat_of_the_newcomer_before_it_registers_brings_nothing_back() -> None:
    node = approved()
    accept(refused(secret=OTHER_SECRET, now=later(1)))
    beat(beat_of(node, secret=OTHER_SECRET, at=later(61)))
    assert status(node) == "offline"


def test_an_accepted_newcomer_of_a_pending_node_is_pending() -> None:
    node = register().node
    accept(refused(secret=OTHER_SECRET, now=later(1)))
    register(secret=OTHER_SECRET, now=later(61))
    assert status(node) == "pending"


def test_an_agents_key_goes_when_its_node_is_handed_over() -> None:
    token = register("a1", node_type="agent", address="", auto_approve=True).api_token
    accept(refused(name="a1", node_type="agent", address="", secret=OTHER_SECRET, now=later(1)))
    assert not owner_of(classify_credential(token)).is_authenticated


def test_an_accepted_name_is_the_nodes_name() -> None:
    node = approved()
    conflict = refused(name="Größe 2", now=later(1))
    accept(conflict)
    assert register("Größe 2", now=later(61)).node.pk == node.pk
    assert (row(node).name, status(node)) == ("Größe 2", "healthy")
    assert register("w1", secret=OTHER_SECRET, now=later(62)).node.pk != node.pk


def test_a_name_that_was_taken_meanwhile_cannot_be_accepted() -> None:
    approved()
    conflict = refused(name="w2", now=later(1))
    register("W2", secret=OTHER_SECRET, now=later(2))
    with pytest.raises(errors.Conflict, match="another node named"):
        accept(conflict)
    conflict.refresh_from_db()
    assert (conflict.state, conflict.decided_at) == ("open", None)


def test_a_refused_newcomer_goes_on_being_refused() -> None:
    """It is counted, but no more an open question; an admin may still change that answer."""
    node = approved()
    conflict = refused(secret=OTHER_SECRET, now=later(1))
    refuse(conflict)
    again = refused(secret=OTHER_SECRET, now=later(61))
    assert (again.pk, again.state, again.count) == (conflict.pk, "refused", 2)
    assert (again.decided_by, again.decided_at) == ("anna", later(60))
    with pytest.raises(errors.Conflict, match="already resolved"):
        refuse(conflict)
    accept(conflict, at=70)
    assert register(secret=OTHER_SECRET, now=later(71)).node.pk == node.pk
    with pytest.raises(errors.Conflict, match="already resolved"):
        accept(conflict)


def test_an_accepted_claim_that_fits_no_more_is_a_new_question() -> None:
    """A worker that goes from w1 to w2 and back, and to w2 once more."""
    node = approved()
    accept(refused(name="w2", now=later(1)), at=2)
    accept(refused(name="w1", now=later(3)), at=4)
    again = refused(name="w2", now=later(5))
    assert (again.state, again.decided_at, again.decided_by) == ("open", None, "")
    assert row(node).name == "w1"


def test_a_conflict_is_found_under_its_own_node_only() -> None:
    node, other = approved(), approved("w2", secret=THIRD_SECRET)
    conflict = refused(secret=OTHER_SECRET, now=later(1))
    for wrong in (other.pk, uuid4()):
        with pytest.raises(errors.NotFound):
            claims.accept_conflict(conflict.pk, node_id=wrong, actor=ROOT, now=NOW)
        with pytest.raises(errors.NotFound):
            claims.refuse_conflict(conflict.pk, node_id=wrong, actor=ROOT, now=NOW)
    with pytest.raises(errors.NotFound):
        claims.accept_conflict(uuid4(), actor=ROOT, now=NOW)
    assert refuse(conflict, node_id=node.pk).pk == node.pk


def test_a_claimant_whose_secret_was_revoked_cannot_be_accepted() -> None:
    approved()
    conflict = refused(secret=OTHER_SECRET, now=later(1))
    RevokedSecret.objects.create(fingerprint=hash_secret(OTHER_SECRET), node_id=uuid4(), node_name="x")
    with pytest.raises(errors.Conflict, match="revoked"):
        accept(conflict)


def test_accepting_a_claimant_that_is_the_node_by_now_settles_the_question() -> None:
    node = approved()
    conflict = refused(secret=OTHER_SECRET, now=later(1))
    claims.revoke(node.pk, actor=ROOT, now=later(2))
    register(secret=OTHER_SECRET, now=later(3))
    lifecycle.approve(node.pk, actor=ROOT, now=later(4))
    assert accept(conflict).status == "healthy"
    assert NodeConflict.objects.get().state == "accepted"


# --- rotation and revocation


def test_a_rotated_secret_replaces_the_old_one_for_ever() -> None:
    node = approved(instance=ONE)
    claims.request_rotation(node.pk, actor=ROOT, now=later(1))
    assert row(node).rotation_requested_at == later(1)
    claims.request_rotation(node.pk, actor=ANNA, now=later(2))
    claims.rotate(node.pk, old_fingerprint=node.fingerprint, new_secret=OTHER_SECRET, now=later(3))
    stored = row(node)
    assert (stored.fingerprint, stored.rotation_requested_at) == (hash_secret(OTHER_SECRET), None)
    assert (stored.status, stored.instance, stored.bound_at) == ("healthy", ONE, NOW)
    with pytest.raises(errors.Forbidden):
        register(now=later(4))
    with pytest.raises(errors.NotAuthenticated):
        claims.rotate(node.pk, old_fingerprint=hash_secret(SECRET), new_secret=THIRD_SECRET, now=later(4))
    assert list(beat(beat_of(node, secret=OTHER_SECRET, instance=ONE, at=later(5))).values()) == [None]
    assert kinds(node)[-2:] == ["rotation_requested", "rotated"]
    assert RevokedSecret.objects.get().revoked_by == "worker"


@pytest.mark.parametrize("secret", ["", "x", "A" * 64, "0" * 63])
def test_a_new_secret_that_is_none(secret: str) -> None:
    node = approved()
    with pytest.raises(errors.InvalidInput):
        claims.rotate(node.pk, old_fingerprint=node.fingerprint, new_secret=secret, now=NOW)


def test_a_secret_that_is_somebodys_or_was_revoked_cannot_be_rotated_to() -> None:
    node, other = approved(), approved("w2", secret=OTHER_SECRET)
    for second in (1, 2):
        with pytest.raises(errors.Conflict):
            claims.rotate(
                node.pk, old_fingerprint=node.fingerprint, new_secret=OTHER_SECRET, now=later(second)
            )
        if second == 1:
            claims.revoke(other.pk, actor=ROOT, now=later(1))
    assert row(node).fingerprint == hash_secret(SECRET)


def test_a_revoked_secret_is_refused_under_any_name() -> None:
    """The node is pending again, without identity and replicas; the next one waits for an approval."""
    node = approved(instance=ONE)
    replica(node)
    claims.revoke(node.pk, actor=ANNA, now=later(1), reason="stolen")
    stored = row(node)
    assert (stored.status, stored.fingerprint, stored.weak_identity) == ("pending", "", False)
    assert (stored.revoked_by, stored.revoke_reason, stored.approved_at) == ("anna", "stolen", None)
    assert (replicas(node), stored.instance) == ([], "")
    for name in ("w1", "w2"):
        with pytest.raises(errors.Forbidden, match="revoked"):
            register(name, now=later(2))
    assert not BackendNode.objects.filter(name="w2").exists()
    assert isinstance(next(iter(beat(beat_of(node)).values())), errors.NotAuthenticated)
    with pytest.raises(errors.InvalidInput, match="no worker has registered"):
        lifecycle.approve(node.pk, actor=ROOT, now=later(3))
    with pytest.raises(errors.Conflict, match="no identity"):
        claims.revoke(node.pk, actor=ROOT, now=later(3))
    register(secret=OTHER_SECRET, now=later(4), auto_approve=True)
    assert status(node) == "pending"
    assert lifecycle.approve(node.pk, actor=ROOT, now=later(5)).node.status == "healthy"
    assert row(node).revoked_at is None


def test_a_revoked_secret_stays_refused_after_its_node_is_gone() -> None:
    node = approved()
    claims.revoke(node.pk, actor=ROOT, now=NOW)
    lifecycle.deregister(node.pk, actor=ROOT, now=NOW)
    with pytest.raises(errors.Forbidden):
        register("w9", now=later(1))


@pytest.mark.usefixtures("weak_allowed")
def test_a_weak_node_has_no_secret_to_rotate_and_can_be_revoked() -> None:
    node = approved(secret="")
    with pytest.raises(errors.Conflict, match="no secret"):
        claims.request_rotation(node.pk, actor=ROOT, now=NOW)
    claims.revoke(node.pk, actor=ROOT, now=later(1))
    assert isinstance(next(iter(beat(beat_of(node, secret="")).values())), errors.Forbidden)
    register(secret="", now=later(2))
    assert (status(node), row(node).weak_identity) == ("pending", True)


def test_unknown_nodes() -> None:
    with pytest.raises(errors.NotFound):
        claims.revoke(uuid4(), actor=ROOT, now=NOW)
    with pytest.raises(errors.NotFound):
        claims.request_rotation(uuid4(), actor=ROOT, now=NOW)
    with pytest.raises(errors.NotFound):
        claims.rotate(uuid4(), old_fingerprint="x", new_secret=SECRET, now=NOW)


# --- enrolment


def test_an_enrolled_worker_is_offline_until_it_registers() -> None:
    node = claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=NOW)
    assert status(node) == "offline"
    before = row(node).revision
    claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=later(1))
    assert row(node).revision == before
    assert register("local", now=later(2)).node.status == "healthy"
    assert kinds(node) == ["approved", "registered", "labels"]
    (event,) = told(node, "approved")
    assert (event.actor_kind, event.actor, event.status_before) == ("make_run", "make run", "pending")


def test_enrolment_takes_back_no_admins_no() -> None:
    """Revoked or rejected, it stays so, however often the cluster starts."""
    node = claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=NOW)
    claims.revoke(node.pk, actor=ROOT, now=later(1))
    claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=later(2))
    assert (status(node), row(node).fingerprint) == ("pending", "")
    other = register("w2", secret=OTHER_SECRET).node
    lifecycle.reject(other.pk, actor=ROOT, now=NOW, reason="no")
    claims.enrol("w2", hash_secret(OTHER_SECRET), actor=MAKE_RUN, now=later(2))
    assert status(other) == "pending"


def test_enrolment_with_a_revoked_secret_approves_nobody() -> None:
    """Neither who waits under the name by now, nor a new node that no worker could be."""
    claims.revoke(
        claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=NOW).pk, actor=ROOT, now=later(1)
    )
    BackendNode.objects.all().delete()
    with pytest.raises(errors.Conflict, match="revoked"):
        claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=later(2))
    assert not BackendNode.objects.exists()
    stranger = register("local", secret=OTHER_SECRET, now=later(3)).node
    claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=later(4))
    assert (status(stranger), row(stranger).fingerprint) == ("pending", hash_secret(OTHER_SECRET))


def test_enrolment_binds_a_new_secret_and_approves_who_waits() -> None:
    node = register("local", instance=ONE).node
    claims.enrol("local", hash_secret(OTHER_SECRET), actor=MAKE_RUN, now=later(1))
    stored = row(node)
    assert (stored.status, stored.fingerprint, stored.instance) == ("healthy", hash_secret(OTHER_SECRET), "")


def test_enrolment_of_what_belongs_to_another_node() -> None:
    """A look-alike, a taken secret, a name that cannot be."""
    register("w1")
    with pytest.raises(errors.Conflict):
        claims.enrol("W1", hash_secret(OTHER_SECRET), actor=MAKE_RUN, now=NOW)
    with pytest.raises(errors.Conflict):
        claims.enrol("w2", hash_secret(SECRET), actor=MAKE_RUN, now=NOW)
    register("w3", secret=OTHER_SECRET)
    with pytest.raises(errors.Conflict):
        claims.enrol("w3", hash_secret(SECRET), actor=MAKE_RUN, now=NOW)
    with pytest.raises(errors.InvalidInput):
        claims.enrol("w\u200b", hash_secret(SECRET), actor=MAKE_RUN, now=NOW)
