"""OpenAI's Responses: what a request may be, what an engine is told, the events and their order."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit.errors import InvalidInput, Unavailable
from localai_cluster.web.openapi import response_schema_of
from nodes.dialects.responses import (
    DIALECT,
    LOGPROBS_INCLUDE,
    UNSUPPORTED_FIELDS,
    ResponseObject,
    parse_request,
)
from nodes.dialects.responses_input import NO_STORED_ITEMS, Item, StoredItems
from nodes.gateway.generation import Conversation, Head, TextDelta, ToolPiece, Usage, merge_deltas
from tests.support.deltas import HEAD, answers, played

ASK: dict[str, Any] = {"model": "m", "input": "hello"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


F = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"}
CALL_OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "sun"}
USER = {"role": "user", "content": "two"}
WRONG_CHOICE: dict[str, Any] = {"type": "allowed_tools"}
WRONG_ALLOWED: list[dict[str, Any]] = [
    {},
    {"mode": "auto"},
    {"mode": "none", "tools": [F]},
    {"mode": "required", "tools": []},
    {"mode": "auto", "tools": [{"type": "function", "name": "g"}]},
    {"mode": "required", "tools": [{"type": "web_search"}]},
]


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
        ({"input": [CALL_OUTPUT]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_video", "text": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "computer_call_output"}]}, "input"),
        *[({"tool_choice": WRONG_CHOICE | wrong, "tools": [TOOL]}, "tool_choice") for wrong in WRONG_ALLOWED],
        *[({name: True}, name) for name in UNSUPPORTED_FIELDS],
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as told:
        parse_request(ASK | change)
    assert told.value.field == field


def test_nothing_is_kept() -> None:
    """C5, D-STATELESS: `store` is answered with false; what refers to an earlier response is refused."""
    for name in ("previous_response_id", "conversation"):
        with pytest.raises(InvalidInput, match="kept"):
            parse_request(ASK | {name: "resp_1"})
    for change in ({"store": True}, {"store": False}, {"truncation": "auto"}, {"background": False}):
        generation = parse_request(ASK | change)
        whole = json.loads(
            DIALECT.render_response(Head("1", 0, generation), [TextDelta(0, "x", finish="stop")])
        )
        assert (whole["store"], whole["truncation"]) == (False, "disabled")


def reference(name: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": name}


def roles(items: list[dict[str, Any]], earlier: StoredItems = NO_STORED_ITEMS) -> list[str]:
    """The roles of the messages for the engine."""
    (prompt,) = parse_request(ASK | {"input": items}, earlier).prompts
    assert isinstance(prompt, Conversation)
    return [message.role for message in prompt.messages]


@pytest.mark.rule("http-6a")
def test_a_reference_is_left_out_only_if_its_item_is_there() -> None:
    """C5: or if it is a thought; an output never becomes a message without its call."""
    assert roles([USER, reference("fc_1"), CALL, CALL_OUTPUT]) == ["user", "assistant", "tool"]
    assert roles([USER, reference("rs_1"), CALL, CALL_OUTPUT]) == ["user", "assistant", "tool"]
    for items in (
        [USER, reference("fc_1"), CALL_OUTPUT],
        [USER, reference("msg_1"), USER],
        [USER, reference("rs_1")],
    ):
        with pytest.raises(InvalidInput, match="nothing is kept here") as refused:
            roles(items)
        assert refused.value.message.startswith("input[1]: ")
    for items in ([USER, CALL_OUTPUT], [CALL_OUTPUT, CALL], [CALL, CALL_OUTPUT | {"call_id": "2"}]):
        with pytest.raises(InvalidInput, match="no call of a tool before it"):
            roles(items)


@pytest.mark.rule("http-6a")
def test_stored_items_come_before_the_input_and_in_place_of_references() -> None:
    """C5."""
    before = StoredItems(has_store=True, items=[USER, CALL])
    assert roles([CALL_OUTPUT], before) == ["user", "assistant", "tool"]
    assert roles([reference("fc_1"), CALL_OUTPUT], before) == ["user", "assistant", "tool"]
    named = StoredItems(has_store=True, by_id={"fc_1": CALL})
    assert roles([USER, reference("fc_1"), CALL_OUTPUT], named) == ["user", "assistant", "tool"]
    with pytest.raises(InvalidInput, match="no stored item has this id"):
        roles([USER, reference("fc_2"), CALL_OUTPUT], named)
    with pytest.raises(InvalidInput, match="at most 4096 items"):
        roles([USER], StoredItems(has_store=True, items=[USER] * 4096))


def test_items_that_only_openai_can_read_are_left_out() -> None:
    """C2, C5: calls of OpenAI's tools, in whatever form; free-form calls are calls."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "mcp_call", "name": "x", "arguments": {"not": "a text"}, "output": "y"},
        {"type": "local_shell_call", "call_id": "s1", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "s1", "output": {"stdout": "a"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+ x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"role": "assistant", "content": [{"type": "output_sound", "data": 5}]},
        {"role": "user", "content": "two"},
        {"type": "tool_search_call", "call_id": "t1", "arguments": {}},
    ]
    assert roles(items) == ["user", "assistant", "tool", "assistant", "user"]
    (prompt,) = parse_request(ASK | {"input": items}).prompts
    assert isinstance(prompt, Conversation)
    (call,) = json.loads(prompt.messages[1].tool_calls)
    assert call["function"] == {"name": "patch", "arguments": '{"input":"+ x"}'}


@pytest.mark.parametrize(
    "head", ["data:text/markdown", "data:text/plain;charset=utf-8", "data:application/json"]
)
def test_a_file_of_plain_text_is_read(head: str) -> None:
    """C2: other files are refused where they stand."""
    file = {"type": "input_file", "filename": "a.md", "file_data": f"{head};base64,SGVsbG8="}
    told = conversation({"input": [{"role": "user", "content": [file]}]})
    assert told.messages[0].content == "a.md\nHello"
    for wrong in (
        {"file_data": "data:application/pdf;base64,SGVsbG8="},
        {"file_id": "x"},
        {"file_data": "data:text/plain;base64,/w=="},
        {"file_data": "data:text/plain;base64,!"},
    ):
        with pytest.raises(InvalidInput, match=r"input\[0\].content\[0\]: only files of plain text"):
            conversation({"input": [{"role": "user", "content": [{"type": "input_file", **wrong}]}]})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_shown(mode: str) -> None:
    """C2: those of a namespace by their own names, others that cannot be run are left out."""
    allowed = [{"type": "function", "name": "read"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    told = conversation({"tools": CODEX, "tool_choice": choice})
    assert [tool["function"]["name"] for tool in json.loads(told.tools)] == ["read"]
    assert told.tool_choice == mode
    if mode == "auto":
        told = conversation({"tools": CODEX, "tool_choice": choice | {"tools": allowed[1:]}})
        assert (told.tools, told.tool_choice) == ("", "")
    assert parse_request(ASK | {"tools": CODEX, "tool_choice": choice}).echo["tool_choice"] == choice


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


def test_an_earlier_call_has_the_name_of_its_function_in_this_request() -> None:
    """C2: two namespaces have a function of one name; the model must not see a call of the other one."""
    function = {"type": "function", "name": "search"}
    tools = [{"type": "namespace", "name": space, "tools": [function]} for space in ("mail", "files")]
    call = {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"}
    called = []
    for space in ("mail", "files", None):
        told = conversation({"tools": tools, "input": [call | {"namespace": space}]})
        called.append(json.loads(told.messages[0].tool_calls)[0]["function"]["name"])
    assert called == ["search", "files__search", "search"]


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
        parse_request(ASK | {"input": [{"type": "web_search_call"}, {"type": "mcp_call", "output": {}}]})


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_only_a_message_has_a_role(role: str) -> None:
    """An output with a role is an output; what no model reads in it is refused."""
    output = CALL_OUTPUT | {"role": role}
    (told,) = parse_request({"model": "m", "input": [CALL, output]}).prompts
    assert isinstance(told, Conversation)
    assert [(one.role, one.content) for one in told.messages] == [("assistant", ""), ("tool", "sun")]
    with pytest.raises(InvalidInput, match="no model here reads"):
        parse_request({"model": "m", "input": [CALL, output | {"output": [{"type": "input_audio"}]}]})


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
    looks, rain = [{"type": "output_text", "text": "I look."}], [{"type": "input_text", "text": "rain"}]
    told = conversation(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "c"},
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see"},
                        {"type": "input_image", "image_url": PIXEL},
                    ],
                },
                {
                    "type": "reasoning",
                    "id": "x",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                },
                {"type": "message", "role": "assistant", "content": looks},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "sun"},
                {"type": "function_call_output", "call_id": "2", "output": rain},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                {"role": "assistant", "content": "Yes."},
            ],
        }
    )
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
    more = {
        "max_output_tokens": 5,
        "temperature": 1,
        "top_p": 0.5,
        "top_logprobs": 2,
        "include": [LOGPROBS_INCLUDE],
    }
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
