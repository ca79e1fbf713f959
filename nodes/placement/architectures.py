"""Describe a model's architecture, as far as its memory depends on it, from the header of its file. Pure.

`describe` builds a `Model` from the figures and tensors of a header (`nodes/definitions/headers.py`);
`fit.py` estimates the memory from the `Model`. Each function names its source; "llama.cpp" means the sources
of build 11549.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

MAX_LAYERS = 1024
_REPACKED_TYPES = frozenset((2, 10, 12, 20, 39))
"""Numbers of the tensor types that ggml repacks on x86: Q4_0, Q2_K, Q4_K, IQ4_NL and MXFP4
(`ggml_repack_get_optimal_repack_type`)."""
_WINDOW_PERIOD_BY_ARCHITECTURE = {
    **{"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "llama4": 4, "gpt-oss": 2, "exaone4": 4},
    **{"olmo2": 4, "afmoe": 4, "smallthinker": -4, "plamo3": 8, "exaone-moe": 4, "gemma4": 6},
}
"""Every how many layers one layer has full attention: the last of each group, or the first if negative.

Source: `set_swa_pattern` in llama.cpp. Other architectures ignore a window, unless the header has a pattern.
"""
_ENCODER_ARCHITECTURES = {
    *("bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert"),
    *("modern-bert", "gemma-embedding", "dream", "llada", "llada-moe", "rnd1", "llama-embed", "t5encoder"),
}
"""Architectures without a cache of keys and values (`create_memory` in llama.cpp)."""
_RECURRENT_ARCHITECTURES = frozenset(("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"))
_ATTENTION_PERIOD_BY_ARCHITECTURE = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""Every how many layers one has attention, if the header states no number; the other layers are recurrent."""

_PARALLEL_ARCHITECTURES = {"falcon", "cohere2", "cohere2moe", "command-r", "gptneox", "phi2", "stablelm"}
"""Architectures that compute network and attention in parallel, so that each token needs its width twice."""

Figures = Mapping[str, int | tuple[int, ...]]


class WeightTensor(Protocol):
    """A tensor of a model's file: its name, ggml's type number, dimensions and bytes."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...


class ModelHeader(Protocol):
    """The header of a model's file: its tensors, and its figures by their keys without the architecture."""

    @property
    def architecture(self) -> str: ...
    @property
    def figures(self) -> Figures: ...
    @property
    def tensors(self) -> Sequence[WeightTensor]: ...
    def __hash__(self) -> int: ...


@dataclass
class Layer:
    """One layer of a model: the bytes of its weights, and what it keeps of a context."""

    weights: int = 0
    repacked: int = 0
    """The part of `weights` that the CPU backend copies into another layout."""
    keys: int = 0
    """Numbers that the layer keeps in the cache of keys for each token."""
    values: int = 0
    """Numbers that the layer keeps in the cache of values for each token."""
    window: int = 0
    """Attention window in tokens; 0 = all tokens."""
    state: int = 0
    """Bytes of recurrent state that the layer keeps for each slot."""


@dataclass(frozen=True)
class Model:
    """The sizes of a model that determine its memory."""

    layers: Sequence[Layer]
    output: Layer
    """The weights of the output and of all tensors outside of layers. The embedding is counted here too if it
    is also used as the output."""
    embedding: int
    """Bytes of the token embedding, which stays in main memory."""
    total: int
    """Bytes of all weights."""
    largest: int
    """Bytes of the largest tensor of a layer."""
    width: int
    heads: int
    projection: int
    """Numbers in the queries of one token."""
    inner: int
    """Numbers that the network or recurrence of a layer holds for one token, in all its buffers."""
    vocabulary: int


class _Figures:
    """The figures of a header; a figure may have one value per layer."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def has(self, key: str) -> bool:
        return key in self._figures

    def of(self, key: str, layer: int = 0, default: int = 0) -> int:
        """Return the figure for a layer; if the list is too short, its last value."""
        figure = self._figures.get(key, default)
        if isinstance(figure, int):
            return figure
        return figure[min(layer, len(figure) - 1)] if figure else default

    def most(self, key: str) -> int:
        figure = self._figures.get(key, 0)
        return figure if isinstance(figure, int) else max(figure, default=0)

    def pattern(self) -> int | tuple[int, ...] | None:
        return self._figures.get("attention.sliding_window_pattern")


_model_by_header: WeakKeyDictionary[ModelHeader, dict[int, Model | None]] = WeakKeyDictionary()


def describe(header: ModelHeader, size: int) -> Model | None:
    """Describe a model whose weights have `size` bytes; None if the header has too few figures.

    The description is cached as long as its header exists. A header is read once for each state of its file.
    """
    known = _model_by_header.setdefault(header, {})
    if size not in known:
        known[size] = _describe(header, size)
    return known[size]


def _describe(header: ModelHeader, size: int) -> Model | None:
    figures, architecture = _Figures(header.figures), header.architecture
    count, width = figures.of("block_count"), figures.of("embedding_length")
    if not 0 < count <= MAX_LAYERS or width <= 0:
        return None
    layers = [Layer() for _ in range(count)]
    output = Layer()
    embedding = _add_weights(header.tensors, layers, output)
    if not header.tensors:
        for layer in layers:
            layer.weights = size // count
    _add_caches(architecture, figures, layers)
    heads = figures.most("attention.head_count")
    head = figures.of("attention.key_length", default=width // heads if heads else 0)
    is_hybrid = figures.has("ssm.inner_size") and figures.most("feed_forward_length") > 0
    is_parallel = architecture in _PARALLEL_ARCHITECTURES or is_hybrid
    vocabulary = figures.of("vocab_size") or figures.of("tokenizer.ggml.tokens")
    return Model(
        layers,
        output,
        embedding,
        sum(tensor.size for tensor in header.tensors) or size,
        max((tensor.size for tensor in header.tensors if tensor.name.startswith("blk.")), default=0),
        width,
        heads,
        heads * head,
        _inner(figures, header.tensors, width) + (width if is_parallel else 0),
        vocabulary,
    )


def _add_weights(tensors: Iterable[WeightTensor], layers: Sequence[Layer], output: Layer) -> int:
    """Add each tensor to its layer or to the output; return the bytes of the token embedding.

    The embedding stays in main memory. A model without an output tensor also uses the embedding as output, so
    the device gets a second copy of it (`load_tensors` in llama.cpp).
    """
    tied: WeightTensor | None = None
    embedding, has_output = 0, False
    for tensor in tensors:
        block, _, _ = tensor.name.removeprefix("blk.").partition(".")
        is_block = tensor.name.startswith("blk.") and block.isascii() and block.isdigit() and len(block) < 5
        if is_block and int(block) < len(layers):
            _add(layers[int(block)], tensor)
        elif tensor.name == "token_embd.weight":
            tied, embedding = tensor, embedding + tensor.size
        elif tensor.name.startswith(("per_layer_token_embd", "position_embd", "token_types", "token_embd")):
            embedding += tensor.size
        else:
            has_output |= tensor.name == "output.weight"
            _add(output, tensor)
    if tied is not None and not has_output:
        _add(output, tied)
    return embedding


def _add(layer: Layer, tensor: WeightTensor) -> None:
    layer.weights += tensor.size
    rows = tensor.shape[1] if len(tensor.shape) > 1 else 0
    if tensor.type in _REPACKED_TYPES and rows and rows % 8 == 0 and "norm" not in tensor.name:
        layer.repacked += tensor.size


def _add_caches(architecture: str, figures: _Figures, layers: Sequence[Layer]) -> None:
    """Set how much each layer keeps of a context (`llama_hparams`, `llama_kv_cache` and `llama_memory_*`).

    MLA keeps one compressed row for keys and values. Layers for multi-token prediction, and layers that reuse
    the cache of earlier layers, keep nothing.
    """
    if architecture in _ENCODER_ARCHITECTURES:
        return
    count = len(layers) - figures.of("nextn_predict_layers")
    own = 20 if architecture == "gemma3n" else count - figures.of("attention.shared_kv_layers")
    for index, layer in enumerate(layers[: max(count, 0)]):
        is_recurrent = _is_recurrent(architecture, figures, index)
        layer.state = _state_bytes(figures) if is_recurrent else 0
        if (is_recurrent and architecture != "falcon-h1") or index >= own:
            continue
        layer.window = _window(architecture, figures, index)
        layer.keys, layer.values = _cache_widths(architecture, figures, index, layer.window)


def _cache_widths(architecture: str, figures: _Figures, index: int, window: int) -> tuple[int, int]:
    """Return the numbers of keys and of values that a layer keeps for each token."""
    if rank := figures.of("attention.kv_lora_rank"):
        if figures.has("attention.key_length_mla"):
            # one head, with the rotated part behind the compressed one
            indexer = figures.of("attention.indexer.key_length")
            return figures.of("attention.key_length") + indexer, 0
        if not figures.has("attention.key_length"):
            return rank + figures.of("rope.dimension_count"), 0
    heads = figures.of("attention.head_count", index)
    default = figures.of("embedding_length") // heads if heads else 128
    suffix = "_swa" if window and figures.has("attention.key_length_swa") else ""
    keys = figures.of(f"attention.key_length{suffix}", default=default)
    values = figures.of(f"attention.value_length{suffix}", default=keys)
    if not figures.has("attention.value_length"):
        values = keys if architecture not in ("minicpm3", "plm") else default
    kv_heads = figures.of("attention.head_count_kv", index, heads)
    return keys * kv_heads, values * kv_heads


def _window(architecture: str, figures: _Figures, index: int) -> int:
    """Return the attention window of a layer in tokens; 0 = the whole context."""
    window = figures.of("attention.sliding_window", index)
    if architecture == "llama4":
        window = figures.of("attention.chunk_size", default=8192)
    pattern = figures.pattern()
    if isinstance(pattern, tuple):
        return window if pattern and pattern[index % len(pattern)] else 0
    period = pattern if pattern is not None else _WINDOW_PERIOD_BY_ARCHITECTURE.get(architecture, 1)
    if period < 0:
        return window if index % -period else 0
    return window if period == 0 or index % period < period - 1 else 0


def _is_recurrent(architecture: str, figures: _Figures, index: int) -> bool:
    """Return True for a layer with a recurrent state (`llama_hparams`); falcon-h1 has it beside a cache."""
    if architecture in _RECURRENT_ARCHITECTURES or architecture == "falcon-h1":
        return True
    interval = figures.of(
        "full_attention_interval", default=_ATTENTION_PERIOD_BY_ARCHITECTURE.get(architecture, 0)
    )
    if interval:
        return (index + 1) % interval != 0
    if not any(map(figures.has, ("ssm.conv_kernel", "shortconv.l_cache", "kda.head_dim"))):
        return False
    has_network = architecture.startswith("nemotron_h") and figures.of("feed_forward_length", index) > 0
    return figures.of("attention.head_count_kv", index) == 0 and not has_network


def _state_bytes(figures: _Figures) -> int:
    """Return the bytes of one layer's state for one slot (`n_embd_r` and `n_embd_s` of llama.cpp)."""
    width, kernel = figures.of("embedding_length"), figures.of("ssm.conv_kernel")
    if head := figures.of("wkv.head_size"):
        return 4 * width * (figures.of("token_shift_count", default=2) + head)
    if cache := figures.of("shortconv.l_cache"):
        return 4 * width * (cache - 1)
    if head := figures.of("kda.head_dim"):
        heads = figures.most("attention.head_count")
        return 4 * heads * head * (3 * max(kernel - 1, 0) + head)
    inner, state = figures.of("ssm.inner_size"), figures.of("ssm.state_size")
    return 4 * (max(kernel - 1, 0) * (inner + 2 * figures.of("ssm.group_count") * state) + inner * state)


def _inner(figures: _Figures, tensors: Iterable[WeightTensor], width: int) -> int:
    """Return the numbers that the network or recurrence of a layer holds for one token.

    A gated network holds gate, product and sum; a network without a gate only the product. The outputs of
    experts count in addition if they are wider than the inputs that they replace. A recurrence holds its
    projections, their convolution and its input and output. Source: buffers that llama.cpp reports for 90
    architectures (`testdata/llamacpp_compute_buffer_sweep.json` of gguf-parser-go, and `docs/fit.md`).
    """
    names = {tensor.name.partition(".")[2].partition(".")[2]: tensor.shape for tensor in tensors}
    dense = figures.most("feed_forward_length")
    fused = names.get("ffn_up.weight", (0, 0))[1:2] == (2 * dense,)
    is_gated = not names or "ffn_gate.weight" in names or fused
    used = figures.of("expert_used_count")
    experts = (figures.of("expert_feed_forward_length") or dense) * used
    has_dense = "ffn_up.weight" in names or not used
    outputs = width * used if 2 * experts < width * used else 0
    groups = figures.of("ssm.group_count") * figures.of("ssm.state_size")
    return max(
        (3 if is_gated else 1) * dense if has_dense else 0,
        3 * experts + outputs if used else 0,
        5 * figures.of("ssm.inner_size") + 6 * groups,
    )
