"""`POST /v1/embeddings`: what is accepted, how the engine is asked, what is answered."""

import asyncio
import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from nodes.definitions import files
from nodes.inference import gateway
from nodes.inference.endpoint import Request
from nodes.loading.wait import Asker

MAX_TEXTS = 2048
MAX_TEXT_BYTES = 1024 * 1024
AT_ONCE = 8
"""Texts of one request that its replica works on at the same time."""


class ModelNotFound(NotFound):
    """No model of that name is defined."""

    code = "model_not_found"


class WrongDimensions(InvalidInput):
    """The model makes vectors of another length."""

    code = "invalid_dimensions"


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """A checked request."""

    model: str
    texts: Sequence[str]
    as_base64: bool
    dimensions: int | None


def parse(body: Mapping[str, Any]) -> EmbeddingsRequest:
    """Checks a request's fields; raises InvalidInput that names the first wrong one."""
    encoding = body.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise InvalidInput("encoding_format must be float or base64", field="encoding_format")
    user = body.get("user")
    if user is not None and not isinstance(user, str):
        raise InvalidInput("user must be a text", field="user")
    return EmbeddingsRequest(_model(body), _texts(body.get("input")), encoding == "base64", _dimensions(body))


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidInput("model must be the name of a model", field="model")
    return model


def _dimensions(body: Mapping[str, Any]) -> int | None:
    value = body.get("dimensions")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidInput("dimensions must be a positive number", field="dimensions")
    return value


def _texts(value: object) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidInput("input must be a text or a list of texts", field="input")
    if not texts or not all(texts):
        raise InvalidInput("input must not be empty", field="input")
    if len(texts) > MAX_TEXTS:
        raise InvalidInput(f"input must not hold more than {MAX_TEXTS} texts", field="input")
    if any(len(text) > MAX_TEXT_BYTES // 4 and len(text.encode()) > MAX_TEXT_BYTES for text in texts):
        raise InvalidInput(f"a text of input must not exceed {MAX_TEXT_BYTES} bytes", field="input")
    return texts


async def embed(request: Request) -> Answer:
    """Answers one request."""
    wanted = parse(wire.json_object(request.body))
    definition = files.find(wanted.model)
    if definition is None:
        raise ModelNotFound(
            f"The model {wanted.model[:100]!r} does not exist; GET /v1/models lists them", field="model"
        )
    ask = gateway.Ask(
        wanted.model,
        Asker(request.claim.name, request.request_id, request.client_address),
        request.claim.key_hash,
        gateway.wait_until(),
    )
    # The pick confirms the key: whatever goes wrong after it needs no statement of its own.
    request.claim.key_hash = ""
    options = PredictOptions(ModelIdentity=definition.model, CorrelationId=request.request_id)
    results, replica = await gateway.current().run(
        ask, lambda engine, deadline: _ask_engine(engine, options, wanted.texts, deadline)
    )
    for result in results:
        _check(result, wanted.dimensions)
    headers = (
        ((b"x-localai-node", str(replica.node_id).encode()),) if conf.cluster().expose_node_header else ()
    )
    return Answer(render(wanted, results), headers=headers)


async def _ask_engine(
    engine: BackendClient, options: PredictOptions, texts: Sequence[str], deadline: float
) -> Sequence[EmbeddingResult]:
    """One call a text, a few at a time; the first failure ends the rest."""
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
    """Raises InvalidInput when the model gives something else than the one vector a text that was asked."""
    if result.layout == EMBEDDING_LAYOUT_PER_TOKEN:
        raise InvalidInput("this model gives a vector a token, not one a text", field="model")
    if dimensions is not None and dimensions != len(result.embeddings):
        raise WrongDimensions(
            f"this model's vectors have {len(result.embeddings)} dimensions, not {dimensions}",
            field="dimensions",
        )


def render(wanted: EmbeddingsRequest, results: Sequence[EmbeddingResult]) -> bytes:
    """The answer's body."""
    tokens = sum(result.prompt_tokens or result.tokens for result in results)
    form: Callable[[Sequence[float]], object] = _base64 if wanted.as_base64 else _vector
    data = [
        {"object": "embedding", "index": index, "embedding": form(result.embeddings)}
        for index, result in enumerate(results)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": wanted.model, "usage": usage}
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _vector(numbers: Sequence[float]) -> npt.NDArray[np.float32]:
    """Single precision, as the engine sent it: printed in the fewest digits that read as the same number."""
    return np.array(numbers, dtype=np.float32)


def _base64(numbers: Sequence[float]) -> str:
    """Little-endian float32, as the openai client decodes it."""
    return base64.b64encode(_vector(numbers).astype("<f4").tobytes()).decode()
