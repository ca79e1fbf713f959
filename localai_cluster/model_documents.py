"""Models of galleries: the settings and files of a definition, from an entry and its config file."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localai_cluster.gallery_index import (
    FETCH_TIMEOUT,
    GalleryEntry,
    GalleryUnreadable,
    ModelFile,
    ResolvePath,
    WebClient,
    files_of,
    read_url,
    resolve_source,
    settings_of,
    text_of,
)
from localai_cluster.kit import untrusted


@dataclass(frozen=True)
class ModelDocument:
    """A model of a gallery: the settings of its definition, and its files."""

    config: Mapping[str, Any]
    files: tuple[ModelFile, ...]
    license: str = ""
    description: str = ""


async def model_document(
    entry: GalleryEntry, client: WebClient, *, resolve: ResolvePath, github_url: str
) -> ModelDocument:
    """Return the model of an entry, from the config file at its `url` and the entry itself.

    Settings in `overrides` take precedence over the entry's own `config_file`, which takes precedence over
    the document. Raise GalleryUnreadable, OSError, ValueError or httpx.HTTPError.
    """
    document: Mapping[str, Any] = {}
    if url := entry.config_url or entry.uri:
        async with asyncio.timeout(FETCH_TIMEOUT):
            text = await read_url(resolve_source(url, entry.gallery.url, github_url), client, resolve)
        document = settings_of(await asyncio.to_thread(_load_document, text, entry.name))
    inner = document.get("config_file")
    if isinstance(inner, str):
        inner = await asyncio.to_thread(_load_document, inner.encode("utf-8", "replace"), entry.name)
    own = _merge_settings(settings_of(inner), entry.config, entry.name)
    return ModelDocument(
        _merge_settings(own, entry.overrides, entry.name),
        (*files_of(document.get("files")), *entry.files),
        entry.license or text_of(document.get("license")),
        entry.description or text_of(document.get("description")),
    )


def _load_document(text: bytes, name: str) -> Any:
    try:
        return untrusted.load_yaml(text, untrusted.BoundedLoader)
    except untrusted.InvalidYAML as error:
        raise GalleryUnreadable(f"the document of model {name} {error}") from error


def _merge_settings(
    settings: Mapping[str, Any], overrides: Mapping[str, Any], name: str
) -> Mapping[str, Any]:
    """Return the settings with these overrides: sections are merged, other values are replaced.

    Raise GalleryUnreadable if this copies too many values: sections that repeat by aliases multiply.
    """
    left = untrusted.MAX_YAML_VALUES

    def merge(old: Mapping[str, Any], new: Mapping[str, Any], level: int) -> dict[str, Any]:
        nonlocal left
        left -= len(old) + len(new)
        if left < 0 or level > untrusted.MAX_LEVELS:
            raise GalleryUnreadable(f"the document of model {name} has too many values, or too deep ones")
        merged = dict(old)
        for key, value in new.items():
            before = merged.get(key)
            if isinstance(before, dict) and isinstance(value, dict):
                value = merge(before, value, level + 1)
            merged[key] = value
        return merged

    return merge(settings, overrides, 0)
