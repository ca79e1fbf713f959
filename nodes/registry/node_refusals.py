"""Refusal of a request for many nodes: the nodes that cannot take it, each with the reason."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from uuid import UUID

from localai_cluster.kit import errors

_MAX_SHOWN_NODES = 10
GONE_REASON = "the node is no longer registered"


@dataclass(frozen=True)
class NodeRefusal:
    """One node and the reason why it cannot take the request."""

    node_id: UUID
    node_name: str
    reason: str

    def __str__(self) -> str:
        return self.reason if self.node_name in self.reason else f"{self.node_name}: {self.reason}"


class NodesRefused(errors.Conflict):
    """Some of the requested nodes cannot take the request, so nothing has started on any node."""

    code = "nodes_refused"

    def __init__(self, refusals: Sequence[NodeRefusal], *, field: str) -> None:
        more = len(refusals) - _MAX_SHOWN_NODES
        text = "; ".join(map(str, refusals[:_MAX_SHOWN_NODES])) + (f" and {more} more" if more > 0 else "")
        nodes = [asdict(refusal) | {"node_id": str(refusal.node_id)} for refusal in refusals]
        super().__init__(text, field=field, refusals=nodes)
