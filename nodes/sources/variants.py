"""The variants of a repository: its files grouped by quantization, with all files that each needs. Pure.

A variant is what a user chooses: a GGUF file with all its parts and its projector, or the safetensors weights
of a repository with configuration, tokenizer and templates.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

MAX_VARIANTS = 100
_SHARD_NAME_PATTERN = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<suffix>gguf|safetensors)", re.ASCII
)
_QUANTIZATION_PATTERN = re.compile(
    r"(?:^|[-_./])(?P<name>(?:UD-)?(?:I?Q\d(?:_[0-9A-Z]{1,3})*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32|FP8))"
    r"(?=[-_./]|$)",
    re.IGNORECASE,
)
_PREFERRED_QUANTIZATIONS = (
    *(
        "Q4_K_M",
        "UD-Q4_K_XL",
        "Q4_K_XL",
        "MXFP4",
        "MXFP4_MOE",
        "Q4_K_S",
        "Q5_K_M",
        "Q4_0",
        "IQ4_XS",
        "IQ4_NL",
    ),
    *("Q5_K_S", "Q6_K", "Q4_1", "Q5_0", "Q8_0", "Q3_K_L", "Q3_K_M", "IQ3_M", "F16", "FP16", "BF16"),
)
"""Quantizations in order of preference. The first one that fits is recommended."""
_PREFERRED_PROJECTOR_TYPES = ("F16", "FP16", "BF16", "Q8_0", "F32", "FP32")
_COMPANION_FILE_PATTERN = re.compile(
    r"(?:.*\.safetensors\.index\.json|(?:.+_)?config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(?:json|txt)|merges\.txt|chat_template.*|(?:pre)?processor.*\.json|preprocessor_config\.json"
    r"|modules\.json|.*\.tiktoken|.*\.model|[0-9]_\w+/config\.json)",
    re.ASCII,
)
_PIPELINE_SUFFIXES = (".safetensors", ".json", ".txt", ".model")
PIPELINE = "model_index.json"
"""Name of the file that marks a repository with a pipeline of several models in folders."""


@dataclass(frozen=True)
class RepositoryFile:
    """A file of a repository. `sha256` "" = unknown."""

    path: str
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Variant:
    """One way to run a model, with all files that it needs. `main` is the file that the definition names."""

    id: str
    format: str
    """`gguf`, `safetensors`, `pipeline` or `file`."""
    quantization: str
    files: tuple[RepositoryFile, ...]
    main: str
    projector: str = ""
    weights: int = 0
    """Bytes of the weights alone."""
    projector_size: int = 0

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


def variants_of(files: Sequence[RepositoryFile]) -> list[Variant]:
    """Return the variants, GGUF first, then by size; empty if the repository has no usable model."""
    plain = [file for file in files if not any(part.startswith(".") for part in file.path.split("/"))]
    return _assign_unique_ids([*_gguf_variants(plain), *_safetensors_variant(plain)])[:MAX_VARIANTS]


def quantization_of(path: str) -> str:
    """Return the quantization in a file's name, or else in the name of its folder; "" without one."""
    name = PurePosixPath(path)
    for text in (name.name.rpartition(".")[0], str(name.parent)):
        if found := list(_QUANTIZATION_PATTERN.finditer(text)):
            return found[-1]["name"].upper()
    return ""


def recommend(variants: Iterable[Variant], fitting: Iterable[str]) -> str:
    """Return the id of the best variant in `fitting`, or else of all variants; "" without variants."""
    listed, fits = list(variants), set(fitting)
    for candidates in ([variant for variant in listed if variant.id in fits], listed):
        if candidates:
            return min(candidates, key=lambda variant: (_preference(variant), variant.size)).id
    return ""


def select(variants: Sequence[Variant], wanted: str) -> Variant | None:
    """Return the variant with this id, quantization or file; None if there is no such variant."""
    folded = wanted.casefold()
    for variant in variants:
        if folded in (variant.id.casefold(), variant.quantization.casefold()):
            return variant
    return next((each for each in variants if any(file.path == wanted for file in each.files)), None)


def _preference(variant: Variant) -> int:
    quantization = variant.quantization
    return (
        _PREFERRED_QUANTIZATIONS.index(quantization)
        if quantization in _PREFERRED_QUANTIZATIONS
        else len(_PREFERRED_QUANTIZATIONS)
    )


def _gguf_variants(files: Sequence[RepositoryFile]) -> list[Variant]:
    weights: list[RepositoryFile] = []
    projectors: list[RepositoryFile] = []
    for file in files:
        name = file.path.rpartition("/")[2].lower()
        if name.endswith(".gguf") and "imatrix" not in name:
            (projectors if "mmproj" in name else weights).append(file)
    sets = sorted(
        _complete_sets(weights), key=lambda parts: (sum(part.size for part in parts), parts[0].path)
    )
    projectors.sort(key=_projector_rank)
    best = projectors[0] if projectors else None
    beside: dict[PurePosixPath, RepositoryFile] = {}
    for file in projectors:
        beside.setdefault(PurePosixPath(file.path).parent, file)
    return [
        _gguf_variant(parts, beside.get(PurePosixPath(parts[0].path).parent, best))
        for parts in sets[:MAX_VARIANTS]
    ]


def _complete_sets(files: Sequence[RepositoryFile]) -> list[list[RepositoryFile]]:
    """Return the parts of each sharded model in order; omit a model with a missing part."""
    sets: dict[str, dict[int, RepositoryFile]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for file in files:
        shard = _SHARD_NAME_PATTERN.fullmatch(file.path)
        key = f"{shard['stem']}-of-{shard['count']}" if shard else file.path
        sets[key][int(shard["number"]) if shard else 1] = file
        counts[key] = int(shard["count"]) if shard else 1
    return [
        [parts[number] for number in sorted(parts)]
        for key, parts in sets.items()
        if len(parts) == counts[key] == max(parts) and min(parts) == 1
    ]


def _gguf_variant(parts: Sequence[RepositoryFile], projector: RepositoryFile | None) -> Variant:
    main, size = parts[0].path, sum(part.size for part in parts)
    files = (*parts, *([projector] if projector else []))
    quantization = quantization_of(_SHARD_NAME_PATTERN.sub(r"\g<stem>.\g<suffix>", main))
    return Variant(
        quantization or PurePosixPath(main).stem,
        "gguf",
        quantization,
        files,
        main,
        projector.path if projector else "",
        size,
        projector.size if projector else 0,
    )


def _assign_unique_ids(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants with unique ids: variants of one quantization get the path of their file as id."""
    counts = Counter(variant.id for variant in variants)
    changed = [
        variant if counts[variant.id] == 1 else replace(variant, id=variant.main or variant.id)
        for variant in variants
    ]
    if len({variant.id for variant in changed}) < len(changed):
        return [replace(variant, id=variant.main or variant.id) for variant in variants]
    return changed


def _projector_rank(file: RepositoryFile) -> tuple[int, str]:
    """Return the sort key of a projector; the usual type comes first."""
    kind = quantization_of(file.path)
    return _PREFERRED_PROJECTOR_TYPES.index(kind) if kind in _PREFERRED_PROJECTOR_TYPES else len(
        _PREFERRED_PROJECTOR_TYPES
    ), file.path


def _safetensors_variant(files: Sequence[RepositoryFile]) -> list[Variant]:
    paths = {file.path for file in files}
    if PIPELINE in paths:
        chosen = [file for file in files if file.path.endswith(_PIPELINE_SUFFIXES)]
        return [_folder_variant("pipeline", chosen)] if _weight_bytes(chosen) else []
    weights = [file for file in files if "/" not in file.path and file.path.endswith(".safetensors")]
    named = [file for file in weights if not file.path.startswith("consolidated")]
    weights = named or weights
    if not weights or "config.json" not in paths:
        return []
    if sum(map(len, _complete_sets(weights))) < len(weights):
        return []
    beside = [file for file in files if _COMPANION_FILE_PATTERN.fullmatch(file.path)]
    return [_folder_variant("safetensors", [*weights, *beside])]


def _folder_variant(kind: str, files: Sequence[RepositoryFile]) -> Variant:
    unique = {file.path: file for file in files}
    return Variant(kind, kind, "", tuple(unique.values()), "", weights=_weight_bytes(list(unique.values())))


def _weight_bytes(files: Sequence[RepositoryFile]) -> int:
    return sum(file.size for file in files if file.path.endswith(".safetensors"))
