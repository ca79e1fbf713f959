"""When something breaks: it is shown where the eye is, with what happens next, and nothing is lost."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Opener
from tests.browser.fleet import PASSWORD, Cookies, Fleet, sign_in
from tests.browser.test_operations import strip_of, strip_says
from tests.browser.wire import Wire
from tests.conftest import eventually

LOST = ("WebSocket connection to", r"net::ERR_", r"status of 401")
BACK = 20_000
"""Milliseconds: the longest pause between two attempts to connect, and some."""


def remember(page: Page) -> None:
    """Leaves a mark that a reload would remove."""
    page.evaluate("window.markOfTheTest = true")


def reloaded(page: Page) -> bool:
    """Whether the page is another one than before."""
    return not page.evaluate("window.markOfTheTest === true")


@pytest.mark.rule("UI-9.2", "UI-9.3", "UI-1.10")
def test_a_browser_cut_off_meanwhile_shows_the_true_end(
    window: Opener, settled: Fleet, session: Cookies, wire: Wire
) -> None:
    screen = window(wire.url, session)
    screen.expect(*LOST)
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    remember(page)
    jobs = [settled.install("slow", "cutting")]
    strip_says(page, "Installing backend cutting")
    wire.cut()
    jobs.append(settled.install("failing", "doomed"))
    expect(page.get_by_test_id("connection")).to_contain_text("Stale since")
    eventually(lambda: all(settled.ended(job) for job in jobs), what="both end unseen")
    wire.restore()
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
    expect(strip_of(page)).to_have_count(1)
    strip_says(page, "Could not install backend")
    expect(page.get_by_text("Installing backend cutting")).to_have_count(0)
    assert not reloaded(page)


@pytest.mark.rule("UI-9.3")
def test_a_line_that_fell_silent_is_noticed(
    window: Opener, fleet: Fleet, session: Cookies, wire: Wire
) -> None:
    screen = window(wire.url, session)
    screen.expect(*LOST)
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    wire.still()
    expect(page.get_by_test_id("connection")).to_contain_text("Stale", timeout=BACK)
    wire.restore()
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)


@pytest.mark.rule("UI-9.4")
def test_a_session_that_ends_is_begun_again_over_the_page(window: Opener, fleet: Fleet) -> None:
    cookies = sign_in(fleet.webs[0].url)
    screen = window(fleet.webs[0].url, cookies)
    screen.expect(*LOST)
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    remember(page)
    fleet.sign_out_everywhere(cookies)
    dialog = page.get_by_role("dialog", name="Your session has ended")
    expect(dialog).to_be_visible(timeout=2 * BACK)
    dialog.get_by_label("Password").fill(PASSWORD)
    dialog.get_by_role("button", name="Sign in").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
    expect(page).to_have_url(re.compile("/app/activity$"))
    assert not reloaded(page)
