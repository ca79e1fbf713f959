"""A scripted text engine in a separate process: the engine of `tests/benchmarks/engine`, in Python.

`python -m tests.benchmarks.talker -address HOST:PORT [-streams N] [-token TOKEN]`. The last message or the
prompt is the script: `PAUSE TOKENS [SIZE [STATUS MESSAGE]]`, as `engine/main.go` describes it.
"""

# The generated base has no types that could be kept to, and every method abstract.
# mypy: disallow-subclassing-any=false

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from localai_cluster.kit import clock
from localai_cluster.rpc.generated.backend_pb2_grpc import BackendServicer, add_BackendServicer_to_server
from localai_cluster.rpc.messages import (
    EmbeddingResult,
    HealthMessage,
    PredictOptions,
    Reply,
    TokenizationResponse,
)

_Servicer: Any = BackendServicer
VECTOR = EmbeddingResult(embeddings=[number / 768 for number in range(768)], tokens=2, prompt_tokens=2)
STATUSES = {status.value[0]: status for status in grpc.StatusCode}


class Talker(_Servicer):
    """The engine."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._running = self._sent = 0

    async def _check(self, context: Any) -> None:
        given = dict(context.invocation_metadata()).get("authorization")
        if self._token and given != f"Bearer {self._token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "token required")

    async def Health(self, request: HealthMessage, context: Any) -> Reply:
        return Reply(message=b"OK")

    async def Embedding(self, request: PredictOptions, context: Any) -> EmbeddingResult:
        if request.Embeddings.isdigit():
            await asyncio.sleep(int(request.Embeddings) / 1000)
        return VECTOR

    async def TokenizeString(self, request: PredictOptions, context: Any) -> TokenizationResponse:
        return TokenizationResponse(length=2, tokens=[self._running, self._sent])

    async def PredictStream(self, request: PredictOptions, context: Any) -> AsyncIterator[Reply]:
        await self._check(context)
        async for reply in self._replies(request, context):
            yield reply
            self._sent += 1

    async def _replies(self, request: PredictOptions, context: Any) -> AsyncIterator[Reply]:
        script = request.Messages[-1].content if request.Messages else request.Prompt
        pause, tokens, size, status, message = (*script.split(" ", 4), "", "", "")[:5]
        word = b" word" if size in ("", "5") else b"w" * int(size)
        due = clock.monotonic()
        self._running += 1
        try:
            for number in range(1, int(tokens) + 1):
                if int(pause):
                    due += int(pause) / 1000
                    await asyncio.sleep(due - clock.monotonic())
                yield Reply(message=word, tokens=number, prompt_tokens=len(request.Prompt))
        finally:
            self._running -= 1
        context.set_trailing_metadata((("localai-cached-tokens", tokens),))
        if status not in ("", "0"):
            await context.abort(STATUSES[int(status)], message)

    async def Predict(self, request: PredictOptions, context: Any) -> Reply:
        pieces = [piece async for piece in self._replies(request, context)]
        text = b"".join(piece.message for piece in pieces)
        return Reply(message=text, tokens=len(pieces), prompt_tokens=7)


async def main() -> None:
    """Serve until SIGTERM; then let running calls finish."""
    options = argparse.ArgumentParser(description="A scripted engine.")
    options.add_argument("-address", required=True)
    options.add_argument("-streams", type=int, default=2**31 - 1)
    options.add_argument("-token", default="")
    chosen = options.parse_args()
    limits = [("grpc.max_concurrent_streams", chosen.streams), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=[*limits, ("grpc.max_receive_message_length", -1)])
    add_BackendServicer_to_server(Talker(chosen.token), server)
    server.add_insecure_port(chosen.address)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with contextlib.suppress(asyncio.CancelledError):
        await stop.wait()
    await server.stop(600)


if __name__ == "__main__":
    asyncio.run(main())
