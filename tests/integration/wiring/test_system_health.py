"""`GET /api/system/health` and the schedules in the admin, on real rows; NATS and Redis are not asked."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django_q.models import OrmQ, Schedule, Task

from localai_cluster import health, system_health
from localai_cluster.accounts.authentication import recent_sessions
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.accounts.sessions import SessionStore
from localai_cluster.api_document import document
from localai_cluster.kit import clock, disk, periodic
from localai_cluster.kit.periodic import RecurringTask
from nodes.live import watch
from nodes.models import WebProcess
from operations.executor import controllers
from operations.models import Operation, Status
from tests.integration.api.test_document import fits
from tests.support import api, hot, pages

pytestmark = pytest.mark.django_db(transaction=True)

PASS = RecurringTask("nodes: liveness", "nodes.reconcilers.tasks.liveness", "* * * * * */5")
PATH = "/api/system/health"


@pytest.fixture
def root() -> Client:
    """A superuser's browser."""
    return pages.superuser()


@pytest.fixture(autouse=True)
def _probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dependency answers."""
    monkeypatch.setattr(system_health, "_last_results", {})
    monkeypatch.setattr(
        health, "CHECK_BY_NAME", dict.fromkeys(("database", "nats", "channel layer"), lambda: None)
    )


def asked() -> Any:
    answer = api.admin().get(PATH)
    assert answer.status_code == 200, answer.content
    shape = document()["paths"][PATH]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert fits(shape, answer.json()) == []
    return answer.json()


def parts() -> dict[str, tuple[str, str]]:
    return {one["id"]: (one["state"], one["text"]) for one in asked()["parts"]}


def ran(*, ok: bool = True, seconds_ago: float = 1) -> None:
    at = clock.now() - timedelta(seconds=seconds_ago)
    id = f"{Task.objects.count():032d}"
    Task.objects.create(id=id, name="x", func=PASS.function, started=at, stopped=at, success=ok)


def test_every_part_says_how_it_is() -> None:
    now = clock.now()
    periodic.ensure_schedules([PASS])
    ran(ok=False, seconds_ago=9)
    ran()
    controllers.write_heartbeat("here:1", bus_connected=True, now=now)
    WebProcess.objects.create(host="one", pid=1)
    hot.node("a", offline_at=now)
    Operation.objects.create(kind="model_load", key="k", element="m", status=Status.FAILED, finished_at=now)
    found = parts()
    assert found["database"][1].startswith("PostgreSQL ")
    assert (found["nats"], found["redis"]) == (("ok", "Reachable"), ("ok", "Reachable"))
    assert (found["web"], found["controllers"]) == (("ok", "1 process"), ("ok", "1 controller"))
    assert (found["tasks"][0], found["schedules"]) == ("ok", ("ok", "1 on time"))
    assert found["workers"] == ("warning", "1 offline")
    assert found["operations"][1].endswith("1 failure in the inbox")
    answer = asked()
    (schedule,) = answer["schedules"]
    assert (schedule["name"], schedule["paused"], schedule["last_ok"]) == (PASS.name, False, True)
    assert {(one["kind"], one["name"]) for one in answer["processes"]} == {
        ("web", "one:1"),
        ("controller", "here:1"),
    }


def test_what_is_away_is_an_error_since_the_first_look_that_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise health.NotReady("nobody listens there")

    asked()
    monkeypatch.setattr(health, "CHECK_BY_NAME", {"nats": away, "channel layer": lambda: None})
    first, second = (next(one for one in asked()["parts"] if one["id"] == "nats") for _ in range(2))
    assert (first["state"], first["text"]) == ("error", "nobody listens there")
    assert first["since"] == second["since"] is not None
    assert "LOCALAI_NATS_URL" in first["hint"]


def test_a_task_that_nobody_takes_is_an_error_and_a_notice() -> None:
    """What a task process has taken may be given to another one later: it waits for nobody."""
    now = clock.now()
    OrmQ.objects.create(key="cluster", payload="x", lock=now + timedelta(seconds=60))
    assert parts()["tasks"][0] == "ok"
    assert watch.read_snapshot().tasks_wait_since is None
    OrmQ.objects.create(key="cluster", payload="x", lock=now - timedelta(seconds=60))
    assert parts()["tasks"] == ("error", "no process runs them")
    assert watch.read_snapshot().tasks_wait_since == now - timedelta(seconds=60)


def test_it_is_for_admins() -> None:
    assert api.Caller().get(PATH).status_code == 401


def test_it_costs_the_same_queries_for_many_rows() -> None:
    counts = []
    for total in (2, 40):
        for number in range(total):
            periodic.ensure_schedules([RecurringTask(f"{total} {number}", PASS.function, PASS.cron)])
            hot.node(f"n{total}-{number}")
            controllers.write_heartbeat(f"{total} {number}", bus_connected=True, now=clock.now())
        with CaptureQueriesContext(connection) as queries:
            asked()
        counts.append(len(queries))
    assert counts[0] == counts[1] < 15


def test_schedules_are_paused_and_resumed_in_the_admin(root: Client) -> None:
    """Resumed ones run now and are not late."""
    periodic.ensure_schedules([PASS])
    row = Schedule.objects.get()
    Schedule.objects.update(next_run=clock.now() - timedelta(hours=1))

    def acted(action: str) -> None:
        answer = pages.select(root, action, row.pk, at="/admin/django_q/schedule/")
        assert answer.status_code == 302, answer.content
        row.refresh_from_db()

    acted("pause")
    assert row.repeats == 0
    assert parts()["schedules"] == ("warning", f"paused: {PASS.name}")
    acted("resume")
    assert row.repeats == -1
    assert parts()["schedules"] == ("ok", "1 on time")
    assert PASS.name in root.get("/admin/django_q/schedule/").content.decode()
    told = [(entry.actor, entry.kind, entry.subject) for entry in AuditEntry.objects.order_by("id")]
    subject = f"schedule {PASS.name}"
    assert told == [("root", "schedule.paused", subject), ("root", "schedule.resumed", subject)]


def test_who_may_only_see_schedules_cannot_pause_them() -> None:
    periodic.ensure_schedules([PASS])
    body = {"action": "pause", "_selected_action": Schedule.objects.get().pk}
    viewer = pages.staff("ann", "view_schedule")
    assert "Pause the selected" not in viewer.get("/admin/django_q/schedule/").content.decode()
    viewer.handler.enforce_csrf_checks = False
    viewer.post("/admin/django_q/schedule/", body)
    assert Schedule.objects.get().repeats == -1


def test_no_schedule_of_the_admin_runs_code_of_its_own(root: Client) -> None:
    """A superuser's browser could run any function on the server, such as `os.system`."""
    periodic.ensure_schedules([PASS])
    row = Schedule.objects.get()
    root.handler.enforce_csrf_checks = False
    body = {"name": "x", "func": "os.system", "args": "'id'", "kwargs": "{'a': 1}", "hook": "os.system"}
    body |= {"schedule_type": "O", "repeats": "-1", "next_run_0": "2026-11-30", "next_run_1": "12:00:00"}
    assert root.post("/admin/django_q/schedule/add/", body).status_code == 403
    edited = root.post(f"/admin/django_q/schedule/{row.pk}/change/", body | {"cron": "1 * * * * *"})
    assert edited.status_code == 302
    (row,) = Schedule.objects.all()
    assert (row.name, row.func, row.cron) == (PASS.name, PASS.function, "1 * * * * *")
    assert (row.args, row.kwargs, row.hook, row.schedule_type) == (None, None, None, Schedule.CRON)


@pytest.mark.parametrize("cron", ["", "0 0 31 2 *", "61 * * * *"])
def test_a_schedule_without_a_next_time_is_refused(root: Client, cron: str) -> None:
    """django-q2 calculates all due schedules in one transaction: one of them stopped all others."""
    periodic.ensure_schedules([PASS])
    row = Schedule.objects.get()
    root.handler.enforce_csrf_checks = False
    body = {"cron": cron, "next_run_0": "2026-11-30", "next_run_1": "12:00:00"}
    page = root.post(f"/admin/django_q/schedule/{row.pk}/change/", body)
    assert page.status_code == 200
    assert "errorlist" in page.content.decode()
    assert Schedule.objects.get().cron == PASS.cron


def test_who_may_only_see_failed_tasks_cannot_run_them_again() -> None:
    viewer = pages.staff("ann", "view_failure")
    times = {"started": clock.now(), "stopped": clock.now()}
    task = Task.objects.create(id="f", name="f", func="builtins.len", success=False, **times)
    page = viewer.get("/admin/django_q/failure/")
    assert page.status_code == 200
    assert "Resubmit" not in page.content.decode()
    viewer.handler.enforce_csrf_checks = False
    viewer.post("/admin/django_q/failure/", {"action": "resubmit_task", "_selected_action": task.pk})
    assert (OrmQ.objects.count(), Task.objects.count()) == (0, 1)


FULL = disk.DiskUsage("/var/lib/cluster", "/var", 0, 100)


def test_health_is_answered_without_the_database(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Review X4: to an admin who was known a moment ago, by session or static key; the disk is named."""

    def away(*arguments: Any) -> Any:
        raise OperationalError("connection refused")

    assert root.get("/api/nodes").status_code == 200
    monkeypatch.setattr(SessionStore, "load", away)
    monkeypatch.setattr(health, "CHECK_BY_NAME", {**health.CHECK_BY_NAME, "database": away})
    monkeypatch.setattr(disk, "read", lambda folder: FULL)
    for answer in (root.get(PATH), api.admin().get(PATH)):
        found = {one["id"]: one for one in answer.json()["parts"]}
        assert (answer.status_code, answer.json()["state"]) == (200, "error")
        assert "/var (folder /var/lib/cluster)" in found["database"]["text"]
        assert found["nats"]["state"] == "ok"
    shape = document()["paths"][PATH]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert fits(shape, answer.json()) == []
    assert root.get("/api/nodes").status_code == 503
    recent_sessions.clear()
    assert root.get(PATH).status_code == 503


def test_a_database_that_is_lost_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*arguments: Any) -> Any:
        raise OperationalError("terminated")

    monkeypatch.setattr(system_health, "_read_rows", away)
    assert parts()["database"] == ("error", "not reachable (OperationalError)")


def test_a_full_disk_is_the_reason_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review X4: anybody is told that it is full, not which it is."""
    monkeypatch.setattr(health, "CHECK_BY_NAME", {"disk": health._check_disk})
    monkeypatch.setattr(disk, "read", lambda folder: FULL)
    monkeypatch.setattr(disk, "_last_reading", None)
    answer = api.Caller().get("/readyz")
    assert "data folder is full" in answer.json()["checks"]["disk"]
    assert "/var" not in answer.content.decode()

    def away(*arguments: Any) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr("nodes.registry.listing.parse_node_query", away)
    refused = api.admin().get("/api/nodes")
    assert refused.status_code == 503
    assert api.message(refused) == "the database is unavailable: the disk of the server's data folder is full"
