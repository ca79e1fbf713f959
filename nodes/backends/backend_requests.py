"""Requests for work on backends: the command, the nodes and the requester, before anything is written.

The meaning of "all nodes" is decided here, once for each request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from localai_cluster.kit import errors
from nodes.backends import node_commands
from nodes.backends.wave_plan import Options
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from operations.ledger import target_changes
from operations.models import Operation, OperationTarget, TargetStatus

INSTALL, UPGRADE, DELETE = "backend_install", "backend_upgrade", "backend_delete"
KINDS = {
    INSTALL: PendingBackendOp.Op.INSTALL,
    UPGRADE: PendingBackendOp.Op.UPGRADE,
    DELETE: PendingBackendOp.Op.DELETE,
}
"""The op of an intent by the kind of its operation."""


@dataclass(frozen=True)
class Wish:
    """A request for one backend, equal for all nodes."""

    kind: str
    backend: str
    gallery: str = ""
    uri: str = ""
    name: str = ""
    alias: str = ""
    galleries: str = ""
    force: bool = False

    @property
    def element(self) -> str:
        """The name of the backend in pages and texts."""
        if self.uri and self.backend == node_commands.subject(self.uri):
            return self.uri
        return f"{self.gallery}@{self.backend}" if self.gallery else self.backend

    def columns(self) -> dict[str, Any]:
        """Return the columns of an intent for this request."""
        return {name: value for name, value in asdict(self).items() if name != "kind"} | {
            "op": KINDS[self.kind]
        }

    def is_that_of(self, intent: PendingBackendOp) -> bool:
        """Return True if the intent does what is requested; galleries do not count (R1.108)."""
        # Galleries are refreshed in the row, so different ones are no different request.
        return self._is_met_by({name: getattr(intent, name) for name in self.columns()})

    def is_that_of_operation(self, operation: Operation) -> bool:
        """Return True if the operation was created for an equal request."""
        return operation.kind == self.kind and self._is_met_by(Wish.of(operation).columns())

    def _is_met_by(self, columns: Mapping[str, Any]) -> bool:
        required = self.columns()
        if not self.gallery:  # any gallery matches
            required["gallery"] = columns["gallery"]
        if not self.force:  # a forced install leaves the files there as well
            required["force"] = columns["force"]
        return all(columns[name] == required[name] for name in required if name != "galleries")

    @classmethod
    def of(cls, operation: Operation) -> "Wish":
        """Parse the operation's payload."""
        stored = {
            name: operation.payload[name] for name in cls.__dataclass_fields__ if name in operation.payload
        }
        return cls(**stored | {"kind": operation.kind})


@dataclass(frozen=True)
class LeftOut:
    """A node that an operation leaves out, with the reason.

    With `fails` the target of the node fails, so that an operator has to decide about it.
    """

    node: BackendNode
    reason: str
    fails: bool = False

    def part(self, operation: Operation, now: datetime) -> OperationTarget:
        """Return the target of the node, which has already ended."""
        target = OperationTarget(operation=operation, node_id=self.node.id, node_name=self.node.name)
        end = (
            target_changes.end(TargetStatus.ERROR, error=self.reason)
            if self.fails
            else target_changes.end(TargetStatus.CANCELLED, reason=self.reason)
        )
        end(target, now)
        return target


@dataclass(frozen=True)
class Asked:
    """The scope of a request: its nodes, its requester, and how it proceeds from node to node."""

    nodes: Sequence[BackendNode]
    actor: str
    all_nodes: bool = False
    """True if the request is for all nodes that are eligible at this moment."""
    request_id: str = ""
    client_address: str = ""
    parent: Operation | None = None
    waves: Options | None = None
    """None: all nodes at once."""
    last_replicas: Sequence[str] = ()
    """Models whose last replica an upgrade in waves may stop."""
    left_out: Sequence[LeftOut] = ()
    drains: bool = False
    """Take replicas out of the picks before the command stops them, and wait for their running requests.

    Unlike waves, this does not protect a model's last replica.
    """

    @property
    def concerned(self) -> list[BackendNode]:
        """All nodes with a target."""
        return [*self.nodes, *(left_out.node for left_out in self.left_out)]

    def payload(self) -> dict[str, Any]:
        """Return the part of the operation's payload that stores the scope."""
        waves = asdict(self.waves) | {"last_replicas": list(self.last_replicas)} if self.waves else None
        drains = {"drains": True} if self.drains else {}
        return {"all_nodes": self.all_nodes} | drains | ({"waves": waves} if waves else {})


def everywhere(request: Wish) -> tuple[list[BackendNode], list[LeftOut]]:
    """Return the nodes that "all nodes" means now, and those left out.

    An install is for all nodes that can get it, other requests for the nodes that list the backend. A
    draining node is left out and named; if all nodes are draining, their targets fail.
    """
    nodes = BackendNode.objects.filter(node_type="backend").exclude(status="pending")
    if request.kind != INSTALL:
        listed = NodeBackend.objects.named(request.backend)
        nodes = nodes.filter(pk__in=listed.values("node_id"))
    eligible = list(nodes.order_by("name"))
    ready = [node for node in eligible if node.status != "draining"]
    reason = "left out: {} is draining; try it again there when the drain has ended"
    away = [
        LeftOut(node, reason.format(node.name), fails=not ready) for node in eligible if node not in ready
    ]
    return ready, away


def unlisted(request: Wish, nodes: Sequence[BackendNode]) -> list[BackendNode]:
    """Return the reachable nodes whose last inventory lacks the backend of an upgrade.

    A node without an inventory may have it, and the inventory of an unreachable node may be out of date.
    """
    if request.kind != UPGRADE:
        return []
    listed = NodeBackend.objects.named(request.backend).filter(node__in=[node.id for node in nodes])
    nodes_with_backend = set(listed.values_list("node_id", flat=True))
    reachable = [node for node in nodes if node.status == "healthy" and node.inventory_at is not None]
    return [node for node in reachable if node.id not in nodes_with_backend]


def refuse_unlisted(request: Wish, nodes: Sequence[BackendNode]) -> None:
    """Raise Conflict, which names the nodes, for an upgrade of what they do not list."""
    if lacking_nodes := unlisted(request, nodes):
        names = ", ".join(node.name for node in lacking_nodes)
        raise errors.Conflict(
            f"{request.backend} is not installed on {names}; install it there", field="nodes"
        )
