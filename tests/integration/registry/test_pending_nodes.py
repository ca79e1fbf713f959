"""Nodes that await approval are limited per address and in all, and a silent one expires (review R20, X8)."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings

from localai_cluster.kit import clock
from localai_cluster.kit.errors import InvalidInput
from nodes.live import rows
from nodes.models import BackendNode, NodeEvent, NodeLabel
from nodes.reconcilers import tasks
from nodes.registry import claims, joining, lifecycle, registration
from nodes.registry.pending import SILENCE_LIMIT, TooManyPending
from tests.support import api
from tests.support.fleet import NOW, ROOT, at_once, own_secret, register

pytestmark = pytest.mark.django_db
HERE, ELSEWHERE = "192.0.2.1", "192.0.2.2"


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(settings.CLUSTER, pending_nodes=5, pending_nodes_per_address=3)
    monkeypatch.setattr(settings, "CLUSTER", changed)


def join(number: int, source: str = HERE, **fields: Any) -> BackendNode:
    name = f"w{number}"
    return register(name, secret=own_secret(name), source=source, **fields).node


def test_one_address_has_a_few_pending_nodes() -> None:
    """Beyond that 429 and no row; who is there already registers again, and other addresses are admitted."""
    for number in range(3):
        join(number)
    with pytest.raises(TooManyPending, match=r"3 nodes from 192\.0\.2\.1 await approval"):
        join(3)
    with pytest.raises(TooManyPending):
        join(3, "::ffff:192.0.2.1")
    assert join(2).revision == 2
    join(4, ELSEWHERE)
    lifecycle.approve(join(0).pk, actor=ROOT, now=NOW)
    join(3)
    assert set(BackendNode.objects.values_list("name", flat=True)) == {"w0", "w1", "w2", "w3", "w4"}


def test_all_addresses_together_have_a_few_pending_nodes() -> None:
    """A token of the administrator's own opens the way beside them, and so does approval without asking."""
    for number in range(5):
        join(number, f"192.0.2.{number}")
    with pytest.raises(TooManyPending, match="5 nodes await approval"):
        join(5, "192.0.2.99")
    _, plain = joining.make(actor=ROOT, now=NOW)
    ticket = joining.recognise(plain, own_secret("invited"), NOW)
    invited = registration.claim(
        registration.Registration(name="invited", address="gpu-1:1"),
        secret=own_secret("invited"),
        source_address=HERE,
        ticket=ticket,
    )
    registration.register_one(invited, now=NOW, auto_approve=False)
    join(6, auto_approve=True)
    assert BackendNode.objects.count() == 7


def test_nodes_that_an_administrator_refused_do_not_count() -> None:
    """They await nothing; otherwise a few rejected machines would keep out all others of their network."""
    for number in range(3):
        join(number)
    lifecycle.reject(join(0).pk, actor=ROOT, now=NOW, reason="unknown machine")
    claims.revoke(join(1).pk, actor=ROOT, now=NOW)
    for number in (3, 4):
        join(number)
    with pytest.raises(TooManyPending, match=r"3 nodes from 192\.0\.2\.1 await approval"):
        join(5)


@pytest.mark.django_db(transaction=True)
def test_many_at_once_do_not_exceed_the_limit() -> None:
    outcomes = at_once(*(lambda number=number: join(number) for number in range(8)))
    assert sum(isinstance(outcome, TooManyPending) for outcome in outcomes) == 5
    assert BackendNode.objects.count() == 3


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("http-1.1")
def test_over_http_it_is_429_with_the_reason() -> None:
    for number in range(4):
        name = f"w{number}"
        answer = api.register(api.registration(name, address="gpu-1:51100"), own_secret(name))
    assert answer.status_code == 429
    assert answer["Retry-After"] == "60"
    assert "join token" in api.message(answer)


def test_the_labels_of_a_pending_node_are_bounded() -> None:
    """As a whole, also over several registrations; an approved node may have all of 64."""
    large = {f"k{number}": "é" * 120 for number in range(8)}
    join(0, labels=large)
    with pytest.raises(
        InvalidInput, match="a node that awaits approval can have at most 2048 bytes"
    ) as refused:
        join(0, labels={"one-more": "x" * 150}, instance="2" * 32)
    assert (refused.value.status, refused.value.field) == (400, "labels")
    full = {f"k{number}": "x" * 255 for number in range(64)}
    with pytest.raises(InvalidInput):
        join(1, labels=full)
    assert (
        NodeLabel.objects.filter(node=join(1, auto_approve=True, labels=full), source="worker").count() == 64
    )


def test_the_lists_stay_small_at_the_limits() -> None:
    """500 pending nodes made the list and the feed 12 MB."""
    labels = {f"k{number}": "x" * 253 for number in range(8)}
    join(0, labels=labels)
    (row,) = json.loads(api.admin().get("/api/nodes").content)
    (raw,) = rows.read_nodes().values()
    assert labels.items() <= row["labels"].items() <= rows.render(raw)["labels"].items()
    for shown in (row, rows.render(raw)):
        assert len(json.dumps(shown)) * 500 < 2.5e6


def test_a_silent_pending_node_is_removed() -> None:
    """With an event; not one that is heard, nor one that an administrator has decided about."""
    past = clock.now() - SILENCE_LIMIT - timedelta(minutes=1)
    join(0, now=past)
    lifecycle.reject(join(1, now=past).pk, actor=ROOT, now=past, reason="unknown machine")
    claims.revoke(join(2, now=past).pk, actor=ROOT, now=past)
    lifecycle.approve(join(3, ELSEWHERE, now=past).pk, actor=ROOT, now=past)
    join(4, ELSEWHERE, now=clock.now() - timedelta(minutes=5))
    tasks.prune_timeline()
    assert set(BackendNode.objects.values_list("name", flat=True)) == {"w1", "w2", "w3", "w4"}
    event = NodeEvent.objects.get(kind="deregistered")
    assert (event.node_name, event.cause) == ("w0", "pending, and silent for a day")
