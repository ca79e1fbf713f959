"""The record of an unload: which replicas were there, and so which of them leave.

The operation is what has them unloaded, and it is made first: a kill in between costs the record only.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from nodes.models import DecisionKind, NodeModel
from nodes.placement.evict import named
from nodes.placement.explain import LONGEST_SENTENCE, Ending, cut
from nodes.placement.sections import Section, State
from nodes.replicas import drains, fleet_log, reasons
from nodes.replicas.reasons import Decided

_COLUMNS = ("id", "node_id", "node__name", "replica_index", "state")


def keep(
    model_name: str,
    operation_id: UUID,
    *,
    because: str,
    node_id: UUID | None,
    index: int | None,
    now: datetime,
) -> None:
    """Keeps why they leave: all of the model's, those of one node, or exactly one. Three statements."""
    rows = NodeModel.objects.of(model_name).values_list(*_COLUMNS)
    there = {row[0]: row[1:] for row in rows}
    of_operation = {
        "because": because,
        "node": None if node_id is None else str(node_id),
        "index": index,
    }
    seen = fleet_log.remember(
        {f"held/{model_name}": Section(there), f"unload/{operation_id}": Section(of_operation)}, now=now
    )
    told = reasons.without_fleet(Ending.UNLOADING, _words(there, of_operation))
    reasons.record(Decided(model_name, operation_id, told, seen, DecisionKind.UNLOAD), now=now)


def again(state: State, model_name: str, operation_id: UUID | None) -> str | None:
    """The sentence of the record, from what was seen; None if nothing of it is there."""
    told = state.get(f"unload/{operation_id}")
    return _words(state.get(f"held/{model_name}", {}), told) if told else None


def _words(there: Mapping[Any, Any], wish: Mapping[str, Any]) -> str:
    leave = [
        f"{index} on {node}"
        for node_id, node, index, state in there.values()
        if state in drains.HELD and wish["node"] in (None, str(node_id)) and wish["index"] in (None, index)
    ]
    which = f"replicas that leave: {named(leave)}" if leave else "no replica is there"
    return cut(f"{wish['because']}; {which}", LONGEST_SENTENCE)
