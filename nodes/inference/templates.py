"""Prompts made by the Jinja template of a model's definition; without one the engine uses the model's own.

A template is run in a sandbox, on a thread of its own, and held to a size and a time: it comes with a
definition, and those come from galleries. What one filter may take is not bounded (`center(10 ** 9)`).
"""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import jinja2
import jinja2.sandbox
import orjson

from localai_cluster import clock
from localai_cluster.errors import ClusterError, InvalidInput
from nodes.inference.generation import Conversation, Utterance

LARGEST_PROMPT = 32 * 1024 * 1024
"""Characters."""
LONGEST = 5.0
"""Seconds that a template may take."""
LARGEST_POWER = 64


class TemplateUnusable(ClusterError):
    """The chat template of the model's definition cannot be used."""

    code = "template_unusable"


_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError),
)
_TOO_MUCH = "the model's template makes too much of it"


class _Refused(Exception):
    """The template itself says that it cannot make a prompt of this."""


async def prompt(source: str, conversation: Conversation) -> str:
    """The prompt that the template makes; raises InvalidInput for what the template refuses."""
    return await asyncio.to_thread(_rendered, source, conversation)


def _rendered(source: str, conversation: Conversation) -> str:
    values = {
        "messages": [_message(said) for said in conversation.messages],
        "tools": orjson.loads(conversation.tools) if conversation.tools else None,
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
        "raise_exception": _raise,
    }
    try:
        with _limited_time():
            made = "".join(_bounded(_compiled(source).generate(values)))
        made.encode()  # a template can write what is no text
        return made
    except _Refused as error:
        raise InvalidInput(str(error), field="messages") from error
    except _FAILURES as error:
        raise TemplateUnusable(f"the chat template of the model's definition fails: {error}") from error


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > LARGEST_PROMPT:
            raise InvalidInput(_TOO_MUCH, field="messages")
        yield piece


@contextmanager
def _limited_time() -> Iterator[None]:
    """Ends what runs on this thread by InvalidInput, also a loop that writes nothing: Python's tracing is the
    only thing that sees each of its rounds.
    """
    until, before = clock.monotonic() + LONGEST, sys.gettrace()

    def look(frame: FrameType, event: str, told: object) -> Any:
        # Only the template's own steps are ended: an error in what Python calls between them, as when it
        # collects garbage, is swallowed, and takes the tracing with it.
        if frame.f_code.co_filename != "<template>":
            return None
        if clock.monotonic() > until:
            raise InvalidInput(_TOO_MUCH, field="messages")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _message(said: Utterance) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": said.role, "content": said.content}
    if said.name:
        message["name"] = said.name
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_call_id:
        message["tool_call_id"] = said.tool_call_id
    if said.tool_calls:
        message["tool_calls"] = orjson.loads(said.tool_calls)
    return message


def _raise(message: str) -> None:
    raise _Refused(str(message)[:500])


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Two operators could hold the whole process, by one step that no other thread can interrupt."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """What the operator makes of the two."""
        if operator == "**":
            if max(abs(left), abs(right)) > LARGEST_POWER:
                raise OverflowError(f"powers of or by more than {LARGEST_POWER}")
        elif any(hasattr(one, "__len__") for one in (left, right)):
            (length,) = (len(one) for one in (left, right) if hasattr(one, "__len__"))
            if length * max(one for one in (left, right) if isinstance(one, int)) > LARGEST_PROMPT:
                raise OverflowError("a text or a list is repeated too often")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    # As templates of models expect it.
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = lambda value, indent=None: orjson.dumps(
        value, option=orjson.OPT_INDENT_2 if indent else None
    ).decode()
    return made
