"""Lists of models: OpenAI's `/v1/models`; Ollama's `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

from typing import Annotated, Any, Literal

import msgspec
from django.db import DatabaseError
from django.db.models import Sum
from msgspec import UNSET, UnsetType

from localai_cluster.kit.errors import Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.definitions import files, folder
from nodes.definitions.files import Definition
from nodes.dialects.ollama import format_time
from nodes.gateway import templates
from nodes.gateway.endpoint import confirm
from nodes.gateway.gateway import find_definition
from nodes.gateway.request import InferenceRequest
from nodes.models import NodeModel
from operations.executor.work import in_thread

MODEL_PREFIX = "/v1/models/"
"""Path prefix of one model; the name after it may contain `/`."""


_NEVER = "9999-12-31T00:00:00Z"


class ModelBody(ResponseBody, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Annotated[int, msgspec.Meta(description="When the definition's file was written.")]
    owned_by: str = "localai"
    capabilities: Annotated[list[str], msgspec.Meta(description="Its use cases, such as `FLAG_CHAT`.")]
    warnings: (
        Annotated[
            list[str],
            msgspec.Meta(description="What of the model's definition is not followed; absent if all is."),
        ]
        | UnsetType
    ) = UNSET


class ModelsResponse(ResponseBody, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelBody]


class AnthropicModel(ResponseBody, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str


class AnthropicModels(ResponseBody, kw_only=True):
    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class ModelDetails(ResponseBody, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(ResponseBody, kw_only=True):
    name: str
    model: str
    size: int = 0
    """0 for a defined model, because its files are not measured for a list."""
    digest: str
    details: ModelDetails


class DefinedModel(OllamaModel, kw_only=True):
    modified_at: str


class LoadedModel(OllamaModel, kw_only=True):
    size_vram: int
    expires_at: str = _NEVER


class TagsResponse(ResponseBody):
    models: list[DefinedModel]


class RunningResponse(ResponseBody):
    models: list[LoadedModel]


class VersionResponse(ResponseBody):
    version: str


class ShowResponse(ResponseBody, kw_only=True):
    modelfile: str = ""
    parameters: str = ""
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


async def list_models(request: InferenceRequest) -> Answer:
    """Respond with the list of models."""
    await confirm(request)
    definitions = await folder.folder().all()
    if request.is_of_anthropic:
        entries = [_anthropic_entry(definition) for definition in definitions]
        first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
        return wire.json_answer(AnthropicModels(data=entries, first_id=first, last_id=last))
    return wire.json_answer(ModelsResponse(data=[_entry(entry) for entry in definitions]))


async def show_model(request: InferenceRequest) -> Answer:
    """Respond with one model; raise ModelNotFound."""
    await confirm(request)
    definition = await find_definition(request.path.removeprefix(MODEL_PREFIX))
    return wire.json_answer((_anthropic_entry if request.is_of_anthropic else _entry)(definition))


def _anthropic_entry(definition: Definition) -> "AnthropicModel":
    """Return one model in Anthropic's form."""
    return AnthropicModel(
        id=definition.name, display_name=definition.name, created_at=format_time(definition.changed)
    )


def _entry(definition: Definition) -> ModelBody:
    """Return one model in OpenAI's form, with the warnings of its definition."""
    return ModelBody(
        id=definition.name,
        created=definition.changed,
        capabilities=files.to_flags(definition.use_cases),
        warnings=list(definition.generation.warnings) or UNSET,
    )


VERSION = "0.12.0"
"""The implemented version of Ollama's API; clients refuse older versions."""


class ShowBody(msgspec.Struct, frozen=True):
    """The body of a request; `name` is its older field. Clients may send both, one of them empty."""

    model: str | None = None
    name: str | None = None


async def version(request: InferenceRequest) -> Answer:
    """Respond with the version."""
    await confirm(request)
    return wire.json_answer(VersionResponse(version=VERSION))


async def tags(request: InferenceRequest) -> Answer:
    """Respond with all models that have a definition."""
    await confirm(request)
    models = [
        DefinedModel(**_identity(definition), modified_at=format_time(definition.changed))
        for definition in await folder.folder().all()
    ]
    return wire.json_answer(TagsResponse(models=models))


async def running(request: InferenceRequest) -> Answer:
    """Respond with the models that have a loaded replica."""
    await confirm(request)
    try:
        loaded = await in_thread(_loaded_memory)
    except DatabaseError as error:
        raise Unavailable("the database is not reachable", retry_after=2) from error
    models = [
        LoadedModel(**_identity(definition), size=loaded[definition.name], size_vram=loaded[definition.name])
        for definition in await folder.folder().all()
        if definition.name in loaded
    ]
    return wire.json_answer(RunningResponse(models=models))


def _loaded_memory() -> dict[str, int]:
    """Return the total GPU memory of the replicas of each model, in bytes."""
    rows = NodeModel.objects.loaded().values_list("model_name").annotate(Sum("vram_needed")).order_by()
    return dict(rows)


async def show(request: InferenceRequest) -> Answer:
    """Respond with the details of one model; raise ModelNotFound."""
    await confirm(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), ShowBody)
    definition = await find_definition(body.model or body.name or "")
    context = definition.options.get("ContextSize")
    return wire.json_answer(
        ShowResponse(
            template=definition.generation.template,
            details=_details(definition),
            model_info={"general.context_length": context} if context else {},
            capabilities=await _capabilities(definition),
            modified_at=format_time(definition.changed),
        )
    )


async def _capabilities(definition: Definition) -> list[str]:
    """Return Ollama's names for what the model can do; tools only if its template is known to have them."""
    cases, template = definition.use_cases, definition.generation.template
    generates = "chat" in cases or "completion" in cases
    has_tools = templates.has_tools(template) if template else await folder.folder().has_tools(definition)
    known = {
        "completion": generates,
        "tools": generates and has_tools,
        "vision": "vision" in cases,
        "embedding": "embeddings" in cases,
    }
    return [name for name, is_there in known.items() if is_there]


def _identity(definition: Definition) -> dict[str, Any]:
    return {
        "name": definition.name,
        "model": definition.name,
        "digest": definition.revision,
        "details": _details(definition),
    }


def _details(definition: Definition) -> ModelDetails:
    return ModelDetails(
        format=definition.model.rpartition(".")[2] if "." in definition.model else "",
        family=definition.backend,
        families=[definition.backend],
    )
