"""`/healthz` and `/readyz`: liveness and readiness of this web process.

`/readyz` checks all dependencies concurrently, each for a second at most, and names the failed ones; the
response has nothing that an anonymous caller should not know. A missing controller is reported, but this
process stays ready: warm requests need no controller, and a load balancer that removed every web process
would stop them too.
"""

import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as OutOfTime
from typing import TypeVar
from urllib.parse import urlsplit

import redis
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from django_q.models import Schedule

from localai_cluster.kit import clock, conf, disk, periodic
from localai_cluster.messaging.servers import parse_url

T = TypeVar("T")

CHECK_TIMEOUT = 1.0
"""Maximum seconds of a check."""
NOT_REACHABLE = "not reachable"

# Enough for checks that hang; when all threads are busy, the next check times out and reports that.
_check_threads = ThreadPoolExecutor(max_workers=12, thread_name_prefix="readyz")


class NotReady(Exception):
    """A dependency does not work. The text may be shown to anonymous callers."""


@csrf_exempt
@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    """Return 200, because the process responds."""
    return JsonResponse({"status": "ok"})


@csrf_exempt
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """Return 200 if all dependencies of a request work, 503 otherwise; the body names each dependency."""
    states = check_dependencies()
    ready = all(state == "ok" for name, state in states.items() if name not in NON_CRITICAL_CHECKS)
    body = {"status": "ready" if ready else "not ready", "checks": states}
    if ready:
        return JsonResponse(body)
    return JsonResponse(body, status=503, headers={"Retry-After": f"{2 * CHECK_TIMEOUT:.0f}"})


def check_dependencies(names: Collection[str] | None = None) -> dict[str, str]:
    """Check the named dependencies, by default all; return `ok` or the problem by name."""
    selected_checks = {name: check for name, check in CHECK_BY_NAME.items() if names is None or name in names}
    futures = {name: _check_threads.submit(check) for name, check in selected_checks.items()}
    deadline = clock.monotonic() + CHECK_TIMEOUT
    states: dict[str, str] = {}
    for name, future in futures.items():
        try:
            future.result(timeout=max(deadline - clock.monotonic(), 0))
            states[name] = "ok"
        except OutOfTime:
            states[name] = f"no answer within {CHECK_TIMEOUT:.0f} s"
        except NotReady as reason:
            states[name] = str(reason)
        except Exception as error:
            # Any error of a client library means that this dependency does not work.
            states[name] = f"{NOT_REACHABLE} ({type(error).__name__})"
    return states


def within_limit(question: Callable[[], T]) -> T | None:
    """Return the result of `question`; None after `CHECK_TIMEOUT` seconds or an OSError."""
    try:
        return _check_threads.submit(question).result(timeout=CHECK_TIMEOUT)
    except (OutOfTime, OSError):
        return None


def _check_database() -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT to_regclass('backend_nodes') IS NOT NULL")
            if not cursor.fetchone()[0]:
                raise NotReady("the tables are missing: run migrate")
    finally:
        connection.close()


def _check_disk() -> None:
    usage = disk.read(conf.cluster().data_dir)
    if usage.is_full:
        raise NotReady(f"{disk.DISK_FULL_MESSAGE}: the database cannot write if it lies there")


def _check_channel_layer() -> None:
    client = redis.Redis.from_url(
        conf.cluster().redis_url, socket_timeout=CHECK_TIMEOUT, socket_connect_timeout=CHECK_TIMEOUT
    )
    try:
        client.ping()
    finally:
        client.close()


def _check_nats() -> None:
    """Check that one of the servers responds; one suffices, because clients reconnect to any server."""
    reasons: list[Exception] = []
    for server in parse_url(conf.cluster().nats_url).urls:
        url = urlsplit(server)
        try:
            with socket.create_connection(
                (url.hostname or "", url.port or 4222), timeout=CHECK_TIMEOUT
            ) as link:
                if link.recv(64).startswith(b"INFO "):
                    return
            reasons.append(NotReady("something else than NATS answers there"))
        except OSError as error:
            reasons.append(error)
    raise reasons[0]


def _check_controller() -> None:
    """Check that no schedule is overdue: a running controller triggers the schedules every second."""
    try:
        due = (
            Schedule.objects.exclude(repeats=0)
            .order_by("next_run")
            .values_list("next_run", flat=True)
            .first()
        )
        if due is None:
            raise NotReady("no schedule exists: no controller has started yet")
        if due < clock.now() - periodic.MAX_TRIGGER_DELAY:
            raise NotReady(
                f"no controller has ticked the schedules for over {periodic.MAX_TRIGGER_DELAY.seconds} s"
            )
    finally:
        connection.close()


NON_CRITICAL_CHECKS = frozenset({"controller", "disk"})
"""Dependencies that the response names, but whose failure leaves this process ready."""

CHECK_BY_NAME: Mapping[str, Callable[[], None]] = {
    "database": _check_database,
    "channel layer": _check_channel_layer,
    "nats": _check_nats,
    "controller": _check_controller,
    "disk": _check_disk,
}
