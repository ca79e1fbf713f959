"""Writes that gather into batches: what fails, and what comes after."""

import asyncio
from collections.abc import Sequence

import pytest
from django.db import DataError

from localai_cluster.kit import errors
from localai_cluster.kit.batching import CallBatcher


async def test_a_writer_outlives_an_error_that_is_not_the_databases() -> None:
    written: list[Sequence[int]] = []
    gate = asyncio.Event()

    async def write(batch: Sequence[int]) -> Sequence[None]:
        await gate.wait()
        if 1 in batch:
            raise RuntimeError("a defect")
        written.append(batch)
        return [None] * len(batch)

    batcher = CallBatcher(write, one_by_one=(DataError,))
    first = asyncio.create_task(batcher.put(1))
    await asyncio.sleep(0)
    later = [asyncio.create_task(batcher.put(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(RuntimeError):
        await first
    await asyncio.wait_for(asyncio.gather(*later), 10)
    assert written == [[2, 3]]


async def test_what_the_database_refuses_of_one_keeps_no_other_from_being_written() -> None:
    written: list[int] = []

    async def write(batch: Sequence[int]) -> Sequence[None]:
        if 2 in batch:
            raise DataError("refused")
        written.extend(batch)
        return [None] * len(batch)

    batcher = CallBatcher(write, one_by_one=(DataError,))
    outcomes = await asyncio.gather(*(batcher.put(number) for number in (1, 2, 3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), DataError, type(None)]
    assert written == [1, 3]


async def test_every_caller_gets_an_error_when_the_batches_are_cancelled() -> None:
    """Those of the running batch, and those that wait for the next one; later calls are served."""
    started, gate = asyncio.Event(), asyncio.Event()

    async def write(batch: Sequence[int]) -> Sequence[int]:
        started.set()
        await gate.wait()
        return batch

    batcher = CallBatcher(write)
    calls = [asyncio.create_task(batcher.put(1))]
    await started.wait()
    calls.append(asyncio.create_task(batcher.put(2)))
    await asyncio.sleep(0)
    (batches,) = (task for task in asyncio.all_tasks() if task.get_name() == "batches")
    batches.cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert [type(outcome) for outcome in outcomes] == [errors.Unavailable] * 2
    gate.set()
    assert await asyncio.wait_for(batcher.put(3), 10) == 3


async def test_a_caller_gets_an_error_when_the_batches_are_cancelled_before_they_begin() -> None:
    async def write(batch: Sequence[int]) -> Sequence[int]:
        return batch

    batcher = CallBatcher(write)
    call = asyncio.create_task(batcher.put(1))
    await asyncio.sleep(0)
    (batches,) = (task for task in asyncio.all_tasks() if task.get_name() == "batches")
    batches.cancel()
    with pytest.raises(errors.Unavailable):
        await asyncio.wait_for(call, 10)


async def test_every_caller_gets_an_error_when_items_are_passed_alone_and_the_batches_are_cancelled() -> None:
    """Those whose turn has not come wait for nothing any more, like the one whose call was cancelled."""
    alone, gate = asyncio.Event(), asyncio.Event()

    async def write(batch: Sequence[int]) -> Sequence[int]:
        if len(batch) > 1:
            raise DataError("one of them")
        alone.set()
        await gate.wait()
        return batch

    batcher = CallBatcher(write, one_by_one=(DataError,))
    calls = [asyncio.create_task(batcher.put(number)) for number in (1, 2, 3)]
    await alone.wait()
    (batches,) = (task for task in asyncio.all_tasks() if task.get_name() == "batches")
    batches.cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert [type(outcome) for outcome in outcomes] == [errors.Unavailable] * 3


@pytest.mark.parametrize("results", [[1], [1, 2, 3]])
async def test_every_caller_gets_an_error_when_results_are_missing_or_too_many(results: list[int]) -> None:
    async def write(batch: Sequence[int]) -> Sequence[int]:
        return results if len(batch) > 1 else batch

    batcher = CallBatcher(write)
    outcomes = await asyncio.wait_for(
        asyncio.gather(batcher.put(1), batcher.put(2), return_exceptions=True), 10
    )
    assert [type(outcome) for outcome in outcomes] == [ValueError] * 2
    assert await asyncio.wait_for(batcher.put(3), 10) == 3
