"""Ollama's routes about models besides the lists: load and unload, pull, and the ones that change models.

Administrators define models by files, so `pull` of a defined model succeeds at once and nothing is fetched.
The routes that create, copy, delete or publish a model are refused for every caller.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from localai_cluster.kit import clock
from localai_cluster.kit.errors import Forbidden, NotFound
from localai_cluster.rpc.client import BackendClient
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.dialects import ollama
from nodes.dialects.openai_common import Text
from nodes.gateway import gateway
from nodes.gateway.endpoint import confirm
from nodes.gateway.gateway import find_definition
from nodes.gateway.request import InferenceRequest
from nodes.replicas import unload_requests
from nodes.replicas.unload_requests import UnloadRequest
from operations.executor.work import in_thread

REFUSED_VERBS = {
    "push": "Publish a model",
    "create": "Create a model",
    "copy": "Copy a model",
    "delete": "Delete a model",
    "blobs/{digest}": "Upload a file of a model",
}
"""Paths after `/api/` of the routes that change models."""


class PullBody(msgspec.Struct, frozen=True):
    """The body of a request; `name` is the older field of the model."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class StatusResponse(ResponseBody):
    status: str


class LoadBody(msgspec.Struct, frozen=True):
    """The body of a request without a prompt."""

    model: Text
    stream: bool | None = None
    keep_alive: int | float | str | None = None

    @property
    def is_unload(self) -> bool:
        """True if the model is to be unloaded: 0, also as a duration in Go's form, such as `0m`."""
        if isinstance(self.keep_alive, str):
            return bool(_NO_TIME.fullmatch(self.keep_alive.strip()))
        return self.keep_alive == 0


_NO_TIME = re.compile(r"[-+]?(?:0+|(?:0+(?:\.0*)?(?:ns|us|µs|μs|ms|s|m|h))+)")


async def pull(request: InferenceRequest) -> Answer:
    """Respond with success for a defined model; raise ModelNotFound for another one."""
    await confirm(request)
    body = wire.parse_struct(wire.parse_json_object(request.body), PullBody)
    name = body.model or body.name
    if not name:
        raise wire.field_error("model", "is required", "missing_required_parameter")
    await find_definition(name)
    return _answer([{"status": "pulling manifest"}, {"status": "success"}], body.stream)


async def refuse(request: InferenceRequest) -> Answer:
    """Raise Forbidden, for every caller."""
    await confirm(request)
    raise Forbidden("administrators define the models of this cluster; clients cannot change them")


async def load_for_prompt(request: InferenceRequest, fields: Mapping[str, Any]) -> Answer | None:
    """Load or unload the model if `/api/generate` was sent without a prompt."""
    return None if fields.get("prompt") else await _load_or_unload(request, fields, {"response": ""})


async def load_for_chat(request: InferenceRequest, fields: Mapping[str, Any]) -> Answer | None:
    """Load or unload the model if `/api/chat` was sent without a message."""
    message = {"message": {"role": "assistant", "content": ""}}
    return None if fields.get("messages") else await _load_or_unload(request, fields, message)


async def _load_or_unload(
    request: InferenceRequest, fields: Mapping[str, Any], content: Mapping[str, Any]
) -> Answer:
    body = wire.parse_struct(fields, LoadBody)
    definition = await find_definition(body.model)
    if body.is_unload:
        await _unload(request, definition.name)
    else:
        request.model = definition.name
        await gateway.current().run(request, _nothing)
    end = {
        "model": body.model,
        "created_at": ollama.format_time(int(clock.now().timestamp())),
        **content,
        "done": True,
        "done_reason": "unload" if body.is_unload else "load",
    }
    return _answer([end], body.stream)


async def _nothing(engine: BackendClient) -> None:
    """Do no work: the pick has loaded the model."""


async def _unload(request: InferenceRequest, model: str) -> None:
    """Request the unload; a model that is not loaded is unloaded. Raise Forbidden unless the caller may."""
    await confirm(request)
    caller = request.principal
    if not caller.is_admin:
        raise Forbidden("only an administrator may unload a model; the cluster unloads idle ones")
    order = UnloadRequest(model, caller.name, request.request_id, request.client_address)
    try:
        await in_thread(lambda: unload_requests.unload(order, now=clock.now()))
    except NotFound:
        return


def _answer(lines: list[dict[str, Any]], stream: bool | None) -> Answer:
    """Return the lines of a stream, or the last one as JSON."""
    if stream is False:
        return Answer(msgspec.json.encode(lines[-1]))
    return Answer(b"".join(msgspec.json.encode(line) + b"\n" for line in lines), kind=ollama.KIND)
