"""A scripted engine of text in a process of its own: says words as fast or as slowly as it is asked to.

`python -m tests.benchmarks.talker PORT`. The last message or the prompt says how, as `<milliseconds between
two tokens> <tokens>`; with 0 milliseconds there is no pause.
"""

# The generated base has no types that could be kept to, and every method abstract.
# mypy: disallow-subclassing-any=false

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from localai_cluster.kit import clock
from localai_cluster.rpc.generated.backend_pb2_grpc import BackendServicer, add_BackendServicer_to_server
from localai_cluster.rpc.messages import EmbeddingResult, HealthMessage, PredictOptions, Reply

_Servicer: Any = BackendServicer
VECTOR = EmbeddingResult(embeddings=[number / 768 for number in range(768)], tokens=2, prompt_tokens=2)


class Talker(_Servicer):
    """The engine."""

    async def Health(self, request: HealthMessage, context: Any) -> Reply:
        return Reply(message=b"OK")

    async def Embedding(self, request: PredictOptions, context: Any) -> EmbeddingResult:
        return VECTOR

    async def PredictStream(self, request: PredictOptions, context: Any) -> AsyncIterator[Reply]:
        asked = request.Messages[-1].content if request.Messages else request.Prompt
        pause, tokens = (int(part) for part in asked.split())
        due = clock.monotonic()
        for number in range(1, tokens + 1):
            if pause:
                due += pause / 1000
                await asyncio.sleep(due - clock.monotonic())
            yield Reply(message=b" word", tokens=number, prompt_tokens=7)

    async def Predict(self, request: PredictOptions, context: Any) -> Reply:
        pieces = [piece async for piece in self.PredictStream(request, context)]
        text = b"".join(piece.message for piece in pieces)
        return Reply(message=text, tokens=len(pieces), prompt_tokens=7)


async def main(port: int) -> None:
    """Answers until the process ends."""
    server = grpc.aio.server()
    add_BackendServicer_to_server(Talker(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
