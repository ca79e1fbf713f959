"""Embeddings (`/v1/embeddings`; Ollama's `/api/embed` and `/api/embeddings`) and `/v1/rerank`."""

import asyncio
import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import UNSET, UnsetType

from localai_cluster.kit import cancellation, clock
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.metrics import web as metrics
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import DeadlineExceeded
from localai_cluster.rpc.messages import (
    EMBEDDING_LAYOUT_PER_TOKEN,
    EmbeddingResult,
    PredictOptions,
    RerankRequest,
    RerankResult,
)
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.dialects.ollama import to_nanoseconds
from nodes.dialects.openai_common import NonNegativeInt, PositiveInt, Text
from nodes.gateway import gateway
from nodes.gateway.gateway import find_model
from nodes.gateway.request import InferenceRequest, node_header

MAX_TEXTS = 2048
MAX_TEXT_BYTES = 1024 * 1024
TRUNCATE_METADATA = "truncate"
"""Request metadata: with `false` the engine must refuse a text that is longer than the model's context."""
CONCURRENT_TEXTS = 8
"""Maximum number of texts of one request that its replica embeds in parallel."""


class WrongDimensions(InvalidInput):
    """The model returned vectors of another length than the request requires."""

    code = "invalid_dimensions"


Tokens = Annotated[list[NonNegativeInt], msgspec.Meta(min_length=1)]
Texts = Annotated[list[Text | NonNegativeInt | Tokens], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]
Input = str | tuple[int, ...]
"""A text, or the token ids of a text."""


class EmbeddingBody(ResponseBody, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[
        list[float] | str, msgspec.Meta(description="Numbers, or base64 of little-endian float32.")
    ]


class EmbeddingsUsage(ResponseBody):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(ResponseBody, kw_only=True):
    object: Literal["list"] = "list"
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingsUsage


class EmbeddingsBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of an embeddings request. The order of the fields is the order of their checks."""

    encoding_format: Literal["float", "base64"] | None = "float"
    user: str | None = None
    model: Text
    input: Annotated[
        Text | Texts,
        msgspec.Meta(
            description=f"A text or up to {MAX_TEXTS} texts, none empty, "
            f"each at most {MAX_TEXT_BYTES} bytes; the whole body at most {wire.MAX_BODY} bytes. "
            "In place of a text the model's own token ids."
        ),
    ]
    dimensions: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        msgspec.Meta(description="The model's own number or absent."),
    ] = None

    @property
    def inputs(self) -> list[Input]:
        """The texts or lists of token ids. Raise InvalidInput for a list of mixed types."""
        if isinstance(self.input, str):
            return [self.input]
        ids = [item for item in self.input if isinstance(item, int)]
        if ids and len(ids) == len(self.input):
            return [tuple(ids)]
        if ids:
            raise InvalidInput("input: token ids and texts are mixed", field="input")
        return [
            item if isinstance(item, str) else tuple(item) for item in self.input if not isinstance(item, int)
        ]


def parse_request(fields: Mapping[str, Any]) -> EmbeddingsBody:
    """Parse the body of an embeddings request. Raise InvalidInput with the name of the first wrong field."""
    body = wire.parse_struct(fields, EmbeddingsBody)
    texts = [item for item in body.inputs if isinstance(item, str)]
    if any(len(text) > MAX_TEXT_BYTES // 4 and len(text.encode()) > MAX_TEXT_BYTES for text in texts):
        raise InvalidInput(f"a text of input must not exceed {MAX_TEXT_BYTES} bytes", field="input")
    return body


async def embed(request: InferenceRequest) -> Answer:
    """Respond with the embedding of each text, in OpenAI's form."""
    body = parse_request(wire.parse_json_object(request.body))
    results = await compute_embeddings(request, body, truncate=False)
    return Answer(render_response(body, results), headers=tuple(node_header(request)))


_NO_TOKEN_IDS_MESSAGE = (
    "this model takes texts; token ids belong to one tokenizer, and a definition has to say that clients use"
    " the model's (`token_ids: true`). LangChain sends texts with check_embedding_ctx_length=False"
)


async def compute_embeddings(
    request: InferenceRequest, body: EmbeddingsBody, *, truncate: bool, field: str = "input"
) -> Sequence[EmbeddingResult]:
    """Return the embedding of each input from one replica; raise InvalidInput if an input is refused.

    Without `truncate` the engine refuses a text that is longer than the model's context. `field` is the name
    of the texts in the client's request.
    """
    definition = await find_model(request, body.model)
    if not definition.takes_token_ids and any(isinstance(item, tuple) for item in body.inputs):
        raise wire.field_error(field, _NO_TOKEN_IDS_MESSAGE, "unsupported_value")
    options = PredictOptions(ModelIdentity=definition.model, CorrelationId=request.request_id)
    options.Metadata[TRUNCATE_METADATA] = "true" if truncate else "false"
    if "numpy" not in sys.modules:  # it takes 100 ms and 10 MB, and only embeddings need it
        await asyncio.to_thread(import_module, "numpy")
    try:
        results = await _embed_on_replica(request, options, body.inputs)
    except InvalidInput as refusal:
        refusal.field = refusal.field or field
        raise
    metrics.tokens_used(request.model, count_tokens(results), 0, 0)
    for result in results:
        _check_result(result, body.dimensions)
    return results


async def _embed_on_replica(
    request: InferenceRequest, options: PredictOptions, texts: Sequence[Input]
) -> Sequence[EmbeddingResult]:
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine:
            return await _embed_texts(engine, options, texts, request.deadline)


async def _embed_texts(
    engine: BackendClient, options: PredictOptions, texts: Sequence[Input], deadline: float
) -> Sequence[EmbeddingResult]:
    """Make one call for each text, at most `CONCURRENT_TEXTS` in parallel.

    The first failure cancels all calls.
    """
    if len(texts) == 1:
        return [await _embed_text(engine, options, texts[0], deadline)]
    results: list[EmbeddingResult] = [EmbeddingResult()] * len(texts)
    waiting = iter(enumerate(texts))
    callers = [
        asyncio.ensure_future(_embed_waiting_texts(engine, options, waiting, results, deadline))
        for _ in range(min(CONCURRENT_TEXTS, len(texts)))
    ]
    try:
        await asyncio.gather(*callers)
    finally:
        await cancellation.cancel_and_wait(*callers)
    return results


async def _embed_waiting_texts(
    engine: BackendClient,
    options: PredictOptions,
    waiting: Iterator[tuple[int, Input]],
    results: list[EmbeddingResult],
    deadline: float,
) -> None:
    for index, text in waiting:
        results[index] = await _embed_text(engine, options, text, deadline)


async def _embed_text(
    engine: BackendClient, options: PredictOptions, text: Input, deadline: float
) -> EmbeddingResult:
    remaining = deadline - clock.monotonic()
    if remaining <= 0:
        raise DeadlineExceeded
    call = PredictOptions(Embeddings=text) if isinstance(text, str) else PredictOptions(EmbeddingTokens=text)
    call.MergeFrom(options)
    return await engine.embedding(call, remaining)


def _check_result(result: EmbeddingResult, dimensions: int | None) -> None:
    """Raise InvalidInput unless the model returned one vector for each text, with the requested length."""
    if result.layout == EMBEDDING_LAYOUT_PER_TOKEN:
        raise InvalidInput("this model gives one vector for each token, not one for each text", field="model")
    if dimensions is not None and dimensions != len(result.embeddings):
        raise WrongDimensions(
            f"this model's vectors have {len(result.embeddings)} dimensions, not {dimensions}",
            field="dimensions",
        )


def render_response(body: EmbeddingsBody, results: Sequence[EmbeddingResult]) -> bytes:
    """Return the body of an embeddings response in OpenAI's form."""
    tokens = count_tokens(results)
    is_base64 = body.encoding_format == "base64"
    data = [
        EmbeddingBody(
            index=index,
            embedding=_encode_base64(result.embeddings) if is_base64 else vector_json(result.embeddings),
        )
        for index, result in enumerate(results)
    ]
    usage = EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens)
    return msgspec.json.encode(EmbeddingsResponse(model=body.model, data=data, usage=usage))


def count_tokens(results: Sequence[EmbeddingResult]) -> int:
    """Return the number of tokens of all inputs."""
    return sum(result.prompt_tokens or result.tokens for result in results)


def vector_json(numbers: Sequence[float]) -> Any:
    """Return a vector as JSON in single precision.

    Each number has the fewest digits that parse to the number that the engine sent.
    """
    import numpy as np

    vector = np.array(numbers, dtype=np.float32)
    return msgspec.Raw(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))


def _encode_base64(numbers: Sequence[float]) -> str:
    """Return the base64 of little-endian float32 numbers, the form that OpenAI's client decodes."""
    import numpy as np

    return base64.b64encode(np.array(numbers, dtype="<f4").tobytes()).decode()


class EmbedResponse(ResponseBody, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OlderEmbedResponse(ResponseBody):
    embedding: list[float]


class EmbedBody(msgspec.Struct, frozen=True):
    """The body of a request to `/api/embed`. Other fields of Ollama's API are ignored."""

    model: Text
    input: Text | list[Text]
    dimensions: PositiveInt | None = None
    truncate: bool | None = None
    """False if a text that is longer than the model's context is an error."""


class OlderEmbedBody(msgspec.Struct, frozen=True):
    """The body of a request to the older route `/api/embeddings`."""

    model: Text
    prompt: Text


async def ollama_embed(request: InferenceRequest) -> Answer:
    """Respond with the embedding of each text, in Ollama's form."""
    started_at = clock.monotonic()
    body = wire.parse_struct(wire.parse_json_object(request.body), EmbedBody)
    fields = {"model": body.model, "input": body.input, "dimensions": body.dimensions}
    results = await compute_embeddings(request, parse_request(fields), truncate=body.truncate is not False)
    response = EmbedResponse(
        model=body.model,
        embeddings=[vector_json(result.embeddings) for result in results],
        total_duration=to_nanoseconds(clock.monotonic() - started_at),
        prompt_eval_count=count_tokens(results),
    )
    return wire.json_answer(response, headers=node_header(request))


async def ollama_embed_one(request: InferenceRequest) -> Answer:
    """Respond with the embedding of one text, in the form of Ollama's older route."""
    body = wire.parse_struct(wire.parse_json_object(request.body), OlderEmbedBody)
    try:
        body_for_vectors = parse_request({"model": body.model, "input": body.prompt})
    except InvalidInput as error:
        raise InvalidInput(error.message, field="prompt") from error
    (result,) = await compute_embeddings(request, body_for_vectors, truncate=True, field="prompt")
    return wire.json_answer(
        OlderEmbedResponse(embedding=vector_json(result.embeddings)), headers=node_header(request)
    )


MAX_DOCUMENTS = 2048


class RerankDocument(msgspec.Struct, frozen=True):
    """A document to rank."""

    text: str


class RankedDocument(ResponseBody):
    text: str


class RankedEntry(ResponseBody):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankUsage(ResponseBody):
    total_tokens: int
    prompt_tokens: int


class RerankResponse(ResponseBody):
    model: str
    usage: RerankUsage
    results: list[RankedEntry]


class RerankBody(msgspec.Struct, frozen=True):
    """The body of a rerank request."""

    model: Text
    query: Text
    documents: Annotated[list[str | RerankDocument], msgspec.Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: PositiveInt | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


async def rerank(request: InferenceRequest) -> Answer:
    """Respond with the documents ranked by their relevance to the query."""
    return wire.json_answer(render_ranking(*await _rank_documents(request)), headers=node_header(request))


async def _rank_documents(request: InferenceRequest) -> tuple[RerankBody, RerankResult]:
    body = wire.parse_struct(wire.parse_json_object(request.body), RerankBody)
    definition = await find_model(request, body.model)
    call = RerankRequest(
        query=body.query, documents=body.texts, top_n=body.top_n or 0, ModelIdentity=definition.model
    )
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine:
            result = await engine.rerank(call, request.deadline - clock.monotonic())
            metrics.tokens_used(request.model, result.usage.prompt_tokens, 0, 0)
            return body, result


class CohereEntry(ResponseBody):
    index: int
    relevance_score: float


class CohereRerankResponse(ResponseBody, kw_only=True):
    id: str
    results: list[CohereEntry]
    meta: dict[str, Any]


async def cohere_rerank(request: InferenceRequest) -> Answer:
    """Respond with the ranked documents in the form of Cohere's API, version 2."""
    body, result = await _rank_documents(request)
    entries = [
        CohereEntry(entry.index, entry.relevance_score) for entry in render_ranking(body, result).results
    ]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    response = CohereRerankResponse(id=request.request_id, results=entries, meta=meta)
    return wire.json_answer(response, headers=node_header(request))


def render_ranking(body: RerankBody, result: RerankResult) -> RerankResponse:
    """Return the response with the best documents first, at most `top_n`, even if the engine returns more."""
    best = sorted(result.results, key=lambda document: document.relevance_score, reverse=True)
    has_documents = body.return_documents is not False
    entries = [
        RankedEntry(
            document.index,
            document.relevance_score,
            RankedDocument(document.text) if has_documents else UNSET,
        )
        for document in best[: body.top_n]
    ]
    usage = RerankUsage(result.usage.total_tokens, result.usage.prompt_tokens)
    return RerankResponse(body.model, usage, entries)
