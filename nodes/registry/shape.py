"""The shape of a node: one table for REST, the live feed, the command line and the API document.

Each field is one line of `NODE_FIELDS`, which states the views that have the field: the list, the single
node, the live feed. The live feed always has every key. REST omits an empty or null value if the line says so
(`contract/http-api.md` §2.1, §2.3). `node_rows.py` and `nodes/live/rows.py` read them. Replicas have their
shapes in `nodes/replicas/shape.py`.
"""

from dataclasses import replace
from typing import Any

from django.db.models import Count, F, OuterRef, QuerySet, Subquery, Sum, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from localai_cluster.web.shapes import (
    BYTES,
    EXAMPLE_FINGERPRINT,
    EXAMPLE_NODE_ID,
    EXAMPLE_TIME,
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
from nodes.models import BroughtModel, NodeConflict, NodeLabel, NodeModel, NodeStatus, NodeType
from nodes.registry.states import FACT_COLUMNS
from nodes.replicas.shape import LIVE_MODEL

ZERO_TIME = "0001-01-01T00:00:00Z"
"""Stands in lists for the time of the last heartbeat of a node that never sent one."""

NODE_STATUS = enum("NodeStatus", NodeStatus)
NODE_TYPE_SCHEMA = enum("NodeTypeEnum", NodeType)

FACT_SHAPE = Shape(
    "Fact",
    "Since when something holds, who said so and why.",
    [field("at", TIME), field("by", TEXT), field("reason", TEXT)],
)


def fact_column(fact: str) -> Combinable:
    """Return a column with a fact about a node as a JSON text; null if the fact does not hold."""
    at, by, reason = FACT_COLUMNS[fact]
    return FACT_SHAPE.read(unless_null=at, at=Time(at), by=F(by), reason=F(reason))


def _nested(
    name: str, shape: Shape, meaning: str = "", source: Combinable | None = None, **options: Any
) -> Field:
    return column(name, shape.ref, meaning, source=source or shape.read(), value_shape=shape, **options)


def _nested_or_null(name: str, shape: Shape, present_if: str, meaning: str = "") -> Field:
    return _nested(name, shape, meaning, shape.read(unless_null=present_if), nullable=True)


def _fact(name: str, fact: str, meaning: str = "", **options: Any) -> Field:
    return _nested(name, FACT_SHAPE, meaning, fact_column(fact), nullable=True, **options)


def _subquery_by_node(
    rows: QuerySet[NodeModel] | QuerySet[NodeConflict] | QuerySet[BroughtModel], figure: Count | Sum
) -> Coalesce:
    grouped = rows.filter(node=OuterRef("pk")).order_by().values("node").annotate(figure=figure)
    return Coalesce(Subquery(grouped.values("figure")), 0)


_OPEN_CONFLICTS = NodeConflict.objects.filter(state=NodeConflict.State.OPEN)
_DRAIN_COLUMNS = [
    column("since", TIME, example=EXAMPLE_TIME, source=Time("drained_at")),
    column("by", TEXT, example="ann", source=F("drained_by")),
    column("reason", TEXT, example="new power supply", source=F("drain_reason")),
    column(
        "own",
        FLAG,
        "Its worker drained it; the next registration ends that.",
        example=False,
        source=F("drain_is_own"),
    ),
]
_DRAIN_END_COLUMNS = [
    column(
        "deadline",
        TIME,
        "When the replicas go in any case.",
        example="2026-08-22T09:25:04.120394Z",
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
            example=2,
            source=_subquery_by_node(NodeModel.objects.all(), Sum("in_flight")),
        ),
        column(
            "replicas",
            count(),
            "Replicas that are still there.",
            example=1,
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
        column("weak", FLAG, "Known by the shared token only.", example=False, source=F("weak_identity")),
        column(
            "fingerprint",
            TEXT,
            "SHA-256 of the worker's own secret.",
            example=EXAMPLE_FINGERPRINT,
            optional=True,
        ),
        column("source_address", TEXT, "Where it registered from.", example="10.1.0.4", optional=True),
        column("first_seen", TIME, example="2026-07-01T08:00:00Z", source=Time("created_at")),
        column(
            "bound_at", TIME, "When a secret was first bound.", example="2026-07-01T08:00:00Z", optional=True
        ),
        column(
            "instance",
            TEXT,
            "The worker process that speaks for the node.",
            example="5f0c1f8d6f3b4f0bb7b0d7f3c8a1e2d4",
            optional=True,
        ),
        column("rotation_requested_at", TIME, optional=True),
        column("open_conflicts", count(), example=0, source=_subquery_by_node(_OPEN_CONFLICTS, Count("pk"))),
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
        field(
            "max_replicas_per_model",
            OVERRIDE_SHAPE.ref,
            example={"by": "ann", "at": EXAMPLE_TIME},
            optional=True,
        ),
        field("vram_budget", OVERRIDE_SHAPE.ref, example={"by": "", "at": None}, optional=True),
        field("disk_quota", OVERRIDE_SHAPE.ref, optional=True),
    ],
)
INVENTORY_SHAPE = Shape(
    "Inventory",
    "As of when its list of backends is true.",
    [
        column(
            "at",
            TIME,
            "Null if the worker never gave one.",
            example=EXAMPLE_TIME,
            source=Time("inventory_at"),
            nullable=True,
        ),
        column("error", TEXT, "Why there is no newer one.", example="", source=F("inventory_error")),
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
        field("index", count(), example=0),
        field(
            "uuid",
            TEXT,
            "Empty if the driver does not report it.",
            example="GPU-5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11",
        ),
        field("name", TEXT, example="NVIDIA L4"),
        field("total_vram", BYTES, example=25757220864),
        field("free_vram", BYTES, example=20000000000),
        field("reserved_vram", BYTES, "Of what is free, what loads will still take.", example=0),
        field(
            "utilization",
            count(0, maximum=100),
            "Percent; null if it is not reported.",
            example=12,
            nullable=True,
        ),
        field("temperature", count(), "Degrees Celsius.", example=48, optional=True),
        field("power", count(), "Watts.", example=33, optional=True),
        field(
            "power_limit", count(), "The most watts that its driver lets it draw.", example=72, optional=True
        ),
        field("ecc_errors", count(), "Uncorrected memory errors.", example=0, optional=True),
        field("driver", TEXT, example="550.54.15, CUDA 12.4", optional=True),
    ],
)
SYSTEM_SHAPE = Shape(
    "NodeSystem",
    "What identifies the machine's software and processor, as its worker reported it.",
    [
        field("os", TEXT, example="Debian GNU/Linux 12 (bookworm)", optional=True),
        field("kernel", TEXT, example="6.1.0-18-amd64", optional=True),
        field("cpu", TEXT, example="AMD EPYC 7443P 24-Core Processor", optional=True),
        field("cpu_count", count(), "Logical processors.", example=48, optional=True),
        field("cpu_cores", count(), example=24, optional=True),
        field("booted_at", TIME, example="2026-08-01T06:00:00+00:00", optional=True),
    ],
)

JOINED_SHAPE = Shape(
    "Joined",
    "The join token that the node registered with.",
    [
        column("token", UUID, "Its id.", source=text("joined_with")),
        column("note", TEXT, source=F("joined_note")),
        column("by", TEXT, "Who made it.", source=F("joined_by")),
    ],
)

_LABELS_EXAMPLE = {
    "gpu.vendor": "nvidia",
    "gpu.vram": "16GB",
    "node.name": "gpu-a",
    "node.replica-slots": "2",
}
LIST_VIEW, DETAIL_VIEW, LIVE_VIEW = "list", "detail", "live"
REST_VIEWS = (LIST_VIEW, DETAIL_VIEW)
ALL_VIEWS = (LIST_VIEW, DETAIL_VIEW, LIVE_VIEW)
NODE_FIELDS: tuple[tuple[tuple[str, ...], Field], ...] = (
    (ALL_VIEWS, column("id", UUID, example=EXAMPLE_NODE_ID)),
    (ALL_VIEWS, column("name", TEXT, example="gpu-a")),
    (ALL_VIEWS, column("node_type", NODE_TYPE_SCHEMA.ref, example="backend")),
    (ALL_VIEWS, column("address", TEXT, "gRPC host:port; empty for agents.", example="10.1.0.4:50051")),
    (ALL_VIEWS, column("http_address", TEXT, example="10.1.0.4:50050")),
    (ALL_VIEWS, column("status", NODE_STATUS.ref, example="draining")),
    ((LIVE_VIEW,), field("reason", TEXT, "Why it has its status; empty for a healthy one.")),
    (
        (LIVE_VIEW,),
        field("since", TIME, "Since when it has its status; null for a healthy one.", nullable=True),
    ),
    (ALL_VIEWS, column("total_vram", BYTES, example=25757220864)),
    (ALL_VIEWS, column("available_vram", BYTES, "Never more than the budget.", example=20000000000)),
    (ALL_VIEWS, column("reserved_vram", BYTES, example=0)),
    (ALL_VIEWS, column("total_ram", BYTES, example=67108864000)),
    (ALL_VIEWS, column("available_ram", BYTES, example=50000000000)),
    (ALL_VIEWS, column("total_disk", BYTES, example=500000000000)),
    (ALL_VIEWS, column("available_disk", BYTES, example=320000000000)),
    (
        (DETAIL_VIEW, LIVE_VIEW),
        field("gpus", GPU_SHAPE.many, "One by one; empty if its worker does not report them."),
    ),
    ((DETAIL_VIEW,), column("system", SYSTEM_SHAPE.ref)),
    (ALL_VIEWS, column("gpu_vendor", TEXT, example="nvidia")),
    (ALL_VIEWS, column("gpu_compute_capability", TEXT, example="8.9")),
    (ALL_VIEWS, column("capability", TEXT, example="nvidia-cuda-12", optional=True)),
    (ALL_VIEWS, column("max_replicas_per_model", count(1, maximum=2**31 - 1), example=2)),
    (ALL_VIEWS, column("max_replicas_per_model_manually_set", FLAG, example=True)),
    (ALL_VIEWS, column("vram_budget", TEXT, "As it was typed.", example="80%", optional=True)),
    (
        ALL_VIEWS,
        column(
            "vram_budget_bytes",
            BYTES,
            "The ceiling that the budget means.",
            example=20605776691,
            optional=True,
        ),
    ),
    (ALL_VIEWS, column("vram_budget_manually_set", FLAG, example=True)),
    (ALL_VIEWS, column("disk_quota", TEXT, "For the files of models, as it was typed.", optional=True)),
    (ALL_VIEWS, column("disk_quota_bytes", BYTES, "The bytes that it means.", optional=True)),
    (
        (DETAIL_VIEW,),
        column(
            "model_bytes",
            BYTES,
            "Of the files that loads have sent to it.",
            example=43165671424,
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
            example=EXAMPLE_TIME,
            source=Coalesce(Time("last_heartbeat"), Value(ZERO_TIME)),
        ),
    ),
    ((LIVE_VIEW,), column("last_heartbeat", TIME, nullable=True)),
    (ALL_VIEWS, column("created_at", TIME, "First seen.", example="2026-07-01T08:00:00Z")),
    (REST_VIEWS, column("updated_at", TIME, example=EXAMPLE_TIME)),
    (ALL_VIEWS, field("model_count", count(), "Loaded replicas.", example=1)),
    (ALL_VIEWS, field("in_flight_count", count(), "Requests on loaded and unloading replicas.", example=2)),
    ((LIST_VIEW,), field("labels", mapping_schema(TEXT), example=_LABELS_EXAMPLE, optional=True)),
    ((DETAIL_VIEW, LIVE_VIEW), field("labels", mapping_schema(TEXT), example=_LABELS_EXAMPLE)),
    (
        ALL_VIEWS,
        _fact("rejected", "rejected", "An admin's no; the status stays `pending`."),
    ),
    (
        ALL_VIEWS,
        _fact("revoked", "revoked", "Its secret counts no longer."),
    ),
    (
        REST_VIEWS,
        field("open_conflicts", count(1), "Identity conflicts that wait for a decision.", optional=True),
    ),
    ((LIVE_VIEW,), field("open_conflicts", count(), "Identity conflicts that wait for a decision.")),
    (
        (DETAIL_VIEW,),
        _fact("approval", "approved", example={"at": "2026-07-01T08:01:00Z", "by": "ann", "reason": ""}),
    ),
    ((DETAIL_VIEW,), _fact("offline", "offline")),
    ((DETAIL_VIEW,), _fact("unhealthy", "unhealthy")),
    ((DETAIL_VIEW,), _nested_or_null("drain", DRAIN_SHAPE, "drained_at")),
    ((LIVE_VIEW,), _nested_or_null("drain", LIVE_DRAIN_SHAPE, "drained_at")),
    (
        (DETAIL_VIEW, LIVE_VIEW),
        _nested_or_null(
            "joined",
            JOINED_SHAPE,
            "joined_with",
            "Null if it came with the registration token or was enrolled.",
        ),
    ),
    (ALL_VIEWS, column("worker_version", TEXT, "Of our worker, from its last registration.", optional=True)),
    (
        ALL_VIEWS,
        field("version_skew", TEXT, "What is odd about its version.", optional=True),
    ),
    ((DETAIL_VIEW,), _nested("identity", IDENTITY_SHAPE)),
    (
        (DETAIL_VIEW, LIVE_VIEW),
        column("revision", count(), "Moves with every change but heartbeats.", example=7),
    ),
    ((DETAIL_VIEW,), field("overrides", OVERRIDES_SHAPE.ref)),
    (
        (DETAIL_VIEW,),
        field(
            "label_sources",
            mapping_schema(one_of(NodeLabel.Source)),
            "Who set which label.",
            example=dict.fromkeys(_LABELS_EXAMPLE, "auto"),
        ),
    ),
    ((DETAIL_VIEW,), _nested("inventory", INVENTORY_SHAPE)),
    (
        (DETAIL_VIEW, LIVE_VIEW),
        _nested_or_null(
            "file_port", FILE_PORT_SHAPE, "file_port_failed_at", "Null while its file port answers."
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
