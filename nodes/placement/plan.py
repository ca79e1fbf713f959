"""What if: replicas placed one after another on a fleet, each as if those before it were loaded. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from nodes.placement.choose import Candidate, Need, shares_of
from nodes.placement.explain import Ending, Explanation, FleetView, explain
from nodes.placement.gpus import filled, given_back, total


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
