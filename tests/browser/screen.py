"""Pages under watch: what a person with open developer tools would notice is written down.

Console errors and warnings, uncaught errors, requests to another host. A test that provokes some says so
beforehand with `Screen.expect`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Request

LOUD = ("error", "warning", "assert")
WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
PAGES = {
    "overview": "/app/overview",
    "nodes": "/app/nodes",
    "capacity": "/app/capacity",
    "models": "/app/models",
    "scheduling": "/app/scheduling",
    "backends": "/app/backends",
    "activity": "/app/activity",
    "chat": "/app/chat",
    "health": "/app/health",
}
"""The main pages and their paths."""
_LOCAL = ("data", "blob", "about")


@dataclass
class Screen:
    """One browser window: its context, its page, and what went wrong in it."""

    context: BrowserContext
    page: Page
    url: str
    cookies: Sequence[Any] = ()
    expected: list[re.Pattern[str]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context.on("page", self._watch)
        self._watch(self.page)

    def expect(self, *patterns: str) -> None:
        """Messages that the test provokes, as regular expressions."""
        self.expected += [re.compile(pattern) for pattern in patterns]

    def go(self, path: str) -> Page:
        """Opens a path of the site."""
        self.page.goto(self.url + path)
        return self.page

    @property
    def problems(self) -> list[str]:
        """What the test did not announce."""
        return [told for told in self.seen if not any(one.search(told) for one in self.expected)]

    def _watch(self, page: Page) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.seen.append(f"uncaught: {error}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in LOUD:
            self.seen.append(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _request(self, request: Request) -> None:
        target, here = urlsplit(request.url), urlsplit(self.url)
        if target.scheme not in _LOCAL and target.netloc != here.netloc:
            self.seen.append(f"foreign request: {request.url}")


def settings(*, narrow: bool = False, dark: bool = False, still: bool = False) -> dict[str, Any]:
    """What a context is made with: the size of its window, its theme, whether motion is reduced."""
    return {
        "viewport": NARROW if narrow else WIDE,
        "color_scheme": "dark" if dark else "light",
        "reduced_motion": "reduce" if still else "no-preference",
        "locale": "en-GB",
        "timezone_id": "UTC",
    }
