"""What if: replicas placed one after another on a fleet, each as if those before it were loaded. Pure."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from uuid import UUID

from nodes.placement.choose import Candidate, Need, shares_of
from nodes.placement.evict import Eviction, without
from nodes.placement.explain import Explanation
from nodes.placement.gpus import filled, given_back, total
from nodes.placement.settle import LoadQuestion, Occupants, settle

Wishes = Sequence[Set[UUID] | None]
"""For each replica the nodes that it is for; None: any."""


def successive(
    question: LoadQuestion, wishes: Wishes, occupants: Occupants | None = None
) -> Iterator[Explanation]:
    """The decision for each replica; ends with the first for any node that finds none, as all after it would.

    What is evicted for one is gone for the next.
    """
    view = question.view
    nodes = {node.id: node for node in view.nodes}
    for only in wishes:
        among = [node for node in nodes.values() if only is None or node.id in only]
        looking = replace(view, nodes=among, restricted=view.restricted or only is not None)
        asked = replace(question, view=looking)
        decision = looking.decide()
        room = occupants.room(asked, decision) if occupants is not None else None
        told = settle(asked, decision, room)
        yield told
        if told.node is None:
            if only is None:
                return
            continue
        left = told.node
        if room is not None and occupants is not None:
            left, occupants = _emptied(left, room), occupants.without([*room.victims, *room.leaving])
        nodes[left.id] = _with(left, told.replica_index, view.need)


def _emptied(node: Candidate, room: Eviction) -> Candidate:
    """The node when those have gone that make room."""
    freed = without(node, [*room.victims, *room.leaving])
    return replace(freed, loaded=max(freed.loaded - len(room.victims), 0))


def _with(node: Candidate, index: int, need: Need) -> Candidate:
    """The node when the replica is loaded; the model's files are there once."""
    disk = 0 if node.taken else max(need.disk - node.brought, 0)
    shares = shares_of(node, need)
    if shares is None:
        shares = filled(node.gpus, need.vram)
    taken = total(shares, need.vram)
    return replace(
        node,
        taken=node.taken | {index},
        loaded=node.loaded + 1,
        free_vram=node.free_vram - taken,
        available_vram=max(node.available_vram - taken, 0),
        gpus=given_back(node.gpus, ((index, -share) for index, share in shares.items())),
        available_disk=max(node.available_disk - disk, 0),
    )
