"""Somebody else signs in over an open page: in its dialog, or in another tab, the feed there or cut."""

import re

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.browser.conftest import Opener
from tests.browser.fleet import PASSWORD, USER, Fleet, make_user, sign_in
from tests.browser.test_resilience import BACK, LOST, reloaded, remember, signed_out, watching
from tests.browser.test_sign_in import sign_in as type_in
from tests.browser.wire import Wire

OTHER, SECRET = "olga", "a-password-of-olga-77"


@pytest.fixture(scope="module")
def two(fleet: Fleet) -> Fleet:
    """The cluster with a second admin."""
    make_user(fleet.cluster, OTHER, SECRET)
    return fleet


def signed_in_as(page: Page) -> str:
    """Who the page says is signed in."""
    page.get_by_role("button", name="Account").click()
    said = page.get_by_role("menu", name="Account").get_by_text("Signed in as").inner_text()
    page.keyboard.press("Escape")
    return said.removeprefix("Signed in as ")


def in_another_tab(context: BrowserContext, url: str) -> None:
    """Olga signs in there, over the session that was there; her tab is closed again."""
    tab = context.new_page()
    context.clear_cookies(name="sessionid")
    tab.goto(f"{url}/login")
    type_in(tab, OTHER, SECRET)
    expect(tab).to_have_url(re.compile("/app/overview$"))
    tab.close()


@pytest.mark.rule("UI-9.4")
def test_another_one_in_the_dialog_gets_the_page_anew(window: Opener, two: Fleet) -> None:
    cookies = sign_in(two.webs[0].url)
    page = watching(window, two, cookies)
    assert signed_in_as(page) == USER
    remember(page)
    dialog = signed_out(page, two, cookies)
    type_in(page, OTHER, SECRET)
    expect(dialog).to_have_count(0)
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
    assert reloaded(page)
    assert signed_in_as(page) == OTHER


@pytest.mark.rule("UI-9.4")
def test_another_one_in_another_tab_gets_this_page_anew_too(window: Opener, two: Fleet) -> None:
    cookies = sign_in(two.webs[0].url)
    page = watching(window, two, cookies)
    remember(page)
    with page.expect_event("framenavigated", timeout=2 * BACK):
        in_another_tab(page.context, two.webs[0].url)
        two.sign_out_everywhere(cookies)
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
    assert signed_in_as(page) == OTHER
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.rule("UI-9.4")
def test_another_one_who_signed_in_while_the_feed_was_cut_gets_the_page_anew(
    window: Opener, two: Fleet, wire: Wire
) -> None:
    """The feed comes back with the other's session and says nothing of it."""
    screen = window(wire.url, sign_in(two.webs[0].url))
    screen.expect(*LOST, "foreign request")
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    assert signed_in_as(page) == USER
    remember(page)
    wire.cut()
    expect(page.get_by_test_id("connection")).to_contain_text("Stale since")
    in_another_tab(page.context, two.webs[0].url)
    with page.expect_event("framenavigated", timeout=BACK):
        wire.restore()
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
    assert signed_in_as(page) == OTHER


@pytest.mark.rule("UI-9.4", "UI-9.5")
def test_a_sign_in_that_was_put_aside_before_its_answer_counts(window: Opener, two: Fleet) -> None:
    cookies = sign_in(two.webs[0].url)
    page = watching(window, two, cookies)
    dialog = signed_out(page, two, cookies)
    held: list[Route] = []
    page.route("**/api/auth/login", lambda route: held.append(route))
    with page.expect_request("**/api/auth/login"):
        type_in(page, USER, PASSWORD)
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    held[0].continue_()
    expect(page.get_by_test_id("connection")).to_have_text("Live", timeout=BACK)
    expect(page.get_by_text("Your session has ended.")).to_have_count(0)
