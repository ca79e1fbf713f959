"""Races of real transactions, repeated, or arranged so that all wait for one lock at the same moment."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connection

from nodes.models import BackendNode, RevokedSecret
from tests.conftest import eventually
from tests.support import hot
from tests.support.effort import EFFORT
from tests.support.fleet import at_once
from tests.support.replicas import forget_nodes

ROUNDS = 5 * EFFORT
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)


def repeated(race: Callable[..., None]) -> Callable[..., None]:
    """Run a race several times, each time without nodes."""

    @functools.wraps(race)
    def run(*args: Any, **kwargs: Any) -> None:
        for _ in range(ROUNDS):
            forget_nodes()
            RevokedSecret.objects.all().delete()
            race(*args, **kwargs)

    return run


def waiting(count: int = 1) -> None:
    """Wait until `count` connections wait for a lock."""

    with psycopg.connect(hot.database_url(), autocommit=True) as watcher:

        def enough() -> bool:
            found = watcher.execute(WAITING).fetchone()
            return found is not None and found[0] >= count

        eventually(enough, what=f"{count} wait for a lock")


@contextmanager
def meanwhile(step: Callable[[], None]) -> Iterator[None]:
    """Repeat the step in another thread, as a controller does in parallel to a request."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.02):
            step()
        connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def holding(statement: str, *parameters: Any) -> Iterator[psycopg.Connection]:
    """Hold a lock in another transaction, which ends with the block."""
    with psycopg.connect(hot.database_url()) as other:
        other.execute(statement, parameters)
        yield other


def held(node: BackendNode) -> Any:
    """Hold the lock of the node's row."""
    return holding("SELECT 1 FROM backend_nodes WHERE id = %s FOR NO KEY UPDATE", node.pk)


def after(lock: Any, *jobs: Callable[[], Any]) -> list[Any]:
    """Run the jobs so that all of them wait for `lock` before it is released."""
    results: list[Any] = []
    with lock:
        thread = threading.Thread(target=lambda: results.extend(at_once(*jobs)))
        thread.start()
        waiting(len(jobs))
    thread.join()
    return results
