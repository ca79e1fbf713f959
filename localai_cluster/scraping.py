"""`/metrics` and `/metrics/nodes`: authorization, response, and metrics that are read from rows.

A scrape needs the token `LOCALAI_METRICS_TOKEN`, which authorizes nothing else, or an admin's API key. Web
processes serve both paths beside their other routes; the metrics of single nodes and GPUs have their own
path, because they are many. Controllers and task processes serve nothing else, so they listen on their own
address if one is configured.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from channels.db import database_sync_to_async
from django.db import Error as DatabaseError
from django.db.models import BooleanField, Count, ExpressionWrapper, Min, Q, Sum
from django_q.models import OrmQ
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from localai_cluster.accounts import principals
from localai_cluster.accounts.principals import WrongKey
from localai_cluster.kit import clock, conf, outage
from localai_cluster.kit.addresses import Address
from localai_cluster.kit.errors import ClusterError, Forbidden, MethodNotAllowed, NotAuthenticated, NotFound
from localai_cluster.metrics import registries
from localai_cluster.metrics.kinds import PREFIX
from localai_cluster.web import throttle, wire
from localai_cluster.web.wire import Answer, Receive, Scope, Send
from nodes.models import BackendNode, NodeModel, NodeStatus, NodeType, PendingBackendOp, WebProcess
from operations.executor import controllers
from operations.executor.work import in_thread
from operations.models import TERMINAL, ControllerBeat, Operation

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT = 5.0
"""Maximum seconds to read the metrics from the rows; a scraper waits for ten by default."""
RECENT_PERIOD = timedelta(hours=1)


@dataclass(frozen=True)
class RowFigure:
    """A metric that is read from rows: its name, its help text and the labels of its samples."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()

    def of(self, *samples: tuple[Any, ...]) -> Metric:
        """Return the metric with these samples. A sample is the values of the labels, then the number."""
        family = GaugeMetricFamily(PREFIX + self.name, self.meaning, labels=self.labels)
        for *values, number in samples:
            family.add_metric([str(value) for value in values], float(number))
        return family


ROWS_READABLE_FIGURE = RowFigure("rows_readable", "1 if the database could be read for this scrape.")
NODES_FIGURE = RowFigure("nodes", "Nodes.", ("status", "node_type"))
VRAM_TOTAL_FIGURE = RowFigure("vram_total_bytes", "VRAM of the nodes that are healthy.")
VRAM_AVAILABLE_FIGURE = RowFigure("vram_available_bytes", "What of it was free at the last heartbeats.")
VRAM_RESERVED_FIGURE = RowFigure("vram_reserved_bytes", "What of that is reserved for loads.")
REPLICAS_FIGURE = RowFigure("replicas", "Replicas.", ("model", "state"))
IN_FLIGHT_FIGURE = RowFigure(
    "requests_in_flight", "Requests that run on replicas, of all web processes.", ("model",)
)
OPERATIONS_FIGURE = RowFigure(
    "operations",
    "Operations that have not ended, and failures that are not dismissed (`failed`).",
    ("kind", "status"),
)
OLDEST_OPERATION_FIGURE = RowFigure(
    "operation_oldest_age_seconds", "Age of the oldest of them.", ("kind", "status")
)
ENDED_OPERATIONS_FIGURE = RowFigure(
    "operations_ended_last_hour", "Operations that ended within the last hour.", ("kind", "outcome")
)
INTENTS_FIGURE = RowFigure(
    "intents", "Work on backends of single nodes that has not ended (`running`, `waiting`).", ("op", "state")
)
OLDEST_INTENT_FIGURE = RowFigure("intent_oldest_age_seconds", "Age of the oldest of it.", ("op", "state"))
PROCESSES_FIGURE = RowFigure(
    "processes", "Server processes that were heard lately (`web`, `controller`).", ("process",)
)
TASKS_WAITING_FIGURE = RowFigure("tasks_waiting", "Scheduled tasks on the queue, running ones included.")
CLUSTER_FIGURES = (
    ROWS_READABLE_FIGURE,
    NODES_FIGURE,
    VRAM_TOTAL_FIGURE,
    VRAM_AVAILABLE_FIGURE,
    VRAM_RESERVED_FIGURE,
    REPLICAS_FIGURE,
    IN_FLIGHT_FIGURE,
    OPERATIONS_FIGURE,
    OLDEST_OPERATION_FIGURE,
    ENDED_OPERATIONS_FIGURE,
    INTENTS_FIGURE,
    OLDEST_INTENT_FIGURE,
    PROCESSES_FIGURE,
    TASKS_WAITING_FIGURE,
)


def read_metrics(now: datetime) -> list[Metric]:
    """Return all metrics of the cluster from the rows, except `ROWS_READABLE_FIGURE`, in eight queries."""
    return [
        *_node_metrics(),
        *_replica_metrics(),
        *_operation_metrics(now),
        *_pending_backend_metrics(now),
        *_process_metrics(now),
    ]


def _node_metrics() -> Iterator[Metric]:
    counts = dict.fromkeys(((status, kind) for status in NodeStatus.values for kind in NodeType.values), 0)
    total = available = reserved = 0
    rows = BackendNode.objects.order_by().values_list("status", "node_type")
    sums = (Sum("total_vram"), Sum("available_vram"), Sum("reserved_vram"))
    for status, kind, number, *memory in rows.annotate(Count("pk")).annotate(*sums):
        counts[status, kind] = number
        if status == NodeStatus.HEALTHY:
            total, available, reserved = total + memory[0], available + memory[1], reserved + memory[2]
    yield NODES_FIGURE.of(*((*key, number) for key, number in counts.items()))
    yield from (
        VRAM_TOTAL_FIGURE.of((total,)),
        VRAM_AVAILABLE_FIGURE.of((available,)),
        VRAM_RESERVED_FIGURE.of((reserved,)),
    )


def _replica_metrics() -> Iterator[Metric]:
    rows = NodeModel.objects.order_by().values_list("model_name", "state")
    counts = list(rows.annotate(Count("pk"), Sum("in_flight")))
    busy: dict[str, int] = {}
    for model, _, _, running in counts:
        busy[model] = busy.get(model, 0) + running
    yield REPLICAS_FIGURE.of(*((model, state, number) for model, state, number, _ in counts))
    yield IN_FLIGHT_FIGURE.of(*busy.items())


def _operation_metrics(now: datetime) -> Iterator[Metric]:
    listed = Operation.objects.listed().order_by().values_list("kind", "status")
    counts = list(listed.annotate(Count("pk"), Min("created_at")))
    yield OPERATIONS_FIGURE.of(*((kind, status, number) for kind, status, number, _ in counts))
    yield OLDEST_OPERATION_FIGURE.of(
        *((kind, status, _age_in_seconds(since, now)) for kind, status, _, since in counts)
    )
    ended = Operation.objects.filter(finished_at__gt=now - RECENT_PERIOD, status__in=TERMINAL)
    yield ENDED_OPERATIONS_FIGURE.of(*ended.order_by().values_list("kind", "status").annotate(Count("pk")))


def _pending_backend_metrics(now: datetime) -> Iterator[Metric]:
    is_waiting = ExpressionWrapper(Q(lease_until__isnull=True), BooleanField())
    groups = PendingBackendOp.objects.order_by().values_list("op", is_waiting)
    rows = list(groups.annotate(Count("pk"), Min("created_at")))
    states = {True: "waiting", False: "running"}
    yield INTENTS_FIGURE.of(*((op, states[waits], number) for op, waits, number, _ in rows))
    yield OLDEST_INTENT_FIGURE.of(
        *((op, states[waits], _age_in_seconds(since, now)) for op, waits, _, since in rows)
    )


def _process_metrics(now: datetime) -> Iterator[Metric]:
    web_since = now - timedelta(seconds=conf.cluster().web_stale_after)
    web = WebProcess.objects.filter(seen_at__gte=web_since).count()
    controllers_since = now - timedelta(seconds=controllers.SILENCE_LIMIT)
    beats = ControllerBeat.objects.filter(seen_at__gte=controllers_since).count()
    yield PROCESSES_FIGURE.of(("web", web), ("controller", beats))
    yield TASKS_WAITING_FIGURE.of((OrmQ.objects.count(),))


def _age_in_seconds(since: datetime, now: datetime) -> float:
    return max((now - since).total_seconds(), 0.0)


NODE_LABELS, GPU_LABELS = ("node",), ("node", "gpu")
OMITTED_NODES_FIGURE = RowFigure("nodes_left_out", "Approved backend nodes beyond the limit of this path.")
_NODE_FIGURES = (
    RowFigure("node_up", "1 if the node is healthy or draining.", NODE_LABELS),
    RowFigure("node_last_heartbeat_timestamp_seconds", "Time of the last heartbeat.", NODE_LABELS),
    RowFigure("node_vram_total_bytes", "VRAM of the node.", NODE_LABELS),
    RowFigure("node_vram_available_bytes", "VRAM that was free at the last heartbeat.", NODE_LABELS),
    RowFigure("node_ram_total_bytes", "Memory of the node.", NODE_LABELS),
    RowFigure("node_ram_available_bytes", "Memory that was free at the last heartbeat.", NODE_LABELS),
    RowFigure("node_disk_total_bytes", "Size of the models disk.", NODE_LABELS),
    RowFigure("node_disk_available_bytes", "Free bytes of the models disk.", NODE_LABELS),
)
_GPU_FIGURE_BY_FIELD = {
    "total_vram": RowFigure("gpu_vram_total_bytes", "VRAM of the GPU.", GPU_LABELS),
    "free_vram": RowFigure("gpu_vram_free_bytes", "VRAM of the GPU that is free.", GPU_LABELS),
    "utilization": RowFigure("gpu_busy_ratio", "Fraction of the time in which the GPU was busy.", GPU_LABELS),
    "temperature": RowFigure("gpu_temperature_celsius", "Temperature of the GPU.", GPU_LABELS),
    "power": RowFigure("gpu_power_watts", "Power that the GPU draws.", GPU_LABELS),
    "ecc_errors": RowFigure(
        "gpu_ecc_errors", "Uncorrected memory errors since the driver was loaded.", GPU_LABELS
    ),
}
NODE_FIGURES = (ROWS_READABLE_FIGURE, OMITTED_NODES_FIGURE, *_NODE_FIGURES, *_GPU_FIGURE_BY_FIELD.values())
MAX_NODES = 2000
"""Maximum number of nodes in one scrape: 100,000 samples with eight GPUs each.

The nodes are sorted by name.
"""
_NODE_METRIC_COLUMNS = (
    *("total_vram", "available_vram", "total_ram", "available_ram", "total_disk", "available_disk"),
    "gpus",
)


def read_node_metrics(now: datetime) -> list[Metric]:
    """Return the metrics of single nodes and their GPUs, in one query."""
    approved = BackendNode.objects.filter(approved_at__isnull=False, node_type=NodeType.BACKEND)
    columns = ("name", "status", "last_heartbeat", "offline_recovers", *_NODE_METRIC_COLUMNS)
    rows = list(approved.order_by("name").values_list(*columns))
    shown = rows[:MAX_NODES]
    of_nodes: list[list[tuple[Any, ...]]] = [[] for _ in _NODE_FIGURES]
    of_gpus: dict[str, list[tuple[Any, ...]]] = {key: [] for key in _GPU_FIGURE_BY_FIELD}
    for name, status, heard_at, recovers, *memory, gpus in shown:
        is_up = status in (NodeStatus.HEALTHY, NodeStatus.DRAINING)
        # Nothing is expected of a worker that was never heard or has left: its age must not raise an alert.
        is_expected = heard_at is not None and (status != NodeStatus.OFFLINE or recovers)
        numbers = (is_up, heard_at.timestamp() if is_expected else None, *memory)
        for samples, number in zip(of_nodes, numbers, strict=True):
            if number is not None:
                samples.append((name, number))
        # Without heartbeats the last readings are no longer true.
        for gpu in gpus if is_up else ():
            for key in _GPU_FIGURE_BY_FIELD.keys() & gpu.keys():
                if gpu[key] is not None:
                    number = gpu[key] / 100 if key == "utilization" else gpu[key]
                    of_gpus[key].append((name, gpu["index"], number))
    return [
        OMITTED_NODES_FIGURE.of((len(rows) - len(shown),)),
        *(figure.of(*samples) for figure, samples in zip(_NODE_FIGURES, of_nodes, strict=True)),
        *(figure.of(*of_gpus[key]) for key, figure in _GPU_FIGURE_BY_FIELD.items()),
    ]


class RowReader:
    """Reads the metrics of the whole cluster from the rows, for one web process's scrapes.

    Every web process exposes equal values, so Prometheus queries take the maximum and not the sum. The number
    of SQL queries does not depend on the number of rows. Concurrent scrapes share one read. If the database
    hangs, one thread waits: the row metrics are omitted, `localai_cluster_rows_readable` is 0, and the
    process's own metrics are exposed as usual.
    """

    def __init__(self, read_metrics: Callable[[datetime], Sequence[Metric]] = read_metrics) -> None:
        self._read = read_metrics
        self._task: asyncio.Task[Sequence[Metric]] | None = None

    async def families(self) -> Iterable[Metric]:
        """Return the row metrics; only `ROWS_READABLE_FIGURE` with 0 if they cannot be read in time."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(in_thread(self._read, clock.now()))
            # By the time it fails, no scrape may wait for it any more.
            self._task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT):
                metrics = await asyncio.shield(self._task)
        except (TimeoutError, DatabaseError) as error:
            log.warning(
                "figures of the cluster left out: %s", error or f"no answer within {SCRAPE_TIMEOUT:.0f} s"
            )
            return [ROWS_READABLE_FIGURE.of((0,))]
        return [ROWS_READABLE_FIGURE.of((1,)), *metrics]


METRICS_PATH, NODE_METRICS_PATH = "/metrics", "/metrics/nodes"
_RESPONSE_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class MetricsSource(Protocol):
    """A source of metrics beside the process's own metrics."""

    async def families(self) -> Iterable[Metric]:
        """Return the current metrics."""
        ...


class MetricsApplication:
    """The ASGI application of one process; an empty `process` exposes only the source's metrics."""

    def __init__(self, process: str, source: MetricsSource | None = None, path: str = METRICS_PATH) -> None:
        self._process, self._source, self._path = process, source, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; refuse a websocket."""
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        try:
            answer = await self._answer(scope)
        except ClusterError as error:
            refused = wire.error_answer(error)
            answer = Answer(refused.body, refused.status, (*refused.headers, *_RESPONSE_HEADERS))
        await wire.send_answer(send, answer)

    async def _answer(self, scope: Scope) -> Answer:
        if scope["path"] != self._path:
            raise NotFound(f"only {self._path} is here")
        await admit(scope)
        if scope["method"] != "GET":
            raise MethodNotAllowed("only GET is accepted here", "GET")
        additional = await self._source.families() if self._source else ()
        # In a thread: a hundred models make thousands of lines, and requests must not wait for them.
        body = await asyncio.to_thread(registries.text, self._process, tuple(additional))
        return Answer(body, headers=_RESPONSE_HEADERS, kind=registries.CONTENT_TYPE.encode())


async def admit(scope: Scope) -> None:
    """Raise NotAuthenticated, Forbidden or Unavailable unless the caller may read the metrics."""
    offered = principals.offered_credential(principals.credential_headers(scope))
    if not offered:
        raise NotAuthenticated("a scraper's token or an admin's API key is required")
    if principals.secrets_equal(offered, conf.cluster().metrics_token):
        return
    with outage.unavailable_on(DatabaseError):
        principal = await database_sync_to_async(principals.owner_of, thread_sensitive=False)(
            principals.classify_credential(offered)
        )
    if not principal.is_authenticated:
        wrong = WrongKey("this token or API key is not valid")
        raise await throttle.api_keys().note_in_thread(wrong, wire.client_of(scope))
    if not principal.is_admin:
        raise Forbidden("admin access required")


async def serve(process: str, address: Address | None) -> None:
    """Serve the metrics of this process until cancelled. Without an address, only wait."""
    if address is None:
        await asyncio.Event().wait()
        return
    # uvicorn needs much memory, and most of these processes have no address.
    from localai_cluster.kit import connections

    await connections.serve(address, MetricsApplication(process))
