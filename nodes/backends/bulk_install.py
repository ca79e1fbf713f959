"""One install on many nodes: a node that cannot take it gets a target with the reason, others continue."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from localai_cluster.kit import errors
from nodes.backends import admission, node_commands
from nodes.backends.backend_requests import Asked, LeftOut, Wish
from nodes.models import BackendNode
from operations.ledger.admission import Admission

_TRIES = 3


def request(command: Wish, scope: Asked, node_ids: Sequence[UUID], *, now: datetime) -> Admission:
    """Admit one operation for all of these nodes, or join the active one. The scope has no nodes yet.

    Raise Conflict only if work on these nodes changes faster than it can be read.
    """
    refusals: dict[UUID, str] = {}
    for _ in range(_TRIES):
        chosen = _with_nodes(scope, node_ids, refusals)
        try:
            return admission.ask(command, chosen, now=now)
        except (errors.Conflict, errors.NotFound):
            conflicting = admission.refusals_by_node(command, chosen.nodes)
            if not conflicting and BackendNode.objects.filter(pk__in=node_ids).count() == len(chosen.nodes):
                raise
            refusals |= conflicting
    raise errors.Conflict("operations on these nodes change too often; try again", field="nodes")


def _with_nodes(scope: Asked, node_ids: Sequence[UUID], refusals: Mapping[UUID, str]) -> Asked:
    """Sort the nodes into those that get the command and those that are left out with a reason."""
    registered = BackendNode.objects.in_bulk(list(set(node_ids)))
    nodes: list[BackendNode] = []
    left_out: list[LeftOut] = []
    for id in sorted(set(node_ids)):
        node = registered.get(id)
        if node is None:
            removed_node = BackendNode(id=id, name=str(id))
            left_out.append(LeftOut(removed_node, "the node is no longer registered", fails=True))
        elif reason := refusals.get(id) or node_commands.refusal(node):
            left_out.append(LeftOut(node, reason, fails=True))
        else:
            nodes.append(node)
    return replace(scope, nodes=sorted(nodes, key=lambda node: node.name), left_out=left_out)
