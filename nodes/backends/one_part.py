"""The end of one part: an operation is called off on one of its nodes, and goes on with the others.

A part that is cancelled while its wave is open is no success: the wave asks before the next one opens
(`waves.py`). Locks as in `admission.cancel`, which has taken those of the intents and of the operation.
"""

from datetime import datetime
from uuid import UUID

from localai_cluster import errors
from localai_cluster.accounts import audit
from nodes.backends import waves
from operations import targets
from operations.changes.announce import announce
from operations.ledger import admission as ledger
from operations.ledger import parts
from operations.ledger.progress import update
from operations.models import ACTIVE, Operation, OperationTarget, Status, TargetStatus


def cancel(operation: Operation, node_id: UUID, *, note: str, actor: str, now: datetime) -> Operation:
    """Ends the part of a locked operation on this node for good; `note` says what becomes of its intent.

    Raises NotFound for a node that the operation is not for, and Conflict if the part cannot be cancelled.
    """
    all_parts = list(OperationTarget.objects.filter(operation=operation))
    part = next((one for one in all_parts if one.node_id == node_id), None)
    if part is None:
        raise errors.NotFound("the operation is not for this node", field="node_id")
    if operation.status not in ACTIVE:
        raise errors.Conflict(f"the operation is {operation.status} already", field="status")
    if part.status in targets.ENDED:
        raise errors.Conflict(
            f"the part on {part.node_name} has ended already: {part.status}", field="status"
        )
    if operation.kind.endswith("_delete") and part.status != TargetStatus.QUEUED:
        raise errors.Conflict("a deletion that has begun cannot be cancelled", field="status")
    said = f"cancelled by {actor}"
    parts.end(TargetStatus.CANCELLED, reason=note or said)(part, now)
    targets.adopt(operation, all_parts, now)
    if operation.status == Status.CANCELLED:
        operation.message = said
    update([part], parts.PART)
    update([operation], parts.STATE)
    audit.record(ledger.changed("cancelled_part", operation, f"on {part.node_name}"), at=now)
    changed = parts.Changed([operation], {operation.id: all_parts})
    waves.go_on(changed, now=now)
    announce(changed.operations, changed.parts)
    return operation
