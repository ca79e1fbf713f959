"""A scripted engine with real gRPC, in the process of the test.

A script is a list of steps for each call: a `Reply` is sent, a number is a pause in seconds, an `Event` is
waited for, a `Refusal` ends the call with a status, `CUT` breaks the connection as a dying process does. A
mapping is trailing metadata.
"""

# The generated base has no types that could be kept to, and every method abstract.
# mypy: disallow-subclassing-any=false

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from localai_cluster.rpc.generated.backend_pb2_grpc import BackendServicer, add_BackendServicer_to_server
from localai_cluster.rpc.messages import (
    ChatDelta,
    DetokenizeRequest,
    DetokenizeResponse,
    DocumentResult,
    EmbeddingResult,
    HealthMessage,
    PredictOptions,
    Reply,
    RerankRequest,
    RerankResult,
    TokenizationResponse,
    ToolCallDelta,
    Usage,
)

_Servicer: Any = BackendServicer


@dataclass(frozen=True)
class Refusal:
    """The status that ends a call."""

    status: grpc.StatusCode
    text: str = "refused by the script"


CUT = object()
Step = Reply | float | asyncio.Event | Refusal | Mapping[str, str] | object


def words(text: str, prompt_tokens: int = 7) -> list[Step]:
    """Return a script that sends the text word by word, with the token counts of our engines."""
    parts = text.split(" ")
    pieces = [part if not number else f" {part}" for number, part in enumerate(parts)]
    return [
        Reply(message=piece.encode(), tokens=number, prompt_tokens=prompt_tokens)
        for number, piece in enumerate(pieces, start=1)
    ]


def call(index: int, name: str, *arguments: str, id: str = "") -> list[Step]:
    """Return a script that calls a tool, with its arguments in these pieces."""
    first = ToolCallDelta(index=index, id=id, name=name, arguments=arguments[0])
    rest = [ToolCallDelta(index=index, arguments=one) for one in arguments[1:]]
    return [
        Reply(chat_deltas=[ChatDelta(tool_calls=[one])], tokens=number, prompt_tokens=7)
        for number, one in enumerate([first, *rest], start=1)
    ]


def with_logprobs(text: str) -> list[Step]:
    """Return a script with the words as tokens, each with its logprob and one alternative."""
    script = []
    for reply in words(text):
        assert isinstance(reply, Reply)
        token = reply.message.decode()
        entry = {"token": token, "logprob": -0.5, "top_logprobs": [{"token": "other", "logprob": -1.5}]}
        reply.logprobs = json.dumps({"content": [entry]}).encode()
        script.append(reply)
    return list(script)


@dataclass
class Scripted(_Servicer):
    """The engine. Every call for text plays `script`; `asked` has the received requests."""

    script: Iterable[Step] = ()
    streams: bool = True
    answers_whole: bool = True
    asked: list[PredictOptions] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    open: int = 0
    sent: int = 0
    proxy: "Cuttable | None" = None
    embeds: Refusal | None = None
    """The refusal of a call for embeddings; None if it succeeds."""

    async def Health(self, request: HealthMessage, context: Any) -> Reply:
        return Reply(message=b"OK")

    async def PredictStream(self, request: PredictOptions, context: Any) -> AsyncIterator[Reply]:
        if not self.streams:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no streams")
        self.asked.append(request)
        self.open += 1
        try:
            async for reply in self._played(request, context):
                yield reply
                self.sent += 1
        finally:
            self.open -= 1

    async def Predict(self, request: PredictOptions, context: Any) -> Reply:
        if not self.answers_whole:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only streams")
        self.asked.append(request)
        self.open += 1
        whole = Reply()
        tokens: list[Any] = []
        try:
            async for reply in self._played(request, context):
                self.sent += 1
                tokens += json.loads(reply.logprobs)["content"] if reply.logprobs else []
                whole.message += reply.message
                whole.chat_deltas.extend(reply.chat_deltas)
                whole.tokens, whole.prompt_tokens = reply.tokens, reply.prompt_tokens
                whole.timing_prompt_processing = reply.timing_prompt_processing
        finally:
            self.open -= 1
        whole.logprobs = json.dumps({"content": tokens}).encode() if tokens else b""
        return whole

    def script_for(self, request: PredictOptions) -> Iterable[Step]:
        """Return the script of this call."""
        return self.script

    async def _played(self, request: PredictOptions, context: Any) -> AsyncIterator[Reply]:
        for step in self.script_for(request):
            if isinstance(step, Reply):
                yield step
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Refusal):
                await context.abort(step.status, step.text)
            elif isinstance(step, Mapping):
                context.set_trailing_metadata(tuple(step.items()))
            elif step is CUT:
                assert self.proxy is not None
                self.proxy.cut()
                await asyncio.Event().wait()
            else:
                assert isinstance(step, int | float)
                await asyncio.sleep(step)

    async def Embedding(self, request: PredictOptions, context: Any) -> EmbeddingResult:
        self.asked.append(request)
        if self.embeds is not None:
            await context.abort(self.embeds.status, self.embeds.text)
        return EmbeddingResult(embeddings=[float(len(request.EmbeddingTokens)), 1.0], prompt_tokens=3)

    async def TokenizeString(self, request: PredictOptions, context: Any) -> TokenizationResponse:
        self.asked.append(request)
        return TokenizationResponse(length=len(request.Prompt), tokens=[ord(one) for one in request.Prompt])

    async def Detokenize(self, request: DetokenizeRequest, context: Any) -> DetokenizeResponse:
        self.others.append(request)
        return DetokenizeResponse(content="".join(chr(one) for one in request.tokens))

    async def Rerank(self, request: RerankRequest, context: Any) -> RerankResult:
        self.others.append(request)
        results = [
            DocumentResult(index=index, text=text, relevance_score=float(len(text)))
            for index, text in enumerate(request.documents)
        ]
        return RerankResult(usage=Usage(total_tokens=9, prompt_tokens=9), results=results)


class Cuttable:
    """A proxy in front of an engine that can break its connections and stop listening."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._links: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def open(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._links |= {writer, back}

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()

        try:
            done = {
                asyncio.ensure_future(pass_on(reader, back)),
                asyncio.ensure_future(pass_on(onward, writer)),
            }
            await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in done:
                one.cancel()
            await asyncio.gather(*done, return_exceptions=True)
            for link in (writer, back):
                self._links.discard(link)
                link.transport.abort()

    def cut(self) -> None:
        """Stop listening and break all connections, as if the process had ended."""
        self._server.close()
        for link in list(self._links):
            link.transport.abort()


@contextlib.asynccontextmanager
async def running(engine: Scripted) -> AsyncIterator[str]:
    """Yield the address of the engine."""
    server = grpc.aio.server()
    add_BackendServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine.proxy = Cuttable(port)
    await engine.proxy.open()
    try:
        yield engine.proxy.address
    finally:
        engine.proxy.cut()
        await server.stop(None)
