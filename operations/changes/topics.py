"""Websocket topics of operations: a stream of numbered changes, one message per change or batch.

The channel layer keeps an unbounded queue for every subscriber, which a slow subscriber would fill. So one
subscription serves the whole process and is drained at once. While the layer is unavailable or loses
messages, the cursors read the changes from the rows a little later.

A `Cursor` is the position of one reader. The channel layer may lose, duplicate or reorder changes. A change
after a quiet period is yielded at once; the changes that closely follow it are batched. If a gap in the
numbers does not close while a batch is gathered, the cursor reads the rows; it also reads them every few
seconds. A slow reader buffers no more than `MAX_RECEIVED_CHANGES` changes and then catches up from the rows.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from django.db import Error as DatabaseError

from localai_cluster.kit import cancellation, clock
from localai_cluster.web.sockets import Scope, encode_message, query_number
from operations.changes import feed
from operations.changes.events import GROUP
from operations.changes.feed import PARTIAL_KEY, merge_changes

log = logging.getLogger(__name__)

READ_INTERVAL = 5.0
"""Seconds between two reads of the rows if no change is received."""
RETRY_READ_INTERVAL = 1.0
"""Seconds between two reads of the rows while the database cannot be read."""
GATHER_SECONDS = 0.05
"""Minimum seconds between two updates: ten thousand changes a minute become twenty messages a second."""
MAX_MISSED_CHANGES = 1000
"""Maximum number of changes that a client can catch up on; after more it gets a snapshot."""
MAX_RECEIVED_CHANGES = 1000


@dataclass(frozen=True)
class Update:
    """One step of a reader: a snapshot (`whole`), or the changes in order.

    `seq` is the reader's new position. The update from `after` to `seq` is equal for all readers. If `after`
    is None, the rows were read for this reader.
    """

    whole: bool
    seq: int
    operations: list[dict[str, Any]]
    after: int | None = None


def read_update(since: int | None) -> Update:
    """Read the changes after `since` as an update.

    It is a snapshot if the changes are too many, or if `since` is None or invalid. Without changes, which is
    the usual case, it costs one query: every open page calls this periodically.
    """
    if since is None or not 0 <= (behind := feed.current_seq() - since) <= MAX_MISSED_CHANGES:
        current = feed.snapshot()
        return Update(True, current.seq, current.operations)
    if not behind:
        return Update(False, since, [])
    missed = feed.since(since)
    return Update(False, missed.seq, missed.operations)


_next_reads: dict[int | None, "asyncio.Future[Update]"] = {}
"""Reads that have not begun yet, by position; further readers at the position share them."""


def _begin_read(since: int | None) -> Update:
    _next_reads.pop(since, None)
    return read_update(since)


_read_rows = database_sync_to_async(_begin_read)
"""All reads run in one thread, one after another: 200 pages that come back at once need one snapshot."""


async def _read_shared(since: int | None) -> Update:
    """Return the update of a read that begins after this call."""
    reading = _next_reads.get(since)
    if reading is None:
        reading = _next_reads[since] = asyncio.ensure_future(_read_rows(since))
        reading.add_done_callback(functools.partial(_forget_read, since))
    return await asyncio.shield(reading)


def _forget_read(since: int | None, reading: "asyncio.Future[Update]") -> None:
    if _next_reads.get(since) is reading:  # it could not begin
        del _next_reads[since]
    if not reading.cancelled():
        reading.exception()  # all readers may have gone


def gather_seconds(update_age: float, has_gap: bool) -> float:
    """Return how long to gather changes before an update; a gap in the numbers may close meanwhile."""
    return GATHER_SECONDS if has_gap else max(GATHER_SECONDS - update_age, 0.0)


class Cursor:
    """The position of one client in the stream of changes."""

    def __init__(self) -> None:
        self._seq = 0
        self._received: dict[int, dict[str, Any]] = {}
        self._woken = asyncio.Event()
        self._failing = False
        self._updated_at = -GATHER_SECONDS

    def receive(self, seq: int, operation: dict[str, Any]) -> None:
        """Buffer a change from the channel layer."""
        if len(self._received) >= MAX_RECEIVED_CHANGES:
            self._received.clear()  # the gap makes the cursor read the rows
        self._received[seq] = operation
        self._woken.set()

    def wake(self) -> None:
        """Make the cursor read the rows, because a change may have been lost."""
        self._woken.set()

    async def updates(self, since: int | None) -> AsyncGenerator[Update, None]:
        """Yield the update from `since` to the present, then every further update, without end."""
        step: Callable[[], Awaitable[Update | None]] = functools.partial(self._read, since)
        while True:
            try:
                update = await step()
            except DatabaseError as error:
                self._warn_once(error)
            else:
                self._failing, step = False, self._next_update
                if update is not None:
                    self._updated_at = clock.monotonic()
                    yield update
            await self._wait_for_batch()

    async def _next_update(self) -> Update | None:
        fresh, received, self._received = self._unread_numbers(), self._received, {}
        if received and not fresh:
            return None
        if fresh and not self._is_gap(fresh):
            before, self._seq = self._seq, fresh[-1]
            return Update(False, self._seq, [received[seq] for seq in fresh], after=before)
        before = self._seq
        update = await self._read(before)
        return update if update.whole or update.seq > before else None

    def _unread_numbers(self) -> list[int]:
        return sorted(seq for seq in self._received if seq > self._seq)

    def _is_gap(self, fresh: list[int]) -> bool:
        return fresh[-1] - self._seq != len(fresh)

    async def _read(self, since: int | None) -> Update:
        update = await _read_shared(since)
        self._seq = update.seq
        return update

    async def _wait_for_batch(self) -> None:
        """Wait for a change and the batch that follows it, or until the next read is due."""
        try:
            async with asyncio.timeout(RETRY_READ_INTERVAL if self._failing else READ_INTERVAL):
                await self._woken.wait()
        except TimeoutError:
            return
        fresh = self._unread_numbers()
        has_gap = not fresh or self._is_gap(fresh)
        await asyncio.sleep(gather_seconds(clock.monotonic() - self._updated_at, has_gap))
        self._woken.clear()

    def _warn_once(self, error: DatabaseError) -> None:
        if not self._failing:
            log.warning("operations not read: %s; reading again", type(error).__name__)
        self._failing = True


MAX_CACHED_TEXTS = 8
"""Maximum number of cached message texts: most readers are at the same position or slightly behind."""
RESUBSCRIBE_SECONDS = 1.0
"""Seconds between two attempts to subscribe."""


class FanOut:
    """The subscription of a process to the channel layer. It exists while the process has a reader."""

    def __init__(self) -> None:
        self._cursors: set[Cursor] = set()
        self._task: asyncio.Task[None] | None = None
        self._texts: dict[tuple[int, int], str] = {}

    def text(self, span: tuple[int, int], render: Callable[[], str]) -> str:
        """Return the message with the changes in `span`; `render` creates it once for all readers."""
        message = self._texts.get(span)
        if message is None:
            if len(self._texts) >= MAX_CACHED_TEXTS:
                del self._texts[next(iter(self._texts))]
            message = self._texts[span] = render()
        return message

    @contextlib.asynccontextmanager
    async def subscribe(self, cursor: Cursor) -> AsyncIterator[None]:
        """Pass each change of the channel layer to the cursor while the block runs."""
        self._cursors.add(cursor)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="operations fan-out")
        try:
            yield
        finally:
            self._cursors.discard(cursor)
            if not self._cursors:
                self._texts.clear()
            if not self._cursors and self._task is not None:
                task, self._task = self._task, None
                await cancellation.cancel_and_wait(task)

    async def _run(self) -> None:
        failing = False
        while True:
            try:
                async with _subscription() as (layer, channel):
                    failing = False
                    for cursor in self._cursors:
                        cursor.wake()  # earlier changes were not received
                    while True:
                        message = await layer.receive(channel)
                        for cursor in self._cursors:
                            for change in message["operations"]:
                                cursor.receive(int(change["seq"]), change)
            except Exception as error:
                # Any error of the layer's client: meanwhile the cursors poll the rows.
                if not failing:
                    log.warning("changes of operations are not received: %r; retrying", error)
                failing = True
                await asyncio.sleep(RESUBSCRIBE_SECONDS)


@contextlib.asynccontextmanager
async def _subscription() -> AsyncIterator[tuple[Any, str]]:
    layer: Any = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add(GROUP, channel)
    try:
        yield layer, channel
    finally:
        with contextlib.suppress(Exception):
            await layer.group_discard(GROUP, channel)


_shared_fan_out = FanOut()


def shared_fan_out() -> FanOut:
    """Return the fan-out of this process."""
    return _shared_fan_out


async def _updates(since: int | None) -> AsyncGenerator[Update, None]:
    """Yield the update from `since` to the present, then every further update, without end."""
    cursor = Cursor()
    async with shared_fan_out().subscribe(cursor):
        async for update in cursor.updates(since):
            yield update


async def single_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield the messages of `/ws/operations`: a snapshot, then one message per change; `?since=` resumes."""
    async with contextlib.aclosing(_updates(query_number(scope, "since"))) as stream:
        async for update in stream:
            if update.whole:
                yield encode_message({"type": "snapshot", "seq": update.seq, "operations": update.operations})
                continue
            for change in update.operations:
                operation, partial = _split(change)
                message = {"type": "delta", "seq": operation["seq"], "operation": operation}
                yield encode_message(message | ({PARTIAL_KEY: True} if partial else {}))


async def grouped_changes(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield the messages of `/ws/feed`: one per batch of changes; `?operations=` resumes."""
    async with contextlib.aclosing(_updates(query_number(scope, "operations"))) as stream:
        async for update in stream:
            if update.whole:
                message = {"type": "operations.snapshot", "seq": update.seq, "operations": update.operations}
                yield encode_message(message)
            elif update.after is None:
                yield _group(update)
            else:
                yield shared_fan_out().text((update.after, update.seq), functools.partial(_group, update))


def _group(update: Update) -> str:
    operations, partial = [], []
    for change in merge_changes(update.operations):
        operation, is_partial = _split(change)
        operations.append(operation)
        partial += [operation["jobID"]] if is_partial else []
    message = {"type": "operations.delta", "seq": update.seq, "operations": operations}
    return encode_message(message | ({PARTIAL_KEY: partial} if partial else {}))


def _split(change: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the operation in its documented form, and True if the change was partial."""
    return {key: value for key, value in change.items() if key != PARTIAL_KEY}, PARTIAL_KEY in change
