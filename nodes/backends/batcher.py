"""Batched writes: while one batch is written, the next one gathers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from django.db import Error as DatabaseError

T = TypeVar("T")


MOST = 256
"""Maximum number of items in a batch, which bounds the locks and the memory of a transaction."""


class Together(Generic[T]):
    """Passes items to `write` in batches; a caller waits until its item is written."""

    def __init__(self, write: Callable[[Sequence[T]], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: list[tuple[T, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, item: T) -> None:
        """Return when the item is written; raise the error that prevented it."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, written))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="writes")
        await written

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            try:
                await self._write([item for item, _ in batch])
            except DatabaseError as error:
                if len(batch) == 1:
                    _resolve(batch[0][1], error)
                else:
                    await self._one_by_one(batch)
            except asyncio.CancelledError as error:
                for _, written in (*batch, *self._waiting):
                    _resolve(written, error)
                self._waiting = []
                raise
            except Exception as error:  # the next batch must still be written
                for _, written in batch:
                    _resolve(written, error)
            else:
                for _, written in batch:
                    _resolve(written, None)

    async def _one_by_one(self, batch: Sequence[tuple[T, "asyncio.Future[None]"]]) -> None:
        """Write the items one by one, so that an item that the database refuses fails alone."""
        for item, written in batch:
            try:
                await self._write([item])
            except DatabaseError as error:
                _resolve(written, error)
            else:
                _resolve(written, None)


def _resolve(written: "asyncio.Future[None]", error: BaseException | None) -> None:
    if written.done():
        return  # the caller that waited was cancelled
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
