"""The GPUs of this machine one by one: index, UUID, name, memory and utilization.

NVIDIA's management library (NVML) tells them. It talks to the driver, which may be missing, fail for one GPU,
vanish with an upgrade or never answer. So it is asked in a thread of its own, with a time limit, and while
one question hangs there is no second one. A GPU that does not tell its memory is left out.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml

from localai_cluster import clock

log = logging.getLogger(__name__)

LIMIT = 5.0
"""Seconds for all GPUs together."""
MOST = 64
LONGEST_NAME, LONGEST_UUID = 128, 96
GIB = 2**30
_REPORTED = ("index", "uuid", "name", "total_vram", "free_vram", "utilization")
_NO_DRIVER = frozenset(
    {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""No program can begin to use a GPU; the last one says so after an upgrade of the driver."""
_SIMULATED = re.compile(r"(\d{1,2})x(\d{1,4})GiB\Z", re.ASCII)


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in bytes, `utilization` in percent, None if it does not tell (as in MIG mode)."""

    index: int
    uuid: str
    name: str
    total_vram: int
    free_vram: int
    utilization: int | None = None
    compute_capability: str = ""

    @property
    def report(self) -> dict[str, Any]:
        """What the control plane is told."""
        return {name: getattr(self, name) for name in _REPORTED}

    @property
    def id(self) -> str:
        """What CUDA knows it by: an index moves when another GPU is lost, a UUID does not."""
        return self.uuid or str(self.index)


class NoDriver(Exception):
    """There is no driver, or none that a program could begin to use."""


class Source(Protocol):
    """Tells the GPUs; may block."""

    def read(self) -> list[Gpu]:
        """Those that tell their memory. NoDriver; other errors say that it is not known now."""


class Nvml:
    """NVML. Its `read` is for one thread at a time."""

    def __init__(self, library: Any = pynvml) -> None:
        self._library = library
        self._open = False
        self._reminded: set[str] = set()

    def read(self) -> list[Gpu]:
        """Every GPU that tells its memory. NoDriver, pynvml.NVMLError."""
        try:
            if not self._open:
                self._library.nvmlInit()
                self._open = True
            count = min(self._library.nvmlDeviceGetCount(), MOST)
            return [gpu for index in range(count) if (gpu := self._gpu(index)) is not None]
        except pynvml.NVMLError as error:
            self._close()
            if error.value in _NO_DRIVER:
                raise NoDriver(str(error)) from error
            raise

    def _gpu(self, index: int) -> Gpu | None:
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            memory = library.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            if error.value in {*_NO_DRIVER, pynvml.NVML_ERROR_UNINITIALIZED}:
                raise
            self._remind(f"GPU {index} does not tell its memory and is left out: {error}")
            return None
        capability = self._told(library.nvmlDeviceGetCudaComputeCapability, handle)
        rates = self._told(library.nvmlDeviceGetUtilizationRates, handle)
        return Gpu(
            index=index,
            uuid=_text(self._told(library.nvmlDeviceGetUUID, handle), LONGEST_UUID),
            name=_text(self._told(library.nvmlDeviceGetName, handle), LONGEST_NAME),
            total_vram=int(memory.total),
            free_vram=min(int(memory.free), int(memory.total)),
            utilization=None if rates is None else min(int(rates.gpu), 100),
            compute_capability="" if capability is None else f"{capability[0]}.{capability[1]}",
        )

    def _told(self, question: Callable[[Any], Any], handle: Any) -> Any:
        """The answer, None if this GPU or driver has none: utilization in MIG mode is not supported."""
        try:
            return question(handle)
        except pynvml.NVMLError:
            return None

    def _close(self) -> None:
        """The next read begins again: after an upgrade the old connection never works."""
        if self._open:
            self._open = False
            try:
                self._library.nvmlShutdown()
            except pynvml.NVMLError as error:
                log.debug("NVML was not closed: %s", error)

    def _remind(self, text: str) -> None:
        if text not in self._reminded:
            self._reminded.add(text)
            log.warning("%s", text)


@dataclass(frozen=True)
class Simulation:
    """The GPUs of a test setting: their sizes, and what every engine takes; in bytes."""

    sizes: tuple[int, ...]
    engine: int = 0


def simulation(text: str) -> Simulation:
    """`2x24GiB`, `1x24GiB+1x48GiB`, and with what an engine takes: `2x24GiB:6GiB`. ValueError."""
    groups, colon, engine = text.partition(":")
    sizes: list[int] = []
    for group in groups.split("+"):
        count, size = _group(group)
        sizes += [size] * count
    if len(sizes) > MOST:
        raise ValueError(f"more than {MOST} GPUs")
    return Simulation(tuple(sizes), _group(f"1x{engine}")[1] if colon else 0)


def _group(text: str) -> tuple[int, int]:
    found = _SIMULATED.match(text)
    if found is None:
        raise ValueError("not GPUs such as 2x24GiB")
    return int(found[1]), int(found[2]) * GIB


class SimulatedGpus:
    """GPUs that do not exist. `users` are the running engines, each by the GPUs that it was given.

    An engine takes its share evenly from its GPUs, or all of it from the first one.
    """

    def __init__(self, told: Simulation, users: Callable[[], Iterable[Sequence[str]]]) -> None:
        self._told, self._users = told, users

    def read(self) -> list[Gpu]:
        """All of them."""
        free = dict(zip(self._ids(), self._told.sizes, strict=True))
        for given in self._users():
            its = [id for id in given if id in free] or [*free][:1]
            for id in its:
                free[id] = max(free[id] - self._told.engine // len(its), 0)
        return [
            Gpu(index, id, "Simulated GPU", size, free[id], 0, "8.9")
            for index, (id, size) in enumerate(zip(self._ids(), self._told.sizes, strict=True))
        ]

    def _ids(self) -> Iterator[str]:
        return (f"GPU-00000000-0000-0000-0000-{index:012x}" for index in range(len(self._told.sizes)))


class GpuReader:
    """Asks `source` without ever blocking the loop, and keeps the last answer in `last`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._asked: Future[list[Gpu]] | None = None
        self._until = 0.0
        self._complained = ""
        self.last: tuple[Gpu, ...] = ()

    async def read(self) -> tuple[Gpu, ...] | None:
        """The GPUs now; none if they are gone; None if it cannot be known at the moment. NoDriver.

        NoDriver only while no GPU was ever seen: then this is no machine for NVML.
        """
        if self._asked is None or self._asked.done():
            self._asked, self._until = _in_thread(self._source.read), clock.monotonic() + LIMIT
        try:
            async with asyncio.timeout(max(self._until - clock.monotonic(), 0.0)):
                told = await asyncio.wrap_future(self._asked)
        except TimeoutError:
            self._complain(f"the GPUs have not answered within {LIMIT:g} s")
            return None
        except NoDriver as error:
            if not self.last:
                raise
            self._complain(f"the GPUs are gone: {error}")
            return ()
        except Exception as error:
            self._complain(f"the GPUs cannot be read: {error}")
            return None
        self._complained = ""
        self.last = tuple(told) or self.last
        return tuple(told)

    def known(self, ids: Sequence[str]) -> bool:
        """Whether these are different ones, and each was there when they were last read."""
        return len(set(ids)) == len(ids) and set(ids) <= {gpu.id for gpu in self.last}

    def _complain(self, why: str) -> None:
        """Once until the GPUs answer again, not with every heartbeat."""
        if why != self._complained:
            self._complained = why
            log.warning("%s", why)


def visible_gpus(ids: Sequence[str]) -> dict[str, str]:
    """What makes CUDA see these GPUs only, in this order; nothing for all of them.

    An index means here what it means for NVML.
    """
    if not ids:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _in_thread(work: Callable[[], list[Gpu]]) -> "Future[list[Gpu]]":
    """Runs it in a thread that this process does not wait for when it ends: the call may never return."""
    future: Future[list[Gpu]] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gpus", daemon=True).start()
    return future


def _text(told: Any, longest: int) -> str:
    text = told.decode(errors="replace") if isinstance(told, bytes) else str(told or "")
    return "".join(character for character in text if character.isprintable())[:longest]
