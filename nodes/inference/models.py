"""`GET /v1/models` and `/v1/models/{model}`: the models that are defined, loaded or not."""

from typing import Any

import orjson

from localai_cluster.web.wire import Answer
from nodes.definitions import folder
from nodes.definitions.files import Definition
from nodes.inference.defined import defined
from nodes.inference.endpoint import confirm
from nodes.routing.request import InferenceRequest

ONE_MODEL = "/v1/models/"
"""What stands before the name, which may have a `/` in it."""


async def list_models(request: InferenceRequest) -> Answer:
    """Answers the list."""
    await confirm(request)
    data = [_entry(definition) for definition in await folder.every()]
    return Answer(orjson.dumps({"object": "list", "data": data}))


async def one_model(request: InferenceRequest) -> Answer:
    """Answers one of them; raises ModelNotFound."""
    await confirm(request)
    definition = await defined(request.path.removeprefix(ONE_MODEL))
    return Answer(orjson.dumps(_entry(definition)))


def _entry(definition: Definition) -> dict[str, Any]:
    """One model as clients of OpenAI know it; with what of its definition is not followed."""
    entry: dict[str, Any] = {
        "id": definition.name,
        "object": "model",
        "created": definition.changed,
        "owned_by": "localai",
    }
    if definition.answering.warnings:
        entry["warnings"] = list(definition.answering.warnings)
    return entry
