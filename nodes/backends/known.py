"""What entries of the galleries are good for: which of them some machine here can run, and for what.

The tags of an entry say what it does; the worker's own rule says which machine can run it
(`contract/worker.md` §18.3, §18.4). Only `machines` and `installed_names` read rows.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from django.db.models import Case, F, Q, Value, When

from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.worker.build_selection import compatible, lookup
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
"""Tag to modality and use case. Other tags say how a backend works, or nothing that a model needs."""


def machines() -> set[str]:
    """What the healthy nodes can run, and what every cluster can; one query.

    R1.77: a node of an older worker, which tells no capability, counts by the vendor of its GPUs, and as
    `default` if none is known or their memory is too small for builds of that vendor.
    """
    small = Q(gpu_vendor="") | Q(total_vram__lte=SMALL_VRAM)
    of_older = Case(When(small, then=Value(NO_GPU)), default=F("gpu_vendor"))
    runs = Case(When(~Q(capability=""), then=F("capability")), default=of_older)
    healthy = BackendNode.objects.filter(status="healthy", node_type="backend").annotate(runs=runs)
    return {NO_GPU, *healthy.order_by().values_list("runs", flat=True).distinct()}


def installed_names() -> dict[str, str]:
    """The backends on approved nodes, by folded name; one query."""
    rows = NodeBackend.objects.filter(node__approved_at__isnull=False).order_by("name")
    return {folded(name): name for name in rows.values_list("name", flat=True).distinct()}


def runnable(builds: Sequence[GalleryEntry], capabilities: Collection[str]) -> list[GalleryEntry]:
    """The entries that a machine with one of these capabilities can install, in their order."""
    return [build for build in builds if any(_fits(build, one) for one in capabilities)]


def _fits(build: GalleryEntry, capability: str) -> bool:
    if build.is_meta:
        return lookup(build.capabilities or {}, capability) is not None
    return compatible(build, capability)


def choices(builds: Sequence[GalleryEntry]) -> dict[str, GalleryEntry]:
    """What a person chooses from, by folded name: neither builds of another entry nor development ones."""
    found: dict[str, GalleryEntry] = {}
    resolved = parents(builds)
    for build in builds:
        name = folded(build.name)
        if (build.is_meta or name not in resolved) and not name.endswith(DEVELOPMENT):
            found.setdefault(name, build)
    return found


def modality(tags: Iterable[str]) -> str:
    """In one word what a backend with these tags works on; "" if no tag says it."""
    return next((meant[0] for meant in _meant(tags)), "")


def use_cases(tags: Iterable[str]) -> list[str]:
    """What a backend with these tags is used for."""
    return list(dict.fromkeys(meant[1] for meant in _meant(tags)))


def _meant(tags: Iterable[str]) -> Iterable[tuple[str, str]]:
    written = (tag.strip().lower().replace("_", "-").replace(" ", "-") for tag in tags)
    return (_MEANINGS[tag] for tag in written if tag in _MEANINGS)
