"""Requests for text through the edge, with scripted engines as the replicas of model `m`."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pytest_django import Settings

from localai_cluster.asgi import application
from nodes.models import ReplicaUse
from tests.support import hot
from tests.support.replicas import forget_nodes
from tests.support.scripted import Scripted, Step, running
from tests.support.streaming import Streamed, asked

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
DEFINITION = "name: m\nbackend: scripted\nparameters: {model: m.gguf}\n"

Scenario = Callable[[hot.Client, Any], Awaitable[Any]]


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings) -> Path:
    """Create a models folder with `m`; requests wait two seconds for a load."""
    (tmp_path / "m.yaml").write_text(DEFINITION)
    settings.CLUSTER = dataclasses.replace(
        settings.CLUSTER, models_path=tmp_path, model_load_wait=2.0, ollama_load_wait=2.0
    )
    return tmp_path


def play(scenario: Scenario, *engines: Scripted) -> Any:
    """Run a scenario with these engines as replicas of `m`; check at the end that no request is in flight."""

    async def whole() -> Any:
        async with AsyncExitStack() as stack:
            picker = await stack.enter_async_context(hot.serving())
            for number, engine in enumerate(engines):
                address = await stack.enter_async_context(running(engine))
                await hot.in_thread(
                    lambda n=number, a=address: hot.replica(
                        # In the order in which an unknown prompt finds them.
                        hot.node(f"n{n}", id=UUID(int=n + 1)),
                        "m",
                        index=n,
                        address=a,
                    )
                )
            outcome = await scenario(hot.Client(application), picker)
            assert picker.in_flight() == 0
        assert all(engine.open == 0 for engine in engines), "an engine still works for nobody"
        return outcome

    forget_nodes()  # of an earlier play in the same test
    outcome = asyncio.run(whole())
    assert set(hot.counts().values()) <= {0}
    assert not ReplicaUse.objects.exclude(count=0).exists()
    return outcome


async def reply(waiting: Awaitable[hot.Reply | None]) -> hot.Reply:
    """Return the reply; fail if there is none."""
    answered = await waiting
    assert answered is not None
    return answered


def one(body: Any, script: Iterable[Step], path: str = CHAT) -> tuple[hot.Reply, Scripted]:
    """Return the reply to one request, and the engine that generated it."""
    engine = Scripted(script)
    return play(lambda client, _: reply(client.post(path, body)), engine), engine


async def finished(body: Any, path: str = CHAT) -> Streamed:
    """Return a streamed answer after its end."""
    async with asked(application, path, body) as (answer, work):
        await work
        return answer


def streamed(body: Any, script: Iterable[Step], path: str = CHAT) -> Streamed:
    """Return a streamed answer of an engine with this script, after its end."""
    answer: Streamed = play(lambda *_: finished(body | {"stream": True}, path), Scripted(script))
    return answer
