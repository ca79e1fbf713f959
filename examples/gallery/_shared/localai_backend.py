"""What every example engine shares: the gRPC server around an `Engine`, its token check and its end.

An engine process is started by its run.sh as `server.py --addr HOST:PORT`. It demands the token of
LOCALAI_GRPC_AUTH_TOKEN on every call, ends cleanly on SIGTERM, and by itself when its parent disappears.
This file is copied into each engine's folder and imports nothing from outside it.
"""

import argparse
import asyncio
import hmac
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

# The engine's own wheels, never those of the interpreter that happens to run it.
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))
# Its own lines would only repeat ours in another form.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import backend_pb2 as pb
import backend_pb2_grpc as rpc
import grpc
import grpc.aio

MESSAGE_LIMIT = 50 * 1024 * 1024
PARENT_POLL_SECONDS = 2.0
STOP_GRACE_SECONDS = 2.0
OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    # By default two servers may share a port and split its calls; here the second one must fail.
    ("grpc.so_reuseport", 0),
)

Context = grpc.aio.ServicerContext
Handler = Callable[[Any, Context], Any]


class LoadRefused(Exception):
    """The model cannot be loaded; the text goes to the caller."""


class Unsupported(Exception):
    """This engine does not offer the method."""


class Invalid(Exception):
    """The request cannot be honoured; the text names the field."""


class NotLoaded(Exception):
    """No model is loaded, or it was freed while the request ran."""


class Failed(Exception):
    """The engine failed at the request."""


STATUS = {
    Unsupported: (grpc.StatusCode.UNIMPLEMENTED, "the engine of this model does not do this kind of request"),
    Invalid: (grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be honoured"),
    NotLoaded: (grpc.StatusCode.FAILED_PRECONDITION, "model not loaded"),
    Failed: (grpc.StatusCode.INTERNAL, "the engine failed"),
}
KNOWN = tuple(STATUS)


class Engine:
    """One model in memory. Subclasses override what they can do; the rest answers UNIMPLEMENTED."""

    async def load(self, options: pb.ModelOptions) -> None:
        """Makes the model answer; raises LoadRefused."""

    async def free(self) -> None:
        """Gives the model's memory back."""

    async def embed(self, text: str, *, whole: bool = False) -> pb.EmbeddingResult:
        """The vector of a text; with `whole` one that is longer than the model reads is refused, not cut."""
        raise Unsupported

    async def embed_tokens(self, tokens: list[int], *, whole: bool = False) -> pb.EmbeddingResult:
        """The vector of a text that the client has divided into the model's tokens."""
        raise Unsupported

    def stream(self, options: pb.PredictOptions) -> AsyncIterator[pb.Reply | Mapping[str, str]]:
        """The answer to a prompt, piece by piece; a mapping at the end is trailing metadata."""
        raise Unsupported

    async def rerank(self, request: pb.RerankRequest) -> pb.RerankResult:
        """The documents, the most relevant one first."""
        raise Unsupported

    async def prompt(self, options: pb.PredictOptions) -> str:
        """What the options have the model read."""
        return options.Prompt

    async def tokens(self, text: str) -> list[int]:
        """The token ids of a text."""
        raise Unsupported

    async def text(self, tokens: list[int]) -> str:
        """The text of token ids."""
        raise Unsupported

    async def metadata(self) -> pb.ModelMetadataResponse:
        """What the loaded model's template can do."""
        raise Unsupported

    def memory(self) -> dict[str, int]:
        """What uses memory, in bytes."""
        return {"resident": resident_bytes()}


def resident_bytes() -> int:
    """Memory of this process; 0 where /proc is missing."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Service(rpc.BackendServicer):  # type: ignore[misc]
    """The methods of the contract over one engine. `identity` is the loaded `ModelOptions.Model`, or None."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.identity: str | None = None
        self.loading = asyncio.Lock()

    async def Health(self, request: pb.HealthMessage, context: Context) -> pb.Reply:
        return pb.Reply(message=b"OK")

    async def LoadModel(self, request: pb.ModelOptions, context: Context) -> pb.Result:
        async with self.loading:
            say(f"load model={request.Model!r}")
            if request.Model != self.identity:
                self.identity = None
            try:
                await self.engine.load(request)
            except LoadRefused as error:
                self.identity = None
                say(f"load refused: {error}")
                return pb.Result(success=False, message=str(error))
            self.identity = request.Model
        return pb.Result(success=True, message="loaded")

    async def Embedding(self, request: pb.PredictOptions, context: Context) -> pb.EmbeddingResult:
        await self._check(request, context)
        whole = request.Metadata.get("truncate") == "false"
        if request.EmbeddingTokens:
            return await self.engine.embed_tokens(list(request.EmbeddingTokens), whole=whole)
        return await self.engine.embed(request.Embeddings, whole=whole)

    async def Predict(self, request: pb.PredictOptions, context: Context) -> pb.Reply:
        await self._check(request, context)
        return merged([piece async for piece in self._pieces(request, context)])

    async def PredictStream(self, request: pb.PredictOptions, context: Context) -> AsyncIterator[pb.Reply]:
        await self._check(request, context)
        async for piece in self._pieces(request, context):
            yield piece

    async def _pieces(self, request: pb.PredictOptions, context: Context) -> AsyncIterator[pb.Reply]:
        async for piece in self.engine.stream(request):
            if isinstance(piece, Mapping):
                context.set_trailing_metadata(tuple(piece.items()))
            else:
                yield piece

    async def TokenizeString(self, request: pb.PredictOptions, context: Context) -> pb.TokenizationResponse:
        await self._check(request, context)
        ids = await self.engine.tokens(await self.engine.prompt(request))
        return pb.TokenizationResponse(length=len(ids), tokens=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        await self._check(request, context)
        return pb.DetokenizeResponse(content=await self.engine.text(list(request.tokens)))

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResult:
        await self._check(request, context)
        return await self.engine.rerank(request)

    async def ModelMetadata(self, request: pb.ModelOptions, context: Context) -> pb.ModelMetadataResponse:
        await self._check(request, context)
        return await self.engine.metadata()

    async def Status(self, request: pb.HealthMessage, context: Context) -> pb.StatusResponse:
        state = pb.StatusResponse.BUSY if self.loading.locked() else pb.StatusResponse.UNINITIALIZED
        if self.identity is not None:
            state = pb.StatusResponse.READY
        memory = pb.MemoryUsageData(total=resident_bytes(), breakdown=self.engine.memory())
        return pb.StatusResponse(state=state, memory=memory)

    async def Free(self, request: pb.HealthMessage, context: Context) -> pb.Result:
        async with self.loading:
            self.identity = None
            await self.engine.free()
        return pb.Result(success=True, message="freed")

    async def _check(self, request: Any, context: Context) -> None:
        if self.identity is None:
            raise NotLoaded
        # Not every request carries it.
        meant = getattr(request, "ModelIdentity", "")
        if meant and meant != self.identity:
            text = f"model identity mismatch: {self.identity!r} is loaded, not {meant!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)


def merged(pieces: list[pb.Reply]) -> pb.Reply:
    """The whole answer; every piece counts from the beginning, so the last one has the figures."""
    whole = pb.Reply()
    if not pieces:
        return whole
    last = pieces[-1]
    whole.tokens, whole.prompt_tokens = last.tokens, last.prompt_tokens
    whole.timing_prompt_processing = last.timing_prompt_processing
    whole.timing_token_generation = last.timing_token_generation
    whole.message = b"".join(piece.message for piece in pieces)
    tokens = [token for piece in pieces if piece.logprobs for token in json.loads(piece.logprobs)["content"]]
    if tokens:
        whole.logprobs = json.dumps({"content": tokens}).encode()
    deltas = [delta for piece in pieces for delta in piece.chat_deltas]
    if deltas:
        delta = whole.chat_deltas.add()
        delta.content = "".join(one.content for one in deltas)
        delta.reasoning_content = "".join(one.reasoning_content for one in deltas)
        delta.tool_calls.extend(whole_calls([call for one in deltas for call in one.tool_calls]))
    return whole


def whole_calls(pieces: list[pb.ToolCallDelta]) -> list[pb.ToolCallDelta]:
    """The tool calls that pieces with the same index make together."""
    calls: dict[int, list[pb.ToolCallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return [
        pb.ToolCallDelta(
            index=index,
            id="".join(one.id for one in parts),
            name="".join(one.name for one in parts),
            arguments="".join(one.arguments for one in parts),
        )
        for index, parts in sorted(calls.items())
    ]


class Guarded:
    """Puts the token check in front of a service's methods; the token "" lets everyone in."""

    def __init__(self, token: str) -> None:
        self.expected = f"Bearer {token}".encode() if token else b""

    def allows(self, context: Context) -> bool:
        """Whether the call carries the token; the comparison takes the same time for every wrong one."""
        if not self.expected:
            return True
        given = next(
            (value for key, value in context.invocation_metadata() or () if key == "authorization"), ""
        )
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self.expected)

    def wrap(self, method: Handler, *, streams: bool) -> Handler:
        """The method behind the check; what an engine raises becomes a status."""

        async def one(request: Any, context: Context) -> Any:
            if not self.allows(context):
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token is required")
            try:
                return await method(request, context)
            except KNOWN as error:
                code, text = STATUS[type(error)]
                await context.abort(code, str(error) or text)

        async def many(request: Any, context: Context) -> Any:
            if not self.allows(context):
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid token is required")
            try:
                async for piece in method(request, context):
                    yield piece
            except KNOWN as error:
                code, text = STATUS[type(error)]
                await context.abort(code, str(error) or text)

        return many if streams else one

    def guard(self, service: Service) -> Service:
        """The same service with every method of the contract behind the check."""
        for method in pb.DESCRIPTOR.services_by_name["Backend"].methods:
            own = getattr(service, method.name) if method.name in vars(Service) else unsupported
            setattr(service, method.name, self.wrap(own, streams=method.server_streaming))
        return service


async def unsupported(request: Any, context: Context) -> None:
    """A method of the contract that no example engine has."""
    raise Unsupported


def say(text: str) -> None:
    """One line for the worker's log."""
    print(text, file=sys.stderr, flush=True)


def token_from_environment() -> str:
    """The token every call must carry. Starting open has to be asked for."""
    token = os.environ.get("LOCALAI_GRPC_AUTH_TOKEN", "")
    if not token and os.environ.get("LOCALAI_BACKEND_ALLOW_NO_TOKEN") != "true":
        say("LOCALAI_GRPC_AUTH_TOKEN is not set (LOCALAI_BACKEND_ALLOW_NO_TOKEN=true would serve anyone).")
        raise SystemExit(2)
    return token


async def run(engine: Engine, address: str, token: str) -> None:
    """Serves until SIGTERM, SIGINT or the parent's end."""
    server = grpc.aio.server(options=OPTIONS)
    rpc.add_BackendServicer_to_server(Guarded(token).guard(Service(engine)), server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        say(f"cannot listen on {address}: the port is in use, or not ours to take")
        raise SystemExit(1) from error
    await server.start()
    say(f"listening on {address}")
    await ended()
    await server.stop(STOP_GRACE_SECONDS)


async def ended() -> None:
    """Waits for a signal to stop or for the parent to disappear."""
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    parent = os.getppid()
    waiting: Awaitable[bool] = asyncio.ensure_future(over.wait())
    while os.getppid() == parent:
        done, _ = await asyncio.wait([waiting], timeout=PARENT_POLL_SECONDS)
        if done:
            return
    say("the parent process is gone")


def serve(engine: Engine) -> None:
    """The engine's main program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--addr", default="127.0.0.1:50051", help="host:port to listen on")
    asyncio.run(run(engine, parser.parse_args().addr, token_from_environment()))
