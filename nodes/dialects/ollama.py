"""Ollama's `POST /api/chat` and `/api/generate`: requests, and responses as JSON or as lines of JSON. Pure.

Streaming is the default. Load options are ignored, because the definition determines them. `keep_alive` is
ignored too, because the cluster decides when a model is unloaded. Every line except the last has a piece of
the response. Tool calls are sent complete, in the line before the last, because their arguments are JSON
objects. A blank before a line keeps the connection alive.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, Int64, ResponseBody
from nodes.dialects import blocks, openai_common, openai_messages
from nodes.dialects.openai_common import Fraction, Penalty, Seed, Stop, Text, TopK, to_int, to_top_k
from nodes.dialects.openai_messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    CalledFunction,
    ToolCall,
    Tools,
    check_tools,
    encode_json,
    encode_schema,
)
from nodes.gateway import generation
from nodes.gateway.generation import (
    Conversation,
    ConversationMessage,
    Dialect,
    Durations,
    Events,
    Generation,
    Head,
    MergedChoice,
    Prompt,
    Sampling,
    TextDelta,
    ToolPiece,
)

_UNLIMITED_TOKEN_COUNTS = (-1, -2)
"""Values of `num_predict` that set no limit: unlimited, and up to the context size."""
_CLIENT_FIELD_NAMES = {"response_format": "format"}
"""Names of Ollama's fields, by the names of the equal fields in OpenAI's chat."""


class OllamaOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Sampling options of a request. Other options of Ollama's API are ignored."""

    num_predict: (
        Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)]
        | Annotated[float, msgspec.Meta(multiple_of=1, ge=-2, le=2**31 - 1)]
        | None
    ) = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_k: TopK | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    stop: Stop = None
    repeat_penalty: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None


class OllamaFunction(msgspec.Struct, frozen=True):
    """The function of a tool call, with its arguments."""

    name: Text
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True):
    """A tool call that the model requested in an earlier answer."""

    function: OllamaFunction
    id: str | None = None


Images = Annotated[list[Text], msgspec.Meta(max_length=MAX_PARTS)]


class OllamaMessage(msgspec.Struct, frozen=True):
    """One message of a conversation; its images are in base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], msgspec.Meta(max_length=128)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class CallFunction(ResponseBody):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallBody(ResponseBody):
    id: str
    function: CallFunction


class OllamaMessageBody(ResponseBody, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCallBody] | UnsetType = UNSET


class LastLine(ResponseBody, kw_only=True):
    model: str
    created_at: str
    done: bool = True
    done_reason: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["stop", "length"]})]
    total_duration: Int64
    load_duration: Int64
    prompt_eval_count: Int64
    prompt_eval_duration: Int64
    eval_count: Int64
    eval_duration: Int64
    logprobs: list[dict[str, Any]] | UnsetType = UNSET


class OllamaChatResponse(LastLine, kw_only=True):
    message: OllamaMessageBody


class OllamaGenerateResponse(LastLine, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaErrorBody(ResponseBody):
    error: str


class _TextRequestBody(msgspec.Struct, kw_only=True, frozen=True):
    model: Text
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    def to_generation(self, prompt: Prompt, names: Mapping[str, str]) -> Generation:
        """Return the generation of this prompt with the body's parameters."""
        return Generation(
            model=self.model,
            prompts=(prompt,),
            sampling=self._sampling(),
            stream=self.stream is not False,
            client_field_names=names,
        )

    def _sampling(self) -> Sampling:
        options = self.options or OllamaOptions()
        if options.num_predict == 0:
            raise InvalidInput("options.num_predict: at least 1, or -1 for no limit", field="options")
        return Sampling(
            max_tokens=None
            if options.num_predict in _UNLIMITED_TOKEN_COUNTS
            else to_int(options.num_predict),
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=to_top_k(options.top_k),
            min_p=options.min_p,
            repeat_penalty=options.repeat_penalty,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            seed=to_int(options.seed),
            stop=openai_common.stop_words(options.stop),
            grammar=_response_schema_json(self.format),
            logprobs=bool(self.logprobs),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else 0,
        )


class OllamaChatBody(_TextRequestBody, kw_only=True, frozen=True):
    """The body of a chat request. Other fields of Ollama's API are ignored or refused by name."""

    messages: Annotated[list[OllamaMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None


class GenerateBody(_TextRequestBody, kw_only=True, frozen=True):
    """The body of a request with one prompt.

    The model answers the prompt; with `raw` it continues the prompt.
    """

    prompt: Text
    system: str | None = None
    images: Images | None = None
    raw: bool | None = None


UNSUPPORTED_FIELDS = {
    "context": "nothing is kept; send the conversation to /api/chat",
    "suffix": "no engine here fills in a middle",
    "template": "the template is the model's own, or its definition's",
    **dict.fromkeys(("width", "height", "steps"), "images come from /v1/images/generations"),
}


def parse_chat(fields: Mapping[str, Any]) -> Generation:
    """Parse the body of a chat request. Raise InvalidInput with the name of the first wrong field."""
    body = wire.parse_struct(fields, OllamaChatBody)
    tools, choice = check_tools(body.tools or (), None)
    images = tuple(
        openai_messages.check_base64(image, f"messages[{number}].images[{index}]")
        for number, message in enumerate(body.messages)
        for index, image in enumerate(message.images or ())
    )
    utterances = tuple(_convert_messages(body.messages))
    return body.to_generation(Conversation(utterances, tools, choice, images=images), _CLIENT_FIELD_NAMES)


def parse_generate(fields: Mapping[str, Any]) -> Generation:
    """Parse the body of a request with one prompt; raise InvalidInput for the first wrong field."""
    openai_common.refuse_fields(fields, UNSUPPORTED_FIELDS)
    body = wire.parse_struct(fields, GenerateBody)
    if body.raw:
        if body.images:
            raise InvalidInput("images: not with `raw`", field="images")
        return body.to_generation(body.prompt, _CLIENT_FIELD_NAMES)
    system = (ConversationMessage("system", body.system),) if body.system else ()
    images = (
        openai_messages.check_base64(image, f"images[{index}]")
        for index, image in enumerate(body.images or ())
    )
    conversation = Conversation((*system, ConversationMessage("user", body.prompt)), images=tuple(images))
    return body.to_generation(conversation, _CLIENT_FIELD_NAMES | {"messages": "prompt"})


def _convert_messages(messages: Sequence[OllamaMessage]) -> Iterator[ConversationMessage]:
    """Yield the messages in the form that engines expect.

    A tool result may lack an id. It then gets the id of the first call of its tool that has no result yet, or
    of the first call at all.
    """
    unanswered: list[ToolCall] = []
    for number, message in enumerate(messages):
        calls = [
            ToolCall(
                call.id or f"call_{number}_{index}",
                CalledFunction(call.function.name, encode_json(call.function.arguments)),
            )
            for index, call in enumerate(message.tool_calls or ())
        ]
        answered_id = ""
        if message.role == "tool":
            of_tool = [call.id for call in unanswered if call.function.name == message.tool_name]
            waiting_ids = (*of_tool, *(call.id for call in unanswered), f"call_{number}")
            answered_id = message.tool_call_id or waiting_ids[0]
            unanswered = [call for call in unanswered if call.id != answered_id]
        elif message.role == "assistant":
            unanswered = calls
        yield ConversationMessage(
            message.role,
            message.content or "",
            name=message.tool_name or "",
            tool_call_id=answered_id,
            reasoning=message.thinking or "",
            tool_calls=encode_json(calls) if calls else "",
        )


def _response_schema_json(format: str | dict[str, Any] | None) -> str:
    """Return the JSON schema that the response must match, "" if any text is allowed."""
    if not isinstance(format, dict):
        return encode_json({"type": "object"}) if format else ""
    return encode_schema(format, "format")


LINES_CONTENT_TYPE = b"application/x-ndjson"

Renderer = Callable[[str, str, list[OllamaCallBody]], dict[str, Any]]
"""Renders text, thoughts and tool calls as the fields of one route's response."""


def _render_message(text: str, thought: str, calls: list[OllamaCallBody]) -> dict[str, Any]:
    return {
        "message": OllamaMessageBody(content=text, thinking=thought or UNSET, tool_calls=calls or UNSET),
    }


def _render_response_text(text: str, thought: str, _: list[OllamaCallBody]) -> dict[str, Any]:
    return {"response": text, **({"thinking": thought} if thought else {})}


def render_error(error: ClusterError) -> Answer:
    """Return the error response in Ollama's envelope."""
    return wire.json_answer(
        OllamaErrorBody(wire.message_with_field(error)), error.status, wire.error_headers(error)
    )


def _render_line(head: Head, content: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": head.generation.model, "created_at": format_time(head.created), **content, **fields}


def format_time(seconds: int) -> str:
    """Return a Unix time in Ollama's format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def to_nanoseconds(seconds: float) -> int:
    """Return a duration in nanoseconds, the unit of Ollama's API."""
    return int(seconds * 1_000_000_000)


def _render_end(last: TextDelta) -> dict[str, Any]:
    """Return the fields of the last line: finish reason, durations, token counts."""
    durations, usage = last.durations or Durations(), generation.total_usage([last], 1)
    return {
        "done_reason": "length" if last.finish == "length" else "stop",
        "total_duration": to_nanoseconds(durations.load + durations.prompt + durations.answer),
        "load_duration": to_nanoseconds(durations.load),
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": to_nanoseconds(durations.prompt),
        "eval_count": usage.completion,
        "eval_duration": to_nanoseconds(durations.answer),
    }


def _render_calls(head: Head, pieces: Sequence[ToolPiece]) -> list[OllamaCallBody]:
    return [
        OllamaCallBody(
            piece.id or f"call_{head.call_key}_{piece.index}",
            CallFunction(index, piece.name, blocks.parse_arguments(piece.arguments)),
        )
        for index, piece in enumerate(pieces)
    ]


def response_renderer(
    response: type[LastLine], render: Renderer
) -> Callable[[Head, Sequence[TextDelta]], bytes]:
    """Return a function that renders a complete response as this class, with the fields of `render`."""

    def render_response(head: Head, deltas: Sequence[TextDelta]) -> bytes:
        choice: MergedChoice = generation.merge_deltas(deltas, 1)[0]
        last = generation.last_delta(deltas)
        content = render(choice.text, choice.reasoning, _render_calls(head, choice.tools))
        fields = _render_line(head, content, **_render_end(last), logprobs=choice.logprobs or UNSET)
        return msgspec.json.encode(response(**fields))

    return render_response


class OllamaLines(Events):
    """Renders one streamed response as lines of JSON."""

    kind = LINES_CONTENT_TYPE
    keep_alive = b" "

    def __init__(self, head: Head, response: type[LastLine], render: Renderer) -> None:
        self._response = response
        self._head = head
        self._render = render
        self._calls: list[ToolPiece] = []

    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the encoded lines for these deltas."""
        return b"".join(
            msgspec.json.encode(line) + b"\n" for delta in deltas for line in self._render_delta(delta)
        )

    def render_failure(self, error: ClusterError, /) -> bytes:
        """Return the line that ends a stream after an error."""
        return render_error(error).body + b"\n"

    def _render_delta(self, delta: TextDelta) -> list[dict[str, Any] | LastLine]:
        lines: list[dict[str, Any] | LastLine] = []
        self._calls.extend(delta.tools)
        if delta.text or delta.reasoning or delta.logprobs:
            logprobs = {"logprobs": delta.logprobs} if delta.logprobs else {}
            piece = self._render(delta.text, delta.reasoning, [])
            lines.append(_render_line(self._head, piece, done=False, **logprobs))
        if delta.finish:
            if calls := generation.merge_tool_calls(self._calls):
                calls_piece = self._render("", "", _render_calls(self._head, calls))
                lines.append(_render_line(self._head, calls_piece, done=False))
            fields = _render_line(self._head, self._render("", "", []), **_render_end(delta))
            lines.append(self._response(**fields))
        return lines


def _make_dialect(
    read: Callable[[Mapping[str, Any]], generation.Generation], response: type[LastLine], render: Renderer
) -> Dialect:
    return Dialect(
        read, lambda head: OllamaLines(head, response, render), response_renderer(response, render)
    )


CHAT = _make_dialect(parse_chat, OllamaChatResponse, _render_message)
GENERATE = _make_dialect(parse_generate, OllamaGenerateResponse, _render_response_text)
