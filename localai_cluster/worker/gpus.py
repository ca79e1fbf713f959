"""The GPUs of this machine one by one: index, UUID, name, memory and utilization.

The source is NVIDIA's management library (NVML). It calls the driver, which may be missing, fail for one GPU,
vanish with an upgrade or hang. So a separate thread calls it, with a time limit, and while one call hangs
there is no second one. A GPU that does not report its memory is omitted.
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

from localai_cluster.kit import clock

log = logging.getLogger(__name__)

LIMIT = 5.0
"""Seconds for reading all GPUs."""
MOST = 64
"""Maximum number of GPUs."""
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
"""NVML errors that mean no usable driver; the last one follows an upgrade of the driver."""
_SIMULATED = re.compile(r"(\d{1,2})x(\d{1,4})GiB\Z", re.ASCII)


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory in bytes, `utilization` in percent, None if not reported (as in MIG mode)."""

    index: int
    uuid: str
    name: str
    total_vram: int
    free_vram: int
    utilization: int | None = None
    compute_capability: str = ""

    @property
    def report(self) -> dict[str, Any]:
        """The fields of the GPU that registrations and heartbeats report."""
        return {name: getattr(self, name) for name in _REPORTED}

    @property
    def id(self) -> str:
        """Identifier for CUDA: the UUID if known, since an index changes when another GPU is lost."""
        return self.uuid or str(self.index)


class NoDriver(Exception):
    """There is no driver, or none that a program could start to use."""


class Source(Protocol):
    """A source of GPU readings; `read` may block."""

    def read(self) -> list[Gpu]:
        """Return the GPUs that report their memory.

        Raise NoDriver; any other error means that the GPUs cannot be read at present.
        """


class Nvml:
    """The GPUs according to NVML. At most one thread at a time may call `read`."""

    def __init__(self, library: Any = pynvml) -> None:
        self._library = library
        self._open = False
        self._reminded: set[str] = set()

    def read(self) -> list[Gpu]:
        """Return every GPU that reports its memory. Raise NoDriver or pynvml.NVMLError."""
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
            self._warn_once(f"GPU {index} does not tell its memory and is left out: {error}")
            return None
        capability = self._query(library.nvmlDeviceGetCudaComputeCapability, handle)
        rates = self._query(library.nvmlDeviceGetUtilizationRates, handle)
        return Gpu(
            index=index,
            uuid=_text(self._query(library.nvmlDeviceGetUUID, handle), LONGEST_UUID),
            name=_text(self._query(library.nvmlDeviceGetName, handle), LONGEST_NAME),
            total_vram=int(memory.total),
            free_vram=min(int(memory.free), int(memory.total)),
            utilization=None if rates is None else min(int(rates.gpu), 100),
            compute_capability="" if capability is None else f"{capability[0]}.{capability[1]}",
        )

    def _query(self, query: Callable[[Any], Any], handle: Any) -> Any:
        """Call `query`; return None if this GPU or driver does not support it, as utilization in MIG mode."""
        try:
            return query(handle)
        except pynvml.NVMLError:
            return None

    def _close(self) -> None:
        """Close NVML; the next read initializes it, as a connection never works after a driver upgrade."""
        if self._open:
            self._open = False
            try:
                self._library.nvmlShutdown()
            except pynvml.NVMLError as error:
                log.debug("NVML was not closed: %s", error)

    def _warn_once(self, text: str) -> None:
        if text not in self._reminded:
            self._reminded.add(text)
            log.warning("%s", text)


@dataclass(frozen=True)
class Simulation:
    """The GPUs of a test setting: the size of each, and the memory that every engine takes, in bytes."""

    sizes: tuple[int, ...]
    engine: int = 0


def simulation(text: str) -> Simulation:
    """Parse `2x24GiB`, `1x24GiB+1x48GiB` or, with the memory of an engine, `2x24GiB:6GiB`.

    Raise ValueError.
    """
    groups, colon, engine = text.partition(":")
    sizes: list[int] = []
    for group in groups.split("+"):
        count, size = _group(group)
        sizes += [size] * count
    if len(sizes) > MOST:
        raise ValueError(f"more than {MOST} GPUs")
    return Simulation(tuple(sizes), _group(f"1x{engine}")[1] if colon else 0)


def _group(text: str) -> tuple[int, int]:
    match = _SIMULATED.match(text)
    if match is None:
        raise ValueError("not GPUs such as 2x24GiB")
    return int(match[1]), int(match[2]) * GIB


class SimulatedGpus:
    """GPUs that do not exist. `users` returns the assigned GPUs of every running engine.

    An engine takes its memory evenly from its GPUs, or all of it from the first GPU if it has none assigned.
    """

    def __init__(self, simulated: Simulation, users: Callable[[], Iterable[Sequence[str]]]) -> None:
        self._simulation, self._users = simulated, users

    def read(self) -> list[Gpu]:
        """Return all GPUs."""
        free = dict(zip(self._ids(), self._simulation.sizes, strict=True))
        for assigned in self._users():
            gpu_ids = [id for id in assigned if id in free] or [*free][:1]
            for id in gpu_ids:
                free[id] = max(free[id] - self._simulation.engine // len(gpu_ids), 0)
        return [
            Gpu(index, id, "Simulated GPU", size, free[id], 0, "8.9")
            for index, (id, size) in enumerate(zip(self._ids(), self._simulation.sizes, strict=True))
        ]

    def _ids(self) -> Iterator[str]:
        return (f"GPU-00000000-0000-0000-0000-{index:012x}" for index in range(len(self._simulation.sizes)))


class GpuReader:
    """Reads `source` without blocking the event loop, and keeps the last successful reading in `last`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reading: Future[list[Gpu]] | None = None
        self._deadline = 0.0
        self._last_warning = ""
        self.last: tuple[Gpu, ...] = ()

    async def read(self) -> tuple[Gpu, ...] | None:
        """Return the current GPUs: empty if they are gone, None if they cannot be read at present.

        Raise NoDriver only if no GPU was ever read: then NVML does not apply to this machine.
        """
        if self._reading is None or self._reading.done():
            self._reading, self._deadline = _in_thread(self._source.read), clock.monotonic() + LIMIT
        try:
            async with asyncio.timeout(max(self._deadline - clock.monotonic(), 0.0)):
                gpus = await asyncio.wrap_future(self._reading)
        except TimeoutError:
            self._warn(f"the GPUs have not answered within {LIMIT:g} s")
            return None
        except NoDriver as error:
            if not self.last:
                raise
            self._warn(f"the GPUs are gone: {error}")
            return ()
        except Exception as error:
            self._warn(f"the GPUs cannot be read: {error}")
            return None
        self._last_warning = ""
        self.last = tuple(gpus) or self.last
        return tuple(gpus)

    def known(self, ids: Sequence[str]) -> bool:
        """Return True if these ids are distinct and each was present in the last reading."""
        return len(set(ids)) == len(ids) and set(ids) <= {gpu.id for gpu in self.last}

    def _warn(self, reason: str) -> None:
        """Log a warning once until the GPUs can be read again, not with every heartbeat."""
        if reason != self._last_warning:
            self._last_warning = reason
            log.warning("%s", reason)


def visible_gpus(ids: Sequence[str]) -> dict[str, str]:
    """Return the environment that limits CUDA to these GPUs, in this order; empty for all GPUs.

    With it, an index has the same meaning for CUDA as for NVML.
    """
    if not ids:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _in_thread(work: Callable[[], list[Gpu]]) -> "Future[list[Gpu]]":
    """Run `work` in a daemon thread: the call may hang, and must not delay the end of the process."""
    future: Future[list[Gpu]] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gpus", daemon=True).start()
    return future


def _text(value: Any, longest: int) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
    return "".join(character for character in text if character.isprintable())[:longest]
