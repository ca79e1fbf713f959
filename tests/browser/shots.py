"""`make shots`: the pictures of README and docs, taken of the running product.

Three real workers and three hundred seeded nodes, wide and narrow, light and dark. The old pictures stay
until all new ones are there. Every picture is small enough to be kept with the sources; one that is not is
named, and the command fails.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser import install
from tests.browser.conftest import ARGUMENTS
from tests.browser.fleet import PICTURED, WORKERS, Cookies, Fleet, running_fleet, seeded, sign_in
from tests.browser.screen import settings
from tests.conftest import eventually
from tests.support.cluster import ROOT

PICTURES = ROOT / "docs" / "pictures"
TAKEN = ROOT / "build" / "pictures"
NODES, OPERATIONS, SECONDS = 300, 60, 900
LARGEST = 250_000
"""Bytes of one picture."""
WIDE = {"width": 1400, "height": 700}
PATIENCE = 20_000
HOW = [(narrow, dark) for narrow in (False, True) for dark in (False, True)]

TALKER = "repeats-what-you-say"
SAID = """Bytes are shown in **binary** units:

```python
size, unit = 5_046_586_573 / 1024**3, "GiB"
```"""

Prepare = Callable[[Page, Fleet], None]


def plain(page: Page, fleet: Fleet) -> None:
    """The page as it opens."""


def opened_strip(page: Page, fleet: Fleet) -> None:
    """The strip opened to its list."""
    page.get_by_role("button", name="Show every operation").click()


def scrolled(page: Page, fleet: Fleet) -> None:
    """The list itself, below what is pinned."""
    page.get_by_role("search", name="Nodes").scroll_into_view_if_needed()
    page.evaluate(
        "document.querySelector('[role=search]').scrollIntoView({ block: 'start' }); scrollBy(0, -64)"
    )
    low = "document.elementFromPoint(innerWidth / 2, innerHeight - 80)"
    # Playwright's own waiting evaluates strings in the page, which the page's policy forbids.
    eventually(lambda: page.evaluate(f"!!{low}?.closest('[role=row], [role=listitem], li')"), what="rows")


def picker(page: Page, fleet: Fleet) -> None:
    """The picker with an install under way on three nodes; another backend each time."""
    backend = next(name for name in PICTURED if not on_fine(fleet, name))
    page.get_by_role("button", name=f"Install {backend}…").click()
    dialog = page.get_by_role("dialog")
    for name in WORKERS:
        dialog.get_by_role("searchbox").fill(name)
        dialog.get_by_role("checkbox", name=f"Select {name}", exact=True).check()
    dialog.get_by_role("searchbox").fill("")
    dialog.get_by_role("button", name="Install on 3 nodes").click()
    expect(dialog.get_by_role("progressbar", name="Installing on slow")).to_be_visible()
    expect(dialog.get_by_role("button", name="Retry failing")).to_be_visible()


def on_fine(fleet: Fleet, backend: str) -> bool:
    """Whether an earlier picture has installed it."""
    found = fleet.get(f"/api/nodes/{fleet.id('fine')}/backends").json()
    return any(row["name"] == backend for row in found)


def search(page: Page, fleet: Fleet) -> None:
    """The search with something in it."""
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Search").fill("a100")
    expect(page.get_by_role("option").first).to_be_visible()


def talked(page: Page, fleet: Fleet) -> None:
    """The chat with an answer; the engine repeats what it is told, a word in 20 ms."""
    definition = f"name: {TALKER}\nbackend: echo\nparameters:\n  model: {TALKER}\noptions: ['delay_ms:20']\n"
    (fleet.cluster.models / f"{TALKER}.yaml").write_text(definition)
    eventually(lambda: TALKER in fleet.get("/api/models/capabilities").text, what="the definition is read")
    page.reload()
    page.get_by_role("textbox", name="Message").fill(SAID)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(page.get_by_text("1 replica loaded", exact=True)).to_be_attached()


SCREENS: tuple[tuple[str, str, Prepare], ...] = (
    ("nodes-waiting", "/app/nodes", plain),
    ("nodes", "/app/nodes", scrolled),
    ("nodes-filtered", "/app/nodes?q=gpu%3Anvidia&state=draining,unhealthy,offline", scrolled),
    ("capacity", "/app/capacity?group=label%3Asite", plain),
    ("models", "/app/models", plain),
    ("scheduling", "/app/scheduling", plain),
    ("activity", "/app/activity", opened_strip),
    ("picker", "/app/backends", picker),
    ("search", "/app/nodes", search),
    ("chat", f"/app/chat?model={TALKER}", talked),
)


def shoot(page: Page, name: str) -> Path:
    """Takes the picture once nothing loads any more."""
    # Not what is said of a model's load.
    waits = page.get_by_role("status").filter(has_text=re.compile(r"^\s*Loading .*…$"))
    expect(waits).to_have_count(0)
    path = TAKEN / f"{name}.png"
    page.screenshot(path=path, animations="disabled", caret="hide")
    return path


def show(page: Page, fleet: Fleet, path: str) -> None:
    """Opens a page to the end."""
    page.goto(fleet.webs[0].url + path)
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    expect(page.get_by_role("heading", level=1)).to_be_visible()


def busy_node(fleet: Fleet) -> str:
    """The id of a seeded node on which much runs."""
    found = [node for node in fleet.get("/api/nodes").json() if node["status"] == "healthy"]
    most = max(found, key=lambda node: (node["model_count"], node["in_flight_count"], node["name"]))
    return str(most["id"])


def take(browser: Browser, fleet: Fleet, cookies: Cookies, narrow: bool, dark: bool) -> Iterator[Path]:
    """Every screen in one size and theme."""
    suffix = f"{390 if narrow else 1400}-{'dark' if dark else 'light'}"
    how = settings(narrow=narrow, dark=dark, still=True)
    context = browser.new_context(**how | ({} if narrow else {"viewport": WIDE}))
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(f"{fleet.webs[0].url}/login")
    expect(page.get_by_label("Password")).to_be_visible()
    yield shoot(page, f"sign-in-{suffix}")
    context.add_cookies(cookies)
    # Opened first and looked at last: its memory is drawn since it was opened.
    node = context.new_page()
    show(node, fleet, f"/app/nodes/{busy_node(fleet)}")
    for name, path, prepare in SCREENS:
        show(page, fleet, path)
        prepare(page, fleet)
        yield shoot(page, f"{name}-{suffix}")
    node.bring_to_front()
    yield shoot(node, f"node-{suffix}")
    context.close()


def main() -> int:
    """The command; 1 without a browser, or if a picture is too large."""
    program = install.chromium()
    if not program:
        print(install.LEFT_OUT)
        return 1
    shutil.rmtree(TAKEN, ignore_errors=True)
    TAKEN.mkdir(parents=True)
    expect.set_options(timeout=PATIENCE)
    with (
        running_fleet(webs=1) as fleet,
        seeded(fleet.cluster, NODES, OPERATIONS, SECONDS, "--tame"),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        cookies = sign_in(fleet.webs[0].url)
        taken = [path for narrow, dark in HOW for path in take(browser, fleet, cookies, narrow, dark)]
        browser.close()
    sizes = {path.name: path.stat().st_size for path in taken}
    # Those of the story, in a folder of their own, stay.
    for path in PICTURES.glob("*.png"):
        path.unlink()
    for path in taken:
        shutil.move(path, PICTURES)
    for name, size in sizes.items():
        print(f"{name} {size // 1024} kB{' TOO LARGE' if size > LARGEST else ''}")
    return int(max(sizes.values()) > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
