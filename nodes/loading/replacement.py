"""A replica of a model on another node than the one whose replica is about to stop."""

from datetime import timedelta
from uuid import UUID

from localai_cluster.kit import clock
from nodes.loading.load import KIND
from nodes.loading.load_request import EXCLUDED_NODES
from nodes.models.replica import load_key
from operations.ledger import admission
from operations.models import Operation

WANTED_FOR = timedelta(seconds=60)
SYSTEM_ACTOR = "system"


def load_on_other_node(model: str, node_id: UUID, operation_id: UUID | None) -> Operation:
    """Asks for the load, or joins the active one; see `nodes.backends.intent_queue.LoadElsewhere`.

    Raises Conflict while other work on the model is in progress.
    """
    now = clock.now()
    if operation_id is None:
        wanted = admission.OperationRequest(
            KIND,
            key=load_key(model),
            element=model,
            actor=SYSTEM_ACTOR,
            payload={EXCLUDED_NODES: [str(node_id)]},
            needed_until=now + WANTED_FOR,
        )
        return admission.admit(wanted, now=now).operation
    admission.need_until(operation_id, now + WANTED_FOR)
    return Operation.objects.get(pk=operation_id)
