"""Text generation: the calls to one engine, their options, time limits and replies.

The first piece of a stream must arrive within the request limit, each later piece within the stall limit
(`CLUSTER_REQUEST_TIMEOUT`, `CLUSTER_STREAM_STALL`). A complete response is one piece, which saves work per
token. The request limit covers all of it, also if the engine can only stream. If the client disconnects, the
calls are cancelled.

`docs/engines.md` and `docs/inference-fields.md` document each field of a call and a reply.
"""

import asyncio
import codecs
import itertools
import random
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import orjson

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.metrics import web as metrics
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import BackendFailed, DeadlineExceeded, Rejected, Unimplemented
from localai_cluster.rpc.messages import DetokenizeRequest, Message, PredictOptions, Reply
from localai_cluster.rpc.stream_client import MAX_MESSAGE_BYTES
from nodes.definitions.files import Definition
from nodes.gateway import endpoint, gateway, gbnf, templates
from nodes.gateway.gateway import find_model
from nodes.gateway.generation import (
    Conversation,
    ConversationMessage,
    Durations,
    Generation,
    Pipe,
    Prompt,
    Sampling,
    TextDelta,
    ToolPiece,
    Usage,
)
from nodes.gateway.prefix_table import prompt_bytes, prompt_chain
from nodes.gateway.request import InferenceRequest

CACHED_TOKENS_METADATA = "localai-cached-tokens"
"""Name of the trailing metadata in which an engine may report the number of cached prompt tokens."""
FINISH_REASON_METADATA = "localai-finish-reason"
"""Name of the trailing metadata in which an engine may report the finish reason."""
STOP_WORD_METADATA = "localai-stop-word"
"""Name of the trailing metadata in which an engine may report the stop word, as a JSON string."""
_TOKEN_COUNT_PATTERN = re.compile("[0-9]{1,10}")
"""Accepted form of a token count in trailing metadata."""
_FINISH_REASONS = ("stop", "length", "tool_calls")
"""Finish reasons that an engine may report. Clients handle no others."""
SCHEMA_METADATA = "json_schema"
"""Name of the request metadata with the JSON schema of the answer.

Engines that read schemas use it instead of the grammar compiled from it.
"""
_DEFAULT_OPTIONS: Mapping[str, float | int] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 40,
    "typical_p": 1.0,
}
"""LocalAI's values of options that neither the request nor the definition sets."""
_ENGINE_FIELD_BY_OPTION = {
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
"""Field of an engine call for each numeric option."""
_MAX_SEED = 2**31 - 1
_RANDOM_SEED = -1
"""Seed that means a random seed, in definitions and in requests."""
_REQUEST_FIELD_BY_ERROR_PREFIX = {
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
"""Field of OpenAI's chat, by the engine's field name with which an error message may start."""


class LogprobsUnsupported(InvalidInput):
    """The engine of the model cannot return log probabilities."""

    message = "The model's engine does not tell log probabilities."
    code = "unsupported_by_backend"


def sampling_options(
    sampling: Sampling, definition: Definition, request_id: str, seed: int
) -> PredictOptions:
    """Return the options that all engine calls of a request share; `seed` is the default seed."""
    defaults = {**_DEFAULT_OPTIONS, "seed": seed, **definition.generation.defaults}
    options = PredictOptions(
        ModelIdentity=definition.model,
        CorrelationId=request_id,
        StopPrompts=dict.fromkeys((*sampling.stop, *definition.generation.stop)),
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
        options.Grammar = gbnf.from_schema(orjson.loads(sampling.grammar))
        options.Metadata[SCHEMA_METADATA] = sampling.grammar
    for name, field in _ENGINE_FIELD_BY_OPTION.items():
        requested = getattr(sampling, name, None)
        value = defaults.get(name) if requested is None else requested
        if value is not None:
            setattr(options, field, value)
    requested_seed = defaults["seed"] if sampling.seed is None else sampling.seed
    options.Seed = int(seed if requested_seed == _RANDOM_SEED else requested_seed) & _MAX_SEED
    return options


def with_prompt(options: PredictOptions, prompt: Conversation | str, answer: int) -> PredictOptions:
    """Return the options of engine call number `answer` for this prompt. Each call has another seed."""
    call = PredictOptions()
    call.CopyFrom(options)
    call.Seed = (options.Seed + answer) & _MAX_SEED
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


def rename_field(refusal: InvalidInput, generation: Generation) -> InvalidInput:
    """Return an engine's refusal with the client's name for the refused field.

    An engine's message may begin with the name of a field. Otherwise the refusal concerns the prompt, which
    may be too long.
    """
    field = refusal.field
    if isinstance(refusal, Rejected):
        prompt = "messages" if isinstance(generation.prompts[0], Conversation) else "prompt"
        field = _REQUEST_FIELD_BY_ERROR_PREFIX.get(re.split(r"\W", refusal.message, maxsplit=1)[0], prompt)
    if field:
        refusal.field = generation.client_field_names.get(field, field)
    return refusal


class ReplyReader:
    """Converts the replies of one engine call into deltas, in order.

    An engine that parses its own output sends `chat_deltas`. After the first of them, the raw text of replies
    is ignored. A character may be split across two replies.
    """

    def __init__(self, choice: int, sampling: Sampling, limit: int) -> None:
        self._choice = choice
        self._wants_logprobs, self._stop = sampling.logprobs, sampling.stop
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_parsed = self._has_calls = self._has_sent_logprobs = False
        self._prompt = self._completion = 0
        self._cached: int | None = None

    @property
    def usage(self) -> Usage:
        """The tokens of the prompt, and of the replies so far."""
        return Usage(self._prompt, self._completion, self._cached)

    def delta(self, reply: Reply) -> TextDelta | None:
        """Return the new content of a reply; None if there is none."""
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
        logprobs = _parse_logprobs(reply.logprobs) if self._wants_logprobs and reply.logprobs else ()
        self._has_calls = self._has_calls or bool(tools)
        if not (text or reasoning or tools or logprobs):
            return None
        if self._wants_logprobs and text and not (logprobs or self._has_sent_logprobs):
            raise LogprobsUnsupported(field="logprobs")
        self._has_sent_logprobs = self._has_sent_logprobs or bool(logprobs)
        return TextDelta(self._choice, text, reasoning, tools, logprobs)

    def last(self, cached: str = "", finish: str = "", stop_word: str = "") -> TextDelta:
        """Return the final delta of the choice: finish reason, stop word and token usage."""
        text = "" if self._is_parsed else self._decoder.decode(b"", final=True)
        self._cached = min(int(cached), self._prompt) if _TOKEN_COUNT_PATTERN.fullmatch(cached) else None
        finish_reason = finish if finish in _FINISH_REASONS else self._default_finish_reason()
        known = _parse_json_string(stop_word) if stop_word and finish_reason == "stop" else ""
        return TextDelta(
            self._choice,
            text,
            finish=finish_reason,
            stop_word=known if known in self._stop else "",
            usage=self.usage,
        )

    def _default_finish_reason(self) -> str:
        if self._has_calls:
            return "tool_calls"
        return "length" if 0 < self._limit <= self._completion else "stop"


def _parse_json_string(text: str) -> str:
    """Return the value of a JSON string; "" if the text is anything else."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return ""
    return value if isinstance(value, str) else ""


def _parse_logprobs(raw: bytes) -> tuple[Mapping[str, Any], ...]:
    """Parse an engine's log probabilities in OpenAI's form. Skip entries of another form."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return ()
    content = document.get("content") if isinstance(document, dict) else document
    return tuple(
        token | {"top_logprobs": [alternative for alternative, _ in _parse_tokens(entry.get("top_logprobs"))]}
        for token, entry in _parse_tokens(content)
    )


def _parse_tokens(listed: object) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yield each token of a list without its alternatives, and the engine's entry for it."""
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict) or "token" not in entry:
            continue
        token, logprob = str(entry["token"]), entry.get("logprob") or 0.0
        if isinstance(logprob, int | float):
            token_bytes = entry.get("bytes") or list(token.encode())
            yield {"token": token, "logprob": float(logprob), "bytes": token_bytes}, entry


CONCURRENT_CHOICES = 8
"""Maximum number of choices of one request that its replica generates in parallel."""
_DELTA_BYTES = 64
"""Approximate bytes of a delta without its content."""
_STALL_MESSAGE = "the engine has sent nothing for too long"
_TIMEOUT_MESSAGE = (
    "the whole answer took longer than CLUSTER_REQUEST_TIMEOUT allows; a streamed one may take longer"
)
_TOO_LARGE_MESSAGE = "the answer is larger than one message of an engine may be; a streamed one may be larger"


async def generate(request: InferenceRequest, generation: Generation) -> list[TextDelta]:
    """Return all deltas of a response from one replica."""
    try:
        calls = await _prepare_calls(request, generation)
        attempts = gateway.attempts(request)
        while True:
            async with attempts as engine:
                try:
                    async with asyncio.timeout(request.deadline - clock.monotonic()):
                        return [delta async for delta in await calls.start(engine)]
                except TimeoutError:
                    raise DeadlineExceeded(_TIMEOUT_MESSAGE) from None
    except InvalidInput as refusal:
        raise rename_field(refusal, generation) from None


async def stream(request: InferenceRequest, generation: Generation) -> AsyncGenerator[TextDelta, None]:
    """Yield the deltas of a response. No other replica is tried after the caller sets `request.has_begun`."""
    try:
        calls = await _prepare_calls(request, generation)
        attempts = gateway.attempts(request)
        while True:
            async with attempts as engine, aclosing(await calls.start(engine)) as deltas:
                async for delta in deltas:
                    yield delta
                return
    except InvalidInput as refusal:
        raise rename_field(refusal, generation) from None


async def _prepare_calls(request: InferenceRequest, generation: Generation) -> "_EngineCalls":
    """Find the model's definition and render the prompts. All attempts use the result."""
    definition = await find_model(request, generation.model)
    prompts = [
        await render_template(request, definition, prompt) if isinstance(prompt, Conversation) else prompt
        for prompt in generation.prompts
    ]
    if conf.cluster().prefix_cache:
        request.chain = prompt_chain(definition.name, prompt_bytes(prompts[0]))
    if generation.sampling.grammar.startswith("{"):
        await endpoint.confirm_early(request)
    options = sampling_options(generation.sampling, definition, request.request_id, random.getrandbits(31))
    return _EngineCalls(request, generation, prompts, options)


_SYSTEM_ROLES = ("system", "developer")


async def render_template(
    request: InferenceRequest, definition: Definition, prompt: Conversation
) -> Conversation:
    """Add the definition's system prompt and render its template, if the definition has them.

    Only a confirmed caller may have a template rendered.
    """
    system, template = definition.generation.system, definition.generation.template
    if system and all(message.role not in _SYSTEM_ROLES for message in prompt.messages):
        messages = (ConversationMessage("system", system), *prompt.messages)
        prompt = msgspec.structs.replace(prompt, messages=messages)
    if not template:
        return prompt
    await endpoint.confirm_early(request)
    if prompt.tools and not templates.has_tools(template):
        raise InvalidInput(
            "tools: the template of this model's definition has no place for them", field="tools"
        )
    return msgspec.structs.replace(prompt, rendered=await templates.render(template, prompt))


async def _decode_prompt(
    engine: BackendClient, prompt: Prompt, request: InferenceRequest
) -> Conversation | str:
    """Return the prompt in a form that engines accept; the engine itself decodes token ids."""
    if not isinstance(prompt, tuple):
        return prompt
    remaining = request.deadline - clock.monotonic()
    return (await engine.detokenize(DetokenizeRequest(tokens=prompt), remaining)).content


class _EngineCalls:
    """The engine calls of one request. Each attempt makes all calls on one engine."""

    def __init__(
        self,
        request: InferenceRequest,
        generation: Generation,
        prompts: Sequence[Prompt],
        options: PredictOptions,
    ) -> None:
        self._request = request
        self._generation = generation
        self._prompts = prompts
        self._options = options
        self._started_at = self._called_at = clock.monotonic()
        self._first_at: float | None = None

    async def start(self, engine: BackendClient) -> AsyncGenerator[TextDelta, None]:
        """Return the deltas of all choices. The first failure cancels the other choices."""
        texts = [await _decode_prompt(engine, prompt, self._request) for prompt in self._prompts]
        self._called_at, self._first_at = clock.monotonic(), None
        choices = [
            self._generate_choice(engine, choice, with_prompt(self._options, text, answer))
            for choice, (text, answer) in enumerate(itertools.product(texts, range(self._generation.n)))
        ]
        return choices[0] if len(choices) == 1 else _merge_choices(choices)

    async def _generate_choice(
        self, engine: BackendClient, choice: int, options: PredictOptions
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield the deltas of one choice; count its tokens, also if the client leaves before the end."""
        reader = ReplyReader(choice, self._generation.sampling, options.Tokens)
        wants_stream, stall = self._generation.stream, conf.cluster().stream_stall
        size = 0
        try:
            # An engine may offer only streams, or only complete replies.
            for is_streamed in (wants_stream, not wants_stream):
                replies = engine.predict_stream(options) if is_streamed else engine.predict(options)
                first = self._request.deadline - clock.monotonic()
                message = _STALL_MESSAGE if is_streamed else _TIMEOUT_MESSAGE
                try:
                    async with aclosing(replies.within(first, stall, message)) as pieces:
                        async for reply in pieces:
                            if not wants_stream:
                                size += reply.ByteSize() + _DELTA_BYTES
                                if size > MAX_MESSAGE_BYTES:
                                    raise BackendFailed(_TOO_LARGE_MESSAGE)
                            if (delta := reader.delta(reply)) is not None:
                                self._record_first(reply, delta, is_streamed)
                                yield delta
                except Unimplemented:
                    if is_streamed is not wants_stream:
                        raise
                else:
                    break
            trailing = [
                await replies.trailing(name)
                for name in (CACHED_TOKENS_METADATA, FINISH_REASON_METADATA, STOP_WORD_METADATA)
            ]
            yield self._end_choice(reader.last(*trailing))
        finally:
            used = reader.usage
            metrics.tokens_used(self._request.model, used.prompt, used.completion, used.cached or 0)

    def _record_first(self, reply: Reply, delta: TextDelta, is_streamed: bool) -> None:
        """Record the time at which the response began.

        It is the time of the first piece, or the end of the prompt's processing if the engine reports it.
        """
        if self._first_at is not None:
            return
        delta.prompt_tokens = reply.prompt_tokens
        now = clock.monotonic()
        if self._generation.stream:
            metrics.first_token(self._request.model, now - self._started_at)
        prompt = reply.timing_prompt_processing / 1000
        if is_streamed:
            self._first_at = now
        else:
            self._first_at = self._called_at + (min(prompt, now - self._called_at) if prompt > 0 else 0.0)

    def _end_choice(self, last: TextDelta) -> TextDelta:
        """Add the durations of the response to the last delta of a choice."""
        now = clock.monotonic()
        first = now if self._first_at is None else self._first_at
        durations = Durations(self._called_at - self._started_at, first - self._called_at, now - first)
        last.durations = durations
        return last


async def _merge_choices(
    choices: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[TextDelta, None]:
    """Yield the deltas of all choices, which run up to `CONCURRENT_CHOICES` at a time.

    The first failure ends all choices.
    """
    pipe, waiting = Pipe(), iter(choices)

    async def read_choices() -> None:
        for choice in waiting:
            async with aclosing(choice) as deltas:
                async for delta in deltas:
                    await pipe.put(delta)

    readers = [asyncio.ensure_future(read_choices()) for _ in range(min(CONCURRENT_CHOICES, len(choices)))]

    def close_pipe(ended: "asyncio.Future[Any]") -> None:
        # Reads the exception too, so that asyncio logs none if the consumer has left.
        if ended.cancelled() or ended.exception():
            for reader in readers:
                reader.cancel()
        pipe.close()

    end = asyncio.gather(*readers)
    end.add_done_callback(close_pipe)
    try:
        while not pipe.ended:
            for delta in await pipe.take():
                yield delta
        await end
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
