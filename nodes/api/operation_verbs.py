"""What people do with operations of all kinds: cancel, pause, try again (`contract/http-api.md` §3.3, §3.4).

They stand here and not beside the list, because work on nodes is called off through its intents.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.accounts.authentication import principal
from localai_cluster.kit import clock, conf, errors
from localai_cluster.web.openapi import flat_refusals
from localai_cluster.web.rest import NullIsAbsent, validate_body
from nodes.api.cluster_backends import STARTED, NodesSerializer, last_replicas_field, started_body
from nodes.api.node_backends import CommandTexts, requester_of
from nodes.backends import admission as on_backends
from nodes.backends import wave_requests
from nodes.backends.backend_requests import Asked
from nodes.loading import load_request
from nodes.registry import bulk
from operations.api.jobs import found
from operations.api.serializers import DoneSerializer
from operations.ledger import admission
from operations.models import ACTIVE, Operation, OperationTarget, Status, TargetStatus

AGAIN = CommandTexts("started again", "tried at once")
_Call = TypeVar("_Call", bound=Callable[..., Any])


def _verb(
    name: str,
    summary: str,
    body: type[serializers.Serializer[Any]] | None = None,
    answer: Any = DoneSerializer,
) -> Callable[[_Call], _Call]:
    """What the API document says of one verb."""
    return extend_schema(
        operation_id=f"operations_{name}",
        summary=summary,
        tags=["operations"],
        request=body,
        responses={200: answer, **flat_refusals(400, 404, 409, 413)},
    )


def cancelled(operation: Operation, *, actor: str) -> Operation:
    """Ends an operation of any kind for good. Raises Conflict."""
    verb = on_backends.cancel if operation.by_parts else admission.cancel
    return verb(operation.id, actor=actor, now=clock.now())


def part_cancelled(operation: Operation, node_id: UUID, *, actor: str) -> str:
    """Ends an operation on one of its nodes for good; answers the node's name.

    Raises NotFound and Conflict.
    """
    if not operation.by_parts:
        raise errors.Conflict(f"{operation.kind} is cancelled as a whole, not on one node", field="status")
    part = OperationTarget.objects.filter(operation=operation, node_id=node_id)
    name = part.values_list("node_name", flat=True).first()
    on_backends.cancel(operation.id, node_id=node_id, actor=actor, now=clock.now())
    return name or str(node_id)


def again(operation: Operation, nodes: Sequence[UUID], by: Asked) -> admission.Admission:
    """Asks again for what failed, on these nodes or on all. Raises Conflict where there is nothing to ask."""
    if operation.by_parts:
        return on_backends.retry(operation.id, only=nodes, asked_by=by, now=clock.now())
    return _as_a_whole(operation, nodes, by)


class CancelView(APIView):
    """`/api/operations/:jobID/cancel`."""

    envelope = "flat"

    @_verb("cancel", "Cancel an operation")
    def post(self, request: Request, job_id: str) -> Response:
        """Ends it for good. Workers that are at it are asked to stop; each part says what came of that."""
        operation, who = found(job_id), principal(request).name
        cancelled(operation, actor=who)
        return Response({"success": True, "message": "operation cancelled"})


class CancelPartView(APIView):
    """`/api/operations/:jobID/nodes/:node_id/cancel`."""

    envelope = "flat"

    @_verb("cancel_part", "Cancel an operation on one node")
    def post(self, request: Request, job_id: str, node_id: str) -> Response:
        """Ends the part on this node for good; the other nodes go on. An upgrade in waves asks after it."""
        operation = found(job_id)
        try:
            node = UUID(node_id)
        except ValueError:
            raise errors.NotFound("the operation is not for this node", field="node_id") from None
        name = part_cancelled(operation, node, actor=principal(request).name)
        return Response({"success": True, "message": f"cancelled on {name}"})


class PauseView(APIView):
    """`/api/operations/:jobID/pause`."""

    envelope = "flat"

    @_verb("pause", "Pause an operation")
    def post(self, request: Request, job_id: str) -> Response:
        """Refused for every operation: none can resume from where it stopped (O59)."""
        operation = found(job_id)
        raise errors.Conflict(
            f"{operation.kind} cannot be paused; cancel it and ask again later", field="status"
        )


class RetryView(APIView):
    """`/api/operations/:jobID/retry`."""

    envelope = "flat"

    @_verb("retry", "Try an operation again", NodesSerializer, answer=STARTED.ref)
    def post(self, request: Request, job_id: str) -> Response:
        """Asks again for what failed, with the same request. What still waits is tried at once."""
        operation, asked = found(job_id), requester_of(request, [])
        chosen = validate_body(NodesSerializer, request).get("nodes", ())
        return Response(started_body(again(operation, chosen, asked), AGAIN))


class ChoiceSerializer(NullIsAbsent):
    """What becomes of an upgrade in waves."""

    choice = serializers.ChoiceField(choices=wave_requests.CHOICES)
    last_replicas = last_replicas_field()


class WavesView(APIView):
    """`/api/operations/:jobID/waves`."""

    envelope = "flat"

    @_verb("waves", "Continue or stop an upgrade in waves", ChoiceSerializer)
    def post(self, request: Request, job_id: str) -> Response:
        """After a wave that failed: `continue` opens the next one, `stop` ends what has not begun.

        `stop` may come at any time. `continue` with `last_replicas` also lets a part go on that waits for
        this confirmation.
        """
        operation, fields = found(job_id), validate_body(ChoiceSerializer, request)
        wave_requests.choose(
            operation.id,
            fields["choice"],
            last_replicas=fields.get("last_replicas", ()),
            actor=principal(request).name,
            now=clock.now(),
        )
        stopped = fields["choice"] == wave_requests.STOP
        return Response({"success": True, "message": "stopped" if stopped else "goes on"})


def _as_a_whole(operation: Operation, only: Sequence[UUID], by: Asked) -> admission.Admission:
    """The same request once more, without what earlier attempts left in it, where it did not succeed.

    Raises InvalidInput for nodes that it was not for, and Conflict where there is nothing to ask again.
    """
    if operation.status in ACTIVE or operation.status == Status.COMPLETED:
        raise errors.Conflict(f"the operation is {operation.status}", field="status")
    now = clock.now()
    parts = list(OperationTarget.objects.filter(operation=operation))
    if strange := sorted(str(id) for id in set(only) - {part.node_id for part in parts}):
        raise errors.InvalidInput(f"nodes: the operation was not for {', '.join(strange)}", field="nodes")
    chosen = [part for part in parts if part.status != TargetStatus.SUCCESS]
    chosen = [part for part in chosen if not only or part.node_id in only]
    if parts and not chosen:
        raise errors.Conflict("no part of this operation can be tried again", field="nodes")
    key, element = operation.key, operation.element
    if operation.kind in bulk.VERBS:
        # Of fewer nodes than before: a request for all of them must not join it.
        key, element = bulk.identity(
            operation.kind, operation.payload["options"], [p.node_id for p in chosen]
        )
    limit = timedelta(seconds=conf.cluster().install_timeout)
    asked = admission.OperationRequest(
        operation.kind,
        key=key,
        element=element,
        actor=by.actor,
        payload={k: v for k, v in operation.payload.items() if k not in ("setbacks", "engine_deaths")},
        node=(operation.node_id, operation.node_name) if operation.node_id and parts else None,
        targets=[(part.node_id, part.node_name) for part in chosen],
        request_id=by.request_id,
        client_address=by.client_address,
        needed_until=now + limit if operation.kind == load_request.KIND else None,
    )
    result = admission.admit(asked, now=now)
    if operation.status == Status.FAILED:
        said = f"tried again as operation {result.operation.id}"
        admission.dismiss(operation.id, actor=by.actor, now=now, comment=said)
    return result
