"""Credentials for the bus as rows: who gets them, and what ends them (nats.md §9.2)."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.checks import Tags, run_checks
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import errors, nkeys
from nodes.models import BackendNode, BusCredential
from nodes.registry import bus_credentials, claims, lifecycle, registration
from nodes.registry.bus_credentials import Revocations
from nodes.registry.registration import Registration
from tests.support import api
from tests.support.fleet import (
    ANNA,
    NOW,
    OTHER_SECRET,
    SECRET,
    THIRD_SECRET,
    later,
    register,
    register_as,
    replica,
    replicas,
    row,
)

pytestmark = pytest.mark.django_db

DAY = 86400


def registered(*, auto_approve: bool = True, at: float = 0, **fields: Any) -> registration.Registered:
    told = Registration(name=fields.pop("name", "n1"), address="10.0.0.1:50051", **fields)
    return register_as(
        told, secret=SECRET, source_address="10.0.0.1", now=later(at), auto_approve=auto_approve
    )


def valid(at: float = 0) -> set[str]:
    """Users that are good at that time."""
    rows = BusCredential.objects.filter(revoked_at=None, expires_at__gt=later(at))
    return set(rows.values_list("public_key", flat=True))


@pytest.mark.rule("nats-9.2", "W4")
def test_a_pending_node_gets_none_and_an_approved_one_a_new_jwt_each_time() -> None:
    pending = registered(auto_approve=False)
    assert pending.credentials is None
    assert not BusCredential.objects.exists()
    lifecycle.approve(pending.node.id, actor=ANNA, now=later(1))
    assert not BusCredential.objects.exists(), "an approval answers a person, not the worker"
    first, second = (registered(at=at).credentials for at in (2, 3))
    assert first is not None
    assert second is not None
    assert first.jwt != second.jwt
    assert first.public_key == second.public_key, "however often it registers, a revocation is one line"
    assert first.lifetime == DAY
    assert valid(DAY + 2.5) == {first.public_key}, "as long as the last one"
    token_claims = nkeys.claims_of(first.jwt)
    assert token_claims["nats"]["sub"]["allow"][0] == f"nodes.{pending.node.id}.>"
    everything = str(list(BusCredential.objects.values()))
    assert first.jwt not in everything
    assert first.seed not in everything


def rotate(node: UUID) -> None:
    claims.rotate(node, old_fingerprint=row(node).fingerprint, new_secret=OTHER_SECRET, now=later(5))


def remove(node: UUID) -> None:
    lifecycle.deregister(node, actor=ANNA, now=later(5))


def hand_over(node: UUID) -> None:
    with pytest.raises(errors.Conflict):
        register(name="n1", secret=THIRD_SECRET, now=later(4))
    conflict = BackendNode.objects.get(pk=node).conflicts.get()
    claims.accept_conflict(conflict.pk, actor=ANNA, now=later(5))


@pytest.mark.rule("nats-9.2")
@pytest.mark.parametrize(
    "end",
    [lambda node: claims.revoke(node, actor=ANNA, now=later(5)), rotate, remove, hand_over],
    ids=["revoke", "rotate", "remove", "hand over"],
)
def test_they_end_with_the_approval_the_identity_and_the_node(end: Callable[[UUID], None]) -> None:
    found = registered()
    assert found.credentials is not None
    end(found.node.id)
    assert valid(5) == set()
    (told,) = bus_credentials.current_revocations(later(6)).items()
    assert told == (found.credentials.public_key, int(later(DAY).timestamp()))
    assert bus_credentials.current_revocations(later(DAY + 1)) == {}, "an expired one needs no revocation"


def test_a_node_that_was_revoked_is_another_user_afterwards() -> None:
    found = registered()
    assert found.credentials is not None
    claims.revoke(found.node.id, actor=ANNA, now=later(5))
    told = Registration(name="n1", address="10.0.0.1:50051")
    again = register_as(
        told, secret=OTHER_SECRET, source_address="10.0.0.1", now=later(6), auto_approve=False
    )
    lifecycle.approve(again.node.id, actor=ANNA, now=later(7))
    back = register_as(told, secret=OTHER_SECRET, source_address="10.0.0.1", now=later(8), auto_approve=False)
    assert back.credentials is not None
    assert back.credentials.public_key not in bus_credentials.current_revocations(later(9))
    assert list(bus_credentials.current_revocations(later(9))) == [found.credentials.public_key]


def test_a_worker_that_restarts_all_day_stays_one_line_of_the_account() -> None:
    """A thousand registrations, then a revocation: the account's JWT stays far below what a bus carries."""
    for number in range(40):
        registered(at=number)
    node = BackendNode.objects.get()
    claims.revoke(node.id, actor=ANNA, now=later(50))
    assert BusCredential.objects.count() == len(bus_credentials.current_revocations(later(51))) == 1


async def test_a_controller_without_the_keys_that_rule_the_bus_says_what_that_means(
    settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the settings and for how long; no other process needs them, so no other one asks for them."""
    settings.CLUSTER = replace(settings.CLUSTER, nats_operator_seed="", nats_worker_jwt_ttl=7200.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await Revocations(print).run()
    (line,) = caplog.messages
    assert "until its credentials expire (2 h): set CLUSTER_NATS_OPERATOR_SEED" in line
    assert run_checks(tags=[Tags.security]) == []


def test_too_many_revocations_are_cut_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest count: an account's JWT that the bus does not carry would stop every later revocation."""
    monkeypatch.setattr(bus_credentials, "MAX_REVOCATIONS", 3)
    BusCredential.objects.bulk_create(
        BusCredential(
            public_key=f"U{number}",
            node_id=uuid4(),
            issued_at=NOW,
            expires_at=later(DAY),
            revoked_at=later(number),
        )
        for number in range(5)
    )
    assert set(bus_credentials.current_revocations(later(10))) == {"U4", "U3", "U2"}
    assert "LOCALAI_NATS_WORKER_JWT_TTL" in caplog.text


def test_the_same_process_once_more_drops_no_replica_and_frees_no_memory() -> None:
    """Its list is older than what was published since, and does not name what is being loaded."""
    one = "1" * 32
    node = register("n1", instance=one, running_processes=[], available_vram=100, total_vram=100).node
    lifecycle.approve(node.id, actor=ANNA, now=later(1))
    replica(node, "loaded", state="loaded", address="10.0.0.1:1")
    replica(node, "loading", state="loading")
    BackendNode.objects.update(available_vram=7)
    register("n1", instance=one, running_processes=[], available_vram=100, total_vram=100, now=later(60))
    assert replicas(node) == ["loaded#0", "loading#0"]
    assert row(node).available_vram == 7
    register("n1", instance="2" * 32, running_processes=[], now=later(70))
    assert replicas(node) == [], "another process has no engines of the former one"


@pytest.mark.parametrize(
    "verb",
    [
        lambda node: lifecycle.drain(node, actor=ANNA, now=later(5)),
        lambda node: lifecycle.deactivate(node, now=later(5)),
        lambda node: lifecycle.mark_unhealthy(node, actor=ANNA, now=later(5), reason="silent"),
    ],
    ids=["drain", "leave", "unhealthy"],
)
def test_they_survive_what_does_not_touch_the_identity(verb: Callable[[UUID], None]) -> None:
    found = registered()
    verb(found.node.id)
    assert len(valid(5)) == 1


def test_expired_rows_go_with_the_next_registration_and_with_the_pruning() -> None:
    registered()
    registered(at=DAY + 10)
    assert BusCredential.objects.count() == 1
    assert bus_credentials.prune(later(3 * DAY)) == 1


def test_many_nodes_cost_as_many_statements_as_two() -> None:
    def new_claims(count: int, begin: int) -> list[registration.Claim]:
        return [
            registration.claim(
                Registration(name=f"many-{begin + n}", address="10.0.0.9:1"),
                secret=f"{begin + n:064x}",
                source_address="10.0.0.9",
            )
            for n in range(count)
        ]

    counts = []
    for count, begin in ((2, 100), (30, 200)):
        with CaptureQueriesContext(
            connection,
        ) as queries:
            outcomes = registration.register_all(new_claims(count, begin), now=NOW, auto_approve=True)
        assert all(isinstance(one, registration.Registered) and one.credentials for one in outcomes)
        counts.append(len(queries))
    assert counts[0] == counts[1]


@pytest.mark.rule("http-1.1", "nats-9.2")
def test_the_answer_says_where_the_bus_is_and_never_repeats_the_server_s_own_secrets(settings: Any) -> None:
    body = api.register(api.registration())
    assert "nats_jwt" not in body.json()
    node = BackendNode.objects.get()
    answer = lifecycle.approve(node.id, actor=ANNA, now=NOW + timedelta(seconds=1))
    assert not hasattr(answer, "credentials")
    told = api.register(api.registration()).json()
    assert told["nats_url"] == "nats://127.0.0.1:1"
    assert told["nats_user_seed"].startswith("SU")
    assert (
        nkeys.claims_of(told["nats_jwt"])["sub"] == nkeys.from_seed(told["nats_user_seed"], "user").public_key
    )
    assert settings.CLUSTER.nats_account_seed not in str(told)
