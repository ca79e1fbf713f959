"""What clients in the field send (review C1, C11): unused fields, odd numbers, and OpenAI's error codes."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from localai_cluster.accounts.principals import WrongKey
from localai_cluster.kit.errors import ClusterError, InvalidInput
from localai_cluster.web import wire
from nodes.dialects import anthropic, ollama, openai, responses
from nodes.dialects.models import ShowBody
from nodes.gateway.generation import Generation, Head, TextDelta, Usage

pytestmark = pytest.mark.rule("http-6a")

USER = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "hello"}
INPUT: dict[str, Any] = {"model": "m", "input": "hello"}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
Parse = Callable[[Mapping[str, Any]], Generation]
# What Ollama's own Go client always sends.
GENERATE = {
    **PROMPT,
    "suffix": "",
    "system": "",
    "template": "",
    "format": "",
    "context": None,
    "images": None,
}


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (ollama.parse_generate, GENERATE),
        (ollama.parse_chat, {**CHAT, "format": "", "tools": None, "options": None}),
        (openai.parse_completion, {**PROMPT, "suffix": "", "echo": False, "best_of": None}),
        (openai.parse_completion, {**PROMPT, "stop": "", "user": ""}),
        (openai.parse_chat, {**CHAT, "function_call": "none", "functions": [], "stop": ""}),
        (openai.parse_chat, {**CHAT, "audio": None, "web_search_options": {}, "tools": []}),
        (responses.parse_request, {**INPUT, "previous_response_id": "", "conversation": "", "prompt": None}),
        (anthropic.parse_request, {**MESSAGES, "container": "", "mcp_servers": []}),
    ],
)
def test_an_empty_field_asks_for_nothing(parse: Parse, fields: dict[str, Any]) -> None:
    """C1: it is as if it were left out."""
    generation = parse(fields)
    assert generation.model == "m"
    assert generation.sampling.stop == ()


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (openai.parse_chat, {**CHAT, "top_k": -1, "seed": 1.0, "max_tokens": 128}),
        (openai.parse_completion, {**PROMPT, "top_k": -1.0, "seed": 1.0, "max_tokens": 128}),
        (anthropic.parse_request, {**MESSAGES, "top_k": -1, "max_tokens": 128}),
        *(
            (parse, {**fields, "options": {"top_k": -1, "seed": 1.0, "num_predict": 128.0}})
            for parse, fields in ((ollama.parse_chat, CHAT), (ollama.parse_generate, PROMPT))
        ),
    ],
)
def test_odd_numbers_are_accepted_in_every_dialect(parse: Parse, fields: dict[str, Any]) -> None:
    """C11: `top_k` -1 is no limit, and a whole number may have a point."""
    sampling = parse(fields).sampling
    assert (sampling.top_k, sampling.max_tokens) == (0, 128)
    assert sampling.seed in (1, None)
    assert {type(number) for number in (sampling.top_k, sampling.max_tokens)} == {int}
    assert sampling.seed == (None if parse is anthropic.parse_request else 1)


@pytest.mark.parametrize(
    "options", [{"num_predict": 0.5}, {"num_predict": -3.0}, {"top_k": -2}, {"seed": 1.5}]
)
def test_odd_numbers_that_are_none(options: dict[str, Any]) -> None:
    """C11."""
    with pytest.raises(InvalidInput):
        ollama.parse_chat({**CHAT, "options": options})


@pytest.mark.parametrize(
    ("parse", "fields", "field"),
    [
        (ollama.parse_generate, {**GENERATE, "suffix": "x"}, "suffix"),
        (openai.parse_completion, {**PROMPT, "suffix": "x"}, "suffix"),
        (openai.parse_chat, {**CHAT, "function_call": "auto"}, "function_call"),
        (openai.parse_chat, {**CHAT, "function_call": {"name": "f"}}, "function_call"),
        (responses.parse_request, {**INPUT, "previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_a_field_that_asks_for_something_is_refused_by_name(
    parse: Parse, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse(fields)
    assert refused.value.field == field
    assert refused.value.code == "unsupported_parameter"


def test_show_takes_either_name() -> None:
    """C1: the Go client sends both, one of them empty."""
    for fields in ({"model": "m", "name": ""}, {"model": "", "name": "m"}, {"name": "m"}):
        body = wire.parse_struct(fields, ShowBody)
        assert (body.model or body.name) == "m"


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"seed": 1.0}, "seed", 1),
        ({"seed": -1.0}, "seed", -1),
        ({"seed": 2**40}, "seed", 2**40),
    ],
)
def test_numbers_as_other_servers_take_them(change: dict[str, Any], name: str, value: int) -> None:
    """C11: vLLM's clients say -1 for no limit; R and JavaScript write whole numbers with a point."""
    for parse, fields in ((openai.parse_chat, CHAT), (openai.parse_completion, PROMPT)):
        sampling = parse(fields | change).sampling
        assert getattr(sampling, name) == value
        assert isinstance(getattr(sampling, name), int)


@pytest.mark.parametrize("change", [{"seed": 1.5}, {"seed": "1"}, {"top_k": -2}, {"top_k": 1.5}])
def test_numbers_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        openai.parse_chat(CHAT | change)
    assert refused.value.field == next(iter(change))


def error_of(error: ClusterError) -> dict[str, Any]:
    """OpenAI's body of this error."""
    body: dict[str, Any] = json.loads(wire.error_answer(error).body)["error"]
    return body


@pytest.mark.rule("http-0.4")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model": None}, "missing_required_parameter"),
        ({"messages": None}, "missing_required_parameter"),
        ({"messages": []}, "empty_array"),
        ({"messages": [USER] * 5000}, "array_above_max_length"),
        ({"model": 5}, "invalid_type"),
        ({"max_tokens": 0}, "integer_below_min_value"),
        ({"n": 10**6}, "integer_above_max_value"),
        ({"temperature": -1.0}, "decimal_below_min_value"),
        ({"temperature": 3.0}, "decimal_above_max_value"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value"),
        ({"logit_bias": {"word": 1}}, "invalid_value"),
        ({"functions": [{}]}, "unsupported_parameter"),
    ],
)
def test_a_wrong_value_has_openais_code(change: dict[str, Any], code: str) -> None:
    """C11: a word, never a number; `param` names the field."""
    with pytest.raises(InvalidInput) as refused:
        openai.parse_chat(CHAT | change)
    error = error_of(refused.value)
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert error["param"] == next(iter(change))


@pytest.mark.rule("http-0.4")
def test_a_wrong_key_has_openais_code() -> None:
    error = error_of(WrongKey())
    assert (error["code"], error["type"], error["param"]) == (
        "invalid_api_key",
        "invalid_request_error",
        None,
    )


def test_echo_begins_each_choice_with_its_prompt() -> None:
    """C11: whole and streamed, once for each choice; with logprobs no engine can."""
    generation = openai.parse_completion({**PROMPT, "prompt": ["One", "Two"], "n": 2, "echo": True})
    head = Head("1", 0, generation)
    deltas = [TextDelta(choice, text) for choice in range(4) for text in (" a", "b")]
    deltas += [TextDelta(choice, finish="stop", usage=Usage(1, 2)) for choice in range(4)]
    whole = json.loads(openai.COMPLETIONS.render_response(head, deltas))
    texts = ["One ab", "One ab", "Two ab", "Two ab"]
    assert [choice["text"] for choice in whole["choices"]] == texts
    streamed = [""] * 4
    for line in openai.COMPLETIONS.events(head).render(deltas).splitlines():
        for choice in json.loads(line.removeprefix(b"data: "))["choices"] if line else ():
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    for change in ({"logprobs": 1}, {"prompt": [1, 2]}):
        with pytest.raises(InvalidInput) as refused:
            openai.parse_completion({**PROMPT, "echo": True, **change})
        assert refused.value.field == "echo"
