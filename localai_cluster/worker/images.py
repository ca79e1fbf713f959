"""Downloads of images from registries: the manifest for this machine, then each layer to a partial file.

A layer resumes at its byte, also after a restart of the worker. Each attempt asks the registry again, so a
signed address that has expired does not matter. The digest of a layer is verified before it is unpacked.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from localai_cluster.kit import failpoints
from localai_cluster.registries.access import RegistryError
from localai_cluster.registries.client import Descriptor, Image, Registries
from localai_cluster.registries.references import ImageReference
from localai_cluster.worker import download
from localai_cluster.worker.cancellation import Halt
from localai_cluster.worker.download import Archive, DownloadFailed, Downloads, partial_path
from localai_cluster.worker.source_files import DiskFull, OnBytes, check_free_space

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PulledImage:
    """A downloaded image: the digest of its manifest, and the files of its layers, the lowest first."""

    digest: str
    layers: tuple[Path, ...]


class Images:
    """The image downloads of one worker. The partial files lie in `folder`."""

    def __init__(self, registries: Registries, downloads: Downloads, folder: Path) -> None:
        self._registries = registries
        self._downloads = downloads
        self._folder = folder

    async def pull(
        self, reference: ImageReference, backend: str, on_bytes: OnBytes, halt: Halt
    ) -> PulledImage:
        """Download the layers for the folder of a backend. Raise RegistryError, or as `Downloads.fetch`."""
        image = await self._image(reference)
        layers = list(dict.fromkeys(image.layers))
        total = sum(layer.size for layer in layers)
        if total > download.MOST_BYTES:
            raise RegistryError(f"{reference} has more than {download.MOST_BYTES} bytes")
        log.info("%s is %s: %d layers, %d bytes", reference, image.digest, len(layers), total)
        archives = {layer.digest: self._archive(reference, layer, backend) for layer in layers}
        try:
            await asyncio.to_thread(self._check_disk_space, archives.values(), total)
            await self._fetch_all(reference, layers, archives, on_bytes, halt)
        except BaseException as error:
            if halt.cancelled or isinstance(error, DiskFull):  # no later install resumes them
                for archive in archives.values():
                    archive.partial.unlink(missing_ok=True)
            raise
        return PulledImage(image.digest, tuple(archives[layer.digest].partial for layer in image.layers))

    def _check_disk_space(self, archives: Iterable[Archive], total: int) -> None:
        """Raise DiskFull if the layers do not fit beside those that are there already."""
        present = sum(archive.partial.stat().st_size for archive in archives if archive.partial.exists())
        check_free_space(self._folder, max(total - present, 0), "bytes of layers")

    async def _fetch_all(
        self,
        reference: ImageReference,
        layers: Sequence[Descriptor],
        archives: Mapping[str, Archive],
        on_bytes: OnBytes,
        halt: Halt,
    ) -> None:
        total, done = sum(layer.size for layer in layers), 0
        for number, layer in enumerate(layers, 1):
            label = f"{number}/{len(layers)} {reference}"
            await self._fetch(archives[layer.digest], done, total, label, on_bytes, halt)
            done += layer.size
            failpoints.passed("worker.pull:layer")

    async def _fetch(
        self, archive: Archive, before: int, total: int, label: str, on_bytes: OnBytes, halt: Halt
    ) -> None:
        def show(done: int, _: int, name: str) -> None:
            on_bytes(min(before + done, total), total, label)

        await self._downloads.fetch(archive, show, halt)

    async def _image(self, reference: ImageReference) -> Image:
        """Read the manifest; retry what may pass."""
        for pause in (*download.PAUSES[:3], None):
            try:
                return await self._registries.image(reference)
            except RegistryError as error:
                if error.permanent or pause is None:
                    raise
                log.warning("%s; trying again", error.message)
                await asyncio.sleep(pause)
        raise AssertionError  # the last attempt returns or raises

    def _archive(self, reference: ImageReference, layer: Descriptor, backend: str) -> Archive:
        name = f"{reference.host}/{reference.path}@{layer.digest}"
        sha256 = layer.digest.removeprefix("sha256:")

        async def open_part(headers: Mapping[str, str]) -> httpx.Response:
            try:
                return await self._registries.open_layer(reference, layer.digest, headers)
            except RegistryError as error:
                raise DownloadFailed(error.message, can_retry=not error.permanent) from error

        return Archive(name, sha256, partial_path(self._folder, backend, name, sha256), open_part, layer.size)
