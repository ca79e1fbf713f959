"""Work on a backend that waits for its node: what it says meanwhile, and when it is given up."""

import logging
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock, conf
from nodes.models import BackendNode, PendingBackendOp
from nodes.reconcilers import intents
from operations.models import Operation, TargetStatus
from tests.support import hot
from tests.support.fleet import at_once
from tests.support.intents import INSTALL, KINDS, ask, claim, part

pytestmark = pytest.mark.django_db
NOW = clock.now()


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def asked(kind: str = INSTALL, **fields: Any) -> Operation:
    """An operation on a node that is healthy when it is asked for, and then becomes this."""
    node = hot.node("one", last_heartbeat=NOW)
    operation = ask(kind, node)
    BackendNode.objects.filter(pk=node.pk).update(**fields)
    return operation


HOPELESS = ("A65", "A66", "A74", "A75", "A78", "O78", "O79", "O80", "R1.118", "R1.120", "H6")
KEPT = [
    ("A61 T-REG-137", {"offline_at": NOW, "last_heartbeat": ago(1)}),
    ("A61", {"offline_at": NOW, "last_heartbeat": ago(14.9)}),
    ("A63 T-REG-136", {"unhealthy_at": ago(14.9), "last_heartbeat": NOW}),
    ("A61", {"drained_at": NOW, "drain_is_own": True, "offline_at": NOW, "last_heartbeat": ago(1)}),
    ("A12", {}),
    ("A64 T-REG-138", {}),
    ("A64", {"last_heartbeat": ago(60)}),
]
ENDED = [
    ("A59 T-REG-134", {"drained_at": NOW}, "node one is draining"),
    ("A59", {"drained_at": NOW, "offline_at": NOW, "last_heartbeat": ago(1)}, "node one is draining"),
    (
        "A60 T-REG-133",
        {"offline_at": NOW, "last_heartbeat": ago(15.1)},
        "node one is offline; its last heartbeat was at",
    ),
    ("A60", {"offline_at": NOW, "last_heartbeat": None}, "node one is offline (CLUSTER_INSTALL_WAIT)"),
    ("A62 T-REG-135", {"unhealthy_at": NOW, "last_heartbeat": ago(15.1)}, "node one is unhealthy"),
    (
        "A62",
        {"unhealthy_at": ago(15.1), "last_heartbeat": NOW},
        "UTC: it sends heartbeats, but does not answer on the bus (CLUSTER_INSTALL_WAIT)",
    ),
    ("A60", {"unhealthy_at": ago(15.1), "offline_at": ago(1), "last_heartbeat": ago(2)}, "is offline"),
    ("A60", {"offline_at": ago(15.1), "last_heartbeat": NOW}, "node one is offline; its last heartbeat was"),
    ("A9", {"node_type": "agent"}, "is an agent node"),
    ("A9", {"approved_at": None}, "is pending approval"),
]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(fields, marks=pytest.mark.rule(*rules.split(), "O78", "O79", "R1.118", "R1.119"))
        for rules, fields in KEPT
    ],
)
@pytest.mark.rule("C13", "R4.25", "T-REC-27")
def test_what_may_still_be_done_is_kept(fields: dict[str, Any]) -> None:
    operation = asked(**fields)
    assert intents.end_stale_intents(now=NOW) == 0
    operation.refresh_from_db()
    waits = BackendNode.objects.get().status != "healthy"
    assert operation.status == ("waiting_for_nodes" if waits else "pending")
    assert PendingBackendOp.objects.count() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param(fields, reason, marks=pytest.mark.rule(*rules.split(), *HOPELESS))
        for rules, fields, reason in ENDED
    ],
)
@pytest.mark.rule("C13", "R4.25", "T-REC-27")
def test_what_has_no_future_ends_with_a_reason_that_names_the_node(
    kind: str, fields: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    operation = asked(kind, **fields)
    with caplog.at_level(logging.WARNING):
        assert intents.end_stale_intents(now=NOW) == 1
    assert "1 ended" in caplog.text
    operation.refresh_from_db()
    assert (operation.status, part(operation).status) == ("failed", "error")
    assert operation.error == part(operation).error
    assert operation.error.startswith("given up: ")
    assert reason in operation.error
    assert not PendingBackendOp.objects.exists()
    assert intents.end_stale_intents(now=NOW) == 0


@pytest.mark.rule("R1.118")
def test_work_under_way_is_left_to_its_attempt() -> None:
    """A controller holds the lease; how the attempt ends says what follows."""
    operation = asked()
    claim()
    BackendNode.objects.update(drained_at=NOW)
    assert intents.end_stale_intents(now=NOW) == 0
    assert part(operation).status == "running_on_worker"


@pytest.mark.rule("A10", "A66", "R1.39", "A78", "O80")
def test_a_part_whose_node_was_removed_ends_with_that_reason() -> None:
    """The other nodes' parts go on; the operation fails when they are through."""
    one, two = hot.node("one"), hot.node("two")
    operation = ask(INSTALL, one, two)
    node_id = two.id
    two.delete()
    assert intents.end_stale_intents(now=NOW) == 1
    found = operation.targets.get(node_id=node_id)
    assert (found.status, found.error) == ("error", "node two was removed")
    assert part(operation, one).status == "queued"
    operation.refresh_from_db()
    assert operation.status == "pending"


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("A13", "O73", "O79")
def test_two_passes_at_once_end_everything_once() -> None:
    """Of two that start together one does it, under the lock; the other leaves it alone."""
    operation = ask(INSTALL, *(hot.node(f"n{number}") for number in range(20)))
    BackendNode.objects.update(drained_at=NOW)
    found = at_once(*[partial(intents.end_stale_intents, now=NOW)] * 4)
    assert sorted(found) == [0, 0, 0, 20]
    operation.refresh_from_db()
    assert (operation.status, PendingBackendOp.objects.count()) == ("failed", 0)


@pytest.mark.rule("A65")
def test_a_pass_costs_the_same_for_any_number_of_intents() -> None:
    counts = []
    for total in (2, 40):
        nodes = [hot.node(f"{total}-{number}") for number in range(total)]
        operation = ask(INSTALL, *nodes)
        BackendNode.objects.update(offline_at=NOW, last_heartbeat=ago(20))
        with CaptureQueriesContext(connection) as queries:
            assert intents.end_stale_intents(now=NOW) == total
        counts.append(len(queries))
        operation.refresh_from_db()
        assert operation.status == "failed"
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"offline_at": NOW}, "offline"), ({"unhealthy_at": NOW}, "unhealthy")],
)
@pytest.mark.rule("R6.18")
def test_what_waits_for_its_node_says_so_and_until_when(fields: dict[str, Any], status: str) -> None:
    operation = asked(last_heartbeat=ago(1), **fields)
    intents.refresh_reasons(None, now=NOW)
    given_up = ago(1) + timedelta(seconds=conf.cluster().install_wait)
    waits = part(operation)
    assert waits.waits_for_node
    assert waits.next_check_at is None
    assert waits.reason == f"node one is {status}; it waits until {given_up:%Y-%m-%d %H:%M:%S} UTC"
    operation.refresh_from_db()
    assert (operation.status, operation.message) == ("waiting_for_nodes", waits.reason)
    with CaptureQueriesContext(connection) as queries:
        intents.refresh_reasons(None, now=NOW)
    assert not [query for query in queries if query["sql"].startswith("UPDATE")], "nothing is new"


@pytest.mark.rule("R6.18")
def test_work_for_a_node_that_is_deaf_on_the_bus_says_the_time_at_which_it_is_given_up() -> None:
    """Review R1: each heartbeat moved the time, and nothing kept to it. A lost NOTIFY changes nothing."""
    operation = asked(unhealthy_at=ago(10), last_heartbeat=NOW)
    assert intents.end_stale_intents(now=NOW) == 0
    given_up = ago(10) + timedelta(seconds=conf.cluster().install_wait)
    said = "node one is unhealthy: it sends heartbeats, but does not answer on the bus; it waits until"
    assert part(operation).reason == f"{said} {given_up:%Y-%m-%d %H:%M:%S} UTC"
    BackendNode.objects.update(last_heartbeat=given_up)
    assert intents.end_stale_intents(now=given_up - timedelta(seconds=1)) == 0
    assert part(operation).reason == f"{said} {given_up:%Y-%m-%d %H:%M:%S} UTC"
    assert intents.end_stale_intents(now=given_up) == 1


@pytest.mark.rule("R6.18")
def test_what_waits_no_more_for_its_node_says_what_it_waits_for_then() -> None:
    operation = asked(offline_at=NOW)
    intents.refresh_reasons(None, now=NOW)
    BackendNode.objects.update(offline_at=None)
    PendingBackendOp.objects.update(last_error="node one is not responding")
    intents.refresh_reasons([BackendNode.objects.get().id], now=NOW)
    found = part(operation)
    assert (found.waits_for_node, found.reason) == (False, "node one is not responding")
    assert found.next_check_at == PendingBackendOp.objects.get().next_retry_at
    operation.refresh_from_db()
    assert operation.status == "pending"


def test_what_is_said_of_other_nodes_and_of_running_work_stays() -> None:
    operation = asked(offline_at=NOW)
    before = part(operation).reason
    intents.refresh_reasons([hot.node("other").id], now=NOW)
    assert part(operation).reason == before
    BackendNode.objects.update(offline_at=None)
    claim()
    BackendNode.objects.update(offline_at=NOW)
    intents.refresh_reasons(None, now=NOW)
    assert part(operation).status == TargetStatus.RUNNING_ON_WORKER
