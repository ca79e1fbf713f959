"""Routes about models: OpenAI's `/v1/models`, Ollama's lists, and its routes that load models.

Ollama's routes that publish a model or upload a file are refused for every caller. The routes that create,
copy and delete a model are in `ollama_models`, `pull` is in `pulls`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from django.db import DatabaseError
from django.db.models import Sum
from msgspec import UNSET, UnsetType

from localai_cluster.accounts import audit
from localai_cluster.accounts.actors import of_principal
from localai_cluster.kit import clock, outage
from localai_cluster.kit.errors import Forbidden, NotFound
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.definitions import files, folder
from nodes.definitions.files import Definition
from nodes.dialects import modelfile, ollama
from nodes.dialects.ollama import format_time
from nodes.dialects.openai_common import Text
from nodes.gateway import gateway, templates
from nodes.gateway.endpoint import confirm
from nodes.gateway.gateway import find_definition
from nodes.gateway.request import InferenceRequest
from nodes.models import NodeModel
from nodes.replicas import unload_requests
from nodes.replicas.unload_requests import UnloadRequest
from operations.executor.work import in_thread

MODEL_PREFIX = "/v1/models/"
"""Path prefix of the routes of one model; the name after the prefix may contain `/`."""


T = TypeVar("T")
_NEVER_EXPIRES_AT = "9999-12-31T00:00:00Z"
"""Time that Ollama's list of loaded models shows as the expiry of each model."""


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
    """Bytes of the files that exist for a defined model, or of the GPU memory for a loaded model."""
    digest: str
    details: ModelDetails


class DefinedModel(OllamaModel, kw_only=True):
    modified_at: str


class LoadedModel(OllamaModel, kw_only=True):
    size_vram: int
    expires_at: str = _NEVER_EXPIRES_AT


class TagsResponse(ResponseBody):
    models: list[DefinedModel]


class RunningResponse(ResponseBody):
    models: list[LoadedModel]


class VersionResponse(ResponseBody):
    version: str


class ShowResponse(ResponseBody, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    system: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


async def list_models(request: InferenceRequest) -> Answer:
    """Respond with all defined models, in OpenAI's or Anthropic's form."""
    await confirm(request)
    definitions = await folder.folder().all()
    if request.is_anthropic_client:
        entries = [_anthropic_entry(definition) for definition in definitions]
        first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
        return wire.json_answer(AnthropicModels(data=entries, first_id=first, last_id=last))
    return wire.json_answer(ModelsResponse(data=[_openai_entry(entry) for entry in definitions]))


async def show_model(request: InferenceRequest) -> Answer:
    """Respond with one model in OpenAI's or Anthropic's form; raise ModelNotFound."""
    await confirm(request)
    definition = await find_definition(request.path.removeprefix(MODEL_PREFIX))
    return wire.json_answer((_anthropic_entry if request.is_anthropic_client else _openai_entry)(definition))


def _anthropic_entry(definition: Definition) -> "AnthropicModel":
    """Return a model's entry in Anthropic's form."""
    return AnthropicModel(
        id=definition.name, display_name=definition.name, created_at=format_time(definition.changed)
    )


def _openai_entry(definition: Definition) -> ModelBody:
    """Return a model's entry in OpenAI's form, with the warnings of its definition."""
    return ModelBody(
        id=definition.name,
        created=definition.changed,
        capabilities=files.to_flags(definition.use_cases),
        warnings=list(definition.generation.warnings) or UNSET,
    )


OLLAMA_VERSION = "0.12.0"
"""The implemented version of Ollama's API; clients refuse older versions."""


class ShowBody(msgspec.Struct, frozen=True):
    """The body of a request for a model's details.

    `model` and the older field `name` name the model. A client may send both if one of them is empty.
    """

    model: str | None = None
    name: str | None = None


async def show_version(request: InferenceRequest) -> Answer:
    """Respond with the version of Ollama's API that the cluster implements."""
    await confirm(request)
    return wire.json_answer(VersionResponse(version=OLLAMA_VERSION))


async def list_tags(request: InferenceRequest) -> Answer:
    """Respond with all defined models in Ollama's form."""
    await confirm(request)
    definitions = await folder.folder().all()
    sizes = await folder.folder().total_sizes(definitions)
    models = [
        DefinedModel(
            **_entry_fields(definition),
            size=size,
            modified_at=format_time(definition.changed),
        )
        for definition, size in zip(definitions, sizes, strict=True)
    ]
    return wire.json_answer(TagsResponse(models=models))


async def list_loaded(request: InferenceRequest) -> Answer:
    """Respond with the models that have a loaded replica, in Ollama's form."""
    await confirm(request)
    loaded = await run_database_call(_memory_by_model)
    models = [
        LoadedModel(
            **_entry_fields(definition), size=loaded[definition.name], size_vram=loaded[definition.name]
        )
        for definition in await folder.folder().all()
        if definition.name in loaded
    ]
    return wire.json_answer(RunningResponse(models=models))


def _memory_by_model() -> dict[str, int]:
    """Return the total GPU memory of the replicas of each model, in bytes."""
    rows = NodeModel.objects.loaded().values_list("model_name").annotate(Sum("vram_needed")).order_by()
    return dict(rows)


async def show_details(request: InferenceRequest) -> Answer:
    """Respond with the details of one model in Ollama's form; raise ModelNotFound."""
    await confirm(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), ShowBody)
    definition = await find_definition(body.model or body.name or "")
    context = definition.options.get("ContextSize")
    return wire.json_answer(
        ShowResponse(
            modelfile=modelfile.render_modelfile(definition),
            parameters=modelfile.render_parameters(definition),
            template=definition.generation.template,
            system=definition.generation.system,
            details=_model_details(definition),
            model_info={"general.context_length": context} if context else {},
            capabilities=await _ollama_capabilities(definition),
            modified_at=format_time(definition.changed),
        )
    )


async def _ollama_capabilities(definition: Definition) -> list[str]:
    """Return the model's capabilities by Ollama's names; `tools` requires a template that renders tools."""
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


def _entry_fields(definition: Definition) -> dict[str, Any]:
    return {
        "name": definition.name,
        "model": definition.name,
        "digest": definition.revision,
        "details": _model_details(definition),
    }


def _model_details(definition: Definition) -> ModelDetails:
    return ModelDetails(
        format=definition.model.rpartition(".")[2] if "." in definition.model else "",
        family=definition.backend,
        families=[definition.backend],
    )


class PullBody(msgspec.Struct, frozen=True):
    """The body of a pull request; `model` and the older field `name` name the model."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class StatusResponse(ResponseBody):
    status: str


class LoadBody(msgspec.Struct, frozen=True):
    """The body of a request to load or unload a model, which has no prompt."""

    model: Text
    stream: bool | None = None
    keep_alive: int | float | str | None = None

    @property
    def is_unload(self) -> bool:
        """True if `keep_alive` is zero, also as a duration such as `0m`. Zero requests an unload."""
        if isinstance(self.keep_alive, str):
            return bool(_ZERO_DURATION.fullmatch(self.keep_alive.strip()))
        return self.keep_alive == 0


_ZERO_DURATION = re.compile(r"[-+]?(?:0+|(?:0+(?:\.0*)?(?:ns|us|µs|μs|ms|s|m|h))+)")


async def refuse_route(request: InferenceRequest) -> Answer:
    """Raise Forbidden for every caller."""
    await confirm(request)
    raise Forbidden("administrators define the models of this cluster; clients cannot publish or upload any")


def status_lines(states: list[str], stream: bool | None) -> Answer:
    """Return a stream with a line for each state, or the last state as JSON."""
    return _lines_answer([{"status": state} for state in states], stream)


async def load_for_prompt(request: InferenceRequest, fields: Mapping[str, Any]) -> Answer | None:
    """Load or unload the model if the body for `/api/generate` has no prompt; otherwise return None."""
    return None if fields.get("prompt") else await _load_or_unload(request, fields, {"response": ""})


async def load_for_chat(request: InferenceRequest, fields: Mapping[str, Any]) -> Answer | None:
    """Load or unload the model if the body for `/api/chat` has no message; otherwise return None."""
    message = {"message": {"role": "assistant", "content": ""}}
    return None if fields.get("messages") else await _load_or_unload(request, fields, message)


async def _load_or_unload(
    request: InferenceRequest, fields: Mapping[str, Any], content: Mapping[str, Any]
) -> Answer:
    body = wire.parse_struct(fields, LoadBody)
    definition = await find_definition(body.model)
    if body.is_unload:
        await _unload_model(request, definition.name)
    else:
        request.model = definition.name
        await _load_model(request)
    end = {
        "model": body.model,
        "created_at": ollama.format_time(int(clock.now().timestamp())),
        **content,
        "done": True,
        "done_reason": "unload" if body.is_unload else "load",
    }
    return _lines_answer([end], body.stream)


async def _load_model(request: InferenceRequest) -> None:
    """Pick a replica of the model without calling it. The pick starts a load if no replica is loaded."""
    attempts = gateway.attempts(request)
    while True:
        async with attempts:
            return


async def run_as_caller(request: InferenceRequest, change: Callable[[], T]) -> T:
    """Run `change` in a thread and attribute it to the caller in the audit.

    Raise Unavailable if the database is not reachable.
    """

    def attributed() -> T:
        with audit.attribute_to(of_principal(request.principal), request.client_address[:64]):
            return change()

    return await run_database_call(attributed)


async def run_database_call(call: Callable[[], T]) -> T:
    """Run `call` in a thread. Raise Unavailable if the database is not reachable."""
    with outage.unavailable_on(DatabaseError):
        return await in_thread(call)


async def _unload_model(request: InferenceRequest, model: str) -> None:
    """Request the unload of a loaded model. Raise Forbidden unless the caller is an administrator."""
    await confirm(request)
    if not request.principal.is_admin:
        raise Forbidden("only an administrator may unload a model; the cluster unloads idle ones")
    order = UnloadRequest(model, request.requester)
    try:
        await run_as_caller(request, lambda: unload_requests.unload(order, now=clock.now()))
    except NotFound:
        return


def _lines_answer(lines: list[dict[str, Any]], stream: bool | None) -> Answer:
    """Return a stream of these lines, or only the last line as JSON."""
    if stream is False:
        return Answer(msgspec.json.encode(lines[-1]))
    return Answer(
        b"".join(msgspec.json.encode(line) + b"\n" for line in lines), kind=ollama.LINES_CONTENT_TYPE
    )
