"""Upgrades in waves: a failed wave asks, and what people choose, confirm and cancel."""

from datetime import timedelta
from typing import Any

import pytest

from localai_cluster.kit import clock, errors
from nodes.backends import admission, intents, wave_requests
from nodes.backends.backend_requests import UPGRADE, BackendRequest, RequestScope
from nodes.backends.intents import Ended, PutBack
from nodes.models import PendingBackendOp
from nodes.reconcilers import intents as reconciler
from operations.ledger.admission import Requester
from operations.models import Status, Waves
from tests.support import api
from tests.support.waves import again, asked, claimed, failed_canary, fleet, settled, states, story

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_failed_wave_stops_the_rest_and_asks() -> None:
    operation = failed_canary()
    reason = "the upgrade failed on a: continue with the next wave, or stop"
    assert (operation.status, operation.waves) == (Status.PENDING, Waves.ASKS)
    assert operation.message == f"wave 2 of 3: 0 of 3 nodes done, 1 failed; {reason}"
    assert story(operation)["c"] == (2, "queued", reason)
    assert not PendingBackendOp.objects.exists()
    reconciler.end_stale_intents(now=clock.now() + timedelta(hours=1))
    assert again(operation).waves == Waves.ASKS, "time alone decides nothing"


def test_stop_after_a_failed_canary_ends_the_rest_as_cancelled_and_the_operation_as_failed() -> None:
    operation = failed_canary()
    wave_requests.choose(operation.id, "stop", actor="bob", now=clock.now())
    ended = again(operation)
    assert (ended.status, ended.error) == (Status.FAILED, "a: no such image")
    assert ended.waves == Waves.STOPPED
    assert story(operation)["b"][1:] == ("cancelled", "stopped by bob")
    with pytest.raises(errors.Conflict, match="the operation is failed"):
        wave_requests.choose(operation.id, "continue", actor="bob", now=clock.now())


def test_continue_after_a_failed_canary_opens_the_next_wave_and_asks_again_after_another_failure() -> None:
    operation = failed_canary()
    wave_requests.choose(operation.id, "continue", actor="bob", now=clock.now())
    assert (again(operation).waves, again(operation).open_wave) == (Waves.CONTINUED, 1)
    assert story(operation)["c"] == (2, "queued", "waits for wave 3 of 3")
    settled(claimed()["b"], outcome=Ended(error="full"))
    assert again(operation).waves == Waves.ASKS
    wave_requests.choose(operation.id, "continue", actor="eve", now=clock.now())
    settled(claimed()["c"])
    ended = again(operation)
    assert (ended.status, ended.error) == (Status.FAILED, "a: no such image; b: full")
    assert states(operation)["c"] == "success"
    made = [(said["choice"], said["by"]) for said in ended.payload["waves"]["choices"]]
    assert made == [("continue", "bob"), ("continue", "eve")]


def test_the_last_wave_fails_without_a_question() -> None:
    operation = asked(fleet("a", "b"))
    settled(claimed()["a"])
    settled(claimed()["b"], outcome=Ended(error="full"))
    assert (again(operation).status, again(operation).waves) == (Status.FAILED, Waves.RUNNING)


def test_stop_while_a_wave_runs_lets_that_wave_end() -> None:
    operation = asked(fleet("a", "b", "c"))
    canary = claimed()["a"]
    wave_requests.choose(operation.id, "stop", actor="bob", now=clock.now())
    assert states(operation) == {"a": "running_on_worker", "b": "cancelled", "c": "cancelled"}
    settled(canary)
    assert again(operation).status == Status.COMPLETED
    assert not PendingBackendOp.objects.exists()


def test_what_cannot_be_chosen_is_refused() -> None:
    now = clock.now()
    nodes = fleet("a", "b")
    plain = admission.admit(
        BackendRequest(UPGRADE, "other"), RequestScope(nodes, by=Requester("ann")), now=now
    ).operation
    with pytest.raises(errors.Conflict, match="does not go in waves"):
        wave_requests.choose(plain.id, "stop", actor="bob", now=now)
    operation = asked(nodes)
    with pytest.raises(errors.Conflict, match="no wave has failed"):
        wave_requests.choose(operation.id, "continue", actor="bob", now=now)
    wave_requests.choose(operation.id, "stop", actor="bob", now=now)
    with pytest.raises(errors.Conflict, match="was stopped"):
        wave_requests.choose(operation.id, "stop", actor="bob", now=now)


def test_cancel_in_wave_2_is_final() -> None:
    operation = asked(fleet("a", "b", "c"))
    settled(*claimed().values())
    second = claimed()
    admission.cancel(operation.id, actor="bob", now=clock.now())
    assert states(operation) == {"a": "success", "b": "cancelled", "c": "cancelled"}
    late = intents.record_outcomes({(second["b"].id, second["b"].fence): (Ended(), ())}, now=clock.now())
    assert late, "the late answer changes nothing"
    called_off = claimed()["b"]
    intents.delete_cancelled({(called_off.id, called_off.fence): "the worker stopped"}, now=clock.now())
    assert (again(operation).status, again(operation).open_wave) == (Status.CANCELLED, 1)
    assert not PendingBackendOp.objects.exists()
    reconciler.end_stale_intents(now=clock.now() + timedelta(hours=1))
    assert not PendingBackendOp.objects.exists()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"waves": {"max_unavailable": 0}}, "waves"),
        ({"waves": {"max_unavailable": "1"}}, "waves"),
        ({"waves": {"max_unavailable": None, "canary": 7}}, "waves"),
        ({"waves": {"max_unavailable": True}}, "waves"),
        ({"waves": {"max_unavailable": "0%"}}, "waves"),
        ({"waves": {"max_unavailable": "101%"}}, "waves"),
        ({"waves": {"pause_seconds": -1}}, "waves"),
        ({"waves": {"stop_at_failures": 0}}, "waves"),
        ({"waves": {"canary": "perhaps"}}, "waves"),
        ({"waves": []}, "waves"),
        ({"waves": {}, "last_replicas": "m"}, "last_replicas"),
        ({"waves": {}, "last_replicas": [1]}, "last_replicas"),
        ({"last_replicas": ["m"]}, "last_replicas"),
    ],
)
def test_what_is_wrong_with_waves_is_named(body: dict[str, Any], field: str) -> None:
    fleet("a")
    refused = api.admin().post("/api/backends/upgrade/echo", body)
    assert (refused.status_code, refused.json()["field"]) == (400, field)


def test_the_choice_is_made_by_the_api() -> None:
    operation = failed_canary()
    url = f"/api/operations/{operation.id}/waves"
    assert api.admin().post(url, {"choice": "later"}).status_code == 400
    assert api.admin().post(url, {}).status_code == 400
    assert api.admin().post(url, {"choice": "continue"}).json() == {"success": True, "message": "continued"}
    assert claimed().keys() == {"b"}
    assert api.admin().post(url, {"choice": "continue"}).status_code == 409
    assert api.admin().post(url, {"choice": "stop"}).json() == {"success": True, "message": "stopped"}
    assert api.admin().post("/api/operations/nope/waves", {"choice": "stop"}).status_code == 404


def test_a_confirmation_that_comes_later_is_kept_and_the_part_looked_at_now() -> None:
    a, _ = fleet("a", "b")
    operation = asked([a])
    settled(*claimed().values(), outcome=PutBack("it would stop the last replica of m", 15))
    assert claimed() == {}
    answer = api.admin().post(
        f"/api/operations/{operation.id}/waves", {"choice": "continue", "last_replicas": ["m"]}
    )
    assert answer.status_code == 200, answer.content
    assert wave_requests.confirmed_in(again(operation)) == ("m",)
    assert claimed().keys() == {"a"}


def test_a_cancel_that_meets_the_opening_of_a_wave_leaves_no_intent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intents were read before the wave opened: the cancel begins again."""
    operation = asked(fleet("a", "b", "c"))
    really = admission._running_intents
    read: list[Any] = []

    def running(*asked: Any) -> Any:
        found = really(*asked)
        if not read:
            settled(*claimed().values())  # the canary ends here, and the next wave opens
        read.append(found)
        return found

    monkeypatch.setattr(admission, "_running_intents", running)
    admission.cancel(operation.id, actor="ann", now=clock.now())
    assert again(operation).status == "cancelled"
    assert not PendingBackendOp.objects.exists()
    assert len(read) > 2


def test_the_question_names_five_nodes_and_counts_the_others() -> None:
    """Each target whose wave is not open stores the text."""
    operation = asked(fleet(*"abcdefgh"), canary=False, max_unavailable=7)
    settled(*claimed().values(), outcome=Ended(error="full"))
    reason = "the upgrade failed on a, b, c, d, e and 2 more: continue with the next wave, or stop"
    assert story(operation)["h"] == (2, "queued", reason)
    (listed,) = api.admin().get("/api/operations").json()["operations"]
    assert listed["waves"]["count"] == 2
