"""The dialects are pure: what a request may be, what is made of it, and what is made of deltas."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.errors import Busy, Rejected
from localai_cluster.rpc.messages import ChatDelta, Reply, ToolCallDelta
from localai_cluster.web import wire
from nodes.definitions.files import Definition, parse_definition
from nodes.dialects import anthropic, audio, images, ollama, openai, responses
from nodes.dialects.anthropic import MessagesBody
from nodes.dialects.audio import SpeechBody
from nodes.dialects.images import ImagesBody
from nodes.dialects.ollama import GenerateBody, OllamaChatBody, OllamaOptions
from nodes.dialects.openai import ChatBody, CompletionBody
from nodes.dialects.openai_messages import MAX_MESSAGES
from nodes.dialects.responses import ResponsesBody
from nodes.dialects.retrieval import EmbedBody, OlderEmbedBody
from nodes.gateway.generate import ReplyReader, rename_field, sampling_options, with_prompt
from nodes.gateway.generation import (
    Conversation,
    Dialect,
    Generation,
    Head,
    Sampling,
    TextDelta,
    ToolPiece,
    Usage,
    merge_deltas,
    total_usage,
)
from nodes.gateway.schemas import MAX_GRAMMAR_LENGTH

USER: dict[str, Any] = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


WIDE = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}
"""A schema of which a request may have a few."""


def image(url: str) -> dict[str, Any]:
    """A message with an image."""
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def recursive() -> dict[str, Any]:
    """A schema that names itself."""
    return {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#"}}}


def renamed(name: str) -> dict[str, Any]:
    """A schema that names itself below a property of this name."""
    return {"type": "object", "properties": {name: {"$ref": "#"}}}


def with_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [USER] * 10_000}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [image("https://example.org/a.png")]}, "messages"),
        ({"messages": [image("data:image/png;base64,!!")]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        *[
            ({"logit_bias": {name: 1}}, "logit_bias")
            for name in ("", "-1", "--5", "٣", "²", str(2**31), "9" * 5000)
        ],
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": recursive()}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (with_schema(recursive()), "response_format"),
        *[
            (with_schema(renamed(name)), "response_format")
            for name in ("x", "default", "enum", "$defs", "properties")
        ],
        (with_schema({"$defs": {"k" * 513: {}}, "$ref": "#/$defs/" + "k" * 513}), "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": WIDE}}] * 6}, "tools"),
        (with_schema({"type": "array", "minItems": 10**9}), "response_format"),
        (with_schema({"type": "array", "maxItems": 1e9}), "response_format"),
        (with_schema({"items": [{"maxItems": 6000}, {"maxItems": 6000}]}), "response_format"),
        (with_schema({"enum": ["x"] * 10_000}), "response_format"),
        ({"grammar": ' {"type": "array", "minItems": 1000000000}'}, "grammar"),
        ({"grammar": "%llguidance {}\nstart: /x/"}, "grammar"),
        (with_schema({"$ref": "https://example.org/schema"}), "response_format"),
        (with_schema({"$ref": "#/$defs/none"}), "response_format"),
        (with_schema({"type": "object"}) | {"grammar": "root ::= x"}, "grammar"),
        ({"grammar": "root ::= " + "(" * 129}, "grammar"),
        ({"grammar": 'root ::= "(" [)] # (\nx ::= ' + "(" * 129 + ")" * 129}, "grammar"),
        ({"grammar": "root ::= # x\r" + "(" * 129}, "grammar"),
        ({"grammar": "x" * (256 * 1024 + 1)}, "grammar"),
        ({"stream_options": 5}, "stream_options"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{}]}, "functions"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        openai.parse_chat(CHAT | change)
    assert refused.value.field == field
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 7}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        openai.parse_completion(COMPLETION | change)
    assert refused.value.field == field


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMED = {
    openai.CHAT: (CHAT, (*ChatBody.__struct_fields__, *openai.UNSUPPORTED_IN_CHAT)),
    openai.COMPLETIONS: (
        COMPLETION,
        (*CompletionBody.__struct_fields__, *openai.UNSUPPORTED_IN_COMPLETIONS, "best_of"),
    ),
    anthropic.DIALECT: (
        CHAT | {"max_tokens": 5},
        (*MessagesBody.__struct_fields__, *anthropic.UNSUPPORTED_FIELDS),
    ),
    responses.DIALECT: (
        {"model": "m", "input": "hello"},
        (*ResponsesBody.__struct_fields__, *responses.UNSUPPORTED_FIELDS),
    ),
    ollama.CHAT: (CHAT, OllamaChatBody.__struct_fields__),
    ollama.GENERATE: (COMPLETION, (*GenerateBody.__struct_fields__, *ollama.UNSUPPORTED_FIELDS)),
}


@given(data=st.data())
@settings(max_examples=600)
def test_any_object_is_accepted_or_refused_by_name(data: st.DataObject) -> None:
    """No values of any fields do anything else, and what is accepted can be told to an engine."""
    dialect, (good, fields) = data.draw(st.sampled_from(list(NAMED.items())))
    body = good | data.draw(st.dictionaries(st.sampled_from(fields), JSON, max_size=3))
    asked, refused = None, ""
    try:
        asked = dialect.parse(body)
    except InvalidInput as error:
        refused = error.field or "nothing"
    assert asked is not None or refused in fields
    if asked is None:
        return
    options = sampling_options(asked.sampling, DEFINITION, "id", 1)
    for prompt in asked.prompts:
        if not isinstance(prompt, tuple):
            with_prompt(options, prompt, 0).SerializeToString()


DEFINITION: Definition = parse_definition(
    {"name": "m", "backend": "b", "parameters": {"model": "file"}}, "m.yaml"
)


def test_what_a_chat_says_reaches_the_engine() -> None:
    asked = openai.parse_chat(
        CHAT
        | {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": one} for one in "ab"]},
                image(PIXEL),
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "done"},
            ],
            "tools": [TOOL],
            "parallel_tool_calls": False,
            "max_tokens": 5,
            "max_completion_tokens": 6,
            "stop": "end",
            "seed": -2,
            "temperature": 0,
            "top_k": 3,
            "logit_bias": {"7": -100},
            "unknown": 1,
        }
    )  # fmt: skip
    options = with_prompt(sampling_options(asked.sampling, DEFINITION, "id", 9), asked.prompts[0], 1)  # type: ignore[arg-type]
    first, second, third, fourth = options.Messages
    assert (first.role, first.content) == ("system", "a\nb")
    assert (second.content, list(options.Images)) == ("", [PIXEL.partition(",")[2]])
    assert json.loads(third.tool_calls)[0]["function"] == {"name": "f", "arguments": "{}"}
    assert (fourth.role, fourth.tool_call_id) == ("tool", "1")
    assert json.loads(options.Tools) == [TOOL]
    assert (options.ToolChoice, options.Metadata["parallel_tool_calls"]) == ("auto", "false")
    assert (options.Tokens, list(options.StopPrompts)) == (6, ["end"])
    assert (options.Temperature, options.TopK, json.loads(options.LogitBias)) == (0, 3, {"7": -100})
    assert math.isclose(options.TopP, 0.95, rel_tol=1e-6)
    # A seed of any size is one that the contract can carry; the second answer has another.
    assert options.Seed == 2**31 - 1


@pytest.mark.parametrize("sign", ["[", '"', '\\"', "#", "\\", "()"])
def test_a_grammar_of_one_sign_is_looked_at_once(sign: str) -> None:
    """As large as one may be: a look that began again at each sign would run into the test's time limit."""
    openai.parse_chat(CHAT | {"grammar": sign * (MAX_GRAMMAR_LENGTH // len(sign))})


@pytest.mark.parametrize("where", ["request", "definition"])
def test_a_seed_of_minus_one_is_another_one_for_each_request(where: str) -> None:
    """As the reference has it: many definitions say -1."""
    says = {"seed": -1}
    parameters = {"model": "file"} | (says if where == "definition" else {})
    definition = parse_definition({"name": "m", "backend": "b", "parameters": parameters}, "m.yaml")
    asked = openai.parse_chat(CHAT | (says if where == "request" else {}))
    assert sampling_options(asked.sampling, definition, "id", 9).Seed == 9


def test_no_choice_of_a_tool_leaves_the_tools_out() -> None:
    prompt = openai.parse_chat(CHAT | {"tools": [TOOL], "tool_choice": "none"}).prompts[0]
    assert isinstance(prompt, Conversation)
    assert (prompt.tools, prompt.tool_choice) == ("", "")


@pytest.mark.parametrize(
    ("format", "grammar"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, '{"type":"object"}'),
        (with_schema({"type": "array"})["response_format"], '{"type":"array"}'),
    ],
    ids=["text", "object", "schema"],
)
def test_a_format_of_the_answer_is_a_schema_for_the_engine(format: dict[str, Any], grammar: str) -> None:
    assert openai.parse_chat(CHAT | {"response_format": format}).sampling.grammar == grammar


def test_parentheses_in_texts_and_classes_are_characters() -> None:
    grammar = 'root ::= "\\"' + "(" * 500 + '" [' + "(" * 500 + "\\]] ((x)) # " + "(" * 500
    assert openai.parse_chat(CHAT | {"grammar": grammar}).sampling.grammar == grammar


def two(name: str) -> dict[str, Any]:
    """Two properties of the same part."""
    return {key: {"$ref": f"#/$defs/{name}"} for key in "ab"}


def test_a_schema_may_name_a_part_twice_but_not_without_end() -> None:
    shared = {"type": "object", "properties": two("x"), "$defs": {"x": {}}}
    openai.parse_chat(CHAT | with_schema(shared))
    levels = {f"x{n}": {"properties": two(f"x{n + 1}")} for n in range(40)}
    doubling = {"$ref": "#/$defs/x0", "$defs": {**levels, "x40": {}}}
    with pytest.raises(InvalidInput, match="parts"):
        openai.parse_chat(CHAT | with_schema(doubling))


# Deltas ---------------------------------------------------------------------------------------------------

TEXTS = st.text(max_size=6)
PIECES = st.builds(ToolPiece, st.integers(0, 2), st.just("id"), st.just("f"), TEXTS)


@st.composite
def answers(draw: st.DrawFn) -> tuple[Generation, list[TextDelta]]:
    """A request and the deltas of its choices, in any order, each with its end."""
    n = draw(st.integers(1, 3))
    deltas: list[list[TextDelta]] = []
    for choice in range(n):
        parts = draw(st.lists(st.tuples(TEXTS, TEXTS, st.lists(PIECES, max_size=2)), max_size=4))
        made = [TextDelta(choice, text, thought, tuple(tools)) for text, thought, tools in parts]
        deltas.append([*made, TextDelta(choice, finish="stop", usage=Usage(3, len(parts), 1))])
    mixed = []
    while any(deltas):
        mixed.append(draw(st.sampled_from([one for one in deltas if one])).pop(0))
    return Generation("m", ("hi",), Sampling(), n, True, True), mixed


@given(answers(), st.sampled_from([openai.CHAT, openai.COMPLETIONS]), st.data())
def test_a_stream_says_what_the_whole_answer_says(
    answer: tuple[Generation, list[TextDelta]], dialect: Dialect, data: st.DataObject
) -> None:
    """However the deltas are bundled."""
    asked, deltas = answer
    head = Head("id", 1, asked)
    told, events, left = dialect.events(head).render, b"", list(deltas)
    while left:
        size = data.draw(st.integers(1, len(left)))
        events += told(left[:size])
        left = left[size:]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in events.split(b"\n\n") if line]
    whole = json.loads(dialect.render_response(head, deltas))
    assert chunks[-1]["usage"] == whole["usage"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        if "text" in choice:
            assert "".join(part["text"] for part in parts) == choice["text"]
            continue
        said = [part["delta"] for part in parts]
        assert said[0]["role"] == "assistant"
        assert "".join(one.get("content", "") for one in said) == (choice["message"]["content"] or "")
        calls = [call for one in said for call in one.get("tool_calls", ())]
        for number, call in enumerate(choice["message"].get("tool_calls", ())):
            index = sorted({one["index"] for one in calls})[number]
            mine = [one for one in calls if one["index"] == index]
            assert [one["id"] for one in mine if "id" in one] == [call["id"]]
            assert "".join(one["function"]["arguments"] for one in mine) == call["function"]["arguments"]


def test_a_prompt_counts_once_and_memory_only_if_every_engine_told() -> None:
    ends = [TextDelta(choice, finish="stop", usage=Usage(10, 2, 4)) for choice in range(4)]
    assert total_usage(ends, 2) == Usage(20, 8, 8)
    assert total_usage([*ends[:3], TextDelta(2, usage=Usage(10, 2, None))], 1).cached is None


@given(st.text(max_size=20), st.data())
def test_text_survives_any_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    reading, said, at = ReplyReader(0, Sampling(), 0), "", 0
    while at < len(raw):
        size = data.draw(st.integers(1, len(raw) - at))
        delta = reading.delta(Reply(message=raw[at : at + size]))
        said += delta.text if delta else ""
        at += size
    assert said + reading.last().text == text


@pytest.mark.parametrize(
    ("replies", "limit", "told", "finish"),
    [
        ([Reply(message=b"x", tokens=5)], 0, "", "stop"),
        ([Reply(message=b"x", tokens=5)], 5, "", "length"),
        ([Reply(message=b"x", tokens=4)], 5, "", "stop"),
        ([Reply(message=b"x", tokens=5)], 5, "stop", "stop"),
        ([Reply(chat_deltas=[ChatDelta(tool_calls=[ToolCallDelta(name="f")])])], 0, "", "tool_calls"),
    ],
    ids=["stop", "length", "short", "told", "tool"],
)
def test_why_an_answer_ended(replies: list[Reply], limit: int, told: str, finish: str) -> None:
    reading = ReplyReader(0, Sampling(), limit)
    for reply in replies:
        reading.delta(reply)
    assert reading.last(finish=told).finish == finish


@pytest.mark.parametrize(
    "raw",
    [
        *(b"{", b"5", b"null", b'{"content": 5}', b'[{"logprob": 1}]'),
        *(b'[{"token": "a", "logprob": "x"}]', b'[{"token": "a", "logprob": [1]}]'),
    ],
)
def test_logprobs_that_cannot_be_read_are_left_out(raw: bytes) -> None:
    reading = ReplyReader(0, Sampling(logprobs=True), 0)
    delta = reading.delta(Reply(chat_deltas=[ChatDelta(reasoning_content="x")], logprobs=raw))
    assert delta is not None
    assert delta.logprobs == ()


def test_a_token_with_odd_alternatives_is_still_told() -> None:
    others = b'{"token": "b", "top_logprobs": [3, {"token": "c"}]}'
    raw = b'[{"token": "a", "logprob": -1, "top_logprobs": 5}, ' + others + b"]"
    delta = ReplyReader(0, Sampling(logprobs=True), 0).delta(Reply(message=b"ab", logprobs=raw))
    assert delta is not None
    assert [len(token["top_logprobs"]) for token in delta.logprobs] == [0, 1]


def test_what_waits_for_a_reader_is_not_larger_than_it_counts_as() -> None:
    """20 alternatives a token are most of it."""
    top = [{"token": "x", "logprob": -1.0, "bytes": [120]}] * 20
    token = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": top}
    delta = TextDelta(0, "x", logprobs=(token,))
    told = openai.ChatChunks(Head("id", 1, openai.parse_chat(CHAT | {"logprobs": True}))).render([delta])
    assert delta.size > len(told) / 2


def test_parsed_pieces_replace_the_raw_text() -> None:
    reading = ReplyReader(0, Sampling(), 0)
    replies = [
        Reply(message=b"raw", chat_deltas=[ChatDelta(content="said")]),
        Reply(message=b"raw"),
    ]
    deltas = [delta for reply in replies if (delta := reading.delta(reply))]
    assert merge_deltas(deltas, 1)[0].text == "said"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("Grammar: this is no schema", "response_format"),
        ("ToolChoice names 'x'", "tool_choice"),
        ("this is too long", "prompt"),
    ],
)
def test_a_refusal_of_an_engine_names_the_clients_field(text: str, field: str) -> None:
    assert rename_field(Rejected(text), openai.parse_completion(COMPLETION)).field == field


def test_a_failure_is_an_event_with_the_envelope_and_the_end() -> None:
    chunks = openai.ChatChunks(Head("id", 1, openai.parse_chat(CHAT)))
    failed, done = chunks.render_failure(Busy("too much")).split(b"\n\n")[:2]
    assert json.loads(failed.removeprefix(b"data: ")) == json.loads(wire.error_answer(Busy("too much")).body)
    assert done == b"data: [DONE]"


TABLES: dict[str, list[tuple[type[msgspec.Struct], Iterable[str]]]] = {
    "Chats and completions": [
        (ChatBody, openai.UNSUPPORTED_IN_CHAT),
        (CompletionBody, openai.UNSUPPORTED_IN_COMPLETIONS),
    ],
    "Anthropic's fields": [(MessagesBody, anthropic.UNSUPPORTED_FIELDS)],
    "Fields of OpenAI's Responses": [(ResponsesBody, responses.UNSUPPORTED_FIELDS)],
    "Ollama's fields": [
        (OllamaChatBody, ()),
        (GenerateBody, ollama.UNSUPPORTED_FIELDS),
        (OllamaOptions, ()),
        (EmbedBody, ()),
        (OlderEmbedBody, ()),
    ],
    "Sound and images": [
        (SpeechBody, audio.UNSUPPORTED_FIELDS),
        (ImagesBody, images.UNSUPPORTED_FIELDS),
    ],
}


def test_every_field_of_a_body_is_in_the_table() -> None:
    """docs/inference-fields.md says of each field what becomes of it, and where that is proved."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "inference-fields.md").read_text()
    tables = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    for title, bodies in TABLES.items():
        # Sound and images have some fields of OpenAI's text.
        text = tables[title] + (tables["Chats and completions"] if title == "Sound and images" else "")
        rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        for body, refused in bodies:
            for name in (*(field.name for field in msgspec.structs.fields(body)), *refused):
                assert any(f"`{name}`" in row for row in rows), (title, name)


@pytest.mark.parametrize(("finish", "arguments"), [("tool_calls", "{}"), ("length", "")])
def test_a_call_without_arguments_has_an_empty_object(finish: str, arguments: str) -> None:
    """Clients read JSON. Of an answer that was cut off nothing is made up."""
    head = Head("id", 1, Generation("m", ("hi",), Sampling(), 1, True))
    deltas = [TextDelta(0, tools=(ToolPiece(0, name="now"),)), TextDelta(0, finish=finish, usage=Usage(1, 1))]
    chat = json.loads(openai.CHAT.render_response(head, deltas))["choices"][0]["message"]
    assert chat["tool_calls"][0]["function"] == {"name": "now", "arguments": arguments}
    (item,) = json.loads(responses.DIALECT.render_response(head, deltas))["output"]
    assert item["arguments"] == arguments
    (block,) = json.loads(anthropic.DIALECT.render_response(head, deltas))["content"]
    assert block["input"] == {}
    for dialect in (openai.CHAT, responses.DIALECT, anthropic.DIALECT):
        told = dialect.events(head).render(deltas)
        pieces = (b'"arguments":"{}"' in told) or (b'"partial_json":"{}"' in told)
        assert pieces is bool(arguments)
