"""OpenAI's legacy completions, `POST /v1/completions`: the model continues a prompt. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web import wire
from localai_cluster.web.wire import ResponseBody
from nodes.dialects import openai_common
from nodes.dialects.openai_common import (
    DONE,
    MOST_CHOICES,
    CompletionEvents,
    FinishReason,
    NonNegativeInt,
    SamplingBody,
    Text,
    UsageBody,
)
from nodes.gateway import generation
from nodes.gateway.generation import Dialect, Generation, Head, TextDelta

DEFAULT_TOKENS = 16
"""Default limit on the tokens of a choice, as OpenAI documents."""

MOST_TOKENS = 256 * 1024
"""Limit on the token ids of a prompt: decoding millions would block all other requests."""

Tokens = Annotated[list[NonNegativeInt], msgspec.Meta(min_length=1, max_length=MOST_TOKENS)]
Prompts = Annotated[list[Text | NonNegativeInt | Tokens], msgspec.Meta(min_length=1, max_length=MOST_TOKENS)]


class CompletionBody(SamplingBody, kw_only=True, frozen=True):
    """The body of a request."""

    prompt: Annotated[
        Text | Prompts,
        msgspec.Meta(
            description=f"A text, up to {MOST_TOKENS} token ids of the model, or a list of either; "
            f"at most {MOST_CHOICES} answers, all prompts together."
        ),
    ]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class CompletionChoice(ResponseBody):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class CompletionResponse(ResponseBody, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


REFUSED = {
    "suffix": "no engine here fills in a middle",
}


def parse_request(fields: Mapping[str, Any]) -> Generation:
    """Parse the request; raise InvalidInput, which names the first wrong field."""
    openai_common.refuse_fields(fields, REFUSED)
    if fields.get("best_of") not in (None, 1, fields.get("n")):
        raise InvalidInput(
            "best_of: all answers are sent; leave it out or say the same as `n`", field="best_of"
        )
    body = wire.parse_struct(fields, CompletionBody)
    prompts = _prompts(body.prompt)
    n = body.n or 1
    if len(prompts) * n > MOST_CHOICES:
        raise InvalidInput(f"prompt: at most {MOST_CHOICES} answers in one request", field="prompt")
    if body.echo and (body.logprobs is not None or not all(isinstance(prompt, str) for prompt in prompts)):
        raise wire.field_error(
            "echo", "only with prompts of text, and without `logprobs`", "unsupported_value"
        )
    return Generation(
        model=body.model,
        prompts=prompts,
        sampling=openai_common.to_sampling(
            body,
            body.max_tokens or DEFAULT_TOKENS,
            grammar=body.grammar or "",
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        ),
        n=n,
        stream=bool(body.stream),
        usage_in_stream=body.streams_usage,
        echo={"prompt": True} if body.echo else {},
    )


def _echoed(request: Generation, choice: int) -> str:
    """Return the prompt that the text of this choice begins with; "" unless the client wants it."""
    prompt = request.prompts[choice // request.n] if request.echo else ""
    return prompt if isinstance(prompt, str) else ""


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if all(isinstance(item, int) for item in prompt):
        return (tuple(item for item in prompt if isinstance(item, int)),)
    prompts = [item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int)]
    if len(prompts) < len(prompt) or len({type(item) for item in prompts}) > 1:
        raise InvalidInput(
            "prompt: a list has only texts, only token ids, or only lists of them", field="prompt"
        )
    return tuple(prompts)


def render_response(head: Head, deltas: Sequence[TextDelta]) -> bytes:
    """Return the response body."""
    request = head.generation
    choices = [
        CompletionChoice(
            index=index,
            text=_echoed(request, index) + choice.text,
            logprobs=_logprobs(choice.logprobs, 0) if request.sampling.logprobs else None,
            finish_reason=choice.finish,
        )
        for index, choice in enumerate(generation.merge_deltas(deltas, request.choices))
    ]
    usage = openai_common.render_usage(generation.total_usage(deltas, request.n))
    return msgspec.json.encode(
        CompletionResponse(
            id=head.id, created=head.created, model=request.model, choices=choices, usage=usage
        )
    )


def _logprobs(tokens: Sequence[Mapping[str, Any]], offset: int) -> dict[str, Any]:
    """Return log probabilities in the legacy form; `offset` is the first token's position in the text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {alternative["token"]: alternative["logprob"] for alternative in token["top_logprobs"]}
            for token in tokens
        ],
        "text_offset": offsets,
    }


class CompletionChunks(CompletionEvents):
    """The chunks of one streamed completion."""

    object_name = "text_completion"

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._lengths = [0] * head.generation.choices
        self._started_choices: set[int] = set()

    def render(self, deltas: Sequence[TextDelta], /) -> bytes:
        """Return the events of these deltas."""
        return openai_common.render_events([chunk for delta in deltas for chunk in self._chunks(delta)])

    def _chunks(self, delta: TextDelta) -> list[dict[str, Any]]:
        logprobs = _logprobs(delta.logprobs, self._lengths[delta.choice]) if delta.logprobs else None
        self._lengths[delta.choice] += len(delta.text)
        text = delta.text
        if delta.choice not in self._started_choices:
            self._started_choices.add(delta.choice)
            text = _echoed(self._head.generation, delta.choice) + text
        choice = {
            "index": delta.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish or None,
        }
        return [self._chunk([choice]), *(self._end_choice(delta) if delta.finish else [])]


DIALECT = Dialect(parse_request, CompletionChunks, render_response, DONE)
