"""Verbs of operations of all kinds: cancel, pause, retry (`contract/http-api.md` §3.3, §3.4)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.accounts.authentication import principal
from localai_cluster.kit import clock, conf, errors
from localai_cluster.web.openapi import describe
from localai_cluster.web.rest import NullIsAbsent, Text, validate_body
from operations import targets
from operations.api import serializers as shapes
from operations.api.jobs import find_operation
from operations.kinds import kind_of
from operations.ledger import admission
from operations.ledger.admission import OperationRequest, Outcome
from operations.models import ACTIVE, Operation, OperationTarget, Status, TargetStatus

MAX_OPERATIONS = 2000
MAX_SHOWN_REASONS = 20
RETRY_TEXTS = shapes.CommandTexts("started again", "tried at once")


describe_verb = partial(describe, answer=shapes.DoneSerializer, refused=(400, 404, 409, 413))
"""Describe the route of a verb, for the API document."""


def cancel_operation(operation: Operation, *, actor: str) -> Operation:
    """Cancel an operation of any kind. Raise Conflict."""
    kind, now = kind_of(operation), clock.now()
    if operation.by_parts and kind.targets is not None:
        return kind.targets.cancel(operation.id, actor=actor, now=now, node_id=None)
    if kind.cancel is not None:
        return kind.cancel(operation, actor, now)
    return admission.cancel(operation.id, actor=actor, now=now)


def cancellation_text(operation: Operation) -> str:
    """Return the message about a cancelled operation; its own message if that counts finished targets."""
    return operation.message if operation.message[:1].isdigit() else "operation cancelled"


def cancel_target(operation: Operation, node_id: UUID, *, actor: str) -> str:
    """Cancel the operation on one of its nodes; return the node's name.

    Raises NotFound and Conflict.
    """
    rules = kind_of(operation).targets
    if not operation.by_parts or rules is None:
        raise errors.Conflict(f"{operation.kind} is cancelled as a whole, not on one node", field="status")
    part = OperationTarget.objects.filter(operation=operation, node_id=node_id)
    name = part.values_list("node_name", flat=True).first()
    rules.cancel(operation.id, node_id=node_id, actor=actor, now=clock.now())
    return name or str(node_id)


def retry_operation(
    operation: Operation, nodes: Sequence[UUID], by: admission.Requester
) -> admission.Admission:
    """Repeat the failed work of an operation, on these nodes or on all nodes.

    Raises Conflict if there is nothing to repeat.
    """
    rules = kind_of(operation).targets
    if operation.by_parts and rules is not None:
        return rules.retry(operation.id, nodes=nodes, requester=by, now=clock.now())
    (outcome,) = _retry_as_a_whole([operation], nodes, by)
    return admission.require(outcome)


class CancelView(shapes.OperationRoute):
    """`/api/operations/:jobID/cancel`."""

    @describe_verb("operations_cancel", "Cancel an operation")
    def post(self, request: Request, job_id: str) -> Response:
        """Ends an operation for good. Workers are requested to stop; each target gets its outcome.

        If it has several nodes, the message has numbers, such as 40 cancelled, 60 had already finished.
        """
        cancelled = cancel_operation(find_operation(job_id), actor=principal(request).name)
        return Response({"success": True, "message": cancellation_text(cancelled)})


class CancelPartView(shapes.OperationRoute):
    """`/api/operations/:jobID/nodes/:node_id/cancel`."""

    @describe_verb("operations_cancel_part", "Cancel an operation on one node")
    def post(self, request: Request, job_id: str, node_id: str) -> Response:
        """Ends the operation on this node for good; other nodes continue.

        An upgrade in waves then waits for a choice.
        """
        operation = find_operation(job_id)
        try:
            node = UUID(node_id)
        except ValueError:
            raise errors.NotFound("the operation is not for this node", field="node_id") from None
        name = cancel_target(operation, node, actor=principal(request).name)
        return Response({"success": True, "message": f"cancelled on {name}"})


class PauseView(shapes.OperationRoute):
    """`/api/operations/:jobID/pause`."""

    @describe_verb("operations_pause", "Pause an operation")
    def post(self, request: Request, job_id: str) -> Response:
        """Refuses to pause any operation, because none can resume from where it stopped (O59)."""
        operation = find_operation(job_id)
        raise errors.Conflict(
            f"{operation.kind} cannot be paused; cancel it and ask again later", field="status"
        )


class RetryView(shapes.OperationRoute):
    """`/api/operations/:jobID/retry`."""

    @describe_verb(
        "operations_retry", "Try an operation again", answer=shapes.STARTED_SHAPE, body=shapes.NodesSerializer
    )
    def post(self, request: Request, job_id: str) -> Response:
        """Repeats the failed part of an operation with the same request. A waiting part is tried at once."""
        operation, asked = find_operation(job_id), shapes.requester_of(request)
        chosen = validate_body(shapes.NodesSerializer, request).get("nodes", ())
        return Response(shapes.started_body(retry_operation(operation, chosen, asked), RETRY_TEXTS))


def _runs_by_targets(operation: Operation) -> bool:
    """Return True if the operation's targets run independently."""
    return operation.by_parts and kind_of(operation).targets is not None


def _retry_of(
    operation: Operation, parts: Sequence[OperationTarget], only: Sequence[UUID], by: admission.Requester
) -> OperationRequest:
    """Return the request that repeats the unsuccessful part of the operation.

    The request has no payload that earlier attempts wrote. Raises InvalidInput for nodes that are not in the
    operation, and Conflict if nothing can be repeated.
    """
    if operation.status in ACTIVE or operation.status == Status.COMPLETED:
        raise errors.Conflict(f"the operation is {operation.status}", field="status")
    if strange := sorted(str(id) for id in set(only) - {part.node_id for part in parts}):
        raise errors.InvalidInput(
            f"nodes: the operation has no target on {', '.join(strange)}", field="nodes"
        )
    chosen = [part for part in parts if part.status != TargetStatus.SUCCESS]
    # Without a choice of nodes, failures that were dismissed or tried again are left alone.
    chosen = [p for p in chosen if (p.node_id in only if only else p.dismissed_at is None)]
    if parts and not chosen:
        raise errors.Conflict("no part of this operation can be tried again", field="nodes")
    key, element, kind = operation.key, operation.element, kind_of(operation)
    if kind.retry_identity is not None:
        key, element = kind.retry_identity(operation, [part.node_id for part in chosen])
    limit = timedelta(seconds=conf.cluster().install_timeout)
    return OperationRequest(
        operation.kind,
        key=key,
        element=element,
        by=by,
        payload={k: v for k, v in operation.payload.items() if k not in kind.attempt_keys},
        node=(operation.node_id, operation.node_name) if operation.node_id and parts else None,
        targets=[(part.node_id, part.node_name) for part in chosen],
        needed_until=clock.now() + limit if kind.expires else None,
        repeats=operation,
    )


def _retry_as_a_whole(
    operations: Sequence[Operation], only: Sequence[UUID], by: admission.Requester
) -> list[Outcome]:
    """Repeat operations without independent targets in one transaction.

    Return the outcomes in their order.
    """
    parts, requests = targets.of(operations), list[OperationRequest | errors.ClusterError]()
    for operation in operations:
        try:
            requests.append(_retry_of(operation, parts.get(operation.id, ()), only, by))
        except errors.ClusterError as refusal:
            requests.append(refusal)
    admitted = [request for request in requests if isinstance(request, OperationRequest)]
    outcomes = iter(admission.admit_many(admitted, now=clock.now()))
    return [next(outcomes) if isinstance(request, OperationRequest) else request for request in requests]


class OperationCountsSerializer(serializers.Serializer[Any]):
    """The numbers of the requested operations by outcome of the verb."""

    done = serializers.IntegerField(min_value=0, help_text="The verb was carried out.")
    ended = serializers.IntegerField(min_value=0, help_text="Ended already, or without a record.")
    refused = serializers.IntegerField(min_value=0, help_text="The verb is not possible for them now.")
    reasons = serializers.ListField(
        child=serializers.CharField(),
        max_length=MAX_SHOWN_REASONS,
        help_text="Why, each reason once, the most frequent first; several operations are counted in it.",
    )


class BulkOperationsSerializer(NullIsAbsent):
    """A verb and the operations that it is applied to."""

    verb = serializers.ChoiceField(choices=("cancel", "dismiss", "retry"))
    ids = serializers.ListField(child=serializers.UUIDField(), min_length=1, max_length=MAX_OPERATIONS)
    comment = Text(required=False, max_length=admission.MAX_COMMENT_LENGTH, help_text="Of a dismissal.")


RefusalsById = Mapping[UUID, errors.ClusterError | None]
"""By operation id: the error if the operation refused the verb; None if it accepted."""


def _run_one_by_one(operations: Iterable[Operation], run: Callable[[Operation], object]) -> RefusalsById:
    """Run the verb on the operations one by one, because each needs the locks of its own key and nodes."""
    results: dict[UUID, errors.ClusterError | None] = {}
    for operation in operations:
        try:
            run(operation)
            results[operation.id] = None
        except errors.ClusterError as refusal:
            results[operation.id] = refusal
    return results


def _cancel_all(operations: Sequence[Operation], by: admission.Requester) -> RefusalsById:
    return _run_one_by_one(operations, lambda operation: cancel_operation(operation, actor=by.actor))


def _retry_all(operations: Sequence[Operation], by: admission.Requester) -> RefusalsById:
    """Retry operations that run as a whole in one transaction, and those with targets one by one."""
    others = [op for op in operations if _runs_by_targets(op)]
    whole = [op for op in operations if not _runs_by_targets(op)]
    outcomes = _retry_as_a_whole(whole, (), by)
    results = {
        operation.id: outcome if isinstance(outcome, errors.ClusterError) else None
        for operation, outcome in zip(whole, outcomes, strict=True)
    }
    return results | dict(_run_one_by_one(others, lambda operation: retry_operation(operation, (), by)))


_FUNCTION_BY_VERB: Mapping[str, Callable[[Sequence[Operation], admission.Requester], RefusalsById]] = {
    "cancel": _cancel_all,
    "retry": _retry_all,
}


class BulkOperationsView(shapes.OperationRoute):
    """`/api/operations/bulk`."""

    @describe(
        "operations_bulk",
        "Cancel, dismiss or retry many operations",
        OperationCountsSerializer,
        refused=(400, 413),
        body=BulkOperationsSerializer,
    )
    def post(self, request: Request) -> Response:
        """Runs the verb on each operation and returns the counts. A repeated request does no harm."""
        fields, by = validate_body(BulkOperationsSerializer, request), shapes.requester_of(request)
        if fields["verb"] == "dismiss":
            return Response(_dismiss(fields["ids"], by, fields.get("comment", "")))
        return Response(_run_verb(fields["verb"], fields["ids"], by))


def _dismiss(ids: list[Any], by: admission.Requester, comment: str) -> dict[str, Any]:
    operations = admission.dismiss_many(ids, actor=by.actor, now=clock.now(), comment=comment)
    others = [operation for operation in operations if operation.status != Status.FAILED]
    refusals = [
        admission.undismissable_reason(operation)
        for operation in others
        if operation.status != Status.COMPLETED
    ]
    done = len(operations) - len(others)
    return _count_outcomes(done, len(set(ids)) - done - len(refusals), refusals)


def _count_outcomes(done: int, ended: int, refusals: Sequence[str]) -> dict[str, Any]:
    most = Counter(refusals).most_common(MAX_SHOWN_REASONS)
    reasons = [f"{reason} ({number} operations)" if number > 1 else reason for reason, number in most]
    return {"done": done, "ended": ended, "refused": len(refusals), "reasons": reasons}


def _run_verb(verb: str, ids: list[UUID], by: admission.Requester) -> dict[str, Any]:
    rows = Operation.objects.in_bulk(set(ids))
    results = _FUNCTION_BY_VERB[verb]([rows[id] for id in dict.fromkeys(ids) if id in rows], by)
    refusals = {id: refusal for id, refusal in results.items() if refusal is not None}
    now = Operation.objects.in_bulk(refusals) if refusals else {}
    causes = [refusals[id].message for id in refusals if id in now and not _has_ended(verb, now[id])]
    done = len(results) - len(refusals)
    return _count_outcomes(done, len(set(ids)) - done - len(causes), causes)


def _has_ended(verb: str, operation: Operation) -> bool:
    """Return True if the verb has nothing to do: the operation has ended, or its failure is dismissed."""
    if verb == "cancel":
        return operation.status not in ACTIVE
    return operation.status == Status.COMPLETED or operation.dismissed_at is not None
