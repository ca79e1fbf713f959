"""An outage of the database or of Valkey: told from a refused statement, and said in one line."""

import io
import logging
from typing import Any

import django.db
import psycopg
import pytest
import redis.exceptions
from django.db import connections
from django.utils.module_loading import import_string
from psycopg import errors

from localai_cluster.kit.outage import OneLineOutages, RepeatLimit, is_outage, skip_during_outage
from localai_cluster.kit.periodic import RecurringTask
from nodes.reconcilers import tasks as node_schedules
from operations.reconcilers import tasks as ledger_schedules


def wrapped(cause: psycopg.Error) -> django.db.OperationalError:
    """The driver's error as Django raises it."""
    error = django.db.OperationalError(str(cause))
    error.__cause__ = cause
    return error


def internal(cause: Exception) -> django.db.InternalError:
    """Return the error that Django makes of it."""
    error = django.db.InternalError(str(cause))
    error.__cause__ = cause
    return error


OUTAGES = [
    psycopg.OperationalError("connection refused"),
    psycopg.InterfaceError("the connection is closed"),
    errors.AdminShutdown("terminating connection"),
    errors.ConnectionFailure("gone"),
    wrapped(errors.CannotConnectNow("starting up")),
    errors.ReadOnlySqlTransaction("cannot execute UPDATE in a read-only transaction"),
    internal(errors.ReadOnlySqlTransaction("cannot execute UPDATE in a read-only transaction")),
    wrapped(errors.DiskFull("could not extend file: No space left on device")),
]
REFUSALS: list[Exception] = [
    wrapped(errors.DeadlockDetected("deadlock")),
    internal(errors.InternalError_("a defect of the server")),
    errors.QueryCanceled("cancelled"),
    django.db.IntegrityError("duplicate key"),
    ValueError("a defect"),
]


def name(error: Any) -> str:
    return f"{type(error).__name__}-{type(error.__cause__ or error).__name__}"


def logged(error: Exception) -> str:
    """What `log.exception` prints of an error under the filter."""
    stream, log = io.StringIO(), logging.Logger("probe")
    handler = logging.StreamHandler(stream)
    handler.addFilter(OneLineOutages())
    handler.setFormatter(logging.Formatter("{levelname} {message}", style="{"))
    log.addHandler(handler)
    try:
        raise error
    except Exception:
        log.exception("the handler of %s failed", "100%")
    return stream.getvalue()


@pytest.mark.parametrize("kind", [redis.exceptions.ConnectionError, redis.exceptions.TimeoutError])
def test_valkey_that_is_away_is_one_warning(kind: type[Exception]) -> None:
    """The channel layer's library logs a traceback of 40 lines; nothing but hints is lost."""
    assert logged(kind("refused")) == "WARNING the handler of 100% failed: refused\n"
    assert not is_outage(kind("refused"))


@pytest.mark.parametrize("error", OUTAGES, ids=name)
def test_an_outage_is_one_warning(error: Exception) -> None:
    """No traceback: it would push everything else out of what somebody reads."""
    assert is_outage(error)
    assert logged(error) == f"WARNING the handler of 100% failed: {error}\n"


@pytest.mark.parametrize("error", REFUSALS, ids=name)
def test_everything_else_keeps_its_traceback(error: Exception) -> None:
    """A deadlock or a defect is somebody's mistake."""
    assert not is_outage(error)
    assert logged(error).startswith("ERROR the handler of 100% failed\n")
    assert "Traceback" in logged(error)


def test_a_recurring_task_leaves_a_run_out_in_an_outage_only() -> None:
    """django-q2 would keep the failed run and repeat it later; the next one does its work."""
    runs: list[Exception] = [OUTAGES[0], REFUSALS[0]]

    @skip_during_outage
    def task() -> None:
        raise runs.pop(0)

    task()
    with pytest.raises(django.db.OperationalError):
        task()


@pytest.mark.parametrize(
    "recurring", [*node_schedules.SCHEDULES, *ledger_schedules.SCHEDULES], ids=lambda one: one.name
)
def test_every_recurring_task_leaves_a_run_out(
    recurring: RecurringTask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """django-q2 would log the traceback as text, which no filter knows for an outage."""
    function = recurring.function.rpartition(".")[2]

    def away() -> None:
        raise OUTAGES[0]

    monkeypatch.setattr(connections["default"], "ensure_connection", away)
    import_string(recurring.function)()
    assert [record.getMessage() for record in caplog.records] == [f"{function} left out: {OUTAGES[0]}"]


def test_an_outage_is_not_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Review X4: a few lines of each kind in a minute; then how many were left out. Others are unaffected."""
    now = [0.0]
    monkeypatch.setattr("localai_cluster.kit.clock.monotonic", lambda: now[0])
    stream, log = io.StringIO(), logging.Logger("probe")
    handler = logging.StreamHandler(stream)
    handler.addFilter(RepeatLimit())
    log.addHandler(handler)
    for number in range(50):
        log.warning("cannot claim: %s", OUTAGES[0])
        log.warning("node %s is refused", number)
        log.info("going on")
    now[0] = 61.0
    log.warning("cannot claim: %s", OUTAGES[0])
    lines = stream.getvalue().splitlines()
    claims = [line for line in lines if line.startswith("cannot claim")]
    assert claims == ["cannot claim: connection refused"] * 2 + [
        "cannot claim: connection refused (48 more like it left out)"
    ]
    assert (len([line for line in lines if "is refused" in line]), lines.count("going on")) == (50, 50)
