"""Simulate placements: place replicas one by one on a fleet, each as if those before it were loaded. Pure."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from uuid import UUID

from nodes.placement.choose import Candidate, Need, shares_of
from nodes.placement.evict import Eviction, without
from nodes.placement.explain import Explanation
from nodes.placement.gpus import filled, given_back, total
from nodes.placement.load_decision import LoadQuestion, Occupants, settle

AllowedNodes = Sequence[Set[UUID] | None]
"""For each replica, the allowed nodes; None: any node."""


def successive(
    question: LoadQuestion, allowed_nodes: AllowedNodes, occupants: Occupants | None = None
) -> Iterator[Explanation]:
    """Yield the decision for each replica.

    End after the first replica without allowed nodes that finds no node, as all after it would fail too. A
    replica that is evicted for one decision is gone for the next.
    """
    view = question.view
    nodes = {node.id: node for node in view.nodes}
    for node_ids in allowed_nodes:
        candidates = [node for node in nodes.values() if node_ids is None or node.id in node_ids]
        allowed_view = replace(view, nodes=candidates, restricted=view.restricted or node_ids is not None)
        allowed_question = replace(question, view=allowed_view)
        decision = allowed_view.decide()
        room = occupants.room(allowed_question, decision) if occupants is not None else None
        explanation = settle(allowed_question, decision, room)
        yield explanation
        if explanation.node is None:
            if node_ids is None:
                return
            continue
        node = explanation.node
        if room is not None and occupants is not None:
            node, occupants = _emptied(node, room), occupants.without([*room.victims, *room.leaving])
        nodes[node.id] = _with(node, explanation.replica_index, view.need)


def _emptied(node: Candidate, room: Eviction) -> Candidate:
    """Return the node after the eviction."""
    freed = without(node, [*room.victims, *room.leaving])
    return replace(freed, loaded=max(freed.loaded - len(room.victims), 0))


def _with(node: Candidate, index: int, need: Need) -> Candidate:
    """Return the node with the replica loaded; several replicas share the model's files."""
    disk = 0 if node.taken else max(need.disk - node.brought, 0)
    shares = shares_of(node, need)
    if shares is None:
        shares = filled(node.gpus, need.vram)
    used_vram = total(shares, need.vram)
    return replace(
        node,
        taken=node.taken | {index},
        loaded=node.loaded + 1,
        free_vram=node.free_vram - used_vram,
        available_vram=max(node.available_vram - used_vram, 0),
        gpus=given_back(node.gpus, ((index, -share) for index, share in shares.items())),
        available_disk=max(node.available_disk - disk, 0),
    )
