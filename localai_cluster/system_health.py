"""`/api/system/health`: every part of the system with its state, its start and a hint. Admins only.

A constant number of queries, besides probes of NATS, Redis and the disk, each limited to a second, and a scan
of the models folder. While the database is away the response has only the facts that need no database, for
an admin whose session was valid a few minutes ago.
`since` is local to this process: the time of the first check that had the present result.
"""

from collections.abc import Mapping
from datetime import datetime

from asgiref.sync import async_to_sync
from django.db import InterfaceError, OperationalError, connection
from django.db.models import Count, Max, Min, OuterRef, Q, Subquery
from django_q.models import Schedule as ScheduleRow
from django_q.models import Task
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster import __version__, health
from localai_cluster.accounts.authentication import BearerAuthentication, RememberingAuthentication
from localai_cluster.kit import clock, conf, disk, periodic
from localai_cluster.system_verdicts import Facts, Process, Schedule, State, Work, verdicts, worst
from localai_cluster.web.openapi import describe
from localai_cluster.web.shapes import FLAG, TEXT, TIME, Row, Shape, count, field, mapping_schema
from nodes.definitions import folder
from nodes.models import BackendNode, PendingBackendOp, WebProcess
from nodes.registry import mass_silence, node_rows
from operations.models import UNDISMISSED_FAILURE, ControllerBeat, Operation, Status

_STATE_SCHEMA = {"type": "string", "enum": [state.value for state in State]}
PART_SHAPE = Shape(
    "SystemPart",
    "A part of the system.",
    [
        field("id", TEXT),
        field("name", TEXT),
        field("state", _STATE_SCHEMA),
        field("text", TEXT),
        field("hint", TEXT, "What to do; empty if nothing."),
        field("since", TIME, "Since when it is so, as far as anybody knows.", nullable=True),
    ],
)
SCHEDULE_SHAPE = Shape(
    "SystemSchedule",
    "A recurring task.",
    [
        field("id", count()),
        field("name", TEXT),
        field("cron", TEXT, "Six fields, the last one seconds."),
        field("paused", FLAG),
        field("next_run", TIME, nullable=True),
        field("last_run", TIME, "When its last run ended.", nullable=True),
        field("last_ok", FLAG, "Whether that ended well.", nullable=True),
    ],
)
PROCESS_SHAPE = Shape(
    "SystemProcess",
    "A server process that was heard lately.",
    [
        field("kind", {"type": "string", "enum": ["web", "controller"]}),
        field("name", TEXT),
        field("version", TEXT, "Empty: a release that does not report it."),
        field("started_at", TIME),
        field("seen_at", TIME),
    ],
)
HEALTH_SHAPE = Shape(
    "SystemHealth",
    "How the system is.",
    [
        field("at", TIME),
        field("state", _STATE_SCHEMA, "The worst of its parts."),
        field("parts", PART_SHAPE.many),
        field("schedules", SCHEDULE_SHAPE.many),
        field("processes", PROCESS_SHAPE.many),
        field("workers", mapping_schema(count()), "How many nodes are in each state."),
    ],
)
_CHECK_NAME_BY_PART = {"database": "database", "nats": "nats", "redis": "channel layer"}
_last_results: dict[str, tuple[str, datetime]] = {}
"""Last result of each probe, and the time since which the result is unchanged."""


class SystemHealthView(APIView):
    """`/api/system/health`."""

    authentication_classes = [BearerAuthentication, RememberingAuthentication]

    @describe("system_health", "Show how the system is", HEALTH_SHAPE, tag="system")
    def get(self, request: Request) -> Response:
        """Database, NATS, Redis, processes, schedules, workers, work, definitions, versions and disk."""
        now = clock.now()
        facts = read(now)
        parts = verdicts(facts, now)
        return Response(
            HEALTH_SHAPE.of(
                at=now.isoformat(),
                state=worst(parts),
                parts=[_row(PART_SHAPE, part) for part in parts],
                schedules=[_row(SCHEDULE_SHAPE, schedule) for schedule in facts.schedules],
                processes=[_row(PROCESS_SHAPE, process) for process in facts.processes],
                workers=dict(facts.workers),
            )
        )


def read(now: datetime) -> Facts:
    """Read all facts in ten queries; during an outage of the database, only facts that need no query."""
    probes = _probe_dependencies(now)
    # A database that was only slow to respond is queried all the same.
    if not probes["database"][0].startswith(health.NOT_REACHABLE):
        try:
            return _read_rows(now, probes)
        except (OperationalError, InterfaceError) as error:
            probe = _store_result("database", f"{health.NOT_REACHABLE} ({type(error).__name__})", now)
            probes = {**probes, "database": probe}
    return Facts(
        version=__version__,
        database="",
        database_since=None,
        is_database_away=True,
        probes=probes,
        disk=_read_disk(),
        data_dir=str(conf.cluster().data_dir),
    )


def _read_rows(now: datetime, probes: Mapping[str, tuple[str, datetime]]) -> Facts:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('server_version'), pg_postmaster_start_time()")
        version, since = cursor.fetchone()
    workers, other_versions = _count_workers()
    operations, failures, oldest_failure = _count_operations()
    definitions = async_to_sync(folder.folder().problems)()
    return Facts(
        version=__version__,
        database=f"PostgreSQL {version}",
        database_since=since,
        probes=probes,
        processes=_read_processes(),
        web_silent_after=conf.cluster().web_stale_after,
        schedules=_read_schedules(),
        tasks_wait_since=periodic.waiting_since(now=now),
        tasks_ended_at=Task.objects.aggregate(at=Max("stopped"))["at"],
        workers=workers,
        held=mass_silence.current_hold(),
        other_versions=other_versions,
        operations=operations,
        failures=failures,
        oldest_failure=oldest_failure,
        intents=_count_intents(),
        models_folder=definitions.folder,
        broken_definitions=definitions.files,
        disk=_read_disk(),
        data_dir=str(conf.cluster().data_dir),
    )


def _probe_dependencies(now: datetime) -> dict[str, tuple[str, datetime]]:
    results = health.check_dependencies(set(_CHECK_NAME_BY_PART.values()))
    for id, name in _CHECK_NAME_BY_PART.items():
        _store_result(id, results.get(name, "not asked"), now)
    return dict(_last_results)


def _store_result(id: str, result: str, now: datetime) -> tuple[str, datetime]:
    """Store the result of a part's probe; return it and the time since which it is unchanged."""
    if _last_results.get(id, ("", now))[0] != result:
        _last_results[id] = (result, now)
    return _last_results[id]


def _read_processes() -> list[Process]:
    web = WebProcess.objects.order_by("started_at").values_list(
        "host", "pid", "version", "started_at", "seen_at"
    )
    controllers = ControllerBeat.objects.order_by("started_at").values_list(
        "owner", "version", "started_at", "seen_at", "bus_connected"
    )
    return [
        *(
            Process("web", f"{host}:{pid}", version, started_at, seen_at)
            for host, pid, version, started_at, seen_at in web
        ),
        *(Process("controller", *row) for row in controllers),
    ]


def _read_schedules() -> list[Schedule]:
    runs = Task.objects.filter(func=OuterRef("func")).order_by("-stopped")
    rows = ScheduleRow.objects.order_by("name").annotate(
        last_at=Subquery(runs.values("stopped")[:1]), ok=Subquery(runs.values("success")[:1])
    )
    columns = rows.values_list("id", "name", "cron", "repeats", "next_run", "last_at", "ok")
    return [
        Schedule(id, name or "", cron or "", repeats == 0, next_run, last_at, ok)
        for id, name, cron, repeats, next_run, last_at, ok in columns
    ]


def _count_workers() -> tuple[dict[str, int], int]:
    """Return the number of nodes by state, and the number of approved nodes of another version."""
    grouped = BackendNode.objects.order_by().values_list(
        "status", "node_type", "worker_version", "weak_identity"
    )
    states: dict[str, int] = {}
    other_versions = 0
    for status, node_type, version, weak, number in grouped.annotate(number=Count("pk")):
        states[status] = states.get(status, 0) + number
        if status != "pending" and node_rows.version_skew(node_type, version, weak=weak):
            other_versions += number
    return states, other_versions


def _count_operations() -> tuple[Work, int, datetime | None]:
    waits, runs = Q(status__in=(Status.PENDING, Status.WAITING)), Q(status=Status.PROCESSING)
    counts = Operation.objects.listed().aggregate(
        waiting=Count("pk", filter=waits),
        running=Count("pk", filter=runs),
        oldest=Min("created_at", filter=waits | runs),
        failures=Count("pk", filter=UNDISMISSED_FAILURE),
        oldest_failure=Min("finished_at", filter=UNDISMISSED_FAILURE),
    )
    work = Work(counts["waiting"], counts["running"], counts["oldest"])
    return work, counts["failures"], counts["oldest_failure"]


def _count_intents() -> Work:
    is_waiting = Q(lease_until__isnull=True)
    counts = PendingBackendOp.objects.aggregate(
        waiting=Count("pk", filter=is_waiting),
        running=Count("pk", filter=~is_waiting),
        oldest=Min("created_at"),
    )
    return Work(counts["waiting"], counts["running"], counts["oldest"])


def _read_disk() -> disk.DiskUsage | None:
    return health.within_limit(lambda: disk.read(conf.cluster().data_dir))


def _row(shape: Shape, entry: object) -> Row:
    """Return the shape's fields of the entry; times as texts."""
    times = {
        name: value.isoformat()
        for name in shape.fields
        if isinstance(value := getattr(entry, name), datetime)
    }
    return shape.of_object(entry, **times)
