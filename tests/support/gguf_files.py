"""GGUF files with the true dimensions of published models and a hole in place of their tensors' data.

`gguf` writes the header, so the product's reader is held to another writer. A 70B model takes a few kilobytes
of the disk, and llama.cpp loads it with mapped weights. Dimensions are those of the models' `config.json`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a model, under shortened names of its `config.json`."""

    name: str
    architecture: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int | tuple[int, ...]
    vocabulary: int
    head: int = 0
    """Width of a head; 0 = the width divided by the number of heads."""
    experts: int = 0
    used: int = 0
    expert_inner: int = 0
    dense_layers: int = 0
    """Layers before the first with experts."""
    shared_inner: int = 0
    tied: bool = False
    gated: bool = True
    fused: bool = False
    """True if gate and product, and queries, keys and values, are each one tensor."""
    bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    window: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Additional figures of the header."""
    kind: Type = Type.Q4_K

    @property
    def head_size(self) -> int:
        return self.head or self.width // self.heads

    def kv_heads_of(self, layer: int) -> int:
        return self.kv_heads if isinstance(self.kv_heads, int) else self.kv_heads[layer]

    def tensors(self) -> Tensors:
        """Yield the name and shape of each tensor."""
        yield "token_embd.weight", (self.width, self.vocabulary)
        if self.architecture == "bert":
            yield from _bert(self)
            return
        yield from _norm("token_embd_norm" if self.architecture == "lfm2" else "output_norm", self)
        if not self.tied:
            yield "output.weight", (self.width, self.vocabulary)
        for index in range(self.layers):
            for name, shape in self._layer(index):
                yield f"blk.{index}.{name}", shape

    def _layer(self, index: int) -> Tensors:
        yield from _norm("attn_norm", self)
        if "ssm.inner_size" in self.figures and self.kv_heads_of(index) == 0:
            yield from _recurrent(self)
        elif "shortconv.l_cache" in self.figures and self.kv_heads_of(index) == 0:
            yield "shortconv.conv.weight", (self.figures["shortconv.l_cache"], self.width)
            yield "shortconv.in_proj.weight", (self.width, 3 * self.width)
            yield "shortconv.out_proj.weight", (self.width, self.width)
        elif "attention.kv_lora_rank" in self.figures:
            yield from _latent(self)
        else:
            yield from _attention(self, index)
        if self.post_norms:
            yield "post_attention_norm.weight", (self.width,)
            if self.architecture != "gpt-oss":
                yield "post_ffw_norm.weight", (self.width,)
        if self.inner or self.experts:
            yield from _network(self, index)


def _norm(name: str, dimensions: Dimensions) -> Tensors:
    yield f"{name}.weight", (dimensions.width,)
    if dimensions.architecture in ("starcoder2", "falcon", "gptneox", "bloom"):
        yield f"{name}.bias", (dimensions.width,)


def _attention(model: Dimensions, index: int) -> Tensors:
    queries = model.heads * model.head_size
    keys = model.kv_heads_of(index) * model.head_size
    if model.fused:
        yield "attn_qkv.weight", (model.width, queries + 2 * keys)
    else:
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"attn_{name}.weight", (model.width, rows)
            if model.bias:
                yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (queries, model.width)
    if model.bias and model.architecture in ("gpt-oss", "starcoder2"):
        yield "attn_output.bias", (model.width,)
    if model.architecture == "gpt-oss":
        yield "attn_sinks.weight", (model.heads,)
    if model.qk_norm:
        whole = model.architecture in ("olmoe", "olmo2")
        yield "attn_q_norm.weight", (queries if whole else model.head_size,)
        yield "attn_k_norm.weight", (keys if whole else model.head_size,)


def _latent(model: Dimensions) -> Tensors:
    """Multi-head latent attention of DeepSeek."""
    rank, rope = model.figures["attention.kv_lora_rank"], model.figures["rope.dimension_count"]
    head, value = model.figures["attention.key_length_mla"], model.figures["attention.value_length_mla"]
    if query_rank := model.figures.get("attention.q_lora_rank", 0):
        yield "attn_q_a.weight", (model.width, query_rank)
        yield "attn_q_a_norm.weight", (query_rank,)
        yield "attn_q_b.weight", (query_rank, model.heads * head)
    else:
        yield "attn_q.weight", (model.width, model.heads * head)
    yield "attn_kv_a_mqa.weight", (model.width, rank + rope)
    yield "attn_kv_a_norm.weight", (rank,)
    yield "attn_k_b.weight", (head - rope, rank, model.heads)
    yield "attn_v_b.weight", (rank, value, model.heads)
    yield "attn_output.weight", (model.heads * value, model.width)


def _recurrent(model: Dimensions) -> Tensors:
    """Mamba, or Mamba 2 if it has groups."""
    inner, state = model.figures["ssm.inner_size"], model.figures["ssm.state_size"]
    kernel, rank = model.figures["ssm.conv_kernel"], model.figures["ssm.time_step_rank"]
    groups = model.figures.get("ssm.group_count", 0)
    convolved = inner + 2 * groups * state
    yield "ssm_in.weight", (model.width, inner + convolved + (rank if groups else 0))
    yield "ssm_conv1d.weight", (kernel, convolved)
    yield "ssm_conv1d.bias", (convolved,)
    if groups:
        yield "ssm_dt.bias", (rank,)
        yield "ssm_a", (1, rank)
        yield "ssm_d", (1, rank)
        yield "ssm_norm.weight", (inner // groups, groups)
    else:
        yield "ssm_x.weight", (inner, rank + 2 * state)
        yield "ssm_dt.weight", (rank, inner)
        yield "ssm_dt.bias", (inner,)
        yield "ssm_a", (state, inner)
        yield "ssm_d", (inner,)
    yield "ssm_out.weight", (inner, model.width)


def _network(model: Dimensions, index: int) -> Tensors:
    if model.architecture not in ("gpt-oss", "falcon", "cohere2"):
        yield from _norm("ffn_norm", model)
    if model.experts and index >= model.dense_layers:
        yield from _experts(model)
        return
    yield "ffn_up.weight", (model.width, model.inner * (2 if model.fused and model.gated else 1))
    yield "ffn_down.weight", (model.inner, model.width)
    if model.gated and not model.fused:
        yield "ffn_gate.weight", (model.width, model.inner)
    if model.bias and model.architecture == "starcoder2":
        yield "ffn_up.bias", (model.inner,)
        yield "ffn_down.bias", (model.width,)


def _experts(model: Dimensions) -> Tensors:
    inner, count = model.expert_inner or model.inner, model.experts
    has_bias = model.architecture == "gpt-oss"
    yield "ffn_gate_inp.weight", (model.width, count)
    if has_bias:
        yield "ffn_gate_inp.bias", (count,)
    for name, shape in (
        ("gate", (model.width, inner)),
        ("up", (model.width, inner)),
        ("down", (inner, model.width)),
    ):
        yield f"ffn_{name}_exps.weight", (*shape, count)
        if has_bias:
            yield f"ffn_{name}_exps.bias", (shape[1], count)
    if shared := model.shared_inner:
        yield "ffn_gate_shexp.weight", (model.width, shared)
        yield "ffn_up_shexp.weight", (model.width, shared)
        yield "ffn_down_shexp.weight", (shared, model.width)


def _bert(model: Dimensions) -> Tensors:
    def both(name: str, *shape: int) -> Tensors:
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[-1:]

    width, inner = model.width, model.inner
    yield "token_types.weight", (width, 2)
    yield "position_embd.weight", (width, model.figures["context_length"])
    yield from both("token_embd_norm", width)
    for index in range(model.layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield from both(f"blk.{index}.{name}", width, width)
        yield from both(f"blk.{index}.attn_output_norm", width)
        yield from both(f"blk.{index}.ffn_up", width, inner)
        yield from both(f"blk.{index}.ffn_down", inner, width)
        yield from both(f"blk.{index}.layer_output_norm", width)


def header_figures(model: Dimensions) -> dict[str, Any]:
    """Return the figures of a model's header, by their keys without the architecture."""
    heads = model.kv_heads if isinstance(model.kv_heads, int) else list(model.kv_heads)
    figures: dict[str, Any] = {
        "context_length": 131072,
        "block_count": model.layers,
        "embedding_length": model.width,
        "feed_forward_length": model.inner,
        "attention.head_count": model.heads,
        "attention.head_count_kv": heads,
        "vocab_size": model.vocabulary,
    }
    if model.head:
        figures |= {"attention.key_length": model.head, "attention.value_length": model.head}
    if model.experts:
        figures |= {"expert_count": model.experts, "expert_used_count": model.used}
    if model.expert_inner:
        figures["expert_feed_forward_length"] = model.expert_inner
    if model.dense_layers:
        figures["leading_dense_block_count"] = model.dense_layers
    if model.window:
        figures["attention.sliding_window"] = model.window
    return figures | dict(model.figures)


def write(path: Path, model: Dimensions) -> Path:
    """Write the model's header and a hole for its tensors; return the path."""
    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value in header_figures(model).items():
        full = f"{model.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, bool):
            writer.add_bool(full, value)
        else:
            writer.add_uint32(full, value)
    for epsilon in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        writer.add_float32(f"{model.architecture}.attention.{epsilon}", 1e-5)
    writer.add_tokenizer_model("no_vocab")
    writer.add_token_type_count(2)
    for name, shape in model.tensors():
        kind = _kind(name, shape, model)
        size = int(np.prod(shape)) // gguf.GGML_QUANT_SIZES[kind][0] * gguf.GGML_QUANT_SIZES[kind][1]
        # Shapes are ggml's, whose first dimension is the row; the writer has numpy's order.
        bytes_shape = gguf.quant_shape_to_byte_shape(shape[::-1], kind)
        writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    end = path.stat().st_size
    total = sum(-(-info.nbytes // 32) * 32 for tensors in writer.tensors for info in tensors.values())
    with path.open("r+b") as file:
        file.truncate(-(-end // 32) * 32 + total)
    return path


def _kind(name: str, shape: Shape, model: Dimensions) -> Type:
    if len(shape) == 1 or "norm" in name or name.endswith(".bias") or "gate_inp" in name or "_types" in name:
        return Type.F32
    if ("ssm_" in name and not name.endswith(("_in.weight", "_out.weight", "_x.weight"))) or "conv" in name:
        return Type.F32
    kind = Type.Q6_K if name.startswith(("token_embd", "output.")) else model.kind
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return kind if shape[0] % block == 0 else Type.Q8_0 if shape[0] % 32 == 0 else Type.F16
