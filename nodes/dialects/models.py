"""Lists of models: OpenAI's `/v1/models`; Ollama's `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

from typing import Any

import msgspec
import orjson
from django.db import DatabaseError
from django.db.models import Sum

from localai_cluster.kit.errors import Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.definitions import folder
from nodes.definitions.files import Definition
from nodes.dialects.ollama import format_time
from nodes.dialects.openai_common import Text
from nodes.gateway.endpoint import confirm
from nodes.gateway.gateway import defined
from nodes.gateway.request import InferenceRequest
from nodes.models import NodeModel
from operations.executor.work import in_thread

MODEL_PREFIX = "/v1/models/"
"""Path prefix of one model; the name after it may contain `/`."""


async def list_models(request: InferenceRequest) -> Answer:
    """Respond with the list of models."""
    await confirm(request)
    data = [_entry(definition) for definition in await folder.list_definitions()]
    return Answer(orjson.dumps({"object": "list", "data": data}))


async def show_model(request: InferenceRequest) -> Answer:
    """Respond with one model; raise ModelNotFound."""
    await confirm(request)
    definition = await defined(request.path.removeprefix(MODEL_PREFIX))
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


VERSION = "0.12.0"
"""The implemented version of Ollama's API; clients refuse older versions."""
_NEVER = "9999-12-31T00:00:00Z"


class ShowBody(msgspec.Struct, frozen=True):
    """The body of a request; `name` is its older field."""

    model: Text | None = None
    name: Text | None = None


async def version(request: InferenceRequest) -> Answer:
    """Respond with the version."""
    await confirm(request)
    return Answer(orjson.dumps({"version": VERSION}))


async def tags(request: InferenceRequest) -> Answer:
    """Respond with all models that have a definition."""
    await confirm(request)
    models = [
        _ollama_entry(definition) | {"modified_at": format_time(definition.changed)}
        for definition in await folder.list_definitions()
    ]
    return Answer(orjson.dumps({"models": models}))


async def running(request: InferenceRequest) -> Answer:
    """Respond with the models that have a loaded replica."""
    await confirm(request)
    try:
        loaded = await in_thread(_loaded_memory)
    except DatabaseError as error:
        raise Unavailable("the database is not reachable", retry_after=2) from error
    models = [
        _ollama_entry(definition)
        | {"size": loaded[definition.name], "size_vram": loaded[definition.name], "expires_at": _NEVER}
        for definition in await folder.list_definitions()
        if definition.name in loaded
    ]
    return Answer(orjson.dumps({"models": models}))


def _loaded_memory() -> dict[str, int]:
    """Return the total GPU memory of the replicas of each model, in bytes."""
    rows = NodeModel.objects.loaded().values_list("model_name").annotate(Sum("vram_needed")).order_by()
    return dict(rows)


async def show(request: InferenceRequest) -> Answer:
    """Respond with the details of one model; raise ModelNotFound."""
    await confirm(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), ShowBody)
    definition = await defined(body.model or body.name or "")
    context = definition.options.get("ContextSize")
    return Answer(
        orjson.dumps(
            {
                "modelfile": "",
                "parameters": "",
                "template": definition.generation.template,
                "details": _ollama_entry(definition)["details"],
                "model_info": {"general.context_length": context} if context else {},
                "capabilities": _capabilities(definition),
                "modified_at": format_time(definition.changed),
            }
        )
    )


def _capabilities(definition: Definition) -> list[str]:
    if definition.options.get("Embeddings"):
        return ["embedding"]
    return ["completion", "tools", *(["vision"] if definition.options.get("MMProj") else [])]


def _ollama_entry(definition: Definition) -> dict[str, Any]:
    """Return one model. Its size is 0, because its files are not measured for a list."""
    return {
        "name": definition.name,
        "model": definition.name,
        "size": 0,
        "digest": definition.revision,
        "details": {
            "parent_model": "",
            "format": definition.model.rpartition(".")[2] if "." in definition.model else "",
            "family": definition.backend,
            "families": [definition.backend],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
