"""Clients that others wrote, each a process of its own, against the edge; the engine does what they ask."""

import asyncio
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from pytest_django import Settings

from localai_cluster.rpc.messages import PredictOptions
from tests.sdks.install import command, install
from tests.support import hot
from tests.support.effort import swept
from tests.support.environment import API_KEY
from tests.support.scripted import Refusal, Scripted, Step, call, running, words
from tests.support.served import served

pytestmark = [pytest.mark.django_db(transaction=True), swept]

SCRIPTS = ("anthropic_python.py", "ollama_python.py", "litellm_python.py", "openai_node.mjs")
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""LiteLLM would ask the network for prices."""
FAILURE = Refusal(grpc.StatusCode.INTERNAL, "out of ideas")


class Obliging(Scripted):
    """Does what the request asks for: `playing.py` says what that is."""

    def script_for(self, request: PredictOptions) -> Iterable[Step]:
        said = request.Messages[-1] if request.Messages else None
        text = said.content if said else request.Prompt
        if request.Tools and said and said.role != "tool":
            return call(0, "weather", '{"city":', ' "Rome"}', id="call_1")
        if request.Grammar:
            return words('{"name": "Rome", "people": 3}')
        if text == "Break off.":
            return [*words("Half"), FAILURE]
        if text == "Fail.":
            return [FAILURE]
        return [*words("Hello you, how are you?"), {"localai-cached-tokens": "3"}]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """The clients."""
    install()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_client_that_others_wrote(script: str, tmp_path: Path, settings: Settings) -> None:
    for name in ("m", "cold"):
        text = f"name: {name}\nbackend: scripted\nparameters: {{model: {name}.gguf}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path, model_load_wait=0.2)

    async def whole() -> tuple[int | None, str]:
        async with hot.serving() as picker, running(Obliging()) as address, served() as url:
            await hot.in_thread(lambda: hot.replica(hot.node(), "m", address=address))
            played = await asyncio.create_subprocess_exec(
                *command(script),
                env={**os.environ, **QUIET, "SDK_URL": url, "SDK_KEY": API_KEY},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await played.communicate()
            assert picker.in_flight() == 0
            return played.returncode, said.decode()

    code, said = asyncio.run(whole())
    print(said)
    assert code == 0, said
