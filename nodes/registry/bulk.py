"""Actions on one node at once, and on many nodes as one operation with a target for each node.

`perform` runs an action of `actions.py` on one node. `request` admits an operation over many nodes; a
controller runs it with `RunOnNodes`. Each node is one transaction that holds the action and the outcome of
the node's target; removals share one transaction. So a later attempt continues after an interruption at any
statement, and no node gets the action twice. If one node refuses the action, all other nodes still get it.
Progress is published for several nodes at a time.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.kit import clock, errors
from localai_cluster.kit.quantities import counted
from localai_cluster.kit.transactions import committed
from nodes.models import BackendNode
from nodes.registry import actions, change, claims, labels, lifecycle
from nodes.registry.node_refusals import GONE_REASON, NodeRefusal, NodesRefused
from operations import targets
from operations.executor.work import Work, in_thread
from operations.ledger import attempts
from operations.ledger.admission import Admission, OperationRequest, Requester, admit
from operations.ledger.attempts import lock_owned
from operations.models import Operation, OperationTarget, TargetStatus

_ACTION_BY_KIND = {
    f"node_{action.name}": action
    for action in (actions.APPROVE, actions.REJECT, actions.DRAIN, actions.RESUME, actions.REMOVE)
}
"""Action whose conditions decide whether a node can take the operation, by kind of operation."""
APPROVE_KIND, LABEL_KIND, REMOVE_KIND = "node_approve", "node_label", "node_remove"
_MAX_SHOWN_REFUSALS = 10
NODES_PER_REPORT, REMOVALS_PER_TRANSACTION = 25, 100
"""Maximum nodes between two progress reports, and maximum nodes that one transaction removes."""

Options = Mapping[str, Any]
"""Arguments of an action as the operation's payload stores them."""
Verb = Callable[[UUID, Actor, datetime, Options], object]
"""Function that changes one node: it takes the node's id, the actor, the time and the options."""


class BulkFailed(errors.ClusterError):
    """At least one of the nodes refused the action."""

    message = "The verb was refused for at least one of the nodes."
    status = 409
    code = "bulk_failed"


@dataclass(frozen=True)
class BulkRequest:
    """An action, the nodes that it is for, and the user who requests it."""

    kind: str
    node_ids: Sequence[UUID]
    actor: Actor
    options: Options = field(default_factory=dict)
    request_id: str = ""
    client_address: str = ""


def request(bulk: BulkRequest, *, now: datetime) -> Admission:
    """Admit the operation, or join the active operation with the same action, options and nodes.

    Raises NodesRefused with the nodes that cannot take the action now; then nothing has started. If a node
    changes afterwards, the target of that node fails.
    """
    ids = sorted(set(bulk.node_ids))
    key, element = key_and_element(bulk.kind, bulk.options, ids)
    nodes = BackendNode.objects.in_bulk(ids)
    names = {id: node.name for id, node in nodes.items()}
    if not Operation.objects.active().filter(key=key).exists():
        refused = [
            NodeRefusal(id, names.get(id, str(id)), why) for id in ids if (why := _refusal(bulk, nodes, id))
        ]
        if refused:
            raise NodesRefused(refused, field="ids")
    return admit(
        OperationRequest(
            bulk.kind,
            key=key,
            element=element,
            payload={"options": dict(bulk.options), "actor_kind": bulk.actor.kind.value},
            by=Requester(str(bulk.actor), bulk.request_id, bulk.client_address),
            targets=[(id, names.get(id, str(id))) for id in ids],
        ),
        now=now,
    )


def _refusal(bulk: BulkRequest, nodes: Mapping[UUID, BackendNode], node_id: UUID) -> str:
    """Return why the node cannot take the action now; "" if it can."""
    node = nodes.get(node_id)
    if node is None:
        return GONE_REASON
    fingerprint = bulk.options.get("fingerprints", {}).get(str(node_id))
    if fingerprint is not None and fingerprint != node.fingerprint:
        return lifecycle.FINGERPRINT_CHANGED_MESSAGE
    action = _ACTION_BY_KIND.get(bulk.kind)
    return actions.refusal(action, node) if action else ""


def key_and_element(kind: str, options: Options, node_ids: Sequence[UUID]) -> tuple[str, str]:
    """Return the key and the element of an operation of this kind with these options and nodes."""
    ids = sorted(set(node_ids))
    described = json.dumps([options, [str(id) for id in ids]], sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:32]
    return f"{kind}:{digest}", counted(len(ids), "node")


class RunOnNodes:
    """Handler of all operations over many nodes (the kinds in `VERBS`)."""

    async def __call__(self, work: Work) -> Mapping[str, Any]:
        """Run the action on each node whose target has not ended. Raises BulkFailed if a node refused it."""
        at_once = REMOVALS_PER_TRANSACTION if work.operation.kind == REMOVE_KIND else NODES_PER_REPORT
        node_ids = await in_thread(_unfinished_nodes, work)
        for first in range(0, len(node_ids), at_once):
            await in_thread(_run_on_nodes, work, node_ids[first : first + at_once])
        rows = await in_thread(
            lambda: list(OperationTarget.objects.filter(operation_id=work.id).order_by("node_name"))
        )
        refusals = [f"{row.node_name}: {row.error}" for row in rows if row.status == TargetStatus.ERROR]
        if refusals:
            more = len(refusals) - _MAX_SHOWN_REFUSALS
            raise BulkFailed(
                "; ".join(refusals[:_MAX_SHOWN_REFUSALS]) + (f" and {more} more" if more > 0 else "")
            )
        return {"message": f"done on {work.operation.element}"}


def _unfinished_nodes(work: Work) -> list[UUID]:
    unfinished = OperationTarget.objects.filter(operation_id=work.id, status__in=targets.UNFINISHED)
    return list(unfinished.order_by("node_id").values_list("node_id", flat=True))


def _run_on_nodes(work: Work, node_ids: Sequence[UUID]) -> None:
    """Run the action on these nodes, then publish the outcomes. Raises LeaseLost."""
    if work.operation.kind == REMOVE_KIND:
        _remove(work, node_ids)
    else:
        for node_id in node_ids:
            _run_on_node(work, node_id)
    attempts.publish_targets(*work.attempt, node_ids, now=clock.now())


def _remove(work: Work, node_ids: Sequence[UUID]) -> None:
    """Remove the nodes and end their targets, in a constant number of statements."""
    with committed("nodes.bulk"):
        lock_owned(*work.attempt)
        removed = change.remove_all(
            BackendNode.objects.filter(pk__in=node_ids), _actor_of(work), now=clock.now()
        )
        absent = (TargetStatus.ERROR, "node not found")
        success = (TargetStatus.SUCCESS, "")
        attempts.end_targets(work.id, {id: success if id in removed else absent for id in node_ids})


def _actor_of(work: Work) -> Actor:
    return Actor(ActorKind(work.operation.payload["actor_kind"]), work.operation.actor)


def _run_on_node(work: Work, node_id: UUID) -> None:
    """Run the action and end the node's target, in one transaction. Raises LeaseLost.

    The operation's row is locked before the node's: the change counter must be the last lock (decision 0002).
    """
    with committed("nodes.bulk"):
        lock_owned(*work.attempt)
        status, error = TargetStatus.SUCCESS, ""
        try:
            with transaction.atomic():
                options = work.operation.payload["options"]
                VERBS[work.operation.kind](node_id, _actor_of(work), clock.now(), options)
        except errors.ClusterError as refusal:
            status, error = TargetStatus.ERROR, refusal.message
        attempts.end_targets(work.id, {node_id: (status, error)})


def perform(action: str, node_id: UUID, actor: Actor, now: datetime, options: Options) -> object:
    """Run the action of this name on one node; return the result of the service function behind it.

    An action uses only those `options` that it knows. Raises ClusterError if the node refuses the action.
    """
    return _ACTIONS[action](node_id, actor, now, options)


def _approve(node_id: UUID, actor: Actor, now: datetime, options: Options) -> lifecycle.Approval:
    reason, fingerprint = _reason(options), options.get("fingerprint")
    return lifecycle.approve(node_id, actor=actor, now=now, reason=reason, fingerprint=fingerprint)


def _approve_as_seen(node_id: UUID, actor: Actor, now: datetime, options: Options) -> None:
    """Approve the node if it still has the fingerprint that the user compared.

    An agent gets its API token when it registers again, because no operation stores a secret.
    """
    fingerprint = options.get("fingerprints", {}).get(str(node_id))
    _approve(node_id, actor, now, {**options, "fingerprint": fingerprint})


def _drain(node_id: UUID, actor: Actor, now: datetime, options: Options) -> object:
    deadline = options.get("deadline_seconds")
    return lifecycle.drain(node_id, actor=actor, now=now, reason=_reason(options), deadline=deadline)


def _label(node_id: UUID, actor: Actor, now: datetime, options: Options) -> None:
    drop = options.get("remove_labels", ())
    labels.edit_labels(node_id, options.get("labels", {}), drop=drop, actor=actor, now=now)


def _verb_with_reason(service: Callable[..., object]) -> Verb:
    return lambda node_id, actor, now, options: service(
        node_id, actor=actor, now=now, reason=_reason(options)
    )


def _verb_without_reason(service: Callable[..., object]) -> Verb:
    return lambda node_id, actor, now, options: service(node_id, actor=actor, now=now)


def _reason(options: Options) -> str:
    return str(options.get("reason", ""))


_ACTIONS: Mapping[str, Verb] = {
    actions.APPROVE.name: _approve,
    actions.REJECT.name: _verb_with_reason(lifecycle.reject),
    actions.DRAIN.name: _drain,
    actions.RESUME.name: _verb_with_reason(lifecycle.resume),
    actions.ROTATE.name: _verb_without_reason(claims.request_rotation),
    actions.REVOKE.name: _verb_with_reason(claims.revoke),
    actions.REMOVE.name: _verb_without_reason(lifecycle.deregister),
}
VERBS: Mapping[str, Verb] = {
    **{kind: _ACTIONS[action.name] for kind, action in _ACTION_BY_KIND.items()},
    APPROVE_KIND: _approve_as_seen,
    LABEL_KIND: _label,
}
"""The functions that change one node of an operation, by kind of operation."""
