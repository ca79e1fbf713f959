"""OpenAI's Responses: what a request may be, what an engine is told, the events and their order."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit.errors import InvalidInput, Unavailable
from localai_cluster.web.openapi import response_schema_of
from nodes.dialects.responses import DIALECT, LOGPROBS, REFUSED, ResponseObject, parse_request
from nodes.dialects.responses_input import Item
from nodes.gateway.generation import Conversation, Head, TextDelta, ToolPiece, Usage, merge_deltas
from tests.support.deltas import HEAD, answers, played

ASK: dict[str, Any] = {"model": "m", "input": "hello"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


def form(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}


def image(url: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 10_000}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"content": "x"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input"),
        (image("https://example.org/a.png"), "input"),
        (image(None), "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL | {"parameters": RECURSIVE}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}, "tools": [TOOL]}, "tool_choice"),
        (form(RECURSIVE), "text"),
        (form(None), "text"),
        ({"truncation": "always"}, "truncation"),
        ({"tools": [{"type": "web_search"}, {"type": "custom", "name": "c"}]}, "tools"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference"}]}, "input"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "call_id": "1"}]}, "input"),
        ({"metadata": {"a": 1}}, "metadata"),
        *[({name: True}, name) for name in REFUSED],
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as told:
        parse_request(ASK | change)
    assert told.value.field == field


def test_nothing_is_kept() -> None:
    """C5, D-STATELESS: `store` is answered with false; what refers to an earlier response is refused."""
    for name in ("previous_response_id", "conversation"):
        with pytest.raises(InvalidInput, match="nothing is kept"):
            parse_request(ASK | {name: "resp_1"})
    for change in ({"store": True}, {"store": False}, {"truncation": "auto"}, {"background": False}):
        generation = parse_request(ASK | change)
        whole = json.loads(
            DIALECT.render_response(Head("1", 0, generation), [TextDelta(0, "x", finish="stop")])
        )
        assert (whole["store"], whole["truncation"]) == (False, "disabled")


def test_items_that_only_openai_can_read_are_left_out() -> None:
    """C5: the second turn of the Vercel AI SDK refers to the answer before; free-form calls are calls."""
    items = [
        {"role": "user", "content": "one"},
        {"type": "item_reference", "id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+ x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"role": "user", "content": "two"},
    ]
    (prompt,) = parse_request(ASK | {"input": items}).prompts
    assert isinstance(prompt, Conversation)
    assert [message.role for message in prompt.messages] == ["user", "assistant", "tool", "user"]
    (call,) = json.loads(prompt.messages[1].tool_calls)
    assert call["function"] == {"name": "patch", "arguments": '{"input":"+ x"}'}


CODEX = [
    TOOL,
    {"type": "namespace", "name": "mcp.files", "tools": [{"type": "function", "name": "read"}, TOOL]},
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
]


def test_tools_that_cannot_be_run_here_are_left_out() -> None:
    """C2: Codex CLI sends several kinds; functions of a namespace are flat for the model."""
    name = str(TOOL["name"])
    for choice in (None, "auto", "required", "none"):
        generation = parse_request(ASK | {"tools": CODEX, "tool_choice": choice})
        (prompt,) = generation.prompts
        assert isinstance(prompt, Conversation)
        known = [tool["function"]["name"] for tool in json.loads(prompt.tools or "[]")]
        assert known == ([] if choice == "none" else [name, "read", f"mcp_files__{name}"])
    calls = tuple(
        ToolPiece(index, name=known_name, arguments="{}")
        for index, known_name in enumerate((name, "read", f"mcp_files__{name}"))
    )
    deltas = [TextDelta(0, tools=calls), TextDelta(0, finish="tool_calls")]
    whole = json.loads(DIALECT.render_response(Head("1", 0, generation), deltas))
    assert [(item["name"], item.get("namespace")) for item in whole["output"]] == [
        (name, None),
        ("read", "mcp.files"),
        (name, "mcp.files"),
    ]
    assert whole["tools"] == CODEX


def test_each_function_has_a_name_of_its_own_in_any_order() -> None:
    """A function without a namespace keeps its name, and can be forced by it."""
    x = {"type": "function", "name": "x"}
    space = {"type": "namespace", "name": "ns", "tools": [x]}
    for tools in ([space, x, space, space], [x, space, space, space]):
        choice = {"type": "function", "name": "x"}
        generation = parse_request(ASK | {"tools": tools, "tool_choice": choice})
        (prompt,) = generation.prompts
        assert isinstance(prompt, Conversation)
        known = [tool["function"]["name"] for tool in json.loads(prompt.tools)]
        assert known == ["x", "ns__x", "ns__x_2", "ns__x_3"]
        assert set(generation.tool_namespaces) == set(known[1:])
        assert json.loads(prompt.tool_choice)["function"]["name"] == "x"


def test_an_input_without_anything_to_read_is_refused() -> None:
    with pytest.raises(InvalidInput, match="nothing that a model can read"):
        parse_request(ASK | {"input": [{"type": "web_search_call"}]})


@pytest.mark.parametrize(
    "choice", [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "function"}]
)
def test_a_tool_that_cannot_be_run_cannot_be_forced(choice: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_request(ASK | {"tools": CODEX, "tool_choice": choice})
    assert (refused.value.field, refused.value.code) == ("tool_choice", "unsupported_value")
    forced = parse_request(ASK | {"tools": CODEX, "tool_choice": {"type": "function", "name": "read"}})
    (prompt,) = forced.prompts
    assert isinstance(prompt, Conversation)
    assert json.loads(prompt.tool_choice)["function"]["name"] == "read"


def conversation(change: dict[str, Any]) -> Conversation:
    """What an engine is told."""
    (prompt,) = parse_request(ASK | change).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def test_items_reach_the_engine_as_messages() -> None:
    """What the model thought, said and called in one answer is one message."""
    told = conversation(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "c"},
                {"role": "user", "content": [
                    {"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": PIXEL}]},
                {"type": "reasoning", "id": "x", "summary": [],
                 "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant",
                 "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "sun"},
                {"type": "function_call_output", "call_id": "2",
                 "output": [{"type": "input_text", "text": "rain"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "assistant", "content": "Yes."},
            ],
        }
    )  # fmt: skip
    assert [(one.role, one.content) for one in told.messages] == [
        ("system", "Be brief."),
        ("system", "c"),
        ("user", "see"),
        ("assistant", "I look."),
        ("tool", "sun"),
        ("tool", "rain"),
        ("assistant", "No."),
        ("assistant", "Yes."),
    ]
    answer = told.messages[3]
    assert (answer.reasoning, [call["id"] for call in json.loads(answer.tool_calls)]) == ("hm", ["1", "2"])
    assert [one.tool_call_id for one in told.messages[4:6]] == ["1", "2"]
    assert told.images == (PIXEL.partition(",")[2],)


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (None, "auto"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, '{"function":{"name":"f"},"type":"function"}'),
        ("none", ""),
    ],
    ids=["absent", "required", "function", "none"],
)
def test_which_tool_is_called(choice: Any, word: str) -> None:
    told = conversation({"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False})
    assert (told.tool_choice, told.parallel_tool_calls) == (word, False if word else None)
    if word:
        (tool,) = json.loads(told.tools)
        assert tool["function"] == {"name": "f", "parameters": {"type": "object"}, "strict": True}


def test_how_tokens_are_chosen_reaches_the_engine_and_comes_back() -> None:
    more = {"max_output_tokens": 5, "temperature": 1, "top_p": 0.5, "top_logprobs": 2, "include": [LOGPROBS]}
    ignored = {"reasoning": {"effort": "low"}, "service_tier": "auto", "stream_options": {}, "user": "u"}
    asked = parse_request(
        ASK | more | form({"type": "object"}) | ignored | {"metadata": {"a": "b"}, "tools": [TOOL]}
    )
    chosen = asked.sampling
    assert (chosen.max_tokens, chosen.temperature, chosen.top_p) == (5, 1, 0.5)
    assert (chosen.logprobs, chosen.top_logprobs, chosen.grammar) == (True, 2, '{"type":"object"}')
    assert asked.echo["text"]["format"]["schema"] == {"type": "object"}
    assert (asked.echo["metadata"], asked.echo["tools"]) == ({"a": "b"}, [TOOL])
    assert (
        parse_request(ASK | {"text": {"format": {"type": "json_object"}}}).sampling.grammar
        == '{"type":"object"}'
    )
    assert (
        parse_request(ASK | {"text": {"format": {"type": "text"}, "verbosity": "low"}}).sampling.grammar == ""
    )


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events: counted, and each with its type in its name too."""
    told = []
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        told.append(json.loads(data.removeprefix(b"data: ")))
        assert name.decode() == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


@given(answers(), st.data())
def test_a_stream_says_what_the_whole_answer_says(deltas: list[TextDelta], data: st.DataObject) -> None:
    """However the deltas are bundled; one item after the other, each whole at its end."""
    begun, progress, *told, last = events(played(DIALECT, deltas, data))
    whole = json.loads(DIALECT.render_response(HEAD, deltas))
    assert (begun["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert begun["response"] == progress["response"]
    assert (begun["response"]["status"], begun["response"]["output"]) == ("in_progress", [])
    assert last["type"] == f"response.{whole['status']}"
    assert last["response"] == whole
    items: list[dict[str, Any]] = []
    said = ""
    for event in told:
        kind = event["type"].rpartition(".")[2]
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert not event["item"].get("content")
            assert not event["item"].get("arguments")
            said = ""
        elif kind == "delta":
            assert event["output_index"] == len(items)
            said += event["delta"]
        elif event["type"] == "response.output_item.done":
            items.append(event["item"])
        elif kind == "done" and "part" not in event:
            assert event.get("text", event.get("arguments")) == said
    assert items == whole["output"]


@given(answers())
def test_items_are_the_answer_and_are_accepted_again(deltas: list[TextDelta]) -> None:
    (choice,) = merge_deltas(deltas, 1)
    items = json.loads(DIALECT.render_response(HEAD, deltas))["output"]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    assert "".join(texts) == choice.text
    calls = [item["arguments"] for item in items if item["type"] == "function_call"]
    assert len(calls) == len(choice.tools)
    assert all(said in calls or "{}" in calls for said in (piece.arguments for piece in choice.tools))
    assert len({item["id"] for item in items}) == len(items)
    if items:
        parse_request(ASK | {"input": items})
        assert all(set(Item.__struct_fields__) & set(item) for item in items)


def test_what_it_took() -> None:
    end = TextDelta(0, finish="length", usage=Usage(7, 2, 3))
    whole = json.loads(DIALECT.render_response(HEAD, [TextDelta(0, "x"), end]))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert (whole["id"], whole["store"], whole["error"]) == (f"resp_{HEAD.id}", False, None)
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (7, 2)


@pytest.mark.parametrize("said", [[], [TextDelta(0, "Half")]], ids=["at once", "halfway"])
def test_a_stream_that_breaks_off_ends_with_an_error(said: list[TextDelta]) -> None:
    stream = DIALECT.events(HEAD)
    *_, error, last = events(stream.render(said) + stream.render_failure(Unavailable("gone")))
    assert (error["type"], error["message"], error["error"]["message"]) == ("error", "gone", "gone")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert len(last["response"]["output"]) == len(said)


def test_the_api_document_admits_the_fields_that_repeat_the_request() -> None:
    schema = response_schema_of(ResponseObject)
    assert schema["additionalProperties"] is True
    assert "instructions" not in schema["properties"]
