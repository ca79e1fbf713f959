"""Anthropic's Messages, `POST /v1/messages`: the request. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web import wire
from nodes.dialects import anthropic_messages, openai_bodies
from nodes.dialects.anthropic_messages import Messages, System
from nodes.dialects.openai_bodies import MOST_STOPS, Fraction, NonNegativeInt, PositiveInt, Text
from nodes.dialects.tools import (
    MOST_TOOLS,
    Choice,
    ForcedTool,
    Function,
    FunctionName,
    Tool,
    check_tools,
    encode_json,
)
from nodes.gateway import schemas
from nodes.gateway.generation import Conversation, Generation, Sampling

_NAMES = {"response_format": "output_config"}


class ClientTool(msgspec.Struct, frozen=True):
    """A tool of the client's own; `input_schema` is a JSON schema."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None


class ClientChoice(msgspec.Struct, frozen=True):
    """Whether a tool is to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """How the answer is to be; `effort` is ignored."""

    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request to count tokens."""

    model: Text
    messages: Messages
    system: System | None = None
    tools: Annotated[list[ClientTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ClientChoice | None = None

    @property
    def conversation(self) -> Conversation:
        """The conversation for the engine; raises InvalidInput, which names the wrong field."""
        tools = [
            Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict))
            for tool in self.tools or ()
        ]
        choice = self.tool_choice
        tools_json, choice_json = check_tools(tools, _choice(choice), "input_schema")
        is_single_call = choice is not None and choice.disable_parallel_tool_use
        return Conversation(
            messages=tuple(anthropic_messages.convert_messages(self.system, self.messages)),
            tools=tools_json,
            tool_choice=choice_json,
            parallel_tool_calls=False if tools_json and is_single_call else None,
            images=anthropic_messages.collect_images(self.messages),
        )


class MessagesBody(CountBody, kw_only=True, frozen=True):
    """The body of a request. Other fields of Anthropic's are ignored, or refused by name."""

    max_tokens: PositiveInt
    stream: bool | None = None
    stop_sequences: Annotated[list[Text], msgspec.Meta(max_length=MOST_STOPS)] | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: NonNegativeInt | None = None
    output_config: OutputConfig | None = None


REFUSED = {
    "container": "no engine here runs code",
    "mcp_servers": "the cluster calls no other server",
}


def parse_request(fields: Mapping[str, Any]) -> Generation:
    """Parse the request; raise InvalidInput, which names the first wrong field."""
    openai_bodies.refuse_fields(fields, REFUSED)
    body = wire.typed(fields, MessagesBody)
    return Generation(
        model=body.model,
        prompts=(body.conversation,),
        sampling=Sampling(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=tuple(body.stop_sequences or ()),
            grammar=_schema(body.output_config),
        ),
        stream=bool(body.stream),
        names=_NAMES,
    )


def _choice(choice: ClientChoice | None) -> Choice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidInput("tool_choice.name: the tool to call", field="tool_choice")
        return ForcedTool(FunctionName(choice.name))
    return "required" if choice.type == "any" else choice.type


def _schema(config: OutputConfig | None) -> str:
    if config is None or config.format is None:
        return ""
    schemas.check([(config.format.schema, "output_config.format.schema")])
    return encode_json(config.format.schema)
