"""Send all files of a plan to one worker, several at once; apply the rules for failures.

`transfer.py` sends each file. First `look` requests the state of all files, so that a small disk is detected
before the first byte. This controller sends a limited number of files at once to each node and in total. If
the worker refuses a file of the model itself, the attempt ends; other refused files are omitted from the
engine's options, and the operator is warned (R2.57). A full disk and an unreachable worker always end the
attempt: they do not concern one file.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID
from weakref import WeakValueDictionary

import httpx

from nodes.loading.file_keys import NoKey, key_of, root_of
from nodes.loading.staging_plan import FilePlan, LocalFile
from nodes.loading.transfer import FileRefused, Transfer
from nodes.loading.upload_meter import UploadMeter
from nodes.placement import deadlines

OF_A_NODE, IN_ALL = 4, 16
"""Most files that are sent at once to one node and in total."""


class TransferLimits:
    """The limits of one controller for parallel transfers."""

    def __init__(self) -> None:
        self.all = asyncio.Semaphore(IN_ALL)
        self._nodes: WeakValueDictionary[UUID, asyncio.Semaphore] = WeakValueDictionary()

    def to(self, node_id: UUID) -> asyncio.Semaphore:
        """Return the limit of this node; it lives as long as it is used."""
        semaphore = self._nodes.get(node_id)
        if semaphore is None:
            semaphore = self._nodes[node_id] = asyncio.Semaphore(OF_A_NODE)
        return semaphore


@dataclass(frozen=True)
class StagingResult:
    """The result of staging on one worker."""

    root: str
    """The worker's folder against which relative options resolve; "" if nothing had to be sent."""
    failed: dict[str, str]
    """By path: the reason why a file is missing."""


@dataclass
class ModelTransfer:
    """The staging of one model's files on one worker."""

    model: str
    plan: FilePlan
    client: httpx.AsyncClient
    node_id: UUID
    lanes: TransferLimits
    meter: UploadMeter
    stall: float = deadlines.STALL

    @cached_property
    def _transfers(self) -> list[tuple[LocalFile, Transfer]]:
        return [
            (file, Transfer(self.client, file, key_of(self.model, file.relative), self.meter, self.stall))
            for file in self.plan.files.values()
        ]

    async def look(self) -> int:
        """Return the number of missing bytes. Raise FileRefused, Stalled and Unreachable."""

        async def check(_: LocalFile, transfer: Transfer) -> None:
            await transfer.look()

        await self._each(check)
        return self.plan.total - self.meter.current

    async def run(self) -> StagingResult:
        """Send all files. Raise FileRefused, Stalled, Unreachable, Changed and OSError."""
        roots: set[str] = set()
        failed: dict[str, str] = {}

        async def bring(file: LocalFile, transfer: Transfer) -> None:
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

        await self._each(bring)
        if len(roots) > 1:
            raise FileRefused(self.model, 200, f"it keeps the files in several places: {sorted(roots)[:3]}")
        return StagingResult(next(iter(roots), ""), failed)

    async def _each(self, step: Callable[[LocalFile, Transfer], Awaitable[None]]) -> None:
        """Run one step for every file, several at once; the first failure cancels the others."""
        pending = iter(self._transfers)

        async def run_lane() -> None:
            for file, transfer in pending:
                async with self.lanes.to(self.node_id), self.lanes.all:
                    await step(file, transfer)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(OF_A_NODE, len(self._transfers))):
                    group.create_task(run_lane())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    async def _bring(self, file: LocalFile, transfer: Transfer) -> str:
        """Send the file; return the worker's folder of the model."""
        path = await transfer.bring()
        try:
            return root_of(path, file.relative)
        except NoKey as error:
            raise FileRefused(file.relative, 200, str(error)) from error
