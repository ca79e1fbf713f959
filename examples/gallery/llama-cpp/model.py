"""A model in memory: llama.cpp's server in this process, and the requests that run on it.

A request moves like this: a thread of the pool calls llama.cpp, which calls back with every token; the call
hands it to the event loop, where `ask` yields it. Who stops listening marks the call as over: at its next
token, or the next batch of its prompt, the callback says so and llama.cpp gives the slot up. There are as
many threads as slots; further requests wait for a thread, and are dropped there when they are cancelled.
"""

import asyncio
import http.client
import json
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import xllamacpp
from localai_backend import Failed, Invalid, LoadRefused, NotLoaded, Unsupported, pb
from questions import Facts
from settings import Settings, parameters

HTTP_SECONDS = 30.0

Chunk = dict[str, Any]


class Call:
    """One request on its way through a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.said: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue()
        self.over = self.freed = False

    def run(self, server: Any, *, chat: bool, body: Chunk) -> None:
        """Runs the request; on a thread."""
        if self.over:
            return
        try:
            (server.handle_chat_completions if chat else server.handle_completions)(body, self.hear)
        except (ValueError, TypeError, RuntimeError) as error:
            # llama.cpp raises before it starts: for what it cannot read.
            self.tell(Invalid(str(error)))

    def hear(self, chunk: Chunk) -> bool:
        """Takes one chunk from llama.cpp; true asks it to stop."""
        if not self.over:
            self.tell(failure(chunk["error"]) if "error" in chunk else chunk)
        return self.over

    def tell(self, what: Chunk | Exception | None) -> None:
        """Hands something to the event loop, which is gone when the process ends."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.said.put_nowait, what)


class Model:
    """The loaded model. Made and closed on a thread, because llama.cpp takes its time for both."""

    def __init__(self, options: pb.ModelOptions) -> None:
        settings = Settings(options)
        key = secrets.token_urlsafe(32)
        try:
            self.server = xllamacpp.Server(parameters(options, settings, key))
        except RuntimeError:
            text = f"llama.cpp cannot load {settings.file.name}; the lines before this one in its log say why"
            raise LoadRefused(text) from None
        self.weight_bytes = settings.file.stat().st_size
        self.calls: set[Call] = set()
        self._place = urlsplit(self.server.listening_address).netloc
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._threads = ThreadPoolExecutor(settings.slots, "llama")
        self.properties = self.http("GET", "/props")
        self.context = int(self.properties["default_generation_settings"]["n_ctx"])
        tools = self.properties["chat_template_caps"]["supports_tools"]
        self.facts = Facts(template=settings.has_template, tools=tools)

    def close(self) -> None:
        """Ends what runs and gives the memory back; on a thread."""
        for call in list(self.calls):
            call.over = call.freed = True
        self._threads.shutdown(cancel_futures=True)
        self.server = None

    async def ask(self, body: Chunk, *, chat: bool) -> AsyncIterator[Chunk]:
        """What llama.cpp says to a request, as it says it. Leaving ends its work."""
        call = Call()
        self.calls.add(call)
        work = self._submit(call.run, self.server, chat=chat, body=body)
        work.add_done_callback(lambda _: (self.calls.discard(call), call.tell(None)))
        try:
            while (said := await call.said.get()) is not None:
                if isinstance(said, Exception):
                    raise said
                yield said
        finally:
            call.over = True
            work.cancel()
        if call.freed:
            raise NotLoaded

    async def once(self, name: str, body: Chunk) -> Chunk:
        """A request with one answer, such as an embedding."""
        work = self._submit(getattr(self.server, f"handle_{name}"), body)
        try:
            answer: Chunk = await asyncio.wrap_future(work)
        except (ValueError, TypeError, RuntimeError) as error:
            raise Invalid(str(error)) from None
        if "error" in answer:
            raise failure(answer["error"])
        return answer

    def http(self, method: str, path: str, body: object = None) -> Any:
        """What only llama.cpp's HTTP server offers; on a thread."""
        link = http.client.HTTPConnection(self._place, timeout=HTTP_SECONDS)
        try:
            link.request(method, path, None if body is None else json.dumps(body), self._headers)
            answer = link.getresponse()
            told = json.loads(answer.read())
        finally:
            link.close()
        if answer.status != http.HTTPStatus.OK:
            raise failure(told["error"])
        return told

    def _submit(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> "Future[Any]":
        try:
            return self._threads.submit(work, *arguments, **named)
        except RuntimeError:
            raise NotLoaded from None


def failure(error: Chunk) -> Exception:
    """What an error of llama.cpp means to the caller."""
    if error["code"] == http.HTTPStatus.NOT_IMPLEMENTED:
        return Unsupported("needs `embeddings: true` or `reranking: true` in the definition of the model")
    return (Invalid if error["code"] == http.HTTPStatus.BAD_REQUEST else Failed)(error["message"])
