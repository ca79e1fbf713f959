"""`manage.py operations`: what it prints, what it does, and what it says to requests that cannot be met."""

import os
import pwd
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.kit import clock
from nodes.backends import admission, intents
from nodes.backends.backend_requests import INSTALL, UPGRADE, BackendRequest, RequestScope
from nodes.backends.intents import Ended, Failed
from nodes.backends.waves import Options
from nodes.models import BackendNode, PendingBackendOp
from operations.ledger import admission as ledger
from operations.ledger import attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.management import following, operation_texts
from operations.models import Event, Operation, OperationTarget, Waves
from tests.support import api, command_line, hot
from tests.support.terminal import Screen

pytestmark = pytest.mark.django_db(transaction=True)
run = partial(command_line.run, "operations")
told = partial(command_line.told, "operations")
refused = partial(command_line.refused, "operations")

ME = pwd.getpwuid(os.getuid()).pw_name


def ask(*nodes: BackendNode, kind: str = INSTALL, backend: str = "echo", **more: Any) -> Operation:
    asked = RequestScope(list(nodes), by=Requester("ann", client_address="10.0.0.9"), **more)
    return admission.admit(BackendRequest(kind, backend), asked, now=clock.now()).operation


def settle(**outcomes: Any) -> None:
    """A controller takes up what is due, and this becomes of it by node."""
    for intent in intents.claim("controller", now=clock.now(), lease=60, limit=100):
        if (found := outcomes.get(intent.node.name)) is not None:
            assert not intents.record_outcomes({(intent.id, intent.fence): (found, ())}, now=clock.now())


def again(operation: Operation) -> Operation:
    return Operation.objects.get(pk=operation.pk)


def failure(*names: str) -> Operation:
    """An operation that failed on these nodes."""
    operation = ask(*(hot.node(name) for name in names))
    settle(**{name: Ended(error=f"disk of {name} full") for name in names})
    return again(operation)


def load(key: str = "model:m") -> Operation:
    """An operation without parts, as loads are."""
    request = ledger.OperationRequest("model_load", key=key, element="m", by=Requester("ann"))
    return ledger.admit(request, now=clock.now()).operation


def test_the_list_shows_what_waits_runs_and_failed() -> None:
    failed = failure("a", "b")
    running = ask(hot.node("c"), backend="llama-cpp")
    settle()
    waiting = load()
    head, *lines = run("list").splitlines()
    assert head.split()[:4] == ["ID", "WHAT", "OF", "WHERE"]
    by_id = {line.split()[0]: line for line in lines}
    assert by_id.keys() == {str(one.id)[:8] for one in (failed, running, waiting)}
    of_failed = by_id[str(failed.id)[:8]]
    assert "backend install  echo" in of_failed
    assert "2 nodes  failed" in of_failed
    assert "a: disk of a full; b: disk of b full" in of_failed
    assert "c        running" in by_id[str(running.id)[:8]]
    assert "model load" in by_id[str(waiting.id)[:8]]
    assert told("list") == api.admin().get("/api/operations").json()


def test_the_inbox_holds_failures_until_they_are_dismissed() -> None:
    assert run("inbox") == "the inbox is empty\n"
    assert run("list") == "no operations\n"
    operation = failure("a")
    ask(hot.node("b"))
    assert told("inbox") == api.admin().get("/api/operations/inbox").json()
    assert [line.split()[0] for line in run("inbox").splitlines()[1:]] == [str(operation.id)[:8]]
    assert told("dismiss", str(operation.id), "--comment", "known") == {
        "success": True,
        "message": "operation dismissed",
    }
    row = again(operation)
    assert (row.dismissed_by, row.dismissed_comment) == (ME, "known")
    assert run("inbox") == "the inbox is empty\n"


def test_history_lists_what_has_ended_with_the_filters_of_rest() -> None:
    assert run("history") == "nothing has ended that matches\n"
    here = failure("a", "b")
    run("dismiss", str(here.id))
    there = ask(hot.node("c"), backend="llama-cpp")
    settle(c=Ended())
    head, *lines = run("history").splitlines()
    assert head.split()[:5] == ["ID", "WHAT", "OF", "WHERE", "OUTCOME"]
    assert [line.split()[0] for line in lines] == [str(one.id)[:8] for one in (there, here)]
    assert "backend install  echo" in lines[1]
    assert "failed" in lines[1]
    assert "a: disk of a full; b: disk of b full" in lines[1]
    rest = api.admin().get("/api/operations/history").json()
    assert told("history") == rest
    for arguments in (
        ("--node", "a"),
        ("--backend", "echo"),
        ("--outcome", "failed", "--kind", "backend_install"),
        ("--actor", "ann", "--to", rest["operations"][1]["finishedAt"]),
    ):
        assert [entry["jobID"] for entry in told("history", *arguments)["operations"]] == [str(here.id)]
    gone = OperationTarget.objects.get(operation=there).node_id
    BackendNode.objects.get(pk=gone).delete()
    assert told("history", "--node", str(gone))["operations"] == rest["operations"][:1]


def test_history_goes_on_where_a_list_ended() -> None:
    for name in ("a", "b"):
        ask(hot.node(name), backend=name)
        settle(**{name: Ended()})
    *_, line, hint = run("history", "--limit", "1").splitlines()
    assert line.split()[3] == "b"
    cursor = hint.removeprefix("older ones: --cursor ")
    *_, line = run("history", "--limit", "1", "--cursor", cursor).splitlines()
    assert line.split()[3] == "a"
    assert refused("history", "--limit", "0").startswith("limit: ")
    assert refused("history", "--from", "yesterday").startswith("from: ")
    assert "there is no node" in refused("history", "--node", "w9")


def test_only_a_failure_is_dismissed() -> None:
    operation = ask(hot.node("a"))
    assert "the operation is pending: only a failure can be dismissed" in refused(
        "dismiss", str(operation.id)
    )
    assert "at most 500 characters" in refused("dismiss", str(operation.id), "--comment", "x" * 501)


def test_show_tells_the_request_and_every_part() -> None:
    nodes = [hot.node(name) for name in ("a", "b", "c")]
    operation = ask(*nodes, all_nodes=True)
    settle(a=Ended(error="no\x1b[31m"), b=Failed("no answer"))
    row = PendingBackendOp.objects.get(node__name="c")
    tick = Tick("downloading", "weights", 2**20, 2**22, 25, "weights", nodes[2].id, "c")
    intents.record({(row.id, row.fence): [tick]}, now=clock.now())
    text = run("show", str(operation.id)[:8])
    facts = {
        line.split("  ", 1)[0]: line.split("  ", 1)[1].strip() for line in text.splitlines() if "  " in line
    }
    assert facts["what"] == "backend install of echo"
    assert facts["where"] == "all (3 nodes)"
    assert facts["state"] == "running"
    assert (facts["asked by"], facts["from"]) == ("ann", "10.0.0.9")
    assert facts["a"].split() == ["failed", "0", "%", "-", "-", "no?[31m"]
    assert facts["b"].startswith("trying again  0 %")
    assert "no answer (next attempt 20" in facts["b"]
    assert facts["c"].split() == ["downloading", "25", "%", "1.0", "MiB", "of", "4.0", "MiB", "-", "weights"]
    entry = next(e for e in api.admin().get("/api/operations").json()["operations"])
    assert told("show", str(operation.id)) == entry


@pytest.mark.parametrize(
    ("part", "state"),
    [
        ({"reason": "queued"}, "queued"),
        ({"reason": "node a is offline"}, "waiting"),
        ({"reason": "no answer", "attempts": 1, "nextLookAt": "2026-08-22T09:00:00Z"}, "trying again"),
        ({"reason": "node a is offline", "attempts": 1}, "waiting"),
        ({"reason": "node a is offline", "overdueSince": "2026-08-22T09:00:00Z"}, "running on the worker"),
    ],
    ids=["queued", "waits", "tries again", "waits after an attempt", "may still run"],
)
def test_a_part_that_rests_says_for_what(part: dict[str, Any], state: str) -> None:
    """As the pages say it: after an attempt it still waits for a node that is away."""
    assert operation_texts.target_state({"status": "queued", **part}) == state


def test_show_of_many_parts_costs_two_queries_more() -> None:
    """The operation, and its parts at once."""

    def costs(operation: Operation) -> int:
        with CaptureQueriesContext(connection) as seen:
            run("show", str(operation.id))
        return len(seen)

    few = costs(ask(hot.node("a"), backend="one"))
    assert costs(ask(*(hot.node(f"n{number}") for number in range(20)))) == few


def test_show_follows_to_the_end_and_an_ended_one_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "READ_INTERVAL", 600.0)
    operation = ask(hot.node("a"))
    screen = Screen(("a: queued", lambda: settle(a=Ended())))
    call_command("operations", "show", str(operation.id), "--follow", stdout=screen)
    assert screen.getvalue().splitlines()[-1] == f"operation {str(operation.id)[:8]} completed"
    assert told("show", str(operation.id), "--follow")["status"] == "completed"
    failed = failure("b")
    with pytest.raises(CommandError, match="b: failed: disk of b full"):
        run("show", str(failed.id), "--follow")


def test_an_operation_without_parts_is_followed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "READ_INTERVAL", 600.0)
    operation = load()

    def fail() -> None:
        (mine,) = attempts.claim("a", now=clock.now(), lease=60, limit=1)
        attempts.finish(mine.id, mine.fence, Event.FAIL, now=clock.now(), error="no node has room")

    screen = Screen(("queued", fail))
    with pytest.raises(CommandError) as caught:
        call_command("operations", "show", str(operation.id), "--follow", stdout=screen)
    id = str(operation.id)[:8]
    hint = f"`manage.py operations retry {id}` tries again"
    assert str(caught.value) == f"operation {id} failed: no node has room; {hint}"


def test_a_record_that_is_cleared_ends_the_command() -> None:
    operation = ask(hot.node("a"))
    screen = Screen(("a: queued", lambda: Operation.objects.all().delete()))
    with pytest.raises(CommandError, match="has been cleared"):
        call_command("operations", "show", str(operation.id), "--follow", stdout=screen)


@pytest.mark.rule("A67")
def test_cancel_is_final_for_parts_and_whole() -> None:
    operation, of_a_model = ask(hot.node("a"), hot.node("b")), load()
    assert run("cancel", str(operation.id)) == f"operation {operation.id}: operation cancelled\n"
    assert (again(operation).status, again(operation).message) == ("cancelled", f"cancelled by {ME}")
    assert not PendingBackendOp.objects.exists()
    assert told("cancel", str(of_a_model.id)) == {"success": True, "message": "operation cancelled"}
    assert again(of_a_model).status == "cancelled"
    assert refused("cancel", str(operation.id)) == "the operation is cancelled already"


def test_retry_asks_again_for_what_failed() -> None:
    operation = failure("a", "b")
    text = run("retry", str(operation.id), "--node", "b")
    newer = Operation.objects.latest("created_at")
    shown = f"`manage.py operations show {newer.id} --follow` shows it"
    assert text == f"started again as operation {newer.id}; {shown}\n"
    assert list(OperationTarget.objects.filter(operation=newer).values_list("node_name", flat=True)) == ["b"]
    assert newer.actor == ME
    assert again(operation).dismissed_at is None, "the failure of a still waits for a decision"
    answer = told("retry", str(operation.id))
    assert answer["jobID"] != str(newer.id)
    assert again(operation).dismissed_by == ME
    assert UUID(answer["jobID"]) == Operation.objects.latest("created_at").id


def test_retry_tries_what_waits_at_once() -> None:
    operation = ask(hot.node("a"))
    settle(a=Failed("no answer"))
    later = PendingBackendOp.objects.get().next_retry_at
    assert run("retry", str(operation.id)) == f"operation {operation.id}: tried at once\n"
    assert PendingBackendOp.objects.get().next_retry_at < later
    assert told("retry", str(operation.id))["deduplicated"] is True


def test_nothing_to_retry_is_one_line() -> None:
    operation = ask(hot.node("a"))
    settle(a=Ended())
    assert refused("retry", str(operation.id)) == "no part of this operation can be tried again"
    assert "there is no node 'w9'" in refused("retry", str(operation.id), "--node", "w9")
    assert refused("retry", str(load().id)) == "the operation is pending"


@pytest.fixture
def asking() -> Operation:
    """An upgrade in waves whose canary failed."""
    nodes = [hot.node(name) for name in ("a", "b", "c")]
    operation = ask(*nodes, kind=UPGRADE, waves=Options())
    settle(a=Ended(error="no such image"))
    return again(operation)


def test_an_upgrade_in_waves_is_continued(asking: Operation) -> None:
    assert "waves" in run("show", str(asking.id))
    assert told("continue", str(asking.id)) == {"success": True, "message": "goes on"}
    row = again(asking)
    assert (row.waves, row.payload["waves"]["choices"][0]["by"]) == (Waves.CONTINUED, ME)
    assert "no wave has failed" in refused("continue", str(asking.id))
    run("continue", str(asking.id), "--confirm-last", "m")
    assert again(asking).payload["waves"]["last_replicas"] == ["m"]


def test_an_upgrade_in_waves_is_stopped(asking: Operation) -> None:
    assert run("stop", str(asking.id)) == f"operation {asking.id}: stopped\n"
    assert again(asking).status == "failed"
    assert refused("stop", str(asking.id)) == "the operation is failed"


def test_unknown_and_ambiguous_ids_say_how_to_find_the_right_one() -> None:
    ids = ["abcd0000-0000-4000-8000-000000000000", "abcd1111-0000-4000-8000-000000000000"]
    for number, id in enumerate(ids):
        Operation.objects.create(id=id, kind="model_load", key=str(number), element=f"m{number}")
    hint = "`manage.py operations list` and `inbox` list their ids"
    for verb in ("show", "cancel", "retry", "dismiss", "continue", "stop"):
        for unknown in ("ffff", "%", "", "x" * 100):
            assert refused(verb, unknown) == f"there is no operation {unknown[:36]!r}; {hint}"
        assert refused(verb, "abcd") == "'abcd' is an id prefix of several operations; use a longer prefix"
    assert told("show", "ABCD1")["id"] == "m1"
