"""Text through the edge when an engine is lost, refuses or says nothing."""

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from pytest_django import Settings

from localai_cluster.asgi import application
from localai_cluster.rpc.messages import PredictOptions
from nodes.gateway import generate
from nodes.models import NodeModel
from tests.support import backends, hot
from tests.support.answering import ASK, CHAT, definitions, finished, one, play, reply, streamed
from tests.support.scripted import CUT, Refusal, Scripted, Step, words
from tests.support.streaming import Streamed, asked

__all__ = ["definitions"]
pytestmark = pytest.mark.django_db(transaction=True)


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
    left = NodeModel.objects.filter(state="unloading").values_list("replica_index", "reason")
    assert list(left) == ([(0, "wrong_model")] if goes else [])


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


def test_an_engine_that_stalls_is_given_up(settings: Settings) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, stream_stall=0.2)
    answer = streamed(ASK, [*words("Half"), asyncio.Event()])
    assert answer.text == "Half"
    assert answer.events[-2]["error"]["code"] == "backend_timeout"


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


@pytest.mark.rule("grpc-Predict", "grpc-PredictStream")
@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer_that_comes_as_a_stream_has_the_limits_of_a_whole_one(
    n: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that offers only streams may send pieces without an end."""

    class Endless(Scripted):
        def script_for(self, request: PredictOptions) -> Iterable[Step]:
            return itertools.cycle([*words("word", prompt_tokens=0), 0.01])

    def ask(client: hot.Client, _: Any) -> Any:
        return reply(client.post(CHAT, ASK | {"n": n}))

    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=0.5)
    answer = play(ask, Endless(answers_whole=False))
    assert (answer.status, answer.body["error"]["code"]) == (503, "backend_timeout")
    assert "a streamed one may take longer" in answer.body["error"]["message"]
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=600)
    monkeypatch.setattr(generate, "MAX_MESSAGE_BYTES", 2000)
    answer = play(ask, Endless(answers_whole=False))
    assert (answer.status, answer.body["error"]["code"]) == (503, "backend_failed")


def test_the_first_choice_that_fails_ends_the_others() -> None:
    class Uneven(Scripted):
        def script_for(self, request: PredictOptions) -> Iterable[Step]:
            return [Refusal(grpc.StatusCode.INTERNAL)] if len(self.asked) > 2 else [asyncio.Event()]

    answer = play(lambda client, _: reply(client.post(CHAT, ASK | {"n": 3})), Uneven())
    assert (answer.status, answer.body["error"]["code"]) == (503, "backend_failed")


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
