"""Execution of a generation: the concurrent calls to one engine, their time limits and their deltas.

The first piece of a stream must arrive within the request limit, each later piece within the stall limit
(`CLUSTER_REQUEST_TIMEOUT`, `CLUSTER_STREAM_STALL`). A complete response is one piece, which saves work per
token, so the request limit covers all of it. A disconnecting client cancels both kinds of calls.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from localai_cluster.kit import clock, conf
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.metrics import web as metrics
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import DeadlineExceeded, Unimplemented
from localai_cluster.rpc.messages import DetokenizeRequest, PredictOptions, Reply
from nodes.definitions.files import Definition
from nodes.gateway import gateway, prompt_bytes, templates
from nodes.gateway.engine_calls import (
    CACHED_TOKENS,
    FINISH_REASON,
    Reading,
    named,
    sampling_options,
    with_prompt,
)
from nodes.gateway.generation import Conversation, Generation, Prompt, Sink, TextDelta, Took
from nodes.gateway.model_lookup import defined
from nodes.gateway.prompt_chains import chain
from nodes.gateway.request import InferenceRequest
from nodes.gateway.silence_limit import silence

AT_ONCE = 8
"""Limit on the concurrent choices of one request on its replica."""
_SILENT = "the engine has sent nothing for too long"
_TOO_LONG = "the whole answer took longer than CLUSTER_REQUEST_TIMEOUT allows; a streamed one may take longer"


async def generate(
    request: InferenceRequest, generation: Generation, sink: Sink, restart: Callable[[], None]
) -> None:
    """Run the generation on a replica and send its deltas to `sink`.

    `restart` is called before each attempt, because the deltas of a failed attempt are void unless
    `request.begun` is set: then the client has received some.
    """
    try:
        definition = await defined(generation.model)
        request.model = definition.name
        prompts = [
            await templated(definition, prompt) if isinstance(prompt, Conversation) else prompt
            for prompt in generation.prompts
        ]
        if conf.cluster().prefix_cache:
            request.chain = chain(definition.name, prompt_bytes.of(prompts[0]))
        options = sampling_options(
            generation.sampling, definition, request.request_id, random.getrandbits(31)
        )
        started_at = clock.monotonic()

        async def work(engine: BackendClient) -> None:
            restart()
            texts = [await _text(engine, prompt, request) for prompt in prompts]
            calls = [with_prompt(options, text, answer) for text in texts for answer in range(generation.n)]
            await _Attempt(engine, request, generation, sink, started_at).run_all(calls)

        await gateway.current().run(request, work)
    except InvalidInput as refusal:
        raise named(refusal, generation) from None


async def templated(definition: Definition, prompt: Conversation) -> Conversation:
    """Return the conversation with the prompt rendered by the definition's template, if it has one."""
    if definition.answering.template:
        return replace(prompt, rendered=await templates.prompt(definition.answering.template, prompt))
    return prompt


async def _text(engine: BackendClient, prompt: Prompt, request: InferenceRequest) -> Conversation | str:
    """Return the prompt in a form that engines accept.

    They have no field for token ids, so those are decoded.
    """
    if not isinstance(prompt, tuple):
        return prompt
    remaining = request.deadline - clock.monotonic()
    return (await engine.detokenize(DetokenizeRequest(tokens=prompt), remaining)).content


class _Attempt:
    """One attempt at all choices of a request, on one engine."""

    def __init__(
        self,
        engine: BackendClient,
        request: InferenceRequest,
        generation: Generation,
        sink: Sink,
        started_at: float,
    ) -> None:
        self._engine = engine
        self._request = request
        self._generation = generation
        self._sink = sink
        self._started_at = started_at
        self._called_at = clock.monotonic()
        self._first_at: float | None = None

    async def run_all(self, calls: Sequence[PredictOptions]) -> None:
        """Generate every choice, up to `AT_ONCE` concurrently; the first failure cancels the others."""
        waiting = iter(enumerate(calls))
        if len(calls) == 1:
            await self._run_calls(waiting)
            return
        workers = [asyncio.ensure_future(self._run_calls(waiting)) for _ in range(min(AT_ONCE, len(calls)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _run_calls(self, waiting: Iterator[tuple[int, PredictOptions]]) -> None:
        for choice, options in waiting:
            streamed = self._generation.stream
            try:
                await self._answer(choice, options, streamed)
            except Unimplemented:
                await self._answer(choice, options, not streamed)

    async def _answer(self, choice: int, options: PredictOptions, streamed: bool) -> None:
        reader = Reading(choice, self._generation.sampling, options.Tokens)
        replies = self._engine.predict_stream(options) if streamed else self._engine.predict(options)
        first = self._request.deadline - clock.monotonic()
        try:
            async with silence(conf.cluster().stream_stall, first) as limit:
                async for reply in replies:
                    # Only the engine's time counts, not the time of a slow client.
                    limit.pause()
                    delta = reader.delta(reply)
                    if delta is not None:
                        if self._first_at is None:
                            self._first_at = self._start_time(reply, streamed)
                        await self._sink(delta)
                    limit.begin()
                trailing = await replies.trailing(CACHED_TOKENS), await replies.trailing(FINISH_REASON)
        except TimeoutError:
            raise DeadlineExceeded(_SILENT if streamed else _TOO_LONG) from None
        finally:
            replies.cancel()
        await self._end(reader.last(*trailing))

    def _start_time(self, reply: Reply, streamed: bool) -> float:
        """Return the start time of the response.

        It is its first piece, or the end of prompt processing that the engine reports.
        """
        now = clock.monotonic()
        if self._generation.stream:
            metrics.first_token(self._request.model, now - self._started_at)
        if streamed:
            return now
        prompt = reply.timing_prompt_processing / 1000
        return self._called_at + (min(prompt, now - self._called_at) if prompt > 0 else 0.0)

    async def _end(self, last: TextDelta) -> None:
        if last.usage is not None:
            metrics.tokens_used(
                self._request.model, last.usage.prompt, last.usage.completion, last.usage.cached or 0
            )
        now = clock.monotonic()
        first = now if self._first_at is None else self._first_at
        took = Took(self._called_at - self._started_at, first - self._called_at, now - first)
        await self._sink(replace(last, took=took))
