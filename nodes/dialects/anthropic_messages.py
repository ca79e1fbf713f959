"""Conversations in Anthropic's form: validation, and conversion to messages for engines. Pure.

A user's message may hold tool results, which engines expect as separate messages. Prompt caching marks
(`cache_control`), sources of texts and signatures of thoughts are ignored.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.web.wire import wrong
from nodes.dialects import openai_messages
from nodes.dialects.openai_messages import MOST_MESSAGES, MOST_PARTS, CalledFunction, Text, ToolCall
from nodes.dialects.tools import encode_json
from nodes.gateway.generation import Utterance


class TextBlock(msgspec.Struct, tag_field="type", tag="text", frozen=True):
    """Text."""

    text: str


class ImageSource(msgspec.Struct, frozen=True):
    """An image in itself. The cluster fetches nothing, and keeps no files."""

    type: Literal["base64"]
    data: Text
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]


class ImageBlock(msgspec.Struct, tag_field="type", tag="image", frozen=True):
    """An image."""

    source: ImageSource


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", frozen=True):
    """What the model thought."""

    thinking: str


class HiddenThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", frozen=True):
    """What the model thought, unreadable here: ignored."""


class CallBlock(msgspec.Struct, tag_field="type", tag="tool_use", frozen=True):
    """One call of a tool, as an earlier answer asked for it."""

    id: Text
    name: Text
    input: dict[str, Any]


class ResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", frozen=True):
    """What came of a call."""

    tool_use_id: Text
    content: str | Annotated[list[TextBlock | ImageBlock], msgspec.Meta(max_length=MOST_PARTS)] | None = None
    is_error: bool | None = None
    """Ignored: no template knows it."""


InputBlock = TextBlock | ImageBlock | ThinkingBlock | HiddenThinkingBlock | CallBlock | ResultBlock


class Turn(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], msgspec.Meta(max_length=MOST_PARTS)]


Messages = Annotated[list[Turn], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
System = str | Annotated[list[TextBlock], msgspec.Meta(max_length=MOST_PARTS)]


def convert_messages(system: System | None, messages: Sequence[Turn]) -> Iterator[Utterance]:
    """Yield the messages in the engines' form; raise InvalidInput for a block in the wrong message."""
    if system:
        yield Utterance("system", system if isinstance(system, str) else _join_texts(system))
    for number, message in enumerate(messages):
        if isinstance(message.content, str):
            yield Utterance(message.role, message.content)
        else:
            yield from _convert_message(message.role, message.content, f"messages[{number}].content")


_ASSISTANT_BLOCKS = (CallBlock, ThinkingBlock, HiddenThinkingBlock)
_USER_BLOCKS = (ResultBlock, ImageBlock)


def _convert_message(role: str, blocks: Sequence[InputBlock], field_path: str) -> Iterator[Utterance]:
    misplaced = _USER_BLOCKS if role == "assistant" else _ASSISTANT_BLOCKS
    for index, block in enumerate(blocks):
        if isinstance(block, misplaced) or (role == "system" and not isinstance(block, TextBlock)):
            raise wrong(
                f"{field_path}[{index}]", f"this kind of block is not for messages of the role {role}"
            )
    if role == "assistant":
        yield _assistant_message(blocks)
        return
    yield from (_tool_message(block) for block in blocks if isinstance(block, ResultBlock))
    if any(not isinstance(block, ResultBlock) for block in blocks) or not blocks:
        yield Utterance(role, _join_texts(blocks))


def _assistant_message(blocks: Sequence[InputBlock]) -> Utterance:
    calls = [
        ToolCall(block.id, CalledFunction(block.name, encode_json(block.input)))
        for block in blocks
        if isinstance(block, CallBlock)
    ]
    return Utterance(
        "assistant",
        _join_texts(blocks),
        reasoning="\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)),
        tool_calls=encode_json(calls) if calls else "",
    )


def _tool_message(block: ResultBlock) -> Utterance:
    content = block.content or ""
    text = content if isinstance(content, str) else _join_texts(content)
    return Utterance("tool", text, tool_call_id=block.tool_use_id)


def _join_texts(blocks: Sequence[InputBlock]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def collect_images(messages: Sequence[Turn]) -> tuple[str, ...]:
    """Return the base64 data of all images, tool results included; raise InvalidInput for a broken image."""
    return tuple(
        openai_messages.check_base64(image.source.data, field_path)
        for number, message in enumerate(messages)
        if isinstance(message.content, list)
        for image, field_path in _images(message.content, f"messages[{number}].content")
    )


def _images(blocks: Sequence[InputBlock], field_path: str) -> Iterator[tuple[ImageBlock, str]]:
    for index, block in enumerate(blocks):
        if isinstance(block, ImageBlock):
            yield block, f"{field_path}[{index}]"
        elif isinstance(block, ResultBlock) and isinstance(block.content, list):
            yield from _images(block.content, f"{field_path}[{index}].content")
