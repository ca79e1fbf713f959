"""Text through the edge, with a scripted engine over real gRPC: whole and streamed, cancelled, cut, slow."""

import asyncio
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from pytest_django import Settings

from localai_cluster import clock
from localai_cluster.asgi import application
from localai_cluster.metrics import web
from localai_cluster.rpc.messages import ChatDelta, PredictOptions, Reply
from nodes.inference import streams
from nodes.models import BackendNode, NodeModel
from nodes.replicas import leaving
from operations.models import Operation
from tests.support import backends, hot
from tests.support.answering import CHAT, DEFINITION, finished, one, play, reply, streamed
from tests.support.scripted import CUT, Refusal, Scripted, Step, call, with_logprobs, words
from tests.support.streaming import Streamed, asked

pytestmark = pytest.mark.django_db(transaction=True)

COMPLETIONS = "/v1/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings) -> Path:
    """A models folder with `m`; requests wait two seconds for a load."""
    (tmp_path / "m.yaml").write_text(DEFINITION)
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=2.0)
    return tmp_path


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


def test_the_first_piece_leaves_at_once() -> None:
    """The engine has not said the second one yet."""

    async def scenario(*_: Any) -> None:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            await answer.until("One")
            assert not work.done()
            gate.set()
            await work
            assert answer.text == "One two"

    first, second = words("One two")
    gate = asyncio.Event()
    play(scenario, Scripted([first, gate, second]))


@pytest.mark.rule("R2.73")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_leaving_client_ends_the_engines_work(stream: bool) -> None:
    async def scenario(*_: Any) -> None:
        async with asked(application, CHAT, ASK | {"stream": stream}) as (answer, work):
            assert await clock.wait_until(lambda: _is(engine.sent > 0), timeout=60, every=0.01)
            answer.left.set()
            await work
            assert answer.whole is False
        assert await clock.wait_until(lambda: _is(engine.open == 0), timeout=60, every=0.01)

    engine = Scripted([*words("One"), asyncio.Event()])
    play(scenario, engine)


async def _is(fact: bool) -> bool:
    return fact


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    "script", [[CUT], [Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED)]], ids=["cut", "busy"]
)
def test_before_the_first_piece_a_request_goes_on_elsewhere(script: list[Step], stream: bool) -> None:
    async def scenario(client: hot.Client, _: Any) -> str:
        if stream:
            return (await finished(ASK | {"stream": True})).text
        body = (await reply(client.post(CHAT, ASK))).body
        return str(body["choices"][0]["message"]["content"])

    assert play(scenario, Scripted(script), Scripted(words("From the other"))) == "From the other"


@pytest.mark.rule("R2.76", "T-INF-21", "T-INF-23", "T-INF-4")
@pytest.mark.parametrize(
    ("refusal", "goes"),
    [
        (Refusal(grpc.StatusCode.FAILED_PRECONDITION, "no model"), True),
        (Refusal(grpc.StatusCode.UNKNOWN, "rpc error: model not loaded"), True),
        (Refusal(grpc.StatusCode.NOT_FOUND, "model identity mismatch: other"), True),
        (Refusal(grpc.StatusCode.NOT_FOUND, "no such voice"), False),
    ],
    ids=["not loaded", "a stock engine", "another model", "not found"],
)
def test_an_engine_without_the_model_leaves_the_picks_of_streams_too(refusal: Refusal, goes: bool) -> None:
    """D-LOST-REPLICA: and the request goes on elsewhere."""
    strange, right = Scripted([refusal]), Scripted(words("Right"))
    answer: Streamed = play(lambda *_: finished(ASK | {"stream": True}), strange, right)
    assert answer.status == (200 if goes else 503)
    assert len(right.asked) == (1 if goes else 0)
    left = NodeModel.objects.filter(state="unloading").values_list("replica_index", "loading_by")
    assert list(left) == ([(0, leaving.STRANGE)] if goes else [])


def test_a_whole_answer_that_breaks_off_is_made_again_elsewhere() -> None:
    """The client has nothing of it yet, so nothing of the first attempt may be in the answer."""
    engines = Scripted([*words("Lost words"), CUT]), Scripted(words("All of it"))
    answer = play(lambda client, _: reply(client.post(CHAT, ASK)), *engines)
    assert answer.body["choices"][0]["message"]["content"] == "All of it"
    assert len(engines[1].asked) == 1


def test_an_engine_that_dies_later_ends_the_stream_with_an_error() -> None:
    """What the client has cannot be taken back, so no other replica begins again."""

    async def scenario(*_: Any) -> Streamed:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            await answer.until("Half an")
            gate.set()
            await work
            return answer

    other, gate = Scripted(words("unasked")), asyncio.Event()
    answer: Streamed = play(scenario, Scripted([*words("Half an"), gate, CUT]), other)
    assert answer.text == "Half an"
    *_, failed, done = answer.events
    assert (failed["error"]["code"], failed["error"]["type"]) == ("backend_lost", "server_error")
    assert done == "[DONE]"
    assert answer.whole
    assert other.asked == []
    assert NodeModel.objects.loaded().count() == 1, "the dead replica gets no more requests"


def test_a_refusal_before_the_first_byte_has_its_status() -> None:
    """Not an event of a 200, as the reference has it: clients look at the status."""
    refused = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "ToolChoice names 'x', which is not among the tools")
    answer = streamed(ASK, [refused])
    assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
    assert json.loads(answer.taken)["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("cached", ["9" * 5000, "9" * 20, "99", "-1"], ids=len)
def test_odd_trailing_metadata_does_not_spoil_an_answer(cached: str) -> None:
    """An engine cannot have remembered more than the whole prompt."""
    odd = {"localai-cached-tokens": cached, "localai-finish-reason": "tired"}
    answer, _ = one(ASK, [*words("One two"), odd])
    assert answer.status == 200
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    usage = answer.body["usage"]
    assert usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) <= usage["prompt_tokens"]


@pytest.mark.parametrize(
    "engine", ["the request exceeds the available context size (8192 tokens)", "Context window"]
)
def test_a_prompt_beyond_the_context_has_openais_code(engine: str) -> None:
    answer, _ = one(ASK, [Refusal(grpc.StatusCode.INVALID_ARGUMENT, engine)])
    error = answer.body["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


@pytest.mark.rule("http-6.1")  # D-STREAM-STATUS
def test_a_model_that_is_not_loaded_in_time_is_a_503_of_a_stream_too(settings: Settings) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, model_load_wait=0.2)
    answer: Streamed = play(lambda *_: finished(ASK | {"stream": True}))
    assert answer.status == 503
    assert json.loads(answer.taken)["error"]["type"] == "model_loading"
    assert int(answer.headers["retry-after"]) >= 5


def test_an_engine_that_thinks_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error after that is an event, as the status has left."""

    async def scenario(*_: Any) -> Streamed:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            while answer.lines.count(": working") < 3:
                await answer.news()
            gate.set()
            await work
            return answer

    monkeypatch.setattr(streams, "QUIET", 0.02)
    gate = asyncio.Event()
    answer: Streamed = play(scenario, Scripted([gate, Refusal(grpc.StatusCode.INTERNAL, "out of ideas")]))
    assert answer.status == 200
    assert answer.events[0]["error"]["message"] == "out of ideas"


def test_an_engine_that_stalls_is_given_up(settings: Settings) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, stream_stall=0.2)
    answer = streamed(ASK, [*words("Half"), asyncio.Event()])
    assert answer.text == "Half"
    assert answer.events[-2]["error"]["code"] == "backend_timeout"


def test_no_limit_ends_a_live_stream(settings: Settings) -> None:
    """It takes longer than a request may take until its first piece."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=0.3)
    script = [step for word in words("a b c d e f") for step in (word, 0.1)]
    assert streamed(ASK, script).text == "a b c d e f"


def test_an_engine_that_says_nothing_is_given_up(settings: Settings) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=0.3)
    answer = streamed(ASK, [asyncio.Event()])
    assert answer.status == 503
    assert json.loads(answer.taken)["error"]["code"] == "backend_timeout"


def test_a_whole_answer_has_the_limit_of_a_request(settings: Settings) -> None:
    """It is one piece, so only a stream shows that the engine still works."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=0.3, stream_stall=60)
    answer, _ = one(ASK, [*words("Half"), asyncio.Event()])
    assert (answer.status, answer.body["error"]["code"]) == (503, "backend_timeout")
    assert "a streamed one may take longer" in answer.body["error"]["message"]


def test_a_process_that_stops_ends_its_streams_with_an_error() -> None:
    """A client that only sees its connection break cannot tell the answer's half from its whole."""

    async def scenario(*_: Any) -> Streamed:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            await answer.until("Half an")
            streams.end_all()
            await work
            return answer

    answer: Streamed = play(scenario, Scripted([*words("Half an"), asyncio.Event()]))
    assert answer.text == "Half an"
    *_, failed, done = answer.events
    assert (failed["error"]["type"], done) == ("server_error", "[DONE]")
    assert "stopping" in failed["error"]["message"]
    assert answer.whole


def test_a_process_that_stops_refuses_streams_that_have_not_begun() -> None:
    async def scenario(*_: Any) -> Streamed:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            assert await clock.wait_until(lambda: _is(engine.open > 0), timeout=60, every=0.01)
            streams.end_all()
            await work
            return answer

    engine = Scripted([asyncio.Event()])
    answer: Streamed = play(scenario, engine)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.rule("R2.73")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_may_leave_at_any_moment(stream: bool) -> None:
    """After so many steps of the loop: in the pick, in the call, between two pieces, at the end."""

    async def scenario(*_: Any) -> list[bool]:
        ended = []
        for steps in (*range(40), *range(40, 400, 12)):
            async with asked(application, CHAT, ASK | {"stream": stream, "n": 2}) as (answer, work):
                for _step in range(steps):
                    await asyncio.sleep(0)
                answer.left.set()
                await work
                ended.append(answer.whole)
        assert await clock.wait_until(lambda: _is(engine.open == 0), timeout=60, every=0.01)
        left = [task for task in asyncio.all_tasks() if "nodes.inference" in repr(task)]
        assert not left
        return ended

    engine = Scripted([step for word in words("a b c") for step in (word, 0.001)])
    assert not all(play(scenario, engine))


def test_a_slow_reader_does_not_hold_the_engine() -> None:
    """An answer of the usual size waits here, and the replica is free for others."""

    async def scenario(client: hot.Client, picker: Any) -> str:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            answer.reading.clear()
            assert await clock.wait_until(lambda: _is(engine.open == 0 < engine.sent), timeout=60, every=0.01)
            assert await clock.wait_until(lambda: _is(picker.in_flight() == 0), timeout=60, every=0.01)
            assert (await reply(client.post(CHAT, ASK))).status == 200
            answer.reading.set()
            await work
            return answer.text

    text = " ".join(f"word{number}" for number in range(2000))
    engine = Scripted(words(text))
    assert play(scenario, engine) == text


def test_a_slow_reader_costs_bounded_memory() -> None:
    """An engine that never ends is held where it is, for as long as nothing is read."""

    async def scenario(*_: Any) -> None:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, _work):
            answer.reading.clear()
            seen = -1

            async def held() -> bool:
                nonlocal seen
                before, seen = seen, engine.sent
                return seen == before

            assert await clock.wait_until(held, timeout=60, every=0.3)
            assert 0 < seen < 4000
            answer.reading.set()
            assert await clock.wait_until(lambda: _is(engine.sent > seen), timeout=60, every=0.01)
            answer.left.set()

    def endless() -> Iterable[Step]:
        while True:
            yield Reply(message=b"x" * 10_000)

    engine = Scripted(endless())
    play(scenario, engine)


def test_a_reader_who_takes_nothing_has_left(settings: Settings) -> None:
    async def scenario(*_: Any) -> None:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            await answer.until("One")
            answer.reading.clear()
            gate.set()
            await work
            assert not answer.whole
            assert "two" not in answer.text

    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, stream_stall=0.3)
    gate = asyncio.Event()
    play(scenario, Scripted([*words("One"), gate, *words("two")]))


def test_many_choices_of_one_request() -> None:
    """Each has its own seed, the prompt is counted once, and the replica counts one request."""
    answer, engine = one(ASK | {"n": 3, "seed": 5}, words("a b"))
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
    assert answer.body["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}
    assert sorted(options.Seed for options in engine.asked) == [5, 6, 7]


def test_the_first_choice_that_fails_ends_the_others() -> None:
    class Uneven(Scripted):
        def script_for(self, request: PredictOptions) -> Iterable[Step]:
            return [Refusal(grpc.StatusCode.INTERNAL)] if len(self.asked) > 2 else [asyncio.Event()]

    answer = play(lambda client, _: reply(client.post(CHAT, ASK | {"n": 3})), Uneven())
    assert (answer.status, answer.body["error"]["code"]) == (503, "backend_failed")


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


def test_the_template_of_a_definition(definitions: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (definitions / "m.yaml").write_text(
        DEFINITION + f"template:\n  jinja_template: true\n  chat: '{template}'\nstopwords: ['<user>']\n"
    )
    _, engine = one(ASK, words("x"))
    assert (engine.asked[0].Prompt, engine.asked[0].UseTokenizerTemplate) == ("<user>hello there", False)
    assert list(engine.asked[0].StopPrompts) == ["<user>"]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    parts = [{"type": "text", "text": "look"}, picture]
    _, engine = one(ASK | {"messages": [{"role": "user", "content": parts}]}, words("x"))
    assert (engine.asked[0].Prompt, list(engine.asked[0].Images)) == ("<user>look", ["aGk="])


def test_a_template_of_go_falls_back_to_the_models_own_with_a_warning(definitions: Path) -> None:
    (definitions / "m.yaml").write_text(DEFINITION + "template:\n  chat: '{{.Input}}'\n")
    engine = Scripted(words("x"))

    async def scenario(client: hot.Client, _: Any) -> Any:
        await reply(client.post(CHAT, ASK))
        return (await reply(client.request("GET", "/v1/models"))).body["data"]

    (listed,) = play(scenario, engine)
    assert engine.asked[0].UseTokenizerTemplate
    assert "Go's language" in listed["warnings"][0]


@pytest.mark.parametrize("name", ["m", "org/m", "a b"])
def test_one_model(name: str, definitions: Path) -> None:
    file = definitions / "other.yaml"
    file.write_text(DEFINITION.replace("name: m", f"name: {name}"))
    if name == "m":
        file = definitions / "m.yaml"
    path = f"/v1/models/{name}"
    answer = play(lambda client, _: reply(client.request("GET", path)), Scripted())
    told = {"id": name, "object": "model", "created": int(file.stat().st_mtime), "owned_by": "localai"}
    assert (answer.status, answer.body) == (200, told)


def test_a_model_that_is_not_defined_is_a_404() -> None:
    answer = play(lambda client, _: reply(client.request("GET", "/v1/models/m/x")), Scripted())
    assert (answer.status, answer.body["error"]["code"]) == (404, "model_not_found")


def test_a_model_is_told_to_callers_with_a_key() -> None:
    stranger = hot.Client(application, key=None)
    answer = play(lambda *_: reply(stranger.request("GET", "/v1/models/m")), Scripted())
    assert answer.status == 401


@pytest.mark.rule("A86")
@pytest.mark.rule("R1.94", "R2.2", "T-REG-117", "T-REG-118")
def test_parameters_of_requests_change_nothing_about_the_model() -> None:
    """A86: a hundred requests with varied parameters, one replica, a hundred answers."""

    async def scenario(client: hot.Client, _: Any) -> list[int]:
        asks = [
            client.post(path, body | {"max_tokens": number + 1, "temperature": number / 50, "seed": number})
            for number in range(50)
            for path, body in ((CHAT, ASK), (COMPLETIONS, {"model": "m", "prompt": "hello"}))
        ]
        return [(await reply(ask)).status for ask in asks]

    engine = Scripted(words("x"))
    assert play(scenario, engine) == [200] * 100
    assert len(hot.counts()) == 1
    assert not Operation.objects.exists()


def test_what_the_definition_says_counts_where_the_request_says_nothing(definitions: Path) -> None:
    (definitions / "m.yaml").write_text(
        "name: m\nbackend: x\nparameters: {model: m.gguf, temperature: 0.25, max_tokens: 9}\n"
    )
    _, engine = one(ASK | {"max_tokens": 3}, words("x"))
    assert (engine.asked[0].Temperature, engine.asked[0].Tokens) == (0.25, 3)
    assert (engine.asked[0].TopK, engine.asked[0].Seed > 0) == (40, True)


@pytest.mark.rule("grpc-Embedding", "grpc-TokenizeString", "grpc-Detokenize", "grpc-Rerank")
def test_tokens_and_documents() -> None:
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


def test_a_killed_engine_mid_stream_leaves_no_count() -> None:
    """The same with a real process and a real kill."""

    async def scenario(*_: Any) -> Streamed:
        async with backends.running_backend("echo", model="m.gguf", options=("delay_ms:50",)) as engine:
            await hot.in_thread(lambda: hot.replica(hot.node(), "m", address=engine.address))
            said = [{"role": "user", "content": "a b c d e f g h i j " * 50}]
            async with asked(application, CHAT, {"model": "m", "messages": said, "stream": True}) as (
                answer,
                work,
            ):
                await answer.until("b")
                engine.kill()
                await work
                return answer

    answer: Streamed = play(scenario)
    assert answer.events[-2]["error"]["code"] == "backend_lost"
    assert set(hot.counts().values()) == {0}
    assert not NodeModel.objects.loaded().exists()
