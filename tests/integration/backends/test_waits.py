"""What waiting work says: its place in the queue of its node, the node, or the work it waits for."""

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock
from nodes.backends import admission, wait_reasons
from nodes.backends.backend_requests import INSTALL, UPGRADE, BackendRequest, RequestScope
from nodes.backends.waves import Options
from operations.ledger import admission as ledger
from operations.ledger.admission import Requester
from operations.models import Operation
from tests.support import api, hot
from tests.support.intents import ask, claim

pytestmark = pytest.mark.django_db(transaction=True)


def told(operation: Operation) -> dict[str, Any]:
    """The operation as the API shows it."""
    answer = api.admin().get(f"/api/operations/{operation.id}")
    assert answer.status_code == 200, answer.content
    found: dict[str, Any] = answer.json()
    return found


def test_a_place_counts_what_the_node_carries_out_at_a_time() -> None:
    """Four run; the others stand in line in the order in which they are claimed."""
    node = hot.node("gpu-1")
    made = [ask(INSTALL, node, backend=f"b{number}") for number in range(7)]
    assert told(made[0])["waitsFor"] == "waits for a controller"
    assert len(claim(7)) == 4
    waiting = [told(one) for one in made[4:]]
    assert [one["queuePlace"] for one in waiting] == [1, 2, 3]
    assert waiting[2]["waitsFor"] == "3rd in the queue of node gpu-1 (4 of 4 running)"
    assert waiting[2]["nodes"][0]["waitsFor"] == waiting[2]["waitsFor"]
    assert "waitsFor" not in told(made[0])


def test_a_node_that_is_away_is_named_with_the_time() -> None:
    away = hot.node("gpu-2", offline_at=clock.now())
    shown = told(ask(INSTALL, away))
    assert shown["waitsFor"] == "waits for node gpu-2, which is offline"
    assert shown["waitsSince"] == away.offline_at.isoformat()


def test_a_part_of_an_open_wave_names_the_work_in_its_way() -> None:
    one, two = hot.node("a"), hot.node("b")
    now = clock.now()
    waves = RequestScope([one, two], by=Requester("ann"), waves=Options(canary=True))
    upgrade = admission.admit(BackendRequest(UPGRADE, "echo"), waves, now=now).operation
    admission.admit(BackendRequest(INSTALL, "echo"), RequestScope([two], by=Requester("bob")), now=now)
    admission.cancel(upgrade.id, node_id=one.id, actor="ann", now=now)
    api.admin().post(f"/api/operations/{upgrade.id}/waves", {"choice": "continue"})
    parts = {part["node_name"]: part for part in told(upgrade)["nodes"]}
    assert parts["b"]["waitsFor"] == "waits for the install of echo by bob on b"


def test_what_is_leased_as_a_whole_stands_in_one_queue() -> None:
    now = clock.now()
    loads = [
        ledger.admit(
            ledger.OperationRequest("model_load", key=f"m{n}", element="m", by=Requester("x")), now=now
        )
        for n in range(2)
    ]
    places = {told(load.operation)["waitsFor"] for load in loads}
    assert places == {"1st in the queue of the controllers", "2nd in the queue of the controllers"}


def test_the_list_costs_the_same_for_any_number() -> None:
    def statements() -> int:
        with CaptureQueriesContext(
            connection,
        ) as captured:
            assert api.admin().get("/api/operations").status_code == 200
        return len(captured)

    nodes = [hot.node(name) for name in ("a", "b", "c")]
    ask(INSTALL, *nodes)
    few = statements()
    for number in range(12):
        ask(INSTALL, *nodes, backend=f"b{number}")
    assert statements() == few


@pytest.mark.rule("http-3.2")
def test_one_operation_is_there_long_after_its_end_and_an_unknown_one_is_said_to_be() -> None:
    node = hot.node()
    operation = ask(INSTALL, node)
    admission.cancel(operation.id, actor="ann", now=clock.now())
    assert (told(operation)["status"], told(operation)["nodes"][0]["status"]) == ("cancelled", "cancelled")
    for unknown in (str(node.id), "none", "%00"):
        answer = api.admin().get(f"/api/operations/{unknown}")
        assert (answer.status_code, api.message(answer)) == (404, "no operation has this id")


@pytest.mark.parametrize(
    ("number", "word"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (23, "23rd")],
)
def test_ordinals(number: int, word: str) -> None:
    assert wait_reasons.ordinal(number) == word
