"""Signing in: by hand, with a generated password, with wrong ones, and to where one wanted to go."""

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import PASSWORD, USER, Fleet, make_user
from tests.browser.screen import Screen

REFUSED = r"status of (401|400|429)"


def sign_in(page: Page, name: str, password: str) -> None:
    """Types both and presses Enter, as people do."""
    page.get_by_label("Username", exact=True).fill(name)
    page.get_by_label("Password", exact=True).fill(password)
    page.keyboard.press("Enter")


@pytest.fixture
def stranger(window: Opener, fleet: Fleet) -> Screen:
    """A window of somebody who is not signed in."""
    return window(fleet.webs[0].url)


@pytest.mark.rule("UI-0.2", "UI-9.11")
def test_leads_back_to_where_one_wanted_to_go(stranger: Screen) -> None:
    page = stranger.go("/app/activity")
    expect(page).to_have_url(re.compile(r"/login\?next="))
    sign_in(page, USER, PASSWORD)
    expect(page).to_have_url(re.compile(r"/app/activity$"))
    expect(page.get_by_role("navigation", name="Main")).to_be_visible()


@pytest.mark.rule("UI-0.2", "UI-9.11")
@pytest.mark.parametrize("path", ["/admin/nodes/backendnode/?q=w", "/api/docs"])
def test_leads_back_to_the_other_pages_of_the_server(stranger: Screen, path: str) -> None:
    page = stranger.go(path)
    expect(page).to_have_url(re.compile(r"/login\?next="))
    sign_in(page, USER, PASSWORD)
    expect(page).to_have_url(stranger.url + path)
    expect(page.locator("#swagger-ui .opblock, #result_list").first).to_be_visible()


def test_leads_no_one_to_another_host(stranger: Screen) -> None:
    page = stranger.go("/login?next=//evil.example/admin/")
    sign_in(page, USER, PASSWORD)
    expect(page).to_have_url(stranger.url + "/app/overview")


@pytest.mark.rule("http-5.4", "UI-9.5")
def test_a_wrong_password_keeps_the_name_and_says_so(stranger: Screen) -> None:
    stranger.expect(REFUSED)
    page = stranger.go("/login")
    sign_in(page, USER, "wrong")
    expect(page.get_by_role("alert")).to_contain_text("Incorrect username or password")
    expect(page.get_by_label("Username", exact=True)).to_have_value(USER)
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(re.compile(r"/app/overview$"))


@pytest.mark.rule("http-5.4")
def test_a_generated_password_is_good_for_nothing_but_its_change(stranger: Screen, fleet: Fleet) -> None:
    make_user(fleet.cluster, "carla", "generated-once-7f31", generated=True)
    page = stranger.go("/app/activity")
    sign_in(page, "carla", "generated-once-7f31")
    expect(page.get_by_role("heading", name="Change password")).to_be_visible()
    expect(page.get_by_role("navigation", name="Main")).to_have_count(0)
    page.get_by_label("Current password").fill("generated-once-7f31")
    page.get_by_label("New password", exact=True).fill("chosen-by-carla-88")
    page.get_by_label("Confirm new password").fill("chosen-by-carla-88")
    page.get_by_role("button", name="Change password").click()
    expect(page).to_have_url(re.compile(r"/app/activity$"))
    expect(page.get_by_role("navigation", name="Main")).to_be_visible()


@pytest.mark.rule("http-5.4")
def test_signing_out_ends_the_session(stranger: Screen, fleet: Fleet) -> None:
    page = stranger.go("/login")
    sign_in(page, USER, PASSWORD)
    page.get_by_role("button", name="Account").click()
    page.get_by_role("menuitem", name="Sign out").click()
    expect(page).to_have_url(re.compile(r"/login"))
    stranger.go("/app/nodes")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


@pytest.mark.rule("UI-0.3")
def test_one_who_is_no_admin_gets_the_chat_and_keys_of_their_own(stranger: Screen, fleet: Fleet) -> None:
    make_user(fleet.cluster, "dora", "a-reader-only-51", admin=False)
    page = stranger.go("/login")
    sign_in(page, "dora", "a-reader-only-51")
    expect(page.get_by_role("heading", level=1)).to_have_text("Chat")
    places = page.get_by_role("navigation", name="Main").get_by_role("link")
    expect(places).to_have_text(["Chat", "API keys"])
    stranger.go("/app/nodes")
    expect(page).to_have_url(re.compile(r"/app/chat"))

    places.last.click()
    page.get_by_label("Name of a new key").fill("notebook")
    page.get_by_role("button", name="Create key").click()
    shown = page.get_by_role("region", name="New key notebook").get_by_role("code")
    expect(shown).to_have_text(re.compile("^lac-[0-9a-f]{48}$"))
    key = shown.inner_text()
    assert _may_list(fleet, key) == 200
    assert checks.violations(page) == []
    assert checks.sideways(page) == []
    page.reload()
    expect(page.get_by_role("table", name="Your API keys")).to_contain_text(key[:12])
    assert key not in page.content()
    page.get_by_role("button", name="Revoke notebook").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("You have no API keys.")).to_be_visible()
    assert _may_list(fleet, key) == 401
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(re.compile("/login"))


def _may_list(fleet: Fleet, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{fleet.webs[0].url}/v1/models", headers=headers, timeout=60).status_code


@pytest.mark.rule("http-5.4")
def test_the_admin_leads_back_over_a_generated_password(stranger: Screen, fleet: Fleet) -> None:
    make_user(fleet.cluster, "emma", "generated-once-9a20", generated=True)
    page = stranger.go("/admin/")
    sign_in(page, "emma", "generated-once-9a20")
    expect(page).to_have_url(re.compile(r"/app/password\?next=%2Fadmin%2F$"))
    page.get_by_label("Current password").fill("generated-once-9a20")
    page.get_by_label("New password", exact=True).fill("chosen-by-emma-41")
    page.get_by_label("Confirm new password").fill("chosen-by-emma-41")
    page.get_by_role("button", name="Change password").click()
    expect(page).to_have_url(stranger.url + "/admin/")
