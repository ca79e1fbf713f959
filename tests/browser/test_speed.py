"""What a page loads, and when: its code and the session at once, the code of others when it is idle."""

import json
import re

import pytest
from playwright.sync_api import Page, Request, expect

from tests.browser.conftest import Opener
from tests.browser.fleet import Cookies, Fleet
from tests.browser.screen import PAGES
from tests.support.cluster import ROOT

MAX_FILES, MAX_QUESTIONS = 12, 6
"""Of a page: files of the build, and requests to the API with that for the session. What the feed tells a
revision of is read twice if the answer was there before it."""
_SAVES_DATA = 'Object.defineProperty(navigator, "connection", { value: { saveData: true } })'
_NEVER_IDLE = "window.requestIdleCallback = () => 0"
_NAMED = re.compile(r'(?:href|src)="(/static/ui/[^"]+)"')


def built(path: str) -> str:
    """The file with the code of the page at this path."""
    manifest = json.loads((ROOT / "static" / "dist" / "manifest.json").read_text(encoding="utf-8"))
    (chunk,) = (chunk for chunk in manifest.values() if path in chunk.get("paths", ()))
    return str(chunk["file"])


def recorded(page: Page) -> list[Request]:
    """The requests of the page from now on."""
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))
    return requests


def files_of(requests: list[Request]) -> list[str]:
    """The files of the build among them, without the address of the host."""
    return [one.url[one.url.index("/static/ui/") :] for one in requests if "/static/ui/" in one.url]


def shown(page: Page) -> None:
    """Waits until the page shows all that it loads."""
    expect(page.get_by_test_id("connection")).to_have_text("Live")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="Loading")).to_have_count(0)


@pytest.mark.rule("UI-0.8")
@pytest.mark.parametrize("path", PAGES.values(), ids=PAGES)
def test_a_cold_page_waits_for_its_document_then_for_its_code_then_for_its_data(
    window: Opener, settled: Fleet, session: Cookies, path: str
) -> None:
    """The document names every file, and none beside those: nothing is found out later. It saves data."""
    page = window(settled.webs[0].url, session).page
    page.add_init_script(_SAVES_DATA)
    requests = recorded(page)
    document = page.goto(settled.webs[0].url + path)
    shown(page)
    assert document is not None
    files, named = files_of(requests), _NAMED.findall(document.text())
    questions = [one.url for one in requests if "/api/" in one.url]
    assert sorted(files) == sorted(named)
    assert len(files) <= MAX_FILES
    assert len(questions) <= MAX_QUESTIONS
    assert sum(url.endswith("/api/auth/status") for url in questions) == 1


def test_pages_are_opened_without_loading_code(window: Opener, settled: Fleet, session: Cookies) -> None:
    """The code of every page of the navigation is there once the browser was idle."""
    page = window(settled.webs[0].url, session).page
    last = f"/static/ui/{built('health')}"
    with page.expect_response(lambda response: response.url.endswith(last)):
        page.goto(settled.webs[0].url + PAGES["overview"])
    shown(page)
    requests = recorded(page)
    for path in PAGES.values():
        page.locator(f'nav a[href="{path}"]').click()
        expect(page).to_have_url(settled.webs[0].url + path)
        shown(page)
    assert files_of(requests) == []


@pytest.mark.parametrize("how", ["hover", "focus"])
def test_a_link_loads_its_page_before_it_is_pressed(
    window: Opener, settled: Fleet, session: Cookies, how: str
) -> None:
    """On a page that is never idle."""
    page = window(settled.webs[0].url, session).page
    page.add_init_script(_NEVER_IDLE)
    requests = recorded(page)
    page.goto(settled.webs[0].url + PAGES["nodes"])
    shown(page)
    chat = f"/static/ui/{built('chat')}"
    assert chat not in files_of(requests)
    with page.expect_response(lambda response: response.url.endswith(chat)):
        getattr(page.locator(f'nav a[href="{PAGES["chat"]}"]'), how)()
