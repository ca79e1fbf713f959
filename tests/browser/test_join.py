"""Add a node: from the button to a connected machine, with a real worker; on a phone and by the keyboard."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import Screen
from tests.conftest import eventually
from tests.support.cluster import Process

NAME = "joiner"


@pytest.fixture
def joiners(fleet: Fleet) -> Iterator[list[Process]]:
    """Workers that a test starts; gone afterwards, with their nodes."""
    started: list[Process] = []
    yield started
    for process in started:
        process.child.terminate()
        process.child.wait(20)
    if fleet.cluster.node(fleet.webs[0], NAME):
        fleet.remove(NAME)


def steps(page: Page) -> Locator:
    """The panel, opened."""
    page.get_by_role("button", name="Add a node").click()
    return page.get_by_role("region", name="Add a node")


def line_of(panel: Locator) -> str:
    """The line that is shown."""
    return panel.get_by_text(re.compile(r"^T=join-")).inner_text()


def token_of(line: str) -> str:
    """The token in it."""
    found = re.match(r"T=(join-[0-9a-f]{64}); ", line)
    assert found is not None, line
    return found[1]


@pytest.mark.rule("UI-3.7", "UI-3.8", "UW21")
def test_a_machine_joins_is_compared_approved_and_connected(
    screen: Screen, fleet: Fleet, joiners: list[Process]
) -> None:
    page = screen.go("/app/nodes")
    panel = steps(page)
    panel.get_by_label("Note (optional)").fill("rack 4")
    panel.get_by_role("button", name="Generate join command").click()
    line = line_of(panel)
    assert f"LOCALAI_REGISTER_TO={fleet.webs[0].url} " in line
    expect(panel).to_contain_text("Other machines cannot reach")
    expect(panel.get_by_text("Waiting for the machine")).to_be_visible()
    token = token_of(line)
    joiners.append(
        fleet.cluster.worker(
            NAME,
            fleet.webs[0],
            wait=True,
            LOCALAI_REGISTRATION_TOKEN=token,
            LOCALAI_HEARTBEAT_INTERVAL="1s",
        )
    )
    card = panel.get_by_test_id(f"joined-{fleet.id(NAME)}")
    fingerprint = fleet.get(f"/api/nodes/{fleet.id(NAME)}").json()["identity"]["fingerprint"]
    expect(card).to_contain_text(" ".join(re.findall("....", fingerprint)[:4]))
    expect(card).to_contain_text("token rack 4, made by admin")
    eventually(lambda: " ".join(re.findall("....", fingerprint)[:4]) in joiners[0].output(), what="its log")
    expect(panel.get_by_test_id("token-remaining")).to_contain_text("used")
    expect(page.get_by_test_id("announcer")).to_contain_text("joiner has joined")
    assert checks.violations(page) == []
    card.get_by_role("button", name=f"Approve {NAME}").click()
    page.get_by_role("dialog").get_by_role("button", name="Approve", exact=True).click()
    expect(card.get_by_text("connected", exact=True)).to_be_visible()
    done = card.get_by_role("list", name=f"Checks of {NAME}").get_by_role("listitem")
    for text in ("Registered", "Approved", "Heartbeat", "Answers commands"):
        expect(done.filter(has_text=text)).to_contain_text("done")
    assert token not in page.content()


@pytest.mark.rule("UI-3.8", "UI-9.10")
def test_on_a_phone_and_by_the_keyboard(window: Opener, fleet: Fleet, session: Cookies) -> None:
    """Nothing scrolls sideways, axe has nothing to say, and the token is revoked without a mouse."""
    page = window(fleet.webs[0].url, session, narrow=True).go("/app/nodes")
    expect(page.get_by_role("button", name="Add a node")).to_be_visible()
    page.get_by_role("button", name="Add a node").focus()
    page.keyboard.press("Enter")
    panel = page.get_by_role("region", name="Add a node")
    assert checks.violations(page) == []
    page.keyboard.press("Tab")
    expect(panel.get_by_label("Valid for")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.type("0")
    expect(panel.get_by_role("alert")).to_have_text("Enter 1 to 1000.")
    page.keyboard.press("Backspace")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    line = line_of(panel)
    expect(panel.get_by_test_id("token-remaining")).to_contain_text("0 of 2 used")
    assert checks.sideways(page) == []
    assert checks.violations(page) == []
    panel.get_by_role("button", name=re.compile("^Revoke the token")).focus()
    page.keyboard.press("Enter")
    expect(panel.get_by_test_id("token-remaining")).to_contain_text("revoked")
    expect(panel.get_by_text(line)).to_have_count(0)
    tokens = fleet.get("/api/join-tokens").json()
    assert tokens[0]["state"] == "revoked"


@pytest.mark.rule("UI-3.8")
def test_a_token_from_another_visit_can_still_be_revoked(screen: Screen, fleet: Fleet) -> None:
    page = screen.go("/app/nodes")
    panel = steps(page)
    panel.get_by_label("Note (optional)").fill("left behind")
    panel.get_by_role("button", name="Generate join command").click()
    line_of(panel)
    page.reload()
    panel = steps(page)
    panel.get_by_text("Active tokens").click()
    panel.get_by_role("button", name="Revoke the token left behind").click()
    expect(panel.get_by_text("left behind")).to_have_count(0)
    found = next(one for one in fleet.get("/api/join-tokens").json() if one["note"] == "left behind")
    assert found["state"] == "revoked"
