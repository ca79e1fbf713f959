"""An operation is called off on one node: API, what goes on elsewhere, and what a wave makes of it."""

from itertools import takewhile
from uuid import uuid4

import psycopg
import pytest

from localai_cluster.kit import clock
from nodes.backends import admission, intents, wave_requests
from nodes.backends.backend_requests import DELETE, INSTALL, UPGRADE, BackendRequest, RequestScope
from nodes.backends.intents import Ended
from nodes.backends.waves import Options
from nodes.models import BackendNode, PendingBackendOp
from operations.changes import events
from operations.ledger.admission import Requester
from operations.models import Operation, OperationTarget, Status, Waves
from tests.support import api, hot
from tests.support.intents import ask, claim, part

pytestmark = pytest.mark.django_db(transaction=True)


def cancel(operation: Operation, node: BackendNode) -> tuple[int, str]:
    """Status and message of the call."""
    answer = api.admin().post(f"/api/operations/{operation.id}/nodes/{node.id}/cancel")
    said = answer.json()["message"] if answer.status_code == 200 else api.message(answer)
    return answer.status_code, said


def again(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def end(*found: intents.Intent) -> None:
    outcomes = {(one.id, one.fence): (Ended(), ()) for one in found}
    assert not intents.record_outcomes(outcomes, now=clock.now())


@pytest.mark.rule("A67", "O54")
def test_one_part_ends_for_good_and_the_others_go_on() -> None:
    """The intent that no worker has begun goes; the other part decides how the operation ends."""
    one, two = hot.node("one"), hot.node("two")
    operation = ask(INSTALL, one, two)
    assert cancel(operation, one) == (200, "cancelled on one")
    gone = part(operation, one)
    assert (gone.status, gone.reason) == ("cancelled", "cancelled by static-key")
    assert gone.finished_at is not None
    assert [intent.node_id for intent in PendingBackendOp.objects.all()] == [two.id]
    assert again(operation).message == "0 of 2 nodes done, 1 cancelled"
    assert cancel(operation, one) == (409, "the part on one has ended already: cancelled")
    end(*claim())
    ended = again(operation)
    assert (ended.status, ended.message) == (Status.COMPLETED, "completed, cancelled on 1 of 2 nodes")
    assert cancel(operation, two) == (409, "the operation is completed already")


@pytest.mark.rule("A67", "O54")
def test_the_controller_of_a_cancelled_part_is_told_at_once() -> None:
    """Otherwise its attempt goes on until the next renewal of its lease."""
    one, two = hot.node("one"), hot.node("two")
    operation = ask(INSTALL, one, two)
    claim(2)
    with psycopg.connect(events.conninfo(), autocommit=True) as link:
        link.execute(f"LISTEN {events.OPERATIONS}")
        cancel(operation, one)
        link.execute(f"NOTIFY {events.OPERATIONS}, 'that is all'")
        told = list(takewhile(lambda text: text != "that is all", (n.payload for n in link.notifies())))
    assert "* cancelled" in told


@pytest.mark.rule("A67", "O54")
def test_a_cancel_counts_what_it_ended_and_what_had_finished_before() -> None:
    """A part that was cancelled before is neither."""
    nodes = [hot.node(name) for name in ("one", "two", "three", "four")]
    operation = ask(INSTALL, *nodes)
    end(*(intent for intent in claim(4) if intent.node.name == "two"))
    cancel(operation, nodes[0])
    answer = api.admin().post(f"/api/operations/{operation.id}/cancel")
    message = "2 cancelled, 1 had already finished (by static-key)"
    assert (answer.status_code, answer.json()["message"]) == (200, message)
    assert again(operation).message == message


@pytest.mark.rule("A68", "A84")
def test_a_begun_part_is_called_off_and_its_late_answer_changes_nothing() -> None:
    one, two = hot.node("one"), hot.node("two")
    operation = ask(INSTALL, one, two)
    begun = {intent.node.name: intent for intent in claim(2)}
    cancel(operation, one)
    assert part(operation, one).reason == "the worker is asked to stop"
    late = {(begun["one"].id, begun["one"].fence): (Ended(), ())}
    assert intents.record_outcomes(late, now=clock.now()) == set(late), "its lease is gone"
    assert part(operation, one).status == "cancelled"
    (called_off,) = claim()
    assert called_off.row.cancelled_at is not None
    intents.delete_cancelled({(called_off.id, called_off.fence): "the worker stopped"}, now=clock.now())
    assert part(operation, one).reason == "the worker stopped"
    assert again(operation).status == Status.PROCESSING


@pytest.mark.rule("A69")
def test_what_another_operation_shares_goes_on_there() -> None:
    one, two = hot.node("one"), hot.node("two")
    both, alone = ask(INSTALL, one, two), ask(INSTALL, one)
    cancel(both, one)
    assert part(both, one).reason == "another operation wants the same and goes on"
    assert part(alone).status == "queued"
    assert PendingBackendOp.objects.filter(node=one).count() == 1


def test_the_last_part_cancels_the_operation() -> None:
    node = hot.node()
    operation = ask(INSTALL, node)
    cancel(operation, node)
    assert (again(operation).status, again(operation).message) == ("cancelled", "cancelled by static-key")


@pytest.mark.rule("O57")
def test_what_cannot_be_cancelled_on_a_node_says_why() -> None:
    one, two = hot.node("one"), hot.node("two")
    removal = ask(DELETE, one, two)
    claim(1)
    (begun,) = OperationTarget.objects.filter(operation=removal, status="running_on_worker")
    assert cancel(removal, BackendNode.objects.get(pk=begun.node_id)) == (
        409,
        "a deletion that has begun cannot be cancelled",
    )
    assert cancel(removal, hot.node("three")) == (404, "the operation is not for this node")
    odd = api.admin().post(f"/api/operations/{removal.id}/nodes/none/cancel")
    unknown = api.admin().post(f"/api/operations/{uuid4()}/nodes/{one.id}/cancel")
    assert (odd.status_code, unknown.status_code) == (404, 404)
    assert api.message(unknown) == "no operation has this id"


def test_a_cancelled_part_of_an_open_wave_asks_before_the_next_opens() -> None:
    """It is no success: nothing more opens until somebody says so."""
    nodes = [hot.node(name) for name in ("a", "b", "c")]
    asked = RequestScope(nodes, by=Requester("ann"), waves=Options())
    operation = admission.admit(BackendRequest(UPGRADE, "echo"), asked, now=clock.now()).operation
    cancel(operation, nodes[0])
    asks = again(operation)
    assert (asks.waves, asks.status) == (Waves.ASKS, Status.PENDING)
    assert not PendingBackendOp.objects.exists()
    reason = "the upgrade was cancelled on a: continue with the next wave, or stop"
    assert part(operation, nodes[1]).reason == reason
    wave_requests.choose(operation.id, "continue", actor="ann", now=clock.now())
    assert PendingBackendOp.objects.get().node_id == nodes[1].id
    cancel(operation, nodes[2])
    end(*claim())
    ended = again(operation)
    assert (ended.status, ended.message) == ("completed", "completed, cancelled on 2 of 3 nodes")
