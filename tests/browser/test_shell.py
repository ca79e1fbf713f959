"""What lies around every page, and what the pages show of a fleet, one line each."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.browser.test_operations import strip_of, strip_says

_SHARE = """(element) => element.querySelector(".strip-name").getBoundingClientRect().width / innerWidth"""


def live(page: Page) -> Page:
    """The page once its feed is there."""
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    return page


@pytest.mark.rule("UI-0.1")
def test_a_look_for_the_session_that_fails_gives_a_screen_to_try_again(screen: Screen) -> None:
    screen.expect("status of 500")
    screen.page.route("**/api/auth/status", lambda route: route.fulfill(status=500, json={"error": "broken"}))
    page = screen.go("/app/nodes")
    expect(page.get_by_role("heading", name="Cannot check your session")).to_be_visible()
    expect(page.get_by_role("navigation")).to_have_count(0)
    page.unroute("**/api/auth/status")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Nodes")).to_be_visible()


@pytest.mark.rule("UI-0.5", "UI-0.7", "UI-0.10")
def test_the_navigation_counts_the_healthy_the_live_and_the_failed(screen: Screen, settled: Fleet) -> None:
    page = live(screen.go("/app/activity"))
    links = page.get_by_role("navigation", name="Main")
    expect(links.get_by_role("link", name=re.compile("3 of 3 healthy"))).to_be_visible()
    settled.install("slow", "calm")
    expect(links.get_by_role("link", name=re.compile("1 operation running"))).to_be_visible()
    settled.install("failing", "doomed")
    expect(links.get_by_role("link", name=re.compile("1 failed operation"))).to_be_visible()


@pytest.mark.rule("UI-0.20")
def test_a_middling_window_has_a_rail_of_icons(screen: Screen) -> None:
    page = live(screen.go("/app/nodes"))
    page.set_viewport_size({"width": 1000, "height": 800})
    rail = page.get_by_role("navigation", name="Main")
    expect(rail).to_be_visible()
    box = rail.bounding_box()
    assert box is not None
    assert box["width"] < 90
    expect(rail.get_by_role("link", name=re.compile("^Nodes"))).to_be_visible()
    assert checks.sideways(page) == []


@pytest.mark.rule("UI-1.6", "UI-1.11", "UI-1.12", "E19", "E27")
def test_a_failure_has_no_bar_and_widens_nothing_on_a_phone(
    window: Opener, settled: Fleet, session: Cookies
) -> None:
    page = live(window(settled.webs[0].url, session, narrow=True).go("/app/activity"))
    settled.install("failing", "doomed")
    strip_says(page, "doomed")
    expect(strip_of(page).get_by_role("progressbar")).to_have_count(0)
    assert strip_of(page).evaluate(_SHARE) <= 0.45
    assert checks.sideways(page) == []


@pytest.mark.rule("UI-3.1")
def test_a_page_without_a_feed_says_so_instead_of_waiting_for_ever(screen: Screen) -> None:
    screen.expect("WebSocket")
    screen.page.route_web_socket(re.compile("/ws/feed"), lambda socket: socket.close(code=1012))
    page = screen.go("/app/nodes")
    expect(page.get_by_text("The live feed is unreachable")).to_be_visible()
