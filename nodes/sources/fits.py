"""Nodes that models without a definition would fit on, by the estimates and verdicts of placement.

The fleet is read once for any number of models: four queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from localai_cluster.web.shapes import EXAMPLE_NODE_ID, FLAG, TEXT, UUID, Row, Shape, field
from nodes.decisions import fleet_cache
from nodes.definitions.files import Definition, parse_definition
from nodes.definitions.sizes import ModelFiles
from nodes.loading.load_request import estimate_need
from nodes.placement.choose import ANY_NODE, Candidate, has_memory
from nodes.placement.evict import ProtectionRules
from nodes.placement.explain import FleetView, MemoryVerdict, explain_memory

NODE_FIT = Shape(
    "VariantNodeFit",
    "Whether a variant fits on a node.",
    [
        field("node_id", UUID, example=EXAMPLE_NODE_ID),
        field("node_name", TEXT, example="gpu-a"),
        field("fits", FLAG, example=True),
        field(
            "reason", TEXT, "In words, also where it fits.", example="fits on gpu-a (needs 1.9 of 20.0 GiB)"
        ),
    ],
)
FIT = Shape(
    "VariantFit",
    "Where a variant would fit; nodes that it fits come first, and at most 20 are named.",
    [
        field("fits", FLAG, "On any node.", example=True, nullable=True),
        field("summary", TEXT, example="fits on gpu-a (needs 1.9 of 20.0 GiB)"),
        field("nodes", NODE_FIT.many),
    ],
)
_PLACEHOLDER_DEFINITION = {"name": "model", "backend": "llama-cpp", "parameters": {"model": "model"}}


@dataclass(frozen=True)
class FleetFit:
    """A snapshot of the nodes, to estimate on which nodes models fit."""

    nodes: Sequence[Candidate]
    now: datetime

    def fit(self, definition: Definition, files: ModelFiles) -> Row:
        """Return the nodes that fit a model with this definition and these files."""
        view = FleetView(self.nodes, estimate_need(definition, files), ANY_NODE)
        found = explain_memory(view, [], self._no_protection)
        rows = [
            NODE_FIT.of(
                node_id=str(entry.node.id),
                node_name=entry.node.name,
                fits=entry.verdict == MemoryVerdict.FITS,
                reason=entry.describe(),
            )
            for entry in found.nodes
        ]
        if not rows:
            return FIT.of(fits=None, summary="no node is registered", nodes=[])
        verdicts = {entry.verdict for entry in found.nodes}
        is_unknown = MemoryVerdict.UNKNOWN in verdicts and MemoryVerdict.FITS not in verdicts
        fits = None if is_unknown else MemoryVerdict.FITS in verdicts
        return FIT.of(fits=fits, summary=found.describe(), nodes=rows)

    def fits_size(self, size: int) -> bool | None:
        """Return True if a model of `size` bytes fits any node; None if the size or all memory is unknown."""
        if size <= 0 or not self._usable_nodes:
            return None
        if size not in self._fits_by_size:
            need = estimate_need(
                parse_definition(_PLACEHOLDER_DEFINITION, "catalogue"), ModelFiles(size, size)
            )
            self._fits_by_size[size] = any(has_memory(node, need) for node in self._usable_nodes)
        return self._fits_by_size[size]

    @cached_property
    def _usable_nodes(self) -> list[Candidate]:
        """The healthy nodes that report memory; nodes with the most free memory come first."""
        healthy = [node for node in self.nodes if node.status == "healthy" and node.reports_memory]
        return sorted(healthy, key=lambda node: -node.free_vram)

    @cached_property
    def _fits_by_size(self) -> dict[int, bool]:
        return {}

    @cached_property
    def _no_protection(self) -> ProtectionRules:
        """Protection rules for an empty set of replicas: no eviction is considered."""
        return ProtectionRules("", self.now, {}, {})


def read_fleet(now: datetime) -> FleetFit:
    """Return the current nodes. Four queries."""
    return FleetFit(fleet_cache.read_fleet(""), now)
