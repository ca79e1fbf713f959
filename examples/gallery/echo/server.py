"""An engine without a model: answers at once with numbers drawn from the text, or with the text itself.

Tests and benchmarks steer it by `ModelOptions.Options`: `dims:768` numbers a vector, `load_seconds:3` for
LoadModel, `delay_ms:50` for every answer, `refuse_load` (success false), `exit_at_load` (ends with status 3).
"""

import asyncio
import hashlib
import os
from array import array
from collections.abc import AsyncIterator
from functools import lru_cache

from localai_backend import Engine, LoadRefused, pb, resident_bytes, say, serve


@lru_cache(maxsize=4096)
def vector(text: str, dims: int) -> pb.EmbeddingResult:
    """A unit vector that only depends on the text and its length."""
    raw = array("h", hashlib.shake_256(text.encode()).digest(2 * dims))
    norm = sum(value * value for value in raw) ** 0.5 or 1.0
    words = count(text)
    return pb.EmbeddingResult(
        embeddings=[value / norm for value in raw],
        tokens=words,
        prompt_tokens=words,
        dim=dims,
        layout=pb.EMBEDDING_LAYOUT_FINAL,
    )


def count(text: str) -> int:
    """Tokens of a text: its words, as far as this engine is concerned."""
    return max(1, len(text.split()))


class Echo(Engine):
    """Counts what is asked of it; Status tells, so that a test can see how often a model was loaded."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self.dims = 768
        self.delay = 0.0
        self.calls = {"load_calls": 0, "embedding_calls": 0, "predict_calls": 0, "streams_open": 0}

    async def load(self, options: pb.ModelOptions) -> None:
        self.calls["load_calls"] += 1
        self.options = {name: value for name, _, value in (line.partition(":") for line in options.Options)}
        self.dims = int(self.options.get("dims", 768))
        self.delay = float(self.options.get("delay_ms", 0)) / 1000
        await asyncio.sleep(float(self.options.get("load_seconds", 0)))
        if "exit_at_load" in self.options:
            say("exit_at_load: leaving as asked")
            os._exit(3)
        if "refuse_load" in self.options:
            raise LoadRefused(self.options["refuse_load"] or "refused as asked")

    async def embed(self, text: str, *, whole: bool = False) -> pb.EmbeddingResult:
        self.calls["embedding_calls"] += 1
        if self.delay:
            await asyncio.sleep(self.delay)
        return vector(text, self.dims)

    async def stream(self, options: pb.PredictOptions) -> AsyncIterator[pb.Reply]:
        self.calls["predict_calls"] += 1
        self.calls["streams_open"] += 1
        asked = options.Prompt or (options.Messages[-1].content if options.Messages else "")
        words = asked.split(" ")[: options.Tokens or None]
        try:
            for number, word in enumerate(words, start=1):
                if self.delay:
                    await asyncio.sleep(self.delay)
                piece = word if number == 1 else f" {word}"
                yield pb.Reply(message=piece.encode(), tokens=number, prompt_tokens=len(words))
        finally:
            self.calls["streams_open"] -= 1

    async def tokens(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def memory(self) -> dict[str, int]:
        return {"resident": resident_bytes(), **self.calls}


if __name__ == "__main__":
    serve(Echo())
