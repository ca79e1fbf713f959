"""Batches of values: while one batch is being written, the values for the next one are collected."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from localai_cluster.kit import clock, errors

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
R = TypeVar("R")

_BATCH_RETRY_SECONDS = 1.0
"""Seconds after which a batch that could not be written is written again."""


class Batcher(Generic[K, V]):
    """Buffers one value for each key, and passes the values to `write` in batches, one batch at a time.

    If the key of a new value has a buffered value, `merge(earlier, later)` replaces both. `write` returns the
    values that must be written again. If `write` raises one of `retry_on`, the whole batch is written again;
    after any other error the batch is lost. The time between the starts of two batches is twice the duration
    of the first, within the bounds of `interval` (seconds). If the batcher is closed, `abandon` gets the
    values that are still buffered.
    """

    def __init__(
        self,
        write: Callable[[Mapping[K, V]], Awaitable[Mapping[K, V] | None]],
        *,
        merge: Callable[[V, V], V],
        interval: tuple[float, float] = (0.0, 0.0),
        most: int | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        abandon: Callable[[Collection[V]], None] | None = None,
    ) -> None:
        self._write, self._merge, self._abandon = write, merge, abandon
        self._interval, self._most, self._retry_on = interval, most, retry_on
        self._buffer: dict[K, V] = {}
        self._batch: Mapping[K, V] = {}
        self._next_at = clock.monotonic()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def add(self, key: K, value: V) -> None:
        """Buffer a value for the next batch."""
        earlier = self._buffer.get(key)
        self._buffer[key] = value if earlier is None else self._merge(earlier, value)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_until_empty(), name="batches")
            self._task.add_done_callback(self._abandon_if_cancelled)

    async def take(self, key: K) -> V | None:
        """Remove and return the buffered value; wait first for a running batch that has the key."""
        if key in self._batch:
            async with self._writing:
                pass
        return self._buffer.pop(key, None)

    def discard(self, key: K) -> None:
        """Drop the buffered value."""
        self._buffer.pop(key, None)

    async def idle(self) -> None:
        """Wait until all added values are written or lost."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def close(self) -> None:
        """Stop writing."""
        if self._task is not None:
            self._task.cancel()

    def _abandon_if_cancelled(self, task: asyncio.Task[None]) -> None:
        if self._abandon is not None and task.cancelled():
            abandoned, self._buffer = self._buffer, {}
            self._abandon(abandoned.values())

    async def _write_until_empty(self) -> None:
        while self._buffer:
            if (pause := self._next_at - clock.monotonic()) > 0:
                await asyncio.sleep(pause)
            async with self._writing:
                began, self._next_at = clock.monotonic(), 0.0
                keys = list(self._buffer)[: self._most]
                self._batch = {key: self._buffer.pop(key) for key in keys}
                try:
                    await self._write_batch()
                finally:
                    self._batch = {}
                    shortest, longest = self._interval
                    pause = min(max(2 * (clock.monotonic() - began), shortest), longest)
                    self._next_at = max(self._next_at, began + pause)

    async def _write_batch(self) -> None:
        left: Mapping[K, V] | None
        try:
            left = await self._write(self._batch)
        except self._retry_on as error:
            log.warning("a batch of %d waits: %s", len(self._batch), error or type(error).__name__)
            left, self._next_at = self._batch, clock.monotonic() + _BATCH_RETRY_SECONDS
        except Exception:  # a defect; the next batch must still be written
            log.exception("a batch of %d is lost", len(self._batch))
            return
        for key, value in (left or {}).items():
            later = self._buffer.get(key)
            self._buffer[key] = value if later is None else self._merge(value, later)


class CallBatcher(Generic[T, R]):
    """Passes items to `call` in batches of at most `most`; each caller waits for its item's result.

    If a batch raises one of `one_by_one`, each of its items is passed alone, so that an item that the
    database refuses fails alone. Any other error fails all items of the batch. If the batcher is cancelled,
    all callers get Unavailable.
    """

    def __init__(
        self,
        call: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        *,
        most: int | None = None,
        one_by_one: tuple[type[Exception], ...] = (),
    ) -> None:
        self._call, self._one_by_one = call, one_by_one
        self._batches: Batcher[object, tuple[T, asyncio.Future[R]]] = Batcher(
            self._call_batch, merge=lambda earlier, later: later, most=most, abandon=_fail_all
        )

    async def put(self, item: T) -> R:
        """Return the result for the item; raise the error that its call raised."""
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._batches.add(object(), (item, result))
        return await result

    async def _call_batch(self, batch: Mapping[object, tuple[T, "asyncio.Future[R]"]]) -> None:
        try:
            await self._call_items(list(batch.values()))
        except asyncio.CancelledError:
            _fail_all(batch.values())  # also those whose turn has not come
            raise

    async def _call_items(self, calls: Sequence[tuple[T, "asyncio.Future[R]"]]) -> None:
        try:
            results = await self._call([item for item, _ in calls])
            pairs = list(zip(calls, results, strict=True))
        except self._one_by_one as error:
            if len(calls) == 1:
                _set_error(calls[0][1], error)
                return
            for call in calls:
                await self._call_items([call])
        except Exception as error:
            for _, result in calls:
                _set_error(result, error)
        else:
            for (_, result), value in pairs:
                if not result.done():  # the caller may have been cancelled
                    result.set_result(value)


def _fail_all(calls: "Collection[tuple[T, asyncio.Future[R]]]") -> None:
    for _, result in calls:
        _set_error(result, errors.Unavailable("this process is stopping"))


def _set_error(result: "asyncio.Future[R]", error: Exception) -> None:
    if not result.done():
        result.set_exception(error)
