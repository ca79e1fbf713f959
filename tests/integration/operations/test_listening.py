"""Connections that listen for changes: what a note costs, and what waiting for one costs."""

import asyncio
from typing import Any

import psycopg
import pytest
from django.db import connection
from psycopg import waiting

from operations.changes import events

pytestmark = pytest.mark.django_db(transaction=True)


async def test_waiting_for_notes_sets_no_short_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's timer of a tenth of a second would wake every idle process ten times a second."""
    intervals: list[float] = []
    begun = asyncio.Event()
    original = waiting.wait_async

    async def wait_async(gen: Any, fileno: int, interval: float = 0.0, timeout: float | None = None) -> Any:
        intervals.append(interval)
        begun.set()
        return await original(gen, fileno, interval=interval, timeout=timeout)

    monkeypatch.setattr(waiting, "wait_async", wait_async)
    notes = events.listen("some_channel")
    assert await anext(notes) == ("", "")
    intervals.clear()
    begun.clear()
    note = asyncio.ensure_future(anext(notes))
    async with asyncio.timeout(60):
        await begun.wait()
    assert min(intervals) >= 60
    await asyncio.to_thread(_notify)
    async with asyncio.timeout(60):
        assert await note == ("some_channel", "a note")
    await notes.aclose()  # type: ignore[attr-defined]


async def test_a_connection_that_ends_while_it_waits_is_made_again() -> None:
    """Without a timer too: the end of the connection wakes it."""
    notes = events.listen("some_channel")
    assert await anext(notes) == ("", "")
    note = asyncio.ensure_future(anext(notes))
    await asyncio.sleep(0)
    await asyncio.to_thread(_end_listeners)
    async with asyncio.timeout(60):
        assert await note == ("", "")
    await notes.aclose()  # type: ignore[attr-defined]


def _notify() -> None:
    with psycopg.connect(events.conninfo(), autocommit=True) as link:
        link.execute("NOTIFY some_channel, 'a note'")


def _end_listeners() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE query LIKE 'LISTEN%some_channel%' AND pid <> pg_backend_pid()"
        )
        assert cursor.rowcount == 1
