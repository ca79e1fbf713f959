"""A bare ASGI client of one streamed answer: it reads events as they arrive, slowly or not, and may leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.support.asgi import body_then, scope_of
from tests.support.environment import API_KEY


class Streamed:
    """One streamed answer. A cleared `reading` stops the reader."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.taken = b""
        self.whole = False
        self.reading, self.left = asyncio.Event(), asyncio.Event()
        self.reading.set()
        self._news = asyncio.Event()
        self._told = 0

    async def send(self, message: Mapping[str, Any]) -> None:
        """Receive a message of the application."""
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.taken += message.get("body", b"")
            self.whole = not message.get("more_body", False)
        self._news.set()

    @property
    def lines(self) -> list[str]:
        """Return the complete events and comments so far."""
        return self.taken.decode().split("\n\n")[:-1]

    @property
    def events(self) -> list[Any]:
        """Return the parsed data of the events so far; the final marker unparsed."""
        said = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in said]

    @property
    def text(self) -> str:
        """Return the model's text so far."""
        choices = [
            choice for event in self.events if event != "[DONE]" for choice in event.get("choices", ())
        ]
        return "".join((one.get("delta") or {}).get("content") or one.get("text", "") for one in choices)

    async def until(self, said: str) -> None:
        """Wait until the text is part of the answer."""
        while said not in self.text:
            await self.news()

    async def news(self) -> None:
        """Wait until more data has arrived."""
        self._news.clear()
        await self._news.wait()


@asynccontextmanager
async def asked(
    app: Any, path: str, body: Any, kind: str = "application/json"
) -> AsyncIterator[tuple[Streamed, "asyncio.Task[None]"]]:
    """Request an answer; yield it, and the application's task."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = Streamed()
    headers = [
        (b"authorization", f"Bearer {API_KEY}".encode()),
        (b"content-type", kind.encode()),
    ]
    work = asyncio.create_task(app(scope_of("POST", path, headers), body_then(answer.left, raw), answer.send))
    try:
        yield answer, work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
