"""Clients that others wrote, each a process of its own, against the edge; the engine does what they ask."""

import asyncio
import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from pytest_django import Settings

from localai_cluster.rpc.messages import PredictOptions
from tests.sdks.install import Missing, command, environment
from tests.support import hot
from tests.support.effort import swept
from tests.support.environment import API_KEY
from tests.support.scripted import Refusal, Scripted, Step, call, running, words
from tests.support.served import served

pytestmark = [pytest.mark.django_db(transaction=True), swept]

SCRIPTS = (
    "anthropic_python.py",
    "ollama_python.py",
    "litellm_python.py",
    "openai_node.mjs",
    "ollama_go/main.go",
    "codex_cli.py",
    "claude_code.py",
    "smolagents_python.py",
)
STORING = ("langchain_python.py", "ai_sdk_node.mjs")
"""Those that go on from stored responses, or without the store from what they have kept."""
PLAYED = [(script, False) for script in (*SCRIPTS, *STORING)] + [(script, True) for script in STORING]
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "AI_SDK_LOG_WARNINGS": "false"}
"""LiteLLM would ask the network for prices."""
FAILURE = Refusal(grpc.StatusCode.INTERNAL, "out of ideas")
OWN_TOOLS = {
    "exec_command": {"cmd": "echo sunny"},
    "Bash": {"command": "echo sunny", "description": "Say it"},
}
"""Tools of Codex CLI and Claude Code, and what the engine calls them with, once."""


class Obliging(Scripted):
    """Does what the request asks for: `playing.py` says what that is."""

    def script_for(self, request: PredictOptions) -> Iterable[Step]:
        said = request.Messages[-1] if request.Messages else None
        text = said.content if said else request.Prompt
        if (called := self._call(request)) is not None:
            return called
        if request.Grammar:
            return words('{"name": "Rome", "people": 3}')
        if text == "Break off.":
            return [*words("Half"), FAILURE]
        if text == "Fail.":
            return [FAILURE]
        return [*words("Hello you, how are you?"), {"localai-cached-tokens": "3"}]

    def _call(self, request: PredictOptions) -> Iterable[Step] | None:
        names = {tool["function"]["name"] for tool in json.loads(request.Tools or "[]")}
        has_result = any(
            message.role == "tool" or (message.role == "user" and "Observation:" in message.content)
            for message in request.Messages
        )
        if "final_answer" in names and has_result:
            return call(0, "final_answer", json.dumps({"answer": "Hello you, how are you?"}), id="call_2")
        if "weather" in names and not has_result:
            return call(0, "weather", '{"city":', ' "Rome"}', id="call_1")
        for name in names & OWN_TOOLS.keys() if not has_result else ():
            return call(0, name, json.dumps(OWN_TOOLS[name]), id="call_1")
        return None


@pytest.mark.parametrize(("script", "is_stored"), PLAYED)
def test_a_client_that_others_wrote(script: str, is_stored: bool, tmp_path: Path, settings: Settings) -> None:
    """Review, *Clients*: C2, C5 and C6 among others."""
    try:
        words_of_command = command(script)
    except Missing as reason:
        pytest.skip(f"{script}: {reason}")
    for name in ("m", "cold"):
        text = f"name: {name}\nbackend: scripted\nparameters: {{model: {name}.gguf}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    settings.CLUSTER = dataclasses.replace(
        settings.CLUSTER,
        models_path=tmp_path,
        model_load_wait=0.2,
        ollama_load_wait=0.2,
        response_retention=3600.0 if is_stored else 0.0,
    )

    async def whole() -> tuple[int | None, str]:
        async with hot.serving() as picker, running(Obliging()) as address, served() as url:
            await hot.in_thread(lambda: hot.replica(hot.node(), "m", address=address))
            server = {"SDK_URL": url, "SDK_KEY": API_KEY, "SDK_STORE": str(int(is_stored))}
            played = await asyncio.create_subprocess_exec(
                *words_of_command,
                env={**os.environ, **QUIET, **environment(script), **server},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said, _ = await played.communicate()
            assert picker.in_flight() == 0
            return played.returncode, said.decode()

    code, said = asyncio.run(whole())
    print(said)
    assert code == 0, said
