"""OpenAI's chat and legacy completions: parsing of requests, rendering of responses. Pure.

`POST /v1/chat/completions` answers messages, `POST /v1/completions` continues a prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import ResponseBody
from nodes.dialects import openai_common, openai_messages
from nodes.dialects.openai_common import (
    MAX_CHOICES,
    CompletionEvents,
    FinishReason,
    NonNegativeInt,
    PositiveInt,
    SamplingBody,
    Text,
    UsageBody,
)
from nodes.dialects.openai_messages import (
    Choice,
    Messages,
    Name,
    Tools,
    check_tools,
    encode_json,
    encode_schema,
)
from nodes.gateway import generation
from nodes.gateway.generation import (
    NO_ARGUMENTS,
    Conversation,
    Dialect,
    Generation,
    Head,
    MergedChoice,
    TextDelta,
    ToolPiece,
)


class AnyText(msgspec.Struct, tag_field="type", tag="text", frozen=True):
    """A response format that allows any text."""


class AnyJson(msgspec.Struct, tag_field="type", tag="json_object", frozen=True):
    """A response format that requires a JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name and the JSON schema of a response format."""

    name: Name
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class JsonOfSchema(msgspec.Struct, tag_field="type", tag="json_schema", frozen=True):
    """A response format that requires JSON that matches a schema."""

    json_schema: NamedSchema


class ChatBody(SamplingBody, kw_only=True, frozen=True):
    """The body of a chat request. Other fields of OpenAI's API are ignored or refused by name."""

    messages: Messages
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    response_format: AnyText | AnyJson | JsonOfSchema | None = None
    modalities: list[Literal["text"]] | None = None


class CallArguments(ResponseBody):
    name: str
    arguments: str


class CallBody(ResponseBody, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CallArguments


class MessageBody(ResponseBody, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET


class ChatChoice(ResponseBody):
    index: int
    message: MessageBody
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatResponse(ResponseBody, kw_only=True):
    id: Annotated[str, msgspec.Meta(description="The request's id, as in X-Correlation-ID.")]
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


UNSUPPORTED_IN_CHAT = {
    "audio": "no engine here answers with sound",
    "functions": "replaced by `tools`",
    "function_call": "replaced by `tool_choice`",
    "web_search_options": "no engine here searches the web",
}


def parse_chat(fields: Mapping[str, Any]) -> Generation:
    """Parse the body of a chat request. Raise InvalidInput with the name of the first wrong field."""
    openai_common.refuse_fields(fields, UNSUPPORTED_IN_CHAT)
    body = wire.parse_struct(fields, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs: needs `logprobs`", field="top_logprobs")
    schema = _response_schema_json(body)
    if schema and body.grammar:
        raise InvalidInput("grammar: `response_format` is one already", field="grammar")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Generation(
        model=body.model,
        prompts=(_parse_conversation(body),),
        sampling=openai_common.to_sampling(
            body,
            limit,
            grammar=schema or body.grammar or "",
            logprobs=bool(body.logprobs),
            top_logprobs=body.top_logprobs or 0,
        ),
        n=body.n or 1,
        stream=bool(body.stream),
        usage_in_stream=body.streams_usage,
    )


def _parse_conversation(body: ChatBody) -> Conversation:
    tools, choice = check_tools(body.tools or (), body.tool_choice)
    return Conversation(
        messages=tuple(openai_messages.convert_messages(body.messages)),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls if tools else None,
        images=openai_messages.collect_images(body.messages),
        audios=openai_messages.collect_audios(body.messages),
    )


def _response_schema_json(body: ChatBody) -> str:
    """Return the JSON schema that the response must match, "" if any text is allowed."""
    if isinstance(body.response_format, AnyJson):
        return encode_json({"type": "object"})
    if not isinstance(body.response_format, JsonOfSchema):
        return ""
    schema = body.response_format.json_schema.schema
    return encode_schema(schema or {"type": "object"}, "response_format.json_schema.schema")


def render_chat(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """Return the body of a complete chat response."""
    request = head.generation
    choices = [
        ChatChoice(
            index=index,
            message=_render_message(head, index, choice),
            logprobs={"content": choice.logprobs, "refusal": None} if request.sampling.logprobs else None,
            finish_reason=choice.finish,
        )
        for index, choice in enumerate(generation.merge_deltas(deltas, request.choices))
    ]
    usage = openai_common.render_usage(generation.total_usage(deltas, request.n))
    return msgspec.json.encode(
        ChatResponse(id=head.id, created=head.created, model=request.model, choices=choices, usage=usage)
    )


def _render_message(head: Head, index: int, choice: MergedChoice) -> MessageBody:
    calls = [
        CallBody(
            id=piece.id or _call_id(head, index, piece),
            function=CallArguments(
                name=piece.name, arguments=piece.arguments or _default_arguments(choice.finish)
            ),
        )
        for piece in choice.tools
    ]
    return MessageBody(
        # As in OpenAI's API, a response with tool calls only has no content.
        content=None if calls and not choice.text else choice.text,
        reasoning_content=choice.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _call_id(head: Head, choice: int, piece: ToolPiece) -> str:
    """Return the id of a tool call. A stream and a complete response have equal ids."""
    return f"call_{head.call_key}_{choice}_{piece.index}"


def _default_arguments(finish: str) -> str:
    """Return the arguments of a call that the engine sent without any: `{}`, or "" if it was truncated."""
    return "" if finish == "length" else NO_ARGUMENTS


class ChatChunks(CompletionEvents):
    """Renders one streamed chat response as OpenAI's chunks."""

    object_name = "chat.completion.chunk"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._calls: dict[tuple[int, int], bool] = {}
        """(choice, call index) -> True if any arguments were sent."""

    def render_delta(self, delta: TextDelta, *, is_first: bool) -> list[bytes]:
        chunks = []
        if is_first:
            chunks.append(self._choice_chunk(delta.choice, {"role": "assistant", "content": ""}))
        if content := self._render_content(delta):
            chunks.append(self._choice_chunk(delta.choice, content, logprobs=delta.logprobs))
        if delta.finish:
            if _default_arguments(delta.finish) and (
                missing_calls := self._default_missing_arguments(delta.choice)
            ):
                chunks.append(self._choice_chunk(delta.choice, {"tool_calls": missing_calls}))
            chunks.append(self._choice_chunk(delta.choice, {}, finish=delta.finish))
            chunks += self._end_choice(delta)
        return chunks

    def _render_content(self, delta: TextDelta) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if delta.text or delta.logprobs:
            content["content"] = delta.text
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.tools:
            content["tool_calls"] = [self._render_tool_call(delta.choice, piece) for piece in delta.tools]
        return content

    def _render_tool_call(self, choice: int, piece: ToolPiece) -> dict[str, Any]:
        function: dict[str, Any] = {"arguments": piece.arguments}
        call: dict[str, Any] = {"index": piece.index, "function": function}
        if piece.name:
            function["name"] = piece.name
        has_arguments = self._calls.get((choice, piece.index))
        self._calls[choice, piece.index] = bool(has_arguments or piece.arguments)
        if has_arguments is None:
            call |= {"id": piece.id or _call_id(self._head, choice, piece), "type": "function"}
        return call

    def _default_missing_arguments(self, choice: int) -> list[dict[str, Any]]:
        indices = [
            index
            for (call_choice, index), has_arguments in self._calls.items()
            if call_choice == choice and not has_arguments
        ]
        return [self._render_tool_call(choice, ToolPiece(index, arguments=NO_ARGUMENTS)) for index in indices]

    def _choice_chunk(
        self, index: int, delta: Mapping[str, Any], *, finish: str = "", logprobs: Sequence[Any] = ()
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish or None}
        if self._head.generation.sampling.logprobs:
            choice["logprobs"] = {"content": logprobs, "refusal": None} if logprobs else None
        return self._chunk([choice])


CHAT = Dialect(parse_chat, ChatChunks, render_chat)


DEFAULT_MAX_TOKENS = 16
"""Default limit on the tokens of a completion, as in OpenAI's documentation."""

MAX_PROMPT_TOKENS = 256 * 1024
"""Limit on the token ids of a prompt, because decoding millions of ids would block all other requests."""

Tokens = Annotated[list[NonNegativeInt], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
Prompts = Annotated[
    list[Text | NonNegativeInt | Tokens], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)
]


class CompletionBody(SamplingBody, kw_only=True, frozen=True):
    """The body of a completion request."""

    prompt: Annotated[
        Text | Prompts,
        msgspec.Meta(
            description=f"A text, up to {MAX_PROMPT_TOKENS} token ids of the model, or a list of either; "
            f"at most {MAX_CHOICES} answers, all prompts together."
        ),
    ]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class CompletionChoice(ResponseBody):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class CompletionResponse(ResponseBody, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


UNSUPPORTED_IN_COMPLETIONS = {
    "suffix": "no engine here fills in a middle",
}


def parse_completion(fields: Mapping[str, Any]) -> Generation:
    """Parse the body of a completion request. Raise InvalidInput with the name of the first wrong field."""
    openai_common.refuse_fields(fields, UNSUPPORTED_IN_COMPLETIONS)
    if fields.get("best_of") not in (None, 1, fields.get("n")):
        raise InvalidInput(
            "best_of: all answers are sent; leave it out or say the same as `n`", field="best_of"
        )
    body = wire.parse_struct(fields, CompletionBody)
    prompts = _parse_prompts(body.prompt)
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidInput(f"prompt: at most {MAX_CHOICES} answers in one request", field="prompt")
    if body.echo and (body.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        raise wire.field_error(
            "echo", "only with prompts of text, and without `logprobs`", "unsupported_value"
        )
    return Generation(
        model=body.model,
        prompts=prompts,
        sampling=openai_common.to_sampling(
            body,
            body.max_tokens or DEFAULT_MAX_TOKENS,
            grammar=body.grammar or "",
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        ),
        n=n,
        stream=bool(body.stream),
        usage_in_stream=body.streams_usage,
        echo={"prompt": True} if body.echo else {},
    )


def _echoed_prompt(request: Generation, choice: int) -> str:
    """Return the prompt that precedes the text of this choice; "" unless the client requested `echo`."""
    prompt = request.prompts[choice // request.n] if request.echo else ""
    return prompt if isinstance(prompt, str) else ""


def _parse_prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if all(isinstance(item, int) for item in prompt):
        return (tuple(item for item in prompt if isinstance(item, int)),)
    prompts = [item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int)]
    if len(prompts) < len(prompt) or len({type(item) for item in prompts}) > 1:
        raise InvalidInput(
            "prompt: a list has only texts, only token ids, or only lists of them", field="prompt"
        )
    return tuple(prompts)


def render_completion(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """Return the body of a complete completion."""
    request = head.generation
    choices = [
        CompletionChoice(
            index=index,
            text=_echoed_prompt(request, index) + choice.text,
            logprobs=_render_logprobs(choice.logprobs, 0) if request.sampling.logprobs else None,
            finish_reason=choice.finish,
        )
        for index, choice in enumerate(generation.merge_deltas(deltas, request.choices))
    ]
    usage = openai_common.render_usage(generation.total_usage(deltas, request.n))
    return msgspec.json.encode(
        CompletionResponse(
            id=head.id, created=head.created, model=request.model, choices=choices, usage=usage
        )
    )


def _render_logprobs(tokens: Sequence[Mapping[str, Any]], offset: int) -> dict[str, Any]:
    """Return log probabilities in the legacy form; `offset` is the first token's position in the text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {alternative["token"]: alternative["logprob"] for alternative in token["top_logprobs"]}
            for token in tokens
        ],
        "text_offset": offsets,
    }


class CompletionChunks(CompletionEvents):
    """Renders one streamed completion as OpenAI's chunks."""

    object_name = "text_completion"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._lengths = [0] * head.generation.choices

    def render_delta(self, delta: TextDelta, *, is_first: bool) -> list[bytes]:
        logprobs = _render_logprobs(delta.logprobs, self._lengths[delta.choice]) if delta.logprobs else None
        self._lengths[delta.choice] += len(delta.text)
        text = delta.text
        if is_first:
            text = _echoed_prompt(self._head.generation, delta.choice) + text
        choice = {
            "index": delta.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish or None,
        }
        return [self._chunk([choice]), *(self._end_choice(delta) if delta.finish else [])]


COMPLETIONS = Dialect(parse_completion, CompletionChunks, render_completion)
