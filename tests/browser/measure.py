"""The browser's part of `make measure`: page loads, interaction to next paint, long tasks, charts, memory.

Five hundred seeded nodes and two hundred operations move all the while, and nineteen other clients read the
feed. A page is there once it shows its heading and nothing that loads; cold is a new browser context, without
cache. Chromium itself says how long each
interaction took until its paint (event timing, in steps of 8 ms; what took less than 16 ms it does not tell
of). `HEAP_MINUTES` shortens the ten minutes between the two looks at the heap.
"""

import math
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from threading import Thread

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from rich.console import Console
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from localai_cluster.embedded import build
from localai_cluster.kit import clock
from tests.browser import install, week
from tests.browser.conftest import ARGUMENTS
from tests.browser.fleet import Fleet, running_fleet, seeded, sign_in
from tests.browser.screen import PAGES, settings
from tests.measure.table import Measured, show
from tests.support.cluster import ADMIN

NODES, OPERATIONS, READERS = 500, 200, 19
COLD, IN_APP = 1000.0, 200.0
"""Milliseconds until a page is there, of 95 in 100 loads."""
NEXT_PAINT, LONG_TASK, CHARTS, GROWTH = 200.0, 100.0, 300.0, 10.0
CHARTED = "gpu-h100-106"
TURNS = 7
WARM_UP_SECONDS = 120.0
"""Until the page remembers as many ended operations as it ever will."""
TOLD_FROM = 16
"""Milliseconds from which Chromium reports an interaction."""
PATIENCE = 30_000

_OBSERVE = """
window.interactions = new Map();
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) {
    if (one.interactionId === 0) continue;
    const before = window.interactions.get(one.interactionId) ?? 0;
    window.interactions.set(one.interactionId, Math.max(before, one.duration));
  }
}).observe({ type: "event", durationThreshold: 16, buffered: true });
window.tasks = [];
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.tasks.push(task.duration);
}).observe({ type: "longtask" });
"""
_TASKS = "() => window.tasks.splice(0)"
"""Durations in ms of the tasks of 50 ms and more since the last call."""
_TOLD = "() => [...window.interactions.values()]"
_IS_THERE = """(path, heading) => {
  const shown = document.querySelector("h1")?.textContent;
  const states = [...document.querySelectorAll("[role=status]")].map((one) => one.textContent);
  const waits = states.some((text) => text.includes("Loading"));
  return location.pathname === path && !waits && (heading ? shown === heading : Boolean(shown));
}"""
_COLD = f"(path) => ({_IS_THERE})(path, '') && [performance.now(), document.querySelector('h1').textContent]"
_IN_APP = f"""async ([path, heading]) => {{
  const began = performance.now();
  document.querySelector(`a[href="${{path}}"]`).click();
  while (!({_IS_THERE})(path, heading)) await new Promise(requestAnimationFrame);
  return performance.now() - began;
}}"""
_WEEK = """async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const context = CanvasRenderingContext2D.prototype;
  const { clearRect } = context;
  let drawings = 0;
  context.clearRect = function (...box) {
    drawings += 1;
    return clearRect.apply(this, box);
  };
  const buttons = [...document.querySelectorAll("[aria-label='Period'] button")];
  const began = performance.now();
  buttons.find((button) => button.textContent === "Week").click();
  const sliders = () => [...document.querySelectorAll(".chart [role=slider]")];
  while (sliders().length < 6 || sliders().some((slider) => slider.ariaValueMax > 200)) await frame();
  await frame();
  await frame();
  return [performance.now() - began, drawings / sliders().length];
}"""
"""Presses *Week*, waits until every chart is drawn with its 169 hours, and counts how often each was."""


_cookies = cache(sign_in)


def minutes() -> float:
    """Between the two looks at the heap."""
    return float(os.environ.get("HEAP_MINUTES", "10"))


class Person:
    """Uses a page and counts what he does; durations are the browser's."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.done = 0

    def type(self, text: str) -> None:
        """Types into what has the focus, a letter at a time."""
        for letter in text:
            self.page.keyboard.press(letter)
            self.done += 1
            self._paint()

    def click(self, what: Locator) -> None:
        """Presses it."""
        what.click()
        self.done += 1
        self._paint()

    def _paint(self) -> None:
        """Two frames: people do not press faster than they see."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def durations(self) -> list[float]:
        """Of everything done, longest first, in ms; what the browser does not report took less than 16."""
        told = sorted(self.page.evaluate(_TOLD), reverse=True)[: self.done]
        return told + [float(TOLD_FROM)] * (self.done - len(told))


def use(page: Page, fleet: Fleet) -> list[float]:
    """An operator's minute: filters, sorts, opens the strip and rows, searches."""
    person = Person(page)
    box = page.get_by_role("searchbox", name="Filter nodes")
    for words in ("gpu-h100", "status:draining", "site=oslo nvidia"):
        box.focus()
        person.type(words)
        box.fill("")
    for header in page.get_by_role("columnheader").get_by_role("button").all() * 2:
        person.click(header)
    for _ in range(5):
        person.click(page.get_by_role("button", name="Show every operation"))
        person.click(page.get_by_role("button", name="Hide the list"))
    for name in ("gpu-a100-112", "cpu-110", "arc-109", "mi300-108", "gpu-h100-106"):
        box.fill(name)
        person.click(page.get_by_role("grid", name="Nodes").get_by_role("link", name=name, exact=True))
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        person.click(page.get_by_role("link", name="← All nodes"))
    for _ in range(3):
        page.keyboard.press("Control+k")
        expect(page.get_by_role("combobox", name="Search")).to_be_focused()
        person.type("whisper")
        page.keyboard.press("Escape")
    return person.durations()


def loads(browser: Browser, fleet: Fleet) -> list[Measured]:
    """How long each page takes to be there, cold and from another page of the application."""
    cold: dict[str, list[float]] = {name: [] for name in PAGES}
    in_app: dict[str, list[float]] = {name: [] for name in PAGES}
    headings: dict[str, str] = {}
    for _ in range(TURNS):
        for name, path in PAGES.items():
            with fresh(browser, fleet) as page:
                page.goto(f"{fleet.webs[0].url}{path}", wait_until="commit")
                took, headings[name] = page.wait_for_function(_COLD, arg=path).json_value()
                cold[name].append(took)
    with fresh(browser, fleet) as page:
        page.goto(f"{fleet.webs[0].url}{PAGES['health']}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        for _ in range(TURNS):
            for name, path in PAGES.items():
                in_app[name].append(page.evaluate(_IN_APP, [path, headings[name]]))
    return [*_loads("cold", cold, COLD), *_loads("in the application", in_app, IN_APP)]


def _loads(kind: str, took: dict[str, list[float]], limit: float) -> list[Measured]:
    """The median of each page, and of all loads the one that 95 in 100 do not exceed."""
    sorted_times = sorted(time for times in took.values() for time in times)
    slow = sorted_times[math.ceil(0.95 * len(sorted_times)) - 1]
    pages = [Measured(f"{name}, {kind}", statistics.median(times), unit="ms") for name, times in took.items()]
    return [*pages, Measured(f"pages {kind}, p95", slow, limit, unit="ms")]


def interactions(page: Page, fleet: Fleet) -> list[Measured]:
    """How long they took until the next paint."""
    page.evaluate(_TASKS)
    found = use(page, fleet)
    tasks = [took for took in page.evaluate(_TASKS) if took > LONG_TASK]
    ninety_eighth = found[len(found) - math.ceil(0.98 * len(found))]
    return [
        Measured("interactions measured", len(found), unit=""),
        Measured("interaction to next paint, p98", ninety_eighth, NEXT_PAINT, unit="ms"),
        Measured("interaction to next paint, worst", found[0], NEXT_PAINT, unit="ms"),
        Measured(f"tasks above {LONG_TASK:g} ms", len(tasks), 0, unit=""),
    ]


def charts(page: Page, fleet: Fleet) -> list[Measured]:
    """From the press to the drawn week of eight GPUs, each time in a page that was loaded anew."""
    node = fleet.id(CHARTED)
    week.plant(fleet.cluster, node, clock.now())
    took = []
    for _ in range(TURNS):
        page.goto(f"{fleet.webs[0].url}/app/nodes/{node}")
        # Nothing is planted for the last hour.
        expect(page.get_by_text("no figures in this period.")).to_be_visible()
        milliseconds, drawings = page.evaluate(_WEEK)
        took.append(float(milliseconds))
    took.sort()
    return [
        Measured("charts of 8 GPUs over a week, median", took[TURNS // 2], CHARTS, unit="ms"),
        Measured("charts of 8 GPUs over a week, worst", took[-1], unit="ms"),
        Measured("drawings of each of these charts", float(drawings), 1, unit=""),
    ]


def heap(page: Page) -> float:
    """Bytes in use after everything that can go is gone."""
    debugger = page.context.new_cdp_session(page)
    for _ in range(3):
        debugger.send("HeapProfiler.collectGarbage")
    used = float(debugger.send("Runtime.getHeapUsage")["usedSize"])
    debugger.detach()
    return used


def changes(fleet: Fleet) -> int:
    """How many changes of operations there have been."""
    return int(fleet.cluster.rows("SELECT value FROM operation_sequence")[0][0])


def memory(page: Page, fleet: Fleet) -> list[Measured]:
    """The heap before and after the minutes, with the strip open over the list."""
    page.get_by_role("button", name="Show every operation").click()
    page.wait_for_timeout(1000 * WARM_UP_SECONDS)
    before, told, began = heap(page), changes(fleet), clock.monotonic()
    page.wait_for_timeout(60_000 * minutes())
    after, passed = heap(page), (clock.monotonic() - began) / 60
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    return [
        Measured("changes of operations a minute", (changes(fleet) - told) / passed, unit=""),
        Measured("heap at first", before / 2**20, unit="MiB"),
        Measured(f"heap after {passed:.0f} min of events", after / 2**20, unit="MiB"),
        Measured("growth of the heap", 100 * (after - before) / before, GROWTH, unit="%"),
    ]


@contextmanager
def fresh(browser: Browser, fleet: Fleet) -> Iterator[Page]:
    """A page of a signed-in user, with an empty cache."""
    context = browser.new_context(**settings())
    context.set_default_timeout(PATIENCE)
    context.add_init_script(_OBSERVE)
    context.add_cookies(list(_cookies(fleet.webs[0].url)))
    yield context.new_page()
    context.close()


@contextmanager
def opened(browser: Browser, fleet: Fleet) -> Iterator[Page]:
    """The list of nodes, live."""
    with fresh(browser, fleet) as page:
        page.goto(f"{fleet.webs[0].url}/app/nodes")
        expect(page.get_by_role("grid", name="Nodes")).to_have_attribute("aria-rowcount", str(NODES + 1))
        yield page


@contextmanager
def read_by_others(fleet: Fleet) -> Iterator[None]:
    """Other clients read the feed all the while."""
    url = fleet.webs[0].url.replace("http", "ws", 1) + "/ws/feed"
    with ExitStack() as stack:
        for _ in range(READERS):
            link = stack.enter_context(connect(url, additional_headers=ADMIN, proxy=None, max_size=None))
            Thread(target=_read, args=[link], daemon=True).start()
        yield


def _read(link: ClientConnection) -> None:
    with suppress(ConnectionClosed):
        for _ in link:
            pass


def measure(program: str) -> list[Measured]:
    """All of it."""
    seconds = 60 * minutes() + 600
    with (
        running_fleet(webs=1, workers=()) as fleet,
        seeded(fleet.cluster, NODES, OPERATIONS, seconds),
        read_by_others(fleet),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        waited = loads(browser, fleet)
        with opened(browser, fleet) as page:
            found = interactions(page, fleet) + charts(page, fleet)
        with opened(browser, fleet) as page:
            found += memory(page, fleet)
        browser.close()
    first = build.first_page_bytes() / 1024
    return [
        *waited,
        *found,
        Measured("first load, compressed", first, build.MAX_FIRST_PAGE_BYTES / 1024, unit="kB"),
    ]


def main() -> int:
    """The command; 1 if a limit is not held. Without a browser it says so."""
    program, console = install.chromium(), Console(highlight=False)
    if not program:
        console.print("measure: no Chromium, so nothing of the pages is measured.", soft_wrap=True)
        return 0
    expect.set_options(timeout=PATIENCE)
    console.print(f"pages: {NODES} nodes, {OPERATIONS} moving operations, {minutes():g} minutes …")
    return 0 if show(measure(program), console) else 1


if __name__ == "__main__":
    sys.exit(main())
