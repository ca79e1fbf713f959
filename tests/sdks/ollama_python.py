"""Ollama's client for Python."""

import json
from typing import Any

import ollama
from playing import ASK, BREAK, CALLED, CITY, FAIL, KEY, PLACE, SAID, SCHEMA, URL, play, raises

client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"})
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}


def ask(text: str = ASK, **more: Any) -> dict[str, Any]:
    """A request."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def chat() -> None:
    """A whole answer and what it took."""
    answer = client.chat(
        **ask(options={"temperature": 0, "num_predict": 64, "num_ctx": 512}, keep_alive="5m")
    )
    assert (answer.message.content, answer.message.role) == (SAID, "assistant")
    assert (answer.done, answer.done_reason, answer.eval_count, answer.prompt_eval_count) == (
        True,
        "stop",
        5,
        7,
    )
    assert answer.total_duration >= answer.eval_duration >= 0
    assert answer.created_at.endswith("Z")


def stream() -> None:
    """The pieces."""
    parts = list(client.chat(**ask(), stream=True))
    assert "".join(part.message.content for part in parts) == SAID
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 5


def generates() -> None:
    """The same for one prompt."""
    assert client.generate(model="m", prompt=ASK, system="Be brief.").response == SAID
    assert "".join(part.response for part in client.generate(model="m", prompt=ASK, stream=True)) == SAID
    assert client.generate(model="m", prompt=ASK, raw=True).response == SAID


def tools() -> None:
    """A call, whole and streamed, and its result."""
    answer = client.chat(**ask(tools=[TOOL]))
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", CALLED)
    parts = list(client.chat(**ask(tools=[TOOL]), stream=True))
    assert [one.function.arguments for part in parts for one in part.message.tool_calls or ()] == [CALLED]
    said = [*ask()["messages"], answer.message, {"role": "tool", "content": "sun", "tool_name": "weather"}]
    assert client.chat(model="m", messages=said, tools=[TOOL]).message.content == SAID


def structured() -> None:
    """JSON, of a schema or not."""
    for form in (SCHEMA, "json"):
        assert json.loads(client.chat(**ask(format=form)).message.content) == CITY


def embeddings() -> None:
    """Vectors, in both forms."""
    answer = client.embed(model="m", input=["one", "two"])
    assert len(answer.embeddings) == 2
    assert client.embeddings(model="m", prompt="one").embedding == answer.embeddings[0]


def models() -> None:
    """What there is, and what is loaded."""
    assert [model.model for model in client.list().models] == ["cold", "m"]
    assert [model.model for model in client.ps().models] == ["m"]
    assert client.show("m").capabilities == ["completion"]


def errors() -> None:
    """Refusals, and streams that break off."""
    for stream in (False, True):

        def status(stream: bool = stream, **wish: Any) -> int:
            """That of the refusal."""
            error = raises(
                ollama.ResponseError,
                lambda: list(client.chat(**wish, stream=True)) if stream else client.chat(**wish),
            )
            assert error.error, error
            return int(error.status_code)

        assert status(**ask(model="none")) == 404
        assert status(**ask(options={"top_p": 3})) == 400
        assert status(**ask(model="cold")) == 503
        assert status(**ask(FAIL)) == 503
    broken = raises(ollama.ResponseError, lambda: list(client.chat(**ask(BREAK), stream=True)))
    assert "out of ideas" in broken.error
    other = ollama.Client(host=URL, headers={"Authorization": "Bearer wrong"})
    assert raises(ollama.ResponseError, lambda: other.chat(**ask())).status_code == 401
    assert raises(ollama.ResponseError, lambda: client.show("none")).status_code == 404


play(chat, stream, generates, tools, structured, embeddings, models, errors)
