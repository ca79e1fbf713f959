"""Fixtures of the browser's tests: one Chromium, one cluster, windows under watch.

Playwright keeps an event loop in the main thread, which Django's ORM refuses to share; so Chromium and what
it looks at end with the last test of this package, before the process goes on to other tests. `shared_by` in
`tests/scheduling.py` says which files share a cluster. Tests speak to it by HTTP and through its processes.
"""

import re
from collections.abc import Callable, Generator, Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.browser import install
from tests.browser.fleet import Cookies, Fleet, running_fleet, seeded, sign_in
from tests.browser.screen import Screen, settings
from tests.browser.wire import Wire
from tests.support.cluster import ROOT

PICTURES = ROOT / "build" / "browser"
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb", "--hide-scrollbars"]
CROWD_PACE = "0.2"
"""Slower than in life: the controller and every open page react to each change of five hundred nodes."""
LEASE = "30s"
"""No test here waits for the end of a lease; short ones cost the idle controller a look every two seconds."""
PATIENCE = 60_000
"""Milliseconds that an expectation waits: on a busy machine everything takes its time."""

Opener = Callable[..., Screen]

expect.set_options(timeout=PATIENCE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tells the fixtures whether the test failed."""
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """The browser of this run; without one every test is skipped, saying how to have it."""
    program = install.chromium()
    if not program:
        pytest.skip(install.LEFT_OUT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def fleet(chromium: Browser) -> Iterator[Fleet]:
    """The cluster of this run: two web processes, three workers."""
    with running_fleet(tasks=True, CLUSTER_OPERATION_LEASE=LEASE) as running:
        yield running


@pytest.fixture(scope="package")
def crowd(chromium: Browser) -> Iterator[Fleet]:
    """A cluster of five hundred seeded nodes, hostile names among them, with twenty moving operations."""
    with (
        running_fleet(webs=1, workers=(), CLUSTER_OPERATION_LEASE=LEASE) as running,
        seeded(running.cluster, 500, 20, 7_200, "--pace", CROWD_PACE),
    ):
        yield running


@pytest.fixture
def settled(fleet: Fleet) -> Iterator[Fleet]:
    """The cluster with nothing under way and no failure, before and after."""
    fleet.settle()
    yield fleet
    fleet.settle()


@pytest.fixture
def wire(fleet: Fleet) -> Iterator[Wire]:
    """A line to the first web process that the test may cut."""
    with Wire(fleet.webs[0].port) as line:
        yield line


@pytest.fixture(scope="package")
def session(fleet: Fleet) -> Cookies:
    """The session that all tests share which do not end it."""
    return sign_in(fleet.webs[0].url)


@pytest.fixture(scope="package")
def crowd_session(crowd: Fleet) -> Cookies:
    """The session at the crowded cluster."""
    return sign_in(crowd.webs[0].url)


@pytest.fixture
def window(request: pytest.FixtureRequest, chromium: Browser) -> Iterator[Opener]:
    """Opens windows: `window(url, cookies, narrow=…, dark=…, still=…)`. All must have been quiet."""
    screens: list[Screen] = []

    def opened(url: str, cookies: Cookies = (), **how: bool) -> Screen:
        context = chromium.new_context(**settings(**how))
        context.set_default_timeout(PATIENCE)
        if cookies:
            context.add_cookies(cookies)
        screens.append(Screen(context, context.new_page(), url, cookies))
        return screens[-1]

    yield opened
    failed = request.node.stash.get(_FAILED, True)
    if failed:
        _picture(request.node.nodeid, screens)
    problems = [told for screen in screens for told in screen.problems]
    for screen in screens:
        screen.context.close()
    assert failed or not problems, problems


def _picture(name: str, screens: list[Screen]) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", name.rpartition("/")[2])
    for number, screen in enumerate(screens):
        screen.page.screenshot(path=PICTURES / f"{stem}-{number}.png")
        print(f"window {number}: {screen.page.url}: {screen.seen}")


@pytest.fixture
def screen(window: Opener, fleet: Fleet, session: Cookies) -> Screen:
    """A wide, light window of a signed-in admin."""
    return window(fleet.webs[0].url, session)


@pytest.fixture
def packed(window: Opener, crowd: Fleet, crowd_session: Cookies) -> Screen:
    """The same, at the crowded cluster."""
    return window(crowd.webs[0].url, crowd_session)
