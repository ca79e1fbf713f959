"""Client of one inference engine, and a pool with one client per address and token.

Calls run on the event loop that created the client; nothing here may be shared between loops. A call costs
one coroutine and no set-up: the channel, its methods and the metadata are created once. Errors arrive as
`localai_cluster.rpc.errors`; a cancelled caller cancels the call at the engine.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf import json_format

from localai_cluster.kit import clock
from localai_cluster.kit.addresses import parse
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.errors import BackendError, DeadlineExceeded, Lost, Refused, translate_status
from localai_cluster.rpc.generated.backend_pb2_grpc import BackendStub
from localai_cluster.rpc.messages import (
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingResult,
    GenerateImageRequest,
    HealthMessage,
    ModelOptions,
    PredictOptions,
    Reply,
    RerankRequest,
    RerankResult,
    Result,
    Sign,
    StatusResponse,
    TokenizationResponse,
    TranscriptRequest,
    TranscriptResult,
    TranscriptStreamResponse,
    TTSRequest,
)
from localai_cluster.rpc.stream_client import MAX_MESSAGE_BYTES, StreamCall, StreamChannel, UnaryCall

# The in-flight count rises when a replica is picked and falls when the response is complete (R2.74). So a
# tracked method may be called only through a client that the pool of the inference gateway provides
# (`ClientPool`); any other client lacks it. A method in neither set cannot be called at all, so adding a
# method means choosing its set.
TRACKED_METHODS = frozenset(
    {
        *("Predict", "PredictStream", "Embedding", "GenerateImage", "UpscaleImage", "GenerateVideo"),
        *("Generate3D", "TTS", "TTSStream", "SoundGeneration", "AudioTranscription"),
        *("AudioTranscriptionStream", "Detect", "Depth", "Rerank", "VAD", "Diarize", "FaceVerify"),
        *("FaceAnalyze", "VoiceVerify", "VoiceAnalyze", "VoiceEmbed", "TokenClassify", "Score"),
        *("SoundDetection", "AudioEncode", "AudioDecode", "AudioTransform"),
    }
)
"""gRPC methods whose calls serve a user's request and count as in flight."""
UNTRACKED_METHODS = frozenset(
    {
        *("Health", "LoadModel", "Status", "Free", "TokenizeString", "Detokenize", "GetMetrics"),
        *("ModelMetadata", "StoresSet", "StoresDelete", "StoresGet", "StoresFind"),
    }
)
"""gRPC methods whose calls do not count as in flight."""


HEALTHY_MESSAGE = b"OK"
HTTP2, GRPC = "http2", "grpc"
"""Implementations of calls for text and vectors: our own (`stream_client.py`), or `grpc.aio`."""
# Seconds that running calls on a replaced channel may still take.
CLOSE_GRACE_SECONDS = 600.0
"""Seconds that running calls get when a client or channel is closed."""

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Without it two channels to one address share the connection and its backoff, so replacing a channel
    # after a refused connection would not bring a fresh attempt.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Engines are on the cluster's own network; a proxy meant for the internet must not see their token.
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_retries", 0),
)

Response = TypeVar("Response")
Piece = TypeVar("Piece")
_EMPTY_HEALTH = HealthMessage()


class BackendClient:
    """Client of the engine at `address` (`host:port`); `token`, if any, authenticates the calls.

    Timeouts are seconds. Every method raises BackendError types. An `address` that is not `host:port` raises
    Refused, because gRPC would interpret a scheme in it. Only a client with `counted` has the methods that
    serve a user's request (`TRACKED_METHODS`). `stream_client` selects the implementation of `predict`,
    `predict_stream` and `embedding`.
    """

    def __init__(
        self, address: str, token: str = "", *, counted: bool = False, stream_client: str = HTTP2
    ) -> None:
        try:
            engine = parse(address)
        except ValueError as error:
            raise Refused(f"the engine's address {error}") from None
        self._target = engine.target
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._methods = UNTRACKED_METHODS | TRACKED_METHODS if counted else UNTRACKED_METHODS
        has_streams = counted and stream_client == HTTP2
        self._streams = StreamChannel(engine, self._metadata) if has_streams else None
        self._retired: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
        self._stub = BackendStub(self._channel)
        for name in vars(self._stub).keys() - self._methods:
            delattr(self._stub, name)

    async def health(self, timeout: float) -> bool:
        """Return True if the engine reports that it is ready."""
        reply = await self._unary(self._stub.Health(_EMPTY_HEALTH, timeout=timeout, metadata=self._metadata))
        return reply.message == HEALTHY_MESSAGE

    async def load_model(self, options: ModelOptions, timeout: float) -> Result:
        """Load a model. Return a Result whose `success` is False if the engine refuses."""
        return await self._unary(self._stub.LoadModel(options, timeout=timeout, metadata=self._metadata))

    async def embedding(self, options: PredictOptions, timeout: float) -> EmbeddingResult:
        """Return the embedding of the text in `options.Embeddings`."""
        return await self._unary(self._unary_call("Embedding", EmbeddingResult.FromString, options, timeout))

    def predict(self, options: PredictOptions, timeout: float | None = None) -> "Replies[Reply]":
        """Return the complete reply to a prompt, as one piece."""
        call = self._unary_call("Predict", Reply.FromString, options, timeout)
        return Replies(call, self._channel, self._translate_error)

    def _unary_call(
        self, method: str, parse: Callable[[bytes], Response], options: PredictOptions, timeout: float | None
    ) -> Any:
        """Return a call that has one reply, by grpcio or by our own client. Await it for the reply."""
        if self._streams is not None:
            return UnaryCall(self._streams, method, parse, options.SerializeToString(), timeout)
        return getattr(self._stub, method)(options, timeout=timeout, metadata=self._metadata)

    def predict_stream(self, options: PredictOptions, timeout: float | None = None) -> "Replies[Reply]":
        """Return the reply to a prompt as a stream. Without a timeout the call has no time limit."""
        call: Any
        if self._streams is not None:
            request = options.SerializeToString()
            call = StreamCall(self._streams, "PredictStream", Reply.FromString, request, timeout)
        else:
            call = self._stub.PredictStream(options, timeout=timeout, metadata=self._metadata)
        return Replies(call, self._channel, self._translate_error)

    async def transcribe(self, request: TranscriptRequest, timeout: float) -> TranscriptResult:
        """Return the transcript of the audio file `request.dst` on the worker."""
        return await self._unary(
            self._stub.AudioTranscription(request, timeout=timeout, metadata=self._metadata)
        )

    def transcribe_stream(self, request: TranscriptRequest) -> "Replies[TranscriptStreamResponse]":
        """Return a stream of the transcript of the audio file `request.dst` on the worker."""
        call = self._stub.AudioTranscriptionStream(request, metadata=self._metadata)
        return Replies(call, self._channel, self._translate_error)

    async def speak(self, request: TTSRequest, timeout: float) -> Result:
        """Convert a text to speech; the engine writes it to the file `request.dst` on the worker."""
        return await self._unary(self._stub.TTS(request, timeout=timeout, metadata=self._metadata))

    def speak_stream(self, request: TTSRequest) -> "Replies[Reply]":
        """Return a stream of a text as speech, in `audio` of the replies."""
        call = self._stub.TTSStream(request, metadata=self._metadata)
        return Replies(call, self._channel, self._translate_error)

    async def draw(self, request: GenerateImageRequest, timeout: float) -> Result:
        """Generate an image; the engine writes it to the file `request.dst` on the worker."""
        return await self._unary(self._stub.GenerateImage(request, timeout=timeout, metadata=self._metadata))

    async def tokenize(self, options: PredictOptions, timeout: float) -> TokenizationResponse:
        """Return the token ids of the text in `options.Prompt`."""
        return await self._unary(self._stub.TokenizeString(options, timeout=timeout, metadata=self._metadata))

    async def detokenize(self, request: DetokenizeRequest, timeout: float) -> DetokenizeResponse:
        """Return the text of token ids."""
        return await self._unary(self._stub.Detokenize(request, timeout=timeout, metadata=self._metadata))

    async def rerank(self, request: RerankRequest, timeout: float) -> RerankResult:
        """Rank documents by their relevance to a query."""
        return await self._unary(self._stub.Rerank(request, timeout=timeout, metadata=self._metadata))

    async def status(self, timeout: float) -> StatusResponse:
        """Return the state and the memory usage of the engine."""
        return await self._unary(self._stub.Status(_EMPTY_HEALTH, timeout=timeout, metadata=self._metadata))

    async def free(self, timeout: float) -> Result:
        """Free the memory of the model that the engine has loaded."""
        return await self._unary(self._stub.Free(_EMPTY_HEALTH, timeout=timeout, metadata=self._metadata))

    async def close(self, grace: float | None = None) -> None:
        """Close the connection; cancel calls that still run after `grace` seconds."""
        for task in self._retired:
            task.cancel()
        streams = [self._streams.close(grace)] if self._streams is not None else []
        await asyncio.gather(self._channel.close(grace), *streams)

    async def _unary(self, call: Awaitable[Response]) -> Response:
        channel = self._channel
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._translate_error(error, channel, call) from error
        except asyncio.CancelledError:
            _raise_unless_cancelled(Lost(_CLOSED_MESSAGE))
            raise

    def _translate_error(
        self, error: grpc.aio.AioRpcError, channel: grpc.aio.Channel, call: Any
    ) -> BackendError:
        code = error.code()
        if code is grpc.StatusCode.CANCELLED and _is_overdue(call):
            # The engine knows the deadline, and may cancel the call a moment before the library's timer.
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        translated = translate_status(code, error.details() or "")
        # A refused channel is in backoff and fails without dialling, and a broken one may break the next call
        # too; a process that starts at this address right afterwards must be reached at once.
        # Only the first of many callers replaces the channel.
        if translated.replica_gone and channel is self._channel:
            self._open()
            self._retire(channel)
        return translated

    def _retire(self, channel: grpc.aio.Channel) -> None:
        # A stopping engine refuses new connections while it still answers calls on the old one.
        task = asyncio.get_running_loop().create_task(channel.close(grace=CLOSE_GRACE_SECONDS))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)


class Replies(Generic[Piece]):
    """The reply to one call, in one or more pieces. A caller that stops early must close the iterator."""

    def __init__(self, call: Any, channel: grpc.aio.Channel, translate_error: "_TranslateError") -> None:
        self._call = call
        self._channel = channel
        self._translate_error = translate_error
        self._expired: DeadlineExceeded | None = None

    def __aiter__(self) -> AsyncGenerator[Piece, None]:
        """Iterate over the pieces without a time limit."""
        return self.within()

    async def within(
        self,
        first: float = math.inf,
        stall: float = math.inf,
        message: str = "the engine has sent nothing for too long",
    ) -> AsyncGenerator[Piece, None]:
        """Iterate over the pieces. Raise DeadlineExceeded with `message` if a piece is late.

        The first piece must arrive within `first` seconds, each further piece within `stall` seconds. The
        time that the caller spends between two pieces does not count. A piece is read only when the caller
        requests it, so the flow-control windows of the connection bound how far the engine gets ahead.
        """
        timer = clock.SilenceTimer(stall, first, lambda: self._expire(message))
        try:
            if hasattr(self._call, "__await__"):
                yield await self._call
                return
            async for reply in self._call:
                timer.pause()
                yield reply
                timer.begin()
        except grpc.aio.AioRpcError as error:
            raise self._translate_error(error, self._channel, self._call) from error
        except asyncio.CancelledError:
            _raise_unless_cancelled(self._expired or Lost(_CLOSED_MESSAGE))
            raise
        finally:
            timer.close()
            self._call.cancel()

    def _expire(self, message: str) -> None:
        self._expired = DeadlineExceeded(message)
        self._call.cancel()

    async def trailing(self, name: str) -> str:
        """Return the value of the trailing metadata `name`, "" without one. Call it after the last piece."""
        metadata = await self._call.trailing_metadata()
        value = metadata.get(name) if metadata is not None else None
        return value if isinstance(value, str) else ""


_TranslateError = Callable[[grpc.aio.AioRpcError, grpc.aio.Channel, Any], BackendError]


def _is_overdue(call: Any) -> bool:
    """Return True for a call of `grpc.aio` whose deadline has passed.

    The calls of `stream_client.py` check their deadlines themselves.
    """
    return isinstance(call, grpc.aio.Call) and call.time_remaining() == 0


_CLOSED_MESSAGE = "the connection to the engine was closed"


def _raise_unless_cancelled(error: BackendError) -> None:
    """Raise the error unless the current task itself was cancelled.

    The library also raises CancelledError if only the call was cancelled or its channel was closed. Then the
    caller continues.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise error from None


async def probe(address: str, token: str, timeout: float) -> Sign:
    """Check the engine at `address` over a new connection, which is then closed (R4.38)."""
    try:
        client = BackendClient(address, token)
    except Refused:
        return Sign.UNREACHABLE
    try:
        return Sign.ALIVE if await client.health(timeout) else Sign.UNREACHABLE
    except BackendError as error:
        # Check the status, not the error's type: an engine may report that it is busy by a status of its own.
        cause = error.__cause__
        refused = isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNAVAILABLE
        return Sign.UNREACHABLE if refused else Sign.BUSY
    finally:
        await client.close()


class ClientPool:
    """Engine clients by address and token. Above `limit` clients, the least recently used one is closed."""

    def __init__(self, *, limit: int = 1024, stream_client: str = HTTP2) -> None:
        self._limit = limit
        self._stream_client = stream_client
        self._clients: OrderedDict[tuple[str, str], BackendClient] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str, token: str = "") -> BackendClient:
        """Return the client for `address` (`host:port`) and a bearer token.

        Raise Refused for an address of another form.
        """
        key = (address, token)
        client = self._clients.get(key)
        if client is None:
            client = BackendClient(address, token, counted=True, stream_client=self._stream_client)
            self._clients[key] = client
            if len(self._clients) > self._limit:
                self.forget(*next(iter(self._clients)))
        else:
            self._clients.move_to_end(key)
        return client

    def forget(self, address: str, token: str = "") -> None:
        """Remove a client from the pool and close it; running calls may end."""
        client = self._clients.pop((address, token), None)
        if client is not None:
            task = asyncio.get_running_loop().create_task(client.close(CLOSE_GRACE_SECONDS))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every client; cancel running calls."""
        for task in self._closing:
            task.cancel()
        clients = list(self._clients.values())
        self._clients.clear()
        await asyncio.gather(*(client.close() for client in clients))


def options_from_mapping(mapping: Mapping[str, Any]) -> ModelOptions:
    """Return load options from a mapping of field names of `ModelOptions` to values.

    An example is `{"Model": …, "Embeddings": True}`. Raise InvalidInput for an unknown name or a value of the
    wrong type.
    """
    try:
        return json_format.ParseDict(dict(mapping), ModelOptions())
    except json_format.ParseError as error:
        raise InvalidInput(f"Not a valid load option: {error}", field="options") from error
