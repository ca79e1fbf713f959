"""Estimate the memory and disk space of a model from its files and options (R2.37, R2.40, R2.41).

Pure. `nodes/definitions/sizes.py` measures the files. 0 bytes means unknown.
"""

from collections.abc import Mapping
from typing import Any

CONTEXT = 8192
"""Tokens of context if the definition does not set them (C37)."""
UNKNOWN_PAYLOAD = 2 * 2**30
LEAST_MARGIN = 2**30
LARGEST = 2**62
"""Bytes. Estimates are stored and added up: a header with nonsensical values must not cause an error."""

_BYTES_PER_TOKEN = 2048
_LAYERS, _EMBEDDING, _HEADS = 32, 4096, 8
_KV_BITS = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8, "q5_0": 5, "q5_1": 5, "q4_0": 4, "q4_1": 4}
_PLAIN_KV_BITS = 16


def vram(size: int, header: Mapping[str, int] | None, options: Mapping[str, Any]) -> int:
    """Return the bytes that the engine will allocate for weights of `size` bytes; 0 if unknown (R2.41).

    `header` holds the GGUF values of the model, by their keys without the architecture; None for other files,
    empty for a file without values.
    """
    if size <= 0:
        return 0
    context = options.get("ContextSize") or 0
    context = context if context > 0 else CONTEXT
    if not header:
        return min(size + _BYTES_PER_TOKEN * context, LARGEST)
    layers, on_gpu = header.get("block_count", _LAYERS), options.get("NGPULayers") or 0
    if 0 < on_gpu < layers:
        size = size * on_gpu // layers
    heads = header.get("attention.head_count_kv") or header.get("attention.head_count") or _HEADS
    kv = _kv_bits(options) * header.get("embedding_length", _EMBEDDING) * heads * context // 8
    overhead = 2 * size * 2 // 100 + 150_000_000
    return min(size + kv + overhead, LARGEST)


def _kv_bits(options: Mapping[str, Any]) -> int:
    """Return the bits of one number in the cache of keys and values; the larger of the two if they differ."""
    kinds = (options.get("CacheTypeKey"), options.get("CacheTypeValue"))
    return max(_KV_BITS.get(str(kind).lower(), _PLAIN_KV_BITS) for kind in kinds)


def disk(payload: int) -> int:
    """Return the free bytes that a node must have for files of `payload` bytes (R2.37)."""
    if payload <= 0:
        return UNKNOWN_PAYLOAD
    return payload + max(payload // 20, LEAST_MARGIN)
