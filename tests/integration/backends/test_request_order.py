"""Install, upgrade and deletion of one backend on one node stand side by side and run one at a time."""

from datetime import timedelta

import pytest
from django.db import IntegrityError

from localai_cluster.kit import clock, errors
from nodes.backends import admission, backend_requests, intents, wait_reasons
from nodes.backends.intents import Ended, Intent, PutBack
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from nodes.reconcilers import intents as reconciler
from operations.ledger.admission import Requester
from operations.models import Operation
from tests.support import hot
from tests.support.fleet import at_once
from tests.support.intents import DELETE, INSTALL, KINDS, UPGRADE, ask, claim, due_now, part

pytestmark = pytest.mark.django_db(transaction=True)


def end(intent: Intent) -> None:
    """The attempt ends well."""
    outcomes = {(intent.id, intent.fence): (Ended(), ())}
    assert not intents.record_outcomes(outcomes, now=clock.now())


def ops(node: BackendNode) -> list[str]:
    """The rows of the node in the order in which they run."""
    rows = PendingBackendOp.objects.filter(node=node)
    return [row.op for row in sorted(rows, key=lambda row: row.turn)]


@pytest.mark.rule("R1.114", "O72", "R1.108")
def test_a_deletion_that_waits_is_not_replaced_by_an_upgrade() -> None:
    """Review R10: the upgrade took its place, and then nothing deleted the backend."""
    node = hot.node("away", offline_at=clock.now())
    deletion, upgrade = ask(DELETE, node), ask(UPGRADE, node)
    assert ops(node) == ["delete", "upgrade"]
    assert (part(deletion).status, part(upgrade).status) == ("queued", "queued")
    assert deletion.key == upgrade.key == f"node:{node.id}:echo"
    BackendNode.objects.update(offline_at=None)
    (first,) = claim(10)
    assert (first.row.op, first.row.operation_id) == ("delete", deletion.id)
    end(first)
    (then,) = claim(10)
    assert (then.row.op, then.row.operation_id) == ("upgrade", upgrade.id)


@pytest.mark.rule("R1.114", "O80")
def test_the_rows_of_a_backend_on_a_node_run_one_at_a_time() -> None:
    """Review R10: not beside one that runs, nor one that a worker may be busy with, nor one in its pause."""
    node, other = hot.node("one"), hot.node("other")
    for kind in KINDS:
        ask(kind, node)
    ask(DELETE, other)
    claimed = {one.row.node_id: one for one in claim(10)}
    assert {one.row.op for one in claimed.values()} == {"install", "delete"}
    running = claimed[node.id]
    assert claim(10) == []
    intents.record_overdue(running, "late", now=clock.now())
    busy = PutBack("asking again", seconds=60, busy=True)
    intents.record_outcomes({(running.id, running.fence): (busy, ())}, now=clock.now())
    assert claim(10) == []
    due_now()
    (again,) = claim(10)
    assert again.id == running.id
    failed = intents.Failed("no answer")
    intents.record_outcomes({(again.id, again.fence): (failed, ())}, now=clock.now())
    assert claim(10) == []
    due_now()
    for op in ("install", "upgrade", "delete"):
        (next_one,) = claim(10)
        assert next_one.row.op == op
        end(next_one)


@pytest.mark.rule("R1.108", "O34")
def test_an_equal_request_after_a_different_one_is_carried_out_after_it() -> None:
    """Review R10: the last request has its way, and no row stands twice."""
    node = hot.node()
    first = ask(INSTALL, node)
    deletion = ask(DELETE, node)
    last = ask(INSTALL, node)
    assert ops(node) == ["delete", "install"]
    assert last.id != first.id
    assert part(first).status == "superseded"
    assert str(last.id) in part(first).reason
    assert part(deletion).status == part(last).status == "queued"
    assert ask(INSTALL, node).id == last.id


@pytest.mark.rule("R1.108", "O34")
def test_an_equal_request_is_refused_if_the_row_has_begun_and_a_different_one_follows() -> None:
    """Review R10: joining it would answer "installed", and the deletion comes after."""
    node = hot.node()
    first = ask(INSTALL, node)
    claim()
    deletion = ask(DELETE, node)
    with pytest.raises(errors.Conflict, match=str(deletion.id)):
        ask(INSTALL, node)
    assert part(first).status == "running_on_worker"
    assert ops(node) == ["install", "delete"]


@pytest.mark.rule("R1.114")
def test_a_load_does_not_install_what_a_deletion_waits_to_remove() -> None:
    """Review R10: the load tries again when the deletion has ended."""
    node = hot.node()
    deletion = ask(DELETE, node)
    load = Operation.objects.create(kind="model_load", key="model:m#0", element="m")
    asked = backend_requests.RequestScope([node], by=Requester("system"), parent=load)
    with pytest.raises(errors.Conflict, match=str(deletion.id)):
        admission.admit(backend_requests.BackendRequest(INSTALL, "echo"), asked, now=clock.now())
    assert ops(node) == ["delete"]


@pytest.mark.rule("R1.114")
def test_the_database_refuses_two_attempts_on_one_backend_of_one_node() -> None:
    """Review R10: two controllers that see different rows as the first cannot both begin."""
    node = hot.node()
    ask(INSTALL, node)
    ask(DELETE, node)
    with pytest.raises(IntegrityError, match="intent_one_at_a_time"):
        PendingBackendOp.objects.update(lease_owner="c", lease_until=clock.now())


@pytest.mark.rule("R1.114")
def test_controllers_that_claim_at_once_take_one_row_of_a_backend_on_a_node() -> None:
    """Review R10."""
    for _ in range(5):
        BackendNode.objects.all().delete()
        node = hot.node()
        for kind in KINDS:
            ask(kind, node)
        claimed = [intent for found in at_once(*(lambda: claim(10),) * 4) for intent in found]
        assert [intent.row.op for intent in claimed] == ["install"]


@pytest.mark.rule("R1.114")
def test_a_request_that_waits_says_for_which_one() -> None:
    """Review R10."""
    node = hot.node("one")
    ask(DELETE, node)
    upgrade = ask(UPGRADE, node)
    found = part(upgrade)
    assert (found.reason, found.next_check_at) == ("waits for the removal of echo on one", None)
    entry = {"jobID": str(upgrade.id), "status": "pending", "nodes": [{"node_id": str(node.id)}]}
    wait_reasons.annotate([entry], now=clock.now())
    assert entry["waitsFor"] == "waits for the removal of echo by test on one"
    assert "queuePlace" not in entry


@pytest.mark.rule("R1.110")
def test_pending_operations_are_counted_by_backend() -> None:
    """Review R10: all rows of a backend, over all nodes and ops."""
    one, two = hot.node("one"), hot.node("two", offline_at=clock.now())
    ask(DELETE, one, two)
    ask(INSTALL, one)
    ask(INSTALL, two, backend="other")
    assert intents.count_pending_by_backend() == {"echo": 3, "other": 1}


def lists(node: BackendNode, *backends: str) -> None:
    """The node's worker has listed these."""
    BackendNode.objects.filter(pk=node.pk).update(inventory_at=clock.now())
    NodeBackend.objects.bulk_create(NodeBackend(node=node, name=name) for name in backends)
    node.refresh_from_db()


@pytest.mark.rule("O17")
def test_an_upgrade_of_what_a_reachable_node_does_not_list_is_refused() -> None:
    """Review R10."""
    one, two = hot.node("one"), hot.node("two")
    lists(one, "other")
    lists(two, "Echo")
    with pytest.raises(errors.Conflict, match="echo is not installed on one"):
        ask(UPGRADE, one, two)
    assert not PendingBackendOp.objects.exists()
    assert not Operation.objects.exists()
    ask(UPGRADE, two)
    assert ops(two) == ["upgrade"]


@pytest.mark.rule("O17")
def test_an_upgrade_waits_for_a_node_without_an_inventory_or_that_is_away() -> None:
    """Review R10: nothing is known of the one, and the list of the other is old."""
    unknown, away = hot.node("unknown"), hot.node("away", offline_at=clock.now())
    lists(away, "other")
    ask(UPGRADE, unknown, away)
    assert (ops(unknown), ops(away)) == (["upgrade"], ["upgrade"])


@pytest.mark.rule("O34")
def test_an_upgrade_under_way_is_joined_while_the_backend_is_not_listed() -> None:
    """A worker may list nothing of a backend that it is just replacing."""
    node = hot.node()
    first = ask(UPGRADE, node)
    claim()
    lists(node)
    assert ask(UPGRADE, node).id == first.id


@pytest.mark.rule("R1.118", "R1.119")
def test_a_row_behind_another_is_given_up_with_it() -> None:
    """Review R10: order among rows of a node that stays away keeps none of them for ever."""
    long_ago = clock.now() - timedelta(days=1)
    node = hot.node("away", offline_at=long_ago)
    BackendNode.objects.update(last_heartbeat=long_ago)
    deletion, upgrade = ask(DELETE, node), ask(UPGRADE, node)
    reconciler.end_stale_intents(now=clock.now())
    assert not PendingBackendOp.objects.exists()
    assert {part(one).status for one in (deletion, upgrade)} == {"error"}
