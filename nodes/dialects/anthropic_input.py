"""The input of Anthropic's Messages: conversion of a conversation's blocks to messages for engines. Pure.

A user's message may hold tool results, which engines expect as separate messages. Prompt caching
(`cache_control`), sources of texts and signatures of thoughts are ignored. Calls of tools on Anthropic's
servers in earlier answers are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec

from localai_cluster.web.wire import field_error
from nodes.dialects import openai_messages
from nodes.dialects.openai_common import Text
from nodes.dialects.openai_messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    CalledFunction,
    ToolCall,
    encode_json,
)
from nodes.gateway.generation import (
    ConversationMessage,
)


class TextBlock(msgspec.Struct, tag_field="type", tag="text", frozen=True):
    """A block of text."""

    text: str


class ImageSource(msgspec.Struct, frozen=True):
    """An image inside the request, in base64. The cluster fetches nothing, so it refuses other types."""

    type: Literal["base64", "url", "file"]
    data: str | None = None
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None


class ImageBlock(msgspec.Struct, tag_field="type", tag="image", frozen=True):
    """A block with an image."""

    source: ImageSource


class DocumentSource(msgspec.Struct, frozen=True):
    """A document inside the request: plain text, or blocks of text. Other kinds are refused."""

    type: Literal["text", "content", "base64", "url", "file"]
    data: str | None = None
    content: str | Annotated[list[TextBlock], msgspec.Meta(max_length=MAX_PARTS)] | None = None


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document", frozen=True):
    """A block with a document, which engines get as text."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """The text of the document, preceded by its title and context."""
        source = self.source
        if source.content is None or isinstance(source.content, str):
            body = source.content or source.data or ""
        else:
            body = "\n".join(block.text for block in source.content)
        return "\n".join(part for part in (self.title, self.context, body) if part)


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", frozen=True):
    """A block with the model's reasoning in an earlier answer."""

    thinking: str


class HiddenThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", frozen=True):
    """A block with the model's encrypted reasoning, which is ignored."""


class CallBlock(msgspec.Struct, tag_field="type", tag="tool_use", frozen=True):
    """A block with a tool call that the model requested in an earlier answer."""

    id: Text
    name: Text
    input: dict[str, Any]


class ResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", frozen=True):
    """A block with the result of a tool call."""

    tool_use_id: Text
    content: (
        str
        | Annotated[list[TextBlock | ImageBlock | DocumentBlock], msgspec.Meta(max_length=MAX_PARTS)]
        | None
    ) = None
    is_error: bool | None = None
    """True if the tool failed. The value is ignored, because no chat template uses it."""


InputBlock = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | HiddenThinkingBlock | CallBlock | ResultBlock
)


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[InputBlock], msgspec.Meta(max_length=MAX_PARTS)]


_BLOCK_TYPES = frozenset(block.__struct_config__.tag for block in get_args(InputBlock))


def drop_unknown_blocks(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a request without blocks that only Anthropic's servers can read.

    Such blocks are calls of tools that Anthropic runs, for example `server_tool_use`, and their results.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    return {**fields, "messages": [_without_unknown_blocks(message) for message in messages]}


def _without_unknown_blocks(message: Any) -> Any:
    if not (isinstance(message, dict) and message.get("role") == "assistant"):
        return message
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [block for block in content if not _is_unknown_block(block)]}


def _is_unknown_block(block: Any) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    return isinstance(kind, str) and kind not in _BLOCK_TYPES


Messages = Annotated[list[Turn], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
System = str | Annotated[list[TextBlock], msgspec.Meta(max_length=MAX_PARTS)]


def convert_messages(system: System | None, messages: Sequence[Turn]) -> Iterator[ConversationMessage]:
    """Yield the messages in the form that engines expect.

    Raise InvalidInput for a block that messages of its role cannot have.
    """
    if system:
        yield ConversationMessage("system", system if isinstance(system, str) else _join_texts(system))
    for number, message in enumerate(messages):
        if isinstance(message.content, str):
            yield ConversationMessage(message.role, message.content)
        else:
            yield from _convert_message(message.role, message.content, f"messages[{number}].content")


_ASSISTANT_BLOCKS = (CallBlock, ThinkingBlock, HiddenThinkingBlock)
_USER_BLOCKS = (ResultBlock, ImageBlock, DocumentBlock)


def _convert_message(
    role: str, blocks: Sequence[InputBlock], field_path: str
) -> Iterator[ConversationMessage]:
    misplaced = _USER_BLOCKS if role == "assistant" else _ASSISTANT_BLOCKS
    for index, block in enumerate(blocks):
        if isinstance(block, misplaced) or (role == "system" and not isinstance(block, TextBlock)):
            raise field_error(
                f"{field_path}[{index}]", f"this kind of block is not for messages of the role {role}"
            )
        _check_documents(block, f"{field_path}[{index}]")
    if role == "assistant":
        yield _assistant_message(blocks)
        return
    yield from (_tool_message(block) for block in blocks if isinstance(block, ResultBlock))
    if any(not isinstance(block, ResultBlock) for block in blocks) or not blocks:
        yield ConversationMessage(role, _join_texts(blocks))


def _check_documents(block: InputBlock, field_path: str) -> None:
    inner = block.content if isinstance(block, ResultBlock) and isinstance(block.content, list) else [block]
    for part in inner:
        if isinstance(part, DocumentBlock) and part.source.type not in ("text", "content"):
            raise field_error(
                f"{field_path}.source", "only documents of plain text are read: a source of the type text"
            )


def _assistant_message(blocks: Sequence[InputBlock]) -> ConversationMessage:
    calls = [
        ToolCall(block.id, CalledFunction(block.name, encode_json(block.input)))
        for block in blocks
        if isinstance(block, CallBlock)
    ]
    return ConversationMessage(
        "assistant",
        _join_texts(blocks),
        reasoning="\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)),
        tool_calls=encode_json(calls) if calls else "",
    )


def _tool_message(block: ResultBlock) -> ConversationMessage:
    content = block.content or ""
    text = content if isinstance(content, str) else _join_texts(content)
    return ConversationMessage("tool", text, tool_call_id=block.tool_use_id)


def _join_texts(blocks: Sequence[InputBlock]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock | DocumentBlock))


def collect_images(messages: Sequence[Turn]) -> tuple[str, ...]:
    """Return the base64 data of all images in messages and tool results.

    Raise InvalidInput for an image that is not valid base64.
    """
    return tuple(
        _image_data(image.source, field_path)
        for number, message in enumerate(messages)
        if isinstance(message.content, list)
        for image, field_path in _image_blocks(message.content, f"messages[{number}].content")
    )


def _image_data(source: ImageSource, field_path: str) -> str:
    if source.type != "base64" or source.media_type is None:
        message = "the cluster fetches nothing: an image must be inside the request, as base64"
        raise field_error(f"{field_path}.source", message)
    return openai_messages.check_base64(source.data or "", field_path)


def _image_blocks(blocks: Sequence[InputBlock], field_path: str) -> Iterator[tuple[ImageBlock, str]]:
    for index, block in enumerate(blocks):
        if isinstance(block, ImageBlock):
            yield block, f"{field_path}[{index}]"
        elif isinstance(block, ResultBlock) and isinstance(block.content, list):
            yield from _image_blocks(block.content, f"{field_path}[{index}].content")
