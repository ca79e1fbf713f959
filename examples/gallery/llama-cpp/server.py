"""Language models in GGUF files: the contract's methods over llama.cpp. README.md has their fields.

A request moves like this: `questions` checks it and makes it llama.cpp's, `model` runs it, `answers` makes
pieces of the contract of what comes back. While a model is loaded or freed llama.cpp keeps Python's lock, so
the process answers nothing until that is done, not even Health: callers see a deadline, no refusal.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

import questions
from answers import Answer
from localai_backend import Engine, Failed, Invalid, NotLoaded, pb, resident_bytes, serve

if TYPE_CHECKING:
    from model import Model

PROBE = [{"role": "user", "content": "Hello"}]


class LlamaCpp(Engine):
    """At most one model."""

    def __init__(self) -> None:
        self.model: Model | None = None
        self.loaded_with = b""

    async def load(self, options: pb.ModelOptions) -> None:
        # The first load brings llama.cpp: the process answers Health before it has read 100 MB of it.
        from model import Model

        wanted = pb.ModelOptions()
        wanted.CopyFrom(options)
        # LocalAI draws a seed for every load, and requests bring their own: it makes no other model.
        wanted.ClearField("Seed")
        if self.model is not None and self.loaded_with == wanted.SerializeToString(deterministic=True):
            return
        await self.free()
        self.model = await asyncio.to_thread(Model, options)
        self.loaded_with = wanted.SerializeToString(deterministic=True)

    async def free(self) -> None:
        model, self.model = self.model, None
        if model is not None:
            await asyncio.to_thread(model.close)

    async def stream(self, options: pb.PredictOptions) -> AsyncIterator[pb.Reply | Mapping[str, str]]:
        model = self._model()
        # On a thread, as a large grammar takes a moment to check.
        asked = await asyncio.to_thread(questions.of, options, model.facts)
        answer = Answer(asked)
        async with aclosing(model.ask(asked.body, chat=asked.chat)) as chunks:
            async for chunk in chunks:
                if piece := answer.piece(chunk):
                    yield piece
                if answer.is_over:
                    break
        yield answer.trailers()

    async def embed(self, text: str, *, whole: bool = False) -> pb.EmbeddingResult:
        # A token has a byte at least, and special ones come beside them.
        if len(text.encode()) < self._model().context // 2:
            return await self._vector(text)
        body = {"content": text, "add_special": True}
        told = await asyncio.to_thread(self._model().http, "POST", "/tokenize", body)
        return await self.embed_tokens(told["tokens"], whole=whole)

    async def embed_tokens(self, tokens: list[int], *, whole: bool = False) -> pb.EmbeddingResult:
        most = self._model().context
        if whole and len(tokens) > most:
            raise Invalid(f"Embeddings: the text is longer than the {most} tokens that this model reads")
        return await self._vector(tokens[:most])

    async def _vector(self, content: list[int] | str) -> pb.EmbeddingResult:
        told = await self._model().once("embeddings", {"input": content, "encoding_format": "float"})
        vector, count = told["data"][0]["embedding"], told["usage"]["prompt_tokens"]
        return pb.EmbeddingResult(
            embeddings=vector,
            tokens=count,
            prompt_tokens=count,
            dim=len(vector),
            layout=pb.EMBEDDING_LAYOUT_FINAL,
        )

    async def rerank(self, request: pb.RerankRequest) -> pb.RerankResult:
        if not request.documents:
            raise Invalid("documents is empty")
        body = {"query": request.query, "documents": list(request.documents)}
        told = await self._model().once("rerank", body)
        ranked = sorted(told["results"], key=lambda one: -one["relevance_score"])
        usage = told["usage"]
        return pb.RerankResult(
            usage=pb.Usage(total_tokens=usage["total_tokens"], prompt_tokens=usage["prompt_tokens"]),
            results=[
                pb.DocumentResult(
                    index=one["index"],
                    text=request.documents[one["index"]],
                    relevance_score=one["relevance_score"],
                )
                for one in ranked[: request.top_n or None]
            ],
        )

    async def prompt(self, options: pb.PredictOptions) -> str:
        model = self._model()
        asked = questions.of(options, model.facts)
        if not asked.chat:
            return options.Prompt
        told = await asyncio.to_thread(model.http, "POST", "/apply-template", questions.template(asked))
        return str(told["prompt"])

    async def tokens(self, text: str) -> list[int]:
        told = await asyncio.to_thread(self._model().http, "POST", "/tokenize", {"content": text})
        return list(told["tokens"])

    async def text(self, tokens: list[int]) -> str:
        try:
            told = await asyncio.to_thread(self._model().http, "POST", "/detokenize", {"tokens": tokens})
        except Failed as error:
            raise Invalid(f"tokens: {error}") from None
        return str(told["content"])

    async def metadata(self) -> pb.ModelMetadataResponse:
        model = self._model()
        if not model.facts.template:
            return pb.ModelMetadataResponse()
        told = await asyncio.to_thread(model.http, "POST", "/apply-template", {"messages": PROBE})
        return pb.ModelMetadataResponse(
            rendered_template=told["prompt"],
            supports_thinking="enable_thinking" in model.properties["chat_template"],
            media_marker=model.properties["media_marker"] if model.properties["modalities"]["vision"] else "",
        )

    def memory(self) -> dict[str, int]:
        model = self.model
        return {
            "resident": resident_bytes(),
            "weights": model.weight_bytes if model else 0,
            "requests_running": len(model.calls) if model else 0,
        }

    def _model(self) -> "Model":
        if self.model is None:
            raise NotLoaded
        return self.model


if __name__ == "__main__":
    serve(LlamaCpp())
