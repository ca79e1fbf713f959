"""Accessibility of every page: axe, the keyboard, reduced motion, narrow screens."""

import re
from itertools import pairwise

import pytest
from playwright.sync_api import Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import NARROW, Screen
from tests.support.effort import swept
from tests.support.seeding.nodes import MODELS

PAGES = (
    "login", "overview", "nodes", "node", "node/replicas", "node/backends", "node/timeline",
    "node/settings", "activity", "models", "model", "models/add", "scheduling", "backends",
    "backends?view=installed", "backends/llama-cpp", "capacity", "health", "keys", "password", "nowhere",
)  # fmt: skip
_MOVING = """() => document.getAnimations().filter((one) => one.playState === "running"
  && (one.effect?.getComputedTiming().duration ?? 0) > 10).length"""


def opened(window: Opener, crowd: Fleet, cookies: Cookies, which: str, **how: bool) -> Page:
    """A page of the crowded cluster, shown to the end."""
    screen = window(crowd.webs[0].url, () if which == "login" else cookies, **how)
    if which == "nowhere":
        screen.expect("status of 404")
    node = f"nodes/{crowd.id('gpu-a100-112')}"
    path = {"login": "/login", "model": f"/app/models/{MODELS[0]}"}
    page = screen.go(path.get(which, f"/app/{re.sub('^node(?=$|/)', node, which)}"))
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    if which not in ("login", "nowhere"):
        expect(page.get_by_test_id("connection")).to_have_text("Live")
    waiting = page.get_by_role("status").filter(has_text=re.compile(r"^\s*Loading .*…$"))
    expect(waiting).to_have_count(0)
    return page


@pytest.mark.rule("UI-9.7", "UI-9.11", "E67", "UI-9.10", "UI-0.23")
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=swept)], ids=["light", "dark"])
@pytest.mark.parametrize("which", PAGES)
def test_axe_finds_nothing_serious_and_a_phone_scrolls_one_way(
    window: Opener, crowd: Fleet, crowd_session: Cookies, which: str, dark: bool
) -> None:
    """In a wide window, and after it has become as narrow as a phone."""
    page = opened(window, crowd, crowd_session, which, dark=dark)
    assert checks.violations(page) == []
    page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})
    assert checks.sideways(page) == []
    assert checks.violations(page) == []


@swept
@pytest.mark.rule("UI-9.7", "UI-9.10", "UI-0.23")
def test_every_page_loads_on_a_phone_without_scrolling_sideways(
    window: Opener, crowd: Fleet, crowd_session: Cookies
) -> None:
    """A page that loads narrow lays itself out differently from one that has become narrow."""
    found = {}
    for which in PAGES:
        page = opened(window, crowd, crowd_session, which, narrow=True)
        found[which] = [*checks.sideways(page), *checks.violations(page)]
        page.close()
    assert not any(found.values()), found


@pytest.mark.rule("UI-9.8")
@pytest.mark.parametrize(
    "which", ["nodes", "activity", *(pytest.param(name, marks=swept) for name in ("node", "backends"))]
)
def test_tab_reaches_everything_in_order_with_the_focus_seen(
    window: Opener, crowd: Fleet, crowd_session: Cookies, which: str
) -> None:
    page = opened(window, crowd, crowd_session, which)
    stops = checks.walk(page)
    assert [stop["name"] for stop in stops if not stop["ring"]] == []
    names = [stop["name"] for stop in stops]
    assert names[0] == "Skip to content"
    for wanted in ("Search", "Theme", "Account"):
        assert any(name.startswith(wanted) for name in names), wanted
    back = [
        (before["name"], after["name"])
        for before, after in pairwise(stops)
        if after["top"] < before["top"] - 400 and after["left"] <= before["left"]
    ]
    assert not back, "the focus jumps up and left"


@pytest.mark.rule("UI-9.8", "UI-3.11", "E35")
def test_rows_are_walked_and_opened_by_keys(packed: Screen) -> None:
    page = packed.go("/app/nodes?q=gpu-h100")
    rows = page.get_by_role("grid", name="Nodes").get_by_role("row")
    expect(rows.nth(3)).to_be_visible()
    rows.nth(1).focus()
    page.keyboard.press("ArrowDown")
    expect(rows.nth(2)).to_be_focused()
    page.keyboard.press("x")
    expect(page.get_by_role("toolbar", name="Selected nodes")).to_contain_text("1 selected")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"/app/nodes/[0-9a-f-]{36}$"))


@pytest.mark.rule("UI-0.14")
def test_a_row_menu_is_used_by_keys_and_gives_the_focus_back(packed: Screen) -> None:
    page = packed.go("/app/nodes?q=gpu-h100")
    trigger = page.get_by_role("button", name=re.compile("^Actions for gpu-h100")).first
    trigger.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem").first).to_be_focused()
    page.keyboard.press("End")
    expect(page.get_by_role("menuitem").last).to_be_focused()
    page.keyboard.press("Escape")
    expect(trigger).to_be_focused()


@pytest.mark.rule("UI-0.24")
def test_nothing_moves_under_reduced_motion(window: Opener, crowd: Fleet, crowd_session: Cookies) -> None:
    page = opened(window, crowd, crowd_session, "activity", still=True)
    expect(page.get_by_test_id("operations-strip")).to_be_visible()
    assert page.evaluate(_MOVING) == 0


@pytest.mark.rule("UI-0.21")
def test_the_drawer_of_a_phone_closes_by_escape_and_gives_the_focus_back(
    window: Opener, crowd: Fleet, crowd_session: Cookies
) -> None:
    page = opened(window, crowd, crowd_session, "nodes", narrow=True)
    button = page.get_by_role("button", name="Menu")
    button.click()
    expect(page.get_by_role("button", name="Close menu")).to_be_focused()
    page.keyboard.press("Escape")
    expect(button).to_be_focused()
