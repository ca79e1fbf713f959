"""Text through the edge: what whole and streamed answers say."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.metrics import web
from localai_cluster.rpc.messages import ChatDelta, Reply
from nodes.models import BackendNode
from tests.support import hot
from tests.support.answering import (
    ASK,
    CHAT,
    COMPLETIONS,
    DEFINITION,
    definitions,
    finished,
    one,
    play,
    reply,
    streamed,
)
from tests.support.scripted import Scripted, call, with_logprobs, words
from tests.support.streaming import Streamed

__all__ = ["definitions"]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.rule("T-INF-3")
def test_a_whole_answer() -> None:
    answer, engine = one(ASK, [*words("This is an answer."), {"localai-cached-tokens": "5"}])
    assert answer.status == 200
    assert answer.body["object"] == "chat.completion"
    assert answer.body["id"] == answer.headers["x-correlation-id"]
    (choice,) = answer.body["choices"]
    assert choice["message"]["content"] == "This is an answer."
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    assert answer.body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    (options,) = engine.asked
    assert options.UseTokenizerTemplate
    assert [(one.role, one.content) for one in options.Messages] == [("user", "hello there")]
    assert (options.ModelIdentity, options.CorrelationId) == ("m.gguf", answer.body["id"])


def test_cached_tokens_are_told_only_by_an_engine_that_knows() -> None:
    answer, _ = one(ASK, words("Yes"))
    assert "prompt_tokens_details" not in answer.body["usage"]


@pytest.mark.rule("grpc-PredictStream")
@pytest.mark.rule("T-INF-4")
def test_a_streamed_answer() -> None:
    """Role first, then each piece, then the reason, what it took if that was asked for, and the end."""
    answer = streamed(ASK | {"stream_options": {"include_usage": True}}, words("One two three"))
    assert (answer.status, answer.whole) == (200, True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == "One two three"
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {answer.headers["x-correlation-id"]}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.rule("http-6.3", "R2.77")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_node_is_told_if_that_is_switched_on(stream: bool, settings: Settings) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, expose_node_header=True)
    answer: Streamed = play(lambda *_: finished(ASK | {"stream": stream}), Scripted(words("x")))
    assert answer.headers["x-localai-node"] == str(BackendNode.objects.get().id)


def test_many_choices_of_one_request() -> None:
    """Each has its own seed, the prompt is counted once, and the replica counts one request."""
    answer, engine = one(ASK | {"n": 3, "seed": 5}, words("a b"))
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
    assert answer.body["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert sorted(options.Seed for options in engine.asked) == [5, 6, 7]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tools_whole_and_streamed() -> None:
    body = ASK | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    script = call(0, "weather", '{"city":', ' "Rome"}')
    answer, engine = one(body, script)
    (choice,) = answer.body["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (called,) = choice["message"]["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert json.loads(engine.asked[0].Tools) == [TOOL]
    assert json.loads(engine.asked[0].ToolChoice) == body["tool_choice"]

    parts = [
        part
        for event in streamed(body, script).events[:-1]
        for part in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert parts[0]["id"].startswith("call_")
    assert parts[0]["type"] == "function"
    assert "id" not in parts[1]
    assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Rome"}'


@pytest.mark.parametrize(("path", "body"), [(CHAT, ASK), ("/v1/responses", {"model": "m", "input": "hi"})])
def test_calls_of_requests_with_the_same_id_have_different_ids(path: str, body: dict[str, Any]) -> None:
    """A client matches results to calls by these ids, also if it sends one X-Correlation-ID all day."""

    async def twice(client: hot.Client, _: Any) -> list[str]:
        headers = {"X-Correlation-ID": "session-1"}
        answers = [await reply(client.post(path, body, headers=headers)) for _ in range(2)]
        return [_called(answer.body) for answer in answers]

    first, second = play(twice, Scripted(call(0, "weather", "{}")))
    assert first != second


def _called(body: Any) -> str:
    if "choices" in body:
        return str(body["choices"][0]["message"]["tool_calls"][0]["id"])
    return str(next(item["call_id"] for item in body["output"] if item["type"] == "function_call"))


def test_reasoning_comes_beside_the_answer() -> None:
    script = [
        Reply(chat_deltas=[ChatDelta(reasoning_content="Hm."), ChatDelta(content="Yes.")], message=b"raw")
    ]
    message = one(ASK, script)[0].body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


def test_logprobs() -> None:
    answer, engine = one(ASK | {"logprobs": True, "top_logprobs": 1}, with_logprobs("a b"))
    told = answer.body["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in told] == [("a", -0.5), (" b", -0.5)]
    assert told[0]["top_logprobs"][0]["token"] == "other"
    assert (engine.asked[0].Logprobs, engine.asked[0].TopLogprobs) == (1, 1)
    legacy, _ = one({"model": "m", "prompt": "x", "logprobs": 1}, with_logprobs("a b"), COMPLETIONS)
    assert legacy.body["choices"][0]["logprobs"] == {
        "tokens": ["a", " b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"other": -1.5}, {"other": -1.5}],
        "text_offset": [0, 1],
    }


def test_logprobs_of_an_engine_that_tells_none_are_refused() -> None:
    answer, _ = one(ASK | {"logprobs": True}, words("a b"))
    assert (answer.status, answer.body["error"]["param"]) == (400, "logprobs")


def test_completions_whole_and_streamed() -> None:
    body = {"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 2}
    answer, engine = one(body, words("x y"), COMPLETIONS)
    assert answer.body["object"] == "text_completion"
    assert [choice["text"] for choice in answer.body["choices"]] == ["x y"] * 4
    assert {choice["finish_reason"] for choice in answer.body["choices"]} == {"length"}
    assert answer.body["usage"] == {"prompt_tokens": 14, "completion_tokens": 8, "total_tokens": 22}
    assert sorted(options.Prompt for options in engine.asked) == ["a", "a", "b", "b"]
    assert streamed({"model": "m", "prompt": "a"}, words("x y"), COMPLETIONS).text == "x y"


def test_a_prompt_of_token_ids_is_made_text_by_the_engine() -> None:
    answer, engine = one({"model": "m", "prompt": [104, 105]}, words("x"), COMPLETIONS)
    assert answer.status == 200
    assert engine.asked[0].Prompt == "hi"


@pytest.mark.rule("grpc-Predict")
def test_an_engine_that_does_not_stream_answers_whole() -> None:
    engine = Scripted(words("at once"), streams=False)
    answer: Streamed = play(lambda *_: finished(ASK | {"stream": True}), engine)
    assert answer.text == "at once"


@pytest.mark.rule("grpc-Predict", "grpc-PredictStream")
def test_a_whole_answer_is_one_piece_unless_the_engine_only_streams() -> None:
    """No token passes through the web process on its own, and the end is told as that of a stream."""
    script = [*words("One two"), {"localai-cached-tokens": "3", "localai-finish-reason": "length"}]
    for engine in (Scripted(script, streams=False), Scripted(script, answers_whole=False)):
        answer = play(lambda client, _: reply(client.post(CHAT, ASK)), engine)
        (choice,) = answer.body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("One two", "length")
        assert answer.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert len(engine.asked) == 1


@pytest.mark.parametrize("streams", [True, False])
def test_the_first_token_is_measured_of_what_clients_have_streamed(streams: bool) -> None:
    """However the engine answers."""

    def measured() -> float:
        samples = (one for metric in web.FIRST_TOKEN.collect() for one in metric.samples)
        return sum(one.value for one in samples if one.name.endswith("_count") and one.labels["model"] == "m")

    before = measured()
    play(lambda client, _: reply(client.post(CHAT, ASK)), Scripted(words("a b"), answers_whole=not streams))
    assert measured() == before
    play(lambda *_: finished(ASK | {"stream": True}), Scripted(words("a b"), streams=streams))
    assert measured() == before + 1


def test_a_character_may_be_cut_between_two_pieces() -> None:
    euro = "€".encode()
    answer, _ = one(ASK, [Reply(message=euro[:1]), Reply(message=euro[1:] + b"5 \xff")])
    assert answer.body["choices"][0]["message"]["content"] == "€5 \ufffd"


@pytest.mark.rule("grpc-Embedding", "grpc-TokenizeString", "grpc-Detokenize", "grpc-Rerank")
def test_tokens_and_documents(definitions: Path) -> None:
    (definitions / "m.yaml").write_text(DEFINITION + "token_ids: true\n")

    async def scenario(client: hot.Client, _: Any) -> list[hot.Reply]:
        return [
            await reply(client.post("/v1/tokenize", {"model": "m", "content": "hi"})),
            await reply(client.post("/v1/detokenize", {"model": "m", "tokens": [104, 105]})),
            await reply(
                client.post(
                    "/v1/rerank", {"model": "m", "query": "q", "documents": ["a", "ccc", "bb"], "top_n": 2}
                )
            ),
            await reply(client.post("/v1/embeddings", {"model": "m", "input": [[1, 2, 3], [4]]})),
        ]

    engine = Scripted()
    tokens, text, ranked, vectors = play(scenario, engine)
    assert tokens.body == {"tokens": [104, 105]}
    assert text.body == {"content": "hi"}
    assert [(one["index"], one["document"]["text"]) for one in ranked.body["results"]] == [
        (1, "ccc"),
        (2, "bb"),
    ]
    assert ranked.body["usage"] == {"total_tokens": 9, "prompt_tokens": 9}
    assert [one["embedding"][0] for one in vectors.body["data"]] == [3.0, 1.0]


def test_a_body_beyond_the_limit_is_a_413() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * (8 << 20)}]}).encode()
    answer, _ = one(body, [])
    assert (answer.status, answer.body["error"]["type"]) == (413, "invalid_request_error")
