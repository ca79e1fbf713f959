"""Capabilities and use cases of gallery entries: which ones a machine of this cluster can run, and for what.

The tags of an entry name its use; the worker's own rule decides which machine can run it
(`contract/worker.md` §18.3, §18.4). Only `machines` and `installed_names` read rows.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from django.db.models import Case, F, Q, Value, When

from localai_cluster.gallery_index import GalleryEntry, compatible, folded, lookup
from localai_cluster.worker.hardware import SMALL_VRAM
from nodes.backends.catalogue import DEVELOPMENT, parents
from nodes.models import BackendNode, NodeBackend

NO_GPU = "default"
"""The capability of a machine without a usable GPU, which every cluster may have."""
_MEANINGS: Mapping[str, tuple[str, str]] = {
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
"""Modality and use case by tag. Other tags describe how a backend works, or nothing that a model needs."""


def machines() -> set[str]:
    """Return the capabilities of the healthy nodes, and the one of every cluster; one query.

    R1.77: a node of an older worker, which reports no capability, counts by the vendor of its GPUs, and as
    `default` if the vendor is unknown or their memory is too small for builds of that vendor.
    """
    small = Q(gpu_vendor="") | Q(total_vram__lte=SMALL_VRAM)
    of_older = Case(When(small, then=Value(NO_GPU)), default=F("gpu_vendor"))
    runs = Case(When(~Q(capability=""), then=F("capability")), default=of_older)
    healthy = BackendNode.objects.filter(status="healthy", node_type="backend").annotate(runs=runs)
    return {NO_GPU, *healthy.order_by().values_list("runs", flat=True).distinct()}


def installed_names() -> dict[str, str]:
    """Return the backends on approved nodes, by folded name; one query."""
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False).order_by("name")
    return {folded(name): name for name in rows.values_list("name", flat=True).distinct()}


def runnable(builds: Sequence[GalleryEntry], capabilities: Collection[str]) -> list[GalleryEntry]:
    """Return the entries that a machine with one of these capabilities can install, in their order."""
    return [build for build in builds if any(_fits(build, capability) for capability in capabilities)]


def _fits(build: GalleryEntry, capability: str) -> bool:
    if build.is_meta:
        return lookup(build.capabilities or {}, capability) is not None
    return compatible(build, capability)


def choices(builds: Sequence[GalleryEntry]) -> dict[str, GalleryEntry]:
    """Return the entries that a person chooses from, by folded name.

    Builds that another entry resolves to are left out, and development builds.
    """
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
    return (_MEANINGS[tag] for tag in normalized if tag in _MEANINGS)
