"""`GET /v1/models` and `/v1/models/{model}`: all models with a definition, loaded or not."""

from typing import Any

import orjson

from localai_cluster.web.wire import Answer
from nodes.definitions import folder
from nodes.definitions.files import Definition
from nodes.gateway.endpoint import confirm
from nodes.gateway.gateway import defined
from nodes.gateway.request import InferenceRequest

ONE_MODEL = "/v1/models/"
"""Path prefix of one model; the name after it may contain `/`."""


async def list_models(request: InferenceRequest) -> Answer:
    """Respond with the list of models."""
    await confirm(request)
    data = [_entry(definition) for definition in await folder.list_definitions()]
    return Answer(orjson.dumps({"object": "list", "data": data}))


async def one_model(request: InferenceRequest) -> Answer:
    """Respond with one model; raise ModelNotFound."""
    await confirm(request)
    definition = await defined(request.path.removeprefix(ONE_MODEL))
    return Answer(orjson.dumps(_entry(definition)))


def _entry(definition: Definition) -> dict[str, Any]:
    """Return one model in OpenAI's form, with the warnings of its definition."""
    entry: dict[str, Any] = {
        "id": definition.name,
        "object": "model",
        "created": definition.changed,
        "owned_by": "localai",
    }
    if definition.generation.warnings:
        entry["warnings"] = list(definition.generation.warnings)
    return entry
