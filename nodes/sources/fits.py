"""Where models that are not defined yet would fit, by the estimate and the verdicts of placement.

The fleet is read once for any number of models: four queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from localai_cluster.web.shapes import FLAG, TEXT, UUID, Row, Shape, field
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
        field("node_id", UUID),
        field("node_name", TEXT),
        field("fits", FLAG),
        field("reason", TEXT, "In words, also where it fits."),
    ],
)
FIT = Shape(
    "VariantFit",
    "Where a variant would fit; nodes that it fits come first, and at most 20 are named.",
    [
        field("fits", FLAG, "On any node.", nullable=True),
        field("summary", TEXT),
        field("nodes", NODE_FIT.many),
    ],
)
_GENERIC = {"name": "model", "backend": "llama-cpp", "parameters": {"model": "model"}}


@dataclass(frozen=True)
class FleetFit:
    """A snapshot of the nodes, to estimate where models fit."""

    nodes: Sequence[Candidate]
    now: datetime

    def fit(self, definition: Definition, files: ModelFiles) -> Row:
        """Return where a model with this definition and these files fits."""
        view = FleetView(self.nodes, estimate_need(definition, files), ANY_NODE)
        found = explain_memory(view, [], self._nobody)
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
        """Return True if a model of this size fits on any node; None if the size is not known."""
        if size <= 0 or not self._usable:
            return None
        if size not in self._known:
            need = estimate_need(parse_definition(_GENERIC, "catalogue"), ModelFiles(size, size))
            self._known[size] = any(has_memory(node, need) for node in self._usable)
        return self._known[size]

    @cached_property
    def _usable(self) -> list[Candidate]:
        """The healthy nodes that report memory, those with most of it first."""
        healthy = [node for node in self.nodes if node.status == "healthy" and node.reports_memory]
        return sorted(healthy, key=lambda node: -node.free_vram)

    @cached_property
    def _known(self) -> dict[int, bool]:
        return {}

    @cached_property
    def _nobody(self) -> ProtectionRules:
        """The rules for no replica: what would have to be unloaded is not looked for."""
        return ProtectionRules("", self.now, {}, {})


def read_fleet(now: datetime) -> FleetFit:
    """Return the nodes as they are now; four queries."""
    return FleetFit(fleet_cache.read_fleet(""), now)
