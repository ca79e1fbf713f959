"""One verb on many operations in one call: counts instead of a refusal for what has ended meanwhile."""

from collections.abc import Callable, Mapping
from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.kit import clock, errors
from localai_cluster.web.openapi import flat_refusals
from localai_cluster.web.rest import NullIsAbsent, Text, validate_body
from nodes.api.node_backends import requester_of
from nodes.api.operation_verbs import again, cancelled
from nodes.backends.backend_requests import Asked
from operations.ledger import admission
from operations.models import ACTIVE, Operation, Status

MOST_OPERATIONS = 2000
MOST_REASONS = 20


class OperationCountsSerializer(serializers.Serializer[Any]):
    """What became of the operations that were named."""

    done = serializers.IntegerField(min_value=0, help_text="The verb was carried out.")
    ended = serializers.IntegerField(min_value=0, help_text="Ended already, or without a record.")
    refused = serializers.IntegerField(min_value=0, help_text="The verb is not possible for them now.")
    reasons = serializers.ListField(
        child=serializers.CharField(), max_length=MOST_REASONS, help_text="Why, each reason once."
    )


class BulkOperationsSerializer(NullIsAbsent):
    """A verb and the operations that it is for."""

    verb = serializers.ChoiceField(choices=("cancel", "dismiss", "retry"))
    ids = serializers.ListField(child=serializers.UUIDField(), min_length=1, max_length=MOST_OPERATIONS)
    comment = Text(
        required=False, allow_null=True, max_length=admission.LONGEST_COMMENT, help_text="Of a dismissal."
    )


def _cancel(operation: Operation, by: Asked, comment: str) -> None:
    cancelled(operation, actor=by.actor)


def _dismiss(operation: Operation, by: Asked, comment: str) -> None:
    admission.dismiss(operation.id, actor=by.actor, now=clock.now(), comment=comment)


def _retry(operation: Operation, by: Asked, comment: str) -> None:
    again(operation, (), by)


_VERBS: Mapping[str, Callable[[Operation, Asked, str], None]] = {
    "cancel": _cancel,
    "dismiss": _dismiss,
    "retry": _retry,
}


class BulkOperationsView(APIView):
    """`/api/operations/bulk`."""

    envelope = "flat"

    @extend_schema(
        operation_id="operations_bulk",
        summary="Cancel, dismiss or retry many operations",
        tags=["operations"],
        request=BulkOperationsSerializer,
        responses={200: OperationCountsSerializer, **flat_refusals(400, 413)},
    )
    def post(self, request: Request) -> Response:
        """Does it to each of them, each on its own, and answers how many. Repeating it does no harm."""
        fields = validate_body(BulkOperationsSerializer, request)
        return Response(
            _run(fields["verb"], fields["ids"], requester_of(request, []), fields.get("comment", ""))
        )


def _run(verb: str, ids: list[Any], by: Asked, comment: str) -> dict[str, Any]:
    done, ended, refusals = 0, 0, list[str]()
    for id in dict.fromkeys(ids):
        operation = Operation.objects.filter(pk=id).first()
        try:
            if operation is None:
                ended += 1
                continue
            _VERBS[verb](operation, by, comment)
            done += 1
        except errors.ClusterError as refusal:
            if _has_ended(verb, id):
                ended += 1
            else:
                refusals.append(refusal.message)
    reasons = list(dict.fromkeys(refusals))[:MOST_REASONS]
    return {"done": done, "ended": ended, "refused": len(refusals), "reasons": reasons}


def _has_ended(verb: str, id: Any) -> bool:
    """Return True if there is nothing left to do: a cancelled operation has ended, a failure is dismissed."""
    operation = Operation.objects.filter(pk=id).first()
    if operation is None:
        return True
    if verb == "cancel":
        return operation.status not in ACTIVE
    return operation.status == Status.COMPLETED or operation.dismissed_at is not None
