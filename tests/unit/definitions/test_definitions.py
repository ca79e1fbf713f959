"""Model definitions from files: what is accepted, what is loaded, what happens to a broken one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.rpc.client import options_from_mapping
from nodes.definitions.files import (
    UnusableDefinition,
    parse_definition,
    parse_file,
    read_definition,
)
from tests.support.definitions import PLAIN, write
from tests.support.hostile_yaml import HOSTILE_SCALARS, documents

__all__ = ["write"]


@pytest.mark.rule("R2.3")
def test_what_is_loaded_comes_from_the_file() -> None:
    """R2.3: the mapping covers LocalAI's names and adds the reference's own defaults, nothing else."""
    document = PLAIN | {
        "context_size": 512, "f16": True, "mmap": False, "threads": 3, "options": ["a:b"], "main_gpu": 0,
        "flash_attention": False, "rope_freq_base": 1, "parameters": {"model": "m", "temperature": 0.2},
        "description": "any text", "template": {"chat": "x"},
    }  # fmt: skip
    options = parse_definition(document, "x.yaml").options
    assert options == {
        "Model": "m", "NBatch": 512, "NGPULayers": 99999999, "MMap": False, "FlashAttention": "off",
        "Threads": 3, "Embeddings": True, "ContextSize": 512, "F16Memory": True, "Options": ["a:b"],
        "MainGPU": "0", "RopeFreqBase": 1.0,
    }  # fmt: skip
    assert options_from_mapping(options).Model == "m"


@pytest.mark.rule("T-REG-93", "T-REV-6")
def test_revision_changes_with_what_is_loaded_only() -> None:
    """The revision depends on the stored definition's engine and options, not on its name or its remarks."""
    first = parse_definition(PLAIN, "x.yaml").revision
    assert len(first) == 64, "never empty"
    assert parse_definition(PLAIN | {"name": "other", "description": "x"}, "y.yaml").revision == first
    assert parse_definition(PLAIN | {"backend": "other"}, "x.yaml").revision != first
    assert parse_definition(PLAIN | {"context_size": 1}, "x.yaml").revision != first


@pytest.mark.rule("T-REG-93")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("- a\n- b", "not a mapping"),
        ("name: x\nbackend: y", "parameters"),
        ("name: x\nparameters: {model: m}", "backend"),
        ("name: ''\nbackend: y\nparameters: {model: m}", "name"),
        ("name: 5\nbackend: y\nparameters: {model: m}", "name"),
        ("name: x\nbackend: y\nparameters: {model: m}\nthreads: many", "threads"),
        ("name: x\nbackend: y\nparameters: {model: m}\nthreads: true", "threads"),
        ("name: x\nbackend: y\nparameters: {model: m}\nthreads: 99999999999", "threads"),
        ("name: x\nbackend: y\nparameters: {model: m}\nembeddings: 5", "embeddings"),
        ("name: x\nbackend: y\nparameters: {model: m}\noptions: [1]", "options"),
        ("name: [", "YAML"),
        ("name: !!python/object/apply:os.system [ls]", "YAML"),
        ("a: &a [x]\nb: [*a, *a]", "aliases"),
        ("#" * 300_000, "larger"),
        ("[" * 20_000, "nested"),
    ],
)
def test_unusable_files_say_why(write: Callable[..., Path], content: str, reason: str) -> None:
    """Every file is checked; the reason names the setting or the syntax."""
    with pytest.raises(UnusableDefinition, match=reason):
        read_definition(write("x.yaml", content))


@pytest.mark.parametrize("field", ["name", "backend"])
@pytest.mark.parametrize(
    "value",
    [
        "..",
        ".",
        "../x",
        "x/..",
        "a/../b",
        "/etc/x",
        "a//b",
        "x/",
        "a\\b",
        "C:\\x",
        "x\0",
        "a\x7fb",
        "a\u202eb",
        "./x",
    ],
)
def test_no_name_leads_out_of_a_folder(field: str, value: str) -> None:
    """worker.md 15: names become folders of workers (`models/<name>/…`) and keys; none may leave its own."""
    with pytest.raises(UnusableDefinition, match=f"`{field}`"):
        parse_definition(PLAIN | {field: value}, "x.yaml")


def test_a_slash_is_part_of_a_name_but_of_no_engine(write: Callable[..., Path], tmp_path: Path) -> None:
    """`org/model` is a usual name; an engine is found by a bare name, with its gallery before it or not."""
    for name in ("org/model", "a.b", "..x", "Qwen/Qwen3-0.6B-GGUF", "\u6a21\u578b"):
        assert parse_definition(PLAIN | {"name": name}, "x.yaml").name == name
    for backend in ("llama-cpp", "localai@cuda12-llama-cpp", "my backend"):
        assert parse_definition(PLAIN | {"backend": backend}, "x.yaml").backend == backend
    for backend in ("org/engine", ".hidden", "gallery@../x", "gallery@.x"):
        with pytest.raises(UnusableDefinition, match="`backend` that is a path"):
            parse_definition(PLAIN | {"backend": backend}, "x.yaml")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("options", ["a\0b"]),
        ("tokenizer", "a\0b"),
        ("rope_freq_base", float("nan")),
        ("rope_freq_base", float("inf")),
        ("rope_freq_base", 1e300),
        ("rope_freq_base", 10**300),
        ("lora_scales", [float("nan")]),
    ],
)
def test_values_that_no_engine_can_get_are_refused(key: str, value: object) -> None:
    """They would fail after the files were sent and the engine has started."""
    with pytest.raises(UnusableDefinition, match=f"`{key}` (is out of range|has the character)"):
        parse_definition(PLAIN | {key: value}, "x.yaml")


def test_numbers_with_an_exponent_are_numbers_as_for_localai(write: Callable[..., Path]) -> None:
    """PyYAML reads `1e6` as a text, since YAML 1.1 wants a point and a sign."""
    text = "name: m\nbackend: b\nrope_freq_base: 1e6\nparameters: {model: m, temperature: 1e-1}\n"
    definition = read_definition(write("x.yaml", text))
    assert definition.options["RopeFreqBase"] == 1e6
    assert definition.generation.defaults == {"temperature": 0.1}
    with pytest.raises(UnusableDefinition, match="`rope_freq_base` is out of range"):
        read_definition(write("x.yaml", text.replace("1e6", "1e99")))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
DOCUMENTS = (
    SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=8), SCALARS, max_size=4)
)


@given(DOCUMENTS)
def test_no_document_breaks_the_loader(document: Any) -> None:
    """All that YAML may give is a definition or `Unusable`."""
    for candidate in (document, PLAIN | {"options": document}, PLAIN | {"threads": document}):
        try:
            options_from_mapping(parse_definition(candidate, "x.yaml").options)
        except UnusableDefinition:
            continue


@pytest.mark.parametrize("scalar", HOSTILE_SCALARS)
@pytest.mark.parametrize("place", ["description: {}", "threads: {}", "options: [{}]", "{}: x", "- {}", "{}"])
def test_a_value_that_python_cannot_hold_is_an_error_of_its_file(scalar: str, place: str) -> None:
    """Review R6: what raised anything but a YAML error took all other models away."""
    text = f"name: x\nbackend: y\nparameters: {{model: m}}\n{place.format(scalar)}\n"
    assert_usable_or_explained(text.encode("utf-8", "surrogatepass"))


@given(documents())
def test_no_text_breaks_the_reader(content: bytes) -> None:
    """Review R6: every file is a definition or `Unusable`, and its reason can be sent and logged."""
    assert_usable_or_explained(content)


def assert_usable_or_explained(content: bytes) -> None:
    """Raise unless the file is a definition that engines can be sent, or `Unusable` with a short reason."""
    try:
        definition = parse_file(content, "x.yaml")
    except UnusableDefinition as error:
        reason = str(error)
    else:
        options_from_mapping(definition.options).SerializeToString()
        reason = "none"
        "".join((*definition.generation.stop, definition.generation.template)).encode()
    assert 0 < len(reason.encode()) < 1000
