"""What a model needs on a device, term by term (D-FIT); `tests/integration/examples` asks llama.cpp."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.definitions.files import UnusableDefinition, parse_definition
from nodes.definitions.headers import MAX_FIGURE, Header, Tensor, parse_config_json, read_header
from nodes.definitions.sizes import ModelFiles
from nodes.loading import load_request
from nodes.placement import architectures, fit
from nodes.placement.choose import Need, Reason, find_refusal, gpu_shares, has_memory, vram_needed
from nodes.placement.explain import FleetView, explain
from tests.support import gguf_files
from tests.support.gguf_models import MODELS
from tests.unit.placement.test_choose import view

MIB, GIB = 2**20, 2**30
CUDA = fit.BACKEND_CONTEXT["cuda"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def files_of(folder: Path, name: str) -> ModelFiles:
    """The files of a published model, written by `gguf` with a hole for the tensors."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        (model,) = (model for model in MODELS if model.name == name)
        gguf_files.write(path, model)
    return ModelFiles(path.stat().st_size, header=read_header(path))


def terms_of(files: ModelFiles, kind: str = "cuda", **options: Any) -> dict[str, int]:
    return dict(fit.estimate(files, fit.load_options(options), kind))


KIB_PER_TOKEN = {
    **{"SmolLM2-135M": 22.5, "Llama-3.2-1B": 32, "Llama-3.1-8B": 128, "Llama-3.1-70B": 320},
    **{"Llama-2-13B": 800, "Mixtral-8x7B": 128, "Qwen2.5-0.5B": 12, "Qwen2.5-7B": 56, "Qwen2.5-32B": 256},
    **{"Qwen3-0.6B": 112, "Qwen3-8B": 144, "Qwen3-30B-A3B": 96, "Qwen3-235B-A22B": 188, "Phi-4": 200},
    **{"gemma-2-9b": 168, "gemma-3-27b": 80, "gpt-oss-20b": 24, "command-r7b": 32},
    **{"DeepSeek-V3": 68.625, "DeepSeek-V2-Lite": 30.375, "falcon-7b": 8, "OLMoE-1B-7B": 128},
    **{
        "granite-4.0-h-micro": 8,
        "LFM2-1.2B": 12,
        "mamba-130m": 0,
        "Mamba-Codestral-7B": 0,
        "bge-small-en": 0,
    },
}
"""What a token of a long context takes in 16 bits: layers with full attention x (keys + values) x 2 bytes."""


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize(("name", "expected"), KIB_PER_TOKEN.items(), ids=KIB_PER_TOKEN)
def test_the_bytes_of_a_token(folder: Path, name: str, expected: float) -> None:
    """Heads for keys in groups, one for all, compressed ones; windows, states and encoders add nothing."""
    files = files_of(folder, name)
    short, long = (terms_of(files, ContextSize=context).get("context", 0) for context in (32768, 65536))
    assert (long - short) / 32768 / 1024 == expected


@pytest.mark.rule("R2.41")
def test_a_window_keeps_its_tokens_and_a_batch(folder: Path) -> None:
    """52 of 62 layers see 1,024 tokens; of slots with one cache each has a window."""
    files, layer = files_of(folder, "gemma-3-27b"), 2 * 16 * 128 * 2

    def context(**options: Any) -> int:
        return terms_of(files, ContextSize=131072, **options)["context"]

    assert context() == layer * (10 * 131072 + 52 * 1536)
    assert context(Options=["parallel:4"]) == layer * (10 * 131072 + 52 * (4 * 1024 + 512))
    assert context(Options=["parallel:4", "kv_unified:false"]) == layer * (10 * 131072 + 52 * 4 * 1536)
    assert context(Options=["swa_full:true"]) == layer * 62 * 131072


@pytest.mark.rule("R2.41")
def test_a_state_is_kept_for_each_slot(folder: Path) -> None:
    """36 layers of granite keep a state and 4 a cache; LFM2 keeps two columns for each convolution."""
    state = 4 * (3 * (4096 + 2 * 128) + 128 * 4096)
    files = files_of(folder, "granite-4.0-h-micro")
    assert terms_of(files, ContextSize=8192)["context"] == 36 * state + 8192 * 8 * 1024
    four = terms_of(files, ContextSize=8192, Options=["parallel:4"])["context"]
    assert four == 4 * 36 * state + 8192 * 8 * 1024
    mixed = terms_of(files_of(folder, "LFM2-1.2B"), ContextSize=8192)["context"]
    assert mixed == 10 * 4 * 2 * 2048 + 8192 * 12 * 1024


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize(
    ("keys", "values", "bits"),
    [("q8_0", "q8_0", 17), ("q4_0", "F16", 20.5), ("other", "", 32), ("f32", "bf16", 48)],
)
def test_the_types_of_a_cache(folder: Path, keys: str, values: str, bits: float) -> None:
    """With the scale of each block; an unknown type counts as 16 bits."""
    files = files_of(folder, "Qwen3-8B")
    found = terms_of(files, ContextSize=8192, CacheTypeKey=keys, CacheTypeValue=values)["context"]
    assert found == 36 * 1024 * 8192 * bits / 8


GPU_BUFFERS = {
    "gemma-2-2b": 75.55,
    "gemma-3-1b": 52.55,
    "gpt-oss-20b": 91.58,
    "Qwen3-30B-A3B": 88.09,
    "Phi-3.5-mini": 70.01,
    "granite-4.0-h-micro": 68.09,
    "OLMoE-1B-7B": 64.09,
    "Mamba-Codestral-7B": 112.6,
}
"""MiB of the compute buffer on a GPU with 4,096 tokens, as gguf-parser-go has measured it
(`testdata/llamacpp_compute_buffer_sweep.json`).
"""


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize(("name", "measured"), GPU_BUFFERS.items(), ids=GPU_BUFFERS)
def test_the_compute_buffer_of_a_gpu(folder: Path, name: str, measured: float) -> None:
    found = terms_of(files_of(folder, name), ContextSize=4096)["buffers"] / MIB
    assert 0.99 * measured <= found <= 1.04 * measured


@pytest.mark.rule("R2.41")
def test_weights_go_to_a_gpu_from_the_output_on(folder: Path) -> None:
    """The embedding stays in the main memory, unless it is the output as well; so does what is mapped."""
    files = files_of(folder, "Qwen3-8B")
    assert files.header is not None
    sizes = {tensor.name: tensor.size for tensor in files.header.tensors}
    embedding, output = sizes["token_embd.weight"], sizes["output.weight"] + sizes["output_norm.weight"]
    last = sum(size for name, size in sizes.items() if name.startswith("blk.35."))
    assert terms_of(files)["weights"] == sum(sizes.values()) - embedding
    assert terms_of(files, NGPULayers=-1) == terms_of(files, NGPULayers=99999999) == terms_of(files)
    assert terms_of(files, NGPULayers=37)["weights"] == sum(sizes.values()) - embedding
    assert terms_of(files, NGPULayers=1)["weights"] == output
    two = terms_of(files, NGPULayers=2, ContextSize=8192)
    assert (two["weights"], two["context"]) == (output + last, 8192 * 4 * 1024)
    assert two["buffers"] == terms_of(files, ContextSize=8192)["buffers"] + max(
        size for name, size in sizes.items() if name.startswith("blk.")
    )
    assert terms_of(files, NGPULayers=0) == {}
    assert "context" not in terms_of(files, NoKVOffload=True)
    tied = files_of(folder, "Qwen3-0.6B")
    assert tied.header is not None
    assert terms_of(tied)["weights"] == sum(tensor.size for tensor in tied.header.tensors)


@pytest.mark.rule("R2.41")
def test_the_main_memory_holds_copies_in_another_layout(folder: Path) -> None:
    """Of types that the processor has kernels for; without a map there is one copy of everything."""
    files = files_of(folder, "Llama-2-13B")
    assert "weights" not in terms_of(files, "cpu")
    files = files_of(folder, "Mistral-7B-v0.3")
    assert files.header is not None
    copied = sum(tensor.size for tensor in files.header.tensors if tensor.type == 2)
    assert terms_of(files, "cpu")["weights"] == copied
    assert terms_of(files, "cpu", MMap=False)["weights"] == sum(t.size for t in files.header.tensors)


@pytest.mark.rule("R2.41")
def test_more_devices_have_more_buffers(folder: Path) -> None:
    files = files_of(folder, "Qwen3-8B")
    one, two = terms_of(files), terms_of(files, TensorSplit="3,0,1")
    assert (one["backend"], two["backend"]) == (CUDA, 2 * CUDA)
    assert two["buffers"] == 2 * one["buffers"]
    assert terms_of(files, "vulkan")["backend"] == fit.BACKEND_CONTEXT["vulkan"]
    assert "backend" not in terms_of(files, "metal")


@pytest.mark.rule("R2.41")
def test_flash_attention_saves_the_scores(folder: Path) -> None:
    files = files_of(folder, "Llama-3.1-8B")
    fast, slow = (
        terms_of(files, ContextSize=8192, FlashAttention=value)["buffers"] for value in ("auto", "off")
    )
    assert slow - fast > 32 * 8192 * 512 * 4 - fast


@pytest.mark.rule("R2.41")
def test_outputs_of_every_token_take_a_vocabulary_each(folder: Path) -> None:
    files = files_of(folder, "Llama-3.1-8B")
    assert terms_of(files, Embeddings=True)["buffers"] > 512 * 128256 * 4
    assert terms_of(files, "cpu")["output"] == 4 * 128256


@pytest.mark.rule("R2.37", "R2.41")
def test_the_files_beside_a_model_count(folder: Path) -> None:
    model, draft = files_of(folder, "Qwen3-8B"), files_of(folder, "Qwen3-0.6B")
    files = ModelFiles(model.weights, 0, model.header, 7, 8, draft.weights, draft.header)
    found = terms_of(files)
    own = sum(size for name, size in terms_of(draft).items() if name != "backend")
    assert (found["projector"], found["adapters"], found["draft"]) == (7, 8, own)


@pytest.mark.rule("R2.41", "C37")
def test_a_model_without_figures_needs_its_size_and_two_kib_a_token() -> None:
    expected = {"weights": 8 * GIB, "context": 2048 * 8192}
    for header in (None, Header(), Header("llama", {"block_count": 10**6, "embedding_length": 1})):
        assert terms_of(ModelFiles(8 * GIB, header=header)).items() >= expected.items()
    assert terms_of(ModelFiles(8 * GIB), ContextSize=100)["context"] == 2048 * 100
    assert terms_of(ModelFiles(8 * GIB), ContextSize=-1)["context"] == 2048 * 8192


@pytest.mark.rule("R2.40")
def test_what_is_not_known_needs_nothing() -> None:
    assert terms_of(ModelFiles(0, header=Header())) == {}


FIGURES = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "ssm.inner_size",
    "ssm.state_size",
    "attention.sliding_window_pattern",
    "ssm.conv_kernel",
    "ssm.group_count",
    "full_attention_interval",
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "expert_used_count",
    "vocab_size",
    "wkv.head_size",
    "shortconv.l_cache",
    "kda.head_dim",
    "nextn_predict_layers",
    "attention.shared_kv_layers",
]


@given(
    st.dictionaries(
        st.sampled_from(FIGURES),
        st.integers(0, MAX_FIGURE) | st.lists(st.integers(0, MAX_FIGURE), max_size=3).map(tuple),
    ),
    st.sampled_from(("llama", "gemma3", "gemma3n", "mamba", "nemotron_h", "qwen3next", "falcon-h1", "")),
    st.integers(1, 40),
)
def test_no_figures_cause_an_error(figures: dict[str, Any], architecture: str, layers: int) -> None:
    """The estimate stays in the range of a column."""
    header = Header(architecture, {"embedding_length": 1, "block_count": layers, **figures}, ())
    for options in (
        {},
        {"FlashAttention": "off", "NGPULayers": 3, "ContextSize": 2**31 - 1, "NBatch": 2**31 - 1},
    ):
        terms = fit.estimate(ModelFiles(2**62, header=header), fit.load_options(options))
        assert all(0 < size <= fit.LARGEST for _, size in terms)
        assert fit.total_bytes(terms) <= fit.LARGEST


@pytest.mark.rule("R2.41")
def test_a_config_describes_a_model_in_safetensors() -> None:
    """Llama-3.1-8B: the layers share the weights of the files."""
    figures = {"block_count": 32, "embedding_length": 4096, "attention.head_count": 32}
    header = Header("llama", {**figures, "attention.head_count_kv": 8, "feed_forward_length": 14336})
    found = terms_of(ModelFiles(16 * GIB, header=header))
    assert (found["weights"], found["context"]) == (16 * GIB, 128 * 1024 * 8192)
    latent = {**figures, "attention.kv_lora_rank": 512, "rope.dimension_count": 64}
    assert terms_of(ModelFiles(GIB, header=Header("", latent)))["context"] == 32 * 576 * 2 * 8192


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize(
    ("model", "more"),
    [("gemma3_text", {}), ("gemma3_text", {"sliding_window_pattern": 6}), ("gemma2", {"head_dim": 256})],
)
def test_a_config_without_kinds_of_layers_has_the_windows_of_its_architecture(
    model: str, more: dict[str, int]
) -> None:
    """Gemma 3 as published: five of six layers keep 1,024 tokens and a batch. Of Gemma 2 every other one."""
    config = {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    config |= {"num_key_value_heads": 16, "sliding_window": 1024, **more}
    header = parse_config_json({"text_config": {**config, "model_type": model}})
    found = terms_of(ModelFiles(GIB, header=header), ContextSize=131072)
    full = 10 if model == "gemma3_text" else 31
    token = 2 * 2 * 16 * config["head_dim"]
    assert found["context"] == token * (full * 131072 + (62 - full) * (1024 + 512))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"Options": ["n_parallel:0", "ubatch:x"]}, fit.LoadOptions()),
        ({"Options": ["parallel:-3", "parallel"], "NBatch": 0}, fit.LoadOptions()),
        ({"Options": ["n_parallel:2", "n_ubatch:64"]}, fit.LoadOptions(slots=2, batch=64)),
        ({"ContextSize": 100, "NBatch": 512}, fit.LoadOptions(context=100, batch=100)),
        ({"TensorSplit": "0.5, 0.0,1"}, fit.LoadOptions(gpus=2, split=(0.5, 0.0, 1.0))),
        ({"TensorSplit": "1,x"}, fit.LoadOptions()),
        (
            {"TensorSplit": "1/1", "MainGPU": "1", "Options": ["sm:None"]},
            fit.LoadOptions(split=(1.0, 1.0), main_gpu=1, split_mode="none"),
        ),
    ],
)
def test_the_options_of_a_definition(options: dict[str, Any], expected: fit.LoadOptions) -> None:
    assert fit.load_options(options) == expected


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("llama-cpp", "cuda"), ("cuda12-llama-cpp", "cuda"), ("rocm-llama-cpp-development", "rocm")),
        *(("intel-sycl-f16-llama-cpp", "sycl"), ("vulkan-llama-cpp", "vulkan"), ("cpu-llama-cpp", "cpu")),
        *(("metal-llama-cpp", "metal"), ("", "cuda")),
    ],
)
def test_the_kind_of_a_backend(backend: str, kind: str) -> None:
    assert fit.device_kind(backend) == kind


DOCUMENT = {"name": "m", "backend": "llama-cpp", "parameters": {"model": "m.gguf"}}


def need_of(files: ModelFiles, **settings: Any) -> Need:
    return load_request.estimate_need(parse_definition({**DOCUMENT, **settings}, "m.yaml"), files)


@pytest.mark.rule("R2.40", "R2.41")
def test_the_need_has_its_terms_and_a_definition_may_state_it(folder: Path) -> None:
    files = files_of(folder, "Qwen3-8B")
    need = need_of(files, context_size=4096)
    assert dict(need.terms) == terms_of(files, ContextSize=4096)
    assert need.vram == sum(size for _, size in need.terms)
    for stated in ("12GiB", "12 gib", 12 * GIB):
        assert need_of(files, vram_needed=stated).terms == (("stated", 12 * GIB),)
    assert need_of(files, vram_needed="1.5GB").vram == 1_500_000_000
    assert need_of(files, backend="cpu-llama-cpp") == replace(_plain(), disk=2 * GIB)
    for unusable in ("much", "12", -1, True, 2**60, ["1GB"]):
        with pytest.raises(UnusableDefinition, match="`vram_needed` is not a size"):
            parse_definition({**DOCUMENT, "vram_needed": unusable}, "m.yaml")


def _plain() -> Need:
    return need_of(ModelFiles())


def test_a_stated_need_does_not_change_the_revision() -> None:
    plain, stated = (
        parse_definition({**DOCUMENT, **more}, "m.yaml") for more in ({}, {"vram_needed": "1GB"})
    )
    assert plain.revision == stated.revision


@pytest.mark.rule("R2.41")
def test_a_backend_that_takes_a_share_of_a_card_needs_that_share() -> None:
    """By its own default, by the option, on as many cards as it uses; other backends ignore the option."""
    card = view(card_vram=24 * GIB, free_vram=20 * GIB, gpus=frozenset({(0, 20 * GIB)}))
    default, less = need_of(ModelFiles(GIB), backend="vllm"), {"gpu_memory_utilization": 0.5}
    assert (vram_needed(card, default), has_memory(card, default)) == (int(24 * GIB * 0.9), False)
    half = need_of(ModelFiles(GIB), backend="cuda12-vllm", **less)
    assert (vram_needed(card, half), has_memory(card, half)) == (12 * GIB, True)
    assert need_of(ModelFiles(GIB), **less).vram_share == 0
    two = need_of(ModelFiles(GIB), backend="vllm", tensor_parallel_size=2, **less)
    pair = view(card_vram=24 * GIB, free_vram=48 * GIB, gpus=frozenset({(0, 24 * GIB), (1, 24 * GIB)}))
    assert gpu_shares(pair, two) == {0: 12 * GIB, 1: 12 * GIB}, "not both on one card"
    halves = view(card_vram=24 * GIB, free_vram=24 * GIB, gpus=frozenset({(0, 12 * GIB), (1, 12 * GIB)}))
    assert gpu_shares(halves, default) is None, "its engine takes the share of one card"
    for backend in ("cpu-vllm", "metal-vllm", "myvllmlike"):
        assert need_of(ModelFiles(GIB), backend=backend).vram_share == 0
    many = need_of(ModelFiles(GIB), backend="vllm", tensor_parallel_size=2**31 - 1)
    assert vram_needed(card, many) == 2**62
    assert load_request.parse_need(load_request.payload_with_need({}, half)) == half
    assert vram_needed(view(), half) == 0, "no memory is reported"
    assert find_refusal(view(), need=half) is None
    assert find_refusal(view(), need=replace(half, unknown_fits=False)) is Reason.MEMORY


@pytest.mark.rule("I14")
def test_an_explanation_has_the_terms() -> None:
    need = Need(vram=10, terms=(("weights", 7), ("context", 3)))
    question = FleetView([view()], need)
    assert explain(question, question.decide()).facts["need"]["terms"] == {"weights": 7, "context": 3}


@pytest.mark.rule("R2.41")
@pytest.mark.parametrize("model", MODELS[:8], ids=lambda model: model.name)
def test_the_reader_finds_what_another_writer_wrote(folder: Path, model: gguf_files.Dimensions) -> None:
    header = files_of(folder, model.name).header
    assert header is not None
    written = gguf_files.header_figures(model)
    assert {key: header.figures[key] for key in written} == written
    assert [(tensor.name, tensor.shape) for tensor in header.tensors] == list(model.tensors())
    sizes = {tensor.name: tensor.size for tensor in header.tensors}
    assert sizes["output_norm.weight"] == 4 * model.width


def test_a_description_is_made_once() -> None:
    header = Header(
        "llama", {"block_count": 1, "embedding_length": 8}, (Tensor("blk.0.a.weight", 0, (8, 8), 256),)
    )
    assert architectures.describe(header, 256) is architectures.describe(header, 256)


_SIZES = st.integers(0, 2**40)


@given(
    terms=st.dictionaries(st.sampled_from(["weights", "context", "buffers", "backend"]), _SIZES),
    readings=st.lists(st.tuples(_SIZES, st.booleans()), max_size=fit.MAX_READINGS),
)
def test_what_is_learned_is_the_largest_reading_that_is_near_the_estimate(
    terms: dict[str, int], readings: list[tuple[int, bool]]
) -> None:
    """Issue 23: a reading below weights and context, or far above the estimate, was disturbed or false.

    Without any other the estimate stays. Without an estimate every reading counts.
    """
    estimated = tuple(terms.items())
    floor = terms.get("weights", 0) + terms.get("context", 0)
    given_readings = [fit.EngineReading(size, "2026-01-01", own) for size, own in readings]
    learned, counted = fit.apply_readings(estimated, given_readings)
    most = {True: 2 * sum(terms.values()), False: 1.5 * sum(terms.values())}
    assert list(counted) == [
        each for each in given_readings if not terms or floor <= each.size <= most[each.own]
    ]
    expected = max([floor, *(each.size for each in counted)]) if counted else sum(terms.values())
    assert fit.total_bytes(learned) == expected
    if not counted:
        assert learned == estimated


@pytest.mark.parametrize(
    ("size", "own", "counts"),
    [
        (15, False, True),
        (16, False, False),
        (20, True, True),
        (21, True, False),
        (8, True, True),
        (7, True, False),
        (7, False, False),
    ],
)
def test_one_disturbed_or_false_reading_does_not_make_a_model_unplaceable(
    size: int, own: bool, counts: bool
) -> None:
    """Something else took memory meanwhile, or a worker reports a wrong process."""
    terms = (("weights", 6), ("context", 2), ("buffers", 2))
    reading = fit.EngineReading(size, "2026-01-01", own)
    learned, counted = fit.apply_readings(terms, [reading])
    assert list(counted) == [reading] * counts
    assert fit.total_bytes(learned) == (size if counts else 10)
    assert fit.apply_readings((), [reading]) == ((("measured", size),), [reading])


@pytest.mark.rule("R2.32", "R2.41")
def test_fewer_layers_need_what_was_learned_beyond_the_estimate(folder: Path) -> None:
    """Otherwise a model that takes more than estimated is loaded in part where it does not fit."""
    (model,) = (model for model in MODELS if model.name == "Qwen3-8B")
    path = gguf_files.write(folder / "auto.gguf", model)
    files = ModelFiles(path.stat().st_size, header=read_header(path))
    definition = parse_definition({**DOCUMENT, "gpu_layers": "auto"}, "m.yaml")
    estimated = load_request.estimate_need(definition, files)
    for difference, added in ((GIB, GIB), (-GIB // 100, 0)):
        reading = fit.EngineReading(estimated.vram + difference, "2026-01-01", True)
        learned = load_request.estimate_need(definition, files, [reading])
        assert learned.source == "learned"
        assert learned.partial == tuple((layers, size + added) for layers, size in estimated.partial)


def test_backends_of_the_cpu_and_of_a_share_learn_nothing() -> None:
    """The one needs no VRAM, the other takes the same share whatever it was seen to take."""
    readings = [fit.EngineReading(9 * GIB, "2026-01-01", True)]
    for backend in ("cpu-llama-cpp", "vllm"):
        definition = parse_definition({**DOCUMENT, "backend": backend}, "m.yaml")
        need = load_request.estimate_need(definition, ModelFiles(GIB), readings)
        assert (need.vram, need.source, need.readings) == (0, "estimated", 0)
