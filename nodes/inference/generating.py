"""From a generation to deltas: the calls to one engine, side by side, and what they may take.

A stream comes piece by piece: its first one within the limit of a request, each later one within that of a
stall (`CLUSTER_REQUEST_TIMEOUT`, `CLUSTER_STREAM_STALL`). A whole answer is one piece, which saves work for
each token, so the limit of a request is one on the whole. A client that leaves ends the call of either.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from localai_cluster import clock, conf
from localai_cluster.errors import InvalidInput
from localai_cluster.metrics import web as metrics
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import DeadlineExceeded, Unimplemented
from localai_cluster.rpc.messages import DetokenizeRequest, PredictOptions, Reply
from nodes.definitions.files import Definition
from nodes.inference import gateway, prompt_bytes, templates
from nodes.inference.defined import defined
from nodes.inference.engine_calls import (
    CACHED_TOKENS,
    FINISH_REASON,
    Reading,
    named,
    sampling_options,
    with_prompt,
)
from nodes.inference.generation import Conversation, Generation, Prompt, Sink, TextDelta, Took
from nodes.inference.limits import silence
from nodes.routing.chains import chain
from nodes.routing.request import InferenceRequest

AT_ONCE = 8
"""How many answers of one request its replica works on at the same time."""
_SILENT = "the engine has sent nothing for too long"
_TOO_LONG = "the whole answer took longer than CLUSTER_REQUEST_TIMEOUT allows; a streamed one may take longer"


async def generate(
    request: InferenceRequest, asked: Generation, sink: Sink, restart: Callable[[], None]
) -> None:
    """Has a replica answer. `restart` is called before each attempt: what an earlier one told is void, unless
    `request.begun` says that the client has it.
    """
    try:
        definition = await defined(asked.model)
        request.model = definition.name
        prompts = [
            await templated(definition, prompt) if isinstance(prompt, Conversation) else prompt
            for prompt in asked.prompts
        ]
        if conf.cluster().prefix_cache:
            request.chain = chain(definition.name, prompt_bytes.of(prompts[0]))
        options = sampling_options(asked.sampling, definition, request.request_id, random.getrandbits(31))
        began = clock.monotonic()

        async def work(engine: BackendClient) -> None:
            restart()
            texts = [await _text(engine, prompt, request) for prompt in prompts]
            calls = [with_prompt(options, text, answer) for text in texts for answer in range(asked.n)]
            await _Answering(engine, request, asked, sink, began).all(calls)

        await gateway.current().run(request, work)
    except InvalidInput as refusal:
        raise named(refusal, asked) from None


async def templated(definition: Definition, prompt: Conversation) -> Conversation:
    """The same with the prompt that the definition's template makes, if it has one."""
    if definition.answering.template:
        return replace(prompt, rendered=await templates.prompt(definition.answering.template, prompt))
    return prompt


async def _text(engine: BackendClient, prompt: Prompt, request: InferenceRequest) -> Conversation | str:
    """What engines take: they have no field for the token ids of a prompt."""
    if not isinstance(prompt, tuple):
        return prompt
    left = request.deadline - clock.monotonic()
    return (await engine.detokenize(DetokenizeRequest(tokens=prompt), left)).content


class _Answering:
    """One attempt at all choices of a request, by one engine."""

    def __init__(
        self, engine: BackendClient, request: InferenceRequest, asked: Generation, sink: Sink, began: float
    ) -> None:
        self._engine = engine
        self._request = request
        self._asked = asked
        self._sink = sink
        self._began = began
        self._called = clock.monotonic()
        self._first: float | None = None

    async def all(self, calls: Sequence[PredictOptions]) -> None:
        """Every choice, a few at a time; the first failure ends the rest."""
        waiting = iter(enumerate(calls))
        if len(calls) == 1:
            await self._some(waiting)
            return
        workers = [asyncio.ensure_future(self._some(waiting)) for _ in range(min(AT_ONCE, len(calls)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _some(self, waiting: Iterator[tuple[int, PredictOptions]]) -> None:
        for choice, options in waiting:
            streamed = self._asked.stream
            try:
                await self._answer(choice, options, streamed)
            except Unimplemented:
                await self._answer(choice, options, not streamed)

    async def _answer(self, choice: int, options: PredictOptions, streamed: bool) -> None:
        reading = Reading(choice, self._asked.sampling, options.Tokens)
        replies = self._engine.predict_stream(options) if streamed else self._engine.predict(options)
        first = self._request.deadline - clock.monotonic()
        try:
            async with silence(conf.cluster().stream_stall, first) as limit:
                async for reply in replies:
                    # Only the engine's time counts, not that of a client who reads slowly.
                    limit.pause()
                    delta = reading.delta(reply)
                    if delta is not None:
                        if self._first is None:
                            self._first = self._begun(reply, streamed)
                        await self._sink(delta)
                    limit.begin()
                said = await replies.trailing(CACHED_TOKENS), await replies.trailing(FINISH_REASON)
        except TimeoutError:
            raise DeadlineExceeded(_SILENT if streamed else _TOO_LONG) from None
        finally:
            replies.cancel()
        await self._end(reading.last(*said))

    def _begun(self, reply: Reply, streamed: bool) -> float:
        """When the answer began: with its first piece, or where the engine says that the prompt was done."""
        now = clock.monotonic()
        if self._asked.stream:
            metrics.first_token(self._request.model, now - self._began)
        if streamed:
            return now
        prompt = reply.timing_prompt_processing / 1000
        return self._called + (min(prompt, now - self._called) if prompt > 0 else 0.0)

    async def _end(self, last: TextDelta) -> None:
        if last.usage is not None:
            metrics.tokens_used(
                self._request.model, last.usage.prompt, last.usage.completion, last.usage.cached or 0
            )
        now = clock.monotonic()
        first = now if self._first is None else self._first
        took = Took(self._called - self._began, first - self._called, now - first)
        await self._sink(replace(last, took=took))
