"""The list of nodes: who waits, what is filtered, what is done to many, and names that mean harm."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.browser.test_operations import AT_ONCE
from tests.support.seeding import hostile

DRAWN_AT_MOST = 120
"""Rows of five hundred that are in the document at once."""


def row_of(page: Page, name: str) -> Locator:
    """The row of the node with this name."""
    link = page.get_by_role("link", name=name, exact=True)
    return page.get_by_role("row").filter(has=link)


def filter_by(page: Page, text: str) -> None:
    """Types into the box."""
    page.get_by_role("searchbox", name="Filter nodes").fill(text)


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
    expect(row_of(page, "slow")).to_contain_text("draining")
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
    expect(dialog).to_contain_text("The record is removed")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(row_of(page, "slow")).to_contain_text("healthy")


@pytest.mark.rule("UI-3.6", "UW3")
def test_the_filter_is_in_the_address_and_comes_back_with_it(packed: Screen) -> None:
    page = packed.go("/app/nodes")
    filter_by(page, "gpu-a100")
    page.get_by_role("group", name="State").get_by_role("button", name=re.compile("draining")).click()
    expect(page).to_have_url(re.compile(r"q=gpu-a100.*state=draining|state=draining.*q=gpu-a100"))
    shown = page.get_by_role("grid", name="Nodes")
    expect(shown.get_by_role("row").nth(1)).to_contain_text("gpu-a100")
    count = shown.get_attribute("aria-rowcount")
    page.reload()
    expect(page.get_by_role("searchbox", name="Filter nodes")).to_have_value("gpu-a100")
    expect(shown).to_have_attribute("aria-rowcount", str(count))
    filter_by(page, "nothing is called that")
    expect(page.get_by_text("No matching nodes")).to_be_visible()
    page.get_by_role("button", name="Clear filters").first.click()
    expect(shown).to_have_attribute("aria-rowcount", "501")


@pytest.mark.rule("UI-3.3", "UW2", "E30")
def test_five_hundred_nodes_are_sorted_and_scrolled_with_few_rows_drawn(packed: Screen) -> None:
    page = packed.go("/app/nodes?sort=name")
    grid = page.get_by_role("grid", name="Nodes")
    expect(grid).to_have_attribute("aria-rowcount", "501")
    expect(page.get_by_test_id("pulse")).to_contain_text("500 nodes")
    page.get_by_role("columnheader", name="Name").get_by_role("button").click()
    expect(page.get_by_role("columnheader", name="Name")).to_have_attribute(
        "aria-sort", re.compile("ascending|descending")
    )
    assert page.get_by_role("row").count() < DRAWN_AT_MOST
    page.evaluate("window.scrollTo(0, document.documentElement.scrollHeight)")
    expect(grid.locator('[aria-rowindex="501"]')).to_be_visible()
    assert page.get_by_role("row").count() < DRAWN_AT_MOST


@pytest.mark.rule("UW18")
def test_conflicts_are_on_top_and_decided_there(packed: Screen) -> None:
    page = packed.go("/app/nodes")
    heading = page.get_by_role("heading", name="2 identity conflicts to resolve")
    expect(heading).to_be_visible()
    page.get_by_role("button", name="Review 2 identity conflicts").click()
    first = page.locator('[data-testid^="conflict-"]').first
    expect(first).to_contain_text("192.0.2.66")
    expect(first).to_contain_text("another secret claims this name")
    first.get_by_role("button", name=re.compile("^Refuse the claim")).click()
    question = page.get_by_role("alertdialog")
    expect(question).to_contain_text("The node keeps its identity")
    question.get_by_role("button", name="Refuse").click()
    expect(page.get_by_role("heading", name="1 identity conflict to resolve")).to_be_visible()


@pytest.mark.rule("UI-9.12", "UI-9.10")
@pytest.mark.parametrize("narrow", [False, True], ids=["1400", "390"])
def test_hostile_names_are_text_and_break_no_layout(
    window: Opener, crowd: Fleet, crowd_session: Cookies, narrow: bool
) -> None:
    screen = window(crowd.webs[0].url, crowd_session, narrow=narrow)
    page = screen.go("/app/nodes")
    for name in hostile.NAMES:
        # The box takes a quoted text, but no quotation mark in it.
        filter_by(page, f'name:"{max(name.split(chr(34)), key=len)}"')
        link = page.get_by_role("link", name=name, exact=True)
        expect(page.get_by_text("1 of 500 nodes")).to_be_visible()
        expect(page.get_by_text("Loading the conflicts…")).to_have_count(0)
        assert not checks.sideways(page), name
        link.click()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        assert not checks.sideways(page), name
        page.go_back()
    assert page.evaluate("typeof window.alerted") == "undefined"
