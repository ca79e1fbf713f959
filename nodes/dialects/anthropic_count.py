"""Anthropic's `POST /v1/messages/count_tokens`: count a conversation's tokens with the model's own tokenizer.

The engine counts the prompt that the definition's template renders. Without a template the engine also
receives the conversation and may use the model's own template; the reference's engines count the plain texts.
"""

import orjson

from localai_cluster.kit import clock
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.messages import PredictOptions
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.dialects.anthropic_requests import CountBody
from nodes.gateway import gateway
from nodes.gateway.gateway import defined
from nodes.gateway.generate import templated, with_prompt
from nodes.gateway.request import InferenceRequest


async def count_tokens(request: InferenceRequest) -> Answer:
    """Respond with the number of tokens."""
    body = wire.typed(wire.json_object(request.body), CountBody)
    definition = await defined(body.model)
    request.model = definition.name
    prompt = await templated(definition, body.conversation)
    options = with_prompt(PredictOptions(ModelIdentity=definition.model), prompt, 0)
    if prompt.rendered is None:
        texts = [message.content for message in prompt.messages]
        options.Prompt = "\n".join([*texts, prompt.tools] if prompt.tools else texts)

    async def work(engine: BackendClient) -> int:
        return len((await engine.tokenize(options, request.deadline - clock.monotonic())).tokens)

    return Answer(orjson.dumps({"input_tokens": await gateway.current().run(request, work)}))
