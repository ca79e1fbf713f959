"""Model definitions: YAML files in LocalAI's form, one model a file, in the models folder.

A definition moves like this: file -> parsed and checked -> `Definition` with its load options and revision.
The options are computed once, here, from the file alone; no function of this module takes a request, so a
request cannot change what is loaded. The folder is looked at no more than once a second and only files whose
size or time changed are read again. A file that cannot be used is logged once with its reason and does not
take the others down.
"""

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from localai_cluster import clock, conf

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks at the folder."""
LOOK_AFTER_MISS = 0.05
"""The same when a name is not found: a definition that was added a moment ago should serve at once."""
MAX_FILE_BYTES = 256 * 1024
MAX_FILES = 4096
MAX_NAME = 255
_SUFFIXES = (".yaml", ".yml")

# What the reference sends when the file is silent (`contract/grpc.md`), without its random seed.
_DEFAULTS: dict[str, Any] = {"NBatch": 512, "MMap": True, "NGPULayers": 99999999, "FlashAttention": "auto"}

# Where the file says it -> the field of ModelOptions and its type.
_FIELDS: dict[str, tuple[str, type]] = {
    "context_size": ("ContextSize", int),
    "seed": ("Seed", int),
    "batch": ("NBatch", int),
    "f16": ("F16Memory", bool),
    "mmlock": ("MLock", bool),
    "mmap": ("MMap", bool),
    "low_vram": ("LowVRAM", bool),
    "embeddings": ("Embeddings", bool),
    "reranking": ("Reranking", bool),
    "numa": ("NUMA", bool),
    "gpu_layers": ("NGPULayers", int),
    "main_gpu": ("MainGPU", str),
    "tensor_split": ("TensorSplit", str),
    "threads": ("Threads", int),
    "rope_freq_base": ("RopeFreqBase", float),
    "rope_freq_scale": ("RopeFreqScale", float),
    "rope_scaling": ("RopeScaling", str),
    "rms_norm_eps": ("RMSNormEps", float),
    "ngqa": ("NGQA", int),
    "no_mulmatq": ("NoMulMatQ", bool),
    "no_kv_offloading": ("NoKVOffload", bool),
    "flash_attention": ("FlashAttention", str),
    "cache_type_k": ("CacheTypeKey", str),
    "cache_type_v": ("CacheTypeValue", str),
    "type": ("Type", str),
    "quantization": ("Quantization", str),
    "load_format": ("LoadFormat", str),
    "dtype": ("DType", str),
    "gpu_memory_utilization": ("GPUMemoryUtilization", float),
    "trust_remote_code": ("TrustRemoteCode", bool),
    "enforce_eager": ("EnforceEager", bool),
    "swap_space": ("SwapSpace", int),
    "max_model_len": ("MaxModelLen", int),
    "tensor_parallel_size": ("TensorParallelSize", int),
    "draft_model": ("DraftModel", str),
    "mmproj": ("MMProj", str),
    "lora_base": ("LoraBase", str),
    "lora_adapter": ("LoraAdapter", str),
    "lora_scale": ("LoraScale", float),
}


class Unusable(ValueError):
    """The file is not a model definition; the text says why."""


@dataclass(frozen=True)
class Definition:
    """One model as its file describes it."""

    name: str
    backend: str
    model: str
    """`parameters.model`: the file or repository that the engine loads."""
    source: str
    """Name of the file it comes from."""
    options: Mapping[str, Any]
    """Load options under the names of `ModelOptions`."""
    revision: str
    """SHA-256 (hex) of the engine's name and the options; equal files give equal ones on every machine."""


def load_options(definition: Definition) -> dict[str, Any]:
    """What `LoadModel` is told, by the names of `ModelOptions`; a fresh copy, from the stored file only."""
    return dict(definition.options)


def revision(definition: Definition) -> str:
    """The fingerprint of what is loaded; changes exactly when the engine or an option does."""
    return definition.revision


def parse(document: object, source: str) -> Definition:
    """Checks one parsed file; raises Unusable."""
    if not isinstance(document, Mapping):
        raise Unusable("is not a mapping of settings")
    parameters = document.get("parameters")
    if not isinstance(parameters, Mapping):
        raise Unusable("has no `parameters` section")
    name = _text(document, "name")
    backend = _text(document, "backend")
    model = _text(parameters, "model", "parameters.model")
    options = {**_DEFAULTS, "Model": model, **_options_of({**parameters, **document})}
    return Definition(name, backend, model, source, options, _fingerprint(backend, options))


def _text(section: Mapping[Any, Any], key: str, shown: str = "") -> str:
    value = section.get(key)
    if not isinstance(value, str) or not value.strip():
        raise Unusable(f"does not say `{shown or key}`")
    if len(value) > MAX_NAME or any(ord(sign) < 32 for sign in value):
        raise Unusable(f"has a `{shown or key}` that is too long or holds control characters")
    return value.strip()


def _options_of(settings: Mapping[Any, Any]) -> dict[str, Any]:
    options = {
        field: _typed(key, settings[key], kind)
        for key, (field, kind) in _FIELDS.items()
        if settings.get(key) is not None
    }
    extra = settings.get("options")
    if extra is not None:
        if not isinstance(extra, list) or not all(isinstance(item, str) for item in extra):
            raise Unusable("`options` is not a list of texts")
        options["Options"] = list(extra)
    return options


def _typed(key: str, value: object, kind: type) -> Any:
    # YAML reads `main_gpu: 0` and `flash_attention: on` as a number and a switch; both mean their text.
    if kind is str and isinstance(value, bool):
        return "on" if value else "off"
    if kind is str and isinstance(value, int | float | str):
        return str(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Unusable(
            f"`{key}` is not {'a switch' if kind is bool else 'a number' if kind is not str else 'a text'}"
        )
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise Unusable(f"`{key}` is out of range")
    return value


def _fingerprint(backend: str, options: Mapping[str, Any]) -> str:
    content = json.dumps([backend, options], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()


def read(path: Path) -> Definition:
    """Reads and checks one file; raises Unusable."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise Unusable(f"is larger than {MAX_FILE_BYTES} bytes")
        return parse(yaml.load(content.decode("utf-8"), Loader=_PlainLoader), path.name)
    except OSError as error:
        raise Unusable(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Unusable("is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise Unusable(f"is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise Unusable("is nested too deeply") from error


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases: a few hundred bytes of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuses an alias, composes everything else."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not accepted")
        return super().compose_node(parent, index)


_Stamp = tuple[int, int, int]


class Folder:
    """The definitions of one folder, re-read when a file changed. Safe to use from several threads."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = clock.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._files: dict[str, tuple[_Stamp, Definition | Unusable]] = {}
        self._by_name: dict[str, Definition] = {}
        self._reported: set[tuple[str, str]] = set()

    def find(self, name: str) -> Definition | None:
        """The definition that clients know as `name`."""
        return self._current().get(name) or self._current(LOOK_AFTER_MISS).get(name)

    def all(self) -> list[Definition]:
        """Every usable definition, by name."""
        return sorted(self._current().values(), key=lambda definition: definition.name)

    def _current(self, every: float = LOOK_EVERY) -> dict[str, Definition]:
        if self._monotonic() - self._looked_at < every:
            return self._by_name
        with self._lock:
            now = self._monotonic()
            if now - self._looked_at >= every:
                if self._refresh():
                    self._by_name = self._index()
                self._looked_at = now
            return self._by_name

    def _refresh(self) -> bool:
        stamps = self._stamps()
        if {name: stamp for name, (stamp, _) in self._files.items()} == stamps:
            return False
        known = self._files
        self._files = {
            name: known[name] if name in known and known[name][0] == stamp else (stamp, self._try(name))
            for name, stamp in sorted(stamps.items())
        }
        return True

    def _stamps(self) -> dict[str, _Stamp]:
        try:
            with os.scandir(self._path) as entries:
                names = sorted(entry.name for entry in entries if entry.name.endswith(_SUFFIXES))
        except OSError as error:
            self._report(self._path.name, f"cannot be listed: {error.strerror}")
            return {}
        if len(names) > MAX_FILES:
            self._report(self._path.name, f"holds more than {MAX_FILES} definitions; the rest is ignored")
        return {name: stamp for name in names[:MAX_FILES] if (stamp := self._stamp(name)) is not None}

    def _stamp(self, name: str) -> _Stamp | None:
        try:
            status = (self._path / name).stat()
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _try(self, name: str) -> Definition | Unusable:
        try:
            return read(self._path / name)
        except Unusable as error:
            return error

    def _index(self) -> dict[str, Definition]:
        by_name: dict[str, Definition] = {}
        for name, (_, found) in self._files.items():
            if isinstance(found, Unusable):
                self._report(name, str(found))
            elif found.name in by_name:
                self._report(
                    name, f"defines {found.name!r} again; {by_name[found.name].source} stays in force"
                )
            else:
                by_name[found.name] = found
        return by_name

    def _report(self, name: str, reason: str) -> None:
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            logger.warning("Model definition %s %s", name, reason)


@lru_cache(maxsize=8)
def _folder(path: Path) -> Folder:
    return Folder(path)


def folder() -> Folder:
    """The models folder of this process's settings."""
    return _folder(conf.cluster().models_path)


def find(name: str) -> Definition | None:
    """The definition that clients know as `name`."""
    return folder().find(name)


def every() -> list[Definition]:
    """Every usable definition, by name."""
    return folder().all()
