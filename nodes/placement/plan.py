"""What if: replicas placed one after another on a fleet, each as if those before it were loaded. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from nodes.placement.choose import Candidate, Need
from nodes.placement.explain import Ending, Explanation, FleetView, explain


def successive(snapshot: FleetView, replicas: int) -> Iterator[Explanation]:
    """The decision for each replica; ends with the first that finds no node, as all after it would."""
    for _ in range(replicas):
        told = explain(snapshot, snapshot.decide())
        yield told
        if told.outcome != Ending.PLACED or told.node is None:
            return
        chosen, taken = told.node.id, told.replica_index
        nodes = [_with(one, taken, snapshot.need) if one.id == chosen else one for one in snapshot.nodes]
        snapshot = replace(snapshot, nodes=nodes)


def _with(node: Candidate, index: int, need: Need) -> Candidate:
    """The node when the replica is loaded; the model's files are there once."""
    disk = 0 if node.taken else need.disk
    return replace(
        node,
        taken=node.taken | {index},
        loaded=node.loaded + 1,
        free_vram=node.free_vram - need.vram,
        available_vram=max(node.available_vram - need.vram, 0),
        available_disk=max(node.available_disk - disk, 0),
    )
