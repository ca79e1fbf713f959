"""The list of nodes: one that waits for approval, what is done to many, a question that is cancelled."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.browser.test_operations import AT_ONCE


def row_of(page: Page, name: str) -> Locator:
    """The row of the node with this name."""
    link = page.get_by_role("link", name=name, exact=True)
    return page.get_by_role("row").filter(has=link)


@pytest.fixture
def newcomer(fleet: Fleet) -> Iterator[str]:
    """A fourth worker that no one has approved."""
    process = fleet.worker("newcomer")
    yield "newcomer"
    process.child.terminate()
    process.child.wait(20)
    fleet.remove("newcomer")


@pytest.fixture
def all_resumed(fleet: Fleet) -> Iterator[Fleet]:
    """The cluster with every node in service again afterwards."""
    yield fleet
    fleet.resume_all()


@pytest.mark.rule("UI-9.13", "UI-3.4", "UI-3.9", "E31", "UW18")
def test_a_pending_worker_is_approved_and_turns_healthy(screen: Screen, fleet: Fleet, newcomer: str) -> None:
    page = screen.go("/app/nodes")
    page.get_by_role("button", name=re.compile("^Review .* awaiting approval")).click()
    card = page.get_by_test_id(f"pending-{fleet.id(newcomer)}")
    ((fingerprint,),) = fleet.cluster.rows("SELECT fingerprint FROM backend_nodes WHERE name = %s", newcomer)
    expect(card).to_contain_text(fingerprint[:4])
    expect(card).to_contain_text("127.0.0.1")
    expect(page.get_by_text("receives your models and prompts").first).to_be_visible()
    page.evaluate("window.markOfTheTest = true")
    card.get_by_role("button", name="Approve newcomer").click()
    page.get_by_role("dialog").get_by_role("button", name="Approve", exact=True).click()
    expect(card).to_have_count(0)
    expect(row_of(page, newcomer)).to_contain_text("healthy")
    assert page.evaluate("window.markOfTheTest === true")


@pytest.mark.rule("UI-3.15", "UI-9.1", "UW4")
def test_many_are_drained_at_once_and_the_question_names_them(
    window: Opener, all_resumed: Fleet, session: Cookies
) -> None:
    page = window(all_resumed.webs[0].url, session).go("/app/nodes")
    other = window(all_resumed.webs[1].url, session).go("/app/nodes")
    expect(row_of(other, "fine")).to_contain_text("healthy")
    for name in ("fine", "slow"):
        page.get_by_role("checkbox", name=f"Select {name}").check()
    page.get_by_role("toolbar", name="Selected nodes").get_by_role("button", name="Drain…").click()
    dialog = page.get_by_role("dialog", name="Drain 2 nodes")
    for name in ("fine", "slow"):
        expect(dialog.get_by_text(name, exact=True)).to_be_visible()
    dialog.get_by_label("Reason").fill("new disks")
    dialog.get_by_role("button", name="Drain 2 nodes").click()
    expect(dialog).to_contain_text("2 nodes set to draining")
    for name in ("fine", "slow"):
        expect(row_of(other, name)).to_contain_text("draining", timeout=AT_ONCE)
        expect(row_of(other, name)).to_contain_text("new disks", timeout=AT_ONCE)
    dialog.get_by_role("button", name="Close").last.click()
    for name in ("fine", "slow"):  # the question names the nodes that this window knows to be draining
        expect(row_of(page, name)).to_contain_text("draining")
    page.get_by_role("toolbar", name="Selected nodes").get_by_role("button", name="Resume…").click()
    dialog = page.get_by_role("dialog", name="Resume 2 nodes")
    dialog.get_by_role("button", name="Resume 2 nodes").click()
    expect(dialog).to_contain_text("2 nodes resumed")
    dialog.get_by_role("button", name="Close").last.click()
    expect(row_of(page, "slow")).to_contain_text("healthy")


@pytest.mark.rule("UI-3.14", "E39")
def test_cancelling_the_question_does_nothing(screen: Screen, fleet: Fleet) -> None:
    page = screen.go("/app/nodes")
    row_of(page, "slow").get_by_role("button", name="Actions for slow").click()
    page.get_by_role("menuitem", name="Remove…").click()
    dialog = page.get_by_role("dialog", name="Remove slow")
    expect(dialog).to_contain_text("Deletes the node's record")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(row_of(page, "slow")).to_contain_text("healthy")
