"""What Django and its libraries draw around the pages: the admin and the API documentation."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.support.effort import swept

ADMIN = (
    "/admin/",
    "/admin/nodes/backendnode/",
    "/admin/nodes/backendnode/{node}/change/",
    "/admin/nodes/nodeevent/",
    "/admin/operations/operation/",
)


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=swept)], ids=["light", "dark"])
def test_axe_finds_nothing_serious_in_the_admin(
    window: Opener, fleet: Fleet, session: Cookies, dark: bool
) -> None:
    screen = window(fleet.webs[0].url, session, dark=dark)
    # axe reads an imported style sheet by putting it into the page; the policy refuses that.
    screen.expect("Applying inline style violates", "Couldn't load preload assets")
    found = {}
    for path in ADMIN:
        page = screen.go(path.format(node=fleet.id("fine")))
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        found[path] = checks.violations(page)
    page = screen.go("/admin/nodes/backendnode/")
    page.locator("#action-toggle").check()
    page.locator("select[name=action]").select_option("approve")
    page.locator("button[name=index]").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Confirm: Approve")
    found["confirmation"] = checks.violations(page)
    assert [told for told in found.items() if told[1]] == []


@swept
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=swept)], ids=["light", "dark"])
def test_axe_finds_nothing_serious_in_the_api_documentation(
    window: Opener, fleet: Fleet, session: Cookies, dark: bool
) -> None:
    """Closed and with an operation open; the dark page is dark."""
    page = window(fleet.webs[0].url, session, dark=dark).go("/api/docs")
    expect(page.locator(".opblock").first).to_be_visible()
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": 1400, "height": height})  # only what is in sight is drawn
    expect(page.get_by_text("Drain a node", exact=True)).to_be_visible()
    closed = checks.violations(page)
    page.get_by_text("Drain a node", exact=True).click()
    expect(page.get_by_role("button", name="Try it out")).to_be_visible()
    assert (closed, checks.violations(page)) == ([], [])
    expect(page.locator("body")).to_have_css(
        "background-color", "rgb(18, 21, 27)" if dark else "rgb(255, 255, 255)"
    )


def test_the_api_documentation_follows_the_chosen_theme_and_leads_back(
    window: Opener, fleet: Fleet, session: Cookies
) -> None:
    screen = window(fleet.webs[0].url, session)
    page = screen.go("/app/nodes")
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page = screen.go("/api/docs")
    expect(page.locator("html")).to_have_class(re.compile("dark-mode"))
    page.get_by_role("link", name="LocalAI Cluster").click()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()


def test_system_health_has_every_schedule_and_leads_to_their_pause(
    window: Opener, fleet: Fleet, session: Cookies
) -> None:
    page = window(fleet.webs[0].url, session).go("/app/nodes")
    page.get_by_role("navigation", name="Main").get_by_role("link", name=re.compile("^System health")).click()
    parts = page.get_by_role("list", name="Parts")
    expect(parts.get_by_role("listitem").filter(has_text="Database")).to_contain_text("OK")
    expect(page.get_by_role("list", name="Schedules")).to_contain_text("nodes: liveness")
    page.get_by_role("link", name="Pause or resume schedules").click()
    expect(page.get_by_role("link", name="nodes: liveness")).to_be_visible()
