"""The strip and Activity: what runs, what failed, and who else sees it."""

import re
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import Opener
from tests.browser.fleet import WORKERS, Cookies, Fleet
from tests.browser.screen import Screen
from tests.conftest import eventually

AT_ONCE = 10_000
"""Milliseconds within which one browser sees what another one did: one second where nothing else runs."""
_LISTEN = """() => {
  window.announced = [];
  const region = document.querySelector("[data-testid=announcer]");
  new MutationObserver(() => window.announced.push(region.textContent)).observe(region,
    { childList: true, characterData: true, subtree: true });
}"""


def strip_of(page: Page) -> Locator:
    """The line on top of the page."""
    return page.get_by_test_id("operations-strip")


def strip_says(page: Page, words: str | re.Pattern[str], timeout: float | None = None) -> None:
    """The line shows these words, as a person reads it."""
    expect(strip_of(page)).to_contain_text(words, use_inner_text=True, timeout=timeout)


@pytest.fixture
def only_slow(settled: Fleet) -> Iterator[Fleet]:
    """The cluster with the slow worker as the only one that takes new work."""
    others = [name for name in WORKERS if name != "slow"]
    for name in others:
        assert settled.post(f"/api/nodes/{settled.id(name)}/drain").status_code == 200
    yield settled
    settled.resume_all()


@pytest.mark.rule("UI-1.1", "UI-1.3", "UI-1.7", "E20", "E25", "A27")
def test_an_install_is_one_named_line_with_bytes_and_a_bar(screen: Screen, settled: Fleet) -> None:
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    expect(strip_of(page)).to_have_count(0)
    settled.install("slow", "striped")
    strip = strip_of(page)
    strip_says(page, "Installing backend striped")
    strip_says(page, "on slow")
    strip_says(page, re.compile(r"MiB / 11\.4 MiB"))
    bar = strip.get_by_role("progressbar", name="Installing backend striped")
    expect(bar).to_have_attribute("aria-valuemax", "100")
    assert 0 < int(bar.get_attribute("aria-valuenow") or 0) < 100
    strip_says(page, "Installed backend striped on slow")
    expect(strip).to_have_count(0)


@pytest.mark.rule("UI-1.2", "UI-1.5", "UI-1.9", "UI-9.1", "E16", "E26", "O52", "O48")
def test_a_failure_stays_until_it_is_dismissed_and_then_goes_everywhere(
    window: Opener, settled: Fleet, session: Cookies
) -> None:
    one = window(settled.webs[0].url, session).go("/app/activity")
    other = window(settled.webs[1].url, session).go("/app/activity")
    for page in (one, other):
        expect(page.get_by_test_id("connection")).to_have_text("Live")
    settled.install("failing", "doomed")
    for page in (one, other):
        strip_says(page, "Could not install backend")
        strip_says(page, "LOCALAI_WORKER_SOURCE_ROOTS")
    strip_of(one).get_by_role("button", name="Dismiss the failure of doomed").click()
    expect(strip_of(other)).to_have_count(0, timeout=AT_ONCE)
    expect(strip_of(one)).to_have_count(0, timeout=AT_ONCE)


@pytest.mark.rule("UI-1.8", "E17", "E24")
def test_a_hidden_line_comes_back_for_another_one_and_hiding_stops_nothing(
    screen: Screen, settled: Fleet
) -> None:
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    hidden = settled.install("slow", "calm")
    page.get_by_role("button", name="Hide calm").click()
    expect(strip_of(page)).to_have_count(0)
    settled.install("failing", "doomed")
    strip_says(page, "Could not install backend")
    eventually(lambda: settled.ended(hidden), what="the hidden install ends")
    assert settled.get(f"/api/backends/job/{hidden}").json()["completed"]


@pytest.mark.rule("UI-1.4")
def test_a_load_that_a_request_started_shows(screen: Screen, only_slow: Fleet) -> None:
    page = screen.go("/app/activity")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    asked = threading.Thread(target=only_slow.cluster.embed, args=(only_slow.webs[1],))
    asked.start()
    strip_says(page, "Loading model echo")
    strip_says(page, "slow")
    asked.join(60)
    strip_says(page, "Loaded model echo")
    expect(strip_of(page)).to_have_count(0)


@pytest.mark.rule("UI-9.9")
def test_ends_are_announced_and_ticks_are_not(screen: Screen, settled: Fleet) -> None:
    page = screen.go("/app/nodes")
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    page.evaluate(_LISTEN)
    settled.install("slow", "quick")
    expect(page.get_by_test_id("announcer")).to_have_text("Installed backend quick on slow")
    assert page.evaluate("window.announced") == ["Installed backend quick on slow"]
