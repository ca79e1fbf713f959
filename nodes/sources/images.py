"""Models in registries: models of Ollama, and OCI artifacts whose layers are files.

An Ollama manifest has one layer for the weights and other layers for projector, template, parameters, system
prompt and licence, each identified by its digest. The file with the weights has the model's own template.
Ollama's template is in Go's language and is not used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localai_cluster.kit import names, untrusted
from localai_cluster.kit.outbound import SourceError
from localai_cluster.registries.client import Descriptor, Image
from localai_cluster.registries.references import ImageReference
from nodes.sources import writing
from nodes.sources.opening import SourceFileOpener
from nodes.sources.plans import SourceFile, check_path
from nodes.sources.probing import read_start
from nodes.sources.references import OLLAMA_REGISTRY, ImageRef
from nodes.sources.variants import RepositoryFile, Variant, quantization_of, variants_of

_OLLAMA_MEDIA_TYPE_PREFIX = "application/vnd.ollama.image."
_MODEL_MEDIA_TYPE, _PROJECTOR_MEDIA_TYPE, _ADAPTER_MEDIA_TYPE = (
    f"{_OLLAMA_MEDIA_TYPE_PREFIX}model",
    f"{_OLLAMA_MEDIA_TYPE_PREFIX}projector",
    f"{_OLLAMA_MEDIA_TYPE_PREFIX}adapter",
)
_MAX_TEXT_BYTES = 256 * 1024
"""Maximum bytes of a text layer that are read."""
_TITLE_ANNOTATION = "org.opencontainers.image.title"
_DOCKER_MODEL_MEDIA_TYPE = "application/vnd.docker.ai.gguf.v3"
_SETTING_BY_PARAMETER: Mapping[str, tuple[str, ...]] = {
    "temperature": ("parameters", "temperature"),
    "top_k": ("parameters", "top_k"),
    "top_p": ("parameters", "top_p"),
    "min_p": ("parameters", "min_p"),
    "repeat_penalty": ("parameters", "repeat_penalty"),
    "presence_penalty": ("parameters", "presence_penalty"),
    "frequency_penalty": ("parameters", "frequency_penalty"),
    "num_predict": ("parameters", "max_tokens"),
    "seed": ("parameters", "seed"),
    "stop": ("stopwords",),
    "num_ctx": ("context_size",),
    "num_gpu": ("gpu_layers",),
    "num_thread": ("threads",),
}
"""By Ollama parameter: the path of the setting in a definition."""


@dataclass(frozen=True)
class RegistryImage:
    """A model image of an OCI registry: its variant, its files' addresses, and the metadata in its layers."""

    variant: Variant
    folder: str
    addresses: Mapping[str, str]
    """By the file's path in the variant: its address."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    licence: str = ""
    unsupported: tuple[str, ...] = ()
    """Parts of the model that a definition cannot express."""

    def files(self) -> list[SourceFile]:
        """Return the files to fetch."""
        return [
            SourceFile(
                check_path(f"{self.folder}/{file.path}"),
                self.addresses[file.path],
                file.size,
                file.sha256,
            )
            for file in self.variant.files
        ]


async def read_model(opener: SourceFileOpener, reference: ImageRef) -> RegistryImage:
    """Read the model that a reference names in its registry; raise SourceError."""
    async with opener.registries() as client:
        image = await client.artifact(reference.reference)
    if any(layer.media_type == _MODEL_MEDIA_TYPE for layer in image.layers):
        return await _ollama_model(opener, reference.reference, image.layers)
    return _artifact(reference.reference, image)


async def _ollama_model(
    opener: SourceFileOpener, reference: ImageReference, layers: Sequence[Descriptor]
) -> RegistryImage:
    """Return the model in an image of Ollama's format."""
    by_type: dict[str, Descriptor] = {}
    for layer in layers:
        by_type.setdefault(layer.media_type, layer)
    weights, projector = by_type[_MODEL_MEDIA_TYPE], by_type.get(_PROJECTOR_MEDIA_TYPE)
    if sum(layer.media_type == _MODEL_MEDIA_TYPE for layer in layers) > 1:
        raise SourceError(f"{reference}: a model whose weights are in several layers is not supported")
    texts = {
        name: await _read_layer(opener, reference, by_type[f"{_OLLAMA_MEDIA_TYPE_PREFIX}{name}"])
        for name in ("params", "system", "license")
        if f"{_OLLAMA_MEDIA_TYPE_PREFIX}{name}" in by_type
    }
    files = [_layer_file("model", weights), *([_layer_file("mmproj", projector)] if projector else [])]
    variant = Variant(
        reference.version,
        "gguf",
        quantization_of(f"{reference.version}.gguf"),
        tuple(files),
        files[0].path,
        files[1].path if projector else "",
        weights.size,
        projector.size if projector else 0,
    )
    path = reference.path.removeprefix("library/")
    return RegistryImage(
        variant,
        f"ollama/{path}" if reference.host == OLLAMA_REGISTRY else f"oci/{_host_part(reference)}/{path}",
        {file.path: _blob_address(reference, f"sha256:{file.sha256}") for file in files},
        _parameters(texts.get("params", b"")),
        texts.get("system", b"").decode("utf-8", "replace").strip(),
        names.to_single_line(
            texts.get("license", b"").decode("utf-8", "replace").strip().partition("\n")[0][:200]
        ),
        ("an adapter",) if _ADAPTER_MEDIA_TYPE in by_type else (),
    )


def _artifact(reference: ImageReference, image: Image) -> RegistryImage:
    """Return the model of an artifact whose layers are files; the title of each layer is its path.

    The folder contains the digest, because each tag is another model, and a tag may move.
    """
    files, addresses = [], {}
    for index, layer in enumerate(image.layers):
        title = (layer.annotations or {}).get(_TITLE_ANNOTATION, "")
        if not title and layer.media_type == _DOCKER_MODEL_MEDIA_TYPE:
            title = f"model-{index}.gguf" if index else "model.gguf"
        if not isinstance(title, str) or not title or names.find_unprintable(title):
            continue
        files.append(RepositoryFile(title, layer.size, layer.digest.removeprefix("sha256:")))
        addresses[title] = _blob_address(reference, layer.digest)
    found = variants_of(files)
    if not found:
        raise SourceError(f"{reference} has no layer that is a model's file with a name")
    digest = image.digest.removeprefix("sha256:")[:12]
    folder = f"oci/{_host_part(reference)}/{reference.path}@{digest}"
    return RegistryImage(found[0], folder, addresses)


def _host_part(reference: ImageReference) -> str:
    return reference.host.replace(":", "-").strip("[]").replace("[", "").replace("]", "")


def _layer_file(kind: str, layer: Descriptor) -> RepositoryFile:
    """Return the file of a layer. The name contains the digest, because a tag may move to other weights."""
    digest = layer.digest.removeprefix("sha256:")
    return RepositoryFile(f"{kind}-{digest[:16]}.gguf", layer.size, digest)


def _blob_address(reference: ImageReference, digest: str) -> str:
    return f"oci://{reference.host}/{reference.path}@{digest}"


async def _read_layer(opener: SourceFileOpener, reference: ImageReference, layer: Descriptor) -> bytes:
    if layer.size > _MAX_TEXT_BYTES:
        return b""
    content, _ = await read_start(
        opener, SourceFile("layer", _blob_address(reference, layer.digest)), _MAX_TEXT_BYTES
    )
    return content


def _parameters(content: bytes) -> dict[str, Any]:
    """Return the parameters of an Ollama model; {} if they cannot be read."""
    if not content or untrusted.json_problem(content):
        return {}
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in _SETTING_BY_PARAMETER if key in found and _is_usable(key, found[key])}


def _is_usable(key: str, value: object) -> bool:
    """Return True if a definition can have this value. An unusable value is left out."""
    if key == "stop":
        return isinstance(value, list) and all(isinstance(word, str) for word in value)
    kinds = int if key.startswith("num_") else int | float
    return isinstance(value, kinds) and not isinstance(value, bool) and -(2**31) <= value < 2**31


def with_parameters(settings: dict[str, Any], model: RegistryImage) -> dict[str, Any]:
    """Add the parameters and system prompt of a model to the settings of a definition; return them."""
    for key, value in model.parameters.items():
        section = settings
        *outer, name = _SETTING_BY_PARAMETER[key]
        for part in outer:
            section = section.setdefault(part, {})
        section[name] = value
    if model.system:
        settings["system_prompt"] = model.system[: writing.MAX_PROMPT_LENGTH]
    return settings
