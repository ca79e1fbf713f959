"""Streams of text: the first piece leaves at once; slow readers, leaving clients and processes that stop."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pytest_django import Settings

from localai_cluster.asgi import application
from localai_cluster.metrics import web as metrics
from localai_cluster.rpc.messages import PredictOptions, Reply
from nodes.gateway import endpoint, streams
from tests.conftest import until
from tests.support import hot
from tests.support.answering import ASK, CHAT, definitions, finished, play, reply, streamed
from tests.support.scripted import Refusal, Scripted, Step, running, words
from tests.support.streaming import Streamed, asked

__all__ = ["definitions"]
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def held(definitions: Path) -> Iterator[tuple[asyncio.Runner, asyncio.Event]]:
    """A web process with a replica that says one word, and a second one after the event."""
    parts, gate = contextlib.AsyncExitStack(), asyncio.Event()
    first, second = words("One two")

    async def start() -> None:
        await parts.enter_async_context(hot.serving())
        address = await parts.enter_async_context(running(Scripted([first, gate, second])))
        await hot.in_thread(lambda: hot.replica(hot.node(), "m", address=address))

    with asyncio.Runner() as runner:
        runner.run(start())
        try:
            yield runner, gate
        finally:
            runner.run(parts.aclose())
    assert set(hot.counts().values()) == {0}


def test_the_first_piece_leaves_at_once(held: tuple[asyncio.Runner, asyncio.Event]) -> None:
    """The engine has not said the second one yet."""
    runner, gate = held

    async def scenario() -> None:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            await answer.until("One")
            assert not work.done()
            gate.set()
            await work
            assert answer.text == "One two"

    runner.run(scenario())


@pytest.mark.rule("R2.73")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_leaving_client_ends_the_engines_work(stream: bool) -> None:
    async def scenario(*_: Any) -> None:
        async with asked(application, CHAT, ASK | {"stream": stream}) as (answer, work):
            await until(lambda: engine.sent > 0)
            answer.left.set()
            await work
            assert answer.whole is False
        await until(lambda: engine.open == 0)

    engine = Scripted([*words("One"), asyncio.Event()])
    play(scenario, engine)


def test_an_engine_that_thinks_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error after that is an event, as the status has left."""

    async def scenario(*_: Any) -> Streamed:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            while answer.lines.count(": working") < 3:
                await answer.news()
            gate.set()
            await work
            return answer

    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.02)
    gate = asyncio.Event()
    answer: Streamed = play(scenario, Scripted([gate, Refusal(grpc.StatusCode.INTERNAL, "out of ideas")]))
    assert answer.status == 200
    assert answer.events[0]["error"]["message"] == "out of ideas"


def test_no_limit_ends_a_live_stream(settings: Settings) -> None:
    """It takes longer than a request may take until its first piece."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, request_timeout=0.3)
    script = [step for word in words("a b c d e f") for step in (word, 0.1)]
    assert streamed(ASK, script).text == "a b c d e f"


def test_a_process_that_stops_ends_its_streams_with_an_error() -> None:
    """A client that only sees its connection break cannot tell the answer's half from its whole."""

    async def scenario(*_: Any) -> Streamed:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            await answer.until("Half an")
            endpoint.cancel_all_answers()
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
            await until(lambda: engine.open > 0)
            endpoint.cancel_all_answers()
            await work
            return answer

    engine = Scripted([asyncio.Event()])
    answer: Streamed = play(scenario, engine)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.rule("R2.73")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_may_leave_at_any_moment(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many steps of the loop: in the pick, in the call, between two pieces, at the end."""
    monkeypatch.setattr(endpoint, "WATCH_DELAY_SECONDS", 0.0)

    async def scenario(*_: Any) -> list[bool]:
        ended = []
        for steps in (*range(40), *range(40, 400, 12)):
            async with asked(application, CHAT, ASK | {"stream": stream, "n": 2}) as (answer, work):
                for _step in range(steps):
                    await asyncio.sleep(0)
                answer.left.set()
                await work
                ended.append(answer.whole)
        await until(lambda: engine.open == 0)
        names = ("gateway/endpoint.py", "gateway/generate.py", "gateway/streams.py")
        left = [task for task in asyncio.all_tasks() if any(name in repr(task) for name in names)]
        assert not left
        return ended

    engine = Scripted([step for word in words("a b c") for step in (word, 0.001)])
    assert not all(play(scenario, engine))


def test_the_tokens_of_an_answer_that_is_stopped_count() -> None:
    """The engine has generated them, and a chat whose answers are stopped is no chat without tokens."""

    async def scenario(*_: Any) -> metrics.ModelCounts:
        metrics.take_model_counts()
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            await until(lambda: "One two" in answer.text)
            answer.left.set()
            await work
        await until(lambda: engine.open == 0)
        return metrics.take_model_counts()["m"]

    engine = Scripted([*words("One two"), 60.0])
    counts = play(scenario, engine)
    assert (counts.requests, counts.prompt_tokens, counts.completion_tokens) == (1, 7, 2)


def test_one_failed_choice_ends_the_others() -> None:
    """Without waiting for the end of what they say, which may be hours away."""

    class Fails(Scripted):
        def script_for(self, request: PredictOptions) -> Iterable[Step]:
            if request is self.asked[0]:
                return [*words("One"), Refusal(grpc.StatusCode.INTERNAL, "out of ideas")]
            return (step for _ in itertools.count() for step in (*words("more"), 0.001))

    answer: Streamed = play(lambda *_: finished(ASK | {"stream": True, "n": 2}), Fails())
    *_, failed, done = answer.events
    assert (failed["error"]["message"], done) == ("out of ideas", "[DONE]")


def test_a_slow_reader_does_not_hold_the_engine() -> None:
    """An answer of the usual size waits here, and the replica is free for others."""

    async def scenario(client: hot.Client, picker: Any) -> str:
        async with asked(application, CHAT, ASK | {"stream": True}) as (answer, work):
            answer.reading.clear()
            await until(lambda: engine.open == 0 < engine.sent)
            await until(lambda: picker.in_flight() == 0)
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

            def held() -> bool:
                nonlocal seen
                before, seen = seen, engine.sent
                return seen == before

            await until(held, every=0.3)
            assert 0 < seen < 4000
            answer.reading.set()
            await until(lambda: engine.sent > seen)
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
