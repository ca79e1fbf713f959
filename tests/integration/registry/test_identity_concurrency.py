"""Secrets, conflicts and decisions that meet: real transactions in threads. One wins, the other is told."""

from typing import Any
from uuid import uuid4

import pytest

from localai_cluster.accounts.actors import MAKE_RUN
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import errors
from nodes.models import (
    BackendNode,
    NodeConflict,
    RevokedSecret,
)
from nodes.registry import claims, lifecycle
from tests.support.fleet import (
    NOW,
    OTHER_SECRET,
    ROOT,
    SECRET,
    approved,
    at_once,
    kinds,
    later,
    register,
    row,
    status,
    unexpected,
)
from tests.support.races import after, held, holding, repeated

pytestmark = pytest.mark.django_db(transaction=True)


@repeated
def test_two_revokes() -> None:
    """One revokes, the other is told that there is nothing left to revoke."""
    node = approved()
    results = after(held(node), *[lambda: claims.revoke(node.pk, actor=ROOT, now=later(1))] * 2)
    assert unexpected(results) == []
    assert sum(isinstance(result, errors.Conflict) for result in results) == 1
    assert kinds(node).count("revoked") == RevokedSecret.objects.count() == 1


@repeated
def test_an_enrolment_that_meets_a_revocation_binds_nothing() -> None:
    """Whichever is first: `make run` enrols its own worker at each start."""
    node = claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=NOW)
    results = after(
        held(node),
        lambda: claims.revoke(node.pk, actor=ROOT, now=later(1)),
        lambda: claims.enrol("local", hash_secret(SECRET), actor=MAKE_RUN, now=later(1)),
    )
    assert unexpected(results) == []
    assert (status(node), row(node).fingerprint) == ("pending", "")


@repeated
def test_two_decisions_on_one_conflict() -> None:
    """The first counts; a refused one may still be accepted, never the other way round."""
    node = approved()
    at_once(lambda: register(secret=OTHER_SECRET))
    conflict = NodeConflict.objects.get()
    decide: dict[str, Any] = {"actor": ROOT, "now": later(1)}
    results = after(
        held(node),
        lambda: claims.accept_conflict(conflict.pk, **decide),
        lambda: claims.refuse_conflict(conflict.pk, **decide),
        lambda: claims.accept_conflict(conflict.pk, **decide),
    )
    assert unexpected(results) == []
    assert kinds(node).count("conflict_accepted") == 1
    assert kinds(node).count("conflict_refused") == (not isinstance(results[1], Exception))
    assert NodeConflict.objects.get().state == "accepted"
    assert row(node).fingerprint == hash_secret(OTHER_SECRET)


@repeated
def test_a_decision_against_the_claim_that_comes_again() -> None:
    """Who claims holds the node and wants the conflict; who decides must not hold them crosswise."""
    node = approved()
    at_once(lambda: register(secret=OTHER_SECRET))
    conflict = NodeConflict.objects.get()
    claim, decision, copy = after(
        held(node),
        lambda: register(secret=OTHER_SECRET, now=later(1)),
        lambda: claims.accept_conflict(conflict.pk, actor=ROOT, now=later(1)),
        lambda: claims.record_other_process(node.pk, "9" * 32, source_address="10.6.6.6", now=later(1)),
    )
    assert unexpected([claim, decision, copy]) == []
    assert not isinstance(decision, Exception)
    assert isinstance(claim, errors.Conflict) or status(node) == "healthy"
    conflict.refresh_from_db()
    assert conflict.state == "accepted"


@repeated
def test_a_conflict_against_deregistration() -> None:
    """A copy's call, a decision: recorded before the end, or there is nothing any more."""
    node = approved()
    at_once(lambda: register(secret=OTHER_SECRET))
    conflict = NodeConflict.objects.get()
    results = after(
        held(node),
        lambda: lifecycle.deregister(node.pk, actor=ROOT, now=later(1)),
        lambda: claims.record_other_process(node.pk, "9" * 32, source_address="10.6.6.6", now=later(1)),
        lambda: claims.accept_conflict(conflict.pk, actor=ROOT, now=later(1)),
    )
    assert unexpected(results) == []
    assert isinstance(results[2], BackendNode | errors.NotFound)
    assert not NodeConflict.objects.exists()


@repeated
def test_rotate_against_revoke() -> None:
    """Either order: the old secret is refused, and a revoked node ends without identity."""
    node = approved()
    rotation, revocation = after(
        held(node),
        lambda: claims.rotate(
            node.pk, old_fingerprint=hash_secret(SECRET), new_secret=OTHER_SECRET, now=later(1)
        ),
        lambda: claims.revoke(node.pk, actor=ROOT, now=later(1)),
    )
    assert unexpected([rotation, revocation]) == []
    assert not isinstance(revocation, Exception)
    assert (status(node), row(node).fingerprint) == ("pending", "")
    lost = isinstance(rotation, errors.NotAuthenticated)
    refused = {hash_secret(SECRET)} if lost else {hash_secret(SECRET), hash_secret(OTHER_SECRET)}
    assert set(RevokedSecret.objects.values_list("pk", flat=True)) == refused


@repeated
def test_register_against_revoke_of_the_same_secret() -> None:
    """The registration was before, or is refused: a revoked secret is never bound again."""
    node = approved()
    results = after(
        held(node),
        lambda: claims.revoke(node.pk, actor=ROOT, now=later(1)),
        *[lambda: register(now=later(1), auto_approve=True)] * 3,
        lambda: register("w2", now=later(1), auto_approve=True),
    )
    assert unexpected(results) == []
    assert not isinstance(results[0], Exception)
    assert (status(node), row(node).fingerprint) == ("pending", "")
    assert not BackendNode.objects.filter(name="w2").exists()
    assert all(isinstance(one, errors.Forbidden) or one.node.pk == node.pk for one in results[1:4])


@repeated
def test_rotate_to_a_secret_that_somebody_registers_meanwhile() -> None:
    """The unique constraint decides; the loser is told so."""
    node = approved()
    results = at_once(
        lambda: claims.rotate(
            node.pk, old_fingerprint=hash_secret(SECRET), new_secret=OTHER_SECRET, now=later(1)
        ),
        lambda: register("w2", secret=OTHER_SECRET),
    )
    assert unexpected(results) == []
    assert sum(isinstance(result, Exception) for result in results) == 1
    assert BackendNode.objects.filter(fingerprint=hash_secret(OTHER_SECRET)).count() == 1


@pytest.mark.parametrize("kind", ["secret", "name"])
def test_a_decision_that_somebody_else_makes_impossible(kind: str) -> None:
    """The claimed name or secret is taken by a transaction that has not ended yet: a conflict, not a 500."""
    node = approved()
    claimed: dict[str, Any] = {"secret": OTHER_SECRET} if kind == "secret" else {"name": "w2"}
    at_once(lambda: register(**claimed))
    conflict = NodeConflict.objects.get()
    assert conflict.kind == kind
    taking = holding(
        "INSERT INTO backend_nodes (id, name, name_key, node_type, address, http_address, fingerprint,"
        " approved_by, approval_reason, rejected_by, reject_reason, revoked_by, revoke_reason, drained_by,"
        " drain_reason, drain_is_own, offline_by, offline_reason, offline_recovers, unhealthy_by,"
        " unhealthy_reason, weak_identity, instance, former_instances, source_address, total_vram,"
        " available_vram, reserved_vram, total_ram, available_ram, total_disk, available_disk, gpu_vendor,"
        " gpu_compute_capability, capability, max_replicas_per_model, max_replicas_per_model_manually_set,"
        " vram_budget, vram_budget_bytes, vram_budget_manually_set, inventory_error, engines_error, revision,"
        " created_at, updated_at)"
        " VALUES (%s, %s, %s, 'backend', 'h:1', '', %s, '', '', '', '', '', '', '', '', false, '', '',"
        " false, '', '', false, '', '[]', '', 0, 0, 0, 0, 0, 0, 0, '', '', '', 1, false, '', 0, false, '',"
        " '', 0, %s, %s)",
        uuid4(),
        "w2" if kind == "name" else "w3",
        "w2" if kind == "name" else "w3",
        hash_secret(OTHER_SECRET),
        NOW,
        NOW,
    )
    (result,) = after(taking, lambda: claims.accept_conflict(conflict.pk, actor=ROOT, now=later(1)))
    assert isinstance(result, errors.Conflict)
    assert NodeConflict.objects.get(pk=conflict.pk).state == "open"
    assert (row(node).name, row(node).fingerprint) == ("w1", hash_secret(SECRET))
