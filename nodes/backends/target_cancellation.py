"""The end of one target: an operation is cancelled on one of its nodes and continues on the others.

A target that is cancelled while its wave is open is no success: the wave needs an operator's choice before
the next one opens (`waves.py`). Locks as in `admission.cancel`, which has locked the intents and the
operation.
"""

from datetime import datetime
from uuid import UUID

from localai_cluster.accounts import audit
from localai_cluster.kit import errors
from localai_cluster.kit.rows import update_rows
from nodes.backends import waves
from operations import targets
from operations.changes.publish import announce
from operations.ledger import admission as ledger
from operations.ledger import target_changes
from operations.models import ACTIVE, Operation, OperationTarget, Status, TargetStatus


def cancel(operation: Operation, node_id: UUID, *, note: str, actor: str, now: datetime) -> Operation:
    """Cancel the target of a locked operation on this node; `note` describes what happens to its intent.

    Raise NotFound for a node without a target, and Conflict if the target cannot be cancelled.
    """
    all_parts = list(OperationTarget.objects.filter(operation=operation))
    target = next((target for target in all_parts if target.node_id == node_id), None)
    if target is None:
        raise errors.NotFound("the operation is not for this node", field="node_id")
    if operation.status not in ACTIVE:
        raise errors.Conflict(f"the operation is {operation.status} already", field="status")
    if target.status in targets.ENDED:
        raise errors.Conflict(
            f"the part on {target.node_name} has ended already: {target.status}", field="status"
        )
    if operation.kind.endswith("_delete") and target.status != TargetStatus.QUEUED:
        raise errors.Conflict("a deletion that has begun cannot be cancelled", field="status")
    reason = f"cancelled by {actor}"
    target_changes.end(TargetStatus.CANCELLED, reason=note or reason)(target, now)
    targets.adopt(operation, all_parts, now)
    if operation.status == Status.CANCELLED:
        operation.message = reason
    update_rows([target], target_changes.PART)
    update_rows([operation], target_changes.STATE)
    audit.record(ledger.changed("cancelled_part", operation, f"on {target.node_name}"), at=now)
    changed = target_changes.Changed([operation], {operation.id: all_parts})
    waves.go_on(changed, now=now)
    announce(changed.operations, changed.parts)
    return operation
