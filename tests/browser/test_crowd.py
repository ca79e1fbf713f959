"""The list of five hundred nodes: found, sorted and scrolled, calm while others change, hostile names."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.browser.test_nodes import row_of
from tests.browser.test_operations import strip_of
from tests.browser.test_quiet import live
from tests.conftest import eventually
from tests.support.seeding import hostile

DRAWN_AT_MOST = 120
"""Rows of five hundred that are in the document at once."""
MANY = 10
"""Changes in other rows, which come with the beats of their nodes."""
PANEL = 120
"""Pixels that the reference spends on a node."""
_STIR = """UPDATE backend_nodes SET available_ram = available_ram * 9 / 10
  WHERE name ~ '-01' AND status = 'healthy' RETURNING id"""
_WATCH_ROW = """(row) => {
  const name = row.querySelector(".node-name");
  getSelection().selectAllChildren(name);
  window.here = [];
  window.elsewhere = 0;
  const watched = { childList: true, characterData: true, attributes: true, subtree: true };
  new MutationObserver((list) => {
    for (const { target } of list) {
      const element = target instanceof Element ? target : target.parentElement;
      // The age of the last beat is the one thing that grows older by itself.
      if (element.closest(".cell.beat") !== null) continue;
      if (row.contains(element)) window.here.push(element.outerHTML);
      else window.elsewhere += 1;
    }
  }).observe(row.parentElement, watched);
}"""
_SELECT = """() => {
  const heading = document.querySelector("h1");
  getSelection().selectAllChildren(heading);
  window.changed = 0;
  new MutationObserver((list) => { window.changed += list.length; }).observe(heading,
    { childList: true, characterData: true, subtree: true });
}"""


def filter_by(page: Page, text: str) -> None:
    """Types into the box."""
    page.get_by_role("searchbox", name="Filter nodes").fill(text)


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


@pytest.mark.rule("UI-0.9", "E66")
def test_a_row_that_did_not_change_is_left_alone_and_so_is_its_selection(
    packed: Screen, crowd: Fleet
) -> None:
    offline = next(node["name"] for node in crowd.get("/api/nodes").json() if node["status"] == "offline")
    page = live(packed.go(f"/app/nodes?q=name:{offline} name:-01&state=offline,healthy&sort=state"))
    row = row_of(page, offline)
    row.scroll_into_view_if_needed()
    row.evaluate(_WATCH_ROW)

    def stirred() -> bool:
        crowd.cluster.rows(_STIR)
        return bool(page.evaluate("window.elsewhere") > MANY)

    eventually(stirred, what="other rows have changed")
    assert page.evaluate("window.here") == []
    assert page.evaluate("getSelection().toString()") == offline


@pytest.mark.rule("UI-3.16", "UW2")
def test_a_screen_shows_twenty_five_nodes_and_roomy_rows_on_demand(packed: Screen) -> None:
    page = live(packed.go("/app/nodes?state=healthy"))
    rows = page.get_by_role("grid", name="Nodes").locator("tbody tr")
    expect(rows.first).to_be_visible()
    page.get_by_role("region", name="All nodes").evaluate("(element) => element.scrollIntoView()")
    expect(rows.nth(24)).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="View", exact=True).click()
    page.get_by_role("menuitemcheckbox", name="One line per row").click()
    page.get_by_role("menuitemcheckbox", name="Version").click()
    page.keyboard.press("Escape")
    expect(page).to_have_url(re.compile("columns=.*version.*rows=roomy"))
    page.goto(f"{packed.url}/app/nodes")
    expect(page).to_have_url(re.compile("rows=roomy"))
    box = rows.first.bounding_box()
    assert box is not None
    assert PANEL / 3 < box["height"] < PANEL / 2


@pytest.mark.rule("UI-9.10")
@pytest.mark.parametrize("width", [1280, 1400, 1920])
@pytest.mark.parametrize("rows", ["dense", "roomy"])
def test_no_cell_covers_another_at_usual_widths(packed: Screen, width: int, rows: str) -> None:
    """Review P8: figures ran into the next column."""
    packed.page.set_viewport_size({"width": width, "height": 900})
    page = live(packed.go(f"/app/nodes?rows={rows}"))
    expect(page.get_by_role("grid", name="Nodes").locator("tbody tr").first).to_be_visible()
    assert checks.overlaps(page) == []
    assert checks.sideways(page) == []


@pytest.mark.rule("UI-3.19")
def test_the_shown_nodes_are_saved_as_csv(packed: Screen) -> None:
    page = live(packed.go("/app/nodes?q=gpu-h100"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Export CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert lines[0].startswith("Name,State,Reason,GPU,GPU busy %,VRAM free bytes,VRAM bytes")
    assert all(line.startswith("gpu-h100") for line in lines[1:])


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


@pytest.mark.rule("UI-3.5", "UI-3.10", "UI-3.12")
def test_rows_say_in_words_how_a_node_is_and_what_it_has(packed: Screen) -> None:
    page = live(packed.go("/app/nodes?q=gpu-&state=unhealthy"))
    first = page.get_by_role("grid", name="Nodes").get_by_role("row").nth(1)
    expect(first).to_contain_text("unhealthy")
    expect(first).to_contain_text("its engines do not answer")
    expect(first.get_by_role("img", name=re.compile("^VRAM: .* of "))).to_be_visible()
    expect(first.get_by_role("img", name=re.compile("^(RAM|Disk): .* of ")).first).to_be_visible()
    counts = page.get_by_role("group", name="State")
    for word in ("pending", "offline", "unhealthy", "draining", "healthy"):
        expect(counts.get_by_role("button", name=re.compile(rf"^{word} \d+$"))).to_be_visible()


@pytest.mark.rule("UI-4.2", "UI-4.7", "UI-4.10", "E34")
def test_a_node_shows_what_it_reported_runs_and_has(packed: Screen, crowd: Fleet) -> None:
    found = [node for node in crowd.get("/api/nodes").json() if node["status"] == "healthy"]
    busy = max(found, key=lambda node: node["model_count"])
    page = live(packed.go(f"/app/nodes/{busy['id']}"))
    expect(
        page.get_by_role("region", name="Memory").get_by_role("img", name=re.compile("^RAM used"))
    ).to_be_visible()
    page.get_by_role("link", name="Replicas").click()
    replicas = page.get_by_role("region", name="Replicas")
    expect(replicas.get_by_text("loaded")).to_have_count(busy["model_count"])
    expect(replicas).to_contain_text("in flight")
    page.get_by_role("navigation", name="Sections of").get_by_role("link", name="Backends").click()
    expect(page.get_by_role("region", name="Installed backends")).to_contain_text("Reported by the worker")


@pytest.mark.rule("UI-3.11", "UI-4.1")
def test_a_press_on_a_row_opens_it_and_the_way_back_keeps_the_filter(packed: Screen) -> None:
    page = live(packed.go("/app/nodes?q=gpu-a100-112"))
    row_of(page, "gpu-a100-112").get_by_role("gridcell").nth(4).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("gpu-a100-112")
    page.go_back()
    expect(page.get_by_role("searchbox", name="Filter nodes")).to_have_value("gpu-a100-112")
