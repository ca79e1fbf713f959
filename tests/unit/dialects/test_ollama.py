"""Ollama's dialect: what a request may be, what an engine is told, lines and their order."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit.errors import InvalidInput, Unavailable
from nodes.dialects import blocks
from nodes.dialects.ollama import CHAT, GENERATE, UNSUPPORTED_FIELDS, parse_chat, parse_generate, render_error
from nodes.gateway.generation import Conversation, Dialect, Durations, TextDelta, Usage, merge_deltas
from tests.support.deltas import HEAD, answers, played

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PNG = "iVBORw0KGgo="
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ASK["messages"] * 10_000}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "images": ["!!"]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages"),
        ({"stream": "yes"}, "stream"),
        ({"format": "xml"}, "format"),
        ({"format": RECURSIVE}, "format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"options": 5}, "options"),
        ({"options": {"temperature": -1}}, "options"),
        ({"options": {"num_predict": 0}}, "options"),
        ({"options": {"num_predict": -3}}, "options"),
        ({"options": {"top_p": 2}}, "options"),
        ({"options": {"stop": ["x"] * 17}}, "options"),
        ({"options": {"seed": 1.5}}, "options"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as told:
        parse_chat(ASK | change)
    assert told.value.field == field
    assert field in json.loads(render_error(told.value).body)["error"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"system": 5}, "system"),
        ({"images": ["!!"]}, "images"),
        ({"images": [PNG], "raw": True}, "images"),
        *[({name: [1]}, name) for name in UNSUPPORTED_FIELDS],
    ],
)
def test_a_wrong_field_of_a_prompt_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as told:
        parse_generate(PROMPT | change)
    assert told.value.field == field


def test_messages_reach_the_engine() -> None:
    """Results of tools have no ids of their own: they come in the order of the calls."""
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    asked = parse_chat(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "see", "images": [PNG]},
                {"role": "assistant", "thinking": "hm", "tool_calls": [call, call | {"id": "own"}]},
                {"role": "tool", "content": "sun", "tool_name": "f"},
                {"role": "tool", "content": "rain", "tool_name": "f"},
            ],
            "tools": [TOOL],
            "keep_alive": "5m",
        }
    )
    (told,) = asked.prompts
    assert isinstance(told, Conversation)
    answer = told.messages[2]
    calls = json.loads(answer.tool_calls)
    assert [one["function"] for one in calls] == [{"name": "f", "arguments": '{"a":1}'}] * 2
    assert [one.tool_call_id for one in told.messages[3:]] == [one["id"] for one in calls]
    assert (answer.reasoning, told.messages[3].name, told.images) == ("hm", "f", (PNG,))
    assert (json.loads(told.tools), told.tool_choice, asked.stream) == ([TOOL], "auto", True)


def call(name: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}}


@pytest.mark.parametrize(
    ("results", "answered"),
    [
        (["g", "f"], [1, 0]),
        (["g", "g", "f"], [1, 2, 0]),
        ([None, "g", None], [0, 1, 2]),
        (["other", "g", "f"], [0, 1, 2]),
    ],
)
def test_a_result_belongs_to_the_call_of_its_tool(results: list[str | None], answered: list[int]) -> None:
    """Of several calls that wait, the first of the tool; the first at all if none is of it."""
    messages = [
        {"role": "assistant", "tool_calls": [call("f"), call("g"), call("g")]},
        *({"role": "tool", "content": "sun", "tool_name": name} for name in results),
    ]
    (told,) = parse_chat({"model": "m", "messages": messages}).prompts
    assert isinstance(told, Conversation)
    ids = [one["id"] for one in json.loads(told.messages[0].tool_calls)]
    assert [ids.index(one.tool_call_id) for one in told.messages[1:]] == answered


def test_a_prompt_reaches_the_engine() -> None:
    (told,) = parse_generate(PROMPT | {"system": "Be brief.", "images": [PNG], "stream": False}).prompts
    assert isinstance(told, Conversation)
    assert [(one.role, one.content) for one in told.messages] == [("system", "Be brief."), ("user", "hello")]
    assert told.images == (PNG,)
    assert parse_generate(PROMPT | {"raw": True}).prompts == ("hello",)
    assert not parse_generate(PROMPT | {"stream": False}).stream


def test_options_reach_the_engine() -> None:
    options = {
        "num_predict": 5,
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 7,
        "stop": "x",
        "repeat_penalty": 1.1,
        "frequency_penalty": 1,
        "presence_penalty": -1,
    }
    told = parse_chat(ASK | {"options": options | {"num_ctx": 4096, "num_gpu": 1}, "format": "json"}).sampling
    assert (told.max_tokens, told.temperature, told.top_k, told.top_p) == (5, 0, 3, 0.5)
    assert (told.min_p, told.seed, told.stop, told.repeat_penalty) == (0.1, 7, ("x",), 1.1)
    assert (told.frequency_penalty, told.presence_penalty) == (1, -1)
    assert told.grammar == '{"type":"object"}'
    assert parse_chat(ASK | {"format": {"type": "array"}}).sampling.grammar == '{"type":"array"}'
    assert parse_chat(ASK | {"format": "", "options": {"num_predict": -1}}).sampling.max_tokens is None
    asked = parse_chat(ASK | {"logprobs": True, "top_logprobs": 2}).sampling
    assert (asked.logprobs, asked.top_logprobs) == (True, 2)


def lines(stream: bytes) -> list[dict[str, Any]]:
    """The lines."""
    assert stream.endswith(b"\n")
    return [json.loads(line) for line in stream.splitlines()]


@pytest.mark.parametrize("dialect", [CHAT, GENERATE], ids=["chat", "generate"])
@given(deltas=answers(), data=st.data())
def test_a_stream_says_what_the_whole_answer_says(
    dialect: Dialect, deltas: list[TextDelta], data: st.DataObject
) -> None:
    """However the deltas are bundled: pieces, then all calls in one line, then the end."""
    *parts, last = lines(played(dialect, deltas, data))
    whole = json.loads(dialect.render_response(HEAD, deltas))
    (choice,) = merge_deltas(deltas, 1)
    assert [part["done"] for part in parts] == [False] * len(parts)
    assert last["done"] is True
    ends = ("done_reason", "total_duration", "prompt_eval_count", "eval_count", "created_at", "model")
    assert [last[name] for name in ends] == [whole[name] for name in ends]
    told = [part["message"] if dialect is CHAT else part for part in parts]
    mine = whole["message"] if dialect is CHAT else whole
    text = "content" if dialect is CHAT else "response"
    assert "".join(one[text] for one in told) == mine[text] == choice.text
    assert "".join(one.get("thinking", "") for one in told) == mine.get("thinking", "") == choice.reasoning
    if dialect is CHAT:
        calls = [call for one in told for call in one.get("tool_calls", ())]
        assert calls == mine.get("tool_calls", [])
        said = [call["function"]["arguments"] for call in calls]
        assert said == [blocks.parse_arguments(piece.arguments) for piece in choice.tools]


def test_what_it_took_is_in_nanoseconds() -> None:
    end = TextDelta(0, finish="length", usage=Usage(7, 2, 3), durations=Durations(0.5, 0.25, 2.0))
    whole = json.loads(CHAT.render_response(HEAD, [TextDelta(0, "x"), end]))
    assert (whole["done_reason"], whole["prompt_eval_count"], whole["eval_count"]) == ("length", 7, 2)
    assert whole["total_duration"] == 2_750_000_000
    durations = [whole[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")]
    assert durations == [500_000_000, 250_000_000, 2_000_000_000]
    assert whole["created_at"] == "2023-11-14T22:13:20Z"


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    """A blank between lines, which keeps the connection alive, is no line."""
    stream = CHAT.events(HEAD)
    told = (
        stream.render([TextDelta(0, "Half")]) + stream.keep_alive + stream.render_failure(Unavailable("gone"))
    )
    assert [line.get("error") for line in lines(told)] == [None, "gone"]
    answer = render_error(Unavailable("gone", retry_after=7))
    assert (answer.status, json.loads(answer.body)) == (503, {"error": "gone"})
    assert (b"retry-after", b"7") in answer.headers
