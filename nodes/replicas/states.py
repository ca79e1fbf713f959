"""The life of an engine, from its reserved slot to the confirmed end of its process.

One row of `node_models` is one engine. `PHASES` states for each phase its owners, the effect of its deadline,
and the event that ends it. `TRANSITIONS` states for each event the phases in which it is allowed and the
phase that follows; None stands for no row. The diagram in `docs/replica-states.md` is generated from both.
Nothing here reads a clock or a database: `engines.py` turns a transition into an UPDATE, and constraints of
the table keep phase and columns consistent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from nodes.models.replica import REASONS_BY_PHASE, OwnerKind, Phase, PhaseReason
from nodes.placement import load_times

LOAD_LIMIT = timedelta(seconds=load_times.MAX_HOLD + load_times.MAX_LOAD)
"""Longest time from the reservation of a slot to the publication of the replica (C31, C28)."""
UNANSWERED_START_LIMIT = timedelta(seconds=60)
"""Time in which an unanswered start command may still reach its worker. Until then the worker's answer "no
such process" does not prove the end of the engine."""
UNCONFIRMED_STOP_LIMIT = timedelta(minutes=2)
"""Time for which a stop may stay unconfirmed; then an operator sees an unload of the replica in the inbox."""
DEPARTED_ENGINE_LIMIT = timedelta(days=7)
"""Time after which the engine of a node that has left counts as ended without a confirmation."""

OPERATION, INTENT, CONTROLLERS = OwnerKind.OPERATION, OwnerKind.INTENT, OwnerKind.CONTROLLERS
REPORTED_STOP_REASONS = REASONS_BY_PHASE[Phase.STOPPING] - {PhaseReason.UNLOAD, PhaseReason.LOAD_FAILED}
"""Reasons of stops without an operation that are reported to operators if they stay unconfirmed."""


@dataclass(frozen=True)
class PhaseRules:
    """Who owns a replica in one phase, what its deadline does, and what ends the phase."""

    description: str
    owners: frozenset[OwnerKind]
    deadline: str
    """What happens at the deadline; empty if the phase has none."""
    ends: str
    """Who or what ends the phase."""
    reasons: frozenset[PhaseReason] = frozenset()


PHASES: Mapping[Phase, PhaseRules] = {
    Phase.RESERVED: PhaseRules(
        "A load has taken the slot and the memory. No engine can exist.",
        frozenset({OPERATION}),
        "The load is too old: the slot is free again.",
        "The attempt of the load. Without it a controller frees the slot.",
    ),
    Phase.STAGING: PhaseRules(
        "The load sends the model's files to the node. No engine can exist.",
        frozenset({OPERATION}),
        "The load is too old: the slot is free again.",
        "The attempt of the load. Without it a controller frees the slot.",
    ),
    Phase.STARTING: PhaseRules(
        "The start may have been sent: an engine may exist.",
        frozenset({OPERATION}),
        "The load is too old: its engine is stopped.",
        "The attempt of the load. Without it a controller stops the engine.",
    ),
    Phase.SERVING: PhaseRules(
        "Requests go to it.",
        frozenset(),
        "",
        "Nobody, until it is drained, terminated, lost, or its node leaves.",
    ),
    Phase.DRAINING: PhaseRules(
        "It gets no new requests and may serve again.",
        frozenset({OPERATION, INTENT, CONTROLLERS}),
        "Its requests are not waited for any longer: the stop is sent.",
        "The unload or the upgrade that owns it; a controller where it is lost. When the owner has ended"
        " before a stop was sent, the replica serves again.",
        REASONS_BY_PHASE[Phase.DRAINING],
    ),
    Phase.TERMINATING: PhaseRules(
        "It gets no new requests and never serves again.",
        frozenset({OPERATION, CONTROLLERS}),
        "Its requests are not waited for any longer: the stop is sent.",
        "The unload that has taken it over, else a controller, as soon as no request runs there.",
        REASONS_BY_PHASE[Phase.TERMINATING],
    ),
    Phase.STOPPING: PhaseRules(
        "The stop was sent or is due, until the worker confirms the end of the engine.",
        frozenset({OPERATION, CONTROLLERS}),
        "An operator sees an unload of it, unless the engine belongs to a failed load. Stops go on.",
        "The unload that owns it, else a controller, which sends the stop again after 2, 4 … 300 s.",
        REASONS_BY_PHASE[Phase.STOPPING],
    ),
    Phase.DEPARTED: PhaseRules(
        "Its node has left or its worker was replaced. It is a replica for no client, counter or hook; slot"
        " and memory stay taken.",
        frozenset({CONTROLLERS}),
        "The engine counts as ended.",
        "A registration that does not list it, the removal of the node, or a controller, which stops exactly"
        " this engine as soon as the node can be reached.",
        REASONS_BY_PHASE[Phase.DEPARTED],
    ),
}


class ReplicaEvent(StrEnum):
    """An event in the life of an engine."""

    RESERVED = "reserved"
    STAGING_BEGUN = "staging_begun"
    STAGED = "staged"
    START_SENT = "start_sent"
    PUBLISHED = "published"
    LOAD_ENDED = "load_ended"
    DRAINED = "drained"
    TAKEN_OVER = "taken_over"
    HANDED_BACK = "handed_back"
    LOST = "lost"
    RETURNED = "returned"
    EVICTED = "evicted"
    REPLACED = "replaced"
    WRONG_MODEL = "wrong_model"
    STOP_SENT = "stop_sent"
    STOP_FAILED = "stop_failed"
    NODE_LEFT = "node_left"
    CONFIRMED = "confirmed"
    NODE_FORGOTTEN = "node_forgotten"


@dataclass(frozen=True)
class ReplicaTransition:
    """One event of the table. `follows` maps each phase in which the event is allowed to the next phase."""

    sentence: str
    follows: Mapping[Phase | None, Phase | None]


def _to(target: Phase | None, *sources: Phase | None) -> dict[Phase | None, Phase | None]:
    return dict.fromkeys(sources, target)


WITHOUT_ENGINE = (Phase.RESERVED, Phase.STAGING)
"""Phases before the start of an engine process."""
_ENGINE_PHASES = tuple(phase for phase in Phase if phase not in (*WITHOUT_ENGINE, Phase.DEPARTED))

TRANSITIONS: Mapping[ReplicaEvent, ReplicaTransition] = {
    ReplicaEvent.RESERVED: ReplicaTransition(
        "A load takes the lowest free index and the memory that it needs (R1.63, R2.44).",
        _to(Phase.RESERVED, None),
    ),
    ReplicaEvent.STAGING_BEGUN: ReplicaTransition(
        "The load sends files, alone of all loads of the model on the node (R2.26).",
        _to(Phase.STAGING, Phase.RESERVED, Phase.STAGING),
    ),
    ReplicaEvent.STAGED: ReplicaTransition("The files are there.", _to(Phase.RESERVED, Phase.STAGING)),
    ReplicaEvent.START_SENT: ReplicaTransition(
        "The load is about to send the start, or to send it again. Only its own attempt may do so.",
        _to(Phase.STARTING, Phase.RESERVED, Phase.STARTING),
    ),
    ReplicaEvent.PUBLISHED: ReplicaTransition(
        "The engine has loaded the model, and its attempt still owns the row.",
        _to(Phase.SERVING, Phase.STARTING),
    ),
    ReplicaEvent.LOAD_ENDED: ReplicaTransition(
        "The attempt ended without a replica, or does not run any more: its engine, if it can have one, is"
        " stopped (R2.62).",
        {**_to(None, *WITHOUT_ENGINE), Phase.STARTING: Phase.STOPPING},
    ),
    ReplicaEvent.DRAINED: ReplicaTransition(
        "An unload or an upgrade stops new requests to the replica, or an unload takes it over from an"
        " upgrade or another unload.",
        _to(Phase.DRAINING, Phase.SERVING, Phase.DRAINING),
    ),
    ReplicaEvent.TAKEN_OVER: ReplicaTransition(
        "An unload takes over a replica that controllers were about to stop: a lost one does not return.",
        {**_to(Phase.TERMINATING, Phase.DRAINING, Phase.TERMINATING), Phase.STOPPING: Phase.STOPPING},
    ),
    ReplicaEvent.HANDED_BACK: ReplicaTransition(
        "The unload ended before it sent a stop, while an upgrade is about to stop the engine.",
        _to(Phase.DRAINING, Phase.DRAINING),
    ),
    ReplicaEvent.LOST: ReplicaTransition(
        "It did not answer a request or two probes. Before it is stopped a controller tries its engine once"
        " more.",
        _to(Phase.DRAINING, Phase.SERVING),
    ),
    ReplicaEvent.RETURNED: ReplicaTransition(
        "The unload or upgrade ended before a stop was sent, or the engine of a lost replica answers.",
        _to(Phase.SERVING, Phase.DRAINING),
    ),
    ReplicaEvent.EVICTED: ReplicaTransition(
        "A load takes its memory (R2.51).",
        _to(Phase.TERMINATING, Phase.SERVING),
    ),
    ReplicaEvent.REPLACED: ReplicaTransition(
        "One of the edited definition serves, or needs its memory (T-REV-4).",
        _to(Phase.TERMINATING, Phase.SERVING),
    ),
    ReplicaEvent.WRONG_MODEL: ReplicaTransition(
        "Its engine serves another model, or none.",
        _to(Phase.TERMINATING, Phase.SERVING),
    ),
    ReplicaEvent.STOP_SENT: ReplicaTransition(
        "A stop is about to be sent, by the unload or by the controller that has claimed the row: no"
        " request runs there, the deadline is over, or the last stop was not confirmed.",
        {
            **_to(Phase.STOPPING, Phase.DRAINING, Phase.TERMINATING, Phase.STOPPING),
            Phase.DEPARTED: Phase.DEPARTED,
        },
    ),
    ReplicaEvent.STOP_FAILED: ReplicaTransition(
        "The worker did not confirm it: the engine may still run.",
        {Phase.STOPPING: Phase.STOPPING, Phase.DEPARTED: Phase.DEPARTED},
    ),
    ReplicaEvent.NODE_LEFT: ReplicaTransition(
        "The node fell silent, was revoked or handed over, its worker left or its drain ended; or a"
        " registration does not say that the engine runs.",
        {**_to(None, *WITHOUT_ENGINE), **_to(Phase.DEPARTED, *_ENGINE_PHASES, Phase.DEPARTED)},
    ),
    ReplicaEvent.CONFIRMED: ReplicaTransition(
        "The engine does not run any more: its worker confirmed the stop, does not list the engine, has given"
        " its address to another one, or started anew.",
        _to(None, *WITHOUT_ENGINE, *_ENGINE_PHASES, Phase.DEPARTED),
    ),
    ReplicaEvent.NODE_FORGOTTEN: ReplicaTransition(
        "An admin removes the node, or it has been away for too long.",
        _to(None, *WITHOUT_ENGINE, *_ENGINE_PHASES, Phase.DEPARTED),
    ),
}
MOVES: Mapping[ReplicaEvent, Mapping[Phase, Phase]] = {
    event: {source: target for source, target in transition.follows.items() if source and target}
    for event, transition in TRANSITIONS.items()
}
"""By event: the allowed phases, each with the phase that follows; without phases whose row the event ends."""
