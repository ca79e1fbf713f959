"""OpenAI's Responses, `POST /v1/responses`: the request. Pure.

The cluster stores no responses: a request that refers to an earlier response, or requires storing this one,
is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web import wire
from nodes.dialects import openai_bodies, responses_items
from nodes.dialects.openai_bodies import Fraction, PositiveInt, Text
from nodes.dialects.responses_items import Items
from nodes.dialects.tools import (
    MOST_TOOLS,
    Choice,
    ForcedTool,
    Function,
    FunctionName,
    Name,
    Tool,
    check_tools,
    encode_json,
)
from nodes.gateway import schemas
from nodes.gateway.generation import Conversation, Generation, Sampling

_NAMES = {"messages": "input", "response_format": "text", "logprobs": "include"}
LOGPROBS = "message.output_text.logprobs"


class FlatTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(msgspec.Struct, frozen=True):
    """This function must be called."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """How the text of the answer is to be; `verbosity` is ignored."""

    format: TextFormat | None = None


class ResponsesBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request. Other fields of OpenAI's are ignored, or refused by name."""

    model: Text
    input: str | Items
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    tools: Annotated[list[FlatTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None


REFUSED = {
    "background": "no answer is kept, so it must be waited for",
    "conversation": "nothing is kept; send the whole conversation as `input`",
    "previous_response_id": "nothing is kept; send the whole conversation as `input`",
    "prompt": "no prompts are kept; send it as `instructions` and `input`",
    "store": "nothing is kept; leave it out or send false",
    "moderation": "no engine here judges texts",
}


def parse_request(fields: Mapping[str, Any]) -> Generation:
    """Parse the request; raise InvalidInput, which names the first wrong field."""
    openai_bodies.refuse_fields(fields, REFUSED)
    body = wire.typed(fields, ResponsesBody)
    tools = [
        Tool(Function(tool.name, tool.description, tool.parameters, tool.strict)) for tool in body.tools or ()
    ]
    tools_json, choice = check_tools(tools, _choice(body.tool_choice), "parameters")
    return Generation(
        model=body.model,
        prompts=(
            Conversation(
                messages=tuple(responses_items.convert_items(body.instructions, body.input)),
                tools=tools_json,
                tool_choice=choice,
                parallel_tool_calls=body.parallel_tool_calls if tools_json else None,
                images=responses_items.collect_images(body.input),
            ),
        ),
        sampling=Sampling(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            grammar=_schema(body.text),
            logprobs=LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
            top_logprobs=body.top_logprobs or 0,
        ),
        stream=bool(body.stream),
        names=_NAMES,
        echo=_echo(body),
    )


def _choice(choice: Literal["none", "auto", "required"] | FlatChoice | None) -> Choice | None:
    return ForcedTool(FunctionName(choice.name)) if isinstance(choice, FlatChoice) else choice


def _schema(text: TextConfig | None) -> str:
    """Return the JSON schema of the response, "" if any text is allowed."""
    if text is None or text.format is None or text.format.type == "text":
        return ""
    if text.format.type == "json_object":
        return encode_json({"type": "object"})
    if text.format.schema is None:
        raise InvalidInput("text.format.schema: what the JSON is to be", field="text")
    schemas.check([(text.format.schema, "text.format.schema")])
    return encode_json(text.format.schema)


def _echo(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields that the response repeats, with OpenAI's defaults for omitted ones."""
    format = body.text.format if body.text is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": body.temperature,
        "text": {"format": msgspec.to_builtins(format) or {"type": "text"}},
        "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
        "tools": msgspec.to_builtins(body.tools) or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
    }
