"""`GET /v1/models`: the models that are defined, loaded or not."""

import orjson

from nodes import definitions
from nodes.inference.endpoint import Request, confirm
from nodes.inference.wire import Answer


async def list_models(request: Request) -> Answer:
    """Answers the list."""
    await confirm(request.claim)
    data = [{"id": definition.name, "object": "model"} for definition in definitions.every()]
    return Answer(orjson.dumps({"object": "list", "data": data}))
