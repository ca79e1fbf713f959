"""The install picker: three nodes, one slow and one failing, and a dialog that is closed in the middle."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.fleet import Fleet
from tests.browser.screen import Screen
from tests.browser.test_operations import strip_of, strip_says
from tests.conftest import eventually

INSTALLED = 120_000
"""Milliseconds that the slow worker may take."""


def open_picker(page: Page, backend: str, *names: str) -> Locator:
    """The dialog with these nodes chosen."""
    page.get_by_role("button", name=f"Install {backend}…").click()
    dialog = page.get_by_role("dialog", name=f"Install {backend}")
    for name in names:
        dialog.get_by_role("checkbox", name=f"Select {name}").check()
    return dialog


def line_of(dialog: Locator, name: str) -> Locator:
    """The row of a node."""
    return dialog.get_by_role("row").filter(has=dialog.page.get_by_text(name, exact=True))


@pytest.fixture
def repairable(settled: Fleet) -> Iterator[Fleet]:
    """The cluster; the failing worker fails again afterwards."""
    yield settled
    settled.break_again()


@pytest.mark.rule("UI-9.14", "A29", "A30", "A31", "A32", "A33", "UW25")
def test_three_nodes_are_watched_to_the_end_and_what_failed_is_tried_again(
    screen: Screen, repairable: Fleet
) -> None:
    page = screen.go("/app/backends")
    dialog = open_picker(page, "rolling", "fine", "slow", "failing")
    dialog.get_by_role("button", name="Install on 3 nodes").click()
    expect(line_of(dialog, "fine")).to_contain_text("Installed")
    expect(line_of(dialog, "slow")).to_contain_text("Installing")
    expect(dialog.get_by_role("progressbar", name="Installing on slow")).to_be_visible()
    expect(line_of(dialog, "failing")).to_contain_text("LOCALAI_WORKER_SOURCE_ROOTS")
    expect(line_of(dialog, "slow")).to_contain_text("Installed", timeout=INSTALLED)
    expect(dialog.get_by_test_id("picker-tally")).to_have_text("2 of 3 done, 1 failed")
    repairable.repair()
    dialog.get_by_role("button", name="Retry failed (1)").click()
    expect(dialog.get_by_test_id("picker-tally")).to_have_text("3 of 3 done", timeout=INSTALLED)
    expect(line_of(dialog, "failing")).to_contain_text("Installed")
    dialog.get_by_role("button", name="Close").last.click()
    expect(page.get_by_role("row").filter(has_text="Runs rolling.")).to_contain_text("on 3 nodes")


@pytest.mark.rule("UI-9.15", "A35")
def test_the_dialog_is_closed_in_the_middle_and_nothing_is_lost(screen: Screen, settled: Fleet) -> None:
    if "closing" in installed_on(settled, "slow"):  # this test is repeated
        job = settled.post(f"/api/nodes/{settled.id('slow')}/backends/delete", {"backend": "closing"}).json()[
            "jobID"
        ]
        eventually(lambda: settled.ended(job), seconds=60, what="closing is deleted")
    page = screen.go("/app/backends")
    dialog = open_picker(page, "closing", "slow")
    dialog.get_by_role("button", name="Install on 1 node").click()
    expect(line_of(dialog, "slow")).to_contain_text("Installing")
    dialog.get_by_role("button", name="Continue in background").click()
    expect(dialog).to_have_count(0)
    strip_says(page, "Installing backend closing")
    again = open_picker(page, "closing")
    expect(line_of(again, "slow")).to_contain_text("Installing")
    expect(line_of(again, "slow")).to_contain_text("Installed", timeout=INSTALLED)
    page.keyboard.press("Escape")
    expect(again).to_have_count(0)
    expect(strip_of(page)).to_have_count(0)
    assert "closing" in installed_on(settled, "slow")


def installed_on(fleet: Fleet, name: str) -> list[str]:
    """The backends that the node has, by the API."""
    return [row["name"] for row in fleet.get(f"/api/nodes/{fleet.id(name)}/backends").json()]


@pytest.mark.rule("UI-4.12")
def test_what_is_there_already_is_said_before_anything_is_pressed(screen: Screen, settled: Fleet) -> None:
    job = settled.install("fine", "present")
    page = screen.go("/app/backends")
    expect(page.get_by_role("row").filter(has_text="Runs present.")).to_contain_text("on 1 node")
    assert settled.ended(job)
    dialog = open_picker(page, "present")
    expect(line_of(dialog, "fine").get_by_role("checkbox")).to_be_disabled()
    expect(line_of(dialog, "fine")).to_contain_text("Already installed")
    expect(dialog.get_by_role("button", name="Install", exact=True)).to_have_attribute(
        "aria-disabled", "true"
    )
