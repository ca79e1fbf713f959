"""A request of the contract (`PredictOptions`), as a request to llama.cpp. Pure: nothing here runs a model.

Start reading at `of`. A zero counts as "not set" unless zero is a meaningful value (README.md: every field).
Tools go to the model's own template if that has a place for them; if not, the model answers in words.
llama.cpp does not make sure that a forced tool is called, so this module does: a system message shows the
tools, and the answer is bound to the schema of the tool's arguments.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localai_backend import Invalid, pb

MOST_LOGPROBS = 20
MOST_GRAMMAR = 256 * 1024
"""Characters: llama.cpp repeats a grammar that it cannot read in the log."""

Body = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What the loaded model's template can do."""

    template: bool
    tools: bool


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A request that llama.cpp understands."""

    body: Body
    chat: bool
    """Whether it has messages, or a prompt."""
    top_logprobs: int
    forced: list[Tool] = field(default_factory=list)
    """The answer must be the arguments of one of these; the body does not say so yet."""


def of(options: pb.PredictOptions, facts: Facts) -> Question:
    """The request, checked; raises Invalid."""
    chat = options.UseTokenizerTemplate and len(options.Messages) > 0
    body = _sampling(options)
    _logprobs(body, options, chat=chat)
    forced: list[Tool] = []
    if chat:
        if not facts.template:
            raise Invalid("this model's file has no chat template; the definition must bring one")
        body["messages"] = _messages(options)
        forced = _tools(body, options, facts)
        if text := options.Metadata.get("chat_template_kwargs"):
            body["chat_template_kwargs"] = _json(text, dict, "Metadata.chat_template_kwargs")
    elif options.Images or options.Audios or options.Videos:
        raise Invalid("media need messages and the model's own template")
    else:
        body["prompt"] = options.Prompt
    if not forced and (grammar := options.Metadata.get("json_schema") or options.Grammar):
        body["grammar"] = _grammar(grammar)
    return Question(body, chat, options.TopLogprobs if chat else body.get("logprobs", 0), forced)


def template(asked: Question) -> Body:
    """What the model's template makes a prompt of."""
    names = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
    return {name: asked.body[name] for name in names if name in asked.body}


def bound(body: Body, schema: Mapping[str, Any]) -> Body:
    """The same request with an answer that follows this JSON schema, and nothing that could cut it."""
    return {**body, "grammar": _of_schema(schema), "stop": []}


def _sampling(options: pb.PredictOptions) -> Body:
    body: Body = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings_per_token": True,
        # A message after every batch of the prompt: a cancelled request can end only there.
        "return_progress": True,
        "max_tokens": options.Tokens if options.Tokens > 0 else -1,
        "temperature": options.Temperature,
        "top_k": options.TopK,
        "min_p": options.MinP,
        "seed": options.Seed,
        "frequency_penalty": options.FrequencyPenalty,
        "presence_penalty": options.PresencePenalty,
        "ignore_eos": options.IgnoreEOS,
        "n_keep": options.NKeep,
        "cache_prompt": options.PromptCacheAll,
        "stop": list(options.StopPrompts),
    }
    said_if_not_zero = {
        "top_p": options.TopP,
        "typical_p": options.TypicalP,
        "repeat_last_n": options.Repeat,
        "repeat_penalty": options.Penalty,
    }
    body |= {name: value for name, value in said_if_not_zero.items() if value}
    if options.Mirostat:
        names = {"mirostat": "Mirostat", "mirostat_tau": "MirostatTAU", "mirostat_eta": "MirostatETA"}
        body |= {name: getattr(options, field) for name, field in names.items()}
    if options.LogitBias:
        body["logit_bias"] = _json(options.LogitBias, dict, "LogitBias")
    return body


def _logprobs(body: Body, options: pb.PredictOptions, *, chat: bool) -> None:
    wanted = max(options.TopLogprobs, 0 if chat else options.Logprobs)
    if wanted > MOST_LOGPROBS:
        raise Invalid(f"TopLogprobs is {wanted}; at most {MOST_LOGPROBS} are possible")
    if options.Logprobs <= 0:
        return
    # llama.cpp tells none at all when it is asked for 0 alternatives; `answers` cuts them off again.
    if chat:
        body |= {"logprobs": True, "top_logprobs": max(1, wanted)}
    else:
        body["logprobs"] = wanted


def _messages(options: pb.PredictOptions) -> list[Body]:
    messages = []
    for one in options.Messages:
        message: Body = {"role": one.role, "content": one.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if value := getattr(one, name):
                message[name] = value
        if one.tool_calls:
            message["tool_calls"] = _json(one.tool_calls, list, "Messages.tool_calls")
        messages.append(message)
    if media := _media(options):
        users = [message for message in messages if message["role"] == "user"]
        if not users:
            raise Invalid("media need a message of the user")
        users[-1]["content"] = [{"type": "text", "text": users[-1]["content"]}, *media]
    return messages


def _media(options: pb.PredictOptions) -> list[Body]:
    if options.Videos:
        raise Invalid("this engine does not offer videos")
    if any("://" in image for image in options.Images):
        raise Invalid("Images are data, not addresses: this engine fetches nothing")
    urls = [
        image if image.startswith("data:") else f"data:image/jpeg;base64,{image}" for image in options.Images
    ]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    sounds = [
        {"type": "input_audio", "input_audio": {"data": audio, "format": "wav"}} for audio in options.Audios
    ]
    return pictures + sounds


def _tools(body: Body, options: pb.PredictOptions, facts: Facts) -> list[Tool]:
    """Puts the tools into the request; returns those that the engine itself must force."""
    # A grammar decides the whole answer, so there is no call to be made beside it.
    if not options.Tools or options.Grammar:
        return []
    listed = _json(options.Tools, list, "Tools")
    tools = {tool.name: tool for tool in map(_tool, listed)}
    kind, name = _choice(options.ToolChoice)
    if name and name not in tools:
        raise Invalid(f"ToolChoice names {name!r}, which is not among the tools")
    if kind == "required":
        wanted = [name] if name else list(tools)
        body["messages"] = _shown(body["messages"], [one for one in listed if _tool(one).name in wanted])
        return [tools[name] for name in wanted]
    if kind == "auto":
        if not facts.tools:
            raise Invalid(
                "Tools: the template of this model has no place for them; it can only be made to call one"
            )
        body["tools"] = listed
    return []


def _choice(text: str) -> tuple[str, str]:
    """(`auto`, `none` or `required`, the one tool that is required)."""
    try:
        choice = json.loads(text) if text else "auto"
    except ValueError:
        choice = text
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if isinstance(name, str) and name:
            return "required", name
    elif choice in ("auto", "none", "required"):
        return choice, ""
    raise Invalid(f"ToolChoice {text!r} is none of auto, none, required and a function")


def _tool(one: object) -> Tool:
    function = one.get("function", one) if isinstance(one, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise Invalid("Tools has an entry without the name of a function")
    parameters = function.get("parameters") or {"type": "object", "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise Invalid(f"Tools: the parameters of {name!r} are not a JSON schema")
    return Tool(name, parameters)


def _shown(messages: list[Body], tools: list[Any]) -> list[Body]:
    """The messages with the tools in the system message."""
    text = (
        "You call functions instead of answering in words. These exist, described in JSON:\n"
        f"{json.dumps(tools, ensure_ascii=False)}\nAnswer only with what is needed for the call."
    )
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    return [first, *messages[1:]]


def _grammar(text: str) -> str:
    """GBNF as it is; a JSON object is the JSON schema of the answer."""
    if len(text) > MOST_GRAMMAR:
        raise Invalid(f"Grammar has more than {MOST_GRAMMAR} characters")
    if text.lstrip().startswith("{"):
        return _of_schema(_json(text, dict, "Grammar"))
    return _checked(text) if text.startswith("%llguidance") else text


_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
_NAMED = ("properties", "$defs", "definitions")
_INSIDE = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")


def _closed(part: Any) -> Any:
    """The schema, whose objects with named properties have no others unless it says so.

    A small model would invent some. What combines several schemas stays as it is: each would shut out the
    properties of the others.
    """
    if isinstance(part, list):
        return [_closed(one) for one in part]
    if not isinstance(part, Mapping):
        return part
    closed = dict(part)
    for name in _NAMED:
        if isinstance(part.get(name), Mapping):
            closed[name] = {key: _closed(value) for key, value in part[name].items()}
    combines = any(name in part for name in _COMBINING)
    has_properties = bool(part.get("properties"))
    for name in _INSIDE:
        if name in part and not (has_properties and name in _COMBINING):
            closed[name] = _closed(part[name])
    if has_properties and not combines and "patternProperties" not in part:
        closed.setdefault("additionalProperties", False)
    return closed


def _of_schema(schema: Mapping[str, Any]) -> str:
    # Free to write spaces, a small model may write nothing else until its tokens are spent.
    compact = {**_closed(schema), "x-guidance": {"whitespace_flexible": False, "key_separator": ": "}}
    return _checked(f"%llguidance {{}}\nstart: %json {json.dumps(compact)}")


def _checked(grammar: str) -> str:
    # llama.cpp only logs what it cannot compile of these, and lets the model say anything.
    from llguidance import LLMatcher

    if refused := LLMatcher.validate_grammar(grammar):
        reason = refused.strip().splitlines()[0]
        raise Invalid(f"Grammar: {reason.partition('JSON schema: ')[2] or reason}")
    return grammar


def _json(text: str, kind: type, name: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Invalid(f"{name} is not JSON") from None
    if not isinstance(value, kind):
        raise Invalid(f"{name} is not a JSON {'object' if kind is dict else 'list'}")
    return value
