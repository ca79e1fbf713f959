"""The table of inference routes: path, handler, limits, error envelope, and texts of the API document.

The raw route table and the API document (`api_document.py`) are built from this table. The structs that parse
bodies and render responses also describe them.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from localai_cluster.kit import clock, names
from localai_cluster.kit.errors import NotFound
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, Receive, Scope, Send
from nodes.dialects import (
    anthropic,
    audio,
    images,
    models,
    ollama,
    ollama_models,
    openai,
    pulls,
    responses,
    retrieval,
    stored_responses,
    tokens,
)
from nodes.dialects.openai_common import MAX_BODY_BYTES
from nodes.gateway import streams
from nodes.gateway.endpoint import Endpoint, Envelope, Handler, is_anthropic_client
from nodes.gateway.generation import Dialect, Head
from nodes.gateway.request import InferenceRequest
from nodes.gateway.streams import EventStream

ANTHROPIC_ENVELOPE = Envelope(anthropic.render_error, anthropic.AnthropicErrorBody)
OLLAMA_ENVELOPE = Envelope(ollama.render_error, ollama.OllamaErrorBody, is_patient=True)
SHARED_ENVELOPE = Envelope(wire.error_answer, wire.ErrorBody, render_for_anthropic=anthropic.render_error)
"""The envelope of routes that clients of OpenAI's and of Anthropic's API use."""
ERROR_STATUSES = (400, 401, 403, 404, 413, 429, 500, 503)


@dataclass(frozen=True, kw_only=True)
class Route(Endpoint):
    """One inference route: the endpoint that serves it, and its texts of the API document."""

    max_body_bytes: int | None = MAX_BODY_BYTES
    other_methods: tuple["Route", ...] = ()
    name: str
    """Operation id in the API document."""
    summary: str
    body: type[msgspec.Struct] | None = None
    response: type[wire.ResponseBody] | None = None
    other_kinds: tuple[str, ...] = ()
    """Content types of responses that are not JSON."""
    description: str = ""
    response_meaning: str = "The answer."
    """Description of the response with status 200 in the API document."""
    errors: tuple[int, ...] = ERROR_STATUSES


Shortcut = Callable[[InferenceRequest, Mapping[str, Any]], Awaitable[Answer | None]]
"""Answers a request that needs no generated text; returns None for every other request."""


def generation_handler(dialect: Dialect, shortcut: Shortcut | None = None) -> Handler:
    """Return the handler of a route that generates text in this dialect."""

    async def answer(request: InferenceRequest) -> Answer | EventStream:
        fields = wire.parse_json_object(request.body)
        if shortcut is not None and (done := await shortcut(request, fields)) is not None:
            return done
        head = Head(request.request_id, int(clock.now().timestamp()), dialect.parse(fields))
        del fields
        return await streams.respond(request, dialect, head)

    return answer


def _get_route(
    name: str, summary: str, handler: Handler, response: type[wire.ResponseBody], **others: Any
) -> Route:
    """Return a route for the method GET."""
    return Route(
        name=name,
        summary=summary,
        handler=handler,
        response=response,
        method="GET",
        max_body_bytes=None,
        **others,
    )


def _speech_route(name: str, summary: str, *, has_node_header: bool) -> Route:
    return Route(
        name=name,
        summary=summary,
        handler=audio.speech_handler(has_node_header=has_node_header),
        max_body_bytes=wire.MAX_BODY,
        body=audio.SpeechBody,
        other_kinds=_AUDIO_CONTENT_TYPES,
        description=_SPEECH_DESCRIPTION,
    )


_EVENT_STREAM_TYPES = ("text/event-stream",)
_JSON_LINES_TYPES = ("application/x-ndjson",)
_OPENAI_STREAM_DESCRIPTION = (
    "With `stream`, server-sent events: chunks, then `data: [DONE]`. What fails before the first of them is a"
    " refusal with its status; after that it is an event with `error`. Comments keep the connection alive."
)
_ANTHROPIC_STREAM_DESCRIPTION = (
    "With `stream`, events from `message_start` to `message_stop`, and `ping` while the engine thinks. A"
    " failure after the first of them is an event `error`. `anthropic-version` is accepted and not looked at."
)
_RESPONSES_STREAM_DESCRIPTION = (
    "With `stream`, events from `response.created` to `response.completed`. A failure after the first of them"
    " is `error`, then `response.failed`. Responses are stored only if the operator permits it; otherwise"
    " `store` is answered with false, and a reference to an earlier response is refused."
)
_OLLAMA_STREAM_DESCRIPTION = (
    "Streams unless `stream` is false: a line of JSON for each piece. A failure after the first is a line"
    " with `error`. Without a prompt or message the model is loaded, with `keep_alive` 0 unloaded, which only"
    " administrators may do; otherwise `keep_alive` and options about loading are ignored."
)
UNPROVED_NOTE = "Tried with scripted engines only, so far with no real one."
"""Note in descriptions of audio and image routes: no example engine supports them."""
_SPEECH_DESCRIPTION = (
    "The engine's sound, not converted. With `stream` it is sent while it is made; what fails"
    " after the first byte ends the connection. " + UNPROVED_NOTE
)
_AUDIO_CONTENT_TYPES = tuple(
    kind.decode() for kind in dict.fromkeys((*audio.CONTENT_TYPES.values(), audio.UNKNOWN_CONTENT_TYPE))
)

_V1_ROUTE_BY_PATH: Mapping[str, Route] = {
    "/chat/completions": Route(
        name="create_chat_completion",
        summary="Answer a conversation",
        handler=generation_handler(openai.CHAT),
        body=openai.ChatBody,
        response=openai.ChatResponse,
        other_kinds=_EVENT_STREAM_TYPES,
        description=_OPENAI_STREAM_DESCRIPTION,
    ),
    "/completions": Route(
        name="create_completion",
        summary="Go on from a text",
        handler=generation_handler(openai.COMPLETIONS),
        body=openai.CompletionBody,
        response=openai.CompletionResponse,
        other_kinds=_EVENT_STREAM_TYPES,
        description=_OPENAI_STREAM_DESCRIPTION,
    ),
    "/responses": Route(
        name="create_response",
        summary="Answer a conversation (OpenAI's Responses)",
        handler=stored_responses.create,
        body=responses.ResponsesBody,
        response=responses.ResponseObject,
        other_kinds=_EVENT_STREAM_TYPES,
        description=_RESPONSES_STREAM_DESCRIPTION,
    ),
    "/responses/{response_id}": _get_route(
        "get_response",
        "Show a stored response",
        stored_responses.show,
        responses.ResponseObject,
        response_meaning="The response.",
        errors=(401, 403, 404, 429, 500, 503),
        other_methods=(
            Route(
                name="delete_response",
                summary="Delete a stored response",
                handler=stored_responses.delete,
                method="DELETE",
                max_body_bytes=None,
                response=stored_responses.DeletedResponse,
                description="A conversation that it is a part of cannot be continued any more.",
                response_meaning="It is deleted.",
                errors=(401, 403, 404, 429, 500, 503),
            ),
        ),
    ),
    "/messages": Route(
        name="create_message",
        summary="Answer a conversation (Anthropic)",
        handler=generation_handler(anthropic.DIALECT),
        envelope=ANTHROPIC_ENVELOPE,
        body=anthropic.MessagesBody,
        response=anthropic.MessageResponse,
        other_kinds=_EVENT_STREAM_TYPES,
        description=_ANTHROPIC_STREAM_DESCRIPTION,
    ),
    "/messages/count_tokens": Route(
        name="count_message_tokens",
        summary="Count the tokens of a conversation (Anthropic)",
        handler=tokens.count_tokens,
        envelope=ANTHROPIC_ENVELOPE,
        body=anthropic.CountBody,
        response=tokens.CountResponse,
        description="Images are not counted.",
    ),
    "/tokenize": Route(
        name="tokenize",
        summary="Divide a text into tokens",
        handler=tokens.tokenize,
        body=tokens.TokenizeBody,
        response=tokens.TokensResponse,
        description="By the model's own tokenizer.",
    ),
    "/detokenize": Route(
        name="detokenize",
        summary="Make a text of tokens",
        handler=tokens.detokenize,
        body=tokens.DetokenizeBody,
        response=tokens.TextResponse,
        description="By the model's own tokenizer.",
    ),
    "/rerank": Route(
        name="rerank",
        summary="Order documents by relevance",
        handler=retrieval.rerank,
        body=retrieval.RerankBody,
        response=retrieval.RerankResponse,
        description="The most relevant one first.",
    ),
    "/embeddings": Route(
        name="create_embeddings",
        summary="Create embeddings",
        handler=retrieval.embed,
        max_body_bytes=None,
        body=retrieval.EmbeddingsBody,
        response=retrieval.EmbeddingsResponse,
        response_meaning="The vectors.",
        errors=(400, 401, 403, 404, 429, 500, 503),
    ),
    "/models": _get_route(
        "list_models",
        "List models",
        models.list_models,
        models.ModelsResponse,
        envelope=SHARED_ENVELOPE,
        response_meaning="The models.",
        errors=(401, 403, 429, 500, 503),
    ),
    "/audio/transcriptions": Route(
        name="transcribe",
        summary="Write down speech",
        handler=audio.transcribe,
        max_body_bytes=audio.MAX_BODY_BYTES,
        has_form=True,
        body=audio.TranscriptionBody,
        response=audio.TranscriptResponse,
        other_kinds=("text/plain", "application/x-subrip", "text/vtt", *_EVENT_STREAM_TYPES),
        description="The file is read by the model's engine. With `stream`, server-sent events: pieces, then"
        " all of the text, then `data: [DONE]`. " + UNPROVED_NOTE,
    ),
    "/audio/speech": _speech_route(
        "create_speech", "Say a text as OpenAI's clients ask", has_node_header=True
    ),
    "/images/generations": Route(
        name="create_images",
        summary="Make images",
        handler=images.generate,
        max_body_bytes=wire.MAX_BODY,
        body=images.ImagesBody,
        response=images.ImagesResponse,
        description=f"One after the other, each with the next seed. {UNPROVED_NOTE}",
    ),
}
"""Routes that exist with and without the path prefix `/v1`."""


def _refused_route(name: str, summary: str, *, method: str = "POST", **others: Any) -> Route:
    """Return a route of Ollama's API that responds with 403 to every caller."""
    return Route(
        name=name,
        summary=f"{summary} (Ollama): refused",
        handler=models.refuse_route,
        method=method,
        max_body_bytes=None,
        envelope=OLLAMA_ENVELOPE,
        response=models.StatusResponse,
        description="Administrators define models.",
        errors=(401, 403, 413, 429, 500, 503),
        **others,
    )


def _admin_route(
    name: str, summary: str, handler: Handler, body: type[msgspec.Struct], **others: Any
) -> Route:
    """Return a route of Ollama's API that changes models. Only administrators may use it."""
    return Route(
        name=name,
        summary=f"{summary} (Ollama)",
        handler=handler,
        envelope=OLLAMA_ENVELOPE,
        body=body,
        response=models.StatusResponse,
        errors=(*ERROR_STATUSES, *others.pop("more_errors", (409,))),
        **others,
    )


_OTHER_ROUTE_BY_PATH: Mapping[str, Route] = {
    "/v2/rerank": Route(
        name="cohere_rerank",
        summary="Order documents by relevance (Cohere)",
        handler=retrieval.cohere_rerank,
        body=retrieval.RerankBody,
        response=retrieval.CohereRerankResponse,
        description="The most relevant one first, without its text.",
    ),
    models.MODEL_PREFIX + "{model}": _get_route(
        "get_model",
        "Show one model",
        models.show_model,
        models.ModelBody,
        envelope=SHARED_ENVELOPE,
        response_meaning="The model.",
        errors=(401, 403, 404, 429, 500, 503),
    ),
    "/tts": _speech_route("speak", "Say a text", has_node_header=False),
    "/api/chat": Route(
        name="ollama_chat",
        summary="Answer a conversation (Ollama)",
        handler=generation_handler(ollama.CHAT, models.load_for_chat),
        envelope=OLLAMA_ENVELOPE,
        body=ollama.OllamaChatBody,
        response=ollama.OllamaChatResponse,
        other_kinds=_JSON_LINES_TYPES,
        description=_OLLAMA_STREAM_DESCRIPTION,
    ),
    "/api/generate": Route(
        name="ollama_generate",
        summary="Answer a prompt (Ollama)",
        handler=generation_handler(ollama.GENERATE, models.load_for_prompt),
        envelope=OLLAMA_ENVELOPE,
        body=ollama.GenerateBody,
        response=ollama.OllamaGenerateResponse,
        other_kinds=_JSON_LINES_TYPES,
        description=_OLLAMA_STREAM_DESCRIPTION,
    ),
    "/api/embed": Route(
        name="ollama_embed",
        summary="Create embeddings (Ollama)",
        handler=retrieval.ollama_embed,
        max_body_bytes=None,
        envelope=OLLAMA_ENVELOPE,
        body=retrieval.EmbedBody,
        response=retrieval.EmbedResponse,
    ),
    "/api/embeddings": Route(
        name="ollama_embeddings",
        summary="Create one embedding (Ollama, older)",
        handler=retrieval.ollama_embed_one,
        max_body_bytes=None,
        envelope=OLLAMA_ENVELOPE,
        body=retrieval.OlderEmbedBody,
        response=retrieval.OlderEmbedResponse,
    ),
    "/api/show": Route(
        name="ollama_show",
        summary="Show one model (Ollama)",
        handler=models.show_details,
        max_body_bytes=None,
        envelope=OLLAMA_ENVELOPE,
        body=models.ShowBody,
        response=models.ShowResponse,
    ),
    "/api/tags": _get_route(
        "ollama_tags",
        "List models (Ollama)",
        models.list_tags,
        models.TagsResponse,
        envelope=OLLAMA_ENVELOPE,
        description="What is defined, loaded or not. `size` is that of the files that are there.",
    ),
    "/api/ps": _get_route(
        "ollama_ps",
        "List loaded models (Ollama)",
        models.list_loaded,
        models.RunningResponse,
        envelope=OLLAMA_ENVELOPE,
        description="`size` is what all replicas of a model were given.",
    ),
    "/api/version": _get_route(
        "ollama_version",
        "Show the version of Ollama's API",
        models.show_version,
        models.VersionResponse,
        envelope=OLLAMA_ENVELOPE,
    ),
    "/api/create": _admin_route(
        "ollama_create",
        "Create a model from another one, or from a file that is here",
        ollama_models.create,
        ollama_models.CreateBody,
        other_kinds=_JSON_LINES_TYPES,
        description="Administrators only. Stores a definition: `PARAMETER`, `TEMPLATE`, `SYSTEM` become its"
        " settings, and adapters, uploads and conversions are 501.",
        more_errors=(409, 501),
    ),
    "/api/copy": _admin_route(
        "ollama_copy",
        "Copy a model",
        ollama_models.copy,
        ollama_models.CopyBody,
        description="Administrators only. Stores its definition under another name.",
    ),
    "/api/delete": _admin_route(
        "ollama_delete",
        "Delete a model",
        ollama_models.delete,
        ollama_models.DeleteBody,
        method="DELETE",
        description="Administrators only. Unloads the model, deletes its stored definition and no file."
        " 409 for one that a file defines.",
    ),
    "/api/pull": Route(
        name="ollama_pull",
        summary="Import a model, or confirm that it is defined (Ollama)",
        handler=pulls.pull,
        max_body_bytes=None,
        envelope=OLLAMA_ENVELOPE,
        body=models.PullBody,
        response=models.StatusResponse,
        other_kinds=_JSON_LINES_TYPES,
        description="A defined model is there already. Another one is imported if an administrator asks:"
        " lines say how far it is, and the import goes on when the client leaves.",
        errors=(400, 401, 403, 404, 413, 429, 500, 502, 503),
    ),
    "/api/push": _refused_route("ollama_push", "Publish a model"),
    "/api/blobs/{digest}": _refused_route(
        "ollama_blobs",
        "Upload a file of a model",
        other_methods=(_refused_route("ollama_find_blob", "Look for a file of a model", method="HEAD"),),
    ),
}

ROUTES: Mapping[str, Route] = {
    **{f"/v1{path}": route for path, route in _V1_ROUTE_BY_PATH.items()},
    **_V1_ROUTE_BY_PATH,
    **_OTHER_ROUTE_BY_PATH,
}
"""Every inference route by its path, as a path template of OpenAPI."""


async def refuse_unknown(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond to an unknown route of `/v1` with 404, in the error form of the client's dialect."""
    error = NotFound(
        f"Unknown request URL: {scope['method'][:16]} {names.to_single_line(scope['path'][:200])}"
    )
    error.code = "unknown_url"
    render = anthropic.render_error if is_anthropic_client(scope) else wire.error_answer
    await wire.send_answer(send, render(error))
