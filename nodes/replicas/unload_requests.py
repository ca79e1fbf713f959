"""Creation of unloads and deletions of a model: their nodes, and the operations that they exclude.

An operation for one node owns the model on that node. An operation for the cluster owns a key suffix of the
model, as each of its loads does, so unloads and loads exclude each other. The nodes are chosen here, when the
operation is created.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from localai_cluster.kit import conf, errors
from nodes.decisions import decision_log, snapshot_log
from nodes.decisions.decision_log import DecisionRecord
from nodes.decisions.snapshot_log import Section, State
from nodes.models import BEING_LOADED, BackendNode, DecisionKind, NodeModel, NodeType
from nodes.models.replica import ALL_SUFFIX, NodeModelQuerySet, load_key
from nodes.placement.evict import join_names
from nodes.placement.explain import LONGEST_SENTENCE, DecisionOutcome, truncate
from nodes.replicas import drains, terminations
from operations.ledger.admission import Admission, OperationRequest, admit, in_progress
from operations.models import Operation

_COLUMNS = ("id", "node_id", "node__name", "replica_index", "state")


def record_unload(
    model_name: str,
    operation_id: UUID,
    *,
    because: str,
    node_id: UUID | None,
    index: int | None,
    now: datetime,
) -> None:
    """Record the reason for the unload of all replicas, of one node's, or of one. Three statements."""
    rows = NodeModel.objects.of(model_name).values_list(*_COLUMNS)
    replicas = {row[0]: row[1:] for row in rows}
    of_operation = {
        "because": because,
        "node": None if node_id is None else str(node_id),
        "index": index,
    }
    snapshot_ref = snapshot_log.store_snapshot(
        {f"held/{model_name}": Section(replicas), f"unload/{operation_id}": Section(of_operation)}, now=now
    )
    explanation = decision_log.explanation_without_fleet(
        DecisionOutcome.UNLOADING, _sentence(replicas, of_operation)
    )
    decision_log.record(
        DecisionRecord(model_name, operation_id, explanation, snapshot_ref, DecisionKind.UNLOAD), now=now
    )


def replay_unload(state: State, model_name: str, operation_id: UUID | None) -> str | None:
    """Return the sentence of the record, from its snapshot; None if that lacks the operation."""
    request = state.get(f"unload/{operation_id}")
    return _sentence(state.get(f"held/{model_name}", {}), request) if request else None


def _sentence(replicas: Mapping[Any, Any], request: Mapping[str, Any]) -> str:
    terminating = [
        f"{index} on {node}"
        for node_id, node, index, state in replicas.values()
        if state in drains.HELD
        and request["node"] in (None, str(node_id))
        and request["index"] in (None, index)
    ]
    outcome = f"replicas that leave: {join_names(terminating)}" if terminating else "no replica is there"
    return truncate(f"{request['because']}; {outcome}", LONGEST_SENTENCE)


UNLOAD, DELETE = drains.UNLOAD, drains.DELETE
LONGEST_GRACE = 3600
"""Longest grace for running requests, in seconds."""

Targets = Sequence[tuple[UUID, str]]


@dataclass(frozen=True)
class UnloadRequest:
    """The request of an unload or deletion, and its actor; without a node for the whole cluster.

    `grace`: seconds that running requests have before their engine is stopped, None = the setting.
    `reason` is stored with the operation.
    """

    model: str
    actor: str
    request_id: str = ""
    client_address: str = ""
    node: BackendNode | None = None
    index: int | None = None
    grace: float | None = None
    reason: str = ""


def unload(request: UnloadRequest, *, now: datetime) -> Admission:
    """Unload the model's replicas; join the active operation that does so.

    Raises NotFound without a replica, Conflict while the model is being loaded or deleted.
    """
    rows = drains.unloadable(
        request.model, node_id=request.node.id if request.node else None, index=request.index
    )
    targets = list(rows.order_by("node__name").values_list("node_id", "node__name").distinct())
    if not targets and not Operation.objects.active().filter(key=_key(request), kind=UNLOAD).exists():
        raise _not_loaded(request)
    admission = _admit(request, UNLOAD, targets, now)
    if admission.created:
        _record(request, "unload", admission.operation, now)
    elif request.grace is not None:
        drains.advance_deadline(rows, deadline=now + timedelta(seconds=request.grace))
    return admission


def evict(node: BackendNode, actor: str, *, now: datetime) -> Admission:
    """Unload the least recently used idle replica of the node (R2.55).

    Raises NotFound if none is idle.
    """
    row = least_recently_used([node.id]).first()
    if row is None:
        raise errors.NotFound(f"no replica on node {node.name} is idle")
    reason = "the least recently used on its node"
    request = UnloadRequest(row.model_name, actor, node=node, index=row.replica_index, reason=reason)
    return unload(request, now=now)


def least_recently_used(node_ids: Collection[UUID] = ()) -> NodeModelQuerySet:
    """Return the idle replicas on these or all healthy backend nodes, the longest unused first (R1.75)."""
    unused = NodeModel.objects.serving().filter(in_flight=0, node__node_type="backend")
    return (unused.filter(node__in=node_ids) if node_ids else unused).order_by("last_used", "id")


def delete(request: UnloadRequest, *, now: datetime) -> Admission:
    """Unload the model and remove its files, on the node or on every approved node.

    Raises NotFound if no node can have it, Conflict while it is being loaded or unloaded.
    """
    if request.node is not None:
        _refuse_while_loading(request, request.node)
        return _deletion(request, [(request.node.id, request.node.name)], now)
    nodes = BackendNode.objects.filter(node_type=NodeType.BACKEND).exclude(status="pending").order_by("name")
    targets = list(nodes.values_list("id", "name"))
    if not targets:
        raise errors.NotFound("there is no node that could have files of a model")
    return _deletion(request, targets, now)


def _deletion(request: UnloadRequest, targets: Targets, now: datetime) -> Admission:
    admission = _admit(request, DELETE, targets, now)
    if admission.created:
        _record(request, "deletion", admission.operation, now)
    return admission


def _record(request: UnloadRequest, kind: str, operation: Operation, now: datetime) -> None:
    reason = request.reason or f"{kind} asked for by {request.actor}"
    node_id = request.node.id if request.node is not None else None
    record_unload(request.model, operation.id, because=reason, node_id=node_id, index=request.index, now=now)


def loading_there(model: str, node_id: UUID) -> UUID | None:
    """Return the load that has a slot for the model on the node; None if there is none."""
    rows = NodeModel.objects.of(model).filter(node_id=node_id, state__in=BEING_LOADED)
    return rows.values_list("owner_id", flat=True).first()


def _key(request: UnloadRequest) -> str:
    if request.node is None:
        return load_key(request.model, ALL_SUFFIX)
    target = "model" if request.index is None else f"replica:{request.index}"
    return f"node:{request.node.id}:{target}:{request.model}"


def _admit(request: UnloadRequest, kind: str, targets: Targets, now: datetime) -> Admission:
    grace = conf.cluster().unload_grace if request.grace is None else request.grace
    payload: dict[str, Any] = {"model": request.model, "grace": grace, "replica_index": request.index}
    payload |= {"reason": request.reason} if request.reason else {}
    operation_request = OperationRequest(
        kind,
        key=_key(request),
        element=request.model,
        payload=payload,
        actor=request.actor,
        node=(request.node.id, request.node.name) if request.node else None,
        targets=targets,
        request_id=request.request_id,
        client_address=request.client_address,
    )
    return admit(operation_request, now=now)


def _not_loaded(request: UnloadRequest) -> Exception:
    if request.node is None:
        active = (
            Operation.objects.active().sharing(_key(request), request.model).order_by("created_at").first()
        )
        if active is not None:
            return in_progress(active)
        return errors.NotFound(f"model {request.model} is not loaded on any node")
    _refuse_while_loading(request, request.node)
    replica = "" if request.index is None else f" as replica {request.index}"
    state = "" if request.node.status == "healthy" else f", which is {request.node.status}"
    return errors.NotFound(f"model {request.model} is not loaded{replica} on node {request.node.name}{state}")


def _refuse_while_loading(request: UnloadRequest, node: BackendNode) -> None:
    if (operation := loading_there(request.model, node.id)) is not None:
        raise errors.Conflict(
            f"model {request.model} is being loaded on node {node.name} (operation {operation})"
        )


log = logging.getLogger(__name__)

ACTOR = "system"


def report_stuck(*, now: datetime) -> int:
    """Request an unload of each replica whose stop stays unconfirmed; return their number.

    The stops of replicas that terminate without an operation are repeated in silence. The unload owns the row
    from then on; if it fails too, it stays in the inbox with the reason while controllers repeat the stops.
    """
    created = 0
    for row in terminations.overdue_stops(now=now):
        reason = (
            f"its engine was to go ({row.get_reason_display().lower()}) and was not stopped: {row.stop_error}"
        )
        request = UnloadRequest(
            row.model_name, ACTOR, node=row.node, index=row.replica_index, grace=0, reason=reason
        )
        try:
            created += unload(request, now=now).created
        except errors.ClusterError as refusal:
            log.info("%s on %s: %s; %s", row, row.node.name, reason, refusal.message)
    return created
