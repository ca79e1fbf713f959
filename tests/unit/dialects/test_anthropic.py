"""Anthropic's dialect: what a request may be, what an engine is told, the events and their order."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit.errors import (
    ClusterError,
    Forbidden,
    InvalidInput,
    NotAuthenticated,
    NotFound,
    Unavailable,
)
from nodes.dialects import blocks
from nodes.dialects.anthropic import DIALECT, parse_request, render_error
from nodes.dialects.blocks import BlockKind
from nodes.gateway.endpoint import TooLarge
from nodes.gateway.generation import Conversation, TextDelta, ToolPiece, Usage, merge_deltas
from tests.support.deltas import HEAD, answers, played

ASK: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PNG}
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


def of_user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": ASK["messages"] * 10_000}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        (of_user({"type": "smell"}), "messages"),
        (of_user({"type": "text"}), "messages"),
        (
            of_user({"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}),
            "messages",
        ),
        (of_user({"type": "image", "source": PNG | {"data": "!!"}}), "messages"),
        (of_user({"type": "tool_use", "id": "1", "name": "f", "input": {}}), "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image", "source": PNG}]}]}, "messages"),
        ({"messages": [{"role": "system", "content": [{"type": "image", "source": PNG}]}]}, "messages"),
        ({"system": 5}, "system"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tools": [TOOL | {"input_schema": RECURSIVE}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": RECURSIVE}}}, "output_config"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as told:
        parse_request(ASK | change)
    assert told.value.field == field
    assert field in json.loads(render_error(told.value).body)["error"]["message"]


def conversation(change: dict[str, Any]) -> Conversation:
    """What an engine is told."""
    (prompt,) = parse_request(ASK | change).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def test_anthropics_own_tools_are_left_out() -> None:
    """C10: unless one is forced; so is what an earlier answer did with them."""
    told = conversation({"tools": [SEARCH, TOOL, {"type": "bash_20250124", "name": "bash"}]})
    assert [tool["function"]["name"] for tool in json.loads(told.tools)] == ["f"]
    told = conversation({"tools": [SEARCH], "tool_choice": {"type": "auto"}})
    assert (told.tools, told.tool_choice) == ("", "")
    answer = [
        {"type": "text", "text": "I look."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "x"}]},
        {"type": "text", "text": "Sun.", "citations": [{"type": "web_search_result_location"}]},
    ]
    turns = [ASK["messages"][0], {"role": "assistant", "content": answer}, ASK["messages"][0]]
    told = conversation({"messages": turns})
    assert [(one.role, one.content) for one in told.messages] == [
        ("user", "hello"),
        ("assistant", "I look.\nSun."),
        ("user", "hello"),
    ]
    with pytest.raises(InvalidInput):
        parse_request(ASK | of_user(answer[1]))


@pytest.mark.parametrize(
    "source", [{"type": "url", "url": "https://example.org/a.png"}, {"type": "file", "file_id": "x"}]
)
def test_an_image_elsewhere_is_refused(source: dict[str, str]) -> None:
    """C10, D-IMAGES-INSIDE."""
    with pytest.raises(InvalidInput, match="fetches nothing: an image must be inside the request, as base64"):
        parse_request(ASK | of_user({"type": "image", "source": source}))


@pytest.mark.parametrize("word", ["", "END"])
def test_the_stop_word_that_ended_an_answer(word: str) -> None:
    """C10: whole and streamed."""
    deltas = [TextDelta(0, "x"), TextDelta(0, finish="stop", stop_word=word)]
    expected = ("stop_sequence", "END") if word else ("end_turn", None)
    whole = json.loads(DIALECT.render_response(HEAD, deltas))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    stream = DIALECT.events(HEAD).render(deltas)
    (end,) = [
        json.loads(line[6:]) for line in stream.split(b"\n") if b"message_delta" in line and b"data" in line
    ]
    assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == expected


def test_blocks_of_a_conversation_reach_the_engine() -> None:
    """Results of tools become messages of their own, before what the user says beside them."""
    told = conversation(
        {
            "system": [{"type": "text", "text": one, "cache_control": {"type": "ephemeral"}} for one in "ab"],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": [
                        {"type": "text", "text": "sun"}, IMAGE]},
                    {"type": "text", "text": "And now?"},
                ]},
            ],
        }
    )  # fmt: skip
    said = [(one.role, one.content) for one in told.messages]
    assert said == [
        ("system", "a\nb"),
        ("user", "see"),
        ("assistant", "I look."),
        ("tool", "sun"),
        ("user", "And now?"),
    ]
    answer, result = told.messages[2:4]
    assert answer.reasoning == "hm"
    (call,) = json.loads(answer.tool_calls)
    assert (call["id"], call["function"]) == ("1", {"name": "f", "arguments": '{"a":1}'})
    assert result.tool_call_id == "1"
    assert told.images == (PNG["data"], PNG["data"])


@pytest.mark.parametrize(
    ("choice", "word", "parallel"),
    [
        (None, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", None),
        ({"type": "tool", "name": "f"}, '{"function":{"name":"f"},"type":"function"}', None),
        ({"type": "none"}, "", None),
    ],
    ids=["absent", "auto", "any", "tool", "none"],
)
def test_which_tool_is_called(choice: Any, word: str, parallel: bool | None) -> None:
    told = conversation({"tools": [TOOL], "tool_choice": choice})
    assert (told.tool_choice, told.parallel_tool_calls) == (word, parallel)
    known = [{"function": {"name": "f", "parameters": {"type": "object"}}, "type": "function"}]
    assert json.loads(told.tools or "[]") == (known if word else [])


def test_how_tokens_are_chosen_reaches_the_engine() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    more = {"temperature": 1, "top_p": 0.5, "top_k": 3, "stop_sequences": ["x"], "output_config": form}
    ignored = {"thinking": {"type": "enabled"}, "metadata": {"user_id": "x"}, "service_tier": "auto"}
    asked = parse_request(ASK | more | ignored)
    chosen = asked.sampling
    assert (chosen.max_tokens, chosen.temperature, chosen.top_p, chosen.top_k) == (5, 1, 0.5, 3)
    assert (chosen.stop, chosen.grammar, asked.stream) == (("x",), '{"type":"object"}', False)
    assert parse_request(ASK | {"stream": True}).stream


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events; each has its type in its name too."""
    told = []
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        told.append(json.loads(data.removeprefix(b"data: ")))
        assert name.decode() == f"event: {told[-1]['type']}"
    return told


@given(answers(), st.data())
def test_a_stream_says_what_the_whole_answer_says(deltas: list[TextDelta], data: st.DataObject) -> None:
    """However the deltas are bundled; one block after the other, each opened and closed once."""
    told = events(played(DIALECT, deltas, data))
    whole = json.loads(DIALECT.render_response(HEAD, deltas))
    assert told[0]["type"] == "message_start"
    assert [one["type"] for one in told[-2:]] == ["message_delta", "message_stop"]
    message, end = told[0]["message"], told[-2]
    built: list[dict[str, Any]] = []
    open_block = -1
    for event in told[1:-2]:
        if event["type"] == "content_block_start":
            assert (open_block, event["index"]) == (-1, len(built))
            open_block = event["index"]
            built.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = -1
        else:
            assert event["index"] == open_block
            kind, said = (event["delta"][name] for name in event["delta"])
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[kind]
            built[-1][field] += said
    assert open_block == -1
    for block in built:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = blocks.parse_arguments(arguments)
    assert message | {"content": built, "usage": end["usage"]} | end["delta"] == whole


@given(answers())
def test_blocks_are_the_answer(deltas: list[TextDelta]) -> None:
    """Nothing is lost and nothing is said twice; each call is one block."""
    (choice,) = merge_deltas(deltas, 1)
    made = blocks.collect_blocks(deltas)

    def all_of(kind: BlockKind) -> str:
        return "".join(block.content for block in made if block.kind is kind)

    assert (all_of(BlockKind.THOUGHT), all_of(BlockKind.TEXT)) == (choice.reasoning, choice.text)
    calls = {block.call.index: block.content for block in made if block.kind is BlockKind.CALL}
    assert calls.keys() == {piece.index for piece in choice.tools}
    assert all(calls[one.index] == one.arguments or calls[one.index] == "{}" for one in choice.tools)
    assert len(calls) == sum(block.kind is BlockKind.CALL for block in made)


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "end_turn"), ("length", "max_tokens"), ("tool_calls", "tool_use")]
)
def test_why_it_ended_and_what_it_took(finish: str, reason: str) -> None:
    """What was remembered does not count as the prompt's, and is told only if the engine said so."""
    call = TextDelta(0, tools=(ToolPiece(0, "", "f", '{"a": 1}'),))
    whole = json.loads(
        DIALECT.render_response(HEAD, [call, TextDelta(0, finish=finish, usage=Usage(7, 2, 3))])
    )
    assert (whole["stop_reason"], whole["stop_sequence"], whole["id"]) == (reason, None, f"msg_{HEAD.id}")
    assert whole["usage"] == {"input_tokens": 4, "output_tokens": 2, "cache_read_input_tokens": 3}
    (block,) = whole["content"]
    assert block == {"type": "tool_use", "id": f"toolu_{HEAD.call_key}_0", "name": "f", "input": {"a": 1}}
    silent = json.loads(DIALECT.render_response(HEAD, [TextDelta(0, finish=finish, usage=Usage(7, 2))]))
    assert silent["usage"] == {"input_tokens": 7, "output_tokens": 2}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidInput("no", field="model"), 400, "invalid_request_error"),
        (NotAuthenticated(), 401, "authentication_error"),
        (Forbidden(), 403, "permission_error"),
        (NotFound(), 404, "not_found_error"),
        (TooLarge(), 413, "request_too_large"),
        (Unavailable("busy", retry_after=7), 503, "overloaded_error"),
        (ClusterError("broken"), 500, "api_error"),
    ],
    ids=["400", "401", "403", "404", "413", "503", "500"],
)
def test_refusals_have_anthropics_envelope(error: ClusterError, status: int, kind: str) -> None:
    told = render_error(error)
    body = json.loads(told.body)
    assert (told.status, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert set(body["error"]) == {"type", "message"}
    if status == 503:
        assert (b"retry-after", b"7") in told.headers


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    stream = DIALECT.events(HEAD)
    begun = stream.render([TextDelta(0, "Half")])
    *_, last = events(begun + stream.render_failure(Unavailable("gone")))
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    assert stream.keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'


# Review C10


def test_the_first_event_has_the_prompts_tokens() -> None:
    """Claude Code shows the context's use by them; 0 only if the engine has not told yet."""
    for tokens in (7, 0):
        first = DIALECT.events(HEAD).render([TextDelta(0, "Hello", prompt_tokens=tokens)]).splitlines()[1]
        message = json.loads(first.removeprefix(b"data: "))["message"]
        assert message["usage"]["input_tokens"] == tokens


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"city": "Rome", "days": 3}', {"city": "Rome", "days": 3}),
        ('{"city": "Ro', {"city": "Ro"}),
        ('{"city": "Rome", "da', {"city": "Rome"}),
        ('{"city": "Rome", "days"', {"city": "Rome"}),
        ('{"city": "Rome", "days": ', {"city": "Rome"}),
        ('{"city": "Rome", "days": 3', {"city": "Rome", "days": 3}),
        ('{"city": "Rome", "sunny": tr', {"city": "Rome"}),
        ('{"a": {"b": [1, {"c": "d', {"a": {"b": [1, {"c": "d"}]}}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": "br{ace"', {"a": "br{ace"}),
        ('{"', {}),
        ("{", {}),
        ("", {}),
        ("[1", {}),
        ("nonsense", {}),
    ],
)
def test_what_a_cut_call_has_written_is_kept(text: str, arguments: dict[str, Any]) -> None:
    """The arguments up to the last complete value; a client sees why in `stop_reason`."""
    assert blocks.parse_arguments(text) == arguments


@given(st.text(max_size=60), st.integers(0, 60))
def test_a_cut_of_any_text_is_no_error(text: str, end: int) -> None:
    whole = json.dumps({"a": [text, {"b": text}], text: 1})
    assert isinstance(blocks.parse_arguments(whole[:end]), dict)
    assert blocks.parse_arguments(whole) == json.loads(whole)


def test_documents_of_text_are_read() -> None:
    """With title and context, in a message and in what came of a call."""
    plain = {"type": "text", "media_type": "text/plain", "data": "Roses are red."}
    document = {"type": "document", "source": plain, "title": "Poem", "context": "From a book"}
    listed = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [document]}
    messages = [
        {"role": "user", "content": [document, listed, {"type": "text", "text": "Which colour?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    (prompt,) = parse_request(ASK | {"messages": messages}).prompts
    assert isinstance(prompt, Conversation)
    text = "Poem\nFrom a book\nRoses are red."
    assert prompt.messages[0].content == f"{text}\nx\nWhich colour?"
    assert (prompt.messages[2].role, prompt.messages[2].content) == ("tool", text)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"type": "document", "source": {"type": "base64", "data": "JVBE"}}, "plain text"),
        ({"type": "document", "source": {"type": "url", "url": "https://x/y.pdf"}}, "plain text"),
        ({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, "inside the request"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "inside the request"),
    ],
)
def test_what_would_have_to_be_fetched_is_refused(block: dict[str, Any], said: str) -> None:
    """In Anthropic's envelope, naming the block; also inside of a result."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    for content in (block, result):
        with pytest.raises(InvalidInput, match=said) as refused:
            parse_request(ASK | of_user(content))
        body = json.loads(render_error(refused.value).body)
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert "messages[0].content[0]" in body["error"]["message"]


def test_an_image_in_a_result_reaches_the_engine() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}
    (prompt,) = parse_request(ASK | of_user(result)).prompts
    assert isinstance(prompt, Conversation)
    assert prompt.images == (PNG["data"],)
