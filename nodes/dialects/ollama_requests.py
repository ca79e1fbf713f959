"""Ollama's `POST /api/chat` and `/api/generate`: the requests. Pure.

Streaming is the default. Load options are ignored, because the definition determines them. `keep_alive` is
ignored too, because the cluster decides when a model is unloaded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.web import wire
from nodes.dialects import openai_bodies, openai_messages
from nodes.dialects.openai_bodies import Fraction, NonNegativeInt, Penalty, Stop, Text
from nodes.dialects.openai_messages import MOST_MESSAGES, MOST_PARTS, CalledFunction, ToolCall
from nodes.dialects.tools import Tools, check_tools, encode_json
from nodes.gateway import schemas
from nodes.gateway.generation import Conversation, Generation, Prompt, Sampling, Utterance

_NO_LIMITS = (-1, -2)
"""Values of `num_predict` without a limit of their own: unlimited, and up to the context size."""
_NAMES = {"response_format": "format"}


class OllamaOptions(msgspec.Struct, kw_only=True, frozen=True):
    """How tokens are chosen. Other options of Ollama's are ignored."""

    num_predict: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_k: NonNegativeInt | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    seed: int | None = None
    stop: Stop = None
    repeat_penalty: Annotated[float, msgspec.Meta(ge=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None


class OllamaFunction(msgspec.Struct, frozen=True):
    """Which function, and its arguments."""

    name: Text
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True):
    """One call of a tool, as an earlier answer asked for it."""

    function: OllamaFunction
    id: str | None = None


Images = Annotated[list[Text], msgspec.Meta(max_length=MOST_PARTS)]


class OllamaMessage(msgspec.Struct, frozen=True):
    """One message; images are base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], msgspec.Meta(max_length=128)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Body(msgspec.Struct, kw_only=True, frozen=True):
    model: Text
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    def to_generation(self, prompt: Prompt, names: Mapping[str, str]) -> Generation:
        """Return the generation of this prompt with the body's parameters."""
        return Generation(
            model=self.model,
            prompts=(prompt,),
            sampling=self._sampling(),
            stream=self.stream is not False,
            names=names,
        )

    def _sampling(self) -> Sampling:
        options = self.options or OllamaOptions()
        if options.num_predict == 0:
            raise InvalidInput("options.num_predict: at least 1, or -1 for no limit", field="options")
        stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
        return Sampling(
            max_tokens=None if options.num_predict in _NO_LIMITS else options.num_predict,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repeat_penalty=options.repeat_penalty,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            seed=options.seed,
            stop=tuple(stop),
            grammar=_schema(self.format),
            logprobs=bool(self.logprobs),
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else 0,
        )


class OllamaChatBody(_Body, kw_only=True, frozen=True):
    """The body of a chat. Other fields of Ollama's are ignored, or refused by name."""

    messages: Annotated[list[OllamaMessage], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    tools: Tools | None = None


class GenerateBody(_Body, kw_only=True, frozen=True):
    """The body of a request to answer one prompt, or with `raw` to go on from it."""

    prompt: Text
    system: str | None = None
    images: Images | None = None
    raw: bool | None = None


REFUSED = {
    "context": "nothing is kept; send the conversation to /api/chat",
    "suffix": "no engine here fills in a middle",
    "template": "the template is the model's own, or its definition's",
    **dict.fromkeys(("width", "height", "steps"), "images come from /v1/images/generations"),
}


def parse_chat(fields: Mapping[str, Any]) -> Generation:
    """Parse a chat; raise InvalidInput, which names the first wrong field."""
    body = wire.typed(fields, OllamaChatBody)
    tools, choice = check_tools(body.tools or (), None)
    images = tuple(
        openai_messages.check_base64(image, f"messages[{number}].images[{index}]")
        for number, message in enumerate(body.messages)
        for index, image in enumerate(message.images or ())
    )
    utterances = tuple(_utterances(body.messages))
    return body.to_generation(Conversation(utterances, tools, choice, images=images), _NAMES)


def parse_generate(fields: Mapping[str, Any]) -> Generation:
    """Parse one prompt; raise InvalidInput, which names the first wrong field."""
    openai_bodies.refuse_fields(fields, REFUSED)
    body = wire.typed(fields, GenerateBody)
    if body.raw:
        if body.images:
            raise InvalidInput("images: not with `raw`", field="images")
        return body.to_generation(body.prompt, _NAMES)
    system = (Utterance("system", body.system),) if body.system else ()
    images = (
        openai_messages.check_base64(image, f"images[{index}]")
        for index, image in enumerate(body.images or ())
    )
    conversation = Conversation((*system, Utterance("user", body.prompt)), images=tuple(images))
    return body.to_generation(conversation, _NAMES | {"messages": "prompt"})


def _utterances(messages: Sequence[OllamaMessage]) -> Iterator[Utterance]:
    """Yield the messages in the engines' form.

    Tool results may lack ids; such results are matched with the calls in order.
    """
    unanswered_ids: list[str] = []
    for number, message in enumerate(messages):
        calls = [
            ToolCall(
                call.id or f"call_{number}_{index}",
                CalledFunction(call.function.name, encode_json(call.function.arguments)),
            )
            for index, call in enumerate(message.tool_calls or ())
        ]
        answered_id = ""
        if message.role == "tool":
            answered_id = message.tool_call_id or (unanswered_ids[0] if unanswered_ids else f"call_{number}")
            unanswered_ids = [call_id for call_id in unanswered_ids if call_id != answered_id]
        elif message.role == "assistant":
            unanswered_ids = [call.id for call in calls]
        yield Utterance(
            message.role,
            message.content or "",
            name=message.tool_name or "",
            tool_call_id=answered_id,
            reasoning=message.thinking or "",
            tool_calls=encode_json(calls) if calls else "",
        )


def _schema(format: str | dict[str, Any] | None) -> str:
    """Return the JSON schema of the response, "" if any text is allowed."""
    if not isinstance(format, dict):
        return encode_json({"type": "object"}) if format else ""
    schemas.check([(format, "format")])
    return encode_json(format)
