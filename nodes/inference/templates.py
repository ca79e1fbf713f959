"""Prompts made by the Jinja template of a model's definition; without one the engine uses the model's own.

A template is run in a sandbox, on a thread of its own, and held to a size and a time: it comes with a
definition, and those come from galleries.
"""

import asyncio
from collections.abc import Iterator, Mapping
from functools import lru_cache
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
"""Seconds that a template may take; looked at whenever it writes something."""


class TemplateUnusable(ClusterError):
    """The chat template of the model's definition cannot be used."""

    code = "template_unusable"


_FAILURES = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError)


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
        return "".join(_bounded(_compiled(source).generate(values)))
    except _Refused as error:
        raise InvalidInput(f"messages: {error}", field="messages") from error
    except _FAILURES as error:
        raise TemplateUnusable(f"the chat template of the model's definition fails: {error}") from error


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    size, until = 0, clock.monotonic() + LONGEST
    for piece in pieces:
        size += len(piece)
        if size > LARGEST_PROMPT or clock.monotonic() > until:
            raise InvalidInput("messages: the model's template makes too much of them", field="messages")
        yield piece


def _message(said: Utterance) -> Mapping[str, Any]:
    message: dict[str, Any] = {"role": said.role, "content": said.content}
    if said.name:
        message["name"] = said.name
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


@lru_cache(maxsize=1)
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    # As templates of models expect it.
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = lambda value, indent=None: orjson.dumps(
        value, option=orjson.OPT_INDENT_2 if indent else None
    ).decode()
    return made
