"""Model definitions: YAML in LocalAI's form, one model per file or row.

Data flow: the text is parsed and checked, and becomes a `Definition` with its load options and revision. This
module computes the options once, from the text alone. None of its functions takes a request, so a request
cannot change what is loaded. `folder` keeps the definitions of the models folder and of the rows.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localai_cluster.kit import names, untrusted
from nodes.definitions.recorded_files import RecordedFiles

USE_CASES = (
    *("chat", "completion", "edit", "embeddings", "rerank", "image", "transcript", "tts"),
    *("sound_generation", "tokenize", "vad", "video", "detection", "vision", "diarization"),
    *("audio_transform", "realtime_audio", "face_recognition", "speaker_recognition"),
)
"""The values that `known_usecases` of a definition may contain."""
_TEXT_USE_CASES = ("chat", "completion", "tokenize")
_USE_CASE_GROUPS: Mapping[str, tuple[str, ...]] = {"llm": ("chat", "completion", "edit"), "any": ()}
_USE_CASES_BY_ENGINE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("whisper", "parakeet", "moonshine", "nemo", "qwen-asr"), ("transcript",)),
    **dict.fromkeys(("piper", "kokoro", "kitten-tts", "bark", "coqui", "chatterbox", "vibevoice"), ("tts",)),
    **dict.fromkeys(("diffusers", "stablediffusion", "stablediffusion-ggml", "flux"), ("image",)),
    **dict.fromkeys(("rerankers",), ("rerank",)),
    **dict.fromkeys(("silero-vad",), ("vad",)),
    **dict.fromkeys(("rfdetr",), ("detection",)),
    **dict.fromkeys(("sentencetransformers", "minilm"), ("embeddings",)),
}
"""Use cases of an engine that does not generate text, by a part of its name."""


Names = tuple[str, ...]


def parse_use_cases(stated: object, backend: str, options: Mapping[str, Any]) -> tuple[Names, Names]:
    """Return the use cases of a definition, and warnings about unknown ones in `stated`.

    `stated` is the definition's `known_usecases`: names with or without `FLAG_`, in upper or lower case.
    """
    if stated is None:
        return engine_use_cases(backend, options), ()
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        warning = "`known_usecases` is not a list of names and is ignored"
        return engine_use_cases(backend, options), (warning,)
    names = [name.strip().lower().removeprefix("flag_") for name in stated]
    chosen = {case for name in names for case in _USE_CASE_GROUPS.get(name, (name,))}
    unknown = sorted(chosen - set(USE_CASES))
    warnings = tuple(f"`known_usecases` has the unknown name {name[:64]!r}" for name in unknown)
    known = tuple(case for case in USE_CASES if case in chosen)
    return known or engine_use_cases(backend, options), warnings


def engine_use_cases(backend: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the use cases of an engine with these load options.

    An unknown engine counts as generating text.
    """
    if options.get("Embeddings"):
        return ("embeddings",)
    if options.get("Reranking"):
        return ("rerank",)
    name = f"-{backend.rpartition('@')[2].lower()}-"
    for part, cases in _USE_CASES_BY_ENGINE.items():
        if f"-{part}-" in name:
            return cases
    return (*_TEXT_USE_CASES, "vision") if options.get("MMProj") else _TEXT_USE_CASES


def to_flags(cases: tuple[str, ...]) -> list[str]:
    """Return the use cases as LocalAI's flags, such as `FLAG_CHAT`."""
    return [f"FLAG_{case.upper()}" for case in cases]


NUMBERS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repeat_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "typical_p": float,
    "max_tokens": int,
    "seed": int,
}
TEMPLATES = ("chat", "chat_message", "completion", "edit", "function", "multimodal")
GO_TEMPLATE = (
    "`template` is written in Go's language, which is not supported: the model's own template is used instead"
)


@dataclass(frozen=True)
class GenerationDefaults:
    """The prompt template, stop words and sampling defaults of one definition."""

    defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling values that apply if a request omits them, by the names of `parameters`."""
    stop: tuple[str, ...] = ()
    template: str = ""
    """A Jinja template for chats. If empty, the engine uses the model's own."""
    system: str = ""
    """`system_prompt`: the system message of conversations without one."""
    warnings: tuple[str, ...] = ()


NO_DEFAULTS = GenerationDefaults()
"""Defaults of a definition that has no template, stop words or sampling values."""


def parse_generation(document: Mapping[Any, Any], parameters: Mapping[Any, Any]) -> GenerationDefaults:
    """Parse the template, stop words and sampling values of a definition; unusable values become warnings."""
    warnings: list[str] = []
    defaults: dict[str, float | int] = {}
    for name, kind in NUMBERS.items():
        value = _parse_exponent(parameters.get(name), kind)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            warnings.append(f"`parameters.{name}` is not a number and is ignored")
        elif not -(2**31) <= value < 2**31:
            warnings.append(f"`parameters.{name}` is out of range and is ignored")
        else:
            defaults[name] = kind(value)
    stop = document.get("stopwords") or []
    if not isinstance(stop, list) or not all(_is_text(word) for word in stop):
        warnings.append("`stopwords` is not a list of texts and is ignored")
        stop = []
    system = document.get("system_prompt")
    if system and not _is_text(system):
        warnings.append("`system_prompt` is not a text and is ignored")
        system = ""
    template = _template(document.get("template"), warnings)
    return GenerationDefaults(defaults, tuple(stop), template, system or "", tuple(warnings))


def _template(section: object, warnings: list[str]) -> str:
    """Return the Jinja template for chats; "" without one. Go templates are not supported."""
    if section is None:
        return ""
    if not isinstance(section, Mapping):
        warnings.append("`template` is not a mapping and is ignored")
        return ""
    nonempty_templates = [
        name for name in TEMPLATES if isinstance(section.get(name), str) and section[name].strip()
    ]
    if not nonempty_templates or section.get("use_tokenizer_template") is True:
        return ""
    if section.get("jinja_template") is True and "chat" in nonempty_templates:
        if _is_text(section["chat"]):
            return str(section["chat"])
        warnings.append("`template.chat` has characters that are no text and is ignored")
        return ""
    warnings.append(GO_TEMPLATE)
    return ""


def _is_text(value: object) -> bool:
    """Return True if an engine can receive the text: not empty, and without lone surrogates."""
    return (
        isinstance(value, str)
        and bool(value)
        and not any("\ud800" <= character <= "\udfff" for character in value)
    )


DOWNLOAD_ON = ("control-plane", "worker")
"""Values of the setting `download_on`: who downloads the model's files."""
MAX_FILE_BYTES = 256 * 1024
MAX_NAME = 255

# The reference's defaults for settings that the file omits (`contract/grpc.md`), without its random seed.
_DEFAULT_OPTIONS: dict[str, Any] = {
    "NBatch": 512,
    "MMap": True,
    "NGPULayers": 99999999,
    "FlashAttention": "auto",
}

# Key in the file -> field of ModelOptions and its type.
FIELDS: dict[str, tuple[str, type]] = {
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
    "tokenizer": ("Tokenizer", str),
}
LISTS: dict[str, tuple[str, type]] = {
    "options": ("Options", str),
    "overrides": ("Overrides", str),
    "lora_adapters": ("LoraAdapters", str),
    "lora_scales": ("LoraScales", float),
}
SECTION_FIELDS: dict[tuple[str, str], str] = {
    ("diffusers", "clip_model"): "CLIPModel",
    ("tts", "audio_path"): "AudioPath",
}
"""Text options that stand in a section of the file: (section, key) -> field of ModelOptions."""


class UnusableDefinition(ValueError):
    """The text cannot be used as a model definition; the error's text is the reason.

    `name` is the model that an unusable text means to define, and `former` the model that its file has
    defined before in this process; "" = unknown. Line and column count from 1; 0 = unknown.
    """

    name = former = ""
    line = column = 0


@dataclass(frozen=True)
class Definition:
    """A model as its file or stored row defines it."""

    name: str
    backend: str
    model: str
    """`parameters.model`: the file or repository that the engine loads."""
    source: str
    """Name of the definition's file; of a row `rows.SOURCE_PREFIX` and the row's name."""
    options: Mapping[str, Any]
    """Load options under the names of `ModelOptions`."""
    revision: str
    """SHA-256 (hex) of the engine's name and the options; equal texts give equal revisions on every machine.
    """
    groups: frozenset[str] = frozenset()
    """`concurrency_groups` of an enabled model (R2.81). Groups affect only placement and are not part of the
    revision.
    """
    generation: GenerationDefaults = NO_DEFAULTS
    """Prompt template and sampling defaults; not part of the revision."""
    use_cases: tuple[str, ...] = ()
    """The model's use cases (`USE_CASES`); not part of the revision."""
    takes_token_ids: bool = False
    """`token_ids`: clients may send token ids instead of texts for embeddings; not part of the revision."""
    vram: int = 0
    """`vram_needed`: the bytes of VRAM that a replica needs; 0 = estimated. Not part of the revision."""
    disabled: bool = False
    """`disabled`: never loaded, not even while the file is unreadable. Not part of the revision."""
    download_on: str = ""
    """`download_on`: who downloads the model's files; "" = as the setting says. Not part of the revision."""
    auto_layers: bool = False
    """`gpu_layers: auto`: if not all layers fit on the GPU, fewer are put there. Not part of the revision."""
    files: RecordedFiles = field(default_factory=dict, compare=False)
    """The files that an import has recorded for a stored definition; not part of the revision."""
    changed: int = field(default=0, compare=False)
    """Time of the last change of the file or row in seconds since 1970; not part of the revision."""

    def conflicts_with(self, other: "Definition") -> bool:
        """Return True if `other` is a different model that shares a concurrency group with this one."""
        return self.name != other.name and not self.groups.isdisjoint(other.groups)


def parse_definition(document: object, source: str) -> Definition:
    """Check the document of one definition and return the definition; raise UnusableDefinition."""
    if not isinstance(document, Mapping):
        raise UnusableDefinition("is not a mapping of settings")
    parameters = document.get("parameters")
    if not isinstance(parameters, Mapping):
        raise UnusableDefinition("has no `parameters` section")
    name = _read_text(document, "name")
    backend = _read_text(document, "backend")
    _check_paths(name, backend)
    model = _read_text(parameters, "model", "parameters.model")
    settings = {**parameters, **document}
    if auto_layers := settings.get("gpu_layers") == "auto":
        del settings["gpu_layers"]
    options = {**_DEFAULT_OPTIONS, "Model": model, **_options_of(settings)}
    cases, warnings = parse_use_cases(document.get("known_usecases"), backend, options)
    generation = parse_generation(document, parameters)
    download_on = document.get("download_on")
    if download_on is not None and download_on not in DOWNLOAD_ON:
        raise UnusableDefinition(f"has a `download_on` that is none of {', '.join(DOWNLOAD_ON)}")
    return Definition(
        name,
        backend,
        model,
        source,
        options,
        _fingerprint(backend, options),
        _groups_of(document),
        replace(generation, warnings=(*generation.warnings, *warnings)),
        cases,
        document.get("token_ids") is True,
        stated_bytes(document, "vram_needed"),
        document.get("disabled") is True,
        str(download_on or ""),
        auto_layers,
    )


_SIZE_PATTERN = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([kmgt])(i?)b", re.ASCII | re.IGNORECASE)


def stated_bytes(document: Mapping[Any, Any], key: str) -> int:
    """Return the size in bytes under `key`; 0 if the key is absent.

    The value is a whole number, or a number with a unit: kB to TB or KiB to TiB.
    """
    value = document.get(key)
    if value is None:
        return 0
    if isinstance(value, str) and (match := _SIZE_PATTERN.fullmatch(value.strip())):
        base = 1024 if match[3] else 1000
        value = int(float(match[1]) * base ** ("kmgt".index(match[2].lower()) + 1))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**60:
        raise UnusableDefinition(f"`{key}` is not a size such as `12GiB`")
    return value


def _groups_of(document: Mapping[Any, Any]) -> frozenset[str]:
    """Return the trimmed, non-empty concurrency groups (R2.81); none for a disabled model."""
    groups = document.get("concurrency_groups")
    if groups is None or document.get("disabled") is True:
        return frozenset()
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise UnusableDefinition("`concurrency_groups` is not a list of texts")
    return frozenset(stripped for group in groups if (stripped := group.strip()))


def _read_text(section: Mapping[Any, Any], key: str, shown: str = "") -> str:
    value = section.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UnusableDefinition(f"does not say `{shown or key}`")
    if len(value) > MAX_NAME:
        raise UnusableDefinition(f"has a `{shown or key}` of more than {MAX_NAME} characters")
    if character := names.find_unprintable(value):
        raise UnusableDefinition(f"has a `{shown or key}` with the character {character}")
    return value.strip()


def _check_paths(name: str, backend: str) -> None:
    """Raise UnusableDefinition for names that lead out of the folders which a worker creates for them.

    A model's name may contain `/`, as in `org/model`. An engine's name is one folder of any gallery.
    """
    if "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise UnusableDefinition(
            "has a `name` that is a path; only names such as `model` or `org/model` are accepted"
        )
    if "/" in backend or "\\" in backend or backend.rpartition("@")[2].strip().startswith("."):
        raise UnusableDefinition("has a `backend` that is a path; only an engine's name is accepted")


def _options_of(settings: Mapping[Any, Any]) -> dict[str, Any]:
    options = {
        field: _check_value(key, settings[key], kind)
        for key, (field, kind) in FIELDS.items()
        if settings.get(key) is not None
    }
    for key, (option, kind) in LISTS.items():
        if settings.get(key) is not None:
            options[option] = _check_list(key, settings[key], kind)
    for (section, key), option in SECTION_FIELDS.items():
        content = settings.get(section)
        if isinstance(content, Mapping) and content.get(key) is not None:
            options[option] = _check_value(f"{section}.{key}", content[key], str)
    return options


def _check_list(key: str, value: object, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, str) == (kind is str) for item in value):
        raise UnusableDefinition(f"`{key}` is not a list of {'texts' if kind is str else 'numbers'}")
    return [_check_value(key, item, kind) for item in value]


_EXPONENT_PATTERN = re.compile(r"[-+]?\d{1,20}(\.\d{0,20})?[eE][-+]?\d{1,3}", re.ASCII)
_LARGEST_FLOAT = 3.4e38  # of single precision, as in `ModelOptions`


def _parse_exponent(value: object, kind: type) -> Any:
    """Return the number of a text such as `1e6`: LocalAI's YAML parser reads a number, PyYAML a text."""
    if kind is float and isinstance(value, str) and _EXPONENT_PATTERN.fullmatch(value):
        return float(value)
    return value


def _check_value(key: str, value: Any, kind: type[Any]) -> Any:
    # YAML reads `main_gpu: 0` and `flash_attention: on` as a number and a switch; both mean their text.
    if kind is str and isinstance(value, bool):
        return "on" if value else "off"
    if kind is str and isinstance(value, int | float | str):
        if "\0" in str(value):
            raise UnusableDefinition(f"`{key}` has the character U+0000")
        return str(value)
    value = _parse_exponent(value, kind)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= _LARGEST_FLOAT else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UnusableDefinition(
            f"`{key}` is not {'a switch' if kind is bool else 'a number' if kind is not str else 'a text'}"
        )
    lowest, highest = (-_LARGEST_FLOAT, _LARGEST_FLOAT) if kind is float else (-(2**31), 2**31 - 1)
    if not isinstance(value, str) and not lowest <= value <= highest:  # also NaN
        raise UnusableDefinition(f"`{key}` is out of range")
    return value


def _fingerprint(backend: str, options: Mapping[str, Any]) -> str:
    content = json.dumps([backend, options], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    try:
        return hashlib.sha256(content.encode()).hexdigest()
    except UnicodeEncodeError:
        raise UnusableDefinition("a text has half of a surrogate pair") from None


def read_definition(path: Path) -> Definition:
    """Read and check one file. Whatever is wrong, only UnusableDefinition is raised."""
    return parse_file(read_content(path), path.name)


def read_content(path: Path) -> bytes:
    """Return the content of a definition's file; raise UnusableDefinition."""
    try:
        content = untrusted.read_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UnusableDefinition(f"cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise UnusableDefinition(f"is larger than {MAX_FILE_BYTES} bytes")
    return content


def load_document(content: bytes) -> Any:
    """Parse the YAML of a definition; raise UnusableDefinition."""
    try:
        return untrusted.load_yaml(content.decode("utf-8"), untrusted.PlainLoader)
    except UnicodeDecodeError as error:
        raise UnusableDefinition("is not UTF-8 text") from error
    except untrusted.InvalidYAML as error:
        unusable = UnusableDefinition(str(error))
        unusable.line, unusable.column = error.line, error.column
        raise unusable from error


_NAME_LINE_PATTERN = re.compile(rb"""^name:[ \t]*["']?([^"'#\r\n]+)""", re.MULTILINE)


def _intended_name(content: bytes) -> str:
    """Return the model's name on the name line of an unusable text; "" if there is no such line."""
    match = _NAME_LINE_PATTERN.search(content)
    return match[1].decode("utf-8", "replace").strip()[:MAX_NAME] if match else ""


def parse_file(content: bytes, source: str) -> Definition:
    """Check the content of one file or row. Whatever is wrong, only UnusableDefinition is raised.

    Unexpected exceptions also count as an error of this text, because all other models must keep working.
    """
    try:
        return parse_definition(load_document(content), source)
    except UnusableDefinition as error:
        error.name = _intended_name(content)
        raise
    except Exception as error:
        unusable = UnusableDefinition(f"cannot be used: {untrusted.yaml_reason(error)}")
        unusable.name = _intended_name(content)
        raise unusable from error
