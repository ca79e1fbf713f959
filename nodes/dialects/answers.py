"""The answer to a request for text in any dialect: complete, or a stream of events."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from localai_cluster.web.wire import Answer
from nodes.gateway import generate
from nodes.gateway.generation import Dialect, Head, TextDelta
from nodes.gateway.request import InferenceRequest, node_header
from nodes.gateway.streams import EventStream

Keep = Callable[[Head, Sequence[TextDelta]], Awaitable[None]]
"""Processes all deltas of a response, before the client gets the last one."""


async def respond(
    request: InferenceRequest, dialect: Dialect, head: Head, keep: Keep | None = None
) -> Answer | EventStream:
    """Return the answer to a parsed request."""
    request.body = b""  # it may be large, and generation takes long
    if head.generation.stream:
        deltas = generate.stream(request, head.generation)
        if keep is not None:
            deltas = _kept(deltas, head, keep)
        return EventStream(request, dialect.stream_format(head), deltas)
    response = await generate.generate(request, head.generation)
    if keep is not None:
        await keep(head, response)
    return Answer(dialect.render_response(head, response), headers=tuple(node_header(request)))


async def _kept(
    deltas: AsyncGenerator[TextDelta, None], head: Head, keep: Keep
) -> AsyncGenerator[TextDelta, None]:
    seen = []
    async with aclosing(deltas):
        async for delta in deltas:
            seen.append(delta)
            if delta.finish:
                await keep(head, seen)
            yield delta
