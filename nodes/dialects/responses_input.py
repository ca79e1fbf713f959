"""The input of OpenAI's Responses: the items of a conversation, and the tools that a model may call. Pure.

Consecutive calls, and the thoughts and text before them, become one message for an engine. Content that only
OpenAI's servers can read is ignored.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import field_error
from nodes.dialects import openai_messages
from nodes.dialects.openai_messages import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    CalledFunction,
    Choice,
    ForcedTool,
    Function,
    FunctionName,
    Name,
    Tool,
    ToolCall,
    encode_json,
)
from nodes.gateway.generation import (
    ConversationMessage,
)


class Content(msgspec.Struct, frozen=True):
    """A part of an item. An image is in itself: `data:image/png;base64,…`; the cluster keeps no files."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


Contents = str | Annotated[list[Content], msgspec.Meta(max_length=MOST_PARTS)]


class Item(msgspec.Struct, frozen=True):
    """A message, a call of a tool, what came of it, or what the model thought.

    Items about tools of OpenAI's servers, and references to items that they keep, are left out.
    """

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "custom_tool_call",
        "custom_tool_call_output",
        "item_reference",
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "compaction",
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Contents | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Contents | None = None
    input: str | None = None


Items = Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
_USED = ("message", "function_call", "function_call_output", "reasoning")


def known_items(items: Sequence[Item]) -> list[tuple[int, Item]]:
    """Return the items that a model can read, with their places; raise InvalidInput for an incomplete one.

    Calls of free-form tools become calls of functions. A reference at the end asks for what is not kept.
    """
    if items[-1].type == "item_reference":
        raise field_error(f"input[{len(items) - 1}]", "nothing is kept; send the item itself")
    known = []
    for number, item in enumerate(items):
        for name in _NEEDED.get(item.type, ()):
            if getattr(item, name) is None:
                raise field_error(f"input[{number}].{name}", f"an item of the type {item.type} needs it")
        if item.type == "custom_tool_call":
            arguments = encode_json({"input": item.input})
            item = msgspec.structs.replace(item, type="function_call", arguments=arguments)
        elif item.type == "custom_tool_call_output":
            item = msgspec.structs.replace(item, type="function_call_output")
        if item.type in _USED:
            known.append((number, item))
    return known


def convert_items(
    instructions: str | None, input_items: str | Sequence[Item]
) -> Iterator[ConversationMessage]:
    """Yield the messages in the engines' form; raise InvalidInput for an incomplete item."""
    if instructions:
        yield ConversationMessage("system", instructions)
    if isinstance(input_items, str):
        yield ConversationMessage("user", input_items)
        return
    answer: list[Item] = []
    for _, item in known_items(input_items):
        is_assistant_item = item.type in ("function_call", "reasoning") or item.role == "assistant"
        if not is_assistant_item or _starts_response(item, answer):
            yield from _assistant_message(answer)
            answer = []
        if is_assistant_item:
            answer.append(item)
        else:
            yield _input_message(item)
    yield from _assistant_message(answer)


def _starts_response(item: Item, answer: Sequence[Item]) -> bool:
    """Return True if the item starts a new response: in one response only thoughts may precede a message."""
    return item.type == "message" and any(previous_item.type != "reasoning" for previous_item in answer)


def _input_message(item: Item) -> ConversationMessage:
    if item.type == "function_call_output":
        return ConversationMessage("tool", _join_texts(item.output), tool_call_id=item.call_id or "")
    return ConversationMessage("user" if item.role == "user" else "system", _join_texts(item.content))


def _assistant_message(items: Sequence[Item]) -> Iterator[ConversationMessage]:
    """Yield the message for the items of one earlier response; thoughts alone yield none."""
    calls = [
        ToolCall(item.call_id or "", CalledFunction(item.name or "", item.arguments or ""))
        for item in items
        if item.type == "function_call"
    ]
    if any(item.type != "reasoning" for item in items):
        yield ConversationMessage(
            "assistant",
            "".join(_join_texts(item.content) for item in items if item.type == "message"),
            reasoning="\n".join(_join_texts(item.content) for item in items if item.type == "reasoning"),
            tool_calls=encode_json(calls) if calls else "",
        )


def _join_texts(content: Contents | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = (part.text if part.text is not None else part.refusal for part in content)
    return "\n".join(text for text in texts if text is not None)


def collect_images(input_items: str | Sequence[Item]) -> tuple[str, ...]:
    """Return the base64 data of the images; raise InvalidInput for a broken or linked image."""
    if isinstance(input_items, str):
        return ()
    return tuple(
        openai_messages.parse_image_url(part.image_url or "", f"input[{number}].{name}[{index}]")
        for number, item in known_items(input_items)
        for name, content in (("content", item.content), ("output", item.output))
        if isinstance(content, list)
        for index, part in enumerate(content)
        if part.type == "input_image"
    )


class FlatTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tool that must be called; only a function can be."""

    type: str
    name: str | None = None


class FunctionTools:
    """The functions among the tools of a request; those of a namespace by a name of their own.

    Other tools run on OpenAI's servers and are left out, unless none is left or one of them is required.
    """

    def __init__(self, listed: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[Tool] = []
        self.namespaces: dict[str, tuple[str, str]] = {}
        """Name of a function -> its namespace and its name there."""
        self.others: list[str] = []
        namespaces: list[tuple[Mapping[str, Any], str]] = []
        for number, tool in enumerate(listed):
            path, kind = f"tools[{number}]", tool.get("type")
            if not isinstance(kind, str):
                raise field_error(f"{path}.type", "is required", "missing_required_parameter")
            if kind == "namespace":
                namespaces.append((tool, path))
            elif kind == "function":
                self._add_function(_parse_function(tool, path))
            else:
                self.others.append(kind)
        # Last, because a function without a namespace keeps its name.
        for tool, path in namespaces:
            self._add_namespace(tool, path)
        if len(self.functions) > MOST_TOOLS:
            raise field_error("tools", f"at most {MOST_TOOLS} functions", "array_above_max_length")

    def _add_namespace(self, tool: Mapping[str, Any], path: str) -> None:
        space, inner = tool.get("name"), tool.get("tools")
        if not isinstance(space, str) or not isinstance(inner, list):
            raise field_error(path, "a namespace needs `name` and `tools`")
        for number, entry in enumerate(inner):
            entry_path = f"{path}.tools[{number}]"
            if not isinstance(entry, dict):
                raise field_error(entry_path, "a tool is an object", "invalid_type")
            if entry.get("type") != "function":
                self.others.append(str(entry.get("type")))
                continue
            function = _parse_function(entry, entry_path)
            name = self._free_name(space, function.name)
            self.namespaces[name] = space, function.name
            self._add_function(msgspec.structs.replace(function, name=name))

    def _free_name(self, space: str, name: str) -> str:
        """Return a name for a function of a namespace that no other function has."""
        taken = {tool.function.name for tool in self.functions}
        if name not in taken:
            return name
        long_name = _UNSAFE.sub("_", f"{space}__{name}")[-64:]
        numbered = (f"{long_name[-60:]}_{number}" for number in range(2, MOST_TOOLS + 3))
        return next((free for free in (long_name, *numbered) if free not in taken), long_name)

    def _add_function(self, function: FlatTool) -> None:
        self.functions.append(
            Tool(Function(function.name, function.description, function.parameters, function.strict))
        )

    def choice(self, wanted: Literal["none", "auto", "required"] | FlatChoice | None) -> Choice | None:
        """Return the choice in OpenAI's older form; raise InvalidInput for a tool that is left out."""
        if self.others and not self.functions and wanted != "none":
            kinds = ", ".join(sorted(set(self.others)))[:100]
            raise field_error("tools", f"none of these can be run here: {kinds}", "unsupported_value")
        if not isinstance(wanted, FlatChoice):
            return wanted
        if wanted.type != "function" or wanted.name is None:
            message = f"a tool of the type {wanted.type[:64]} cannot be run here"
            raise field_error("tool_choice", message, "unsupported_value")
        if any(tool.function.name == wanted.name for tool in self.functions):
            return ForcedTool(FunctionName(wanted.name))
        names = {inner: name for name, (_, inner) in self.namespaces.items()}
        return ForcedTool(FunctionName(names.get(wanted.name, wanted.name)))


_UNSAFE = re.compile("[^a-zA-Z0-9_-]")


def _parse_function(tool: Mapping[str, Any], path: str) -> FlatTool:
    try:
        return wire.parse_struct(tool, FlatTool)
    except InvalidInput as error:
        refusal = field_error(f"{path}.{error.message}".partition(": ")[0], error.message.partition(": ")[2])
        refusal.code = error.code
        raise refusal from error
