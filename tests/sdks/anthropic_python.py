"""Anthropic's client for Python."""

from typing import Any

import anthropic
import pydantic
from playing import ASK, BREAK, CALLED, CITY, FAIL, KEY, PLACE, SAID, URL, play, raises

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL: Any = {"name": "weather", "description": "The weather of a city.", "input_schema": PLACE}


class City(pydantic.BaseModel):
    """What the model shall answer with."""

    name: str
    people: int


def ask(text: str = ASK, **more: Any) -> dict[str, Any]:
    """A request."""
    return {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": text}], **more}


def chat() -> None:
    """A whole answer and what it took."""
    more = {"temperature": 0, "top_k": 1}
    answer = client.messages.create(**ask(system="Be brief.", stop_sequences=["\n\n"], extra_body=more))
    assert [block.text for block in answer.content] == [SAID]
    assert (answer.stop_reason, answer.role, answer.model) == ("end_turn", "assistant", "m")
    # Of 7 tokens of the prompt 3 were remembered.
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (4, 3)
    assert answer.usage.output_tokens == 5


def stream() -> None:
    """The pieces, and the same message of them."""
    with client.messages.stream(**ask()) as events:
        assert "".join(events.text_stream) == SAID
        final = events.get_final_message()
    whole = client.messages.create(**ask())
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.usage, final.stop_reason) == (whole.usage, whole.stop_reason)
    kinds = [event.type for event in client.messages.create(**ask(), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def tools() -> None:
    """A call, whole and streamed, and its result."""
    wish = ask(tools=[TOOL], tool_choice={"type": "any"})
    answer = client.messages.create(**wish)
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name, call.input) == (
        "tool_use",
        "tool_use",
        "weather",
        CALLED,
    )
    with client.messages.stream(**wish) as events:
        streamed = events.get_final_message()
    assert streamed.content[0].input == CALLED
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    wish["messages"] += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**wish).content[0].text == SAID


def structured() -> None:
    """An answer of a schema."""
    answer = client.messages.parse(**ask(), output_format=City)
    assert answer.parsed_output == City(**CITY)


def counts() -> None:
    """Tokens of a conversation."""
    wish = ask()
    del wish["max_tokens"]
    assert client.messages.count_tokens(**wish).input_tokens > 0


def models() -> None:
    """A list of models is OpenAI's, and has what this client reads of one."""
    assert {model.id for model in client.models.list().data} == {"m", "cold"}


def refused(kind: type[Exception], text: str = ASK, *, stream: bool, **wish: Any) -> dict[str, str]:
    """What a refusal says, which must be of this class."""

    def work() -> None:
        answer = client.messages.create(**ask(text, **wish), stream=stream)
        list(answer if stream else [])

    error: dict[str, str] = raises(kind, work).body["error"]
    return error


def errors() -> None:
    """Refusals, and streams that break off."""
    for stream in (False, True):
        missing = refused(anthropic.NotFoundError, stream=stream, model="none")
        assert missing["type"] == "not_found_error"
        wrong = refused(anthropic.BadRequestError, stream=stream, extra_body={"temperature": 3})
        assert wrong["type"] == "invalid_request_error"
        assert "temperature" in wrong["message"]
        cold = refused(anthropic.ServiceUnavailableError, stream=stream, model="cold")
        assert cold["type"] == "overloaded_error"
        refused(anthropic.ServiceUnavailableError, FAIL, stream=stream)
    raises(anthropic.BadRequestError, lambda: client.messages.create(**ask(max_tokens=0)))
    other = client.with_options(api_key="wrong")
    raises(anthropic.AuthenticationError, lambda: other.messages.create(**ask()))
    broken = refused(anthropic.APIStatusError, BREAK, stream=True)
    assert broken["type"] == "overloaded_error"


play(chat, stream, tools, structured, counts, models, errors)
