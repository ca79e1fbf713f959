"""The shapes of a replica in REST and in the live feed."""

from django.db.models import Case, CharField, DateTimeField, F, Value, When
from django.db.models.functions import Cast, Concat

from localai_cluster.web.shapes import BYTES, TEXT, TIME, UUID, Shape, Time, column, count, enum
from nodes.models import LOADING_PHASES, OwnerKind, Phase, PhaseReason, ReplicaState

REPLICA_STATE = enum("ReplicaStateEnum", ReplicaState)
REPLICA_PHASE = enum("ReplicaPhase", Phase)
PHASE_REASON = enum("PhaseReason", PhaseReason)

_REPLICA_COLUMNS = [
    column("id", UUID),
    column("model_name", TEXT),
    column("replica_index", count()),
    column("state", REPLICA_STATE.ref),
    column("in_flight", count(), "Requests that run on it."),
    column("last_used", TIME),
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
        column("node_id", UUID),
        column("address", TEXT),
        column("loading_by", TEXT, source=_LOADING_BY_EXPRESSION, optional=True),
        column("backend_type", TEXT, optional=True),
        column("config_revision", TEXT, optional=True),
        column("effective_options_hash", TEXT, optional=True),
        *_STOP_COLUMNS,
        column("cleanup_attempts", count(), source=F("stop_attempts"), optional=True),
        column("created_at", TIME),
        column("updated_at", TIME),
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
