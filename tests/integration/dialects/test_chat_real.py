"""A language model through the edge: OpenAI's requests, the product's way to an engine, and llama.cpp itself.

One process of the engine, one load of the model; what each field does is proved by `test_backend_llama_cpp`.
"""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.asgi import application
from localai_cluster.rpc.client import BackendClient, options_from_mapping
from nodes.definitions.files import read_definition
from tests.support import hot
from tests.support.backends import ROOT, TOKEN, gallery, running_backend
from tests.support.streaming import asked

pytestmark = pytest.mark.django_db(transaction=True)

CHAT = "/v1/chat/completions"
ASK = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "temperature": 0,
    "max_tokens": 8,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
HOSTILE: dict[str, dict[str, Any]] = {
    "no end": {"grammar": "root ::= " + "(" * 100_000},
    "parentheses": {"grammar": "root ::= " + "(" * 128 + '"a"' + ")" * 128},
    "no rule": {"grammar": "root ::= nowhere"},
    "left recursion": {"grammar": 'root ::= root "a" | "b"'},
    "repetition": {"grammar": 'root ::= "a"{1,100000000}'},
    "many items": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "array", "minItems": 10**9, "items": {}}},
        }
    },
    "pattern": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"},
            },
        }
    },
    "bias": {"logit_bias": {"2147483647": 100}},
    "stop": {"stop": ["x" * 3_000_000]},
    "tokens": {"max_tokens": 2**31 - 1, "stop": [" "]},
}


async def post(body: dict[str, Any], path: str = CHAT) -> tuple[int, Any]:
    """Status and body of a whole answer."""
    answer = await hot.Client(application).post(path, body)
    assert answer is not None
    return answer.status, answer.body


async def said(body: dict[str, Any]) -> dict[str, Any]:
    """The only choice of a whole answer."""
    status, answer = await post(body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return dict(choice)


async def whole_and_streamed() -> None:
    """The same words either way, and the same figures."""
    status, whole = await post(ASK)
    assert status == 200, whole
    streaming = ASK | {"stream": True, "stream_options": {"include_usage": True}}
    async with asked(application, CHAT, streaming) as (streamed, work):
        await work
    assert streamed.text == whole["choices"][0]["message"]["content"] != ""
    *_, ended, usage, done = streamed.events
    assert ended["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert done == "[DONE]"


async def a_seed() -> None:
    """The same seed gives the same answer, another one another."""
    warm = ASK | {"temperature": 2, "max_tokens": 12}
    first, again, other = [(await said(warm | {"seed": seed}))["message"]["content"] for seed in (5, 5, 6)]
    assert first == again != other


async def a_tool() -> None:
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    choice = await said(ASK | forced | {"parallel_tool_calls": False})
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}


async def a_schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    choice = await said(ASK | {"response_format": wanted, "max_tokens": 60})
    assert json.loads(choice["message"]["content"]).keys() == {"city"}


async def other_dialects() -> None:
    """The same words in each of them, the same count of the prompt, and a schema that binds."""
    said_at_all = (await said(ASK))["message"]["content"]
    common = {"model": "smollm2", "messages": ASK["messages"]}
    status, message = await post({**common, "max_tokens": 8, "temperature": 0}, "/v1/messages")
    assert (status, message["content"][0]["text"]) == (200, said_at_all)
    assert message["stop_reason"] == "max_tokens"
    stop = {"stop_sequences": ["never said", said_at_all[-5:]], "max_tokens": 8, "temperature": 0}
    _, stopped = await post({**common, **stop}, "/v1/messages")
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", said_at_all[-5:])
    assert said_at_all.startswith(stopped["content"][0]["text"] + said_at_all[-5:])
    usage = message["usage"]
    counted = (await post(common, "/v1/messages/count_tokens"))[1]["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    asked = {"model": "smollm2", "input": ASK["messages"], "temperature": 0, "max_output_tokens": 8}
    _, response = await post(asked, "/v1/responses")
    assert response["output"][0]["content"][0]["text"] == said_at_all
    options = {"temperature": 0, "num_predict": 60}
    ollama = {**common, "stream": False, "format": CITY, "options": options}
    _, answer = await post(ollama, "/api/chat")
    assert json.loads(answer["message"]["content"]).keys() == {"city"}
    assert answer["eval_duration"] > 0
    tool = {"name": "get_weather", "input_schema": CITY}
    forced = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60}
    _, called = await post({**common, **forced}, "/v1/messages")
    assert called["content"][0]["input"].keys() == {"city"}


async def tokens_that_no_model_has() -> None:
    status, _ = await post({"model": "smollm2", "prompt": [2**31 - 1]}, "/v1/completions")
    assert status == 400


async def hostile() -> None:
    """Each is answered or refused, and the engine lives."""
    for name, change in HOSTILE.items():
        status, answer = await post(ASK | change)
        assert status in (200, 400), (name, answer)


PARTS = (whole_and_streamed, a_seed, a_tool, a_schema, other_dialects, tokens_that_no_model_has, hostile)


def test_a_model_answers_through_the_edge(tmp_path: Path, settings: Settings) -> None:
    """One test, as the model is loaded once."""
    gallery()
    source = ROOT / "examples" / "models" / "smollm2.yaml"
    (tmp_path / source.name).write_text(source.read_text())
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=0.2)
    options = options_from_mapping(read_definition(source).options)
    options.ModelFile = str(ROOT / "build" / "models" / options.Model)

    async def scenario() -> None:
        async with hot.serving() as picker, running_backend("llama-cpp") as engine:
            client = BackendClient(engine.address, TOKEN)
            loaded = await client.load_model(options, 60.0)
            await client.close()
            assert loaded.success, loaded.message
            await hot.in_thread(lambda: hot.replica(hot.node(), "smollm2", address=engine.address))
            for part in PARTS:
                await part()
            assert picker.in_flight() == 0
            assert engine.process.poll() is None

    asyncio.run(scenario())
    assert set(hot.counts().values()) == {0}
