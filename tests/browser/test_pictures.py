"""The main pages look as in the pictures of `tests/data/pictures`, which are a quarter of their size.

A cluster of its own with seeded nodes, so that nothing moves. Times and charts are covered. A picture that
changed is written to `build/browser` beside the difference; the failure says how to accept it.
"""

import io
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
from PIL import Image, ImageChops
from playwright.sync_api import Browser, Page, expect

from localai_cluster.kit import clock
from tests.browser.conftest import PICTURES, Opener
from tests.browser.fleet import Cookies, Fleet, running_fleet, seeded, sign_in
from tests.browser.screen import PAGES
from tests.conftest import eventually
from tests.support.cluster import ROOT

EXPECTED = ROOT / "tests" / "data" / "pictures"
COVERED = "time, [role=gridcell]:has(time), .uplot, .chart-values"
SCALE = 4
SETTLES = 5.0
"""Seconds in which a page shows what it reads after it has opened."""
CONTRAST = 48
"""Of 255: how far a colour has to be off to count."""
SHARE = 0.001
"""The part of a picture that may be off: a third of a button."""


@pytest.fixture(scope="module")
def still(chromium: Browser) -> Iterator[Fleet]:
    """Twenty-four nodes that do not change."""
    with running_fleet(webs=1, workers=()) as fleet, seeded(fleet.cluster, 24, 0, 0, "--tame"):
        # So that no page says for how long a node is silent.
        heard = "UPDATE backend_nodes SET last_heartbeat = %s WHERE offline_at IS NULL RETURNING id"
        fleet.cluster.rows(heard, clock.now() + timedelta(hours=1))
        fleet.cluster.rows("DELETE FROM node_events RETURNING id")  # charts name the latest
        yield fleet


@pytest.fixture(scope="module")
def cookies(still: Fleet) -> Cookies:
    """A session there."""
    return sign_in(still.webs[0].url)


@pytest.fixture(scope="module", autouse=True)
def fonts() -> None:
    """Other letters have other widths."""
    found = (
        shutil.which("fc-match")
        and subprocess.run(["fc-match", "sans-serif"], capture_output=True, text=True, check=False).stdout
    )
    if not found or not found.startswith("NotoSans"):
        pytest.skip("pictures: the standard font is not Noto Sans; install fonts-noto-core")


@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_the_main_pages_look_as_they_did(
    window: Opener, still: Fleet, cookies: Cookies, narrow: bool
) -> None:
    """Issue 24, robustness. Wide pages are light, narrow ones dark."""
    url, how = still.webs[0].url, {"narrow": narrow, "dark": narrow, "still": True}
    size = "narrow" if narrow else "wide"
    screen = window(url, cookies, **how)
    changed = [problem_of(screen.go(path), f"{name}-{size}.png") for name, path in PAGES.items()]
    changed.append(problem_of(window(url, **how).go("/login"), f"sign-in-{size}.png"))
    assert not any(changed), "\n".join(filter(None, changed))


def problem_of(page: Page, name: str) -> str:
    """What to do about a page that does not come to look as expected; "" if it does."""
    problems = [f"{name}: the page has not loaded"]

    def is_expected() -> bool:
        problems.append(difference(name, taken(page)))
        return not problems[-1]

    with suppress(AssertionError):
        eventually(is_expected, seconds=SETTLES)
    return problems[-1]


def taken(page: Page) -> Image.Image:
    """The page once it has loaded, reduced."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="Loading")).to_have_count(0)
    page.wait_for_load_state("networkidle")
    shot = page.screenshot(
        animations="disabled", caret="hide", mask=[page.locator(COVERED)], mask_color="#808080"
    )
    whole = Image.open(io.BytesIO(shot)).convert("RGB")
    return whole.resize((whole.width // SCALE, whole.height // SCALE), Image.Resampling.BOX)


def difference(name: str, now: Image.Image) -> str:
    """What to do about a picture that is not as expected; "" if it is."""
    path = EXPECTED / name
    wrong = 1.0
    PICTURES.mkdir(parents=True, exist_ok=True)
    if path.exists():
        off = ImageChops.difference(Image.open(path).convert("RGB"), now).point(
            lambda value: 255 * (value > CONTRAST)
        )
        mask = ImageChops.lighter(ImageChops.lighter(*off.split()[:2]), off.split()[2])
        wrong = mask.histogram()[255] / (now.width * now.height) if mask.size == now.size else 1.0
        if wrong <= SHARE:
            return ""
        mask.save(PICTURES / f"difference-{name}")
    now.save(PICTURES / f"now-{name}", optimize=True)
    return f"{name}: {wrong:.1%} is off; to accept it: cp {PICTURES / f'now-{name}'} {path}"
