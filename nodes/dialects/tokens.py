"""Tokenization: `/v1/tokenize`, `/v1/detokenize` and Anthropic's `/v1/messages/count_tokens`.

The model's own tokenizer counts the prompt that the definition's template renders from the conversation.
Without a template the engine also receives the conversation and may use the model's own template; the engines
of the reference count the plain texts.
"""

from typing import Annotated

import msgspec

from localai_cluster.kit import clock
from localai_cluster.rpc.messages import DetokenizeRequest, PredictOptions
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.dialects.anthropic import CountBody
from nodes.dialects.anthropic_input import drop_unknown_blocks
from nodes.dialects.openai_common import NonNegativeInt, Text
from nodes.gateway import gateway
from nodes.gateway.gateway import find_model
from nodes.gateway.generate import render_template, with_prompt
from nodes.gateway.request import InferenceRequest


class TokenizeBody(msgspec.Struct, frozen=True):
    """The body of a request to tokenize a text."""

    model: Text
    content: str


class DetokenizeBody(msgspec.Struct, frozen=True):
    """The body of a request to convert token ids to text."""

    model: Text
    tokens: Annotated[list[NonNegativeInt], msgspec.Meta(max_length=1_000_000)]


class TokensResponse(ResponseBody):
    tokens: list[int]


class TextResponse(ResponseBody):
    content: str


class CountResponse(ResponseBody):
    input_tokens: int


async def tokenize(request: InferenceRequest) -> Answer:
    """Respond with the token ids of the text in the body."""
    body = wire.parse_struct(wire.parse_json_object(request.body), TokenizeBody)
    definition = await find_model(request, body.model)
    options = PredictOptions(Prompt=body.content, ModelIdentity=definition.model)
    return wire.json_answer(TokensResponse(tokens=await _token_ids(request, options)))


async def _token_ids(request: InferenceRequest, options: PredictOptions) -> list[int]:
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine:
            return list((await engine.tokenize(options, request.deadline - clock.monotonic())).tokens)


async def detokenize(request: InferenceRequest) -> Answer:
    """Respond with the text of the token ids in the body."""
    body = wire.parse_struct(wire.parse_json_object(request.body), DetokenizeBody)
    await find_model(request, body.model)
    call = DetokenizeRequest(tokens=body.tokens)
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine:
            text = (await engine.detokenize(call, request.deadline - clock.monotonic())).content
            return wire.json_answer(TextResponse(content=text))


async def count_tokens(request: InferenceRequest) -> Answer:
    """Respond with the number of tokens of the conversation in the body."""
    body = wire.parse_struct(drop_unknown_blocks(wire.parse_json_object(request.body)), CountBody)
    definition = await find_model(request, body.model)
    prompt = await render_template(request, definition, body.conversation)
    options = with_prompt(PredictOptions(ModelIdentity=definition.model), prompt, 0)
    if prompt.rendered is None:
        texts = [message.content for message in prompt.messages]
        options.Prompt = "\n".join([*texts, prompt.tools] if prompt.tools else texts)
    return wire.json_answer(CountResponse(input_tokens=len(await _token_ids(request, options))))
