"""When something breaks: it is shown where the eye is, with what happens next, and nothing is lost."""

import re
import signal

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.browser.conftest import Opener
from tests.browser.fleet import PASSWORD, Cookies, Fleet, sign_in
from tests.browser.screen import Screen
from tests.browser.test_operations import strip_of, strip_says
from tests.browser.wire import Wire
from tests.conftest import eventually

LOST = ("WebSocket connection to", r"net::ERR_", r"status of 401")
BACK = 120_000
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


def watching(window: Opener, fleet: Fleet, cookies: Cookies) -> Page:
    """Activity, live, in a window that will lose its feed."""
    screen = window(fleet.webs[0].url, cookies)
    screen.expect(*LOST)
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    return page


def signed_out(page: Page, fleet: Fleet, cookies: Cookies) -> Locator:
    """The session ends under the page; answers the dialog that says so."""
    fleet.sign_out_everywhere(cookies)
    dialog = page.get_by_role("dialog", name="Your session has ended")
    expect(dialog).to_be_visible(timeout=2 * BACK)
    return dialog


@pytest.mark.rule("UI-9.4")
def test_a_session_that_ends_is_begun_again_over_the_page(window: Opener, fleet: Fleet) -> None:
    cookies = sign_in(fleet.webs[0].url)
    page = watching(window, fleet, cookies)
    remember(page)
    dialog = signed_out(page, fleet, cookies)
    dialog.get_by_label("Password").fill(PASSWORD)
    dialog.get_by_role("button", name="Sign in").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
    expect(page).to_have_url(re.compile("/app/activity$"))
    assert not reloaded(page)


REFUSALS = {
    403: ("not for you", "Ask an administrator"),
    429: ("slower, please", "Try again in 7 s"),
    500: ("it broke", "The server log has details"),
}


@pytest.mark.rule("UI-9.5")
@pytest.mark.parametrize("status", REFUSALS)
def test_a_refusal_is_shown_beside_the_form_and_what_was_typed_stays(
    screen: Screen, fleet: Fleet, status: int
) -> None:
    said, advice = REFUSALS[status]
    screen.expect(f"status of {status}")
    page = screen.go(f"/app/nodes/{fleet.id('slow')}/settings")
    panel = page.get_by_role("region", name="Labels")
    answer = {"error": {"code": status, "message": said, "type": "test"}}
    page.route(
        "**/labels", lambda route: route.fulfill(status=status, json=answer, headers={"Retry-After": "7"})
    )
    panel.get_by_label("Key").fill(f"tried-{status}")
    panel.get_by_label("Value").fill("kept")
    panel.get_by_label("Value").press("Enter")
    expect(panel.get_by_role("alert")).to_contain_text(said)
    expect(panel.get_by_role("alert")).to_contain_text(advice)
    expect(panel.get_by_label("Key")).to_have_value(f"tried-{status}")
    expect(panel.get_by_label("Value")).to_have_value("kept")
    page.unroute("**/labels")
    panel.get_by_role("button", name="Try again").click()
    expect(panel.get_by_text(f"tried-{status}=kept")).to_be_visible()
    expect(panel.get_by_role("alert")).to_have_count(0)


@pytest.mark.rule("UI-9.4", "UI-9.5")
def test_a_session_that_ended_unseen_is_begun_again_and_the_form_is_as_it_was(
    window: Opener, fleet: Fleet
) -> None:
    cookies = sign_in(fleet.webs[0].url)
    screen = window(fleet.webs[0].url, cookies)
    screen.expect(*LOST)
    page = screen.go(f"/app/nodes/{fleet.id('slow')}/settings")
    panel = page.get_by_role("region", name="Labels")
    panel.get_by_label("Key").fill("typed")
    panel.get_by_label("Value").fill("before the end")

    def send_after_the_end(route: Route) -> None:
        # The form is sent before the feed can tell the page that its session has ended.
        fleet.sign_out_everywhere(cookies)
        route.continue_()

    page.route("**/labels", send_after_the_end, times=1)
    panel.get_by_label("Value").press("Enter")
    dialog = page.get_by_role("dialog", name="Your session has ended")
    dialog.get_by_label("Password").fill(PASSWORD)
    dialog.get_by_role("button", name="Sign in").click()
    expect(dialog).to_have_count(0)
    expect(panel.get_by_label("Value")).to_have_value("before the end")
    panel.get_by_role("button", name="Try again").click()
    expect(panel.get_by_text("typed=before the end")).to_be_visible()


@pytest.mark.rule("UI-9.6", "UI-9.3")
def test_a_server_that_dies_during_an_action_leaves_no_spinner(
    window: Opener, settled: Fleet, session: Cookies
) -> None:
    dying = settled.cluster.web()
    with Wire(dying.port) as wire:
        screen = window(wire.url, session)
        screen.expect(*LOST)
        page = screen.go(f"/app/nodes/{settled.id('fine')}")
        page.get_by_role("button", name="Drain…").click()
        dialog = page.get_by_role("dialog", name="Drain fine")
        dialog.get_by_label("Reason").fill("a restart in between")
        dying.child.send_signal(signal.SIGSTOP)
        dialog.get_by_role("button", name="Drain", exact=True).click()
        expect(dialog).to_contain_text("sending…")
        dying.kill()
        expect(dialog).to_contain_text("The server is unreachable.")
        wire.target = settled.cluster.web().port
        dialog.get_by_role("button", name="Retry").click()
        expect(dialog).to_have_count(0)
        expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
        expect(page.locator("header").get_by_text("a restart in between")).to_be_visible()
        expect(page.locator("main .spinner")).to_have_count(0)
    settled.resume_all()
