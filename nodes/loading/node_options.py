"""What an engine is told at a node: the definition's options, tuned to the machine unless that is off."""

from typing import Any
from uuid import UUID

from localai_cluster.kit import conf
from nodes.definitions.files import Definition, load_options
from nodes.models import BackendNode
from nodes.placement.tuning import Machine, tuned


def tuned_options(definition: Definition, node_id: UUID) -> dict[str, Any]:
    """R2.80; one query. A node that has gone, or tells nothing of its memory, changes little."""
    options = load_options(definition)
    if not conf.cluster().node_options:
        return options
    columns = ("total_vram", "vram_budget_bytes", "gpu_compute_capability")
    found = BackendNode.objects.filter(pk=node_id).values_list(*columns).first()
    return tuned(options, definition.backend, Machine(*found) if found else Machine())
