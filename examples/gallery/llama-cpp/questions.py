"""A request of the contract (`PredictOptions`), as a request to llama.cpp. Pure: nothing here runs a model.

Start reading at `of`. A zero counts as "not set" unless zero is a meaningful value (README.md: every field).
Tools go to the model's own template if that has a place for them; if not, the model answers in words.
llama.cpp does not make sure that a forced tool is called, so this module does: a system message shows the
tools, and the answer is bound to the arguments of the named tool, or to a list of calls.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from localai_backend import Invalid, pb

MAX_LOGPROBS = 20
MAX_CALLS = 16
MAX_GRAMMAR = 256 * 1024
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
    named: str = ""
    """The tool that must be called; the answer is its arguments."""
    calls: bool = False
    """Whether the answer is a list of calls."""


def of(options: pb.PredictOptions, facts: Facts) -> Question:
    """The request, checked; raises Invalid."""
    chat = options.UseTokenizerTemplate and len(options.Messages) > 0
    body = _sampling(options)
    _logprobs(body, options, chat=chat)
    named, calls = "", False
    if chat:
        if not facts.template:
            raise Invalid("this model's file has no chat template; the definition must bring one")
        body["messages"] = _messages(options)
        named, calls = _tools(body, options, facts)
        if text := options.Metadata.get("chat_template_kwargs"):
            body["chat_template_kwargs"] = _json(text, dict, "Metadata.chat_template_kwargs")
    elif options.Images or options.Audios or options.Videos:
        raise Invalid("media need messages and the model's own template")
    else:
        body["prompt"] = options.Prompt
    grammar = options.Metadata.get("json_schema") or options.Grammar
    if grammar and "grammar" not in body:
        body["grammar"] = _grammar(grammar)
    return Question(body, chat, options.TopLogprobs if chat else body.get("logprobs", 0), named, calls)


def template(asked: Question) -> Body:
    """What the model's template makes a prompt of."""
    names = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
    return {name: asked.body[name] for name in names if name in asked.body}


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
        # Only so llama.cpp says at the end which stop word it has found.
        "verbose": bool(options.StopPrompts),
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
    if wanted > MAX_LOGPROBS:
        raise Invalid(f"TopLogprobs is {wanted}; at most {MAX_LOGPROBS} are possible")
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


def _tools(body: Body, options: pb.PredictOptions, facts: Facts) -> tuple[str, bool]:
    """Puts the tools into the request; returns the tool that it forces, and whether it forces any calls."""
    # A grammar decides the whole answer, so there is no call to be made beside it.
    if not options.Tools or options.Grammar:
        return "", False
    listed = _json(options.Tools, list, "Tools")
    tools = {tool.name: tool for tool in map(_tool, listed)}
    kind, name = _choice(options.ToolChoice)
    if name and name not in tools:
        raise Invalid(f"ToolChoice names {name!r}, which is not among the tools")
    parallel = options.Metadata.get("parallel_tool_calls")
    if kind == "required":
        shown = [one for one in listed if not name or _tool(one).name == name]
        most = 1 if parallel == "false" else MAX_CALLS
        body["messages"] = _shown(body["messages"], shown, _ARGUMENTS if name else _CALLS)
        body["grammar"] = _of_schema(tools[name].parameters) if name else _of_calls(tools.values(), most)
        # Nothing may cut a call.
        body |= {"stop": [], "verbose": False}
        return name, not name
    if kind == "auto":
        if not facts.tools:
            raise Invalid(
                "Tools: the template of this model has no place for them; it can only be made to call one"
            )
        body["tools"] = listed
        if parallel:
            body["parallel_tool_calls"] = parallel == "true"
    return "", False


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
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise Invalid(f"Tools: the parameters of {name!r} are not the JSON schema of an object")
    return Tool(name, {"type": "object", **parameters})


_ARGUMENTS = "Answer only with what is needed for the call."
_CALLS = (
    'Answer with a JSON list of calls, [{"name": ..., "arguments": {...}}], one for each thing that is asked'
    " for, and no more."
)


def _shown(messages: list[Body], tools: list[Any], end: str) -> list[Body]:
    """The messages with the tools in the system message."""
    text = (
        "You call functions instead of answering in words. These exist, described in JSON:\n"
        f"{json.dumps(tools, ensure_ascii=False)}\n{end}"
    )
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    return [first, *messages[1:]]


def _grammar(text: str) -> str:
    """GBNF as it is; a JSON object is the JSON schema of the answer."""
    if len(text) > MAX_GRAMMAR:
        raise Invalid(f"Grammar has more than {MAX_GRAMMAR} characters")
    if text.lstrip().startswith("{"):
        return _of_schema(_json(text, dict, "Grammar"))
    return _checked(text) if text.startswith("%llguidance") else text


_CHOICES = ("anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_BESIDE_REFERENCES = frozenset({*_DEFINITIONS, "title", "description", "default", "examples"})
_MEMBERS = ("properties", "patternProperties", "required", "additionalProperties")


class _Closing:
    """Closes the objects of a schema, as the cluster's GBNF does for engines that read no schemas.

    An object with named members has no others unless it says so: a small model would invent some. What
    combines several schemas (`allOf`, a reference or a choice beside members) is closed as a whole, since
    each alone would shut out the members of the others.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    def whole(self) -> Body:
        """The closed schema."""
        closed = self._of(self._schema)
        for name in _DEFINITIONS:
            if isinstance(self._schema.get(name), Mapping):
                closed[name] = {key: self._of(part) for key, part in self._schema[name].items()}
        return closed

    def _of(self, part: Any) -> Any:
        if not isinstance(part, Mapping) or ("$ref" in part and part.keys() - {"$ref"} <= _BESIDE_REFERENCES):
            return part
        parts = self._parts(part, ())
        for number, one in enumerate(parts):
            for name in _CHOICES:
                others = [*parts[:number], _without(one, name), *parts[number + 1 :]]
                if one.get(name) and any(member in other for other in others for member in _MEMBERS):
                    return {name: [self._of({"allOf": [*others, option]}) for option in one[name]]}
        extra = [one["additionalProperties"] for one in parts if "additionalProperties" in one]
        names = [
            *(name for one in parts for name in one.get("properties") or ()),
            *(name for one in parts for name in one.get("required") or ()),
        ]
        made = [self._inside(one) for one in parts]
        closed: Body = made[0] if len(made) == 1 else {"allOf": made}
        closes = names or any("properties" in one or "patternProperties" in one for one in parts)
        if closes or extra:
            closed["properties"] = {name: {} for name in names} | closed.get("properties", {})
            closed["additionalProperties"] = self._of(extra[-1]) if extra else False
            if not any("type" in one for one in parts):
                closed["type"] = "object"
        return closed

    def _parts(self, part: Mapping[str, Any], seen: tuple[str, ...]) -> list[Mapping[str, Any]]:
        """The schema without `allOf` and references: what all of these demand."""
        rest = {name: value for name, value in part.items() if name not in ("allOf", "$ref", *_DEFINITIONS)}
        combined = [rest, *(part.get("allOf") or ())]
        if isinstance(reference := part.get("$ref"), str):
            if reference in seen:
                return [{"$ref": reference}]
            combined.insert(0, self._target(reference))
            seen = (*seen, reference)
        if len(combined) == 1:
            return [rest]
        found = [one for some in combined if isinstance(some, Mapping) for one in self._parts(some, seen)]
        return [one for one in found if one] or [rest]

    def _target(self, reference: str) -> Any:
        target: Any = self._schema
        for name in reference.removeprefix("#").split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        return target if isinstance(target, Mapping) else {"$ref": reference}

    def _inside(self, part: Mapping[str, Any]) -> Body:
        """One of the parts with what is inside of it closed; who may be beside it is for all of them."""
        closed = _without(part, "additionalProperties")
        for name in ("properties", "patternProperties"):
            if isinstance(part.get(name), Mapping):
                closed[name] = {key: self._of(value) for key, value in part[name].items()}
        for name in ("prefixItems", *_CHOICES):
            if isinstance(part.get(name), list):
                closed[name] = [self._of(one) for one in part[name]]
        if "items" in part:
            closed["items"] = self._of(part["items"])
        return closed


def _without(part: Mapping[str, Any], name: str) -> Body:
    return {key: value for key, value in part.items() if key != name}


def _of_schema(schema: Mapping[str, Any]) -> str:
    return _checked(f"%llguidance {{}}\nstart: {_rule(schema)}")


def _of_calls(tools: Iterable[Tool], most: int) -> str:
    """The grammar of a list of calls, which `answers` takes apart. Each schema has references of its own."""
    lines, options = [], []
    for number, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.name)}, "arguments": '
        lines.append(f'call_{number}: {json.dumps(opening)} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: {_rule(tool.parameters)}")
        options.append(f"call_{number}")
    further = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
    start = f'start: "[" call{further} "]"'
    return _checked("\n".join(["%llguidance {}", start, f"call: {' | '.join(options)}", *lines]))


def _rule(schema: Mapping[str, Any]) -> str:
    # Free to write spaces, a small model may write nothing else until its tokens are spent.
    compact = {
        **_Closing(schema).whole(),
        "x-guidance": {"whitespace_flexible": False, "key_separator": ": "},
    }
    return f"%json {json.dumps(compact)}"


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
