"""`GET /v1/models`: the models that are defined, loaded or not."""

from typing import Any

import orjson

from localai_cluster.web.wire import Answer
from nodes.definitions import folder
from nodes.definitions.files import Definition
from nodes.inference.endpoint import confirm
from nodes.routing.request import InferenceRequest


async def list_models(request: InferenceRequest) -> Answer:
    """Answers the list."""
    await confirm(request)
    data = [_entry(definition) for definition in await folder.every()]
    return Answer(orjson.dumps({"object": "list", "data": data}))


def _entry(definition: Definition) -> dict[str, Any]:
    """One model as clients of OpenAI know it; with what of its definition is not followed."""
    entry: dict[str, Any] = {"id": definition.name, "object": "model", "owned_by": "localai"}
    if definition.answering.warnings:
        entry["warnings"] = list(definition.answering.warnings)
    return entry
