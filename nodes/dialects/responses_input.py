"""The input of OpenAI's Responses: the items of a conversation, and the tools that a model may call. Pure.

Consecutive calls, and the thoughts and text before them, become one message for an engine. Items that only
OpenAI's servers can read are left out. InvalidInput is raised for an unreadable tool result to which the
model would have to respond. A reference is replaced by its stored item.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from localai_cluster.web import wire
from localai_cluster.web.wire import field_error
from nodes.dialects import openai_messages
from nodes.dialects.openai_messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
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
    """A part of an item: a text, a refusal, `input_image` or `input_file`.

    Images (`data:image/png;base64,…`) and files are inside the request. A file must be plain text.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_data: str | None = None
    filename: str | None = None


Contents = str | Annotated[list[Content], msgspec.Meta(max_length=MAX_PARTS)]


class Item(msgspec.Struct, frozen=True):
    """A message, a tool call, the result of a call, the model's reasoning, or a reference to an item.

    Items about tools that OpenAI's servers run are left out.
    """

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Contents | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: Contents | None = None
    input: str | None = None


Items = Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
_REQUIRED_FIELDS_BY_TYPE = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}
_READABLE_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_KNOWN_ITEM_TYPES = frozenset({*_REQUIRED_FIELDS_BY_TYPE, *_READABLE_ITEM_TYPES})
_RESULT_TYPE_SUFFIXES = ("_output", "_response")
"""Suffixes of the types of items that contain the result of a tool call."""
_TEXT_PART_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_THOUGHT_ID_PREFIX = "rs_"
"""Prefix of the id of a thought. A conversation stays complete if thoughts are missing."""

_NO_STORE_MESSAGE = "nothing is kept here; send the item itself (clients do with `store: false`)"


@dataclass(frozen=True)
class StoredItems:
    """Stored input and output items to which a request refers."""

    has_store: bool = False
    """True if the caller's responses are stored."""
    items: Sequence[Mapping[str, Any]] = ()
    """The items of the conversation that `previous_response_id` continues."""
    by_id: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Items of further stored responses to which the input refers, by item id."""
    used_ids: tuple[str, ...] = ()
    """Ids of the stored responses to which these items belong."""


NO_STORED_ITEMS = StoredItems()


class InputEntry(NamedTuple):
    """An item with its path in the request, for error messages."""

    path: str
    item: Item


def strip_unknown_items(input_items: Any) -> Any:
    """Return the input of a request. Each item of an unknown type is reduced to its type.

    An unknown type may use known field names with other meanings.
    """
    return [_strip_if_unknown(item) for item in input_items] if isinstance(input_items, list) else input_items


def _strip_if_unknown(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return {"type": kind} if isinstance(kind, str) and kind not in _KNOWN_ITEM_TYPES else item


def read_items(input_items: str | Sequence[Item], earlier: StoredItems = NO_STORED_ITEMS) -> list[InputEntry]:
    """Return the items that a model can read, the stored items first; raise InvalidInput for a wrong item.

    Calls of free-form tools become calls of functions.
    """
    entries = [InputEntry("previous_response_id", _parse_stored_item(item)) for item in earlier.items]
    if isinstance(input_items, str):
        entries.append(InputEntry("input", Item(role="user", content=input_items)))
    else:
        entries += _resolve_references(input_items, earlier)
    if len(entries) > MAX_MESSAGES:
        raise field_error("input", f"at most {MAX_MESSAGES} items with the earlier ones", _TOO_MANY_CODE)
    readable = list(_select_readable(entries))
    _check_result_calls(readable)
    return readable


_TOO_MANY_CODE = "array_above_max_length"


def _parse_stored_item(item: Mapping[str, Any]) -> Item:
    # Items are stored as the client sent them.
    return msgspec.convert(_strip_if_unknown(item), Item)


def _resolve_references(items: Sequence[Item], earlier: StoredItems) -> Iterator[InputEntry]:
    """Yield the items. Replace each reference by the stored item.

    A reference is left out in two cases: the conversation already contains the item, or the reference means a
    thought that is not stored and another item follows. Raise InvalidInput for any other reference without a
    stored item.
    """
    present = {item.id for item in items if item.type != "item_reference"}
    present |= {item.get("id") for item in earlier.items}
    for number, item in enumerate(items):
        path = f"input[{number}]"
        if item.type != "item_reference" or item.id is None:
            yield InputEntry(path, item)
        elif item.id in present:
            continue
        elif item.id in earlier.by_id:
            yield InputEntry(path, _parse_stored_item(earlier.by_id[item.id]))
        elif not item.id.startswith(_THOUGHT_ID_PREFIX) or number == len(items) - 1:
            reason = "no stored item has this id" if earlier.has_store else _NO_STORE_MESSAGE
            raise field_error(path, f"{item.id[:100]}: {reason}")


def _select_readable(entries: Iterable[InputEntry]) -> Iterator[InputEntry]:
    """Yield the items that a model can read.

    Raise InvalidInput for an incomplete item, and for an unreadable result of a tool call that no message
    follows.
    """
    unread_result = ""
    for path, item in entries:
        for name in _REQUIRED_FIELDS_BY_TYPE.get(item.type, ()):
            if getattr(item, name) is None:
                raise field_error(f"{path}.{name}", f"an item of the type {item.type[:64]} needs it")
        if item.type == "custom_tool_call":
            arguments = encode_json({"input": item.input})
            item = msgspec.structs.replace(item, type="function_call", arguments=arguments)
        elif item.type == "custom_tool_call_output":
            item = msgspec.structs.replace(item, type="function_call_output")
        elif item.type not in _READABLE_ITEM_TYPES:
            unread_result = path if item.type.endswith(_RESULT_TYPE_SUFFIXES) else unread_result
            continue
        if item.type == "message":
            unread_result = ""
        _check_parts(item, path)
        yield InputEntry(path, item)
    if unread_result:
        message = "no model here can read what came of a call of this type"
        raise field_error(f"{unread_result}.type", message, "unsupported_value")


def _is_assistant_message(item: Item) -> bool:
    # An item of another type may have a role, which means nothing.
    return item.type == "message" and item.role == "assistant"


def _check_parts(item: Item, path: str) -> None:
    """Raise InvalidInput for a part that no model can read. The model's own messages may have such parts."""
    if item.type == "reasoning" or _is_assistant_message(item):
        return
    for name, content in (("content", item.content), ("output", item.output)):
        for index, part in enumerate(content if isinstance(content, list) else ()):
            part_path = f"{path}.{name}[{index}]"
            if part.type == "input_file":
                _file_text(part, part_path)
            elif part.type not in (*_TEXT_PART_TYPES, "refusal", "input_image"):
                kind = part.type[:64]
                raise field_error(f"{part_path}.type", f"no model here reads {kind!r}", "unsupported_value")


_TEXT_FILE_HEAD_PATTERN = re.compile(
    r"data:(text/[a-z0-9.+-]+|application/json)(;charset=utf-8)?;base64", re.IGNORECASE
)


def _file_text(part: Content, path: str) -> str:
    """Return the text of a plain text file inside the request; raise InvalidInput for any other file."""
    head, _, data = (part.file_data or "").partition(",")
    try:
        if not _TEXT_FILE_HEAD_PATTERN.fullmatch(head):
            raise ValueError
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        message = "only files of plain text inside the request are read, as data:text/plain;base64,…"
        raise field_error(path, message, "unsupported_value") from None
    return f"{part.filename}\n{text}" if part.filename else text


def _check_result_calls(entries: Iterable[InputEntry]) -> None:
    """Raise InvalidInput for the result of a tool call whose call does not precede it."""
    calls = set()
    for path, item in entries:
        if item.type == "function_call":
            calls.add(item.call_id)
        elif item.type == "function_call_output" and item.call_id not in calls:
            message = "no call of a tool before it has this id; send the call too"
            raise field_error(f"{path}.call_id", message)


NamesInRequest = Mapping[tuple[str, str], str]
"""Names of functions in the request, by their namespaces and their names in these."""


def convert_items(
    instructions: str | None, entries: Sequence[InputEntry], names: NamesInRequest
) -> Iterator[ConversationMessage]:
    """Yield the items as messages in the form that engines expect.

    An earlier call of a function from a namespace gets the function's name in this request.
    """
    if instructions:
        yield ConversationMessage("system", instructions)
    answer: list[Item] = []
    for _, item in entries:
        is_assistant_item = item.type in ("function_call", "reasoning") or _is_assistant_message(item)
        if not is_assistant_item or _starts_response(item, answer):
            yield from _assistant_message(answer, names)
            answer = []
        if is_assistant_item:
            answer.append(item)
        else:
            yield _input_message(item)
    yield from _assistant_message(answer, names)


def _starts_response(item: Item, answer: Sequence[Item]) -> bool:
    """Return True if the item starts a new response.

    Within one response, only thoughts may precede a message.
    """
    return item.type == "message" and any(previous_item.type != "reasoning" for previous_item in answer)


def _input_message(item: Item) -> ConversationMessage:
    if item.type == "function_call_output":
        return ConversationMessage("tool", _join_texts(item.output), tool_call_id=item.call_id or "")
    return ConversationMessage("user" if item.role == "user" else "system", _join_texts(item.content))


def _assistant_message(items: Sequence[Item], names: NamesInRequest) -> Iterator[ConversationMessage]:
    """Yield the message for the items of one earlier response, none if it has only thoughts."""
    calls = [
        ToolCall(item.call_id or "", CalledFunction(_called_name(item, names), item.arguments or ""))
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


def _called_name(item: Item, names: NamesInRequest) -> str:
    name = item.name or ""
    return names.get((item.namespace or "", name), name)


def _join_texts(content: Contents | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(text for text in map(_part_text, content) if text is not None)


def _part_text(part: Content) -> str | None:
    if part.type == "input_file" and part.file_data:
        return _file_text(part, "input")
    return part.text if part.text is not None else part.refusal


def collect_images(entries: Sequence[InputEntry]) -> tuple[str, ...]:
    """Return the base64 data of the images. Raise InvalidInput for invalid base64 or another URL."""
    return tuple(
        openai_messages.parse_image_url(part.image_url or "", f"{path}.{name}[{index}]")
        for path, item in entries
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


class AllowedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool in the choice `allowed_tools`."""

    type: str
    name: str | None = None


class FlatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """The client's choice of tools.

    It names the function that must be called, or with the type `allowed_tools` the tools that may be called.
    """

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None


RequestedChoice = Literal["none", "auto", "required"] | FlatChoice | None


class FunctionTools:
    """The functions among the tools of a request.

    A function in a namespace gets a name that is unique in the request. Tools of other types are left out,
    because OpenAI's servers run them.
    """

    def __init__(self, listed: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[Tool] = []
        self.namespaces: dict[str, tuple[str, str]] = {}
        """Function name in the request -> the namespace and the name in it."""
        self.other_types: list[str] = []
        namespaces: list[tuple[Mapping[str, Any], str]] = []
        for number, tool in enumerate(listed):
            path, kind = f"tools[{number}]", tool.get("type")
            if not isinstance(kind, str):
                raise field_error(f"{path}.type", "is required", "missing_required_parameter")
            if kind == "namespace":
                namespaces.append((tool, path))
            elif kind == "function":
                self._add_function(wire.parse_part(tool, FlatTool, path))
            else:
                self.other_types.append(kind)
        # Last, because a function without a namespace keeps its name.
        for tool, path in namespaces:
            self._add_namespace(tool, path)
        if len(self.functions) > MAX_TOOLS:
            raise field_error("tools", f"at most {MAX_TOOLS} functions", "array_above_max_length")

    @property
    def names_in_request(self) -> NamesInRequest:
        """The names in this request of the functions from namespaces."""
        return {inner: name for name, inner in self.namespaces.items()}

    def _add_namespace(self, tool: Mapping[str, Any], path: str) -> None:
        space, inner = tool.get("name"), tool.get("tools")
        if not isinstance(space, str) or not isinstance(inner, list):
            raise field_error(path, "a namespace needs `name` and `tools`")
        for number, entry in enumerate(inner):
            entry_path = f"{path}.tools[{number}]"
            if not isinstance(entry, dict):
                raise field_error(entry_path, "a tool is an object", "invalid_type")
            if entry.get("type") != "function":
                self.other_types.append(str(entry.get("type")))
                continue
            function = wire.parse_part(entry, FlatTool, entry_path)
            name = self._free_name(space, function.name)
            self.namespaces[name] = space, function.name
            self._add_function(msgspec.structs.replace(function, name=name))

    def _free_name(self, space: str, name: str) -> str:
        """Return a name for the function `name` of a namespace that no other function of the request has."""
        taken = {tool.function.name for tool in self.functions}
        if name not in taken:
            return name
        long_name = _UNSAFE_CHARACTER_PATTERN.sub("_", f"{space}__{name}")[-64:]
        numbered = (f"{long_name[-60:]}_{number}" for number in range(2, MAX_TOOLS + 3))
        return next((free for free in (long_name, *numbered) if free not in taken), long_name)

    def _add_function(self, function: FlatTool) -> None:
        self.functions.append(
            Tool(Function(function.name, function.description, function.parameters, function.strict))
        )

    def choose(self, wanted: RequestedChoice) -> tuple[Sequence[Tool], Choice | None]:
        """Return the functions that the model may call, and the choice in the form of OpenAI's chat.

        Raise InvalidInput if the request has tools but no function, or requires a tool that is left out.
        """
        if self.other_types and not self.functions and wanted != "none":
            kinds = ", ".join(sorted(set(self.other_types)))[:100]
            raise field_error("tools", f"none of these can be run here: {kinds}", "unsupported_value")
        if not isinstance(wanted, FlatChoice):
            return self.functions, wanted
        if wanted.type == "allowed_tools":
            return self._allowed_functions(wanted)
        if wanted.type != "function" or wanted.name is None:
            message = f"a tool of the type {wanted.type[:64]} cannot be run here"
            raise field_error("tool_choice", message, "unsupported_value")
        names = self._names_of(wanted.name)
        return self.functions, ForcedTool(FunctionName(names[0] if names else wanted.name))

    def _allowed_functions(self, wanted: FlatChoice) -> tuple[Sequence[Tool], Choice | None]:
        """Return the functions that `allowed_tools` allows. With the mode `auto` there may be none."""
        if wanted.mode is None or not wanted.tools:
            raise field_error("tool_choice", "`allowed_tools` needs `mode` and `tools`")
        allowed = set()
        for number, tool in enumerate(wanted.tools):
            names = self._names_of(tool.name or "") if tool.type == "function" else []
            if tool.type == "function" and not names:
                raise field_error(f"tool_choice.tools[{number}]", "names none of `tools`")
            allowed.update(names)
        if not allowed and wanted.mode == "required":
            raise field_error("tool_choice", "none of these tools can be run here", "unsupported_value")
        functions = [tool for tool in self.functions if tool.function.name in allowed]
        return functions, wanted.mode if functions else "none"

    def _names_of(self, name: str) -> list[str]:
        """Return the names of the functions that `name` may mean.

        A function outside namespaces takes precedence over the functions that have this name in their
        namespaces.
        """
        inner = [known for known, (_, short_name) in self.namespaces.items() if short_name == name]
        own = [tool.function.name for tool in self.functions if tool.function.name == name]
        return own or inner


_UNSAFE_CHARACTER_PATTERN = re.compile("[^a-zA-Z0-9_-]")
