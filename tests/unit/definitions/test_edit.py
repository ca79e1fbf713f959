"""Edits of a definition's YAML by the form: what changes, and what stays as its author wrote it."""

from typing import Any

import pytest

from localai_cluster.kit.errors import InvalidInput
from nodes.definitions import edit
from nodes.definitions.files import Definition, load_document, parse_file

TEXT = """\
# for the team
name: m   # the name
backend: llama-cpp
parameters:
  model: m.gguf
  max_tokens: 100 # short answers
flash_attention: on
seed: 010
options:
  - "use_jinja:true"   # keep
  - parallel:2
context_size: 4096
"""


def defined(text: str) -> Definition:
    return parse_file(text.encode(), "m.yaml")


def test_the_form_has_what_the_text_states() -> None:
    assert edit.form_of(defined(TEXT)) == {
        "context_size": 4096,
        "parallel": 2,
        "gpu_layers": None,
        "template": "",
        "options": ["use_jinja:true"],
        "max_tokens": 100,
    }


@pytest.mark.parametrize("number", ["0", "1025", "9" * 20, "9" * 5000, "-1", "٣", "x"])
def test_a_number_of_parallel_requests_that_the_form_refuses_stays_an_option(number: str) -> None:
    """JSON has no number of twenty digits, and Python parses none of thousands: the page failed with 500."""
    form = edit.form_of(defined(TEXT.replace("parallel:2", f"parallel:{number}")))
    assert (form["parallel"], form["options"]) == (None, ["use_jinja:true", f"parallel:{number}"])


def test_an_option_with_such_a_number_can_be_removed_and_stays_before_the_number_that_counts() -> None:
    text = TEXT.replace("parallel:2", "parallel:0")
    assert edit.form_of(defined(edit.apply_changes(text, {"options": []})))["options"] == []
    edited = load_document(edit.apply_changes(text, {"parallel": 4}).encode())
    assert edited["options"] == ["use_jinja:true", "parallel:0", "parallel:4"]


def test_a_change_keeps_comments_order_and_the_quotes_of_the_rest() -> None:
    edited = edit.apply_changes(TEXT, {"context_size": 8192})
    assert edited == TEXT.replace("4096", "8192")


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({"parallel": 4, "max_tokens": None}, {"parallel": 4, "max_tokens": None}),
        ({"parallel": None}, {"parallel": None, "options": ["use_jinja:true"]}),
        ({"options": ["a:on", "parallel:9"]}, {"parallel": 2, "options": ["a:on"]}),
        ({"options": []}, {"parallel": 2, "options": []}),
        ({"gpu_layers": "auto"}, {"gpu_layers": "auto"}),
        ({"gpu_layers": 0}, {"gpu_layers": 0}),
        (
            {"template": "{% for m in messages %}\n{{ m }}\n"},
            {"template": "{% for m in messages %}\n{{ m }}\n"},
        ),
        ({"template": "on"}, {"template": "on"}),
        ({"context_size": None}, {"context_size": None}),
    ],
)
def test_every_setting_of_the_form_can_be_changed_and_removed(
    changes: dict[str, Any], form: dict[str, Any]
) -> None:
    edited = edit.apply_changes(TEXT, changes)
    assert edit.form_of(defined(edited)) == {**edit.form_of(defined(TEXT)), **form}
    assert "# for the team" in edited
    document, before = load_document(edited.encode()), load_document(TEXT.encode())
    assert (document["seed"], document["flash_attention"]) == (before["seed"], before["flash_attention"])


def test_a_setting_that_stands_in_parameters_is_changed_there() -> None:
    text = "name: m\nbackend: b\nparameters: {model: m.gguf, context_size: 1, gpu_layers: 2}\n"
    document = load_document(edit.apply_changes(text, {"context_size": 5, "gpu_layers": None}).encode())
    assert document == {"name": "m", "backend": "b", "parameters": {"model": "m.gguf", "context_size": 5}}


def test_a_text_that_the_library_reads_otherwise_is_written_anew() -> None:
    """A key that stands twice: the last one counts, and the library refuses it."""
    text = "name: a\nname: m\nbackend: b\nparameters: {model: m.gguf}\n"
    assert defined(edit.apply_changes(text, {"context_size": 5})).options["ContextSize"] == 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backend": "x"}, "backend is not a setting of the form"),
        ({"context_size": 0}, "context_size must be a whole number from 1"),
        ({"context_size": True}, "context_size must be"),
        ({"context_size": 2**31}, "context_size must be"),
        ({"gpu_layers": "many"}, "gpu_layers must be"),
        ({"parallel": 1.5}, "parallel must be"),
        ({"template": 1}, "template must be a text"),
        ({"template": "x" * 70_000}, "template must be a text"),
        ({"options": "a"}, "options must be a list"),
        ({"options": [""]}, "options must be a list"),
        ({"options": ["x"] * 201}, "options must be a list"),
        ({"options": ["a", "\ud800"]}, "options must not contain the character U\\+D800"),
        ({"template": "\udc00"}, "template must not contain the character U\\+DC00"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        edit.apply_changes(TEXT, changes)
    assert caught.value.field == "changes"


@pytest.mark.parametrize("text", ["- a", "name: [", "a: *b", "", "[" * 5000, "\ud800"])
def test_a_text_that_is_no_definition_cannot_be_edited(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        edit.apply_changes(text, {"context_size": 5})
    assert caught.value.field == "text"


def test_parameters_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(InvalidInput, match="parameters is not a mapping"):
        edit.apply_changes("name: m\nparameters: 5\n", {"max_tokens": 5})


@pytest.mark.parametrize("name", ["other", "org/model", "on", "1.0", "a: b", "ключ"])
def test_a_copy_has_another_name_and_the_same_rest(name: str) -> None:
    copied = edit.rename(TEXT, name)
    assert defined(copied).name == name
    assert defined(copied).revision == defined(TEXT).revision
    assert "# short answers" in copied


@pytest.mark.parametrize(
    "value",
    ["{% for m in messages %}", "lora: a: b", "*x", "@x", "&a", "!t", "%x", "- a", "# no", "a #b", "on",
     "1.0", "2001-01-01", "<<", "=", "null", "You are: a pirate", "[" * 60_000, " a ", "'", '"',
     "a\tb", "\x07", "é"],
)  # fmt: skip
def test_every_text_is_written_as_itself(value: str) -> None:
    edited = edit.apply_changes(TEXT, {"template": value})
    assert load_document(edited.encode())["template"]["chat"] == value
    merged = load_document(edit.merge(TEXT, {"system_prompt": value, "stopwords": [value]}).encode())
    assert (merged["system_prompt"], merged["stopwords"]) == (value, [value])


def test_a_long_text_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that keeps comments would need seconds for it."""
    monkeypatch.setattr(edit, "YAML", lambda: pytest.fail("the library was used"))
    text = TEXT + "x:\n" + "  - a  # b\n" * 10_000
    assert len(text) > edit.MAX_EDITED_LENGTH
    edited = edit.apply_changes(text, {"context_size": 5})
    assert load_document(edited.encode()) == load_document(text.encode()) | {"context_size": 5}


def test_sections_are_merged() -> None:
    merged = edit.merge(
        TEXT, {"parameters": {"temperature": 0.5}, "stopwords": ["on"], "system_prompt": "a\nb"}
    )
    definition = defined(merged)
    assert definition.generation.defaults == {"temperature": 0.5, "max_tokens": 100}
    assert (definition.generation.stop, definition.generation.system) == (("on",), "a\nb")
