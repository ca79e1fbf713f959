"""Ollama's description of a model as settings of a definition."""

from typing import Any

import pytest

from localai_cluster.kit.errors import InvalidInput
from nodes.definitions.files import parse_file
from nodes.dialects.modelfile import (
    NotSupported,
    parse_modelfile,
    render_modelfile,
    render_parameters,
    to_settings,
)

TEXT = '''# a pirate
FROM m:latest
PARAMETER temperature 0.5
PARAMETER num_ctx 8192
PARAMETER num_predict -1
PARAMETER stop "<|end|>"
parameter stop STOP
PARAMETER mirostat 1
SYSTEM """You are
a pirate."""
TEMPLATE "{{ .System }}"
LICENSE mit
'''


def test_the_lines_become_settings() -> None:
    modelfile = parse_modelfile(TEXT)
    assert modelfile.base == "m:latest"
    assert to_settings(modelfile) == {
        "parameters": {"temperature": 0.5},
        "context_size": 8192,
        "stopwords": ["<|end|>", "STOP"],
        "system_prompt": "You are\na pirate.",
        "template": {"chat": "{{ .System }}"},
    }


def test_a_template_in_jinja_is_used() -> None:
    modelfile = parse_modelfile('FROM m\nTEMPLATE """{% for m in messages %}{{ m.content }}{% endfor %}"""')
    assert to_settings(modelfile)["template"]["jinja_template"] is True


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SYSTEM x", "no FROM"),
        ("FROM m\nFETCH x", "is no instruction"),
        ("FROM m\nSYSTEM", "has no value"),
        ('FROM m\nSYSTEM """x', "does not end"),
        ("FROM m\n" + "# x\n" * 10_001, "more than"),
    ],
)
def test_what_is_no_modelfile_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        parse_modelfile(text)
    assert caught.value.field == "modelfile"


@pytest.mark.parametrize("name", ["temperature", "num_ctx", "num_predict"])
def test_a_parameter_without_a_value_is_refused(name: str) -> None:
    modelfile = parse_modelfile("FROM m")
    modelfile.parameters[name] = []
    with pytest.raises(InvalidInput, match=f"{name} is not a number"):
        to_settings(modelfile)


@pytest.mark.parametrize("value", ["x", True, None, [], "1e999"])
def test_a_parameter_that_is_no_number_is_refused(value: Any) -> None:
    modelfile = parse_modelfile("FROM m")
    modelfile.parameters["num_ctx"] = [value]
    with pytest.raises(InvalidInput, match="num_ctx is not a number"):
        to_settings(modelfile)


@pytest.mark.parametrize("value", ["nan", "inf", "-Infinity", float("nan"), "1e999"])
def test_a_parameter_that_no_engine_could_use_is_refused(value: Any) -> None:
    """Else the definition would have it, and generation would ignore it without a word."""
    modelfile = parse_modelfile("FROM m")
    modelfile.parameters["temperature"] = [value]
    with pytest.raises(InvalidInput, match="temperature is not a number"):
        to_settings(modelfile)


@pytest.mark.parametrize("value", [None, {"a": 1}, ["x"], True])
def test_a_stop_word_that_is_no_text_is_refused(value: Any) -> None:
    modelfile = parse_modelfile("FROM m")
    modelfile.parameters["stop"] = ["x", value]
    with pytest.raises(InvalidInput, match="stop is not a list of texts"):
        to_settings(modelfile)


def test_an_adapter_is_not_supported() -> None:
    with pytest.raises(NotSupported):
        parse_modelfile("FROM m\nADAPTER ./a.gguf")


def test_a_definition_is_shown_as_it_could_be_created() -> None:
    text = (
        "name: m\nbackend: b\nparameters: {model: m.gguf, temperature: 0.5, max_tokens: 7}\n"
        "context_size: 8192\nstopwords: [x]\nsystem_prompt: be brief\n"
    )
    definition = parse_file(text.encode(), "m.yaml")
    assert [line.split(None, 1) for line in render_parameters(definition).splitlines()] == [
        ["num_ctx", "8192"],
        ["temperature", "0.5"],
        ["num_predict", "7"],
        ["stop", '"x"'],
    ]
    modelfile = parse_modelfile(render_modelfile(definition))
    assert modelfile.base == "m.gguf"
    assert to_settings(modelfile) == {
        "context_size": 8192,
        "parameters": {"temperature": 0.5, "max_tokens": 7},
        "stopwords": ["x"],
        "system_prompt": "be brief",
    }
