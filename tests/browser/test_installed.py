"""Installed backends and the page of one: what changes under a reader, what is asked, install by address."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.conftest import eventually

INSTALLED = "/app/backends?view=installed"
_STAYS = "window.neverReloaded = true"


def line_of(page: Page, backend: str) -> Locator:
    """The row of a backend."""
    named = page.get_by_role("link", name=backend, exact=True)
    return page.get_by_role("table", name="Installed backends").get_by_role("row").filter(has=named).first


def install(fleet: Fleet, backend: str, *nodes: str) -> None:
    """Has it on these nodes."""
    jobs = [fleet.install(node, backend) for node in nodes]
    eventually(lambda: all(fleet.ended(job) for job in jobs), seconds=120, what=f"{backend} is installed")


_LOOKS = """notice => {
  const style = getComputedStyle(notice);
  const sides = ["Left", "Right", "Top", "Bottom"].map(side => style[`border${side}Width`]);
  return [...sides, style.backgroundColor];
}"""


@pytest.fixture
def aged(settled: Fleet) -> Iterator[Fleet]:
    """The cluster with a backend on two nodes; its gallery as it was afterwards."""
    install(settled, "aged", "fine", "slow")
    yield settled
    settled.publish("aged", "1.0.0")


def upgrade_one_by_one(page: Page, line: Locator) -> None:
    """On the page of `aged`: one node, then what is left; back to the list."""
    line.get_by_role("link", name="aged", exact=True).click()
    expect(page).to_have_url(re.compile("/app/backends/aged$"))
    facts = page.get_by_role("region", name="Backend")
    expect(facts).to_contain_text("update to v2.0.0")
    expect(facts).to_contain_text(re.compile(r"Size\s*11.4 MiB"))
    nodes = page.get_by_role("table", name="Nodes with aged")
    nodes.get_by_role("checkbox", name="Select fine").check()
    page.get_by_role("button", name="Upgrade…").click()
    question = page.get_by_role("dialog", name="Upgrade aged on fine")
    expect(question).to_contain_text("no replica stops")
    question.get_by_role("button", name="Upgrade").click()
    expect(facts).to_contain_text("1 node differs")
    expect(nodes.get_by_role("row").filter(has_text="fine")).to_contain_text("v2.0.0")
    expect(nodes.get_by_role("row").filter(has_text="slow")).to_contain_text("differs")

    nodes.get_by_role("checkbox", name="Select fine").uncheck()
    page.get_by_role("button", name="Upgrade…").click()
    page.get_by_role("dialog", name="Upgrade aged on slow").get_by_role("button", name="Upgrade").click()
    expect(facts).not_to_contain_text("update to", timeout=120_000)
    expect(facts).not_to_contain_text("differs")
    expect(facts).to_contain_text("v2.0.0")
    page.get_by_role("link", name="← All backends").click()


@pytest.mark.rule("A51", "A87", "O101", "O102", "E47", "E52", "E57")
def test_a_new_version_is_seen_installed_and_gone_again_without_a_reload(screen: Screen, aged: Fleet) -> None:
    """Check, upgrade of one node, drift, upgrade of the other, deletion: the page is never loaded again."""
    page = screen.go(INSTALLED)
    line = line_of(page, "aged")
    expect(line).to_contain_text("v1.0.0")
    expect(line).to_contain_text("2 nodes")
    expect(line).not_to_contain_text("update to")
    page.evaluate(_STAYS)
    aged.publish("aged", "2.0.0")
    page.get_by_role("button", name="Check for updates").click()
    expect(line).to_contain_text("update to v2.0.0")
    expect(line.get_by_role("button", name="Reinstall aged…")).to_be_visible()
    notice = page.get_by_text("1 update available").locator("..")
    assert notice.evaluate(_LOOKS) == ["3px", "1px", "1px", "1px", "rgba(0, 0, 0, 0)"]

    upgrade_one_by_one(page, line)
    line.get_by_role("button", name="Delete aged…").click()
    question = page.get_by_role("dialog", name="Delete aged on 2 nodes")
    expect(question.get_by_role("list", name="Nodes")).to_contain_text(re.compile("fine.*slow", re.DOTALL))
    question.get_by_role("button", name="Cancel").click()
    expect(line).to_be_visible()
    line.get_by_role("button", name="Delete aged…").click()
    question.get_by_role("button", name="Delete 2 nodes").click()
    expect(question).to_have_count(0)
    expect(line).to_have_count(0)
    assert page.evaluate("window.neverReloaded") is True


@pytest.mark.rule("E52")
def test_an_upgrade_of_two_nodes_is_one_operation_in_waves(screen: Screen, aged: Fleet) -> None:
    """The canary first, then the other node; one operation with two parts."""
    page = screen.go(INSTALLED)
    line = line_of(page, "aged")
    expect(line).to_contain_text("2 nodes")
    aged.publish("aged", "3.0.0")
    page.get_by_role("button", name="Check for updates").click()
    expect(line).to_contain_text("update to v3.0.0")
    line.get_by_role("button", name="Upgrade aged…").click()
    question = page.get_by_role("dialog", name="Upgrade aged on 2 nodes")
    expect(question.get_by_role("radio", name=re.compile("^In waves"))).to_be_checked()
    question.get_by_role("button", name="Upgrade 2 nodes").click()
    expect(question).to_have_count(0)
    expect(line).not_to_contain_text("update to", timeout=120_000)
    expect(line).to_contain_text("v3.0.0")
    last = aged.get("/api/operations/history?backend=aged&kind=backend_upgrade").json()["operations"][0]
    assert sorted(part["wave"] for part in last["nodes"]) == [0, 1]
    assert last["waves"]["count"] == 2


@pytest.mark.rule("E45", "E48")
def test_what_shows_is_in_the_address_and_a_failure_beside_its_backend(
    screen: Screen, settled: Fleet
) -> None:
    """An unknown view is the catalogue; search and tab come back with the address, and so does a page."""
    install(settled, "parted", "fine")
    page = screen.go("/app/backends?view=nonsense")
    expect(page.get_by_role("link", name="Catalogue")).to_have_attribute("aria-current", "page")
    page.get_by_role("navigation", name="Views of backends").get_by_role("link", name="Installed").click()
    page.get_by_role("searchbox", name="Search installed backends").fill("part")
    page.get_by_role("button", name=re.compile("^User")).click()
    expect(page).to_have_url(re.compile(r"view=installed&q=part&state=user$"))
    page.reload()
    expect(page.get_by_role("searchbox", name="Search installed backends")).to_have_value("part")
    expect(page.get_by_role("button", name=re.compile("^User"))).to_have_attribute("aria-pressed", "true")
    line = line_of(page, "parted")
    # Its files are gone from where the gallery says they are.
    source = settled.sources / "parted"
    source.rename(source.with_name("parted-away"))
    line.get_by_role("button", name="Reinstall parted…").click()
    page.get_by_role("dialog").get_by_role("button", name="Reinstall", exact=True).click()
    line.get_by_role("link", name="Could not install backend on fine").click()
    source.with_name("parted-away").rename(source)
    work = page.get_by_role("region", name="Operations")
    expect(work.get_by_role("group", name="Details of the failure of parted")).to_be_visible()
    expect(
        page.get_by_role("table", name="Nodes with parted").get_by_role("link", name="fine")
    ).to_be_visible()
    work.get_by_role("button", name="Dismiss parted on fine").click()
    expect(work).to_have_count(0)
    page.go_back()
    expect(page.get_by_role("searchbox", name="Search installed backends")).to_have_value("part")
    expect(line).not_to_contain_text("Could not install")


@pytest.mark.rule("E54")
def test_a_backend_is_installed_from_an_address(screen: Screen, settled: Fleet) -> None:
    """What is missing is said under the form; then it goes like any other install."""
    page = screen.go("/app/backends")
    page.get_by_role("button", name="Install a backend…").click()
    dialog = page.get_by_role("dialog", name="Install a backend")
    dialog.get_by_role("button", name="By address").click()
    dialog.get_by_role("textbox", name="Address").fill("oci://images.test/byhand:1")
    dialog.get_by_role("button", name="Choose nodes").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Enter a name")
    dialog.get_by_role("textbox", name="Address").fill(str(settled.sources / "byhand"))
    dialog.get_by_role("textbox", name="Name").fill("my-own")
    dialog.get_by_role("button", name="Choose nodes").click()
    dialog = page.get_by_role("dialog", name="Install my-own")
    expect(dialog).to_contain_text(f"from {settled.sources / 'byhand'}")
    dialog.get_by_role("checkbox", name="Select fine").check()
    dialog.get_by_role("button", name="Install on 1 node").click()
    expect(dialog.get_by_test_id("picker-tally")).to_have_text("1 of 1 done", timeout=120_000)
    dialog.get_by_role("button", name="Close").last.click()
    page.get_by_role("link", name="Installed", exact=True).click()
    line_of(page, "my-own").get_by_role("link", name="my-own").click()
    expect(page.get_by_role("region", name="Backend")).to_contain_text(str(settled.sources / "byhand"))


@pytest.mark.parametrize("narrow", [True, False], ids=["phone", "desktop"])
def test_the_view_and_the_page_fit_and_axe_finds_nothing(
    window: Opener, settled: Fleet, session: Cookies, narrow: bool
) -> None:
    install(settled, "parted", "fine")
    page = window(settled.webs[0].url, session, narrow=narrow).go(INSTALLED)
    expect(line_of(page, "parted")).to_be_visible()
    assert (checks.sideways(page), checks.violations(page)) == ([], [])
    line_of(page, "parted").get_by_role("link", name="parted", exact=True).click()
    expect(
        page.get_by_role("table", name="Nodes with parted").get_by_role("link", name="fine")
    ).to_be_visible()
    assert (checks.sideways(page), checks.violations(page)) == ([], [])
