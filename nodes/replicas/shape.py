"""The shapes of a replica in REST and in the live feed."""

from django.db.models import Case, CharField, DateTimeField, F, Value, When
from django.db.models.functions import Cast, Concat

from localai_cluster.web.shapes import (
    BYTES,
    EXAMPLE_NODE_ID,
    EXAMPLE_TIME,
    TEXT,
    TIME,
    UUID,
    Shape,
    Time,
    column,
    count,
    enum,
)
from nodes.models import LOADING_PHASES, OwnerKind, Phase, PhaseReason, ReplicaState

REPLICA_STATE = enum("ReplicaStateEnum", ReplicaState)
REPLICA_PHASE = enum("ReplicaPhase", Phase)
PHASE_REASON = enum("PhaseReason", PhaseReason)

_REPLICA_COLUMNS = [
    column("id", UUID, example="7d3c3a52-0c54-4a8e-8f52-5a6d1c1de0aa"),
    column("model_name", TEXT, example="minilm"),
    column("replica_index", count(), example=0),
    column("state", REPLICA_STATE.ref, example="loaded"),
    column("in_flight", count(), "Requests that run on it.", example=2),
    column("last_used", TIME, example=EXAMPLE_TIME),
]
_NEXT_STOP_EXPRESSION = Case(
    When(phase=Phase.STOPPING, then=F("next_stop_at")),
    When(phase__in=(*LOADING_PHASES, Phase.SERVING, Phase.DEPARTED), then=Value(None, DateTimeField())),
    default=F("deadline"),
)
"""SQL expression: the time of the next stop or, while requests may still run, the deadline of the phase."""
_LOADING_BY_EXPRESSION = Case(
    When(
        owner_fence__isnull=False,
        then=Concat(Cast("owner_id", CharField()), Value(":"), Cast("owner_fence", CharField())),
    ),
    When(owner_kind=OwnerKind.OPERATION, then=Cast("owner_id", CharField())),
    When(reason=PhaseReason.EVICTED, then=Value("eviction")),
    When(reason=PhaseReason.REPLACED, then=Value("replaced")),
    When(reason=PhaseReason.LOST, then=Value("lost")),
    When(reason=PhaseReason.WRONG_MODEL, then=Value("another model")),
    default=Value(""),
    output_field=CharField(),
)
"""SQL expression: the owner of a replica or, without an owner, the reason, as in the reference's API."""
_STOP_COLUMNS = [
    column(
        "cleanup_error",
        TEXT,
        "Why the last stop of an unloading replica failed.",
        source=F("stop_error"),
        optional=True,
    ),
    column(
        "cleanup_next_retry_at",
        TIME,
        "When an unloading replica is stopped at the latest, or again.",
        source=Time(_NEXT_STOP_EXPRESSION),
        optional=True,
        nullable=True,
    ),
]
REPLICA = Shape(
    "Replica",
    "One replica (§2.3).",
    [
        *_REPLICA_COLUMNS,
        column("node_id", UUID, example=EXAMPLE_NODE_ID),
        column("address", TEXT, example="10.1.0.4:50052"),
        column("loading_by", TEXT, source=_LOADING_BY_EXPRESSION, optional=True),
        column("backend_type", TEXT, example="minilm", optional=True),
        column("config_revision", TEXT, example="3b1f6a6f6c0b", optional=True),
        column("effective_options_hash", TEXT, example="a94a8fe5ccb1", optional=True),
        *_STOP_COLUMNS,
        column("cleanup_attempts", count(), source=F("stop_attempts"), optional=True),
        column("created_at", TIME, example=EXAMPLE_TIME),
        column("updated_at", TIME, example=EXAMPLE_TIME),
    ],
)
LIVE_MODEL = Shape(
    "LiveModel",
    "One replica on a node, in any state.",
    [
        *_REPLICA_COLUMNS,
        column("backend_type", TEXT),
        column("created_at", TIME),
        column(
            "vram_needed", BYTES, "What it is estimated to allocate, reserved for its load; 0: not known."
        ),
        column("phase", REPLICA_PHASE.ref, "The step of its life that `state` summarizes."),
        column(
            "deadline",
            TIME,
            "The latest end of the phase; absent while it serves.",
            source=Time("deadline"),
            optional=True,
            nullable=True,
        ),
        column("reason", PHASE_REASON.ref, "Why it does not serve any more.", optional=True),
        *_STOP_COLUMNS,
    ],
)
