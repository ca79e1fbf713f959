"""OpenAI's own client against the edge, over a socket: what it sends is understood, and what it reads."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall
from pytest_django import Settings

from tests.support import hot
from tests.support.environment import API_KEY
from tests.support.scripted import CUT, Refusal, Scripted, call, running, with_logprobs, words
from tests.support.served import served

pytestmark = pytest.mark.django_db(transaction=True)

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(pydantic.BaseModel):
    """What the model shall answer with."""

    name: str
    people: int


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings) -> None:
    """A models folder with `m`."""
    (tmp_path / "m.yaml").write_text("name: m\nbackend: scripted\nparameters: {model: m.gguf}\n")
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=0.2)


def play(scenario: Callable[[openai.AsyncOpenAI, Scripted], Awaitable[None]]) -> None:
    """Runs a scenario with one replica of `m`."""

    async def whole() -> None:
        engine = Scripted()
        async with hot.serving() as picker, running(engine) as address, served() as url:
            await hot.in_thread(lambda: hot.replica(hot.node(), "m", address=address))
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0) as client:
                await scenario(client, engine)
            assert picker.in_flight() == 0

    asyncio.run(whole())


async def _chat(client: openai.AsyncOpenAI, engine: Scripted) -> None:
    engine.script = [*words("Hello you."), {"localai-cached-tokens": "3"}]
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, max_completion_tokens=20, stop=["\n"], seed=3, temperature=0, user="u"
    )
    assert answer.choices[0].message.content == "Hello you."
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (2, 3)
    options = engine.asked[-1]
    assert (options.Tokens, list(options.StopPrompts), options.Seed) == (20, ["\n"], 3)
    assert options.Temperature == 0
    assert [one.role for one in options.Messages] == ["system", "user"]


async def _stream(client: openai.AsyncOpenAI, engine: Scripted) -> None:
    engine.script = words("One two three")
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "One two three"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10
    completion = await client.completions.create(model="m", prompt="One", max_tokens=3)
    assert completion.choices[0].text == "One two three"


def only_call(answer: ChatCompletion) -> ChatCompletionMessageFunctionToolCall:
    """The one tool that the answer calls."""
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert len(calls) == 1
    assert isinstance(calls[0], ChatCompletionMessageFunctionToolCall)
    return calls[0]


async def _tools(client: openai.AsyncOpenAI, engine: Scripted) -> None:
    engine.script = call(0, "weather", '{"city":', ' "Rome"}', id="call_1")
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, tools=[TOOL], tool_choice="required"
    )
    made = only_call(answer)
    assert (made.id, json.loads(made.function.arguments)) == ("call_1", {"city": "Rome"})
    assert answer.choices[0].finish_reason == "tool_calls"
    async with client.chat.completions.stream(model="m", messages=MESSAGES, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()
    streamed = only_call(final)
    assert (streamed.id, streamed.function.arguments) == ("call_1", made.function.arguments)
    # What came back is accepted as a part of the conversation.
    engine.script = words("Sunny.")
    said: Any = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True)]
    result: Any = {"role": "tool", "tool_call_id": made.id, "content": "sun"}
    await client.chat.completions.create(model="m", messages=[*said, result], tools=[TOOL])
    assert json.loads(engine.asked[-1].Messages[2].tool_calls)[0]["id"] == "call_1"
    assert engine.asked[-1].Messages[3].tool_call_id == "call_1"


async def _structured(client: openai.AsyncOpenAI, engine: Scripted) -> None:
    engine.script = words('{"name": "Rome", "people": 3}')
    answer = await client.chat.completions.parse(model="m", messages=MESSAGES, response_format=City)
    assert answer.choices[0].message.parsed == City(name="Rome", people=3)
    assert json.loads(engine.asked[-1].Metadata["json_schema"])["required"] == ["name", "people"]
    assert "root ::= " in engine.asked[-1].Grammar


async def _rest(client: openai.AsyncOpenAI, engine: Scripted) -> None:
    vectors = await client.embeddings.create(model="m", input=["abc"], encoding_format="float")
    assert vectors.data[0].embedding == [0.0, 1.0]
    with pytest.raises(openai.BadRequestError, match="token_ids"):
        await client.embeddings.create(model="m", input=[[1, 2, 3]])
    assert [model.id async for model in client.models.list()] == ["m"]
    engine.script = with_logprobs("a b")
    told = await client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert told.choices[0].logprobs is not None
    assert [one.token for one in told.choices[0].logprobs.content or ()] == ["a", " b"]


async def _responses(client: openai.AsyncOpenAI, engine: Scripted) -> None:
    """The newer way to ask, whole and streamed, with tools and a schema."""
    engine.script = [*words("Hello you."), {"localai-cached-tokens": "3"}]
    answer = await client.responses.create(model="m", input="hello", instructions="Be brief.", store=False)
    assert (answer.output_text, answer.status) == ("Hello you.", "completed")
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 3
    async with client.responses.stream(model="m", input=[{"role": "user", "content": "hello"}]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello you."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    engine.script = words('{"name": "Rome", "people": 3}')
    parsed = await client.responses.parse(model="m", input="hello", text_format=City)
    assert parsed.output_parsed == City(name="Rome", people=3)
    engine.script = call(0, "weather", '{"city":', ' "Rome"}')
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
    async with client.responses.stream(
        model="m", input="hello", tools=[tool], tool_choice="required"
    ) as stream:
        [event async for event in stream]
        called = (await stream.get_final_response()).output[0]
    assert called.type == "function_call"
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Rome"})
    # What came back is accepted as a part of the conversation.
    engine.script = words("Sunny.")
    given: Any = [
        {"role": "user", "content": "hello"},
        called.model_dump(exclude_none=True, exclude={"parsed_arguments"}),
        {"type": "function_call_output", "call_id": called.call_id, "output": "sun"},
    ]
    await client.responses.create(model="m", input=given, tools=[tool])
    assert [one.role for one in engine.asked[-1].Messages] == ["user", "assistant", "tool"]
    with pytest.raises(openai.BadRequestError, match="nothing is kept"):
        await client.responses.create(model="m", input="hello", previous_response_id="resp_1")
    engine.script = [*words("Half"), Refusal(grpc.StatusCode.INTERNAL, "out of ideas")]
    with pytest.raises(openai.APIError, match="out of ideas"):
        [event async for event in await client.responses.create(model="m", input="hello", stream=True)]


async def _errors(client: openai.AsyncOpenAI, engine: Scripted) -> None:
    ask: Any = {"model": "m", "messages": MESSAGES}
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(**ask | {"model": "none"}, stream=stream)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**ask, temperature=7, stream=stream)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(**ask, stream=stream)
        engine.script = [Refusal(grpc.StatusCode.INTERNAL, "out of ideas")]
        with pytest.raises(openai.InternalServerError, match="out of ideas"):
            await client.chat.completions.create(**ask, stream=stream)
    gate = asyncio.Event()
    engine.script = [*words("Half"), gate, CUT]
    chunks = await client.chat.completions.create(**ask, stream=True)
    await anext(aiter(chunks))
    gate.set()
    with pytest.raises(openai.APIError) as broken:
        [chunk async for chunk in chunks]
    assert broken.value.code == "backend_lost"
    # The replica has gone with its connection, and nothing can load the model.
    with pytest.raises(openai.InternalServerError) as loading:
        await client.chat.completions.create(**ask, stream=True)
    assert (loading.value.status_code, loading.value.type) == (503, "model_loading")


PARTS = [_chat, _stream, _tools, _structured, _rest, _responses, _errors]


@pytest.mark.parametrize("part", PARTS, ids=[part.__name__.strip("_") for part in PARTS])
def test_the_client_of_openai(part: Callable[[openai.AsyncOpenAI, Scripted], Awaitable[None]]) -> None:
    play(part)
