"""Ollama's routes that create, copy and delete models, for administrators.

`create` stores a definition: a copy of a model's definition with other settings, or a new definition for a
file of the models folder. Nothing is uploaded or converted. As with Ollama, an existing definition of this
name gets a new revision.
"""

import asyncio
import os
from pathlib import PurePosixPath
from typing import Any

import msgspec
import yaml
from django.db import DatabaseError

from localai_cluster.kit import clock, names, outage
from localai_cluster.kit.errors import Forbidden, InvalidInput, Unavailable
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.definitions import edit, store
from nodes.definitions.files import MAX_NAME, Definition, UnusableDefinition
from nodes.definitions.folder import folder
from nodes.definitions.sizes import safe_join
from nodes.dialects.modelfile import Modelfile, NotSupported, parse_modelfile, to_settings
from nodes.dialects.models import StatusResponse, run_as_caller, status_lines
from nodes.gateway import gateway
from nodes.gateway.endpoint import confirm
from nodes.gateway.gateway import ModelNotFound, find_definition
from nodes.gateway.request import InferenceRequest
from nodes.loading import definition_removal
from nodes.loading.files_in_use import in_folder_thread
from nodes.models import DefinitionOrigin
from operations.ledger.admission import Admission
from operations.models import Status

FILE_BACKEND = "llama-cpp"
"""Backend of a model that is created from a file."""
_LATEST_TAG = ":latest"
_SUCCESS_ANSWER = wire.json_answer(StatusResponse(status="success"))


class CreateBody(msgspec.Struct, frozen=True):
    """The body of a request to create a model.

    `name` is the older form of `model`. `modelfile` is the older form of all other fields together.
    """

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    modelfile: str | None = None
    parameters: dict[str, Any] | None = None
    template: str | None = None
    system: str | None = None
    adapters: dict[str, Any] | None = None
    files: dict[str, Any] | None = None
    quantize: str | None = None
    stream: bool | None = None


class CopyBody(msgspec.Struct, frozen=True):
    """The body of a request to copy a model."""

    source: str
    destination: str


class DeleteBody(msgspec.Struct, frozen=True):
    """The body of a request to delete a model; `name` is the older form of `model`."""

    model: str | None = None
    name: str | None = None


async def create(request: InferenceRequest) -> Answer:
    """Store a definition; respond with a stream of states. Raise ModelNotFound for an unknown base."""
    await require_admin(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), CreateBody)
    name = _definition_name(body.model or body.name, "model")
    modelfile = _parse_modelfile_fields(body)
    text = await _base_text(modelfile.base, name)
    settings = to_settings(modelfile)

    def save() -> None:
        merged = edit.merge(text, settings) if settings else text
        _save_definition(request, name, merged, f"created from {modelfile.base}"[:500])

    await run_as_caller(request, save)
    return status_lines(["creating model", "success"], body.stream)


async def copy(request: InferenceRequest) -> Answer:
    """Store a copy of a model's definition under another name; raise ModelNotFound."""
    await require_admin(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), CopyBody)
    destination = _definition_name(body.destination, "destination")
    definition = await find_definition(body.source)
    text = await _definition_text(definition, "source")

    def save() -> None:
        _save_definition(request, destination, edit.rename(text, destination), f"copy of {definition.name}")

    await run_as_caller(request, save)
    return _SUCCESS_ANSWER


async def delete(request: InferenceRequest) -> Answer:
    """Unload the model and delete its stored definition; keep its files. Raise NotFound or Conflict.

    A request that has waited too long gets 503, and the deletion continues.
    """
    await require_admin(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), DeleteBody)
    definition = await find_definition(_definition_name(body.model or body.name, "model"))

    def remove() -> Admission:
        store.require_no_file(definition.name)  # the model would still be served
        return definition_removal.request_removal(definition.name, by=request.requester, now=clock.now())

    admission = await run_as_caller(request, remove)
    with outage.unavailable_on(DatabaseError):
        operation = await gateway.wait_for_end(admission.operation.id, gateway.MAX_WAIT_SECONDS)
    if operation is None or operation.status != Status.COMPLETED:
        reason = operation.error or operation.message if operation is not None else "its record was cleared"
        raise Unavailable(f"the model is not deleted yet: {reason}", retry_after=10)
    return _SUCCESS_ANSWER


async def require_admin(request: InferenceRequest) -> None:
    """Raise Forbidden unless the caller is an administrator."""
    await confirm(request)
    if not request.principal.is_admin:
        raise Forbidden("only administrators may change the models of this cluster")


def _definition_name(text: str | None, field: str) -> str:
    """Return a valid name for a definition, without the default tag `:latest`."""
    if not text:
        raise wire.field_error(field, "is required", "missing_required_parameter")
    name = text.removesuffix(_LATEST_TAG).strip()
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidInput(f"{field}: must have 1 to {MAX_NAME} characters", field=field)
    names.check_text(name, field)
    return name


def _parse_modelfile_fields(body: CreateBody) -> Modelfile:
    if body.adapters:
        raise NotSupported("adapters are not supported: define them in the model's definition")
    if body.files or body.quantize:
        raise NotSupported("files cannot be uploaded or converted: name a model or a file that is here")
    modelfile = Modelfile(body.from_ or "") if body.modelfile is None else parse_modelfile(body.modelfile)
    for name, value in (body.parameters or {}).items():
        modelfile.parameters[name.lower()] = value if isinstance(value, list) else [value]
    modelfile.template = body.template or modelfile.template
    modelfile.system = body.system or modelfile.system
    if not modelfile.base:
        raise wire.field_error("from", "is required", "missing_required_parameter")
    return modelfile


async def _base_text(base: str, name: str) -> str:
    """Return the YAML of a definition that has the name `name`.

    It is the definition of the model `base`, or a new definition for the file `base`. Raise ModelNotFound.
    """
    try:
        definition = await find_definition(base)
    except ModelNotFound:
        relative = await in_folder_thread(_find_file, base) or await _recorded_path(base)
        if relative is None:
            raise
        model = {"name": name, "backend": FILE_BACKEND, "parameters": {"model": relative}}
        return str(yaml.safe_dump(model, sort_keys=False, allow_unicode=True))
    text = await _definition_text(definition, "from")
    return await asyncio.to_thread(edit.rename, text, name)


async def _definition_text(definition: Definition, field: str) -> str:
    """Return the YAML of the definition that is in effect. Raise ModelNotFound.

    A file takes precedence over a row of the same name.
    """
    try:
        text = await folder().text(definition.name)
    except UnusableDefinition as error:
        raise InvalidInput(f"{field}: the file of {definition.name} {error}", field=field) from error
    if text is None:
        raise ModelNotFound(f"The model {definition.name[:100]!r} does not exist", field=field)
    return text


async def _recorded_path(text: str) -> str | None:
    """Return `text` if a stored definition records it as the path of a file at its source, otherwise None."""
    contents = [entry.row.content for entry in await folder().stored_rows()]
    is_recorded = any(isinstance(content, Definition) and text in content.files for content in contents)
    return text if is_recorded else None


def _find_file(text: str) -> str | None:
    """Return `text` as a relative path if it is a file or folder of the models folder, otherwise None."""
    if not text or len(text) > MAX_NAME or names.find_unprintable(text):
        return None
    models = folder().path
    path = safe_join(models, text)
    if path is None or not os.path.lexists(path) or not path.resolve().is_relative_to(models.resolve()):
        return None
    return PurePosixPath(text).as_posix() if path != models else None


def _save_definition(request: InferenceRequest, name: str, text: str, reason: str) -> None:
    store.require_no_file(name)
    store.save(
        name,
        text,
        origin=DefinitionOrigin.API,
        actor=request.principal.name,
        reason=reason,
        now=clock.now(),
    )
