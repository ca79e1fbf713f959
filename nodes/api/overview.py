"""The overview page: nodes, problems, running operations, and the first steps of a new cluster.

It needs a constant number of queries and a scan of the models folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connection
from django.db.models import Exists, F, OuterRef
from django.db.models.functions import Left
from rest_framework.request import Request
from rest_framework.response import Response

from localai_cluster.kit import clock, conf
from localai_cluster.web.openapi import describe
from localai_cluster.web.shapes import (
    BYTES,
    FLAG,
    PERCENT,
    TEXT,
    TEXTS,
    TIME,
    Row,
    Shape,
    column,
    count,
    field,
    text,
)
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.api import figures
from nodes.api.base import JOB_ID, MOMENT, NODE_ID, NodeView, enum_schema
from nodes.definitions import folder
from nodes.figures import series, store
from nodes.figures.series import DAY
from nodes.models import BackendNode, BusCredential, JoinToken, ModelLoadInfo, NodeStatus, NodeType
from nodes.registry import node_rows
from nodes.registry.shape import NODE_STATUS
from operations.causes import MAX_ERROR_LENGTH, cause_of
from operations.models import ACTIVE, UNDISMISSED_FAILURE, Operation, OperationTarget, TargetStatus

MAX_NODES = 1000
"""Maximum number of nodes shown."""
MAX_FAILURE_GROUPS = MAX_RUNNING_OPERATIONS = 10
MAX_FAILURES = 2000
"""Maximum number of the newest failures that are read for the groups, of targets and of whole operations
each."""
MAX_NAMED_SUBJECTS = 5
FULL_DISK_FRACTION = 0.05
"""Free fraction of the disk with the models below which it counts as full."""
_MAX_TEXT_LENGTH = 300

STRIP_NODE_SHAPE = Shape(
    "OverviewNode",
    "A cell of the strip: the memory of a node, and the mean of its GPUs' utilization.",
    [
        field("id", UUID_SCHEMA, example=NODE_ID),
        field("name", TEXT, example="gpu-a"),
        field("status", NODE_STATUS.ref, example="healthy"),
        field("gpus", count(), example=1),
        field("busy", PERCENT, example=87.0, nullable=True),
        field("vram_used", BYTES, example=5757220864),
        field("vram_total", BYTES, example=25757220864),
        field("ram_used", BYTES, example=17108864000),
        field("ram_total", BYTES, example=67108864000),
    ],
)
_PROBLEM_CAUSES = (
    *("failures", "silent_nodes", "unhealthy_nodes", "full_disks", "gpu_errors", "definitions"),
    *("join_tokens", "bus_credentials", "versions"),
)
ATTENTION_SHAPE = Shape(
    "Attention",
    "What needs somebody, by cause, with the number of its subjects and the names of some.",
    [
        field("cause", enum_schema(_PROBLEM_CAUSES), example="full_disks"),
        field("level", enum_schema(("error", "warning")), example="error"),
        field("text", TEXT, example="The models disk is full"),
        field("count", count(1), example=1),
        field("names", TEXTS, f"At most {MAX_NAMED_SUBJECTS}.", example=["gpu-a"]),
    ],
)
RUNNING_SHAPE = Shape(
    "RunningOperation",
    "An operation that has not ended.",
    [
        column("id", UUID_SCHEMA, example=JOB_ID, source=text("id")),
        column("kind", TEXT, example="model_load"),
        column("element", TEXT, "The backend or the model.", example="minilm"),
        column("node_name", TEXT, example="gpu-a"),
        column("status", enum_schema([status.value for status in ACTIVE]), example="processing"),
        column("progress", PERCENT, example=40.0),
        column(
            "message",
            TEXT,
            "What it does, or what it waits for.",
            example="sending minilm.gguf to gpu-a, file 1 of 2: 40 MiB of 100 MiB, 20 MiB/s, 3 s left",
            source=Left("message", _MAX_TEXT_LENGTH),
        ),
        column("current_bytes", BYTES, example=41943040),
        column("total_bytes", BYTES, example=104857600),
        column("last_progress_at", TIME, example=MOMENT, nullable=True),
        column("time_limit_at", TIME, example=None, nullable=True),
        column("created_at", TIME, example=MOMENT),
    ],
)
STEP_SHAPE = Shape(
    "FirstStep",
    "A step of a new cluster.",
    [field("id", enum_schema(("add_node", "load_model", "chat"))), field("done", FLAG)],
)
OVERVIEW_SHAPE = Shape(
    "Overview",
    "The cluster at a glance.",
    [
        field("at", TIME, example=MOMENT),
        field("nodes", STRIP_NODE_SHAPE.many, f"Approved backend nodes by name, at most {MAX_NODES}."),
        field("node_count", count(), "How many there are.", example=1),
        field("traffic", figures.TRAFFIC_SHAPE.ref),
        field("attention", ATTENTION_SHAPE.many, "Errors first."),
        field("running", RUNNING_SHAPE.many, f"The newest {MAX_RUNNING_OPERATIONS}."),
        field("running_count", count(), "How many there are.", example=1),
        field(
            "first_steps",
            STEP_SHAPE.many,
            "Empty once there are several nodes.",
            example=[
                {"id": "add_node", "done": False},
                {"id": "load_model", "done": True},
                {"id": "chat", "done": False},
            ],
        ),
    ],
)


class OverviewView(NodeView):
    """`/api/overview`."""

    @describe("overview_read", "Show the cluster at a glance", OVERVIEW_SHAPE)
    def get(self, request: Request) -> Response:
        """Returns the nodes, requests, problems, running operations, and the first steps of a new cluster."""
        now = clock.now()
        nodes = _read_nodes()
        attention = [
            *_failure_groups(),
            *_node_problems(nodes),
            *_definition_problems(),
            *_credential_problems(now),
        ]
        active = Operation.objects.filter(status__in=ACTIVE)
        return Response(
            OVERVIEW_SHAPE.of(
                at=now.isoformat(),
                nodes=[node.cell() for node in nodes[:MAX_NODES]],
                node_count=len(nodes),
                traffic=_traffic_row(now),
                attention=sorted(attention, key=lambda group: group["level"]),
                running=RUNNING_SHAPE.rows(active.order_by("-created_at", "id")[:MAX_RUNNING_OPERATIONS]),
                running_count=active.count(),
                first_steps=_first_steps(nodes) if len(nodes) < 2 else [],
            )
        )


@dataclass(frozen=True)
class _NodeColumns:
    """The columns of a node that the overview reads, in the order of the query."""

    id: Any
    name: str
    status: str
    gpus: list[dict[str, Any]]
    total_vram: int
    available_vram: int
    vram_budget_bytes: int
    total_ram: int
    available_ram: int
    total_disk: int
    available_disk: int
    offline_recovers: bool
    node_type: str
    worker_version: str
    weak_identity: bool

    def cell(self) -> Row:
        """Return the node as one cell of the overview's strip."""
        limit = min(self.vram_budget_bytes or self.total_vram, self.total_vram)
        busy = [gpu["utilization"] for gpu in self.gpus if gpu.get("utilization") is not None]
        return STRIP_NODE_SHAPE.of_object(
            self,
            id=str(self.id),
            gpus=len(self.gpus),
            busy=round(sum(busy) / len(busy), 1) if busy else None,
            vram_used=max(limit - self.available_vram, 0),
            vram_total=limit,
            ram_used=max(self.total_ram - self.available_ram, 0),
            ram_total=self.total_ram,
        )

    @property
    def is_full(self) -> bool:
        return self.total_disk > 0 and self.available_disk < FULL_DISK_FRACTION * self.total_disk


def _read_nodes() -> list[_NodeColumns]:
    rows = BackendNode.objects.filter(approved_at__isnull=False, node_type=NodeType.BACKEND).order_by("name")
    return [_NodeColumns(*values) for values in rows.values_list(*_NodeColumns.__dataclass_fields__)]


def _problem_group(cause: str, level: str, sentence: str, names: Sequence[str]) -> Row:
    """Return a group of problems that counts `names`, or 1 if there are none."""
    shown = [name[:_MAX_TEXT_LENGTH] for name in names[:MAX_NAMED_SUBJECTS]]
    return ATTENTION_SHAPE.of(
        cause=cause, level=level, text=sentence[:_MAX_TEXT_LENGTH], count=max(len(names), 1), names=shown
    )


def _failure_groups() -> Iterator[Row]:
    """Yield the undismissed failures in groups of one kind and cause, largest and newest groups first.

    Two queries. A group counts each node once; an operation without nodes counts by its element. An operation
    with failed targets has no cause of its own.
    """
    failed = Operation.objects.filter(UNDISMISSED_FAILURE).order_by()
    targets = OperationTarget.objects.filter(status=TargetStatus.ERROR)
    of_failed = targets.filter(operation__in=failed, dismissed_at__isnull=True)
    whole = failed.filter(~Exists(targets.filter(operation=OuterRef("pk"))))
    beginning = Left("error", MAX_ERROR_LENGTH)
    of_target = ("operation__kind", "operation__element", "node_name", beginning, "operation__finished_at")
    newest = ("-operation__finished_at", "-operation_id", "node_id")
    rows = [
        *of_failed.order_by(*newest).values_list(*of_target)[:MAX_FAILURES],
        *whole.order_by("-finished_at", "-id").values_list(
            *("kind", "element", "node_name", beginning, "finished_at")
        )[:MAX_FAILURES],
    ]
    groups: dict[tuple[str, str], dict[str, datetime]] = {}
    for kind, element, node, error, finished_at in rows:
        cause = cause_of(error, (node, element.rpartition("@")[2]))
        group = groups.setdefault((kind, cause), {})
        group[node or element] = max(finished_at, group.get(node or element, finished_at))
    ranked = sorted((-len(group), -max(group.values()).timestamp(), key) for key, group in groups.items())
    for _, _, key in ranked[:MAX_FAILURE_GROUPS]:
        yield _problem_group("failures", "error", key[1], sorted(groups[key]))


_NODE_PROBLEMS: tuple[tuple[str, str, str, Callable[[_NodeColumns], bool]], ...] = (
    (
        *("silent_nodes", "error", "The node sends no heartbeats"),
        lambda node: node.status == NodeStatus.OFFLINE and node.offline_recovers,
    ),
    ("unhealthy_nodes", "error", "The node is unhealthy", lambda node: node.status == NodeStatus.UNHEALTHY),
    ("full_disks", "error", "The models disk is full", lambda node: node.is_full),
    (
        *("gpu_errors", "error", "A GPU reports memory errors"),
        lambda node: any(gpu.get("ecc_errors") for gpu in node.gpus),
    ),
    (
        *("versions", "warning", "The worker has another version than the server"),
        lambda node: bool(
            node_rows.version_skew(node.node_type, node.worker_version, weak=node.weak_identity)
        ),
    ),
)


def _node_problems(nodes: Sequence[_NodeColumns]) -> Iterator[Row]:
    for cause, level, sentence, has_problem in _NODE_PROBLEMS:
        if names := [node.name for node in nodes if has_problem(node)]:
            yield _problem_group(cause, level, sentence, names)


def _definition_problems() -> Iterator[Row]:
    problems = async_to_sync(folder.folder().problems)()
    if problems.folder:
        yield _problem_group("definitions", "error", f"The models folder: {problems.folder}", [])
    if problems.files:
        yield _problem_group(
            "definitions", "warning", "The definition cannot be used", sorted(problems.files)
        )


def _credential_problems(now: datetime) -> Iterator[Row]:
    """Yield the problems of join tokens that expire within a day, and of overdue bus credentials.

    A token that was valid for a day at most is no problem.
    """
    tokens = JoinToken.objects.filter(
        expires_at__gt=now, expires_at__lt=now + DAY, revoked_at__isnull=True, uses__lt=F("max_uses")
    ).exclude(expires_at__lte=F("created_at") + DAY)
    if names := [str(token) for token in tokens.order_by("expires_at")]:
        yield _problem_group("join_tokens", "warning", "The join token expires within a day", names)
    soon = now + timedelta(seconds=conf.cluster().nats_worker_jwt_ttl / 10)
    heard = BackendNode.objects.filter(approved_at__isnull=False, offline_at__isnull=True)
    late = BusCredential.objects.filter(revoked_at__isnull=True, expires_at__lt=soon)
    names = list(heard.filter(pk__in=late.values("node_id")).order_by("name").values_list("name", flat=True))
    if names:
        yield _problem_group(
            "bus_credentials", "warning", "The node's credentials on the bus expire soon", names
        )


def _traffic_row(now: datetime) -> Row:
    columns = store.read([series.ALL_MODELS_SUBJECT], figures.last_complete_minute(now))[
        series.ALL_MODELS_SUBJECT
    ]
    return figures.TRAFFIC_SHAPE.of(**figures.rate_fields(columns))


def _first_steps(nodes: Sequence[_NodeColumns]) -> list[Row]:
    with connection.cursor() as cursor:
        # Only requests that named a model: a list of the models, which every start reads, is in the sums too.
        parts = (f"EXISTS (SELECT FROM {table.name} WHERE subject LIKE %(models)s)" for table in store.TABLES)
        cursor.execute(f"SELECT {' OR '.join(parts)}", {"models": f"{series.MODEL_PREFIX}_%"})
        (has_requests,) = cursor.fetchone()
    done = {"add_node": len(nodes) > 1, "load_model": ModelLoadInfo.objects.exists(), "chat": has_requests}
    return [STEP_SHAPE.of(id=name, done=is_done) for name, is_done in done.items()]
