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
    return ModelDocument(
        _merge_settings(_merge_settings(settings_of(inner), entry.config), entry.overrides),
        (*files_of(document.get("files")), *entry.files),
        entry.license or text_of(document.get("license")),
        entry.description or text_of(document.get("description")),
    )


def _load_document(text: bytes, name: str) -> Any:
    try:
        return untrusted.load_yaml(text, untrusted.BoundedLoader)
    except untrusted.InvalidYAML as error:
        raise GalleryUnreadable(f"the document of model {name} {error}") from error


def _merge_settings(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with these overrides: sections are merged, other values are replaced."""
    merged = dict(settings)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = (
            _merge_settings(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged
