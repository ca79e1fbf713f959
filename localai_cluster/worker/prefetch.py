"""Prefetch: downloads files of models in galleries before the registration (worker.md §17).

A file that cannot be downloaded causes a warning. A file that is present is kept if it has the gallery's
hash, or if the gallery has no hash.
"""

import asyncio
import logging
import re
from pathlib import Path
from typing import NoReturn

import httpx

from localai_cluster import gallery_index, model_documents
from localai_cluster.gallery_index import GalleryEntry, ModelFile, folded
from localai_cluster.kit.errors import ClusterError, NotFound
from localai_cluster.worker.cancellation import Halt
from localai_cluster.worker.config import Config
from localai_cluster.worker.download import Archive, DownloadFailed, Downloads, partial_path, sha256_of
from localai_cluster.worker.exchange import Refusal
from localai_cluster.worker.files import keys
from localai_cluster.worker.source_files import Throttle

log = logging.getLogger(__name__)

_HUGGING_FACE_PATTERN = re.compile(
    r"(?:huggingface://|hf://|(?:https?://)?hf\.co/)([\w.-]+/[\w.-]+)(?:@([\w.-]+))?/([^?#]+)", re.ASCII
)


async def prefetch(config: Config, client: httpx.AsyncClient) -> None:
    """Download the missing files of the models in `config.prefetch_models`."""
    if not config.prefetch_models:
        return
    entries: list[GalleryEntry] = []
    for gallery in config.galleries:
        try:
            index = await gallery_index.fetch(
                gallery,
                client,
                served=refuse_served,
                resolve=_create_path_resolver(config),
                github_url=config.github_url,
            )
            entries += index.entries
        except ClusterError as error:
            log.warning("prefetch: %s", error)
    downloads = Downloads(client, refuse_served, Throttle(config.download_rate))
    for name in config.prefetch_models:
        try:
            entry = _find_entry(name, entries)
            document = await model_documents.model_document(
                entry, client, resolve=_create_path_resolver(config), github_url=config.github_url
            )
            for file in document.files:
                await _download_file(entry, file, config, downloads)
            log.info("prefetch: model %s has its %d files", name, len(document.files))
        except (ClusterError, Refusal, OSError, ValueError, httpx.HTTPError) as error:
            log.warning("prefetch: model %s was not fetched: %s", name, error or type(error).__name__)


def _create_path_resolver(config: Config) -> gallery_index.ResolvePath:
    return lambda path: gallery_index.check_inside(path, (config.models_path, *config.source_roots))


async def refuse_served(name: str, *_: object) -> NoReturn:
    """Refuse a file of the control plane's own gallery, which an unregistered node cannot read."""
    raise ValueError(f"{name} is for registered nodes only")


def _find_entry(name: str, entries: list[GalleryEntry]) -> GalleryEntry:
    gallery, _, bare = name.rpartition("@")
    for entry in entries:
        if folded(entry.name) == folded(bare) and gallery in ("", entry.gallery.name):
            return entry
    raise NotFound("no gallery has it")


async def _download_file(entry: GalleryEntry, file: ModelFile, config: Config, downloads: Downloads) -> None:
    folders = keys.Folders.of_worker(
        config.models_path, config.data_dir, (config.backends_path, config.backends_system_path)
    )
    target = (await asyncio.to_thread(keys.resolve_key, folders, f"models/{file.name}")).real
    halt = Halt()
    try:
        if await asyncio.to_thread(_is_complete, target, file.sha256, halt):
            return
    except asyncio.CancelledError:
        halt.set()
        raise
    address = _resolve_address(file.uri, entry, config)
    if not address.startswith(("http://", "https://")):
        raise DownloadFailed(f"{gallery_index.public_url(file.uri)} is not a source of model files here")
    partial = partial_path(config.models_path, file.name, address, file.sha256)
    log.info("prefetch: fetching %s", file.name)
    await downloads.fetch(Archive(address, file.sha256, partial), lambda *_: None, halt)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(target)


def _is_complete(target: Path, sha256: str, halt: Halt) -> bool:
    return target.is_file() and (not sha256 or sha256_of(target, halt) == sha256)


def _resolve_address(uri: str, entry: GalleryEntry, config: Config) -> str:
    if match := _HUGGING_FACE_PATTERN.fullmatch(uri):
        repository, branch, path = match.groups()
        return f"{config.hugging_face_url}/{repository}/resolve/{branch or 'main'}/{path}"
    return gallery_index.resolve_source(uri, entry.gallery.url, config.github_url)
