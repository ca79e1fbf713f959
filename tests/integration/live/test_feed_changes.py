"""`/ws/feed`: what a tab is told first, and each change within a second."""

from dataclasses import replace
from unittest.mock import patch
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from localai_cluster.kit import clock
from nodes.backends import upgrade_state
from nodes.backends.installed import Offered
from nodes.live import watch
from nodes.live import watch as watching
from nodes.registry import lifecycle
from nodes.scheduling import passes, store
from nodes.scheduling.rules import Rule
from nodes.scheduling.snapshot import RuleDecision
from operations.changes import events, feed
from operations.ledger import admission, attempts
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick, record
from operations.models import Operation
from tests.support import api, live
from tests.support.feed import (
    ANN,
    Open,
    admit,
    admitted,
    drain,
    end,
    make_node,
    process,
    sees,
    shown,
    signed_in,
    tab,
)
from tests.support.live import Tab

__all__ = ["process", "tab"]
pytestmark = pytest.mark.django_db(transaction=True)


@sync_to_async
def admit_many(count: int) -> list[Operation]:
    """In one transaction, so their changes are told at the same time however busy the machine is."""
    with transaction.atomic():
        return [admitted(f"m{number}") for number in range(count)]


async def test_hello_comes_first_and_then_everything(tab: Open) -> None:
    """Who we are, whom we take the client for; operations, nodes and notices as they are."""
    node, operation = await make_node(), await admit()
    _, headers = await signed_in()
    page = await (await tab(headers=headers)).greeted()
    assert page.seen[0] | {"at": "", "build": ""} == {
        "type": "hello",
        "at": "",
        "build": "",
        "version": "0.1.0",
        "user": {"name": "root", "role": "admin"},
    }
    assert [one["name"] for one in page.nodes.values()] == [node.name]
    assert list(page.operations) == [str(operation.id)]
    assert len(page.told("nodes.snapshot")) == len(page.told("operations.snapshot")) == 1


async def test_a_sign_of_life_comes_again_and_again(tab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a page can tell a quiet cluster from a dead socket."""
    monkeypatch.setattr(watch, "ALIVE_SECONDS", 0.05)
    page = await tab()
    await page.until(lambda: len(page.told("alive")) > 2)
    assert page.told("alive")[0]["at"] < page.told("alive")[1]["at"]


async def test_two_tabs_see_a_change_at_once(tab: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NOTIFY wakes the look, long before the next one; the patch carries only the keys that changed."""
    monkeypatch.setattr(watching, "POLL_SECONDS", 120.0)
    node = await make_node()
    pages = [await (await tab()).greeted() for _ in range(2)]
    began = clock.monotonic()
    await drain(node)
    for page in pages:
        await sees(page, lambda tab: shown(tab, node)["status"] == "draining")
    assert clock.monotonic() - began < 60
    (patch,) = pages[0].told("nodes.delta")[-1]["changed"]
    assert set(patch) == {"id", "status", "reason", "since", "drain", "revision"}
    assert patch["reason"] == "drained by ann: disk"
    assert pages[0].nodes == pages[1].nodes


async def test_nodes_come_and_go(tab: Open) -> None:
    """A new node comes whole, a removed one by its id."""
    page = await (await tab()).greeted()
    node = await make_node()
    await page.until(lambda: str(node.id) in page.nodes)
    (whole,) = page.told("nodes.delta")[-1]["changed"]
    assert whole == page.nodes[str(node.id)]
    await sync_to_async(lifecycle.deregister)(node.id, actor=ANN, now=clock.now())
    await page.until(lambda: not page.nodes)
    assert page.told("nodes.delta")[-1]["removed"] == [str(node.id)]


@pytest.mark.rule("O52", "O48", "O81", "O83")
async def test_a_failure_stays_until_anybody_dismisses_it(tab: Open) -> None:
    """Every tab sees the failure and who dismissed it, by the numbers of the ledger."""
    operation = await admit()
    pages = [await (await tab()).greeted() for _ in range(2)]
    await end()
    for page in pages:
        await sees(page, lambda tab: tab.operations[str(operation.id)]["status"] == "failed")
    await sync_to_async(api.admin().post)(f"/api/operations/{operation.id}/dismiss")
    for page in pages:
        await sees(page, lambda tab: "dismissedAt" in tab.operations[str(operation.id)])
        assert page.operations[str(operation.id)]["dismissedBy"] == "static-key"
        assert page.seq == await sync_to_async(feed.current_seq)()


async def test_changes_at_the_same_time_are_one_message(tab: Open) -> None:
    """Ten thousand a minute are no ten thousand messages; of one operation only the last state counts."""
    page = await (await tab()).greeted()
    operations = await admit_many(40)
    await page.until(lambda: len(page.operations) == 40)
    deltas = page.told("operations.delta")
    assert len(deltas) < 40
    for message in deltas:
        numbers = [one["seq"] for one in message["operations"]]
        assert numbers == sorted(numbers)
        assert len({one["jobID"] for one in message["operations"]}) == len(numbers)
        assert message["seq"] >= numbers[-1]
    assert page.seq == operations[-1].seq


async def test_a_part_that_moves_is_told_alone(tab: Open) -> None:
    """A page that was there and one that opens late show what the rows say."""
    nodes = [(uuid4(), f"n{number}") for number in range(3)]
    asked = admission.OperationRequest(
        "backend_install", key="k", element="e", by=Requester("x"), targets=nodes
    )
    admitted = await sync_to_async(admission.admit)(asked, now=clock.now())
    id = str(admitted.operation.id)
    page = await (await tab()).greeted()
    (work,) = await sync_to_async(attempts.claim)("t", now=clock.now(), lease=30, limit=1)
    tick = Tick("downloading", current_bytes=3, total_bytes=12, percentage=25, node_id=nodes[1][0])
    await sync_to_async(record)({(work.id, work.fence): [tick]}, now=clock.now())

    def moved(tab: Tab) -> list[float]:
        return [part["percentage"] for part in tab.operations[id]["nodes"]]

    await sees(page, lambda tab: moved(tab) == [0, 25, 0])
    late = await (await tab()).greeted()
    assert page.operations[id] == late.operations[id]
    await sync_to_async(record)({(work.id, work.fence): [replace(tick, percentage=50)]}, now=clock.now())
    for one in (page, late):
        await sees(one, lambda tab: moved(tab) == [0, 50, 0])
        (last,) = one.told("operations.delta")[-1]["operations"]
        whole = id not in one.told("operations.delta")[-1].get("partial", ())
        assert len(last["nodes"]) == (3 if whole else 1)
    assert any(message.get("partial") == [id] for message in page.told("operations.delta"))


async def test_the_look_rests_while_no_one_watches(tab: Open, process: watching.NodeFeed) -> None:
    """One look for all; none without a tab; the next tab sees the present."""
    node = await make_node()
    pages = [await (await tab()).greeted() for _ in range(3)]
    assert process.watchers == 3
    for page in pages:
        await page.socket.disconnect()
    assert process.watchers == 0
    with patch.object(process, "_read", wraps=process._read) as read:
        await drain(node)
        page = await (await tab()).greeted()
    assert read.call_count == 1
    assert shown(page, node)["status"] == "draining"


@pytest.mark.rule("A51", "O101")
async def test_a_tab_hears_that_lists_have_changed_and_how_the_check_stands(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, by a NOTIFY; the revision says when to read the lists again."""
    monkeypatch.setattr(watching, "POLL_SECONDS", 120.0)
    page = await (await tab()).greeted()
    await page.until(lambda: page.told("backends"))
    first = page.told("backends")[-1]
    assert (first["checked_at"], first["checking"], first["problems"]) == (None, False, {})
    await sync_to_async(upgrade_state.request_check_after_change)()
    await page.until(lambda: page.told("backends")[-1]["checking"])
    assert page.told("backends")[-1]["revision"] == first["revision"] + 1
    now = clock.now()
    mine = await sync_to_async(upgrade_state.claim)("x", now=now)
    assert mine is not None
    finish = sync_to_async(upgrade_state.finish)
    await finish(mine, {"minilm": Offered("2")}, problems={"local": "gone"}, galleries="", now=now)
    await page.until(lambda: not page.told("backends")[-1]["checking"])
    last = page.told("backends")[-1]
    assert (last["revision"], last["problems"]) == (first["revision"] + 2, {"local": "gone"})
    assert live.wrong_with(last) == []


@pytest.mark.rule("UW10", "UI-6.2")
async def test_a_tab_hears_that_rules_or_what_a_pass_made_of_them_have_changed(
    tab: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once for a rule that was set or deleted; with the next look for what a pass writes."""
    monkeypatch.setattr(watching, "POLL_SECONDS", 120.0)
    page = await (await tab()).greeted()
    await page.until(lambda: page.told("rules"))
    set_rule, record = sync_to_async(store.set_rule), sync_to_async(passes.write_results)
    await set_rule(Rule("m", min_replicas=1), clock.now())
    await page.until(lambda: len(page.told("rules")) == 2)
    (demand,) = await sync_to_async(passes.read_desired_states)()
    await record([RuleDecision("m", 1, 0, 0, "no node")], {"m": demand}, clock.now())
    await sync_to_async(events.notify)(events.NODES, "")  # as the next second would
    await page.until(lambda: len(page.told("rules")) == 3)
    await sync_to_async(store.delete_rule)("m", clock.now())
    await page.until(lambda: len(page.told("rules")) == 4)
    revisions = [told["revision"] for told in page.told("rules")]
    assert revisions[3] == revisions[0]
    assert len(set(revisions)) == 3
