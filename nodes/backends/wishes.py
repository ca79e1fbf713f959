"""What may be asked about a backend, of whom and by whom: the words of a request, before anything is written.

Which nodes "all nodes" means is decided here, once for each request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from localai_cluster import errors
from nodes.backends import one_node
from nodes.backends.wave_plan import Options
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from operations.ledger import parts
from operations.models import Operation, OperationTarget, TargetStatus

INSTALL, UPGRADE, DELETE = "backend_install", "backend_upgrade", "backend_delete"
KINDS = {
    INSTALL: PendingBackendOp.Op.INSTALL,
    UPGRADE: PendingBackendOp.Op.UPGRADE,
    DELETE: PendingBackendOp.Op.DELETE,
}
"""What each kind of operation wants on its nodes."""


@dataclass(frozen=True)
class Wish:
    """What is asked about one backend, the same for all nodes."""

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
        """What people call it."""
        if self.uri and self.backend == one_node.subject(self.uri):
            return self.uri
        return f"{self.gallery}@{self.backend}" if self.gallery else self.backend

    def columns(self) -> dict[str, Any]:
        """As an intent keeps it."""
        return {name: value for name, value in asdict(self).items() if name != "kind"} | {
            "op": KINDS[self.kind]
        }

    def is_that_of(self, intent: PendingBackendOp) -> bool:
        """Whether an intent does what is wished. Galleries are refreshed, they are no wish (R1.108)."""
        return self._is_met_by({name: getattr(intent, name) for name in self.columns()})

    def is_that_of_operation(self, operation: Operation) -> bool:
        """Whether an operation was asked for the same."""
        return operation.kind == self.kind and self._is_met_by(Wish.of(operation).columns())

    def _is_met_by(self, other: Mapping[str, Any]) -> bool:
        mine = self.columns()
        if not self.gallery:  # any will do
            mine["gallery"] = other["gallery"]
        if not self.force:  # files that are replaced are there as well
            mine["force"] = other["force"]
        return all(other[name] == mine[name] for name in mine if name != "galleries")

    @classmethod
    def of(cls, operation: Operation) -> "Wish":
        """What this operation was asked for."""
        stored = {
            name: operation.payload[name] for name in cls.__dataclass_fields__ if name in operation.payload
        }
        return cls(**stored | {"kind": operation.kind})


@dataclass(frozen=True)
class LeftOut:
    """A node that an operation does not touch, and says so; `fails`: somebody has to decide about it."""

    node: BackendNode
    reason: str
    fails: bool = False

    def part(self, operation: Operation, now: datetime) -> OperationTarget:
        """Its part has ended before it began."""
        part = OperationTarget(operation=operation, node_id=self.node.id, node_name=self.node.name)
        end = (
            parts.end(TargetStatus.ERROR, error=self.reason)
            if self.fails
            else parts.end(TargetStatus.CANCELLED, reason=self.reason)
        )
        end(part, now)
        return part


@dataclass(frozen=True)
class Asked:
    """Who asks, and for which nodes."""

    nodes: Sequence[BackendNode]
    actor: str
    all_nodes: bool = False
    """Whether the nodes are all that there are for it at this moment."""
    request_id: str = ""
    client_address: str = ""
    parent: Operation | None = None
    waves: Options | None = None
    """None: on all nodes at once."""
    last_replicas: Sequence[str] = ()
    """Models whose last replica an upgrade in waves may stop."""
    left_out: Sequence[LeftOut] = ()
    drains: bool = False
    """Engines that the command stops get no new requests, and those that run may end before it is sent.

    Unlike waves, this spares no model's last replica.
    """

    @property
    def concerned(self) -> list[BackendNode]:
        """All that have a part."""
        return [*self.nodes, *(one.node for one in self.left_out)]

    def payload(self) -> dict[str, Any]:
        """What the operation keeps of it."""
        waves = asdict(self.waves) | {"last_replicas": list(self.last_replicas)} if self.waves else None
        drains = {"drains": True} if self.drains else {}
        return {"all_nodes": self.all_nodes} | drains | ({"waves": waves} if waves else {})


def everywhere(wish: Wish) -> tuple[list[BackendNode], list[LeftOut]]:
    """What "all nodes" means now: for an install all that may get it, else those that list it.

    A node that is draining is left out and named; if there is no other one, somebody has to decide.
    """
    nodes = BackendNode.objects.filter(node_type="backend").exclude(status="pending")
    if wish.kind != INSTALL:
        listed = NodeBackend.objects.named(wish.backend)
        nodes = nodes.filter(pk__in=listed.values("node_id"))
    found = list(nodes.order_by("name"))
    ready = [node for node in found if node.status != "draining"]
    why = "left out: {} is draining; try it again there when the drain has ended"
    away = [LeftOut(node, why.format(node.name), fails=not ready) for node in found if node not in ready]
    return ready, away


def unlisted(wish: Wish, nodes: Sequence[BackendNode]) -> list[BackendNode]:
    """Return the reachable nodes whose last inventory lacks the backend of an upgrade.

    Nothing is known of a node without an inventory; the one of a node that is away may be out of date.
    """
    if wish.kind != UPGRADE:
        return []
    listed = NodeBackend.objects.named(wish.backend).filter(node__in=[node.id for node in nodes])
    having = set(listed.values_list("node_id", flat=True))
    reachable = [node for node in nodes if node.status == "healthy" and node.inventory_at is not None]
    return [node for node in reachable if node.id not in having]


def refuse_unlisted(wish: Wish, nodes: Sequence[BackendNode]) -> None:
    """Raise Conflict, which names the nodes, for an upgrade of what they do not list."""
    if lacking := unlisted(wish, nodes):
        names = ", ".join(node.name for node in lacking)
        raise errors.Conflict(f"{wish.backend} is not installed on {names}; install it there", field="nodes")
