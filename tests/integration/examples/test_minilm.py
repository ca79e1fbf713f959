"""The MiniLM engine: real vectors, checked against known answers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from localai_cluster.rpc import errors
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.messages import EMBEDDING_LAYOUT_FINAL, ModelOptions, PredictOptions
from tests.support.backends import TOKEN, running_backend

MODEL = "all-MiniLM-L6-v2"
LIMIT = 30.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[BackendClient]:
    """A client of an engine that holds the model."""
    async with running_backend("minilm", model=MODEL) as backend:
        client = BackendClient(backend.address, TOKEN, counted=True)
        yield client
        await client.close()


async def embed(client: BackendClient, text: str) -> list[float]:
    """The vector of a text."""
    result = await client.embedding(PredictOptions(Embeddings=text, ModelIdentity=MODEL), LIMIT)
    return list(result.embeddings)


def dot(one: list[float], other: list[float]) -> float:
    """The cosine of two unit vectors."""
    return sum(a * b for a, b in zip(one, other, strict=True))


async def test_known_answers(client: BackendClient) -> None:
    """The main job's figures, to 1e-3."""
    cat, kitten, form = [await embed(client, text) for text in ("a cat", "a kitten", "a tax form")]
    assert dot(cat, kitten) == pytest.approx(0.766, abs=1e-3)
    assert dot(cat, form) == pytest.approx(0.167, abs=1e-3)
    assert cat[:4] == pytest.approx([0.0617, 0.0415, 0.0088, 0.0625], abs=1e-3)
    assert kitten[:4] == pytest.approx([0.0025, 0.0159, -0.0200, 0.0312], abs=1e-3)
    assert [dot(vector, vector) for vector in (cat, kitten, form)] == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)


async def test_shape_and_usage(client: BackendClient) -> None:
    """384 numbers, already pooled; tokens include the two special ones."""
    result = await client.embedding(PredictOptions(Embeddings="a tax form"), LIMIT)
    assert (result.dim, len(result.embeddings), result.layout) == (384, 384, EMBEDDING_LAYOUT_FINAL)
    assert result.tokens == result.prompt_tokens == 5
    assert (await client.tokenize(PredictOptions(Prompt="a tax form"), LIMIT)).length == 5


async def test_a_long_text_is_cut_at_256_tokens(client: BackendClient) -> None:
    """The model's limit, not the tokenizer file's 128; what lies beyond changes nothing."""
    result = await client.embedding(PredictOptions(Embeddings="word " * 300), LIMIT)
    assert result.tokens == 256
    assert list(result.embeddings) == await embed(client, "word " * 254)
    assert list(result.embeddings) != await embed(client, "word " * 200)


async def test_a_text_that_must_not_be_cut_is_refused(client: BackendClient) -> None:
    """C9: the request says so; a text that fits is not touched by it."""
    ids = [*(await client.tokenize(PredictOptions(Prompt="word " * 300), LIMIT)).tokens]
    assert len(ids) == 302, "a text is divided whole"
    for options, is_refused in (
        *((PredictOptions(Embeddings="word " * words), words > 254) for words in (254, 255, 300)),
        *((PredictOptions(EmbeddingTokens=ids[:count]), count > 256) for count in (256, 257, 302)),
    ):
        assert (await client.embedding(options, LIMIT)).tokens == 256, "cut, unless the request says so"
        options.Metadata["truncate"] = "false"
        if not is_refused:
            assert (await client.embedding(options, LIMIT)).tokens == 256
            continue
        with pytest.raises(errors.Rejected, match="longer than the 256 tokens"):
            await client.embedding(options, LIMIT)


async def test_a_large_text_holds_up_no_other_call(client: BackendClient) -> None:
    """C9: it is divided into tokens on a thread, not between the calls."""
    large = PredictOptions(Embeddings="a b c d " * 131_072)  # 1 MiB
    for work in (
        client.embedding(large, LIMIT),
        client.tokenize(PredictOptions(Prompt=large.Embeddings), LIMIT),
    ):
        running = asyncio.ensure_future(work)
        answered = 0
        while not running.done():
            assert await client.health(LIMIT)
            answered += 1
        await running
        assert answered > 20


@pytest.mark.parametrize("text", ["", " ", "naïve 猫 🐈", "[CLS]", "x" * 100_000])
async def test_any_text_has_a_unit_vector(client: BackendClient, text: str) -> None:
    """Odd input is the tokenizer's business, never a failure."""
    vector = await embed(client, text)
    assert dot(vector, vector) == pytest.approx(1.0, abs=1e-5)


async def test_it_offers_no_completions(client: BackendClient) -> None:
    """Methods an engine does not offer answer UNIMPLEMENTED."""
    with pytest.raises(errors.Unimplemented):
        await anext(aiter(client.predict(PredictOptions(Prompt="hello"), LIMIT)))


async def test_it_carries_one_model_only(client: BackendClient) -> None:
    """Another model is refused instead of served by this one; loading again mends it."""
    try:
        refused = await client.load_model(ModelOptions(Model="another"), LIMIT)
        assert not refused.success
        assert "'another'" in refused.message
    finally:
        assert (await client.load_model(ModelOptions(Model=MODEL), LIMIT)).success


async def test_free_gives_the_weights_back(client: BackendClient) -> None:
    """Free releases the model; the process stays and can load again."""
    assert (await client.status(LIMIT)).memory.breakdown["weights"] > 90_000_000
    assert (await client.free(LIMIT)).success
    assert (await client.status(LIMIT)).memory.breakdown["weights"] == 0
    with pytest.raises(errors.ModelNotLoaded):
        await embed(client, "a cat")
    assert (await client.load_model(ModelOptions(Model=MODEL), LIMIT)).success
