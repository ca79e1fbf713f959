"""The search over everything, by the keyboard alone."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.fleet import Fleet
from tests.browser.screen import Screen


@pytest.mark.rule("UI-9.16", "UW37")
def test_a_node_is_found_and_opened_without_a_mouse(screen: Screen, fleet: Fleet) -> None:
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.keyboard.press("Control+k")
    box = page.get_by_role("combobox", name="Search")
    expect(box).to_be_focused()
    page.keyboard.type("slow")
    expect(page.get_by_role("option", name=re.compile("slow")).first).to_be_visible()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"/app/nodes/{fleet.id('slow')}$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("slow")


@pytest.mark.rule("UI-9.16", "UW37")
def test_a_verb_leads_to_the_question_that_the_page_asks(screen: Screen, fleet: Fleet) -> None:
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search")).to_be_focused()
    page.keyboard.type("drain slow")
    expect(page.get_by_role("option", name="Drain slow…")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Drain slow")).to_be_visible()
    # The address is the node's own: a reload asks nothing.
    expect(page).to_have_url(re.compile(f"/app/nodes/{fleet.id('slow')}$"))
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search")).to_be_focused()
    page.keyboard.type("install striped")
    expect(page.get_by_role("option", name="Install striped…")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("striped")


@pytest.mark.rule("UI-9.16", "UI-0.13")
def test_escape_closes_the_search_and_gives_the_focus_back(screen: Screen) -> None:
    page = screen.go("/app/nodes")
    button = page.get_by_role("banner").get_by_role("button", name="Search")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("combobox", name="Search")).to_be_focused()
    page.keyboard.press("Escape")
    expect(button).to_be_focused()


@pytest.mark.rule("UI-9.16")
def test_what_is_nowhere_is_said_so(screen: Screen) -> None:
    page = screen.go("/app/nodes")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search")).to_be_focused()
    page.keyboard.type("no such thing")
    expect(page.get_by_text("No results")).to_be_visible()
