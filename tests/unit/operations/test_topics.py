"""When a cursor tells what has come: at once after a quiet moment, else together with what follows."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from operations.changes import topics
from operations.changes.topics import GATHER_SECONDS, Cursor, Update, gather_seconds

Next = Callable[[], Coroutine[Any, Any, Update]]
NEVER = 3600.0


@pytest.mark.parametrize(
    ("told_ago", "has_gap", "seconds"),
    [
        (NEVER, False, 0.0),
        (GATHER_SECONDS, False, 0.0),
        (GATHER_SECONDS / 5, False, GATHER_SECONDS * 4 / 5),
        (NEVER, True, GATHER_SECONDS),
    ],
    ids=["quiet", "just long enough", "soon after another one", "a number is missing"],
)
@pytest.mark.rule("O71")
def test_for_how_long_changes_are_gathered(told_ago: float, has_gap: bool, seconds: float) -> None:
    assert gather_seconds(told_ago, has_gap) == pytest.approx(seconds)


@pytest.fixture
async def reader(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Cursor, Next]]:
    """Stands at 10, and was told so long ago; the rows have nothing newer."""

    async def read(since: int | None) -> Update:
        return Update(False, 10 if since is None else since, [])

    monkeypatch.setattr(topics, "_read_rows", read)
    monkeypatch.setattr(topics, "READ_INTERVAL", NEVER)
    one = Cursor()
    updates = one.updates(None)
    assert (await anext(updates)).seq == 10
    one._updated_at = -2 * NEVER
    yield one, lambda: anext(updates)
    await updates.aclose()


@pytest.mark.rule("O71")
async def test_a_change_after_a_quiet_moment_is_told_at_once(
    reader: tuple[Cursor, Next], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every report waited for others to come, although five batches a second are no flood."""
    monkeypatch.setattr(topics, "GATHER_SECONDS", NEVER)
    one, update = reader
    one.receive(11, {"seq": 11})
    async with asyncio.timeout(60):
        assert (await update()).operations == [{"seq": 11}]


@pytest.mark.rule("O71", "O69")
async def test_changes_that_follow_closely_or_out_of_order_are_told_together(
    reader: tuple[Cursor, Next], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that overtook another does not send every reader to the rows."""
    one, update = reader
    gathering = asyncio.Event()

    def gathered(told_ago: float, has_gap: bool) -> float:
        assert has_gap
        gathering.set()
        return 0.1

    monkeypatch.setattr(topics, "gather_seconds", gathered)
    told = asyncio.create_task(update())
    one.receive(12, {"seq": 12})
    await gathering.wait()
    one.receive(11, {"seq": 11})
    assert [change["seq"] for change in (await told).operations] == [11, 12]


async def test_readers_at_one_position_share_the_next_read_of_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All pages come back at once after a restart. A read that has begun may lack the newest change."""
    begun, going_on, positions = threading.Event(), threading.Event(), list[int | None]()

    def read(since: int | None) -> Update:
        positions.append(since)
        begun.set()
        assert going_on.wait(60)
        return Update(True, len(positions), [])

    async def first_update(since: int | None) -> int:
        updates = Cursor().updates(since)
        update = await anext(updates)
        await updates.aclose()
        return update.seq

    monkeypatch.setattr(topics, "read_update", read)
    early = asyncio.create_task(first_update(None))
    await asyncio.to_thread(begun.wait, 60)
    late = [asyncio.create_task(first_update(since)) for since in (None, None, 7, None)]
    impatient = asyncio.create_task(first_update(None))
    await asyncio.sleep(0)
    impatient.cancel()
    going_on.set()
    assert await early == 1
    assert await asyncio.gather(*late) == [2, 2, 3, 2]
    assert positions == [None, None, 7]
    assert (await asyncio.gather(impatient, return_exceptions=True))[0].__class__ is asyncio.CancelledError
