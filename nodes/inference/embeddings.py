"""`POST /v1/embeddings`: the body that is accepted, the calls to the engine, the answer."""

import asyncio
import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from localai_cluster import clock, conf
from localai_cluster.errors import InvalidInput, NotFound
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import DeadlineExceeded
from localai_cluster.rpc.messages import EMBEDDING_LAYOUT_PER_TOKEN, EmbeddingResult, PredictOptions
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.definitions import folder
from nodes.inference import gateway
from nodes.routing.request import InferenceRequest

MAX_TEXTS = 2048
MAX_TEXT_BYTES = 1024 * 1024
AT_ONCE = 8
"""How many texts of one request its replica works on at the same time."""


class ModelNotFound(NotFound):
    """No model of that name is defined."""

    code = "model_not_found"


class WrongDimensions(InvalidInput):
    """The model makes vectors of another length."""

    code = "invalid_dimensions"


Text = Annotated[str, msgspec.Meta(min_length=1)]
Texts = Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingsBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request. Its fields are checked in this order, and the API document shows them."""

    encoding_format: Literal["float", "base64"] | None = "float"
    user: str | None = None
    model: Text
    input: Annotated[
        Text | Texts,
        msgspec.Meta(
            description=f"A text or up to {MAX_TEXTS} texts, none empty, "
            f"each at most {MAX_TEXT_BYTES} bytes; the whole body at most {wire.MAX_BODY} bytes."
        ),
    ]
    dimensions: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        msgspec.Meta(description="The model's own number or absent."),
    ] = None

    @property
    def texts(self) -> list[str]:
        """The input as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


def parse(fields: Mapping[str, Any]) -> EmbeddingsBody:
    """Checks a request's fields; raises InvalidInput that names the first wrong one."""
    body = wire.typed(fields, EmbeddingsBody)
    if any(len(text) > MAX_TEXT_BYTES // 4 and len(text.encode()) > MAX_TEXT_BYTES for text in body.texts):
        raise InvalidInput(f"a text of input must not exceed {MAX_TEXT_BYTES} bytes", field="input")
    return body


async def embed(request: InferenceRequest) -> Answer:
    """Answers one request."""
    body = parse(wire.json_object(request.body))
    definition = await folder.find(body.model)
    if definition is None:
        raise ModelNotFound(
            f"The model {body.model[:100]!r} does not exist; GET /v1/models lists them", field="model"
        )
    request.model = body.model
    options = PredictOptions(ModelIdentity=definition.model, CorrelationId=request.request_id)
    results = await gateway.current().run(
        request, lambda engine: _ask_engine(engine, options, body.texts, request.deadline)
    )
    for result in results:
        _check(result, body.dimensions)
    headers = []
    if conf.cluster().expose_node_header and request.replica is not None:
        headers.append((b"x-localai-node", str(request.replica.node_id).encode()))
    return Answer(render(body, results), headers=tuple(headers))


async def _ask_engine(
    engine: BackendClient, options: PredictOptions, texts: Sequence[str], deadline: float
) -> Sequence[EmbeddingResult]:
    """One call for each text, a few at a time; the first failure ends the rest."""
    if len(texts) == 1:
        return [await _call(engine, options, texts[0], deadline)]
    results: list[EmbeddingResult] = [EmbeddingResult()] * len(texts)
    waiting = iter(enumerate(texts))
    callers = [
        asyncio.ensure_future(_call_each(engine, options, waiting, results, deadline))
        for _ in range(min(AT_ONCE, len(texts)))
    ]
    try:
        await asyncio.gather(*callers)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    return results


async def _call_each(
    engine: BackendClient,
    options: PredictOptions,
    waiting: Iterator[tuple[int, str]],
    results: list[EmbeddingResult],
    deadline: float,
) -> None:
    for index, text in waiting:
        results[index] = await _call(engine, options, text, deadline)


async def _call(
    engine: BackendClient, options: PredictOptions, text: str, deadline: float
) -> EmbeddingResult:
    left = deadline - clock.monotonic()
    if left <= 0:
        raise DeadlineExceeded
    call = PredictOptions(Embeddings=text)
    call.MergeFrom(options)
    return await engine.embedding(call, left)


def _check(result: EmbeddingResult, dimensions: int | None) -> None:
    """Raises InvalidInput unless the model gives one vector for each text, of the requested length."""
    if result.layout == EMBEDDING_LAYOUT_PER_TOKEN:
        raise InvalidInput("this model gives one vector for each token, not one for each text", field="model")
    if dimensions is not None and dimensions != len(result.embeddings):
        raise WrongDimensions(
            f"this model's vectors have {len(result.embeddings)} dimensions, not {dimensions}",
            field="dimensions",
        )


def render(body: EmbeddingsBody, results: Sequence[EmbeddingResult]) -> bytes:
    """The answer's body."""
    tokens = sum(result.prompt_tokens or result.tokens for result in results)
    form: Callable[[Sequence[float]], object] = _base64 if body.encoding_format == "base64" else _vector
    data = [
        {"object": "embedding", "index": index, "embedding": form(result.embeddings)}
        for index, result in enumerate(results)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": body.model, "usage": usage}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _vector(numbers: Sequence[float]) -> npt.NDArray[np.float32]:
    """Single precision, as the engine sent it: printed in the fewest digits that read as the same number."""
    return np.array(numbers, dtype=np.float32)


def _base64(numbers: Sequence[float]) -> str:
    """Little-endian float32, as the openai client decodes it."""
    return base64.b64encode(_vector(numbers).astype("<f4").tobytes()).decode()
