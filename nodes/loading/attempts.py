"""Why attempts of a load ended without a replica, or were not made: a record each.

No nodes are compared for such a decision. It depends on what happened, how often, and whether a request still
needs the load; all of that stands in the record.
"""

from collections.abc import Mapping
from typing import Any, TypeVar
from uuid import UUID

from localai_cluster.kit import clock
from nodes.decisions import decision_log
from nodes.decisions.decision_log import DecisionRecord, NodeSlot
from nodes.loading.failures import Cause, is_last, refusals
from nodes.models import DecisionKind
from nodes.placement.explain import LONGEST_SENTENCE, DecisionOutcome, truncate
from nodes.replicas.slots import Slot
from operations.executor.work import Abandoned, Postpone, Work, in_thread
from operations.models import Operation

Outcome = TypeVar("Outcome", bound=Exception)


async def record_end(work: Work, cause: Cause, outcome: Outcome, slot: Slot | None = None) -> Outcome:
    """Keeps what follows, and why, before it happens; answers it."""
    spot = NodeSlot(slot.node_id, slot.node_name, slot.replica_index) if slot is not None else None
    await in_thread(_record_end, work.id, cause, outcome, spot)
    return outcome


def _record_end(load: UUID, cause: Cause, outcome: Exception, spot: NodeSlot | None) -> None:
    operation = Operation.objects.get(pk=load)
    told = decision_log.explanation_without_fleet(
        DecisionOutcome.WAITING if isinstance(outcome, Postpone) else DecisionOutcome.REFUSED,
        truncate(str(outcome), LONGEST_SENTENCE),
        cause=cause,
        times=_times(operation.payload, cause),
        over=isinstance(outcome, Abandoned),
    )
    decided = DecisionRecord(operation.element, load, told, None, DecisionKind.ATTEMPT, spot)
    decision_log.record(decided, now=clock.now())


def _times(payload: Mapping[str, Any], cause: Cause) -> int:
    """How often this has happened to the load, with this time."""
    if cause is Cause.NODE_REFUSED:
        return len(refusals(payload)) + 1
    return int(payload.get("engine_deaths", 0)) + 1 if cause is Cause.ENGINE_DIED else 1


def ending(facts: Mapping[str, Any]) -> DecisionOutcome:
    """What outcome by the facts of a record."""
    ends = facts["over"] or is_last(Cause(facts["cause"]), facts["times"])
    return DecisionOutcome.REFUSED if ends else DecisionOutcome.WAITING
