"""The input of OpenAI's Responses: items, and what an engine is told of them. Pure.

A conversation is a list of items of several kinds. Calls that follow one another, and what the model thought
and said before them, are one message to an engine. What only OpenAI's servers could read is ignored.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from localai_cluster.web.wire import wrong
from nodes.inference import openai_messages
from nodes.inference.generation import Utterance
from nodes.inference.openai_messages import MOST_MESSAGES, MOST_PARTS, CalledFunction, ToolCall
from nodes.inference.tools import as_json


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


def said(instructions: str | None, asked: str | Sequence[Item]) -> Iterator[Utterance]:
    """The messages as engines know them; raises InvalidInput for an item that lacks something."""
    if instructions:
        yield Utterance("system", instructions)
    if isinstance(asked, str):
        yield Utterance("user", asked)
        return
    answer: list[Item] = []
    for number, item in enumerate(asked):
        for name in _NEEDED[item.type]:
            if getattr(item, name) is None:
                raise wrong(f"input[{number}].{name}", f"an item of the type {item.type} needs it")
        own = item.type in ("function_call", "reasoning") or item.role == "assistant"
        if not own or _begins_another(item, answer):
            yield from _answer(answer)
            answer = []
        if own:
            answer.append(item)
        else:
            yield _other(item)
    yield from _answer(answer)


def _begins_another(item: Item, answer: Sequence[Item]) -> bool:
    """Whether it is a message of another answer than these items: only thoughts go before one."""
    return item.type == "message" and any(one.type != "reasoning" for one in answer)


def _other(item: Item) -> Utterance:
    if item.type == "function_call_output":
        return Utterance("tool", _text(item.output), tool_call_id=item.call_id or "")
    return Utterance("user" if item.role == "user" else "system", _text(item.content))


def _answer(items: Sequence[Item]) -> Iterator[Utterance]:
    """The message that the items of one earlier answer make; thoughts alone make none."""
    calls = [
        ToolCall(item.call_id or "", CalledFunction(item.name or "", item.arguments or ""))
        for item in items
        if item.type == "function_call"
    ]
    if any(item.type != "reasoning" for item in items):
        yield Utterance(
            "assistant",
            "".join(_text(item.content) for item in items if item.type == "message"),
            reasoning="\n".join(_text(item.content) for item in items if item.type == "reasoning"),
            tool_calls=as_json(calls) if calls else "",
        )


def _text(content: Contents | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = (part.text if part.text is not None else part.refusal for part in content)
    return "\n".join(text for text in texts if text is not None)


def images(asked: str | Sequence[Item]) -> tuple[str, ...]:
    """Base64 of the images; raises InvalidInput for one that is not in the request itself, or broken."""
    if isinstance(asked, str):
        return ()
    return tuple(
        openai_messages.image_of(part.image_url or "", f"input[{number}].{name}[{place}]")
        for number, item in enumerate(asked)
        for name, content in (("content", item.content), ("output", item.output))
        if isinstance(content, list)
        for place, part in enumerate(content)
        if part.type == "input_image"
    )
