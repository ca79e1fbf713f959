"""What the recorder of progress remembers, when it writes, and what it does with what cannot be written."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from django.db import DataError, OperationalError

from localai_cluster.kit import clock
from localai_cluster.kit.leases import Attempt
from operations.ledger.progress import BATCH_INTERVAL, Batch, Recorder, Tick
from tests.conftest import until

ONE: Attempt = (UUID(int=1), 1)
TWO: Attempt = (UUID(int=2), 1)


class Writer:
    """Stands in for the database: keeps the batches, and does what `answer` says with each."""

    def __init__(self, answer: Callable[[Batch], set[Attempt]] = lambda batch: set()) -> None:
        self.answer, self.open = answer, asyncio.Event()
        self.open.set()
        self.batches: list[dict[Attempt, list[Tick]]] = []
        self.begun: list[float] = []

    async def __call__(self, batch: Batch) -> set[Attempt]:
        self.begun.append(clock.monotonic())
        kept = {attempt: list(ticks) for attempt, ticks in batch.items()}
        await self.open.wait()
        lost = self.answer(batch)
        self.batches.append(kept)
        return lost

    async def wrote(self, count: int) -> None:
        await until(lambda: len(self.batches) >= count)

    async def began(self, count: int) -> None:
        await until(lambda: len(self.begun) >= count)


@pytest.mark.rule("O27", "O71")
async def test_the_first_report_is_written_at_once_and_what_comes_meanwhile_together() -> None:
    """While a batch is under way, each part keeps its latest report; all of them are the next batch."""
    writer = Writer()
    recorder = Recorder(writer)
    writer.open.clear()
    recorder.add(ONE, [Tick("resolving")])
    await writer.began(1)
    node = uuid4()
    for percentage in range(100):
        recorder.add(ONE, [Tick("downloading", percentage=percentage)])
        recorder.add(TWO, [Tick("downloading", percentage=percentage, node_id=node)])
        recorder.add(TWO, [Tick("downloading", percentage=percentage / 2)])
    writer.open.set()
    await writer.wrote(2)
    first, second = writer.batches
    assert first == {ONE: [Tick("resolving")]}
    assert second == {
        ONE: [Tick("downloading", percentage=99)],
        TWO: [Tick("downloading", percentage=99, node_id=node), Tick("downloading", percentage=49.5)],
    }


@pytest.mark.rule("O27", "O71")
async def test_at_most_ten_batches_a_second_begin() -> None:
    """However many reports come, a batch begins a tenth of a second after the one before at the earliest."""
    writer = Writer()
    recorder = Recorder(writer)

    def six_batches() -> bool:
        recorder.add(ONE, [Tick("downloading")])
        return len(writer.batches) >= 6

    await until(six_batches)
    # All gaps together: on a busy machine the writer notes the beginning of a batch late.
    assert writer.begun[5] - writer.begun[0] >= 5 * BATCH_INTERVAL * 0.9


async def test_what_cannot_be_written_now_is_kept_under_what_came_since() -> None:
    """An outage of the database costs no figures, and the newer report wins."""
    outage = [OperationalError("server closed the connection")]

    def answer(batch: Batch) -> set[Attempt]:
        if outage:
            recorder.add(ONE, [Tick("unpacking", percentage=10)])
            raise outage.pop()
        return set()

    writer = Writer(answer)
    recorder = Recorder(writer)
    recorder.add(ONE, [Tick("downloading", percentage=50)])
    recorder.add(TWO, [Tick("downloading", percentage=70)])
    await writer.wrote(1)
    assert writer.batches == [
        {ONE: [Tick("unpacking", percentage=50)], TWO: [Tick("downloading", percentage=70)]}
    ]


async def test_a_report_that_the_database_refuses_does_not_hold_up_the_others() -> None:
    """The batch is written attempt by attempt, and the refused report is dropped."""

    def answer(batch: Batch) -> set[Attempt]:
        if ONE in batch:
            raise DataError("out of range")
        return set()

    writer = Writer(answer)
    recorder = Recorder(writer)
    recorder.add(ONE, [Tick("downloading", percentage=1)])
    recorder.add(TWO, [Tick("downloading", percentage=2)])
    await writer.wrote(1)
    assert writer.batches == [{TWO: [Tick("downloading", percentage=2)]}]
    assert await recorder.take(ONE) is None


@pytest.mark.rule("I3")
async def test_an_attempt_that_lost_its_operation_is_named() -> None:
    """The others of the batch are not."""
    lost: list[Attempt] = []
    writer = Writer(lambda batch: {ONE})
    recorder = Recorder(writer, lost.append)
    recorder.add(ONE, [Tick("downloading")])
    recorder.add(TWO, [Tick("downloading")])
    await writer.wrote(1)
    await recorder.take(TWO)
    assert lost == [ONE]


async def test_an_outcome_waits_for_the_batch_with_its_own_reports_only() -> None:
    """It takes along what is not written; a batch under way without its reports does not hold it up."""
    writer = Writer()
    recorder = Recorder(writer)
    writer.open.clear()
    recorder.add(ONE, [Tick("downloading", percentage=1)])
    await writer.began(1)
    recorder.add(ONE, [Tick("downloading", percentage=2)])
    recorder.add(TWO, [Tick("downloading", percentage=3)])
    assert await recorder.take(TWO) == [Tick("downloading", percentage=3)]
    outcome = asyncio.create_task(recorder.take(ONE))
    await asyncio.wait({outcome}, timeout=0)
    assert not outcome.done()
    writer.open.set()
    assert await outcome == [Tick("downloading", percentage=2)]
    assert writer.batches == [{ONE: [Tick("downloading", percentage=1)]}]


@pytest.mark.rule("I6", "O69", "O65", "O71")
@pytest.mark.parametrize(
    ("former", "later", "both"),
    [
        (
            Tick("a", "m", 80, 99, 80, "f"),
            Tick("a", "m", 60, 99, 60, "f"),
            Tick("a", "m", 80, 99, 80, "f"),
        ),
        (Tick("a", "m", 80, 99, 80, "f"), Tick("a", "n", 10, 50, 20, "g"), Tick("a", "n", 10, 50, 80, "g")),
        (Tick("b", "m"), Tick(percentage=5), Tick("b", "m", percentage=5)),
    ],
)
def test_two_reports_of_a_part_become_one(former: Tick, later: Tick, both: Tick) -> None:
    """Figures do not go back, another file begins with its own bytes, and no phase is lost."""
    assert later.after(former) == both


async def test_the_final_bytes_are_written_although_the_next_step_reports_none() -> None:
    """A load whose last file has arrived starts its engine at once; both reports are in one batch."""
    sent, starts = Tick("staging", "x", 90, 90, 90, "f", total_files=2), Tick("loading", "y", percentage=95)
    recorder = Recorder(Writer())
    recorder.add(ONE, [replace(sent, current_bytes=40, percentage=40)])
    recorder.add(ONE, [sent])
    recorder.add(ONE, [starts])
    assert await recorder.take(ONE) == [sent, starts]


async def test_reports_that_could_not_be_written_come_before_newer_ones() -> None:
    """Their bytes are final: what was reported since has none."""
    outage = [OperationalError("server closed the connection")]
    sent, starts = Tick("staging", "x", 90, 90, 90, "f"), Tick("loading", "y", percentage=95)

    def answer(batch: Batch) -> set[Attempt]:
        if outage:
            recorder.add(ONE, [starts])
            raise outage.pop()
        return set()

    writer = Writer(answer)
    recorder = Recorder(writer)
    recorder.add(ONE, [sent])
    await writer.wrote(1)
    assert writer.batches == [{ONE: [sent, starts]}]
