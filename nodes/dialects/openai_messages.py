"""Messages and tools in OpenAI's form, which engines expect: validation and conversion. Pure.

Text parts of a message are joined; images and audio are passed separately, in order, as base64.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web.wire import field_error
from nodes.dialects.openai_common import Text
from nodes.gateway import schemas
from nodes.gateway.generation import ConversationMessage

MAX_MESSAGES = 4096
MAX_PARTS = 256


class TextPart(msgspec.Struct, tag_field="type", tag="text", frozen=True):
    """A part of a message with text."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", frozen=True):
    """A part of the model's message with the text of a refusal."""

    refusal: str


class ImageUrl(msgspec.Struct, frozen=True):
    """An image inside the request, as `data:image/png;base64,…`. Other URLs are refused."""

    url: Text
    detail: str | None = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url", frozen=True):
    """A part of a message with an image."""

    image_url: ImageUrl


class AudioData(msgspec.Struct, frozen=True):
    """An audio file in base64."""

    data: Text
    format: str | None = None


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio", frozen=True):
    """A part of a message with audio."""

    input_audio: AudioData


Part = TextPart | RefusalPart | ImagePart | AudioPart


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a tool call, with its arguments as JSON."""

    name: Text
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that the model requested in an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=128)] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


Messages = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


def convert_messages(messages: Sequence[ChatMessage]) -> Iterator[ConversationMessage]:
    """Yield the messages in the form that engines expect; raise InvalidInput if one has no content."""
    for number, message in enumerate(messages):
        field_path = f"messages[{number}]"
        if message.role == "tool" and not message.tool_call_id:
            raise field_error(f"{field_path}.tool_call_id", "a tool's message needs it")
        calls = message.tool_calls if message.role == "assistant" else None
        if message.content is None and not (calls or (message.role == "assistant" and message.refusal)):
            raise field_error(f"{field_path}.content", f"a {message.role}'s message needs it")
        yield ConversationMessage(
            # No template supports OpenAI's newer role name.
            role="system" if message.role == "developer" else message.role,
            content=_join_texts(message.content) or message.refusal or "",
            name=message.name or "",
            tool_call_id=message.tool_call_id or "",
            reasoning=message.reasoning_content or "",
            tool_calls=msgspec.json.encode(calls).decode() if calls else "",
        )


def _join_texts(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = (
        part.text if isinstance(part, TextPart) else part.refusal
        for part in content
        if isinstance(part, TextPart | RefusalPart)
    )
    return "\n".join(texts)


def collect_images(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Return the base64 data of the images. Raise InvalidInput for invalid base64 or another URL."""
    return tuple(
        parse_image_url(part.image_url.url, field_path)
        for part, field_path in _parts_with_paths(messages)
        if isinstance(part, ImagePart)
    )


def collect_audios(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Return the base64 data of the audio parts. Raise InvalidInput for invalid base64."""
    return tuple(
        check_base64(part.input_audio.data, field_path)
        for part, field_path in _parts_with_paths(messages)
        if isinstance(part, AudioPart)
    )


def _parts_with_paths(messages: Sequence[ChatMessage]) -> Iterator[tuple[Part, str]]:
    for number, message in enumerate(messages):
        if isinstance(message.content, list):
            for index, part in enumerate(message.content):
                yield part, f"messages[{number}].content[{index}]"


def parse_image_url(url: str, field_path: str) -> str:
    """Return the base64 data of an image's data URL; raise InvalidInput for any other URL.

    `field_path` is the path of the URL in the request.
    """
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        raise field_error(
            field_path,
            "the cluster fetches nothing: an image must be inside the request, as data:image/png;base64,…",
        )
    return check_base64(data, field_path)


def check_base64(data: str, field_path: str) -> str:
    """Return `data` unchanged; raise InvalidInput if it is empty or not base64."""
    try:
        is_empty = not base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise field_error(field_path, "this is not base64") from None
    if is_empty:
        raise field_error(field_path, "this is empty")
    return data


MAX_TOOLS = 128
Name = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True):
    """The name of a function in `tools`."""

    name: str


class ForcedTool(msgspec.Struct, frozen=True):
    """A choice that requires a call of this function."""

    function: FunctionName
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | ForcedTool


def check_tools(
    tools: Sequence[Tool], choice: Choice | None, schema: str = "function.parameters"
) -> tuple[str, str]:
    """Validate the tools and the choice. Return both in the form that engines expect.

    The tools are JSON. The choice is a word or JSON. Both are "" if the model may call no tool. `schema` is
    the path of a function's schema within a tool of the client's request. Raise InvalidInput.
    """
    tool_names = {tool.function.name for tool in tools}
    if isinstance(choice, ForcedTool) and choice.function.name not in tool_names:
        raise InvalidInput("tool_choice: names none of `tools`", field="tool_choice")
    if choice == "required" and not tool_names:
        raise InvalidInput("tool_choice: there are no `tools`", field="tool_choice")
    schemas.check_schemas(
        [(tool.function.parameters or {}, f"tools[{number}].{schema}") for number, tool in enumerate(tools)]
    )
    if not tool_names or choice == "none":
        return "", ""
    if isinstance(choice, ForcedTool):
        return encode_json(tools), encode_json(choice)
    return encode_json(tools), choice or "auto"


def encode_schema(schema: Mapping[str, Any], path: str) -> str:
    """Return a JSON schema of the client's request, at `path`, as JSON text; raise InvalidInput."""
    schemas.check_schemas([(schema, path)])
    return encode_json(schema)


def encode_json(value: object) -> str:
    """Return the JSON text of a value; msgspec structs are supported."""
    return msgspec.json.encode(value).decode()
