"""Requests to install, upgrade or delete a backend on nodes, and their order on each node.

A request for all nodes selects the nodes once, when it is made. On each node the work is a row of
`PendingBackendOp` (an intent), of which a node has at most one for each backend and op. The rows of a backend
run one at a time, in the order of their requests.

A request for which an equal row exists joins this row. If another op was requested after the row, the row
would run too early for the new request, and the other op would have the last word. Then a row that has not
begun moves to the end; if it has begun, the new request is refused.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from localai_cluster.kit import errors
from localai_cluster.kit.leases import as_array
from nodes.backends import node_commands
from nodes.backends.waves import Options, nodes_at_once
from nodes.models import BackendNode, NodeBackend, PendingBackendOp
from nodes.registry.node_refusals import GONE_REASON, NodeRefusal, NodesRefused
from operations.ledger import target_changes
from operations.ledger.admission import Requester
from operations.models import Operation, OperationTarget, TargetStatus

INSTALL, UPGRADE, DELETE = "backend_install", "backend_upgrade", "backend_delete"
KINDS = {
    INSTALL: PendingBackendOp.Op.INSTALL,
    UPGRADE: PendingBackendOp.Op.UPGRADE,
    DELETE: PendingBackendOp.Op.DELETE,
}
"""The op of an intent by the kind of its operation."""


@dataclass(frozen=True)
class BackendRequest:
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
        """The name of the backend on pages and in messages."""
        if self.uri and self.backend == node_commands.subject(self.uri):
            return self.uri
        return f"{self.gallery}@{self.backend}" if self.gallery else self.backend

    def columns(self) -> dict[str, Any]:
        """Return the columns of an intent for this request."""
        return {name: value for name, value in asdict(self).items() if name != "kind"} | {
            "op": KINDS[self.kind]
        }

    def matches_intent(self, intent: PendingBackendOp) -> bool:
        """Return True if the intent has the same request; galleries are not compared (R1.108)."""
        # Galleries are refreshed in the row, so different ones are no different request.
        return self._matches_columns({name: getattr(intent, name) for name in self.columns()})

    def matches_operation(self, operation: Operation) -> bool:
        """Return True if the operation was created for an equal request."""
        return operation.kind == self.kind and self._matches_columns(BackendRequest.of(operation).columns())

    def _matches_columns(self, columns: Mapping[str, Any]) -> bool:
        required = self.columns()
        if not self.gallery:  # any gallery matches
            required["gallery"] = columns["gallery"]
        if not self.force:  # a forced install leaves the files there as well
            required["force"] = columns["force"]
        return all(columns[name] == required[name] for name in required if name != "galleries")

    @classmethod
    def of(cls, operation: Operation) -> "BackendRequest":
        """Parse the operation's payload."""
        stored = {
            name: operation.payload[name] for name in cls.__dataclass_fields__ if name in operation.payload
        }
        return cls(**stored | {"kind": operation.kind})


@dataclass(frozen=True)
class ExcludedNode:
    """A node that an operation leaves out, with the reason.

    With `fails` the target of the node fails, so that an operator must decide about the node.
    """

    node: BackendNode
    reason: str
    fails: bool = False

    def ended_target(self, operation: Operation, now: datetime) -> OperationTarget:
        """Return the target of the excluded node, which has already ended."""
        target = OperationTarget(operation=operation, node_id=self.node.id, node_name=self.node.name)
        end = (
            target_changes.end(TargetStatus.ERROR, error=self.reason)
            if self.fails
            else target_changes.end(TargetStatus.CANCELLED, reason=self.reason)
        )
        end(target, now)
        return target


@dataclass(frozen=True)
class RequestScope:
    """The scope of a request: its nodes, its requester, and how it proceeds from node to node."""

    nodes: Sequence[BackendNode]
    by: Requester
    all_nodes: bool = False
    """True if the request is for all nodes that are eligible at this moment."""
    parent: Operation | None = None
    waves: Options | None = None
    """Options of the waves; None for all nodes at once."""
    last_replicas: Sequence[str] = ()
    """Models whose last replica an upgrade in waves may stop."""
    left_out: Sequence[ExcludedNode] = ()
    drains: bool = False
    """True if the node's replicas are drained before the command stops them.

    The command waits for their running requests. Unlike waves, a drain does not protect a model's last
    replica.
    """
    repeats: Operation | None = None
    """The operation that this request repeats."""

    @property
    def concerned(self) -> list[BackendNode]:
        """All nodes with a target, including excluded nodes."""
        return [*self.nodes, *(left_out.node for left_out in self.left_out)]

    def payload(self) -> dict[str, Any]:
        """Return the part of the operation's payload that stores the scope."""
        waves = None
        if self.waves:
            # For clients; a percentage is resolved again when the request is repeated for other nodes.
            at_once = nodes_at_once(self.waves.max_unavailable, len(self.nodes))
            waves = asdict(self.waves) | {"last_replicas": list(self.last_replicas), "at_once": at_once}
        drains = {"drains": True} if self.drains else {}
        return {"all_nodes": self.all_nodes} | drains | ({"waves": waves} if waves else {})


_NODE_COLUMNS = ("name", "node_type", "status", "drained_at", "drain_is_own", "inventory_at")


def nodes_for_request(ids: Iterable[UUID]) -> dict[UUID, BackendNode]:
    """Return the registered nodes among `ids`, with the columns that admission reads."""
    return {node.id: node for node in BackendNode.objects.filter(pk__in=as_array(ids)).only(*_NODE_COLUMNS)}


def select_all_nodes(request: BackendRequest) -> tuple[list[BackendNode], list[ExcludedNode]]:
    """Return the nodes for "all nodes" at this time, and the excluded nodes.

    An install is for all nodes that can get it, other requests for the nodes that list the backend. A
    draining node is excluded and gets a target with the reason; if all nodes are draining, their targets
    fail.
    """
    nodes = BackendNode.objects.filter(node_type="backend").exclude(status="pending")
    if request.kind != INSTALL:
        listed = NodeBackend.objects.named(request.backend)
        nodes = nodes.filter(pk__in=listed.values("node_id"))
    eligible = list(nodes.order_by("name").only(*_NODE_COLUMNS))
    ready = [node for node in eligible if node.status != "draining"]
    reason = "left out: {} is draining; try it again there when the drain has ended"
    away = [
        ExcludedNode(node, reason.format(node.name), fails=not ready)
        for node in eligible
        if node not in ready
    ]
    return ready, away


def nodes_without_backend(request: BackendRequest, nodes: Sequence[BackendNode]) -> list[BackendNode]:
    """Return the reachable nodes whose last inventory lacks the backend of an upgrade.

    A node without an inventory may have the backend, and the inventory of an unreachable node may be out of
    date.
    """
    if request.kind != UPGRADE:
        return []
    listed = NodeBackend.objects.named(request.backend).filter(node__in=[node.id for node in nodes])
    nodes_with_backend = set(listed.values_list("node_id", flat=True))
    reachable = [node for node in nodes if node.status == "healthy" and node.inventory_at is not None]
    return [node for node in reachable if node.id not in nodes_with_backend]


def refuse_unlisted(request: BackendRequest, nodes: Sequence[BackendNode]) -> None:
    """Raise Conflict, with the names of the nodes, for an upgrade of a backend that these do not list."""
    if lacking_nodes := nodes_without_backend(request, nodes):
        names = ", ".join(node.name for node in lacking_nodes)
        raise errors.Conflict(
            f"{request.backend} is not installed on {names}; install it there", field="nodes"
        )


def chosen_nodes(request: BackendRequest, ids: Collection[UUID], *, field: str) -> list[BackendNode]:
    """Return these nodes, sorted by name. Raise NodesRefused if one of the nodes takes no commands."""
    registered = nodes_for_request(ids)
    if any(id not in registered or node_commands.refusal(registered[id]) for id in ids):
        refuse_by_name(request, ids, field=field)
    return sorted(registered.values(), key=lambda node: node.name)


def refuse_by_name(request: BackendRequest, ids: Collection[UUID], *, field: str) -> None:
    """Raise NodesRefused, with names and reasons, if any of the nodes cannot take the request now.

    At most three queries.
    """
    registered = nodes_for_request(ids)
    reasons = {
        id: GONE_REASON if id not in registered else node_commands.refusal(registered[id]) for id in set(ids)
    }
    nodes = [node for id, node in registered.items() if not reasons[id]]
    rows: dict[UUID, list[PendingBackendOp]] = {}
    for intent in PendingBackendOp.objects.filter(node__in=as_array(registered), backend=request.backend):
        rows.setdefault(intent.node_id, []).append(intent)
    orders = {node.id: RequestOrder.of(request, rows.get(node.id, ())) for node in nodes}
    for node in nodes_without_backend(request, [node for node in nodes if not orders[node.id].same]):
        reasons[node.id] = f"{request.backend} is not installed on {node.name}; install it there"
    for node in nodes:
        try:
            orders[node.id].refuse(request, {node.id: node.name}, is_load=False)
        except errors.Conflict as refusal:
            reasons[node.id] = refusal.message
    names = {id: registered[id].name if id in registered else str(id) for id in reasons}
    refused = [NodeRefusal(id, names[id], reason) for id, reason in reasons.items() if reason]
    if refused:
        raise NodesRefused(sorted(refused, key=lambda refusal: refusal.node_name), field=field)


_SMALLEST_TIME_STEP = timedelta(microseconds=1)


@dataclass(frozen=True)
class RequestOrder:
    """The intents for one backend, by node.

    `same` has the intent of the requested operation, `others` the intents of other operations in execution
    order.
    """

    same: Mapping[UUID, PendingBackendOp]
    others: Mapping[UUID, list[PendingBackendOp]]

    @property
    def nodes(self) -> Set[UUID]:
        """The nodes with rows of the backend."""
        return self.same.keys() | self.others.keys()

    @classmethod
    def of(cls, request: BackendRequest, rows: Iterable[PendingBackendOp]) -> "RequestOrder":
        """Sort the rows of the requested backend."""
        same: dict[UUID, PendingBackendOp] = {}
        others: dict[UUID, list[PendingBackendOp]] = {}
        for row in sorted(rows, key=lambda row: row.turn):
            if row.op == KINDS[request.kind]:
                same[row.node_id] = row
            else:
                others.setdefault(row.node_id, []).append(row)
        return cls(same, others)

    def followed_rows(self) -> list[PendingBackendOp]:
        """Return the rows of the requested op that a different request follows."""
        return [row for row in self.same.values() if self._followers(row)]

    def preceding_row(self, row: PendingBackendOp) -> PendingBackendOp | None:
        """Return the row of another op that runs before this row on the same node; None without one."""
        rows = self.others.get(row.node_id, ())
        return next((candidate for candidate in rows if candidate.turn < row.turn), None)

    def end(self, now: datetime) -> datetime:
        """Return a time of request that is later than in all rows, even if clocks differ."""
        rows = [*self.same.values(), *(row for rows in self.others.values() for row in rows)]
        return max([now, *(row.requested_at + _SMALLEST_TIME_STEP for row in rows)])

    def can_join(self, open_nodes: Collection[UUID]) -> bool:
        """Return True if the equal active operation, with open targets on `open_nodes`, can be joined."""
        return not self.followed_rows() and all(id in self.same or id in open_nodes for id in self.others)

    def refuse(self, request: BackendRequest, names: Mapping[UUID, str], *, is_load: bool) -> None:
        """Raise Conflict with the operation if the request cannot join the queue.

        A load never waits for a different request on its node, and never reverses its effect.
        """
        for row in self.same.values():
            node, followers = names[row.node_id], self._followers(row)
            if row.cancelled_at is not None:
                raise errors.Conflict(
                    f"{row} on {node} is being cancelled; ask again in a few seconds",
                    operation=row.operation_id,
                )
            if not request.matches_intent(row):
                state = "in progress" if row.has_begun else "waiting, and asks for something else"
                raise _conflict(row, node, state)
            if followers and row.has_begun:
                raise _conflict(followers[-1], node, f"to follow {row}, which is in progress")
        if is_load and self.others:
            first = next(iter(self.others.values()))[0]
            raise _conflict(first, names[first.node_id], "in progress" if first.has_begun else "waiting")

    def _followers(self, row: PendingBackendOp) -> list[PendingBackendOp]:
        return [follower for follower in self.others.get(row.node_id, ()) if follower.turn > row.turn]


def _conflict(row: PendingBackendOp, node: str, state: str) -> errors.Conflict:
    return errors.Conflict(
        f"{row} on {node} is {state} (operation {row.operation_id})",
        operation=row.operation_id,
        kind=f"backend_{row.op}",
        state="processing" if row.has_begun else "pending",
    )
