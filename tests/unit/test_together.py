"""Writes that gather into batches: what fails, and what comes after."""

import asyncio
from collections.abc import Sequence

import pytest
from django.db import DataError

from nodes.backends.batcher import Together


async def test_a_writer_outlives_an_error_that_is_not_the_databases() -> None:
    written: list[Sequence[int]] = []
    gate = asyncio.Event()

    async def write(batch: Sequence[int]) -> None:
        await gate.wait()
        if 1 in batch:
            raise RuntimeError("a defect")
        written.append(batch)

    together = Together(write)
    first = asyncio.create_task(together.put(1))
    await asyncio.sleep(0)
    later = [asyncio.create_task(together.put(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(RuntimeError):
        await first
    await asyncio.wait_for(asyncio.gather(*later), 10)
    assert written == [[2, 3]]


async def test_what_the_database_refuses_of_one_keeps_no_other_from_being_written() -> None:
    written: list[int] = []

    async def write(batch: Sequence[int]) -> None:
        if 2 in batch:
            raise DataError("refused")
        written.extend(batch)

    together = Together(write)
    outcomes = await asyncio.gather(*(together.put(number) for number in (1, 2, 3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), DataError, type(None)]
    assert written == [1, 3]
