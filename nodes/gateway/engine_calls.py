"""Conversion between a generation and an engine: the options of a call, and the engine's replies. Pure.

`docs/inference.md` documents each field for authors of engines.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.errors import Rejected
from localai_cluster.rpc.messages import Message, PredictOptions, Reply
from nodes.definitions.files import Definition
from nodes.gateway import gbnf
from nodes.gateway.generation import Conversation, Generation, Sampling, TextDelta, ToolPiece, Usage

CACHED_TOKENS = "localai-cached-tokens"
FINISH_REASON = "localai-finish-reason"
"""Trailing metadata in which an engine may report the number of cached prompt tokens and the finish
reason.
"""
_COUNT = re.compile("[0-9]{1,10}")
_REASONS = ("stop", "length", "tool_calls")
"""The accepted finish reasons; clients handle no others. `_COUNT` is the accepted form of a token count."""
SCHEMA = "json_schema"
"""Request metadata: the schema that `Grammar` was compiled from, for engines that read schemas themselves."""
_DEFAULTS: Mapping[str, float | int] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "typical_p": 1.0}
"""The reference's values for options that neither the request nor the definition sets."""
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
"""The reference's value for a random seed, in definitions and in requests."""
_REQUEST_FIELDS = {
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
"""Field names in requests, by the name that an engine's error message may start with."""


class LogprobsUnsupported(InvalidInput):
    """The model's engine does not tell log probabilities."""

    message = "The model's engine does not tell log probabilities."
    code = "unsupported_by_backend"


def sampling_options(
    sampling: Sampling, definition: Definition, request_id: str, seed: int
) -> PredictOptions:
    """Return the options common to all calls of a request; `seed` is the default seed."""
    defaults = {**_DEFAULTS, "seed": seed, **definition.answering.defaults}
    options = PredictOptions(
        ModelIdentity=definition.model,
        CorrelationId=request_id,
        StopPrompts=dict.fromkeys((*sampling.stop, *definition.answering.stop)),
        IgnoreEOS=sampling.ignore_eos,
        Logprobs=int(sampling.logprobs),
        TopLogprobs=sampling.top_logprobs,
        LogitBias=orjson.dumps(dict(sampling.logit_bias)).decode() if sampling.logit_bias else "",
        # Constants that the reference always sends.
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
        requested = getattr(sampling, name, None)
        value = defaults.get(name) if requested is None else requested
        if value is not None:
            setattr(options, field, value)
    requested_seed = defaults["seed"] if sampling.seed is None else sampling.seed
    options.Seed = int(seed if requested_seed == _ANY_SEED else requested_seed) & _LARGEST_SEED
    return options


def with_prompt(options: PredictOptions, prompt: Conversation | str, answer: int) -> PredictOptions:
    """Return the options of the `answer`-th call for this prompt. Each call has a different seed."""
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
            role=message.role,
            content=message.content,
            name=message.name,
            tool_call_id=message.tool_call_id,
            reasoning_content=message.reasoning,
            tool_calls=message.tool_calls,
        )
        for message in prompt.messages
    )
    call.Tools, call.ToolChoice = prompt.tools, prompt.tool_choice
    if prompt.parallel_tool_calls is not None:
        call.Metadata["parallel_tool_calls"] = "true" if prompt.parallel_tool_calls else "false"
    return call


def named(refusal: InvalidInput, generation: Generation) -> InvalidInput:
    """Return the refusal with its field renamed to the client's name for it.

    An engine's refusal concerns the field whose name starts its text, else the prompt, for example if the
    prompt is too long.
    """
    field = refusal.field
    if isinstance(refusal, Rejected):
        prompt = "messages" if isinstance(generation.prompts[0], Conversation) else "prompt"
        field = _REQUEST_FIELDS.get(re.split(r"\W", refusal.message, maxsplit=1)[0], prompt)
    if field:
        refusal.field = generation.names.get(field, field)
    return refusal


class Reading:
    """Converts the replies of one call into deltas, in order.

    An engine that parses its own output sends it as `chat_deltas`; from the first of them on, the raw text of
    the replies is ignored. A character may be split across two replies.
    """

    def __init__(self, choice: int, sampling: Sampling, limit: int) -> None:
        self._choice = choice
        self._wants_logprobs = sampling.logprobs
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_parsed = self._has_calls = self._has_sent_logprobs = False
        self._prompt = self._completion = 0

    def delta(self, reply: Reply) -> TextDelta | None:
        """Return the new content of the reply; None if it has none."""
        self._prompt = max(self._prompt, reply.prompt_tokens)
        self._completion = max(self._completion, reply.tokens)
        self._is_parsed = self._is_parsed or bool(reply.chat_deltas)
        text = "" if self._is_parsed else self._decoder.decode(reply.message)
        if not (self._is_parsed or self._wants_logprobs):
            # Fast path for nearly every token: reading all fields takes twice as long as everything else.
            return TextDelta(self._choice, text) if text else None
        text += "".join(part.content for part in reply.chat_deltas)
        reasoning = "".join(part.reasoning_content for part in reply.chat_deltas)
        tools = tuple(
            ToolPiece(piece.index, piece.id, piece.name, piece.arguments)
            for part in reply.chat_deltas
            for piece in part.tool_calls
        )
        logprobs = _logprobs(reply.logprobs) if self._wants_logprobs and reply.logprobs else ()
        self._has_calls = self._has_calls or bool(tools)
        if not (text or reasoning or tools or logprobs):
            return None
        if self._wants_logprobs and text and not (logprobs or self._has_sent_logprobs):
            raise LogprobsUnsupported(field="logprobs")
        self._has_sent_logprobs = self._has_sent_logprobs or bool(logprobs)
        return TextDelta(self._choice, text, reasoning, tools, logprobs)

    def last(self, cached: str = "", finish: str = "") -> TextDelta:
        """Return the final delta of the choice, with the engine's cached tokens and finish reason."""
        text = "" if self._is_parsed else self._decoder.decode(b"", final=True)
        cached_count = min(int(cached), self._prompt) if _COUNT.fullmatch(cached) else None
        usage = Usage(self._prompt, self._completion, cached_count)
        finish_reason = finish if finish in _REASONS else self._finish()
        return TextDelta(self._choice, text, finish=finish_reason, usage=usage)

    def _finish(self) -> str:
        if self._has_calls:
            return "tool_calls"
        return "length" if 0 < self._limit <= self._completion else "stop"


def _logprobs(raw: bytes) -> tuple[Mapping[str, Any], ...]:
    """Parse log probabilities in OpenAI's form, as the contract specifies; skip everything else."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return ()
    content = document.get("content") if isinstance(document, dict) else document
    return tuple(
        token | {"top_logprobs": [alternative for alternative, _ in _tokens(entry.get("top_logprobs"))]}
        for token, entry in _tokens(content)
    )


def _tokens(listed: object) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield each token of a list, without its alternatives, and the engine's original entry."""
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or "token" not in entry:
            continue
        token, logprob = str(entry["token"]), entry.get("logprob") or 0.0
        if isinstance(logprob, int | float):
            token_bytes = entry.get("bytes") or list(token.encode())
            yield {"token": token, "logprob": float(logprob), "bytes": token_bytes}, entry
