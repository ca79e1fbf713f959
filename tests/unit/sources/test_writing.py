"""The definition that an import writes."""

from typing import Any

import pytest

from localai_cluster.kit.errors import InvalidInput
from nodes.sources import writing
from nodes.sources.variants import RepositoryFile, Variant, variants_of


def variant(*names: str) -> Variant:
    return variants_of([RepositoryFile(name, 10) for name in names])[0]


def written(found: Variant, **facts: Any) -> Any:
    settings = writing.definition_of("m", found, "hf/a/b", **facts)
    return writing.check_text(writing.text_of(settings))


def test_a_gguf_file_runs_on_llama_cpp_with_its_own_template() -> None:
    definition = written(variant("m-Q4_0.gguf", "mmproj-F16.gguf"), context=4096)
    assert (definition.backend, definition.model) == ("llama-cpp", "hf/a/b/m-Q4_0.gguf")
    assert definition.options["MMProj"] == "hf/a/b/mmproj-F16.gguf"
    assert definition.options["ContextSize"] == 4096
    assert "vision" in definition.use_cases
    assert definition.generation.warnings == ()


@pytest.mark.parametrize(("trained", "context"), [(0, 8192), (2048, 2048), (1_000_000, 8192)])
def test_the_context_is_bounded(trained: int, context: int) -> None:
    assert written(variant("m.gguf"), context=trained).options["ContextSize"] == context


@pytest.mark.parametrize(
    ("task", "backend", "case"),
    [
        ("text-generation", "vllm", "chat"),
        ("sentence-similarity", "sentencetransformers", "embeddings"),
        ("text-ranking", "rerankers", "rerank"),
        ("automatic-speech-recognition", "whisper", "transcript"),
    ],
)
def test_weights_in_safetensors_run_on_the_backend_of_their_task(task: str, backend: str, case: str) -> None:
    definition = written(variant("model.safetensors", "config.json"), task=task)
    assert (definition.backend, definition.model, definition.use_cases[0]) == (backend, "hf/a/b", case)


def test_values_that_share_objects_are_written_in_full_or_refused() -> None:
    shared: list[Any] = ["x"]
    assert "*" not in writing.text_of({"a": shared, "b": shared})
    bomb: list[Any] = ["x"]
    for _ in range(12):
        bomb = [bomb] * 10
    with pytest.raises(InvalidInput, match="too many"):
        writing.text_of({"a": bomb})


@pytest.mark.parametrize("value", [2**20_000, {2**20_000: 1}, [{2**20_000}]], ids=["value", "key", "set"])
def test_a_number_that_cannot_be_written_is_refused(value: Any) -> None:
    """A document of a gallery may have one."""
    with pytest.raises(InvalidInput, match="a number that is too long"):
        writing.text_of({"x": value})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b c", "a/b-c"),
        ("../x", "x"),
        ("\u202ex", "x"),
        ("//", "model"),
        ("a\\b", "a-b"),
        ("llama3.2:3b", "llama3.2:3b"),
    ],
)
def test_a_suggested_name_is_one_that_can_be_saved(text: str, name: str) -> None:
    assert writing.model_name(text) == name
