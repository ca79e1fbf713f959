"""Fixtures of every room.

Real servers, started once by the first test that needs them, and a deadline helper.
"""

import asyncio
import gc
import inspect
import os
import ssl
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import httpx
import httpx._transports.default
import pytest
import pytest_asyncio.plugin
from django.db import connection, connections
from django.test import TransactionTestCase
from hypothesis import settings
from looptime._internal import plugin as looptime_plugin
from psycopg.pq import TransactionStatus

from localai_cluster.embedded.bundled_servers import EmbeddedValkey
from localai_cluster.kit import clock, processes
from localai_cluster.kit.outage import is_outage
from localai_cluster.web import throttle
from tests.scheduling import Scheduling
from tests.support.effort import EFFORT
from tests.support.environment import HOME, VALKEY_PASSWORD
from tests.support.postgres import FastPostgres, cleaner, empty_tables, reset

# A property holds or not; how long one example takes on a busy machine says nothing.
settings.register_profile("suite", deadline=None, max_examples=100 * EFFORT)
settings.load_profile("suite")
patch.object(TransactionTestCase, "_fixture_teardown", empty_tables).start()


def _is_from_asyncio(definition: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> bool:
    """Return True if pytest-asyncio defines the fixture: one of them makes the event loop.

    The plugin of looptime looks for it among everything in pytest-asyncio, before each fixture of a test.
    """
    return definition.func.__module__ == pytest_asyncio.plugin.__name__


patch.object(looptime_plugin, "_should_patch", _is_from_asyncio).start()

_new_context = httpx.create_ssl_context


@cache
def _usual_context(trust_env: bool, file: str | None, folder: str | None) -> ssl.SSLContext:
    return _new_context(trust_env=trust_env)


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """Return one context for all clients of this process that trust the usual authorities.

    httpx reads all their certificates for each client, which takes 20 ms of the processor.
    """
    if verify is not True or cert is not None:
        return _new_context(verify, cert, trust_env)
    return _usual_context(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


patch.object(httpx._transports.default, "create_ssl_context", _context).start()


def pytest_configure() -> None:
    """Passwords are hashed quickly: a hash of the product takes a third of a second of the processor.

    What is imported and collected stays until the end, so nothing is garbage before the first test.
    """
    gc.disable()
    # Programs that use `eventually` import this file without Django's settings.
    from django.conf import settings as django_settings

    from tests.support.cluster import Cluster

    Cluster.forks = True
    django_settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    # Before each test looptime takes the policy's event loop. Unless one was set, even to None, the policy
    # makes one, which nobody closes.
    asyncio.set_event_loop(None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from here on, but never look at the ten thousand collected tests again.

    What is garbage already stays too: it is an eighth of the objects, and one look at all of them takes
    as long as a seventh of the start of a process.
    """
    gc.freeze()
    gc.enable()


TWICE = ("tests/acceptance/", "tests/browser/")
"""Rooms whose tests watch real processes and pages from outside, on a machine that may be busy elsewhere."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of `TWICE` counts as failed when it fails twice in a row; the summary names each repetition.

    A test that is named there is to be looked into: what it saw may be rare and real.
    """
    for item in items:
        if item.nodeid.startswith(TWICE):
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Tests that share a cluster run in one process."""
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def reaper() -> Iterator[processes.ProcessReaper]:
    """Ends the servers of this run even if the run itself is killed."""
    with processes.ProcessReaper() as started:
        yield started


@pytest.fixture(scope="session")
def postgres(reaper: processes.ProcessReaper) -> Iterator[FastPostgres]:
    """The PostgreSQL of this process, with the schema in it."""
    server = FastPostgres(HOME / "pg")
    server.start(reaper)
    yield server
    cleaner.close()
    server.stop()


@pytest.fixture(scope="session")
def valkey(reaper: processes.ProcessReaper) -> Iterator[EmbeddedValkey]:
    """The Valkey of this run, behind the channel layer."""
    server = EmbeddedValkey(HOME / "vk", password=VALKEY_PASSWORD)
    server.start(reaper)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def django_db_setup(postgres: FastPostgres, django_test_environment: None) -> Iterator[None]:
    """Use the test database that came with the server's data folder.

    A connection that is closed returns to a pool, as in a web process: a new one costs a process of the
    server, which reads the whole catalogue again.
    """
    settings = connections.settings["default"]
    settings["NAME"] = settings["TEST"]["NAME"]
    settings["CONN_MAX_AGE"] = 0
    settings["OPTIONS"]["pool"] = {"min_size": 0, "max_size": 50, "timeout": 30, "reset": reset}
    yield
    wrapper: Any = connections["default"]
    wrapper.close()
    wrapper.close_pool()


def _count_apart(monkeypatch: pytest.MonkeyPatch, name: str, *options: Any) -> throttle.Failures:
    """Let `throttle.<name>` count for this test alone, so that none is refused for another one's failures."""
    own = throttle.in_memory_counters(f"test-{name}", throttle.MAX_ADDRESSES)
    own.clear()
    counts = throttle.Failures(None, own, *options)
    monkeypatch.setattr(throttle, name, lambda: counts)
    return counts


@pytest.fixture(autouse=True)
def failed_tokens(monkeypatch: pytest.MonkeyPatch) -> throttle.Failures:
    return _count_apart(monkeypatch, "token_failures")


@pytest.fixture(autouse=True)
def failed_keys(monkeypatch: pytest.MonkeyPatch) -> throttle.Failures:
    return _count_apart(monkeypatch, "api_keys", throttle.DEFAULT_LIMIT, "API keys")


@pytest.fixture(autouse=True)
def failed_sign_ins(monkeypatch: pytest.MonkeyPatch) -> throttle.Failures:
    return _count_apart(monkeypatch, "sign_ins", throttle.SIGN_IN_FAILURE_LIMIT, "sign-ins")


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """No minute ends while failures are counted."""
    now = clock.now().replace(second=5)
    monkeypatch.setattr(clock, "now", lambda: now)


BUSY = 6
"""How many times as long everything may take on a machine that has something else to do."""


def eventually(condition: Callable[[], Any], *, seconds: float = 15.0, what: str = "condition") -> Any:
    """Looks until `condition` gives something true, and returns it; fails with `what` after a long time.

    `seconds` is what a machine with nothing else to do needs at most. A test that passes waits no longer.
    """
    deadline, pause = clock.monotonic() + BUSY * seconds, 0.01
    while not (found := condition()):
        if clock.monotonic() > deadline:
            raise AssertionError(f"not within {BUSY * seconds} s: {what}")
        # Not longer than what is waited for may last, such as a copy under way.
        pause = min(1.3 * pause, 0.1)
        time.sleep(pause)
    return found


async def until(
    condition: Callable[[], Any], seconds: float = 15.0, what: object = "condition", every: float = 0.01
) -> Any:
    """Like `eventually`, in a coroutine; `condition` may be sync or async."""
    deadline = clock.monotonic() + BUSY * seconds
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert clock.monotonic() < deadline, f"not within {BUSY * seconds} s: {what}"
        await asyncio.sleep(every)


@pytest.fixture(autouse=True)
def log_of_this_test() -> None:
    """No test goes on with the placement log of another one: its rows are gone."""
    # Programs that use `eventually` import this file without Django, so it imports no models.
    from nodes.decisions import decision_log
    from nodes.loading import load_explanation  # noqa: F401 - not within a test, whose calls are counted

    decision_log.start_new_base()


def _unusable() -> bool:
    """Whether the test has left its transaction in an error, or no connection at all."""
    session = connection.connection
    if session is None or connection.needs_rollback:
        return True
    return bool(session.info.transaction_status == TransactionStatus.INERROR)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Every decision that a test has stored follows from the rows alone (I14).

    Before any fixture ends: what a test has patched may be what the end of the database's fixture needs.
    Outside of a plugin that counts the calls of the test (`tests/checks/trip.py`).
    """
    yield
    from nodes.loading import load_explanation
    from nodes.models import PlacementRecord

    if item.get_closest_marker("django_db") is None or _unusable():
        return
    try:
        records = list(PlacementRecord.objects.order_by("id"))
    except Exception as error:
        if not is_outage(error):
            raise
        return  # the test plays one
    for record in records:
        assert load_explanation.replay(record) == load_explanation.recorded_decision(record), (
            f"record {record.pk}: {record}"
        )
