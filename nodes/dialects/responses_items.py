"""The input of OpenAI's Responses: validation of items, and conversion to messages for engines. Pure.

A conversation is a list of items of several kinds. Consecutive calls, and the thoughts and text before them,
become one message for an engine. Content that only OpenAI's servers can read is ignored.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from localai_cluster.web.wire import wrong
from nodes.dialects import openai_messages
from nodes.dialects.openai_messages import MOST_MESSAGES, MOST_PARTS, CalledFunction, ToolCall
from nodes.dialects.tools import encode_json
from nodes.gateway.generation import Utterance


class Content(msgspec.Struct, frozen=True):
    """A part of an item. An image is in itself: `data:image/png;base64,…`; the cluster keeps no files."""

    type: Literal["input_text", "output_text", "text", "refusal", "reasoning_text", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


Contents = str | Annotated[list[Content], msgspec.Meta(max_length=MOST_PARTS)]


class Item(msgspec.Struct, frozen=True):
    """A message, a call of a tool, what came of it, or what the model thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Contents | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Contents | None = None


Items = Annotated[list[Item], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def convert_items(instructions: str | None, input_items: str | Sequence[Item]) -> Iterator[Utterance]:
    """Yield the messages in the engines' form; raise InvalidInput for an incomplete item."""
    if instructions:
        yield Utterance("system", instructions)
    if isinstance(input_items, str):
        yield Utterance("user", input_items)
        return
    answer: list[Item] = []
    for number, item in enumerate(input_items):
        for name in _NEEDED[item.type]:
            if getattr(item, name) is None:
                raise wrong(f"input[{number}].{name}", f"an item of the type {item.type} needs it")
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


def _input_message(item: Item) -> Utterance:
    if item.type == "function_call_output":
        return Utterance("tool", _join_texts(item.output), tool_call_id=item.call_id or "")
    return Utterance("user" if item.role == "user" else "system", _join_texts(item.content))


def _assistant_message(items: Sequence[Item]) -> Iterator[Utterance]:
    """Yield the message for the items of one earlier response; thoughts alone yield none."""
    calls = [
        ToolCall(item.call_id or "", CalledFunction(item.name or "", item.arguments or ""))
        for item in items
        if item.type == "function_call"
    ]
    if any(item.type != "reasoning" for item in items):
        yield Utterance(
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
        for number, item in enumerate(input_items)
        for name, content in (("content", item.content), ("output", item.output))
        if isinstance(content, list)
        for index, part in enumerate(content)
        if part.type == "input_image"
    )
