"""The catalogue: the backends that the configured galleries offer, and the nodes that have or install them.

In each process, one caller at a time reads all galleries in parallel, at most once a minute. Other callers
get the previous result, and wait only if there is none. A caller that waits for a gallery holds no database
connection. The installed backends come from rows (`inventory.py`), so no page waits for a worker. The result
names galleries that cannot be read. `entries` is pure. The last good copy of an index is a row, so all
processes list its entries while the gallery is unreachable. Only indexes on other machines have a copy: a
file that cannot be read is a wrong setting, not an outage.

The tags of an entry name its use; the worker's own rule decides which machine can run it
(`contract/worker.md` §18.3, §18.4).
"""

import asyncio
import hashlib
import logging
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any
from uuid import UUID

import httpx
from django.db.models import Case, Count, F, Q, Value, When

from localai_cluster import gallery_index
from localai_cluster.gallery_index import (
    GalleryEntry,
    GalleryUnreadable,
    build_for_capability,
    folded,
    is_compatible,
)
from localai_cluster.kit import clock, conf, transactions, untrusted
from localai_cluster.messaging.messages import Gallery
from localai_cluster.web import shapes
from nodes.backends.installed import DEVELOPMENT, WHERE, InstalledBackend
from nodes.models import BackendNode, GalleryCopy, NodeBackend
from operations.models import ACTIVE, Operation, Status

RENEW_AFTER = timedelta(seconds=60)
"""Age after which `read_at` of an unchanged gallery copy is updated."""


def store_copy(gallery: Gallery, text: bytes, *, now: datetime) -> None:
    """Store an index that was read successfully; at most one query and one write."""
    if not _has_copy(gallery):
        return
    packed = zlib.compress(text)
    row = GalleryCopy.objects.filter(pk=_key(gallery)).first()
    if row is not None and bytes(row.text) == packed and now < row.read_at + RENEW_AFTER:
        return
    # Several processes may read the gallery at the same time; any of their copies is good.
    GalleryCopy.objects.bulk_create(
        [GalleryCopy(key=_key(gallery), text=packed, read_at=now)],
        update_conflicts=True,
        unique_fields=["key"],
        update_fields=["text", "read_at"],
    )


def last_good_copy(gallery: Gallery) -> tuple[Sequence[GalleryEntry], datetime] | None:
    """Return the entries of the last good copy of a gallery, and when it was read; None without a copy."""
    row = GalleryCopy.objects.filter(pk=_key(gallery)).first() if _has_copy(gallery) else None
    if row is None:
        return None
    try:
        return gallery_index.parse(zlib.decompress(row.text), gallery), row.read_at
    except (zlib.error, gallery_index.GalleryUnreadable):
        return None  # written by a version with other limits


def _has_copy(gallery: Gallery) -> bool:
    is_own = gallery.url.startswith(gallery_index.CLUSTER_PREFIX)
    return not is_own and gallery_index.local_path(gallery.url) is None


def _key(gallery: Gallery) -> str:
    return hashlib.sha256(gallery.url.encode()).hexdigest()


logger = logging.getLogger(__name__)

READ_WITHIN = 10.0
"""Time limit in seconds for reading a gallery, including all its mirrors."""
OFFER_SECONDS = 60.0
"""Seconds for which an offer is cached."""
PARTIAL_OFFER_SECONDS = 5.0
"""Seconds for which an offer is cached if a gallery could not be read."""
_KIND_PREFIX = "backend_"
_DELETION_SUFFIX = "_delete"

VARIANT = shapes.Shape(
    "BackendVariant",
    "The build that nodes with one capability install.",
    [
        shapes.field("capability", shapes.TEXT, example="default"),
        shapes.field("build", shapes.TEXT, example="minilm"),
        shapes.field("reason", shapes.TEXT, "Why this build.", example="named for no hardware"),
    ],
)
ENTRY = shapes.Shape(
    "CatalogueEntry",
    "One entry of a gallery (§4.1).",
    [
        shapes.field("id", shapes.TEXT, "`gallery@name`.", example="local@minilm"),
        shapes.field("name", shapes.TEXT, example="minilm"),
        shapes.field("description", shapes.TEXT, "Markdown.", example="Sentence embeddings."),
        shapes.field("icon", shapes.TEXT, example=""),
        shapes.field("license", shapes.TEXT, example="MIT"),
        shapes.field("urls", shapes.TEXTS, example=[]),
        shapes.field("tags", shapes.TEXTS, example=["embeddings"]),
        shapes.field("gallery", shapes.TEXT, example="local"),
        shapes.field("version", shapes.TEXT, "The gallery's.", example="1.0.0"),
        shapes.field("installed", shapes.FLAG, "On any approved node.", example=True),
        shapes.field("nodes", WHERE.many),
        shapes.field("processing", shapes.FLAG, "An operation on it waits or runs.", example=True),
        shapes.field(
            "jobID", shapes.TEXT, "That operation; empty if there is none.", example=shapes.EXAMPLE_JOB_ID
        ),
        shapes.field("isDeletion", shapes.FLAG, example=False),
        shapes.field("isMeta", shapes.FLAG, "It chooses the build that fits a node.", example=False),
        shapes.field("isAlias", shapes.FLAG, "A build that such an entry may choose.", example=False),
        shapes.field("isDevelopment", shapes.FLAG, example=False),
        shapes.field(
            "capabilities",
            shapes.mapping_schema(shapes.TEXT),
            "Capability to the name of a build.",
            example=None,
            nullable=True,
        ),
        shapes.field("metaBackendFor", shapes.TEXT, "The entry that may choose this one.", example=""),
        shapes.field("variants", VARIANT.many, "By capability of healthy nodes; others run none."),
    ],
)


@dataclass(frozen=True)
class Offer:
    """The entries of all galleries; `problems` states why a gallery cannot be read, by its name.

    `copied_at` has the time of the last good copy for each gallery whose entries come from a copy.
    """

    builds: Sequence[GalleryEntry] = ()
    problems: Mapping[str, str] = field(default_factory=dict)
    copied_at: Mapping[str, datetime] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the names, versions and sources of all entries."""
        text = "\n".join(f"{build.name}\t{build.version}\t{build.uri}" for build in self.builds)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ActiveOperation:
    """An active operation on a backend; `gallery` is empty if the request named no gallery."""

    id: UUID
    key: str
    gallery: str
    name: str
    is_deletion: bool
    is_waiting: bool

    @property
    def task_type(self) -> str:
        """The reference's name for the kind of the operation."""
        return "Waiting" if self.is_waiting else "Deletion" if self.is_deletion else "Installation"


@dataclass(frozen=True)
class _CachedOffer:
    """The last offer, the galleries of which it was read, and its expiry (monotonic seconds)."""

    galleries: Sequence[Gallery] = ()
    offer: Offer = field(default_factory=Offer)
    good_until: float = 0.0
    check: int = 0

    def is_good(self, listed: Sequence[Gallery], check: int) -> bool:
        return listed == self.galleries and self.check == check and clock.monotonic() < self.good_until


class Reader:
    """Cache of the offer of the galleries, one for each process. Thread-safe."""

    def __init__(self, read: "ReadAll | None" = None) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known = _CachedOffer()

    def read(self, listed: Sequence[Gallery], check: int = 0) -> Offer:
        """Return the offer of the galleries, at most a minute old; older while another thread reads them.

        `check` is the number of the last upgrade check: an offer from before this check has expired.
        """
        cached = self._known
        if cached.is_good(listed, check) or (listed == cached.galleries and self._lock.locked()):
            return cached.offer
        transactions.release_connection()
        with self._lock:
            if not self._known.is_good(listed, check):
                offer = combine(asyncio.run((self._read or read_all)(listed)), now=clock.now())
                lifetime = PARTIAL_OFFER_SECONDS if offer.problems else OFFER_SECONDS
                self._known = _CachedOffer(listed, offer, clock.monotonic() + lifetime, check)
            return self._known.offer


@dataclass(frozen=True)
class GalleryReading:
    """A gallery with its index, or with the reason why the index cannot be read."""

    gallery: Gallery
    index: gallery_index.Index | str


ReadAll = Callable[[Sequence[Gallery]], Coroutine[Any, Any, list[GalleryReading]]]


async def read_all(listed: Sequence[Gallery]) -> list[GalleryReading]:
    """Read all galleries now, in parallel, each for at most `READ_WITHIN` seconds."""
    async with httpx.AsyncClient(timeout=READ_WITHIN, verify=conf.cluster().registry_ca or True) as client:
        results = await asyncio.gather(*(read_gallery(gallery, client) for gallery in listed))
    return [GalleryReading(gallery, result) for gallery, result in zip(listed, results, strict=True)]


reader = Reader()


def combine(readings: Sequence[GalleryReading], *, now: datetime) -> Offer:
    """Return the backends that the galleries offer. For an unreadable gallery, use its last good copy.

    Store copies of the galleries that were read.
    """
    builds: list[GalleryEntry] = []
    problems, copied_at = {}, {}
    for gallery, index in ((reading.gallery, reading.index) for reading in readings):
        if isinstance(index, gallery_index.Index):
            builds += index.entries
            store_copy(gallery, index.text, now=now)
            continue
        name = gallery.name or gallery.url
        problems[name] = index
        copy = last_good_copy(gallery)
        if copy is not None:
            entries, copied_at[name] = copy
            builds += entries
    return Offer(builds, problems, copied_at)


async def read_gallery(gallery: Gallery, client: gallery_index.WebClient) -> gallery_index.Index | str:
    """Return the index, or the reason why the gallery cannot be read."""
    try:
        async with asyncio.timeout(READ_WITHIN):
            return await gallery_index.fetch(
                gallery, client, served=_read_served_file, github_url=conf.cluster().github_url
            )
    except GalleryUnreadable as error:
        return error.message
    except TimeoutError:
        return f"gallery {gallery.name} cannot be read: no answer within {READ_WITHIN:.0f} s"
    except Exception as error:  # a gallery that fails in an unforeseen way must not hide the others
        logger.exception("The gallery %s cannot be read", gallery.name)
        return f"gallery {gallery.name} cannot be read: {untrusted.yaml_reason(error)}"


async def _read_served_file(name: str) -> bytes:
    folder = conf.cluster().gallery_dir
    if folder is None:
        raise ValueError("CLUSTER_GALLERY_DIR is not set")
    return await asyncio.to_thread(gallery_index.read_served, folder, name)


def running() -> list[ActiveOperation]:
    """Return the active operations on backends, the oldest first; one query."""
    active = Operation.objects.filter(status__in=ACTIVE, kind__startswith=_KIND_PREFIX).order_by("created_at")
    operations = []
    for id, key, element, kind, status in active.values_list("id", "key", "element", "kind", "status"):
        gallery, _, name = element.rpartition("@")
        waiting = status in (Status.PENDING, Status.WAITING)
        operations.append(ActiveOperation(id, key, gallery, name, kind.endswith(_DELETION_SUFFIX), waiting))
    return operations


def entries(
    builds: Sequence[GalleryEntry],
    installed: Iterable[InstalledBackend],
    running: Sequence[ActiveOperation],
    capabilities: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return the elements of the catalogue (`contract/http-api.md` §4.1), in the order of the galleries."""
    nodes_by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for backend in installed:
        nodes_by_name[folded(backend.name)] += [place.node for place in backend.places]
    busy = {(operation.gallery.lower(), folded(operation.name)): operation for operation in running}
    resolved_by = parents(builds)
    names = {folded(build.name) for build in builds if not build.is_meta}
    return [
        _entry(
            build,
            variants(build, names, capabilities),
            nodes_by_name.get(folded(build.name), []),
            _active_operation(build, busy),
            "" if build.is_meta else resolved_by.get(folded(build.name), ""),
        )
        for build in builds
    ]


def parents(builds: Sequence[GalleryEntry]) -> dict[str, str]:
    """Return the entries that resolve to other builds, by the case-folded name of the build."""
    parents_by_name: dict[str, str] = {}
    for build in builds:
        if build.is_meta:
            for concrete in (build.capabilities or {}).values():
                parents_by_name.setdefault(folded(concrete), build.name)
    return parents_by_name


def _active_operation(
    build: GalleryEntry, busy: Mapping[tuple[str, str], ActiveOperation]
) -> ActiveOperation | None:
    """Return the active operation on the build. One without a gallery may concern builds of any gallery."""
    name = folded(build.name)
    return busy.get((build.gallery.name.lower(), name)) or busy.get(("", name))


def variants(
    build: GalleryEntry, names: Collection[str], capabilities: Collection[str]
) -> list[dict[str, Any]]:
    """Return the build that nodes of each capability install; `names` are the case-folded names of builds."""
    chosen = []
    for capability in sorted(capabilities):
        why = gallery_index.install_reason(build, capability)
        name = build_for_capability(build.capabilities or {}, capability) if build.is_meta else build.name
        if why and name and folded(name) in names:
            chosen.append(VARIANT.of(capability=capability, build=name, reason=why))
    return chosen


def _entry(
    build: GalleryEntry,
    variants: Sequence[Mapping[str, Any]],
    nodes: Sequence[Mapping[str, Any]],
    job: ActiveOperation | None,
    parent: str,
) -> dict[str, Any]:
    return ENTRY.of_object(
        build,
        id=f"{build.gallery.name}@{build.name}",
        urls=list(build.urls),
        tags=list(build.tags),
        gallery=build.gallery.name,
        installed=bool(nodes),
        nodes=list(nodes),
        processing=job is not None,
        jobID=str(job.id) if job else "",
        isDeletion=job is not None and job.is_deletion,
        isMeta=build.is_meta,
        isAlias=bool(parent),
        isDevelopment=build.name.endswith(DEVELOPMENT),
        capabilities=dict(build.capabilities) if build.capabilities else None,
        metaBackendFor=parent,
        variants=list(variants),
    )


NO_GPU = "default"
"""The capability of a machine without a usable GPU; every cluster may have such machines."""
_MODALITY_AND_USE_CASE_BY_TAG: Mapping[str, tuple[str, str]] = {
    "text-to-text": ("text", "chat"),
    "llm": ("text", "chat"),
    "embeddings": ("embeddings", "embeddings"),
    "text-embeddings": ("embeddings", "embeddings"),
    "reranker": ("reranker", "rerank"),
    "reranking": ("reranker", "rerank"),
    "image-generation": ("image", "image"),
    "text-to-image": ("image", "image"),
    "audio-transcription": ("asr", "transcript"),
    "speech-to-text": ("asr", "transcript"),
    "asr": ("asr", "transcript"),
    "text-to-speech": ("tts", "tts"),
    "tts": ("tts", "tts"),
    "sound-generation": ("sound", "sound_generation"),
    "voice-activity-detection": ("vad", "vad"),
    "vad": ("vad", "vad"),
    "object-detection": ("detection", "detection"),
    "video-generation": ("video", "video"),
    "text-to-video": ("video", "video"),
    "3d": ("3d", "3d"),
}
"""Modality and use case by tag. Other tags do not describe the use of a backend."""


def cluster_capabilities() -> set[str]:
    """Return the capabilities of the healthy nodes, and `NO_GPU`; one query.

    R1.77: a node of an older worker, which reports no capability, counts by the vendor of its GPUs, and as
    `default` if the vendor is unknown or their memory is too small for builds of that vendor.
    """
    return {NO_GPU, *count_by_capability()}


def count_by_capability() -> dict[str, int]:
    """Return the number of healthy nodes by capability; one query."""
    small = Q(gpu_vendor="") | Q(total_vram__lte=gallery_index.SMALL_VRAM_BYTES)
    of_older = Case(When(small, then=Value(NO_GPU)), default=F("gpu_vendor"))
    runs = Case(When(~Q(capability=""), then=F("capability")), default=of_older)
    healthy = BackendNode.objects.filter(status="healthy", node_type="backend").annotate(runs=runs)
    return dict(healthy.order_by().values_list("runs").annotate(Count("id")))


def installed_names() -> dict[str, str]:
    """Return the backends on approved nodes, by case-folded name; one query."""
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False).order_by("name")
    return {folded(name): name for name in rows.values_list("name", flat=True).distinct()}


def runnable(builds: Sequence[GalleryEntry], capabilities: Collection[str]) -> list[GalleryEntry]:
    """Return the entries that a machine with one of these capabilities can install, in their order."""
    return [build for build in builds if any(_fits(build, capability) for capability in capabilities)]


def _fits(build: GalleryEntry, capability: str) -> bool:
    if build.is_meta:
        return build_for_capability(build.capabilities or {}, capability) is not None
    return is_compatible(build, capability)


def choices(builds: Sequence[GalleryEntry]) -> dict[str, GalleryEntry]:
    """Return the entries that a person can choose, by folded name: no variants, no development builds."""
    choices_by_name: dict[str, GalleryEntry] = {}
    resolved = parents(builds)
    for build in builds:
        name = folded(build.name)
        if (build.is_meta or name not in resolved) and not name.endswith(DEVELOPMENT):
            choices_by_name.setdefault(name, build)
    return choices_by_name


def modality(tags: Iterable[str]) -> str:
    """Return the modality of a backend with these tags; "" if no tag names one."""
    return next((modality for modality, _ in _meanings_of(tags)), "")


def use_cases(tags: Iterable[str]) -> list[str]:
    """Return the use cases of a backend with these tags."""
    return list(dict.fromkeys(use_case for _, use_case in _meanings_of(tags)))


def _meanings_of(tags: Iterable[str]) -> Iterable[tuple[str, str]]:
    normalized = (tag.strip().lower().replace("_", "-").replace(" ", "-") for tag in tags)
    return (_MODALITY_AND_USE_CASE_BY_TAG[tag] for tag in normalized if tag in _MODALITY_AND_USE_CASE_BY_TAG)
