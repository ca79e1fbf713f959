"""The check of a text before it is saved: places of errors, secrets, hostile texts, and the schema itself."""

import time
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from localai_cluster.kit.errors import InvalidInput
from nodes.definitions import schema
from nodes.definitions.files import FIELDS, MAX_FILE_BYTES, UnusableDefinition, parse_file
from nodes.definitions.schema import check_text
from tests.support.hostile_yaml import HOSTILE_SCALARS, documents

BASE = "name: m\nbackend: b\nparameters:\n  model: m.gguf\n"


def problems(text: str) -> list[tuple[int, int, str, str]]:
    return [(found.line, found.column, found.path, found.message) for found in check_text(text, "s").errors]


def test_a_usable_text_has_its_definition_and_its_warnings() -> None:
    checked = check_text(BASE + "contex_size: 5\nstopwords: 5\n", "s")
    assert checked.definition is not None
    assert checked.definition.source == "s"
    assert list(checked.warnings) == [
        "`stopwords` is not a list of texts and is ignored",
        "line 6: `stopwords` is not a list",
        "`contex_size` is not used; did you mean `context_size`?",
    ]
    assert not checked.errors


def test_all_wrong_values_are_found_with_their_places() -> None:
    text = "name: m\nparameters:\n  top_k: x\n  model: 5\nthreads: many\noptions: [a, 5]\n"
    assert problems(text) == [
        (1, 1, "backend", "does not say `backend`"),
        (3, 3, "parameters.top_k", "`parameters.top_k` is not a whole number"),
        (4, 3, "parameters.model", "`parameters.model` is not a text"),
        (5, 1, "threads", "`threads` is not a whole number"),
        (6, 14, "options.1", "`options.1` is not a text"),
    ]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (BASE + "x: [", 5, "is not valid YAML"),
        ("name: m\n\tbackend: b", 2, "is not valid YAML"),
        (BASE + "vram_needed: much\n", 5, "`vram_needed` is not a size"),
        (BASE.replace("name: m", "name: ../m"), 1, "`name` that is a path"),
        (BASE + "threads: 99999999999\n", 5, "`threads` is out of range"),
        ("- a", 0, "is not a mapping"),
        ("", 0, "is not a mapping"),
        (BASE + "a: &x 1\nb: *x\n", 0, "aliases are not accepted"),
    ],
)
def test_the_first_error_has_its_line(text: str, line: int, says: str) -> None:
    (first, *_) = problems(text)
    assert says in first[3]
    assert line in (first[0], 0)
    with pytest.raises(InvalidInput, match="text: ") as caught:
        schema.require_usable(text, "s")
    assert (caught.value.field, caught.value.data["line"]) == ("text", first[0])


@pytest.mark.parametrize(
    "secret",
    [
        "api_key: abc",
        "hf_token: abc",
        "token: abc",
        "password: 1234",
        "headers: {Authorization: Basic abc}",
        "vllm: {nested: [{client_secret: abc}]}",
        "options: ['api_key:abc']",
        "url: https://ann:word@example.com/m.gguf",
        "x: hf_abcdefghijklmnopqrstuvwx",
        "# sk-abcdefghijklmnopqrstuv",
        "y: Bearer abcdefghijkl",
        "z: ghp_abcdefghijklmnopqrstuvwx",
    ],
)
def test_secrets_are_refused_with_their_place(secret: str) -> None:
    (found,) = problems(BASE + secret + "\n")
    assert found[0] == 5
    assert "is a secret" in found[3]
    assert "abc" not in found[3].replace("hf_", "")
    assert check_text(BASE + secret + "\n", "s").definition is None


@pytest.mark.parametrize(
    "harmless",
    [
        "token_ids: true",
        "tokenizer: t.json",
        "options: ['eos_token:</s>']",
        "token:",
        "password: ''",
        "bos_token: <s>",
    ],
)
def test_settings_about_tokens_of_a_model_are_no_secrets(harmless: str) -> None:
    assert problems(BASE + harmless + "\n") == []


@pytest.mark.parametrize(
    "text",
    [
        BASE + "x: " + "[" * 3000 + "]" * 3000,
        BASE + "x: {a: &a [1], b: &b [*a, *a], c: [*b, *b]}",
        "\ud800",
        BASE + "x: \0",
        "a" * (MAX_FILE_BYTES + 1),
        BASE + "".join(f"k{number}: 1\n" for number in range(100_000)),
    ],
    ids=["deep", "bomb", "surrogate", "nul", "long", "many keys"],
)
def test_hostile_texts_are_refused_quickly(text: str) -> None:
    begin = time.process_time()
    assert problems(text)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("setting", ["x: {}", "? {}\n: 1", "x: [{{a: {}}}]", "x: !!set {{{}}}"])
def test_a_number_that_cannot_be_written_again_is_refused_with_its_line(setting: str) -> None:
    """The routes that show or copy the definition would fail with 500."""
    (found,) = check_text(BASE + setting.format("0x" + "f" * 6000) + "\n", "s").errors
    assert "a number is too long" in found.message
    assert found.line == BASE.count("\n") + 1


@pytest.mark.parametrize("scalar", HOSTILE_SCALARS)
@pytest.mark.parametrize("key", ["threads", "name", "options", "x", "template"])
def test_a_hostile_value_is_an_error_or_none(scalar: str, key: str) -> None:
    for found in check_text(f"{BASE}{key}: {scalar}\n", "s").errors:
        found.message.encode()


@given(documents())
def test_the_check_and_the_parser_agree(content: bytes) -> None:
    """What the one accepts the other does: a text without a secret."""
    text = content.decode("utf-8", "surrogateescape")
    checked = check_text(text, "s")
    if any("is a secret" in found.message for found in checked.errors):
        return
    try:
        parsed = parse_file(text.encode(), "s")
    except (UnusableDefinition, UnicodeEncodeError):
        assert checked.errors
    else:
        assert checked.definition is not None
        assert checked.definition.revision == parsed.revision


def test_the_schema_is_one_and_knows_all_settings() -> None:
    found: Any = schema.definition_schema()
    Draft202012Validator.check_schema(found)
    assert FIELDS.keys() <= found["properties"].keys()
    assert found["required"] == ["name", "backend", "parameters"]
