"""The life cycle against a small model: workers, a copy, an impostor, two admins, beats and passes.

The model is written down by hand, not derived from `nodes/registry/states.py`. After every step the database
must say what the model says, and what must never happen has not happened: a node no one approved is no
target, an admin's drain is there until an admin ends it, an identity changes hands by an admin only, and the
timeline tells every event once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.conf import settings as django_settings
from django.db import transaction
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from localai_cluster.accounts import actors
from localai_cluster.accounts.actors import Actor
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit.errors import ClusterError
from nodes.decisions.fleet_cache import read_fleet
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeModel, WebProcess
from nodes.placement.choose import find_refusal
from nodes.reconcilers.liveness import Limits, apply, observe, plan_liveness
from nodes.registry import claims, identity, lifecycle
from nodes.registry.heartbeats import Beat
from tests.support.effort import EFFORT
from tests.support.environment import REGISTRATION_TOKEN
from tests.support.fleet import ANNA, NOW, ROOT, beat, register, replica
from tests.support.lifecycle import TOKEN, Claim, Node

NAMES = ["alpha", "beta", "ALPHA"]
SECRETS = [f"{number:064x}" for number in range(12)]
INSTANCES = ["", "1" * 32, "2" * 32]
SILENCE = 60.0
OWN = timedelta(seconds=60)
SHORT = timedelta(seconds=30)

ADMINS = [ROOT, ANNA]
CALLERS = ["itself"] * 7 + ["copy"] * 3 + ["impostor", "other", "token", "new"]
OUTSIDE = ["registers"] * 5 + ["beats"] * 4 + ["drains_itself", "resumes_itself", "leaves", "rotates"]
INSIDE = (
    ["approves"] * 6
    + ["decides"] * 4
    + ["looks_for_the_silent"] * 3
    + ["drains", "resumes", "does_not_answer", "serves", "drains_end"] * 2
    + ["rejects", "asks_for_rotation", "revokes", "deregisters", "asks_for_what_is_not_there"]
)


def answer(verb: Callable[[], Any]) -> Any:
    """What the verb returns, or the error by which it refuses."""
    try:
        return verb()
    except ClusterError as error:
        return error


class Fleet(RuleBasedStateMachine):
    """The registry and its model side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = transaction.atomic()
        self.whole.__enter__()
        self.now = NOW
        self.dice = Random(0)
        self.nodes: dict[UUID, Node] = {}
        self.gone: dict[UUID, Node] = {}
        self.refused: set[str] = set()
        self.bound: dict[UUID, str] = {}
        self.web = WebProcess.objects.create(host="h", pid=1, seen_at=NOW, hearing_since=NOW - OWN * 9)

    def teardown(self) -> None:
        """Nothing of this example stays."""
        transaction.set_rollback(True)
        self.whole.__exit__(None, None, None)

    # --- helpers

    def credentials(self, node: Node | None, caller: str, instance: str) -> tuple[str, str]:
        """Secret and process of anyone who calls."""
        if node is not None and caller == "itself" and node.identified:
            return node.secret, node.instance
        if node is not None and caller == "copy":
            return node.secret, instance
        if caller == "impostor":
            return SECRETS[2], instance
        if caller == "token":
            return TOKEN, ""
        if caller == "other":
            return next((one.secret for one in self.nodes.values() if one is not node), SECRETS[3]), instance
        unused = (one for one in SECRETS if one not in self.refused and self.owner(one) is None)
        return next(unused, SECRETS[-1]), instance

    def tick(self, seconds: float = 1) -> datetime:
        """Time passes; a step begins."""
        self.now += timedelta(seconds=seconds)
        return self.now

    def expect(self, works: bool, verb: Callable[[], Any]) -> Any:
        """The verb works, or is refused by an error of the registry's own, as the model says."""
        result = answer(verb)
        assert isinstance(result, ClusterError) is not works, result
        return result

    def owner(self, secret: str) -> Node | None:
        """The node of that secret."""
        return next((node for node in self.nodes.values() if secret and node.secret == secret), None)

    def claimed(self, node: Node, kind: str, claim: str, name: str = "") -> None:
        """A conflict is recorded, or counted and asked again if it had been accepted."""
        node.conflicts += 1
        known = next((one for one in node.claims if (one.kind, one.claim) == (kind, claim)), None)
        if known is None:
            node.claims.append(Claim(kind, claim, name))
        elif known.state == "accepted":
            known.state = "open"

    # --- workers, a copy, an impostor

    @initialize()
    def begins(self) -> None:
        """Two workers that an admin has let in."""
        for number, name in enumerate(NAMES[:2]):
            self.register(name, SECRETS[number], INSTANCES[1], auto=False)
            self.approves(list(self.nodes.values())[number], ROOT)

    @rule(number=st.integers(0, 2**32))
    def something_happens(self, number: int) -> None:
        """A step by dice that hang on all the steps before.

        With choices drawn one by one Hypothesis repeats long runs in which little is different.
        """
        self.dice = Random(f"{number} {self.dice.random()}")
        self.tick()
        if self.dice.random() < 0.5:
            self.somebody_calls(self.dice.choice(OUTSIDE))
        else:
            self.somebody_inside_acts(self.dice.choice(INSIDE))

    def somebody_calls(self, verb: str) -> None:
        """A worker, its copy, an impostor: with some secret, as some process."""
        node = self.dice.choice(list(self.nodes.values())) if self.nodes else None
        caller, instance = self.dice.choice(CALLERS), self.dice.choice(INSTANCES)
        secret, process = self.credentials(node, caller, instance)
        note(f"{node and node.name}: {caller} {verb} as {process}")
        if node is None or verb == "registers":
            self.registers(node, secret, self.dice.choice([process, process, instance]))
        elif verb == "beats":
            self.beats(secret, process)
        elif verb == "rotates":
            self.rotates(node, secret, process, self.dice.choice(SECRETS))
        elif self.proves(node, secret, process):
            getattr(self, verb)(node)

    def somebody_inside_acts(self, verb: str) -> None:
        """An admin, or the cluster itself."""
        note(verb)
        if verb in ("looks_for_the_silent", "drains_end", "asks_for_what_is_not_there"):
            getattr(self, verb)()
        elif self.nodes:
            node = self.dice.choice(list(self.nodes.values()))
            note(f"{node.name} {node.status}")
            getattr(self, verb)(node, self.dice.choice(ADMINS))

    def registers(self, node: Node | None, secret: str, instance: str) -> None:
        """Mostly under a node's own name: again, after a restart, as somebody else."""
        name = self.dice.choice([node.name] * 9 + NAMES if node else NAMES)
        self.register(name, secret, instance, auto=self.dice.random() < 0.1)

    def register(self, name: str, secret: str, instance: str, *, auto: bool) -> None:
        """A registration, and what it changes."""
        now = self.now
        named = next((node for node in self.nodes.values() if node.name == name), None)
        other = self.owner(secret)
        alike = any(node.name.lower() == name.lower() for node in self.nodes.values())
        kind = named.judge(secret, instance) if named else ""
        if other is not None and other is not named and not kind:
            named, kind = other, "name"
        welcome = secret not in self.refused and not kind and (named is not None or not alike)
        result = self.expect(
            welcome, lambda: register(name, secret=secret, instance=instance, auto_approve=auto, now=now)
        )
        if welcome:
            self.admitted(named, result.node.pk, name, secret, instance, auto)
        elif kind and named is not None and secret not in self.refused:
            claim = {"name": hash_secret(name), "instance": instance, "token": "10.0.0.1"}.get(kind)
            self.claimed(named, kind, claim or hash_secret(secret), name)

    def admitted(
        self, node: Node | None, node_id: UUID, name: str, secret: str, instance: str, auto: bool
    ) -> None:
        """What a registration changes."""
        if node is None:
            node = self.nodes[node_id] = Node(node_id, name, self.now)
        assert node.id == node_id
        if not node.secret and secret:
            self.bound[node.id] = hash_secret(secret)
        # The same process once more is news only if it ends something, and says nothing about replicas.
        routine = bool(node.told and instance) and (instance, secret) == (node.instance, node.secret)
        ends = bool(node.offline or node.unhealthy or node.drained == "own")
        node.secret, node.weak, node.bound = secret, not secret, node.bound or bool(secret)
        if instance != node.instance:
            node.former = [node.instance, *node.former] if node.instance else node.former
            node.instance = instance
        node.seen, node.offline, node.unhealthy = self.now, "", None
        node.drained = node.drained if node.drained == "admin" else ""
        if not routine and secret:
            node.drop()
        if not routine or ends:
            node.told.append(("registered", "worker"))
        if auto and not (node.approved or node.rejected or node.revoked):
            node.approved = True
            node.told.append(("approved", "auto-approval"))
        if node.label != node.name:
            node.label = node.name
            node.told.append(("labels", "worker"))

    def proves(self, node: Node, secret: str, instance: str, *, rotating: bool = False) -> bool:
        """Whether a self-service call is the node's; a copy's call is recorded."""
        credential = secret or REGISTRATION_TOKEN
        works = node.holds(secret) and (not node.rotating or rotating)
        works = works and instance in ("", node.instance)
        copy = node.holds(secret) and (not node.rotating or rotating) and not works
        proof = answer(lambda: identity.prove_node(node.id, credential, instance, rotating=rotating))
        assert isinstance(proof, ClusterError) is not works, proof
        assert isinstance(proof, identity.OtherProcess) is copy
        if copy:
            claims.record_other_process(node.id, instance, source_address="10.6.6.6", now=self.now)
            self.claimed(node, "instance", instance)
        return works

    def drains_itself(self, node: Node) -> None:
        """A worker stops."""
        now = self.now
        lifecycle.drain_by_worker(node.id, now=now)
        if not node.drained:
            node.drained, node.deadline = "own", now + OWN
            node.told.append(("drained", "worker"))
        if not node.busy:
            node.drop()

    def resumes_itself(self, node: Node) -> None:
        """A worker takes its own drain back."""
        now = self.now
        works = node.status == "draining" and node.drained == "own"
        self.expect(works, lambda: lifecycle.resume_by_worker(node.id, now=now))
        if works:
            node.drained = ""
            node.told.append(("resumed", "worker"))

    def leaves(self, node: Node) -> None:
        """A worker says goodbye."""
        now = self.now
        lifecycle.deactivate(node.id, now=now)
        if node.offline != "left":
            node.offline = "left"
            node.told.append(("deactivated", "worker"))
        node.drop()

    def rotates(self, node: Node, secret: str, instance: str, new: str) -> None:
        """A worker replaces its secret."""
        now = self.now
        if not secret or not self.proves(node, secret, instance, rotating=True):
            return
        works = new not in self.refused and self.owner(new) is None
        old = hash_secret(secret)
        self.expect(works, lambda: claims.rotate(node.id, old_fingerprint=old, new_secret=new, now=now))
        if works:
            self.refused.add(node.secret)
            node.secret, node.rotating = new, False
            self.bound[node.id] = hash_secret(new)
            node.told.append(("rotated", "worker"))

    def beats(self, secret: str, instance: str) -> None:
        """A beat for every node as the bearer of one secret; some were received a while ago."""
        at = self.now - timedelta(seconds=self.dice.choice([0, 0, 10]))
        fingerprint = hash_secret(secret) if secret else ""
        beat(*(Beat(node.id, fingerprint, at, instance) for node in self.nodes.values()))
        for node in self.nodes.values():
            if not node.holds(secret) or node.rotating or instance not in ("", node.instance):
                continue
            node.seen = max(node.seen, at)
            if node.offline == "silent":
                node.offline = ""
                node.told.append(("heard_again", "worker"))

    # --- admins

    def approves(self, node: Node, admin: Actor) -> None:
        """An admin lets a node in."""
        now = self.now
        works = not node.approved and node.identified
        self.expect(works, lambda: lifecycle.approve(node.id, actor=admin, now=now))
        if works:
            node.approved, node.rejected, node.revoked = True, False, False
            node.told.append(("approved", str(admin)))

    def rejects(self, node: Node, admin: Actor) -> None:
        """An admin says no."""
        now = self.now
        works = not node.approved
        self.expect(works, lambda: lifecycle.reject(node.id, actor=admin, now=now, reason="no"))
        if works and not node.rejected:
            node.rejected = True
            node.told.append(("rejected", str(admin)))

    def drains(self, node: Node, admin: Actor) -> None:
        """An admin wants nothing new there."""
        now = self.now
        lifecycle.drain(node.id, actor=admin, now=now, deadline=SHORT.total_seconds())
        node.drained, node.deadline = "admin", now + SHORT
        node.told.append(("drained", str(admin)))
        if not node.busy:
            node.drop()

    def resumes(self, node: Node, admin: Actor) -> None:
        """An admin takes a node into service again."""
        now = self.now
        works = node.status in ("offline", "draining", "unhealthy")
        self.expect(works, lambda: lifecycle.resume(node.id, actor=admin, now=now))
        if works:
            before = node.drained, node.offline, node.unhealthy
            node.drained, node.unhealthy = "", None
            node.offline = "silent" if node.offline else ""
            if (node.drained, node.offline, node.unhealthy) != before:
                node.told.append(("resumed", str(admin)))

    def asks_for_rotation(self, node: Node, admin: Actor) -> None:
        """An admin wants another secret."""
        now = self.now
        self.expect(bool(node.secret), lambda: claims.request_rotation(node.id, actor=admin, now=now))
        if node.secret and not node.rotating:
            node.rotating = True
            node.told.append(("rotation_requested", str(admin)))

    def revokes(self, node: Node, admin: Actor) -> None:
        """An admin revokes a secret."""
        now = self.now
        works = node.identified
        self.expect(works, lambda: claims.revoke(node.id, actor=admin, now=now))
        if works:
            self.refused |= {node.secret} - {""}
            node.approved, node.revoked, node.rotating = False, True, False
            node.secret, node.weak, node.instance, node.former = "", False, "", []
            self.bound.pop(node.id, None)
            node.told.append(("revoked", str(admin)))
            node.drop()

    def decides(self, node: Node, admin: Actor) -> None:
        """An admin accepts or refuses one of a node's conflicts."""
        now, accepted = self.now, self.dice.random() < 0.6
        if not node.claims:
            return
        claim = self.dice.choice(node.claims)
        row = NodeConflict.objects.get(node_id=node.id, kind=claim.kind, claim=claim.claim)
        verb = claims.accept_conflict if accepted else claims.refuse_conflict
        works = self.acceptable(node, claim) if accepted else claim.state == "open"
        self.expect(works, lambda: verb(row.pk, node_id=node.id, actor=admin, now=now))
        if works:
            claim.state = "accepted" if accepted else "refused"
            node.told.append((f"conflict_{claim.state}", str(admin)))
        if works and accepted:
            self.handed_over(node, claim)

    def acceptable(self, node: Node, claim: Claim) -> bool:
        """Whether a yes is possible."""
        if claim.state == "accepted" or claim.kind in ("token", "instance"):
            return False
        if claim.kind == "name":
            key = claim.name.lower()
            return not any(one.name.lower() == key for one in self.nodes.values() if one is not node)
        secret = self.secret_of(claim)
        return node.secret == secret or (self.owner(secret) is None and secret not in self.refused)

    def handed_over(self, node: Node, claim: Claim) -> None:
        """What a yes changes."""
        if claim.kind == "name":
            node.name = claim.name
            return
        secret = self.secret_of(claim)
        if node.secret == secret:
            return
        self.refused |= {node.secret} - {""}
        node.secret, node.weak, node.bound, node.rotating = secret, False, True, False
        node.instance, node.former, node.offline = "", [], "left"
        self.bound[node.id] = hash_secret(secret)
        node.drop()

    @staticmethod
    def secret_of(claim: Claim) -> str:
        """The secret behind a claimed fingerprint."""
        return next(secret for secret in SECRETS if hash_secret(secret) == claim.claim)

    def deregisters(self, node: Node, admin: Actor) -> None:
        """An admin removes a node."""
        now = self.now
        lifecycle.deregister(node.id, actor=admin, now=now)
        node.told.append(("deregistered", str(admin)))
        self.gone[node.id] = self.nodes.pop(node.id)
        self.bound.pop(node.id, None)

    def asks_for_what_is_not_there(self) -> None:
        """Every verb of an unknown node is refused."""
        now, unknown = self.now, uuid4()
        for verb in (
            lifecycle.approve,
            lifecycle.resume,
            claims.revoke,
            lifecycle.deregister,
            lifecycle.drain,
        ):
            self.expect(False, lambda verb=verb: verb(unknown, actor=ROOT, now=now))  # type: ignore[misc]

    # --- the cluster itself

    def looks_for_the_silent(self) -> None:
        """The health pass, often after a while: the silent go offline, those that answer are well again."""
        now = self.tick(self.dice.choice([1, 20, 61]))
        for node in self.nodes.values():
            if self.dice.random() < 0.6:
                node.answered = now
                BackendNode.objects.filter(pk=node.id).update(inventory_at=now)
        limits = Limits(node=SILENCE, web=15)
        WebProcess.objects.update(seen_at=now)
        apply(plan_liveness(observe(), now, limits), now, limits)
        for node in self.nodes.values():
            if not node.approved or node.offline:
                continue
            if (now - node.seen).total_seconds() > SILENCE:
                node.offline = "silent"
                node.told.append(("fell_silent", "liveness"))
                node.drop()
            elif node.unhealthy and min(node.seen, node.answered) > node.unhealthy:
                node.unhealthy = None
                node.told.append(("marked_healthy", "liveness"))

    def does_not_answer(self, node: Node, admin: Actor) -> None:
        """A command got no answer."""
        now = self.now
        lifecycle.mark_unhealthy(node.id, actor=actors.task("commands"), now=now, reason="no answer")
        if not node.unhealthy:
            node.unhealthy = now
            node.told.append(("marked_unhealthy", "commands"))

    def serves(self, node: Node, admin: Actor) -> None:
        """A model is loaded on a target, or a request begins or ends there."""
        busy = self.dice.random() < 0.6
        if node.status == "healthy" and not node.replicas:
            # The engines of departed replicas keep their indices.
            taken = NodeModel.engines.filter(node_id=node.id).values_list("replica_index", flat=True)
            replica(BackendNode.objects.get(pk=node.id), index=max(taken, default=-1) + 1)
            node.replicas = 1
        if node.replicas:
            NodeModel.objects.filter(node_id=node.id).update(in_flight=int(busy))
            node.busy = busy

    def drains_end(self) -> None:
        """The pass over drains."""
        now = self.now
        lifecycle.finish_drains(now=now)
        for node in self.nodes.values():
            late = node.deadline is not None and node.deadline <= now
            if node.status == "draining" and node.replicas and (late or not node.busy):
                node.told.append(("drain_ended", "drains"))
                node.drop()

    # --- what must hold

    @invariant()
    def everything_holds(self) -> None:
        """All of it after every step, on one look at the rows."""
        rows = {row.pk: row for row in BackendNode.objects.all()}
        events = list(NodeEvent.objects.order_by("id").values_list("node_id", "kind", "actor", "count"))
        assert rows.keys() == self.nodes.keys()
        for node in self.nodes.values():
            self.the_row_says_what_the_model_says(node, rows[node.id])
            self.an_admins_drain_is_never_lost(node, rows[node.id])
        self.no_identity_changes_hands_by_itself(rows)
        self.no_one_unapproved_is_a_target({node_id for node_id, kind, _, _ in events if kind == "approved"})
        self.the_timeline_tells_every_event_once(events)
        self.every_conflict_is_there_to_be_seen()

    def the_row_says_what_the_model_says(self, node: Node, row: BackendNode) -> None:
        """Status, facts, identity."""
        fingerprint = hash_secret(node.secret) if node.secret else ""
        assert (row.status, row.name) == (node.status, node.name)
        assert (row.fingerprint, row.weak_identity) == (fingerprint, node.weak)
        assert (row.instance, row.former_instances) == (node.instance, node.former)
        assert (row.rejected_at is not None, row.revoked_at is not None) == (node.rejected, node.revoked)
        assert row.last_heartbeat == node.seen

    def an_admins_drain_is_never_lost(self, node: Node, row: BackendNode) -> None:
        """The last word of an admin about draining is what the row says."""
        words = [kind for kind, by in node.told if kind in ("drained", "resumed") and by in ("root", "anna")]
        drained = words[-1:] == ["drained"]
        assert (row.drained_at is not None and not row.drain_is_own) is drained
        assert (row.drained_at is not None and row.drain_is_own) is (node.drained == "own")

    def no_identity_changes_hands_by_itself(self, rows: dict[UUID, BackendNode]) -> None:
        """A bound fingerprint stays until its bearer rotates it or an admin decides otherwise."""
        assert {row.pk: row.fingerprint for row in rows.values() if row.fingerprint} == self.bound

    def no_one_unapproved_is_a_target(self, approved: set[UUID]) -> None:
        """Neither of placement nor of selectors; replicas of what is no target are not served."""
        targets = {view.id for view in read_fleet("m") if find_refusal(view) is None}
        chosen = {node.pk for node in BackendNode.objects.matching({})}
        assert targets <= chosen <= approved
        assert chosen == {node.id for node in self.nodes.values() if node.status == "healthy"}
        held = dict.fromkeys(self.nodes, 0)
        for node_id in NodeModel.objects.values_list("node_id", flat=True):
            held[node_id] += 1
        assert held == {node.id: node.replicas for node in self.nodes.values()}
        assert set(NodeModel.objects.serving().values_list("node_id", flat=True)) <= chosen

    def the_timeline_tells_every_event_once(self, events: list[tuple[UUID, str, str, int]]) -> None:
        """In order, with the actor; those of workers by their count; also of nodes that are gone."""
        told: dict[UUID, list[tuple[str, str]]] = {node_id: [] for node_id, *_ in events}
        counted: dict[UUID, Counter[tuple[str, str]]] = {node_id: Counter() for node_id in told}
        for node_id, kind, actor, count in events:
            counted[node_id][kind, actor] += count
            if kind != "conflict":
                told[node_id].append((kind, actor))
        everyone = {**self.gone, **self.nodes}
        conflicts = {node.id: {("conflict", "worker"): node.conflicts} for node in everyone.values()}
        assert counted == {
            node.id: Counter(node.told) + Counter(conflicts[node.id]) for node in everyone.values()
        }
        for node in everyone.values():
            rest = iter(node.told)
            assert all(event in rest for event in told[node.id]), "in order"

    def every_conflict_is_there_to_be_seen(self) -> None:
        """Once for each claimant, in the state an admin gave it."""
        rows = NodeConflict.objects.values_list("node_id", "kind", "claim", "state")
        assert set(rows) == {
            (node.id, claim.kind, claim.claim, claim.state)
            for node in self.nodes.values()
            for claim in node.claims
        }


@pytest.mark.rule(
    "R1.10", "R1.11", "R1.12", "R1.13", "R1.14", "R1.15", "R1.16", "R1.18", "R1.19", "R1.20", "R1.21", "R5.7"
)
@pytest.mark.django_db
def test_the_life_cycle_against_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same examples every time."""
    cluster = replace(django_settings.CLUSTER, allow_shared_token_nodes=True)
    monkeypatch.setattr(django_settings, "CLUSTER", cluster)
    run_state_machine_as_test(
        Fleet,
        settings=settings(
            max_examples=8 * EFFORT,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
