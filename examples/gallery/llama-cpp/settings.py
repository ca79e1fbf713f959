"""What LoadModel says (`ModelOptions`), as llama.cpp's parameters; and what the model's file says of itself.

Nothing here runs a model. A field that would be ignored silently is either refused or named in the log.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import xllamacpp
from localai_backend import LoadRefused, pb, say

CONTEXT = 4096
"""Tokens of a request, prompt and answer, where the definition is silent."""
BATCH = 512
MAX_SLOTS = 64
HEADER_BYTES = 64 * 1024 * 1024
"""The facts of a GGUF stand before its tensors; vocabularies of today's models fit in a tenth of this."""
ERRORS_ONLY = 1

_SLOTS = ("parallel", "n_parallel")
_CACHE_RAM = ("cache_ram_mib", "cache_ram")
_FLASH = {
    "": "AUTO",
    "auto": "AUTO",
    "on": "ENABLED",
    "true": "ENABLED",
    "off": "DISABLED",
    "false": "DISABLED",
}


class Settings:
    """The choices of one load that the engine itself has to know later."""

    def __init__(self, options: pb.ModelOptions) -> None:
        extra = dict(_pair(line) for line in options.Options)
        self.slots = _number(extra, _SLOTS, default=1, low=1, high=MAX_SLOTS)
        self.cache_ram_mib = _number(extra, _CACHE_RAM, default=-1, low=-1, high=2**31 - 1)
        self.file = model_file(options)
        self.has_template = header_has(self.file, _key(b"tokenizer.chat_template"))
        for name in extra.keys() - {*_SLOTS, *_CACHE_RAM}:
            say(f"option {name!r} is not known to this engine and has no effect")


def model_file(options: pb.ModelOptions) -> Path:
    """The file to load; LoadRefused says what is wrong with it."""
    path = Path(options.ModelFile or os.path.join(options.ModelPath, options.Model))
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise LoadRefused(f"the model file {str(path)!r} cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise LoadRefused(f"the model file {str(path)!r} is not a GGUF file")
    return path


def header_has(path: Path, text: bytes) -> bool:
    """Whether the facts at the head of the file contain these bytes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text, 0, HEADER_BYTES) >= 0


def parameters(options: pb.ModelOptions, settings: Settings, api_key: str) -> Any:
    """llama.cpp's parameters for this load."""
    _refuse_unsupported(options)
    made = xllamacpp.CommonParams()
    made.model.path = str(settings.file)
    made.mmproj.path = options.MMProj
    _size(made, options, settings)
    _devices(made, options)
    _embeddings(made, options, settings)
    _server(made, api_key)
    return made


def _size(made: Any, options: pb.ModelOptions, settings: Settings) -> None:
    # Every slot has the whole context: what one client asks never shortens the answer of another.
    context = options.ContextSize or CONTEXT
    made.n_parallel, made.n_ctx, made.kv_unified = settings.slots, context * settings.slots, False
    # One batch is what a cancelled request may still cost, and what the others wait for.
    made.n_batch = made.n_ubatch = options.NBatch or BATCH
    if settings.cache_ram_mib >= 0:
        made.cache_ram_mib = settings.cache_ram_mib
    for field, name in (("cache_type_k", options.CacheTypeKey), ("cache_type_v", options.CacheTypeValue)):
        if name:
            setattr(made, field, _member(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}", name))


def _devices(made: Any, options: pb.ModelOptions) -> None:
    threads = options.Threads or max(1, (os.cpu_count() or 2) // 2)
    made.cpuparams.n_threads = made.cpuparams_batch.n_threads = threads
    made.n_gpu_layers = options.NGPULayers
    if options.MainGPU:
        made.main_gpu = _whole(options.MainGPU, "main_gpu")
    if options.TensorSplit:
        shares = [float(share) for share in options.TensorSplit.split(",")]
        made.tensor_split = shares + [0.0] * (len(made.tensor_split) - len(shares))
    mode = (
        ("MMAP" if options.MMap else "NONE")
        if not options.MLock
        else "MMAP_MLOCK"
        if options.MMap
        else "MLOCK"
    )
    made.load_mode = getattr(xllamacpp.llama_load_mode, f"LLAMA_LOAD_MODE_{mode}")
    flash = _FLASH.get(options.FlashAttention.lower(), options.FlashAttention)
    kinds = xllamacpp.llama_flash_attn_type
    made.flash_attn_type = _member(kinds, f"LLAMA_FLASH_ATTN_TYPE_{flash}", options.FlashAttention)
    made.no_kv_offload = options.NoKVOffload
    made.rope_freq_base, made.rope_freq_scale = options.RopeFreqBase, options.RopeFreqScale


def _embeddings(made: Any, options: pb.ModelOptions, settings: Settings) -> None:
    if not (options.Embeddings or options.Reranking):
        return
    made.embedding = True
    # A text is pooled from one batch.
    made.n_batch = made.n_ubatch = max(made.n_batch, options.ContextSize or CONTEXT)
    pooling = xllamacpp.llama_pooling_type
    if options.Reranking:
        made.pooling_type = pooling.LLAMA_POOLING_TYPE_RANK
    elif not header_has(settings.file, b".pooling_type"):
        made.pooling_type = pooling.LLAMA_POOLING_TYPE_MEAN


def _server(made: Any, api_key: str) -> None:
    """llama.cpp answers some questions by HTTP only: on this machine, at a free port, to who has the key."""
    made.hostnames, made.port, made.api_keys, made.n_threads_http = ["127.0.0.1"], 0, [api_key], 2
    made.ui = made.endpoint_slots = made.endpoint_metrics = made.endpoint_props = False
    made.verbosity = ERRORS_ONLY


def _refuse_unsupported(options: pb.ModelOptions) -> None:
    for field in ("LoraAdapter", "LoraBase", "DraftModel"):
        if getattr(options, field):
            raise LoadRefused(f"this engine does not offer {field}")


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _number(extra: dict[str, str], names: tuple[str, ...], *, default: int, low: int, high: int) -> int:
    """The option under one of its names."""
    for name in names:
        if name in extra:
            value = _whole(extra[name], name)
            if not low <= value <= high:
                raise LoadRefused(f"option {name!r} is {value}; {low} to {high} are possible")
            return value
    return default


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LoadRefused(f"option {name!r} is {text!r}, which is not a number") from None


def _member(kinds: Any, name: str, shown: str) -> Any:
    found = getattr(kinds, name, None)
    if found is None:
        raise LoadRefused(f"llama.cpp knows no {kinds.__name__} {shown!r}")
    return found


def _key(name: bytes) -> bytes:
    """A key as a GGUF writes it: its length, then its bytes."""
    return struct.pack("<Q", len(name)) + name
