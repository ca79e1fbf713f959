"""Load options at a node: those of the definition, tuned to the machine unless that is disabled (R2.80).

They depend on the node and are part of no revision: the same definition may load with other values on another
node. On a node that reports its GPUs an engine sees only those that its slot has reserved.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from localai_cluster.kit import conf
from localai_cluster.messaging.messages import InstallReply
from nodes.definitions.files import Definition
from nodes.loading.load_attempts import NodeRefused
from nodes.models import BackendNode
from nodes.replicas.slots import Slot


def tuned_options(definition: Definition, node_id: UUID) -> dict[str, Any]:
    """Return the options for an engine at the node; one query."""
    options = dict(definition.options)
    if not conf.cluster().node_options:
        return options
    columns = ("total_vram", "vram_budget_bytes", "gpu_compute_capability")
    row = BackendNode.objects.filter(pk=node_id).values_list(*columns).first()
    return tune_options(options, definition.backend, Machine(*row) if row else Machine())


_GIB = 2**30
_MANAGED = (512, 2048)
"""Default batch sizes, which may be raised; any other value was configured and stays."""
_CONTEXT = 4096
_SCRATCH = 1536 * 16
"""Bytes per token of context that the larger batch allocates."""
_NEW_ENOUGH = 12
_PARALLEL = ((32 * _GIB, 8), (8 * _GIB, 4), (4 * _GIB, 2))
"""Parallel requests by usable memory; the first entry that fits applies."""


@dataclass(frozen=True)
class Machine:
    """The facts about a node that the options depend on."""

    total_vram: int = 0
    """Bytes; 0 = unknown."""
    budget: int = 0
    """Bytes; 0 = no limit."""
    compute_capability: str = ""

    @property
    def usable(self) -> int:
        """Usable memory in bytes."""
        return min(self.total_vram, self.budget) if self.budget else self.total_vram

    @property
    def generation(self) -> int:
        """Major version of the GPU's compute capability; 0 = unknown."""
        major = self.compute_capability.partition(".")[0]
        return int(major) if major.isascii() and major.isdigit() else 0


def tune_options(options: Mapping[str, Any], backend: str, machine: Machine) -> dict[str, Any]:
    """Return the options for this machine; configured values stay as they are."""
    result = dict(options)
    roomy = 0 < (options.get("ContextSize") or _CONTEXT) * _SCRATCH <= machine.usable // 4
    if result.get("NBatch") in _MANAGED:
        result["NBatch"] = 2048 if roomy and machine.generation >= _NEW_ENOUGH else 512
    extra = list(result.get("Options") or ())
    is_configured = any(
        str(option).partition(":")[0].strip() in ("parallel", "n_parallel") for option in extra
    )
    parallel = next((count for least, count in _PARALLEL if machine.usable >= least), 0)
    if "llama-cpp" in backend.lower() and roomy and parallel and not is_configured:
        result["Options"] = [*extra, f"parallel:{parallel}"]
    return result


def fingerprint(options: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of an engine's options."""
    content = json.dumps(options, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()


_MIB = 2**20


def reserved_gpus(slot: Slot) -> tuple[str, ...]:
    """Return the only GPUs that the engine may see; none: all of them."""
    return tuple(gpu.id for gpu in slot.gpus)


def check_gpus(reply: InstallReply, slot: Slot) -> None:
    """Raise NodeRefused if the engine sees other GPUs, whose memory other loads have reserved."""
    if slot.gpus and reply.gpus != reserved_gpus(slot):
        raise NodeRefused(f"its worker did not start it on the GPUs chosen there ({len(slot.gpus)})")


def with_gpu_split(options: Mapping[str, Any], slot: Slot) -> Mapping[str, Any]:
    """Return the options of `LoadModel`, with the split of an engine over several GPUs.

    Without it the engine would split by the memory that is free now, which may be another load's already.
    """
    if len(slot.gpus) < 2:
        return options
    return {**options, "TensorSplit": ",".join(str(max(gpu.amount // _MIB, 1)) for gpu in slot.gpus)}
