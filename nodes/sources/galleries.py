"""Galleries of models: their entries, cached by each process, and the import plan of an entry.

An index is read like a backend gallery (`nodes/backends/catalogue.py`): at most once a minute, and its last
good copy is used while the gallery is unreachable. An entry may name a document or file by a local path only
if its gallery is local, and then only below the folder of the index.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from localai_cluster import gallery_index, model_documents
from localai_cluster.gallery_index import GalleryEntry, GalleryUnreadable, ModelFile
from localai_cluster.kit import conf, names
from localai_cluster.kit.errors import InvalidInput, NotFound
from localai_cluster.kit.outbound import Outbound, SourceError
from localai_cluster.messaging.messages import Gallery, decode_galleries
from nodes.backends import catalogue
from nodes.definitions.files import UnusableDefinition, stated_bytes
from nodes.sources import references, writing
from nodes.sources.opening import build_outbound
from nodes.sources.plans import ImportPlan, SourceFile, check_files
from nodes.sources.references import GalleryRef, HubRef, ImageRef, ObjectRef, WebRef

READ_LIMIT = 20.0
"""Seconds for the document of an entry."""


def configured() -> list[Gallery]:
    """Return the galleries of models of this cluster."""
    return list(decode_galleries(json.dumps(conf.cluster().model_galleries)))


class GuardedClient:
    """An HTTP client with the `stream` of httpx, for addresses in galleries, by the rules of `Outbound`."""

    def __init__(self, outbound: Outbound) -> None:
        self._outbound = outbound

    def stream(
        self, method: str, url: str, *, headers: Any, follow_redirects: bool
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Open a response; each redirect is checked and then followed."""
        return self._outbound.open(url, headers, method)


async def read_all(listed: Sequence[Gallery]) -> list[catalogue.GalleryReading]:
    """Read all galleries now, in parallel, by the rules of `Outbound`."""
    client = GuardedClient(build_outbound(conf.cluster()))
    results = await asyncio.gather(*(catalogue.read_gallery(gallery, client) for gallery in listed))
    return [
        catalogue.GalleryReading(gallery, result) for gallery, result in zip(listed, results, strict=True)
    ]


reader = catalogue.Reader(read_all)


def offer() -> catalogue.Offer:
    """Return the entries of all galleries, and the reason for each gallery that cannot be read."""
    return reader.read(configured())


def find(reference: GalleryRef) -> GalleryEntry:
    """Return the entry of this name; raise NotFound with the reasons for unreadable galleries."""
    found = offer()
    gallery, name = reference.gallery, gallery_index.folded(reference.name)
    for entry in found.builds:
        if gallery_index.folded(entry.name) == name and gallery in ("", entry.gallery.name):
            return entry
    shown = names.to_single_line(f"{gallery}@{name}" if gallery else name)
    reasons = [f"no gallery has a model {shown!r}", *found.problems.values()]
    if not configured():
        reasons.append("no gallery is configured")
    raise NotFound("; ".join(reasons), field="text")


def task_of(entry: GalleryEntry) -> str:
    """Return a model's task from its definition or tags; "" if neither states a task."""
    stated = entry.overrides.get("known_usecases") or entry.config.get("known_usecases")
    if isinstance(stated, list) and stated and isinstance(stated[0], str):
        return stated[0][:64].lower().removeprefix("flag_")
    return next(iter(catalogue.use_cases(entry.tags)), "")


async def plan_of(entry: GalleryEntry, outbound: Outbound) -> ImportPlan:
    """Return the plan of an entry; raise InvalidInput, SourceError or GalleryUnreadable."""
    document = await _read_document(entry, outbound)
    wanted = writing.model_name(entry.name)
    text = writing.text_of(writing.with_name(document.config, wanted))
    writing.check_text(text)
    # The entry comes after its document, so of two files of one name its own counts.
    files = {file.name: file for file in document.files}
    return ImportPlan(
        wanted,
        text,
        check_files(_source_file(file, entry.gallery.url) for file in files.values()),
        "gallery",
        f"{entry.gallery.name}@{entry.name}",
    )


async def _read_document(entry: GalleryEntry, outbound: Outbound) -> model_documents.ModelDocument:
    try:
        async with asyncio.timeout(READ_LIMIT):
            return await model_documents.model_document(
                entry,
                GuardedClient(outbound),
                resolve=lambda path: _path_beside_index(path, entry.gallery),
                github_url=conf.cluster().github_url,
            )
    except TimeoutError:
        raise SourceError(f"{entry.name}: no answer within {READ_LIMIT:.0f} s", can_retry=True) from None
    except GalleryUnreadable as error:
        raise SourceError(error.message) from error
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = names.to_single_line(str(error)[:200]) or type(error).__name__
        raise SourceError(f"the document of model {entry.name} cannot be read: {reason}") from error


def _path_beside_index(path: Path, gallery: Gallery) -> Path:
    """Return the path that an entry names; raise ValueError unless it is below the index's folder."""
    # The empty URL of a document without a gallery would be the working directory.
    index = gallery_index.local_path(gallery.url) if gallery.url else None
    if index is None or not path.resolve().is_relative_to(index.parent.resolve()):
        raise ValueError("a gallery may name files of this machine only beside its own index")
    return path.resolve()


def files_of_definition(settings: Mapping[str, Any]) -> tuple[SourceFile, ...]:
    """Return the files in `download_files` of a definition, in LocalAI's form."""
    listed = gallery_index.files_of(settings.get("download_files"))
    return check_files(_source_file(file, "") for file in listed)


def _source_file(file: ModelFile, index: str) -> SourceFile:
    """Return a file with an address that can be opened; resolve a relative address against the index."""
    settings, shown = conf.cluster(), names.to_single_line(file.name[:100])
    try:
        uri = gallery_index.resolve_source(file.uri, index, settings.github_url)
        found = references.recognise(uri, mirror=settings.hugging_face_url)
    except InvalidInput as error:
        raise InvalidInput(f"the file {shown!r}: {error.message}", field="text") from None
    except ValueError:
        raise InvalidInput(f"the file {shown!r} has a malformed address", field="text") from None
    return SourceFile(file.name, _resolve_address(found, file), sha256=file.sha256)


def _resolve_address(found: references.Reference, file: ModelFile) -> str:
    match found:
        case HubRef(repo=repo, revision=revision, path=path) if path:
            return f"hf://{repo}@{revision or 'main'}/{path}"
        case WebRef(url=url) if urlsplit(url).query:
            shown = names.to_single_line(gallery_index.public_url(url)[:200])
            raise InvalidInput(
                f"{shown} has a query, which may be a signature or a secret; use an address without one",
                field="text",
            )
        case WebRef(url=url):
            return url
        case ObjectRef(bucket=bucket, key=key):
            return f"s3://{bucket}/{key}"
        case ImageRef(reference=reference) if reference.is_pinned:
            return f"oci://{reference.host}/{reference.path}@{reference.version}"
    shown = names.to_single_line(gallery_index.public_url(file.uri)[:200])
    raise InvalidInput(f"{shown} is no source of a model's file", field="text")


def bytes_of(entry: GalleryEntry) -> int:
    """Return the bytes of the files that an entry states; 0 if it states no size."""
    try:
        return stated_bytes({"size": entry.size.strip()}, "size") if entry.size else 0
    except UnusableDefinition:
        return 0
