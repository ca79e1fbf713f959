"""The shape of a node: one table for REST, the live feed, the command line and the API document.

Each field is one line of `NODE_FIELDS`, which states the views that have the field: the list, the single
node, the live feed. The live feed always has every key. REST omits an empty or null value if the line says so
(`contract/http-api.md` §2.1, §2.3). Conflicts and events have their shapes here too, replicas in
`nodes/replicas/shape.py`. `node_rows.py` and `nodes/live/rows.py` read them.
"""

from dataclasses import replace

from django.db.models import (
    Case,
    Count,
    F,
    OuterRef,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from localai_cluster.web.shapes import (
    BYTES,
    FLAG,
    TEXT,
    TEXTS,
    TIME,
    UUID,
    Field,
    Shape,
    Time,
    column,
    count,
    enum,
    field,
    mapping_schema,
    one_of,
    text,
)
from nodes.models import (
    BroughtModel,
    NodeConflict,
    NodeEvent,
    NodeLabel,
    NodeModel,
    NodeStatus,
    NodeType,
)
from nodes.replicas.shape import LIVE_MODEL

ZERO_TIME = "0001-01-01T00:00:00Z"
"""Stands in lists for the time of the last heartbeat of a node that never sent one."""

NODE_STATUS = enum("NodeStatus", NodeStatus)
NODE_TYPE_SCHEMA = enum("NodeTypeEnum", NodeType)
CONFLICT_KIND_SCHEMA = enum("ConflictKindEnum", NodeConflict.Mismatch)
CONFLICT_STATE_SCHEMA = enum("ConflictStateEnum", NodeConflict.State)
EVENT_KIND_SCHEMA = enum("EventKindEnum", NodeEvent.Kind)

FACT_SHAPE = Shape(
    "Fact",
    "Since when something holds, who said so and why.",
    [field("at", TIME), field("by", TEXT), field("reason", TEXT)],
)


def fact_column(at: str, by: str, reason: str) -> Combinable:
    """Return a column with a fact about a node as a JSON text; null if the fact does not hold."""
    return FACT_SHAPE.read(unless_null=at, at=Time(at), by=F(by), reason=F(reason))


def _fact(name: str, at: str, by: str, reason: str, meaning: str = "") -> Field:
    return column(
        name,
        FACT_SHAPE.ref,
        meaning,
        source=fact_column(at, by, reason),
        nullable=True,
        value_shape=FACT_SHAPE,
    )


def _subquery_by_node(
    rows: QuerySet[NodeModel] | QuerySet[NodeConflict] | QuerySet[BroughtModel], figure: Count | Sum
) -> Coalesce:
    grouped = rows.filter(node=OuterRef("pk")).order_by().values("node").annotate(figure=figure)
    return Coalesce(Subquery(grouped.values("figure")), 0)


_OPEN_CONFLICTS = NodeConflict.objects.filter(state=NodeConflict.State.OPEN)
_DRAIN_COLUMNS = [
    column("since", TIME, source=Time("drained_at")),
    column("by", TEXT, source=F("drained_by")),
    column("reason", TEXT, source=F("drain_reason")),
    column("own", FLAG, "Its worker drained it; the next registration ends that.", source=F("drain_is_own")),
]
_DRAIN_END_COLUMNS = [
    column(
        "deadline",
        TIME,
        "When the replicas go in any case.",
        source=Time("drain_deadline"),
        nullable=True,
    ),
    column(
        "engines_gone_at",
        TIME,
        "When its worker reported that no engine runs there: it is safe to power off.",
        nullable=True,
    ),
    column("engines_error", TEXT, "Why it cannot be confirmed that its engines have stopped."),
]
DRAIN_SHAPE = Shape(
    "Drain",
    "A drain, and what remains of it.",
    [
        *_DRAIN_COLUMNS,
        column(
            "in_flight",
            count(),
            "Requests that still run.",
            source=_subquery_by_node(NodeModel.objects.all(), Sum("in_flight")),
        ),
        column(
            "replicas",
            count(),
            "Replicas that are still there.",
            source=_subquery_by_node(NodeModel.objects.all(), Count("pk")),
        ),
        *(replace(one, optional=True, nullable=False) for one in _DRAIN_END_COLUMNS),
    ],
)
LIVE_DRAIN_SHAPE = Shape(
    "LiveDrain",
    "A drain; what remains of it is in the node's replicas.",
    [*_DRAIN_COLUMNS, *_DRAIN_END_COLUMNS],
)
IDENTITY_SHAPE = Shape(
    "Identity",
    "Who the node proves to be.",
    [
        column("weak", FLAG, "Known by the shared token only.", source=F("weak_identity")),
        column("fingerprint", TEXT, "SHA-256 of the worker's own secret.", optional=True),
        column("source_address", TEXT, "Where it registered from.", optional=True),
        column("first_seen", TIME, source=Time("created_at")),
        column("bound_at", TIME, "When a secret was first bound.", optional=True),
        column("instance", TEXT, "The worker process that speaks for the node.", optional=True),
        column("rotation_requested_at", TIME, optional=True),
        column("open_conflicts", count(), source=_subquery_by_node(_OPEN_CONFLICTS, Count("pk"))),
    ],
)
OVERRIDE_SHAPE = Shape(
    "Override",
    "Who set a value instead of the worker, and when.",
    [
        field("by", TEXT, "Empty if the timeline no longer knows it."),
        field("at", TIME, nullable=True),
    ],
)
OVERRIDES_SHAPE = Shape(
    "Overrides",
    "An administrator's value instead of the worker's.",
    [
        field("max_replicas_per_model", OVERRIDE_SHAPE.ref, optional=True),
        field("vram_budget", OVERRIDE_SHAPE.ref, optional=True),
        field("disk_quota", OVERRIDE_SHAPE.ref, optional=True),
    ],
)
INVENTORY_SHAPE = Shape(
    "Inventory",
    "As of when its list of backends is true.",
    [
        column("at", TIME, "Null if the worker never gave one.", source=Time("inventory_at"), nullable=True),
        column("error", TEXT, "Why there is no newer one.", source=F("inventory_error")),
    ],
)
FILE_PORT_SHAPE = Shape(
    "FilePort",
    "A file port that does not answer: no load brings files to the node until a check succeeds.",
    [
        column("error", TEXT, source=F("file_port_error")),
        column("since", TIME, source=Time("file_port_failed_at")),
        column("next_check_at", TIME, source=Time("file_port_next_check_at"), nullable=True),
    ],
)

GPU_SHAPE = Shape(
    "Gpu",
    "One GPU of a node, as its worker last reported it; memory in bytes.",
    [
        field("index", count()),
        field("uuid", TEXT, "Empty if the driver does not report it."),
        field("name", TEXT),
        field("total_vram", BYTES),
        field("free_vram", BYTES),
        field("reserved_vram", BYTES, "Of what is free, what loads will still take."),
        field("utilization", count(0, maximum=100), "Percent; null if it is not reported.", nullable=True),
        field("temperature", count(), "Degrees Celsius.", optional=True),
        field("power", count(), "Watts.", optional=True),
        field("power_limit", count(), "The most watts that its driver lets it draw.", optional=True),
        field("ecc_errors", count(), "Uncorrected memory errors.", optional=True),
        field("driver", TEXT, optional=True),
    ],
)
SYSTEM_SHAPE = Shape(
    "NodeSystem",
    "What identifies the machine's software and processor, as its worker reported it.",
    [
        field("os", TEXT, optional=True),
        field("kernel", TEXT, optional=True),
        field("cpu", TEXT, optional=True),
        field("cpu_count", count(), "Logical processors.", optional=True),
        field("cpu_cores", count(), optional=True),
        field("booted_at", TIME, optional=True),
    ],
)

JOINED_SHAPE = Shape(
    "Joined",
    "The join token that the node registered with.",
    [field("token", UUID, "Its id."), field("note", TEXT), field("by", TEXT, "Who made it.")],
)

LIST_VIEW, DETAIL_VIEW, LIVE_VIEW = "list", "detail", "live"
REST_VIEWS = (LIST_VIEW, DETAIL_VIEW)
ALL_VIEWS = (LIST_VIEW, DETAIL_VIEW, LIVE_VIEW)
NODE_FIELDS: tuple[tuple[tuple[str, ...], Field], ...] = (
    (ALL_VIEWS, column("id", UUID)),
    (ALL_VIEWS, column("name", TEXT)),
    (ALL_VIEWS, column("node_type", NODE_TYPE_SCHEMA.ref)),
    (ALL_VIEWS, column("address", TEXT, "gRPC host:port; empty for agents.")),
    (ALL_VIEWS, column("http_address", TEXT)),
    (ALL_VIEWS, column("status", NODE_STATUS.ref)),
    ((LIVE_VIEW,), field("reason", TEXT, "Why it has its status; empty for a healthy one.")),
    (
        (LIVE_VIEW,),
        field("since", TIME, "Since when it has its status; null for a healthy one.", nullable=True),
    ),
    (ALL_VIEWS, column("total_vram", BYTES)),
    (ALL_VIEWS, column("available_vram", BYTES, "Never more than the budget.")),
    (ALL_VIEWS, column("reserved_vram", BYTES)),
    (ALL_VIEWS, column("total_ram", BYTES)),
    (ALL_VIEWS, column("available_ram", BYTES)),
    (ALL_VIEWS, column("total_disk", BYTES)),
    (ALL_VIEWS, column("available_disk", BYTES)),
    (
        (DETAIL_VIEW, LIVE_VIEW),
        field("gpus", GPU_SHAPE.many, "One by one; empty if its worker does not report them."),
    ),
    ((DETAIL_VIEW,), column("system", SYSTEM_SHAPE.ref)),
    (ALL_VIEWS, column("gpu_vendor", TEXT)),
    (ALL_VIEWS, column("gpu_compute_capability", TEXT)),
    (ALL_VIEWS, column("capability", TEXT, optional=True)),
    (ALL_VIEWS, column("max_replicas_per_model", count(1, maximum=2**31 - 1))),
    (ALL_VIEWS, column("max_replicas_per_model_manually_set", FLAG)),
    (ALL_VIEWS, column("vram_budget", TEXT, "As it was typed.", optional=True)),
    (ALL_VIEWS, column("vram_budget_bytes", BYTES, "The ceiling that the budget means.", optional=True)),
    (ALL_VIEWS, column("vram_budget_manually_set", FLAG)),
    (ALL_VIEWS, column("disk_quota", TEXT, "For the files of models, as it was typed.", optional=True)),
    (ALL_VIEWS, column("disk_quota_bytes", BYTES, "The bytes that it means.", optional=True)),
    (
        (DETAIL_VIEW,),
        column(
            "model_bytes",
            BYTES,
            "Of the files that loads have sent to it.",
            source=_subquery_by_node(BroughtModel.objects.all(), Sum("size")),
        ),
    ),
    (ALL_VIEWS, column("weak_identity", FLAG, "Known by the shared token only.", optional=True)),
    (
        REST_VIEWS,
        column(
            "last_heartbeat",
            TIME,
            "The year-1 stamp before the first heartbeat.",
            source=Coalesce(Time("last_heartbeat"), Value(ZERO_TIME)),
        ),
    ),
    ((LIVE_VIEW,), column("last_heartbeat", TIME, nullable=True)),
    (ALL_VIEWS, column("created_at", TIME, "First seen.")),
    (REST_VIEWS, column("updated_at", TIME)),
    (ALL_VIEWS, field("model_count", count(), "Loaded replicas.")),
    (ALL_VIEWS, field("in_flight_count", count(), "Requests on loaded and unloading replicas.")),
    ((LIST_VIEW,), field("labels", mapping_schema(TEXT), optional=True)),
    ((DETAIL_VIEW, LIVE_VIEW), field("labels", mapping_schema(TEXT))),
    (
        ALL_VIEWS,
        _fact(
            "rejected",
            "rejected_at",
            "rejected_by",
            "reject_reason",
            "An admin's no; the status stays `pending`.",
        ),
    ),
    (
        ALL_VIEWS,
        _fact("revoked", "revoked_at", "revoked_by", "revoke_reason", "Its secret counts no longer."),
    ),
    (
        REST_VIEWS,
        field("open_conflicts", count(1), "Identity conflicts that wait for a decision.", optional=True),
    ),
    ((LIVE_VIEW,), field("open_conflicts", count(), "Identity conflicts that wait for a decision.")),
    ((DETAIL_VIEW,), _fact("approval", "approved_at", "approved_by", "approval_reason")),
    ((DETAIL_VIEW,), _fact("offline", "offline_at", "offline_by", "offline_reason")),
    ((DETAIL_VIEW,), _fact("unhealthy", "unhealthy_at", "unhealthy_by", "unhealthy_reason")),
    (
        (DETAIL_VIEW,),
        column(
            "drain",
            DRAIN_SHAPE.ref,
            source=DRAIN_SHAPE.read(unless_null="drained_at"),
            nullable=True,
            value_shape=DRAIN_SHAPE,
        ),
    ),
    (
        (LIVE_VIEW,),
        column(
            "drain",
            LIVE_DRAIN_SHAPE.ref,
            source=LIVE_DRAIN_SHAPE.read(unless_null="drained_at"),
            nullable=True,
            value_shape=LIVE_DRAIN_SHAPE,
        ),
    ),
    (
        (DETAIL_VIEW, LIVE_VIEW),
        column(
            "joined",
            JOINED_SHAPE.ref,
            "Null if it came with the registration token or was enrolled.",
            source=JOINED_SHAPE.read(
                unless_null="joined_with", token=text("joined_with"), note=F("joined_note"), by=F("joined_by")
            ),
            nullable=True,
            value_shape=JOINED_SHAPE,
        ),
    ),
    (ALL_VIEWS, column("worker_version", TEXT, "Of our worker, from its last registration.", optional=True)),
    (
        ALL_VIEWS,
        field("version_skew", TEXT, "What is odd about its version.", optional=True),
    ),
    (
        (DETAIL_VIEW,),
        column("identity", IDENTITY_SHAPE.ref, source=IDENTITY_SHAPE.read(), value_shape=IDENTITY_SHAPE),
    ),
    ((DETAIL_VIEW, LIVE_VIEW), column("revision", count(), "Moves with every change but heartbeats.")),
    ((DETAIL_VIEW,), field("overrides", OVERRIDES_SHAPE.ref)),
    (
        (DETAIL_VIEW,),
        field("label_sources", mapping_schema(one_of(NodeLabel.Source)), "Who set which label."),
    ),
    (
        (DETAIL_VIEW,),
        column("inventory", INVENTORY_SHAPE.ref, source=INVENTORY_SHAPE.read(), value_shape=INVENTORY_SHAPE),
    ),
    (
        (DETAIL_VIEW, LIVE_VIEW),
        column(
            "file_port",
            FILE_PORT_SHAPE.ref,
            "Null while its file port answers.",
            source=FILE_PORT_SHAPE.read(unless_null="file_port_failed_at"),
            nullable=True,
            value_shape=FILE_PORT_SHAPE,
        ),
    ),
    ((LIVE_VIEW,), field("models", LIVE_MODEL.many)),
    (
        (LIVE_VIEW,),
        field("departed_engines", count(), "Engines of former replicas whose end is not confirmed."),
    ),
    ((LIVE_VIEW,), field("departed_until", TIME, "When the last of them counts as ended.", nullable=True)),
    ((LIVE_VIEW,), field("backends", TEXTS, "Names of what is installed.")),
    (
        (LIVE_VIEW,),
        column("inventory_at", TIME, "Time of `backends`; null before the first list.", nullable=True),
    ),
    ((LIVE_VIEW,), column("inventory_error", TEXT, "Why there is no newer one.")),
    ((LIVE_VIEW,), column("fingerprint", TEXT, "SHA-256 of the worker's own secret.")),
    ((LIVE_VIEW,), column("source_address", TEXT, "Where it registered from.")),
    ((LIVE_VIEW,), column("rotation_requested_at", TIME, nullable=True)),
)
"""Every key of a node, with the views that have the key. A field without a column comes from another
table."""


def _fields_of_view(view: str) -> list[Field]:
    fields = [shape_field for views, shape_field in NODE_FIELDS if view in views]
    if view == LIVE_VIEW:
        return [replace(shape_field, optional=False) for shape_field in fields]
    return [
        replace(shape_field, optional=shape_field.optional or shape_field.nullable, nullable=False)
        for shape_field in fields
    ]


NODE_SHAPE = Shape("Node", "One node in the list (§2.1).", _fields_of_view(LIST_VIEW))
NODE_DETAIL_SHAPE = Shape(
    "NodeDetail",
    "One node on its own (§2.3): `labels` is always there, and so is what lies behind the status.",
    _fields_of_view(DETAIL_VIEW),
)
LIVE_NODE_SHAPE = Shape(
    "LiveNode",
    "One node as pages show it: every key is always there, empty rather than absent.",
    _fields_of_view(LIVE_VIEW),
)
LIVE_NODE_PATCH_SHAPE = Shape(
    "LiveNodePatch",
    "What changed in a node: its id and the keys that have another value now; all of them if it is new.",
    _fields_of_view(LIVE_VIEW),
    required=["id"],
)


def _claim(*kinds: NodeConflict.Mismatch) -> Case:
    return Case(When(kind__in=kinds, then=F("claim")), default=Value(""))


CONFLICT_SHAPE = Shape(
    "Conflict",
    "A claim to the identity of a node.",
    [
        column("id", UUID),
        column("node_id", UUID),
        column("node_name", TEXT, source=F("node__name")),
        column("kind", CONFLICT_KIND_SCHEMA.ref),
        column("state", CONFLICT_STATE_SCHEMA.ref),
        column(
            "fingerprint",
            TEXT,
            "Fingerprint of the secret that the other machine sent.",
            source=_claim(NodeConflict.Mismatch.SECRET, NodeConflict.Mismatch.WEAK),
            optional=True,
        ),
        column(
            "instance",
            TEXT,
            "The process that called.",
            source=_claim(NodeConflict.Mismatch.INSTANCE),
            optional=True,
        ),
        column("claimed_name", TEXT, optional=True),
        column("source_address", TEXT, "Where the claim came from."),
        column("advertised_address", TEXT, optional=True),
        column("node_source_address", TEXT, "Where the node itself was seen."),
        column("count", count(1)),
        column("first_at", TIME),
        column("last_at", TIME),
        column("decided_at", TIME, optional=True),
        column("decided_by", TEXT, optional=True),
    ],
)
EVENT_SHAPE = Shape(
    "Event",
    "One thing that happened to a node.",
    [
        column("id", count(1)),
        column("node_id", UUID),
        column("node_name", TEXT),
        column("kind", EVENT_KIND_SCHEMA.ref),
        column("at", TIME),
        column("last_at", TIME, "Repeated conflicts of one minute are one event."),
        column("count", count(1)),
        column("actor_kind", TEXT),
        column("actor", TEXT),
        column("cause", TEXT),
        column("status_before", TEXT),
        column("status_after", TEXT),
        column("detail", mapping_schema({}), optional=True),
        column("request_id", TEXT, optional=True),
    ],
)
