"""The need of a load for memory and disk, from the files of its model and the current settings."""

from collections.abc import Mapping
from typing import Any

from localai_cluster.kit import conf
from nodes.definitions.files import Definition, load_options
from nodes.definitions.sizes import ModelFiles
from nodes.placement import memory
from nodes.placement.choose import Need

VRAM, DISK, FILES, OWN_GPUS = "vram_needed", "disk_needed", "files_size", "own_gpus"
"""Payload keys of a waiting load's need: the first three in bytes, the last a boolean."""


def estimate_need(definition: Definition, files: ModelFiles) -> Need:
    """Return the need of a load (R2.40, R2.37)."""
    options = load_options(definition)
    vram = memory.estimate_vram(files.weights, files.header, options)
    own_gpus = bool(options.get("MainGPU") or options.get("TensorSplit"))
    return _need(vram, memory.required_disk(files.payload), files.payload, own_gpus=own_gpus)


def into_payload(payload: Mapping[str, Any], need: Need) -> dict[str, Any]:
    """Return the payload with the need of the load."""
    return {**payload, VRAM: need.vram, DISK: need.disk, FILES: need.files, OWN_GPUS: need.own_gpus}


def from_payload(payload: Mapping[str, Any]) -> Need:
    """Parse the need in an operation's payload; no need before the first placement."""
    return _need(
        payload.get(VRAM, 0),
        payload.get(DISK, 0),
        payload.get(FILES, 0),
        own_gpus=payload.get(OWN_GPUS, False),
    )


def _need(vram: int, disk: int, files: int, *, own_gpus: bool) -> Need:
    """Return the need; the operator's settings decide if a lack excludes a node (R2.32, R2.39)."""
    settings = conf.cluster()
    disk, files = (0, 0) if settings.shared_models else (disk, files)  # R2.36
    return Need(
        vram=vram,
        vram_required=settings.vram_policy == "require",
        disk=disk,
        disk_required=settings.disk_headroom_check,
        files=files,
        own_gpus=own_gpus,
    )
