"""Failures of the attempts of a load, and the nodes that have refused it so far.

A refusal by one node does not apply to the next: the load tries up to `MOST_NODES`, each once. The payload of
the operation stores the reasons, which are the error in the end, so a definition that no engine can load
costs a few attempts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from localai_cluster.kit import errors

MOST_NODES = 3
ENGINE_DEATHS = 3
"""A model whose engine dies while loading is not tried more often than this; the operation counts them."""
_KEPT = "refusals"


class Cause(StrEnum):
    """The cause of an attempt without a replica, or of no attempt."""

    WORKER_GONE = "worker_gone"
    ENGINE_DIED = "engine_died"
    NODE_REFUSED = "node_refused"
    FAILED = "failed"
    ON_ITS_WAY = "on_its_way"
    INTERRUPTED = "interrupted"
    NO_BUS = "no_bus"
    UNDEFINED = "undefined"


_MOST = {
    Cause.ENGINE_DIED: ENGINE_DEATHS,
    Cause.NODE_REFUSED: MOST_NODES,
    Cause.FAILED: 1,
    Cause.UNDEFINED: 1,
}
"""Number of failures of each cause that end a load; other causes end only a load that is not needed."""


def is_last(cause: Cause, times: int) -> bool:
    """Return True if the load ends after this cause has occurred `times` times."""
    return cause in _MOST and times >= _MOST[cause]


class LoadFailed(errors.Unavailable):
    """The model could not be loaded."""

    message = "The model could not be loaded."
    code = "model_load_failed"


class NodeRefused(LoadFailed):
    """This node could not load it; another one may."""

    message = "This node could not load it; another one may."


class WorkerGone(errors.Unavailable):
    """The attempt's worker is gone, or its place on it."""

    message = "The attempt's worker is gone, or its place on it."
    code = "worker_gone"


@dataclass(frozen=True)
class NodeReason:
    """A node that could not load the model, and why."""

    node_id: UUID
    node_name: str
    reason: str


def refusals(payload: Mapping[str, Any]) -> list[NodeReason]:
    """Return the refusals in an operation's payload, in the order of the attempts."""
    return [NodeReason(UUID(id), name, reason) for id, name, reason in payload.get(_KEPT, ())]


def with_refusal(payload: Mapping[str, Any], refusal: NodeReason) -> dict[str, Any]:
    """Return the payload with one more refusal."""
    rows = [[str(row.node_id), row.node_name, row.reason] for row in [*refusals(payload), refusal]]
    return {**payload, _KEPT: rows}


def refused_by_all(payload: Mapping[str, Any]) -> LoadFailed:
    """Return the end of a load that nodes have refused: each node with its reason, equal reasons once."""
    by_reason: dict[str, list[str]] = {}
    for refusal in refusals(payload):
        by_reason.setdefault(refusal.reason, []).append(refusal.node_name)
    return LoadFailed("; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()))
