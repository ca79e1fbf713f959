"""An engine on the GPUs that its slot has reserved: what its worker and the engine itself are told.

The worker makes it see those GPUs only and says so in its answer. One that is split over several is told how,
by what is reserved on each: it would go by what is free there now, which may be another load's already.
"""

from collections.abc import Mapping
from typing import Any

from localai_cluster.messaging.messages import InstallReply
from nodes.loading.failures import NodeRefused
from nodes.replicas.slots import Slot

_MIB = 2**20


def reserved_gpus(slot: Slot) -> tuple[str, ...]:
    """The only GPUs that the engine may see; none: all of them."""
    return tuple(one.id for one in slot.gpus)


def check_gpus(reply: InstallReply, slot: Slot) -> None:
    """Raises NodeRefused for an engine that sees other GPUs: it would take what others have reserved."""
    if slot.gpus and reply.gpus != reserved_gpus(slot):
        raise NodeRefused(f"its worker did not start it on the GPUs chosen there ({len(slot.gpus)})")


def with_gpu_split(options: Mapping[str, Any], slot: Slot) -> Mapping[str, Any]:
    """The options of `LoadModel`, with the shares of an engine that has several GPUs."""
    if len(slot.gpus) < 2:
        return options
    return {**options, "TensorSplit": ",".join(str(max(one.amount // _MIB, 1)) for one in slot.gpus)}
