"""The decision record of an unload: the existing replicas and those that it stops.

The operation does the unload and is created first: a kill in between loses only the record.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from nodes.decisions import decision_log, snapshot_log
from nodes.decisions.decision_log import DecisionRecord
from nodes.decisions.snapshot_log import Section, State
from nodes.models import DecisionKind, NodeModel
from nodes.placement.evict import join_names
from nodes.placement.explain import LONGEST_SENTENCE, DecisionOutcome, truncate
from nodes.replicas import drains

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
