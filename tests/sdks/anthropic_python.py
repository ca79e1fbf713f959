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
    answer = client.messages.create(**ask(system="Be brief.", temperature=0, stop_sequences=["\n\n"]))
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
    assert final == client.messages.create(**ask()).model_copy(update={"id": final.id})
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


def errors() -> None:
    """Refusals, and streams that break off."""
    for call in (client.messages.create, lambda **wish: list(client.messages.create(**wish, stream=True))):
        missing = raises(anthropic.NotFoundError, lambda: call(**ask(model="none")))
        assert missing.body["error"]["type"] == "not_found_error"
        wrong = raises(anthropic.BadRequestError, lambda: call(**ask(temperature=3)))
        assert wrong.body["error"]["type"] == "invalid_request_error"
        assert "temperature" in wrong.body["error"]["message"]
        cold = raises(anthropic.ServiceUnavailableError, lambda: call(**ask(model="cold")))
        assert cold.body["error"]["type"] == "overloaded_error"
        raises(anthropic.ServiceUnavailableError, lambda: call(**ask(FAIL)))
    raises(anthropic.BadRequestError, lambda: client.messages.create(**ask(max_tokens=0)))
    other = client.with_options(api_key="wrong")
    raises(anthropic.AuthenticationError, lambda: other.messages.create(**ask()))
    broken = raises(anthropic.APIStatusError, lambda: list(client.messages.create(**ask(BREAK), stream=True)))
    assert broken.body["error"]["type"] == "overloaded_error"


play(chat, stream, tools, structured, counts, models, errors)
