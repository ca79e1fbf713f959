"""Ollama's `POST /api/embed` and the older `/api/embeddings`, with the vectors of `/v1/embeddings`."""

from typing import Any

import msgspec
import orjson

from localai_cluster.kit import clock
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.dialects import embeddings
from nodes.dialects.ollama_answers import to_nanoseconds
from nodes.dialects.openai_bodies import PositiveInt, Text
from nodes.gateway.request import InferenceRequest
from nodes.gateway.streams import node_header


class EmbedBody(msgspec.Struct, frozen=True):
    """The body of a request. Other fields of Ollama's are ignored."""

    model: Text
    input: Text | list[Text]
    dimensions: PositiveInt | None = None


class OlderEmbedBody(msgspec.Struct, frozen=True):
    """The body of a request in the older form."""

    model: Text
    prompt: Text


async def ollama_embed(request: InferenceRequest) -> Answer:
    """Respond with a vector for each text."""
    started_at = clock.monotonic()
    body = wire.typed(wire.json_object(request.body), EmbedBody)
    fields = {"model": body.model, "input": body.input, "dimensions": body.dimensions}
    results = await embeddings.compute_embeddings(request, embeddings.parse_request(fields))
    answer = {
        "model": body.model,
        "embeddings": [embeddings.to_float32(result.embeddings) for result in results],
        "total_duration": to_nanoseconds(clock.monotonic() - started_at),
        "load_duration": 0,
        "prompt_eval_count": embeddings.count_tokens(results),
    }
    return _ollama_answer(request, answer)


async def ollama_embed_one(request: InferenceRequest) -> Answer:
    """Respond with the vector of one text."""
    body = wire.typed(wire.json_object(request.body), OlderEmbedBody)
    try:
        body_for_vectors = embeddings.parse_request({"model": body.model, "input": body.prompt})
    except InvalidInput as error:
        raise InvalidInput(error.message, field="prompt") from error
    (result,) = await embeddings.compute_embeddings(request, body_for_vectors)
    return _ollama_answer(request, {"embedding": embeddings.to_float32(result.embeddings)})


def _ollama_answer(request: InferenceRequest, document: dict[str, Any]) -> Answer:
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Answer(body, headers=tuple(node_header(request)))
