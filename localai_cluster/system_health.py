"""`/api/system/health`: every part of the system with its state, since when, and what to do. Admins only.

A constant number of queries, besides a question to NATS, to Redis and to the disk, each for a second at most,
and a look at the models folder. Without the database it answers what it knows without it, to an admin who
was known a moment ago.
What they say since when is this process's knowledge: the first of its looks that found it so.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from asgiref.sync import async_to_sync
from django.db import InterfaceError, OperationalError, connection
from django.db.models import Count, Max, Min, OuterRef, Q, Subquery
from django_q.models import Schedule as ScheduleRow
from django_q.models import Task
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster import __version__, clock, conf, disk, health, periodic
from localai_cluster.accounts.authentication import BearerAuthentication, RememberingAuthentication
from localai_cluster.system_verdicts import Facts, Process, Schedule, State, Verdict, Work, verdicts, worst
from localai_cluster.web.openapi import refusals
from localai_cluster.web.shapes import FLAG, TEXT, TIME, Row, Shape, count, field, mapping
from nodes.definitions import folder
from nodes.models import BackendNode, PendingBackendOp, WebProcess
from nodes.registry import mass_silence, versions
from operations.models import ControllerBeat, Operation, Status

_STATE = {"type": "string", "enum": [one.value for one in State]}
PART = Shape(
    "SystemPart",
    "A part of the system.",
    [
        field("id", TEXT),
        field("name", TEXT),
        field("state", _STATE),
        field("text", TEXT),
        field("hint", TEXT, "What to do; empty if nothing."),
        field("since", TIME, "Since when it is so, as far as anybody knows.", nullable=True),
    ],
)
SCHEDULE = Shape(
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
PROCESS = Shape(
    "SystemProcess",
    "A server process that was heard lately.",
    [
        field("kind", {"type": "string", "enum": ["web", "controller"]}),
        field("name", TEXT),
        field("version", TEXT, "Empty: of a release that does not say."),
        field("started_at", TIME),
        field("seen_at", TIME),
    ],
)
HEALTH = Shape(
    "SystemHealth",
    "How the system is.",
    [
        field("at", TIME),
        field("state", _STATE, "The worst of its parts."),
        field("parts", PART.many),
        field("schedules", SCHEDULE.many),
        field("processes", PROCESS.many),
        field("workers", mapping(count()), "How many nodes are in each state."),
    ],
)
COMPONENTS = (PART, SCHEDULE, PROCESS, HEALTH)
_PROBES = {"database": "database", "nats": "nats", "redis": "channel layer"}
_noticed: dict[str, tuple[str, datetime]] = {}
"""What each probe said last, and since when."""


class SystemHealthView(APIView):
    """`/api/system/health`."""

    authentication_classes = [BearerAuthentication, RememberingAuthentication]

    @extend_schema(
        operation_id="system_health",
        summary="Show how the system is",
        tags=["system"],
        responses={200: HEALTH.ref, **refusals(401, 403)},
    )
    def get(self, request: Request) -> Response:
        """Database, NATS, Redis, processes, schedules, workers, work, definitions, versions and disk."""
        now = clock.now()
        facts = read(now)
        found = verdicts(facts, now)
        return Response(
            HEALTH.of(
                at=_text(now),
                state=worst(found),
                parts=[_part(one) for one in found],
                schedules=[_schedule(one) for one in facts.schedules],
                processes=[_process(one) for one in facts.processes],
                workers=dict(facts.workers),
            )
        )


def read(now: datetime) -> Facts:
    """Everything at once; ten queries. Without the database what can be known without it."""
    probes = _probed(now)
    # One that was only slow to answer is asked all the same.
    if not probes["database"][0].startswith(health.NOT_REACHABLE):
        try:
            return _read_rows(now, probes)
        except (OperationalError, InterfaceError) as error:
            said = _notice("database", f"{health.NOT_REACHABLE} ({type(error).__name__})", now)
            probes = {**probes, "database": said}
    return Facts(
        version=__version__,
        database="",
        database_since=None,
        is_database_away=True,
        probes=probes,
        disk=_disk(),
        data_dir=str(conf.cluster().data_dir),
    )


def _read_rows(now: datetime, probes: Mapping[str, tuple[str, datetime]]) -> Facts:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('server_version'), pg_postmaster_start_time()")
        version, since = cursor.fetchone()
    workers, others = _workers()
    operations, failures, oldest_failure = _operations()
    definitions = async_to_sync(folder.problems)()
    return Facts(
        version=__version__,
        database=f"PostgreSQL {version}",
        database_since=since,
        probes=probes,
        processes=_processes(),
        web_silent_after=conf.cluster().web_stale_after,
        schedules=_schedules(),
        tasks_wait_since=periodic.waiting_since(now=now),
        tasks_ended_at=Task.objects.aggregate(at=Max("stopped"))["at"],
        workers=workers,
        held=mass_silence.standing(),
        other_versions=others,
        operations=operations,
        failures=failures,
        oldest_failure=oldest_failure,
        intents=_intents(),
        models_folder=definitions.folder,
        broken_definitions=definitions.files,
        disk=_disk(),
        data_dir=str(conf.cluster().data_dir),
    )


def _probed(now: datetime) -> dict[str, tuple[str, datetime]]:
    found = health.look(set(_PROBES.values()))
    for id, name in _PROBES.items():
        _notice(id, found.get(name, "not asked"), now)
    return dict(_noticed)


def _notice(id: str, said: str, now: datetime) -> tuple[str, datetime]:
    """Keep what was said of a part, with the time since when it is so."""
    if _noticed.get(id, ("", now))[0] != said:
        _noticed[id] = (said, now)
    return _noticed[id]


def _processes() -> list[Process]:
    web = WebProcess.objects.order_by("started_at").values_list(
        "host", "pid", "version", "started_at", "seen_at"
    )
    controllers = ControllerBeat.objects.order_by("started_at").values_list(
        "owner", "version", "started_at", "seen_at", "bus_connected"
    )
    return [
        *(Process("web", f"{host}:{pid}", said, began, seen) for host, pid, said, began, seen in web),
        *(Process("controller", *row) for row in controllers),
    ]


def _schedules() -> list[Schedule]:
    runs = Task.objects.filter(func=OuterRef("func")).order_by("-stopped")
    rows = ScheduleRow.objects.order_by("name").annotate(
        last_at=Subquery(runs.values("stopped")[:1]), ok=Subquery(runs.values("success")[:1])
    )
    columns = rows.values_list("id", "name", "cron", "repeats", "next_run", "last_at", "ok")
    return [
        Schedule(id, name or "", cron or "", repeats == 0, next_run, last_at, ok)
        for id, name, cron, repeats, next_run, last_at, ok in columns
    ]


def _workers() -> tuple[dict[str, int], int]:
    """How many nodes are in each state, and how many approved ones run another version."""
    grouped = BackendNode.objects.order_by().values_list(
        "status", "node_type", "worker_version", "weak_identity"
    )
    states: dict[str, int] = {}
    others = 0
    for status, node_type, version, weak, number in grouped.annotate(number=Count("pk")):
        states[status] = states.get(status, 0) + number
        if status != "pending" and versions.skew(node_type, version, weak=weak):
            others += number
    return states, others


def _operations() -> tuple[Work, int, datetime | None]:
    waits, runs = Q(status__in=(Status.PENDING, Status.WAITING)), Q(status=Status.PROCESSING)
    failed = Q(status=Status.FAILED, dismissed_at__isnull=True)
    found = Operation.objects.listed().aggregate(
        waiting=Count("pk", filter=waits),
        running=Count("pk", filter=runs),
        oldest=Min("created_at", filter=waits | runs),
        failures=Count("pk", filter=failed),
        oldest_failure=Min("finished_at", filter=failed),
    )
    work = Work(found["waiting"], found["running"], found["oldest"])
    return work, found["failures"], found["oldest_failure"]


def _intents() -> Work:
    rests = Q(lease_until__isnull=True)
    found = PendingBackendOp.objects.aggregate(
        waiting=Count("pk", filter=rests), running=Count("pk", filter=~rests), oldest=Min("created_at")
    )
    return Work(found["waiting"], found["running"], found["oldest"])


def _disk() -> disk.DiskUsage | None:
    return health.within_limit(lambda: disk.read(conf.cluster().data_dir))


def _text(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def _part(one: Verdict) -> Row:
    return PART.of(
        id=one.id, name=one.name, state=one.state, text=one.text, hint=one.hint, since=_text(one.since)
    )


def _schedule(one: Schedule) -> Row:
    return SCHEDULE.of(
        id=one.id,
        name=one.name,
        cron=one.cron,
        paused=one.paused,
        next_run=_text(one.next_run),
        last_run=_text(one.last_run),
        last_ok=one.last_ok,
    )


def _process(one: Process) -> Row:
    said: dict[str, Any] = {"kind": one.kind, "name": one.name, "version": one.version}
    return PROCESS.of(**said, started_at=_text(one.started_at), seen_at=_text(one.seen_at))
