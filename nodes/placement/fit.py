"""The memory that an engine allocates for a model on one kind of device, term by term. Pure.

`LoadOptions` has what a definition sets, `architectures.py` describes the model, and `estimate` returns the
terms; their sum is the need (D-FIT). Each function names its source. "llama.cpp" means the sources of build
11549 and the buffers that it reports, which `docs/fit.md` compares with the terms. Without a header the terms
are the file's size and 2 KiB for each token (R2.41).

`apply_readings` replaces an estimate by the readings of former loads.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from nodes.placement.architectures import MAX_LAYERS, Layer, Model, ModelHeader, describe

CONTEXT = 8192
"""Context in tokens if the definition does not set one (C37)."""
MIN_CONTEXT = 1024
"""Smallest context in tokens that is proposed in place of one that does not fit."""
BATCH = 512
LARGEST = 2**62
"""Upper limit of an estimate in bytes, so that sums of nonsensical figures do not overflow a column."""
_MIB = 2**20
_BYTES_PER_TOKEN = 2048
_MAX_GPUS = 128
_MAX_LAYER_COUNTS = 32
"""Maximum number of layer counts that are tried if not all layers fit."""
_CELL_MULTIPLE = 256
"""llama.cpp rounds the number of cells of a cache up to a multiple of this number."""

BACKEND_CONTEXT = {"cuda": 457 * _MIB, "rocm": 457 * _MIB, "vulkan": 250 * _MIB, "sycl": 250 * _MIB}
"""Bytes of each GPU that a process takes before any model: driver context, kernels, library workspaces.

Sources: `cudaMinimumMemory` and `rocmMinimumMemory` of Ollama (`discover/gpu.go`); the footprint that
gguf-parser-go assumes for other devices (`--non-uma-vram-footprint`). "cpu" and "metal" are not listed,
because they share the machine's memory: their value is 0.
"""
_DEVICE_KIND_BY_NAME = {
    "cuda": "cuda",
    "rocm": "rocm",
    "hip": "rocm",
    "vulkan": "vulkan",
    "sycl": "sycl",
    "intel": "sycl",
}
_DEVICE_KIND_BY_NAME |= {"metal": "metal", "darwin": "metal", "cpu": "cpu"}
SHARE_BACKENDS = {"vllm": 0.9, "sglang": 0.9}
"""Fraction of a GPU that an engine of this backend takes unless `gpu_memory_utilization` is set.

The key is a part of the backend's name. Source: `gpu_memory_utilization` of vLLM; SGLang derives a similar
value from the GPU's size.
"""
_BITS_BY_CACHE_TYPE = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_0": 5.5, "q5_1": 6.0}
_BITS_BY_CACHE_TYPE |= {"q4_0": 4.5, "q4_1": 5.0, "iq4_nl": 4.5}
"""Bits of a number in a cache, with the scale of its block (ggml's type traits)."""
Terms = tuple[tuple[str, int], ...]
"""Pairs of a term's name and its bytes, such as weights, context or buffers."""
Pairs = tuple[tuple[int, int], ...]
"""Pairs of whole numbers; the second one is bytes."""


class Files(Protocol):
    """The model's files that an engine loads: weights, their header, and further files; sizes in bytes."""

    @property
    def weights(self) -> int: ...
    @property
    def header(self) -> ModelHeader | None: ...
    @property
    def projector(self) -> int: ...
    @property
    def adapters(self) -> int: ...
    @property
    def draft(self) -> int: ...
    @property
    def draft_header(self) -> ModelHeader | None: ...


@dataclass(frozen=True)
class LoadOptions:
    """The load options that determine the memory of an engine."""

    context: int = CONTEXT
    """Tokens of all slots together, as LocalAI's engines share them."""
    slots: int = 1
    unified: bool = True
    """True if all slots share one cache; False if each slot has an equal part of it."""
    batch: int = BATCH
    gpu_layers: int = MAX_LAYERS
    gpus: int = 1
    split: tuple[float, ...] = ()
    """By GPU index: its weight, if the definition states `tensor_split`."""
    main_gpu: int = 0
    split_mode: str = "layer"
    """`none`: everything is on the main GPU. `layer` or `row`: `split` distributes layers, or rows of
    tensors.
    """
    keys: float = _BITS_BY_CACHE_TYPE["f16"]
    """Bits of one number in the cache of keys."""
    values: float = _BITS_BY_CACHE_TYPE["f16"]
    """Bits of one number in the cache of values."""
    flash_attention: bool = True
    mapped: bool = True
    cache_on_gpu: bool = True
    full_windows: bool = False
    """True if layers with an attention window also keep the whole context."""
    outputs_all: bool = False
    """True if every token of a batch has an output, as needed for embeddings."""

    @property
    def cells(self) -> int:
        """Number of cells in one stream of the cache."""
        return _pad_cells(self.context if self.unified else self.context // self.slots)

    @property
    def streams(self) -> int:
        return 1 if self.unified else self.slots

    def window_cells(self, window: int) -> int:
        """Return the cache cells of a layer with this window (`llama-kv-cache-iswa.cpp` of llama.cpp)."""
        if not window or self.full_windows:
            return self.cells
        return _pad_cells(min(self.cells, window * (self.slots if self.unified else 1) + self.batch))


def _pad_cells(cells: int) -> int:
    return max(-(-cells // _CELL_MULTIPLE), 1) * _CELL_MULTIPLE


def load_options(options: Mapping[str, Any]) -> LoadOptions:
    """Return the options that a definition sets; an unusable value is replaced by the default."""
    extra = dict(str(option).partition(":")[::2] for option in options.get("Options") or ())
    slots = _parse_positive_int(extra.get("parallel") or extra.get("n_parallel"), 1)
    context = options.get("ContextSize") or 0
    context = context if context > 0 else CONTEXT
    batch = _parse_positive_int(extra.get("n_ubatch") or extra.get("ubatch"), options.get("NBatch") or BATCH)
    layers = options.get("NGPULayers")
    split = _parse_tensor_split(str(options.get("TensorSplit") or ""))
    split_mode = str(extra.get("split_mode") or extra.get("sm") or "layer").lower()
    return LoadOptions(
        context=context,
        slots=min(slots, context),
        unified=extra.get("kv_unified", extra.get("unified_kv", ""))
        not in ("false", "0", "no", "off", "disabled"),
        batch=max(1, min(batch, context)),
        gpu_layers=MAX_LAYERS if layers is None or layers < 0 else layers,
        gpus=1 if split_mode == "none" else max(1, sum(share > 0 for share in split)),
        split=split,
        main_gpu=_parse_positive_int(options.get("MainGPU"), 0),
        split_mode=split_mode,
        keys=_BITS_BY_CACHE_TYPE.get(str(options.get("CacheTypeKey")).lower(), _BITS_BY_CACHE_TYPE["f16"]),
        values=_BITS_BY_CACHE_TYPE.get(
            str(options.get("CacheTypeValue")).lower(), _BITS_BY_CACHE_TYPE["f16"]
        ),
        flash_attention=str(options.get("FlashAttention")).lower() not in ("off", "false", "disabled", "0"),
        mapped=bool(options.get("MMap", True)),
        cache_on_gpu=not options.get("NoKVOffload"),
        full_windows=extra.get("swa_full") in ("true", "1", "yes", "on", "enabled"),
        outputs_all=bool(options.get("Embeddings") or options.get("Reranking")),
    )


def _parse_tensor_split(text: str) -> tuple[float, ...]:
    """Parse `tensor_split`; return () if the text is unusable."""
    try:
        shares = tuple(float(share) for share in text.replace("/", ",").split(",")[:_MAX_GPUS])
    except ValueError:
        return ()
    return shares if all(0 <= share < 2**31 for share in shares) and any(shares) else ()


def _parse_positive_int(text: object, default: int) -> int:
    digits = str(text)
    return (
        int(digits)
        if digits.isascii() and digits.isdigit() and 0 < len(digits) < 10 and int(digits)
        else default
    )


def device_kind(backend: str) -> str:
    """Return the kind of device that a backend is built for; `cuda` if its name does not tell."""
    return next(
        (_DEVICE_KIND_BY_NAME[part] for part in _name_parts(backend) if part in _DEVICE_KIND_BY_NAME), "cuda"
    )


def _name_parts(backend: str) -> list[str]:
    return "".join(letter if letter.isalpha() else " " for letter in backend.lower()).split()


def card_share(backend: str, options: Mapping[str, Any]) -> tuple[float, int]:
    """Return the fraction of a GPU that the backend takes, and of how many GPUs.

    (0, 0) if the backend takes only the memory that the model needs.
    """
    parts = _name_parts(backend)
    default = next((share for part, share in SHARE_BACKENDS.items() if part in parts), 0.0)
    if not default or device_kind(backend) in ("cpu", "metal"):
        return 0.0, 0
    share = float(options.get("GPUMemoryUtilization") or 0)
    return share if 0 < share <= 1 else default, max(1, options.get("TensorParallelSize") or 1)


def weight_bytes(model: Model, load: LoadOptions, kind: str) -> int:
    """Return the bytes of weights on the device (`load_tensors` of llama.cpp).

    A GPU gets the output first and then the layers, beginning with the last layer. In main memory, mapped
    pages do not count, but repacked copies do; without a memory map all weights count, in one copy.
    """
    if kind == "cpu":
        if not load.mapped:
            return model.total
        return sum(layer.repacked for layer in (*model.layers, model.output))
    if not load.gpu_layers:
        return 0
    return model.output.weights + sum(layer.weights for layer in _on_gpu(model, load))


def _on_gpu(model: Model, load: LoadOptions) -> Sequence[Layer]:
    count = max(load.gpu_layers - 1, 0)
    return model.layers[max(len(model.layers) - count, 0) :]


def context_bytes(model: Model, load: LoadOptions, kind: str) -> int:
    """Return the bytes of the caches of keys and values and of recurrent states (`llama_kv_cache`).

    Without flash attention, values are stored transposed: every layer is as wide as the widest.
    """
    on_gpu = kind != "cpu"
    if on_gpu and not load.cache_on_gpu:
        return 0
    return sum(_layer_context_bytes(model, load, _on_gpu(model, load) if on_gpu else model.layers))


def _layer_context_bytes(model: Model, load: LoadOptions, layers: Sequence[Layer]) -> Iterator[int]:
    """Yield the bytes that each layer keeps of the context."""
    widest = 0 if load.flash_attention else max((layer.values for layer in model.layers), default=0)
    for layer in layers:
        values = max(layer.values, widest) if layer.values else 0
        row = int(layer.keys * load.keys + values * load.values) // 8
        yield row * load.window_cells(layer.window) * load.streams + layer.state * load.slots


def buffer_bytes(model: Model, load: LoadOptions, kind: str) -> int:
    """Return the bytes of the compute buffer (`graph_reserve` of llama.cpp; source as of `_inner`).

    The buffer holds a batch at the widest point of a layer, or its outputs, and the attention masks; without
    flash attention also the scores of all heads, and masks of twice the width. A GPU with only some of the
    layers also copies the weights of the other layers into the buffer, one tensor at a time.
    """
    on_gpu = kind != "cpu"
    if on_gpu and not load.gpu_layers:
        return 0
    batch = min(load.batch, load.context)
    cells = {layer.window > 0: load.window_cells(layer.window) for layer in model.layers if layer.keys}
    if not _has_memory(model):
        cells = {False: batch}
    masks = sum(cells.values()) * batch * (2 if load.flash_attention else 4)
    kept = 2 * model.width + max(model.width, model.projection) if on_gpu else 5 * model.width
    outputs = batch if load.outputs_all and model.output.weights else load.slots
    scores = (
        0 if load.flash_attention else model.heads * max(cells.values(), default=0) + 3 * model.projection
    )
    peak = 4 * batch * (max(scores, model.inner) + kept)
    logits = 4 * (model.vocabulary * outputs + batch * kept) if _has_memory(model) else 0
    is_partial = on_gpu and load.gpu_layers <= len(model.layers)
    return max(peak, logits) + masks + (model.largest if is_partial else 0)


def _has_memory(model: Model) -> bool:
    return any(layer.keys or layer.state for layer in model.layers)


def output_bytes(model: Model, load: LoadOptions, kind: str) -> int:
    """Return the bytes of the outputs in main memory (`output_reserve` of llama.cpp); 0 on a GPU."""
    if kind != "cpu":
        return 0
    return 4 * load.slots * (model.vocabulary + (model.width if load.outputs_all else 0))


def estimate(files: Files, load: LoadOptions, kind: str = "cuda") -> Terms:
    """Return the terms of an engine's memory on a device of this kind; () if the weights' size is unknown."""
    if files.weights <= 0:
        return ()
    terms = _model_terms(files.header, files.weights, load, kind)
    if kind == "cpu" or load.gpu_layers:
        terms["projector"], terms["adapters"] = files.projector, files.adapters
    if files.draft > 0:
        draft_load = replace(load, gpu_layers=MAX_LAYERS if load.gpu_layers else 0)
        terms["draft"] = sum(_model_terms(files.draft_header, files.draft, draft_load, kind).values())
    if files.header is not None and load.gpu_layers:
        terms["backend"] = BACKEND_CONTEXT.get(kind, 0) * load.gpus
    return tuple((name, min(size, LARGEST)) for name, size in terms.items() if size > 0)


def _model_terms(header: ModelHeader | None, size: int, load: LoadOptions, kind: str) -> dict[str, int]:
    model = describe(header, size) if header is not None else None
    if model is None:
        return {"weights": size, "context": _BYTES_PER_TOKEN * load.context}
    return {
        "weights": weight_bytes(model, load, kind),
        "context": context_bytes(model, load, kind),
        "buffers": buffer_bytes(model, load, kind) * (1 if kind == "cpu" else load.gpus),
        "output": output_bytes(model, load, kind),
    }


def fewer_layers(files: Files, load: LoadOptions, kind: str, needed: int = 0) -> Pairs:
    """Return pairs of a number of layers on the GPU and the bytes needed, most layers first.

    () without a header. If readings show that all layers need more bytes (`needed`) than estimated, the
    difference is added to each number.
    """
    model = describe(files.header, files.weights) if files.header is not None else None
    count = len(model.layers) if model is not None else 0
    more = max(needed - total_bytes(estimate(files, load, kind)), 0)
    return tuple(
        (layers, min(total_bytes(estimate(files, replace(load, gpu_layers=layers), kind)) + more, LARGEST))
        for layers in range(count, 0, -max(count // _MAX_LAYER_COUNTS, 1))
    )


MAX_READINGS = 5
"""Maximum readings that are stored for one definition, backend build and kind of device."""
MAX_OWN, MAX_DIFFERENCE = 2.0, 1.5
"""A reading above this multiple of the estimate is ignored: `MAX_OWN` for an engine's own figure,
`MAX_DIFFERENCE` for a difference of two readings of the device."""


@dataclass(frozen=True)
class EngineReading:
    """The bytes that an engine took after one load, and the time of the reading in ISO 8601."""

    size: int
    at: str
    own: bool
    """True if the process reported the bytes; False if they are the difference of two readings of its device.
    """


def apply_readings(terms: Terms, readings: Sequence[EngineReading]) -> tuple[Terms, Sequence[EngineReading]]:
    """Return the terms corrected by the largest accepted reading, and the accepted readings.

    A reading below weights and context, or far above the estimate, is ignored: the reading is wrong, or
    another process has freed or taken memory. Without an estimate all readings are accepted; without an
    accepted reading the estimate is returned.
    """
    floor = tuple((name, size) for name, size in terms if name in ("weights", "context"))
    least = total_bytes(floor)
    limits = {True: MAX_OWN * total_bytes(terms), False: MAX_DIFFERENCE * total_bytes(terms)}
    counted = [reading for reading in readings if not terms or least <= reading.size <= limits[reading.own]]
    rest = max((reading.size for reading in counted), default=0) - least
    if not counted:
        return terms, ()
    return (*floor, ("measured", rest)) if rest > 0 else floor, counted


def total_bytes(terms: Terms) -> int:
    """Return the sum of the terms."""
    return min(sum(size for _, size in terms), LARGEST)


def smaller_contexts(files: Files, load: LoadOptions, kind: str = "cuda") -> Pairs:
    """Return the context in tokens and the smaller powers of two, each with the bytes that it saves."""
    needed = total_bytes(estimate(files, load, kind))
    contexts = [load.context]
    while contexts[-1] > MIN_CONTEXT:
        contexts.append(1 << (contexts[-1] - 1).bit_length() - 1)
    loads = (replace(load, context=context, slots=min(load.slots, context)) for context in contexts)
    return tuple((less.context, needed - total_bytes(estimate(files, less, kind))) for less in loads)


def by_gpu(files: Files, load: LoadOptions, kind: str = "cuda") -> Pairs:
    """Return the bytes on each GPU that the definition names, by index; () if the node chooses the GPUs.

    Layers go to the GPUs in their order, and the output to the last GPU (`get_layer_buft_list` of llama.cpp).
    Each GPU has a compute buffer and the backend's context; all other memory is on the main GPU.
    """
    terms = dict(estimate(files, load, kind))
    if load.split_mode == "none":
        return ((load.main_gpu, total_bytes(tuple(terms.items()))),)
    if not load.split or load.split_mode != "layer":
        return ()
    limits, sizes = list(accumulate(load.split)), [0.0] * len(load.split)
    model = describe(files.header, files.weights) if files.header is not None else None
    layers: list[int] = []
    if model is not None and load.gpu_layers:
        on_gpu = _on_gpu(model, load)
        kept = _layer_context_bytes(model, load, on_gpu) if load.cache_on_gpu else iter([0] * len(on_gpu))
        layers = [layer.weights + size for layer, size in zip(on_gpu, kept, strict=True)]
        layers.append(model.output.weights)
    used = [index for index, share in enumerate(load.split) if share > 0]
    for place, size in enumerate(layers):
        sizes[min(bisect_right(limits, place / len(layers) * limits[-1]), used[-1])] += size
    each = terms.pop("buffers", 0) + terms.pop("backend", 0)
    if layers:
        main = load.main_gpu if load.main_gpu in used else used[0]
        sizes[main] += sum(size for name, size in terms.items() if name not in ("weights", "context"))
    else:
        sizes = [sum(terms.values()) * share / limits[-1] for share in load.split]
    return tuple((index, min(int(sizes[index]) + each // len(used), LARGEST)) for index in used)
