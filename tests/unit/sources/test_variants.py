"""Files of a repository as the variants that a person chooses from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.sources import variants
from nodes.sources.variants import (
    MAX_VARIANTS,
    RepositoryFile,
    Variant,
    quantization_of,
    recommend,
    select,
    variants_of,
)


def listed(*names: str, size: int = 10) -> list[RepositoryFile]:
    return [RepositoryFile(name, size + index) for index, name in enumerate(names)]


def ids(found: list[Variant]) -> list[str]:
    return [variant.id for variant in found]


@pytest.mark.parametrize(
    ("path", "quantization"),
    [
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Meta-Llama-3.1-8B-Instruct-Q8_0.gguf", "Q8_0"),
        ("model.IQ4_XS.gguf", "IQ4_XS"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("BF16/model-00001-of-00002.gguf", "BF16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("model-f16.gguf", "F16"),
        ("model.gguf", ""),
        ("q4you.gguf", ""),
    ],
)
def test_the_quantization_is_read_from_the_name(path: str, quantization: str) -> None:
    assert quantization_of(path) == quantization


def test_quantizations_are_variants_with_all_their_parts_and_the_projector() -> None:
    found = variants_of(
        listed(
            "README.md", "m-Q8_0.gguf", "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf",
            "mmproj-m-BF16.gguf", "mmproj-m-F16.gguf", "m.imatrix.gguf", "m-imatrix.gguf", ".hidden.gguf",
        )
    )  # fmt: skip
    assert sorted(ids(found)) == ["Q4_K_M", "Q8_0"]
    parts = next(variant for variant in found if variant.id == "Q4_K_M")
    assert [file.path for file in parts.files] == [
        "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "mmproj-m-F16.gguf",
    ]  # fmt: skip
    assert (parts.main, parts.projector) == ("m-Q4_K_M-00001-of-00002.gguf", "mmproj-m-F16.gguf")
    assert parts.weights + parts.projector_size == parts.size


def test_a_set_that_lacks_a_part_is_no_variant() -> None:
    assert variants_of(listed("m-Q4_0-00001-of-00003.gguf", "m-Q4_0-00003-of-00003.gguf")) == []
    assert variants_of(listed("m-00002-of-00002.safetensors", "config.json")) == []


def test_a_quantization_that_is_there_twice_is_told_apart_by_its_file() -> None:
    assert sorted(ids(variants_of(listed("a-Q4_0.gguf", "b-Q4_0.gguf")))) == ["a-Q4_0.gguf", "b-Q4_0.gguf"]


def test_weights_in_safetensors_come_with_tokenizer_and_template() -> None:
    (found,) = variants_of(
        listed(
            "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
            "tokenizer_config.json", "chat_template.jinja", "merges.txt", "vocab.json", "README.md",
            "consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "original/x.pth",
        )
    )  # fmt: skip
    names = {file.path for file in found.files}
    assert found.format == "safetensors"
    assert {"chat_template.jinja", "tokenizer.json", "config.json", "model.safetensors.index.json"} <= names
    assert names.isdisjoint({"README.md", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx"})


def test_a_pipeline_keeps_its_folders() -> None:
    (found,) = variants_of(
        listed("model_index.json", "unet/config.json", "unet/model.safetensors", "unet/model.bin", "x.png")
    )
    assert [file.path for file in found.files] == [
        "model_index.json", "unet/config.json", "unet/model.safetensors",
    ]  # fmt: skip
    assert found.format == "pipeline"


def test_the_best_that_fits_is_recommended() -> None:
    found = variants_of(listed("m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-Q3_K_M.gguf"))
    assert recommend(found, ids(found)) == "Q4_K_M"
    assert recommend(found, ["Q2_K", "Q3_K_M"]) == "Q3_K_M"
    assert recommend(found, []) == "Q4_K_M"
    assert recommend([], []) == ""


def test_a_variant_is_found_by_id_quantization_or_file() -> None:
    found = variants_of(listed("m-Q4_K_M.gguf", "m-Q8_0.gguf"))
    for wanted in ("q4_k_m", "Q4_K_M", "m-Q4_K_M.gguf"):
        assert select(found, wanted) == next(each for each in found if each.id == "Q4_K_M")
    assert select(found, "Q5_K_M") is None


_NAMES = st.text(st.sampled_from("aQ4_K-.0123of/"), min_size=1, max_size=40).map(lambda name: f"{name}.gguf")


@given(st.lists(st.one_of(_NAMES, st.text(max_size=30)), max_size=40))
def test_any_names_make_variants_of_the_files_that_are_there(paths: list[str]) -> None:
    repository = listed(*dict.fromkeys(paths))
    found = variants_of(repository)
    assert len(set(ids(found))) == len(found) <= MAX_VARIANTS
    assert all(set(variant.files) <= set(repository) and variant.files for variant in found)


def test_many_files_are_grouped_in_linear_time() -> None:
    """10^5 names of parts, in sets that are never complete."""
    repository = [RepositoryFile(f"m-{number:05}-of-99999.gguf", 1) for number in range(1, 99999)]
    assert variants_of(repository) == []


def test_each_projector_is_ranked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    read = variants.quantization_of

    def counted(path: str) -> str:
        names.append(path)
        return read(path)

    monkeypatch.setattr(variants, "quantization_of", counted)
    weights = [f"{number % 2}/m{number}-Q4_0.gguf" for number in range(500)]
    projectors = [f"{number % 3}/mmproj-{number}-Q8_0.gguf" for number in range(500)]
    found = variants_of(listed(*weights, *projectors))
    assert len(names) <= len(projectors) + MAX_VARIANTS
    assert {variant.projector.partition("/")[0] == variant.main.partition("/")[0] for variant in found} == {
        True
    }
