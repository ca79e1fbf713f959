"""Memory, disk and GPUs of this machine, and the capability that selects builds.

Every call measures. A figure that cannot be measured is absent. GPUs are read one by one from NVIDIA's
management library (NVML), else from the files of the amdgpu driver. The driver may be missing, fail for one
GPU, vanish with an upgrade or hang. So a separate thread reads it, with a time limit, and while one read
hangs there is no second one. A GPU that does not report its memory is omitted.
"""

import asyncio
import contextlib
import logging
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import pynvml

from localai_cluster.gallery_index import SMALL_VRAM
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
_CARD = re.compile(r"card(\d{1,4})\Z", re.ASCII)
_AMD, _AMD_ID = "0x1002", "GPU-"
"""PCI vendor, and the prefix with which ROCm names a GPU by its unique id."""
_UNIQUE_ID = re.compile(r"[0-9a-f]{16}\Z")
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
    vendor: str = "nvidia"

    @property
    def report(self) -> dict[str, Any]:
        """The fields of the GPU that registrations and heartbeats report."""
        return {name: getattr(self, name) for name in _REPORTED}

    @property
    def id(self) -> str:
        """Identifier for engines: the UUID if known, since an index changes when another GPU is lost."""
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


class AmdGpus:
    """The GPUs according to the files of the amdgpu driver below `/sys/class/drm` (Linux)."""

    def __init__(self, root: Path = Path("/sys/class/drm")) -> None:
        self._root = root

    def read(self) -> list[Gpu]:
        """Return every GPU that reports its memory. Raise NoDriver."""
        cards = sorted(
            (int(match[1]), path / "device")
            for path in self._root.glob("card*")
            if (match := _CARD.match(path.name)) and _sysfs(path / "device" / "vendor") == _AMD
        )
        if not cards:
            raise NoDriver("there is no GPU of the amdgpu driver")
        gpus = [self._gpu(index, device) for index, (_, device) in enumerate(cards[:MOST])]
        return [gpu for gpu in gpus if gpu is not None]

    def _gpu(self, index: int, device: Path) -> Gpu | None:
        names = ("mem_info_vram_total", "mem_info_vram_used", "gpu_busy_percent")
        total, used, busy = (_sysfs_number(device / name) for name in names)
        if not total or used is None:
            return None
        unique_id = _sysfs(device / "unique_id")
        return Gpu(
            index=index,
            uuid=f"{_AMD_ID}{unique_id}" if _UNIQUE_ID.match(unique_id) else "",
            name=_text(_sysfs(device / "product_name") or "AMD GPU", LONGEST_NAME),
            total_vram=total,
            free_vram=max(total - used, 0),
            utilization=None if busy is None else min(busy, 100),
            vendor="amd",
        )


def _sysfs(path: Path) -> str:
    """Return the content of a file of the kernel; "" if it cannot be read, as while a GPU is reset."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _sysfs_number(path: Path) -> int | None:
    text = _sysfs(path)
    return int(text) if text.isascii() and text.isdigit() else None


class FirstDriver:
    """Reads the first source that has a driver."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources

    def read(self) -> list[Gpu]:
        """Return the GPUs of that source. Raise NoDriver if there is none, or an error of the source."""
        for source in self._sources:
            with contextlib.suppress(NoDriver):
                return source.read()
        raise NoDriver("there is no driver of a GPU")


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


def reader(simulated: Simulation | None, users: Callable[[], Iterable[Sequence[str]]]) -> GpuReader:
    """Return the reader of the machine's GPUs, or of simulated ones with the memory that engines take."""
    return GpuReader(SimulatedGpus(simulated, users) if simulated else FirstDriver(Nvml(), AmdGpus()))


def visible_gpus(ids: Sequence[str]) -> dict[str, str]:
    """Return the environment that limits CUDA or ROCm to these GPUs, in this order; empty for all GPUs.

    With it, an index has the same meaning for CUDA as for NVML. AMD's unique ids have no dashes.
    """
    if not ids:
        return {}
    if all(_UNIQUE_ID.match(id.removeprefix(_AMD_ID)) for id in ids):
        return {"ROCR_VISIBLE_DEVICES": ",".join(ids)}
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


GPU_QUERY = ("--query-gpu=memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
GPU_TIMEOUT = 5.0
MIB = 1024 * 1024
CAPABILITY_FILE = Path("/run/localai/capability")
PREFERENCES: Mapping[str, Sequence[str]] = {
    "nvidia": ("cuda", "vulkan", "cpu"),
    "amd": ("rocm", "hip", "vulkan", "cpu"),
    "intel": ("sycl", "intel", "cpu"),
    "metal": ("metal", "cpu"),
    "darwin-x86": ("darwin-x86", "cpu"),
    "vulkan": ("vulkan", "cpu"),
}


@dataclass(frozen=True)
class Gpus:
    """The totals of all GPUs; zeros and empty texts if there are none."""

    total: int = 0
    free: int = 0
    vendor: str = ""
    compute_capability: str = ""
    each: tuple[Gpu, ...] | None = None
    """The individual GPUs; None if only the totals are available."""

    @classmethod
    def of(cls, each: Sequence[Gpu]) -> "Gpus":
        """Sum up these GPUs."""
        total, free = sum(gpu.total_vram for gpu in each), sum(gpu.free_vram for gpu in each)
        vendor, capability = (each[0].vendor, each[0].compute_capability) if each else ("", "")
        # ROCm counts GPUs in an order of its own: without an id, one cannot be given to an engine.
        by_id = all(gpu.uuid or gpu.vendor == "nvidia" for gpu in each)
        return cls(total, free, vendor, capability, tuple(each) if by_id else None)


@dataclass(frozen=True)
class Figures:
    """RAM and disk in bytes; None if unknown."""

    total_ram: int | None
    available_ram: int | None
    total_disk: int | None
    available_disk: int | None

    def known(self, *names: str) -> dict[str, int]:
        """Return the named figures that could be measured."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def figures(models: Path) -> Figures:
    """Measure the RAM, and the disk of the filesystem that holds `models` or its nearest existing parent."""
    ram_total = ram_free = disk_total = disk_free = None
    with contextlib.suppress(OSError):
        memory = psutil.virtual_memory()
        ram_total, ram_free = int(memory.total), int(memory.available)
    with contextlib.suppress(OSError):
        existing = next(folder for folder in (models, *models.parents) if folder.exists())
        usage = psutil.disk_usage(str(existing))
        disk_total, disk_free = int(usage.total), int(usage.free)
    return Figures(ram_total, ram_free, disk_total, disk_free)


async def gpus(reader: GpuReader) -> Gpus | None:
    """Return the GPUs, one by one where their driver is known; None if they cannot be read at present."""
    try:
        readings = await reader.read()
    except NoDriver:
        return _unified_memory() or await _gpu_totals()
    if readings is None:
        return None
    return Gpus.of(readings) if readings or reader.last else Gpus()


def _unified_memory() -> Gpus | None:
    """Return the GPU of an Apple chip, whose memory is that of the machine; None on other machines."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return None
    memory = psutil.virtual_memory()
    return Gpus(int(memory.total), int(memory.available), "apple")


async def _gpu_totals() -> Gpus:
    """Read the totals from `nvidia-smi`, if it is installed and responds within 5 s."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpus()
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *GPU_QUERY,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        log.warning("nvidia-smi cannot be started: %s", error)
        return Gpus()
    try:
        async with asyncio.timeout(GPU_TIMEOUT):
            output, _ = await process.communicate()
    except TimeoutError:
        # Do not wait for it: while the driver hangs it does not end.
        process.kill()
        log.warning("nvidia-smi did not answer within %g s", GPU_TIMEOUT)
        return Gpus()
    return parse_gpus(output.decode(errors="replace"))


def parse_gpus(text: str) -> Gpus:
    """Sum up the lines `total MiB, free MiB, compute capability`; other lines are ignored."""
    total = free = 0
    capability = ""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit():
            total, free = total + int(parts[0]) * MIB, free + int(parts[1]) * MIB
            capability = capability or parts[2]
    return Gpus(total, free, "nvidia", capability) if total else Gpus()


def detect_capability(forced: str, gpus: Gpus, run_file: Path = CAPABILITY_FILE) -> str:
    """Return the capability of this machine (worker.md §18.4): forced, from the run file, or detected."""
    if forced:
        return forced
    with contextlib.suppress(OSError):
        recorded = run_file.read_text(encoding="utf-8", errors="replace").strip()
        if recorded:
            return recorded
    if platform.system() == "Darwin":
        return "metal" if platform.machine() == "arm64" else "darwin-x86"
    toolkit = next((f"-cuda-{n}" for n in (13, 12) if Path(f"/usr/local/cuda-{n}").is_dir()), "")
    if platform.machine() in ("aarch64", "arm64") and gpus.vendor == "nvidia":
        return f"nvidia-l4t{toolkit}"
    if gpus.total <= SMALL_VRAM:
        return "default"
    return f"nvidia{toolkit}" if gpus.vendor == "nvidia" else gpus.vendor


def preferred_tokens(capability: str) -> Sequence[str]:
    """Return the preferred words in a build's name on this machine, best first (worker.md §18.2)."""
    for prefix, tokens in PREFERENCES.items():
        if capability.startswith(prefix):
            return tokens
    return ("cpu",)
