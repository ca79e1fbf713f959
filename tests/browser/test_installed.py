"""The view of installed backends: what changes under the reader, what is asked, and install by address."""

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
    """The line of a backend."""
    named = page.get_by_text(backend, exact=True)
    return page.get_by_role("list", name="Installed backends").get_by_role("listitem").filter(has=named).first


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


@pytest.mark.rule("A51", "A87", "O101", "O102", "E47", "E52", "E57")
def test_a_new_version_is_seen_installed_and_gone_again_without_a_reload(screen: Screen, aged: Fleet) -> None:
    """Check, upgrade of one node, drift, upgrade of the other, deletion: the page is never loaded again."""
    page = screen.go(INSTALLED)
    line = line_of(page, "aged")
    expect(line).to_contain_text("v1.0.0")
    expect(line).to_contain_text("on 2 nodes")
    expect(line).not_to_contain_text("update to")
    page.evaluate(_STAYS)
    aged.publish("aged", "2.0.0")
    page.get_by_role("button", name="Check for updates").click()
    expect(line).to_contain_text("update to v2.0.0")
    expect(line.get_by_role("button", name="Reinstall aged…")).to_be_visible()
    notice = page.get_by_text("1 update available").locator("..")
    assert notice.evaluate(_LOOKS) == ["3px", "1px", "1px", "1px", "rgba(0, 0, 0, 0)"]

    line.get_by_role("button", name="on 2 nodes: aged").click()
    line.get_by_role("checkbox", name="Select fine for aged").check()
    line.get_by_role("button", name="Upgrade aged…").click()
    question = page.get_by_role("dialog", name="Upgrade aged on fine")
    expect(question).to_contain_text("no replica stops")
    question.get_by_role("button", name="Upgrade").click()
    expect(line).to_contain_text("1 node differs")
    fine = line.get_by_role("listitem").filter(has_text="fine")
    expect(fine).to_contain_text("v2.0.0")
    expect(line.get_by_role("listitem").filter(has_text="slow")).to_contain_text("differs")

    line.get_by_role("checkbox", name="Select fine for aged").uncheck()
    line.get_by_role("button", name="Upgrade aged…").click()
    page.get_by_role("dialog", name="Upgrade aged on slow").get_by_role("button", name="Upgrade").click()
    expect(line).not_to_contain_text("update to", timeout=120_000)
    expect(line).not_to_contain_text("differs")
    expect(line).to_contain_text("v2.0.0")

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
    expect(line).to_contain_text("on 2 nodes")
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
    """An unknown view is the catalogue; search, tab and open line come back with the address."""
    install(settled, "parted", "fine")
    page = screen.go("/app/backends?view=nonsense")
    expect(page.get_by_role("link", name="Catalogue")).to_have_attribute("aria-current", "page")
    page.get_by_role("navigation", name="Views of backends").get_by_role("link", name="Installed").click()
    page.get_by_role("searchbox", name="Search installed backends").fill("part")
    page.get_by_role("button", name=re.compile("^User")).click()
    line_of(page, "parted").get_by_role("button", name="on 1 node: parted").click()
    expect(page).to_have_url(re.compile(r"view=installed&q=part&state=user&backend=parted"))
    page.reload()
    expect(page.get_by_role("searchbox", name="Search installed backends")).to_have_value("part")
    expect(page.get_by_role("button", name=re.compile("^User"))).to_have_attribute("aria-pressed", "true")
    line = line_of(page, "parted")
    expect(line.get_by_role("link", name="fine")).to_be_visible()
    # Its files are gone from where the gallery says they are.
    source = settled.sources / "parted"
    source.rename(source.with_name("parted-away"))
    line.get_by_role("button", name="Reinstall parted…").click()
    page.get_by_role("dialog").get_by_role("button", name="Reinstall", exact=True).click()
    expect(line).to_contain_text("Could not install backend on fine")
    source.with_name("parted-away").rename(source)
    line.get_by_role("button", name="Dismiss parted on fine").click()
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
    expect(line_of(page, "my-own")).to_contain_text(f"from {settled.sources / 'byhand'}")


def test_the_view_fits_a_phone_and_axe_finds_nothing(
    window: Opener, settled: Fleet, session: Cookies
) -> None:
    install(settled, "parted", "fine")
    page = window(settled.webs[0].url, session, narrow=True).go(f"{INSTALLED}&backend=parted")
    expect(line_of(page, "parted").get_by_role("link", name="fine")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert checks.violations(page) == []
