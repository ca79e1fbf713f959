"""No API answer may be kept or have its type guessed, whichever application gives it."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from asgiref.sync import SyncToAsync

from localai_cluster.api_document import document
from localai_cluster.asgi import application
from tests.support import hot
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db(transaction=True)

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW")
NOWHERE = ("/api/nothing", "/v1/nothing", "/api/node/x/nothing")
STRANGERS = (None, "lac-" + "0" * 48)
CALLS = (
    *((method, API_KEY) for method in METHODS),
    *((method, key) for method in METHODS[:2] for key in STRANGERS),
)
"""Strangers are refused before the method counts."""


def routes() -> Iterator[str]:
    """Every path of the API document, and some that no route has."""
    for template in document()["paths"]:
        yield re.sub(r"\{\w+\}", str(uuid4()), template)
    yield from NOWHERE


async def answers(path: str, method: str, key: str | None) -> list[tuple[str, str]]:
    """The headers of one answer."""
    offered = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), *offered],
        "client": ("192.0.2.7", 1234),
    }
    messages = [{"type": "http.request", "body": b"[", "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await application(scope, receive, send)
    return [(name.decode().lower(), value.decode()) for name, value in sent[0]["headers"]]


def test_no_answer_is_kept_or_guessed() -> None:
    """Every route of the document by every method, and wrong callers: `no-store` and `nosniff`, once."""

    async def scenario() -> list[str]:
        wrong = []
        async with hot.serving():
            for path in routes():
                for method, key in CALLS:
                    found = await answers(path, method, key)
                    kept = [value for name, value in found if name == "cache-control"]
                    types = [value for name, value in found if name == "x-content-type-options"]
                    if len(kept) != 1 or "no-store" not in kept[0] or types != ["nosniff"]:
                        wrong.append(json.dumps([method, path, key is None, kept, types]))
        return wrong

    assert asyncio.run(scenario()) == []


THREAD_CALLS = 3
"""Of a request to Django: its start, its middleware and view together, and its end."""


def test_the_middleware_and_the_view_run_in_one_call_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each more costs as much as the middleware itself."""
    calls: list[str] = []
    call = SyncToAsync.__call__

    async def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(repr(self.func))
        return await call(self, *args, **kwargs)

    async def scenario() -> None:
        async with hot.serving():
            await answers("/api/branding", "GET", API_KEY)
            monkeypatch.setattr(SyncToAsync, "__call__", counted)
            await answers("/api/branding", "GET", API_KEY)

    asyncio.run(scenario())
    assert len(calls) <= THREAD_CALLS, calls
