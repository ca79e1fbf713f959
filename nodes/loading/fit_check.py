"""Which nodes could take one more replica of a model now, every one of them with its reason. Writes nothing.

A decision names the best few and the nearest few. A map of the fleet has a word for each node: the same
questions in the same order, by the same functions that placement asks.
"""

from localai_cluster.kit import errors, names
from localai_cluster.web.shapes import FLAG, TEXT, UUID, Row, Shape, field
from nodes.decisions import fleet_cache, fleet_queries
from nodes.loading import load_explanation
from nodes.loading.reason_shapes import DECISION, decision
from nodes.placement.choose import has_memory
from nodes.placement.explain import FleetView, explain

NODE_FIT = Shape(
    "NodeFit",
    "Whether one node could take one more replica.",
    [
        field("node_id", UUID),
        field("reason", TEXT, "Why it cannot; empty if it can."),
        field("enough_vram", FLAG, "Whether what is needed, as far as known, is free there."),
    ],
)
FIT = Shape(
    "ModelFit",
    "Which nodes could take one more replica of a model now.",
    [
        field("model", TEXT),
        field("nodes", NODE_FIT.many, "Every node."),
        field("placement", DECISION.ref, "What placement would make of it."),
    ],
)
COMPONENTS = (NODE_FIT, FIT)


def node_fit(model_name: str) -> Row:
    """NotFound for a model that is not defined. The same number of queries for any number of nodes."""
    wanted = None if names.unprintable(model_name) else load_explanation.needs_of(model_name)
    if wanted is None:
        raise errors.NotFound("there is no such model")
    selector = fleet_queries.selectors_of([model_name])[model_name]
    fleet = fleet_cache.read_fleet(model_name, selector=selector, conflicts=wanted.conflicts)
    fleet = fleet_queries.mark_installed(fleet, wanted.definition.backend)
    view = FleetView(fleet, wanted.need, selector)
    found = view.decide()
    return FIT.of(
        model=model_name,
        nodes=[
            NODE_FIT.of(
                node_id=str(node.id),
                reason=str(found.refused.get(node.id, "")),
                enough_vram=has_memory(node, wanted.need),
            )
            for node in fleet
        ],
        placement=decision(explain(view, found)),
    )
