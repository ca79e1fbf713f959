"""What goes away while somebody looks at it or works on it: a node, a failure, the answer of a server."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.browser.wire import Wire
from tests.conftest import eventually
from tests.support.effort import swept

GIVEN_UP = 180_000
"""Milliseconds: the patience of a request, and some."""


@swept
@pytest.mark.rule("UI-9.5", "UI-9.6")
def test_a_server_that_answers_nothing_is_no_endless_waiting(
    window: Opener, settled: Fleet, session: Cookies, wire: Wire
) -> None:
    screen = window(wire.url, session)
    screen.expect("WebSocket connection to", "net::ERR_")
    page = screen.go(f"/app/nodes/{settled.id('fine')}")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog", name="Drain fine")
    wire.still()
    dialog.get_by_role("button", name="Drain", exact=True).click()
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog.get_by_role("button", name="Close").last).to_be_focused()
    expect(dialog).to_contain_text("The server is not responding.", timeout=GIVEN_UP)
    expect(dialog).to_contain_text("Check before you try again")
    wire.restore()
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=GIVEN_UP)
    # What was swallowed may come out again: then it was done, as the dialog said.
    settled.resume_all()


@pytest.mark.rule("UI-9.11")
def test_a_node_that_is_removed_is_asked_nothing_more(screen: Screen, fleet: Fleet) -> None:
    """The window has seen nothing to frown at: no request was refused."""
    process = fleet.worker("leaving")
    fleet.post(f"/api/nodes/{fleet.id('leaving')}/approve")
    page = screen.go(f"/app/nodes/{fleet.id('leaving')}")
    expect(page.get_by_role("button", name="Drain…")).to_be_visible()
    process.child.terminate()
    process.child.wait(20)
    # The page reads the node again after each of its changes; of a node that is gone that would be refused.
    eventually(lambda: fleet.node("leaving")["status"] == "offline", what="it is offline")
    page.reload(wait_until="networkidle")
    page.get_by_role("button", name="More actions for leaving").click()
    page.get_by_role("menuitem", name="Remove…").click()
    dialog = page.get_by_role("alertdialog")
    dialog.get_by_role("textbox").fill("leaving")
    dialog.get_by_role("button", name="Remove").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Nodes")
    expect(page.get_by_role("grid").get_by_role("link", name="leaving", exact=True)).to_have_count(0)


@pytest.mark.rule("UI-9.8")
def test_a_failure_that_is_put_away_leaves_the_focus_on_the_page(screen: Screen, settled: Fleet) -> None:
    job = settled.install("fine", "no-such-backend")
    eventually(lambda: settled.ended(job), what="it has failed")
    page = screen.go("/app/activity")
    card = page.get_by_role("region", name="Needs attention")
    card.get_by_role("button", name="Dismiss no-such-backend").press("Enter")
    expect(card).to_have_count(0)
    expect(page.locator("#main")).to_be_focused()
