"""What lies around every page, and what the pages show of a fleet, one line each."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.browser.test_nodes import row_of
from tests.browser.test_operations import strip_of, strip_says

_SELECT = """() => {
  const heading = document.querySelector("h1");
  getSelection().selectAllChildren(heading);
  window.changed = 0;
  new MutationObserver((list) => { window.changed += list.length; }).observe(heading,
    { childList: true, characterData: true, subtree: true });
}"""
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


@pytest.mark.rule("UI-0.9", "E66")
def test_a_selection_of_text_survives_what_moves_around_it(packed: Screen) -> None:
    page = live(packed.go("/app/nodes"))
    page.evaluate(_SELECT)
    before = strip_of(page).text_content()
    expect(strip_of(page)).not_to_have_text(str(before))
    assert page.evaluate("getSelection().toString()").strip() == "Nodes"
    assert page.evaluate("window.changed") == 0


@pytest.mark.rule("UI-0.15")
def test_a_popover_stays_on_the_screen_and_closes_by_escape(
    window: Opener, crowd: Fleet, crowd_session: Cookies
) -> None:
    page = live(window(crowd.webs[0].url, crowd_session, narrow=True).go("/app/nodes"))
    opener = page.get_by_role("button", name=re.compile("^Label"))
    opener.click()
    popover = page.get_by_role("dialog", name="Label")
    box = popover.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    page.keyboard.press("Escape")
    expect(popover).to_have_count(0)
    expect(opener).to_be_focused()


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


@pytest.mark.rule("UI-3.5", "UI-3.10", "UI-3.12")
def test_rows_say_in_words_how_a_node_is_and_what_it_has(packed: Screen) -> None:
    page = live(packed.go("/app/nodes?q=gpu-&state=unhealthy"))
    first = page.get_by_role("grid", name="Nodes").get_by_role("row").nth(1)
    expect(first).to_contain_text("unhealthy")
    expect(first).to_contain_text("its engines do not answer")
    expect(first.get_by_role("img", name=re.compile("^VRAM: .* of "))).to_be_visible()
    expect(first).to_contain_text("used of")
    counts = page.get_by_role("group", name="State")
    for word in ("pending", "offline", "unhealthy", "draining", "healthy"):
        expect(counts.get_by_role("button", name=re.compile(rf"^{word} \d+$"))).to_be_visible()


@pytest.mark.rule("UI-4.2", "UI-4.7", "UI-4.10", "E34")
def test_a_node_shows_what_it_reported_runs_and_has(packed: Screen, crowd: Fleet) -> None:
    found = [node for node in crowd.get("/api/nodes").json() if node["status"] == "healthy"]
    busy = max(found, key=lambda node: node["model_count"])
    page = live(packed.go(f"/app/nodes/{busy['id']}"))
    replicas = page.get_by_role("region", name="Replicas")
    expect(replicas.get_by_text("loaded")).to_have_count(busy["model_count"])
    expect(replicas).to_contain_text("in flight")
    expect(page.get_by_role("region", name="Memory")).to_contain_text("RAM used")
    expect(page.get_by_role("region", name="Installed backends")).to_contain_text("Reported by the worker")


@pytest.mark.rule("UI-3.11", "UI-4.1")
def test_a_press_on_a_row_opens_it_and_the_way_back_keeps_the_filter(packed: Screen) -> None:
    page = live(packed.go("/app/nodes?q=gpu-a100-112"))
    row_of(page, "gpu-a100-112").get_by_role("gridcell").nth(4).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("gpu-a100-112")
    page.go_back()
    expect(page.get_by_role("searchbox", name="Filter nodes")).to_have_value("gpu-a100-112")
