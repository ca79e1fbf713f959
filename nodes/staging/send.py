"""All files of a plan to one worker: several at once, each by `transfer.py`; what fails, by the rules.

First the worker is asked for all of them (`look`), so that a small disk is known before the first byte.
A node takes so many files at once from this controller, and the controller sends so many in all. A file of
the model itself that is refused ends the attempt; of others the engine is told nothing, and the operator is
warned (R2.57). A full disk and a worker that cannot be reached end it always: they are no matter of the file.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID
from weakref import WeakValueDictionary

import httpx

from nodes.placement import deadlines
from nodes.staging.keys import NoKey, key_of, root_of
from nodes.staging.meter import Meter
from nodes.staging.plan import FilePlan, LocalFile
from nodes.staging.transfer import FileRefused, Transfer

OF_A_NODE, IN_ALL = 4, 16
"""Files that are sent at once."""


class Lanes:
    """The bounds of one controller."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(IN_ALL)
        self._nodes: WeakValueDictionary[UUID, asyncio.Semaphore] = WeakValueDictionary()

    def to(self, node_id: UUID) -> asyncio.Semaphore:
        """The bound of this node; it lives as long as it is used."""
        found = self._nodes.get(node_id)
        if found is None:
            found = self._nodes[node_id] = asyncio.Semaphore(OF_A_NODE)
        return found


@dataclass(frozen=True)
class Sent:
    """What is on the worker now."""

    root: str
    """The folder there against which relative options resolve; "" if nothing was to be sent."""
    failed: dict[str, str]
    """By path: why a file is not there."""


@dataclass
class Sending:
    """The files of one model on their way to one worker."""

    model: str
    plan: FilePlan
    client: httpx.AsyncClient
    node_id: UUID
    lanes: Lanes
    meter: Meter
    stall: float = deadlines.STALL

    @cached_property
    def _transfers(self) -> list[tuple[LocalFile, Transfer]]:
        return [
            (file, Transfer(self.client, file, key_of(self.model, file.relative), self.meter, self.stall))
            for file in self.plan.files.values()
        ]

    async def look(self) -> int:
        """How many bytes are not there. Raises FileRefused, Stalled and Unreachable."""

        async def seen(_: LocalFile, transfer: Transfer) -> None:
            await transfer.look()

        await self._each(seen)
        return self.plan.total - self.meter.current

    async def run(self) -> Sent:
        """Return when all are there. Raises FileRefused, Stalled, Unreachable, Changed and OSError."""
        roots: set[str] = set()
        failed: dict[str, str] = {}

        async def brought(file: LocalFile, transfer: Transfer) -> None:
            try:
                roots.add(await self._bring(file, transfer))
            except FileRefused as refusal:
                if refusal.of_node or self.plan.is_vital(file.relative):
                    raise
                failed[file.relative] = str(refusal)
                self.meter.leaves_out(file.relative)
            except OSError as error:
                if self.plan.is_vital(file.relative):
                    raise
                failed[file.relative] = f"cannot be read: {error.strerror or error}"
                self.meter.leaves_out(file.relative)

        await self._each(brought)
        if len(roots) > 1:
            raise FileRefused(self.model, 200, f"it keeps the files in several places: {sorted(roots)[:3]}")
        return Sent(next(iter(roots), ""), failed)

    async def _each(self, step: Callable[[LocalFile, Transfer], Awaitable[None]]) -> None:
        """One step of every file, several at once; the first failure ends the others."""
        left = iter(self._transfers)

        async def lane() -> None:
            for file, transfer in left:
                async with self.lanes.to(self.node_id), self.lanes.all:
                    await step(file, transfer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(OF_A_NODE, len(self._transfers))):
                    group.create_task(lane())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _bring(self, file: LocalFile, transfer: Transfer) -> str:
        """The worker's folder of the model."""
        path = await transfer.bring()
        try:
            return root_of(path, file.relative)
        except NoKey as why:
            raise FileRefused(file.relative, 200, str(why)) from why
