"""How an attempt of a load fails, and what nodes have refused it so far.

A refusal by one node says nothing about the next: the load tries up to `MOST_NODES`, each once. What they
said is kept in the operation's payload and is the error in the end, so a definition that no engine can load
costs a few attempts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from localai_cluster import errors

MOST_NODES = 3
ENGINE_DEATHS = 3
"""A model whose engine dies while loading is not tried more often than this; the operation counts them."""
_KEPT = "refusals"


class Cause(StrEnum):
    """Why an attempt of a load ended without a replica, or was not made."""

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
"""After how many of a kind a load ends; the others end it only when no request needs it any more."""


def is_last(cause: Cause, times: int) -> bool:
    """Whether the load ends when this has happened so many times."""
    return cause in _MOST and times >= _MOST[cause]


class LoadFailed(errors.Unavailable):
    """The model could not be loaded."""

    code = "model_load_failed"


class NodeRefused(LoadFailed):
    """This node could not load it; another one may."""


class WorkerGone(errors.Unavailable):
    """The attempt's worker is gone, or its place on it."""

    code = "worker_gone"


@dataclass(frozen=True)
class NodeReason:
    """A node that could not load the model, and why."""

    node_id: UUID
    node_name: str
    reason: str


def refusals(payload: Mapping[str, Any]) -> list[NodeReason]:
    """What an operation's payload says, in the order in which it was tried."""
    return [NodeReason(UUID(id), name, reason) for id, name, reason in payload.get(_KEPT, ())]


def with_refusal(payload: Mapping[str, Any], refusal: NodeReason) -> dict[str, Any]:
    """The payload with one more."""
    kept = [[str(one.node_id), one.node_name, one.reason] for one in [*refusals(payload), refusal]]
    return {**payload, _KEPT: kept}


def refused_by_all(payload: Mapping[str, Any]) -> LoadFailed:
    """The end of a load that nodes have refused: each node with its reason, equal reasons once."""
    by_reason: dict[str, list[str]] = {}
    for one in refusals(payload):
        by_reason.setdefault(one.reason, []).append(one.node_name)
    return LoadFailed("; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()))
