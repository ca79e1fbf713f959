"""The routes of text generation: each combines a dialect with the common generation."""

from collections.abc import Awaitable, Callable

from localai_cluster.kit import clock
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.dialects import anthropic, ollama, openai_chat, openai_completions, responses
from nodes.gateway.generate import generate
from nodes.gateway.generation import Dialect, Head, TextDelta
from nodes.gateway.request import InferenceRequest
from nodes.gateway.streams import EventStream, node_header


def generation_handler(dialect: Dialect) -> Callable[[InferenceRequest], Awaitable[Answer | EventStream]]:
    """Return the handler of a route in this dialect."""

    async def answer(request: InferenceRequest) -> Answer | EventStream:
        generation = dialect.read(wire.parse_json_object(request.body))
        request.body = b""  # it may be large, and generation takes long
        head = Head(request.request_id, int(clock.now().timestamp()), generation)
        if generation.stream:
            return EventStream(
                request, dialect.told(head), lambda sink: generate(request, generation, sink, lambda: None)
            )
        deltas: list[TextDelta] = []

        async def collect(delta: TextDelta) -> None:
            deltas.append(delta)

        await generate(request, generation, collect, deltas.clear)
        return Answer(dialect.whole(head, deltas), headers=tuple(node_header(request)))

    return answer


chat = generation_handler(openai_chat.DIALECT)
completions = generation_handler(openai_completions.DIALECT)
messages = generation_handler(anthropic.DIALECT)
openai_responses = generation_handler(responses.DIALECT)
ollama_chat = generation_handler(ollama.CHAT)
ollama_generate = generation_handler(ollama.GENERATE)
