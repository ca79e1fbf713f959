"""`GET /v1/models`: the models that are defined, loaded or not."""

import orjson

from localai_cluster.web.wire import Answer
from nodes.definitions import folder
from nodes.inference.endpoint import confirm
from nodes.routing.request import InferenceRequest


async def list_models(request: InferenceRequest) -> Answer:
    """Answers the list."""
    await confirm(request)
    data = [{"id": definition.name, "object": "model"} for definition in await folder.every()]
    return Answer(orjson.dumps({"object": "list", "data": data}))
