"""Between a generation and an engine: the options of a call, and what the engine's replies say. Pure.

What goes where is written down in `docs/inference.md`, for the author of an engine.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from localai_cluster.errors import InvalidInput
from localai_cluster.rpc.errors import Rejected
from localai_cluster.rpc.messages import Message, PredictOptions, Reply
from nodes.definitions.files import Definition
from nodes.inference import gbnf
from nodes.inference.generation import Conversation, Generation, Sampling, TextDelta, ToolPiece, Usage

CACHED_TOKENS = "localai-cached-tokens"
FINISH_REASON = "localai-finish-reason"
"""Trailing metadata by which an engine may say how much of a prompt it remembered, and why it ended."""
_COUNT = re.compile("[0-9]{1,10}")
_REASONS = ("stop", "length", "tool_calls")
"""What is believed of it: clients read no other numbers and reasons."""
SCHEMA = "json_schema"
"""Metadata of a request: the schema of which `Grammar` was made, for an engine that reads schemas itself."""
_DEFAULTS: Mapping[str, float | int] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "typical_p": 1.0}
"""What the reference sends when neither the request nor the definition says anything."""
_NUMBERS = {
    "temperature": "Temperature",
    "top_p": "TopP",
    "top_k": "TopK",
    "min_p": "MinP",
    "typical_p": "TypicalP",
    "repeat_penalty": "Penalty",
    "frequency_penalty": "FrequencyPenalty",
    "presence_penalty": "PresencePenalty",
    "max_tokens": "Tokens",
}
_LARGEST_SEED = 2**31 - 1
_ANY_SEED = -1
"""As the reference has it, in definitions and in requests."""
_ASKED_AS = {
    "Grammar": "response_format",
    "json_schema": "response_format",
    "Images": "messages",
    "Audios": "messages",
    "Messages": "messages",
    "Tools": "tools",
    "ToolChoice": "tool_choice",
    "LogitBias": "logit_bias",
    "Logprobs": "logprobs",
    "TopLogprobs": "top_logprobs",
}
"""What a client calls the fields that an engine may begin a refusal with."""


class LogprobsUnsupported(InvalidInput):
    """The model's engine does not tell log probabilities."""

    code = "unsupported_by_backend"


def sampling_options(
    sampling: Sampling, definition: Definition, request_id: str, seed: int
) -> PredictOptions:
    """What all calls of a request have in common; `seed` counts where no other is named."""
    defaults = {**_DEFAULTS, "seed": seed, **definition.answering.defaults}
    options = PredictOptions(
        ModelIdentity=definition.model,
        CorrelationId=request_id,
        StopPrompts=dict.fromkeys((*sampling.stop, *definition.answering.stop)),
        IgnoreEOS=sampling.ignore_eos,
        Logprobs=int(sampling.logprobs),
        TopLogprobs=sampling.top_logprobs,
        LogitBias=orjson.dumps(dict(sampling.logit_bias)).decode() if sampling.logit_bias else "",
        # As the reference sends them always.
        TailFreeSamplingZ=1.0,
        MirostatETA=0.1,
        MirostatTAU=5.0,
        MMap=True,
        PromptCacheAll=True,
    )
    options.Grammar = sampling.grammar
    if sampling.grammar.startswith("{"):
        options.Grammar = gbnf.of(orjson.loads(sampling.grammar))
        options.Metadata[SCHEMA] = sampling.grammar
    for name, field in _NUMBERS.items():
        asked = getattr(sampling, name, None)
        value = defaults.get(name) if asked is None else asked
        if value is not None:
            setattr(options, field, value)
    said = defaults["seed"] if sampling.seed is None else sampling.seed
    options.Seed = int(seed if said == _ANY_SEED else said) & _LARGEST_SEED
    return options


def with_prompt(options: PredictOptions, prompt: Conversation | str, answer: int) -> PredictOptions:
    """The options of one call: the answer of this number to this prompt. Each has another seed."""
    call = PredictOptions()
    call.CopyFrom(options)
    call.Seed = (options.Seed + answer) & _LARGEST_SEED
    if isinstance(prompt, str):
        call.Prompt = prompt
        return call
    call.Images.extend(prompt.images)
    call.Audios.extend(prompt.audios)
    if prompt.rendered is not None:
        call.Prompt = prompt.rendered
        return call
    call.UseTokenizerTemplate = True
    call.Messages.extend(
        Message(
            role=said.role,
            content=said.content,
            name=said.name,
            tool_call_id=said.tool_call_id,
            reasoning_content=said.reasoning,
            tool_calls=said.tool_calls,
        )
        for said in prompt.messages
    )
    call.Tools, call.ToolChoice = prompt.tools, prompt.tool_choice
    if prompt.parallel_tool_calls is not None:
        call.Metadata["parallel_tool_calls"] = "true" if prompt.parallel_tool_calls else "false"
    return call


def named(refusal: InvalidInput, asked: Generation) -> InvalidInput:
    """The same refusal with the field of the request that it is about, as the client calls it. An engine's is
    about the one whose name its text begins with, or else the prompt, such as one that is too long.
    """
    field = refusal.field
    if isinstance(refusal, Rejected):
        prompt = "messages" if isinstance(asked.prompts[0], Conversation) else "prompt"
        field = _ASKED_AS.get(re.split(r"\W", refusal.message, maxsplit=1)[0], prompt)
    if field:
        refusal.field = asked.names.get(field, field)
    return refusal


class Reading:
    """Makes deltas of the replies to one call, in order.

    An engine that parses its own output sends it as `chat_deltas`; from the first of them on, the raw text
    beside them is left out. A character may be cut between two replies.
    """

    def __init__(self, choice: int, sampling: Sampling, limit: int) -> None:
        self._choice = choice
        self._wants_logprobs = sampling.logprobs
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parsed = self._called = self._told_logprobs = False
        self._prompt = self._completion = 0

    def delta(self, reply: Reply) -> TextDelta | None:
        """What the reply adds; None if that is nothing to be told."""
        self._prompt = max(self._prompt, reply.prompt_tokens)
        self._completion = max(self._completion, reply.tokens)
        self._parsed = self._parsed or bool(reply.chat_deltas)
        text = "" if self._parsed else self._decoder.decode(reply.message)
        if not (self._parsed or self._wants_logprobs):
            # Nearly every token, and looking at all fields takes twice as long as all the rest.
            return TextDelta(self._choice, text) if text else None
        text += "".join(part.content for part in reply.chat_deltas)
        reasoning = "".join(part.reasoning_content for part in reply.chat_deltas)
        tools = tuple(
            ToolPiece(piece.index, piece.id, piece.name, piece.arguments)
            for part in reply.chat_deltas
            for piece in part.tool_calls
        )
        logprobs = _logprobs(reply.logprobs) if self._wants_logprobs and reply.logprobs else ()
        self._called = self._called or bool(tools)
        if not (text or reasoning or tools or logprobs):
            return None
        if self._wants_logprobs and text and not (logprobs or self._told_logprobs):
            raise LogprobsUnsupported(field="logprobs")
        self._told_logprobs = self._told_logprobs or bool(logprobs)
        return TextDelta(self._choice, text, reasoning, tools, logprobs)

    def last(self, cached: str = "", finish: str = "") -> TextDelta:
        """The end of the choice, with what the engine said of remembered tokens and of the reason."""
        text = "" if self._parsed else self._decoder.decode(b"", final=True)
        remembered = min(int(cached), self._prompt) if _COUNT.fullmatch(cached) else None
        usage = Usage(self._prompt, self._completion, remembered)
        ended = finish if finish in _REASONS else self._finish()
        return TextDelta(self._choice, text, finish=ended, usage=usage)

    def _finish(self) -> str:
        if self._called:
            return "tool_calls"
        return "length" if 0 < self._limit <= self._completion else "stop"


def _logprobs(raw: bytes) -> tuple[Mapping[str, Any], ...]:
    """OpenAI's form, as the contract has it; what is anything else is left out."""
    try:
        told = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return ()
    content = told.get("content") if isinstance(told, dict) else told
    return tuple(
        token | {"top_logprobs": [other for other, _ in _tokens(one.get("top_logprobs"))]}
        for token, one in _tokens(content)
    )


def _tokens(listed: object) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Each token of a list in OpenAI's form, without its alternatives, and what the engine said of it."""
    for one in listed if isinstance(listed, list) else ():
        if not isinstance(one, dict) or "token" not in one:
            continue
        token, logprob = str(one["token"]), one.get("logprob") or 0.0
        if isinstance(logprob, int | float):
            told = one.get("bytes") or list(token.encode())
            yield {"token": token, "logprob": float(logprob), "bytes": told}, one
