"""What a page leaves alone: the network while its feed is up, and its width."""

import functools
import json
import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, WebSocket, WebSocketRoute, expect

from localai_cluster.kit import clock
from tests.browser import checks
from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.conftest import eventually

BEAT_MS = 90_000
"""The feed says that it is alive every five seconds."""
LONG_NAME, LONG_ERROR = "a" * 200, "e" * 2_000
_PAGES = ("/app/nodes", "/app/activity")

_NAME = """(strip) => {
  const name = strip.querySelector(".strip-name");
  const probe = name.appendChild(document.createElement("span"));
  probe.style.cssText = "position: absolute; width: 12ch";
  const twelve = probe.getBoundingClientRect().width;
  probe.remove();
  return { width: name.getBoundingClientRect().width, twelve, window: innerWidth };
}"""


def live(page: Page) -> Page:
    """The page once its feed is there."""
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    return page


def is_fresh(page: Page, backends: str) -> bool:
    """Whether a node's list of backends is so new that a look at it asks no worker."""
    as_of = page.request.get(backends).headers.get("x-as-of", "")
    return bool(as_of) and clock.now() - datetime.fromisoformat(as_of) < timedelta(seconds=30)


def two_beats(socket: WebSocket) -> None:
    """Waits until the feed has said twice that it is alive."""
    for _ in range(2):
        socket.wait_for_event("framereceived", lambda frame: '"alive"' in frame, timeout=BEAT_MS)


@pytest.mark.rule("UI-0.8", "UW1")
def test_an_open_page_asks_for_nothing_while_its_feed_is_up(
    window: Opener, settled: Fleet, session: Cookies
) -> None:
    asked: list[str] = []
    fine, url = settled.id("fine"), settled.webs[0].url
    for path in (*_PAGES, f"/app/nodes/{fine}"):
        page = window(url, session).page
        # A look at an old list has the worker asked, and the page shows what it answers.
        eventually(functools.partial(is_fresh, page, f"{url}/api/nodes/{fine}/backends"))
        with page.expect_websocket() as opened:
            page.goto(settled.webs[0].url + path, wait_until="networkidle")
        live(page)
        page.on("request", lambda request: asked.append(f"{request.method} {request.url}"))
        page.on("websocket", lambda socket: asked.append(socket.url))
    # The last one to open; the others have been open for longer.
    two_beats(opened.value)
    # Code of the page that is fetched ahead is no question about the cluster. Charts read figures again when
    # the feed says that it is alive and their next step is due.
    assert [one for one in asked if "/static/ui/" not in one and "/api/figures?" not in one] == []


def test_work_that_begins_moves_nothing_on_the_page(window: Opener, settled: Fleet, session: Cookies) -> None:
    page = live(window(settled.webs[0].url, session).go("/app/nodes"))
    heading, strip = page.get_by_role("heading", level=1), page.get_by_test_id("operations-strip")
    expect(
        page.get_by_role("grid", name="Nodes").get_by_role("link", name="slow", exact=True)
    ).to_be_visible()
    expect(strip).to_have_count(0)
    before = heading.bounding_box()
    settled.install("slow", "quick")
    expect(strip).to_be_visible()
    assert heading.bounding_box() == before


def with_failure(socket: WebSocketRoute) -> None:
    """The real feed, with one failure of a long name and a longer reason added to its first operations."""
    server = socket.connect_to_server()

    def hand_on(message: str | bytes) -> None:
        told: dict[str, Any] = json.loads(message)
        if told["type"] == "operations.snapshot":
            told["operations"].append(_FAILURE)
        socket.send(json.dumps(told))

    server.on_message(hand_on)


_FAILURE = {
    "id": LONG_NAME,
    "name": LONG_NAME,
    "fullName": LONG_NAME,
    "jobID": "00000000-0000-4000-8000-000000000001",
    "kind": "backend_install",
    "taskType": "installation",
    "status": "failed",
    "progress": 40,
    "isBackend": True,
    "error": LONG_ERROR,
    "nodeName": "n" * 100,
    "createdAt": "2099-01-01T00:00:00Z",
    "finishedAt": "2099-01-01T00:00:01Z",
    "seq": 1,
    "attempts": 1,
}


@pytest.mark.rule("UI-1.11", "UI-1.12", "E19", "E27")
@pytest.mark.parametrize("narrow", [False, True], ids=["1400", "390"])
def test_a_long_error_leaves_the_page_its_width_and_the_name_its_room(
    window: Opener, settled: Fleet, session: Cookies, narrow: bool
) -> None:
    screen = window(settled.webs[0].url, session, narrow=narrow)
    screen.page.route_web_socket(re.compile("/ws/feed"), with_failure)
    page = live(screen.go("/app/nodes"))
    strip = page.get_by_test_id("operations-strip")
    expect(strip).to_contain_text(LONG_ERROR[:60])
    assert checks.sideways(page) == []
    name = strip.evaluate(_NAME)
    assert name["width"] >= name["twelve"]
    if narrow:
        assert name["width"] <= 0.45 * name["window"]
