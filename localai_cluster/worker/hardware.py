"""Memory, disk and GPUs of this machine, and the capability that selects builds.

Every call measures; a value that cannot be measured is absent. A GPU driver (`gpu_drivers.py`) or a network
file system may hang. So a separate thread reads it, with a time limit, and no second read starts while one
hangs.
"""

import asyncio
import contextlib
import logging
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from localai_cluster.gallery_index import SMALL_VRAM_BYTES
from localai_cluster.kit import clock, untrusted
from localai_cluster.worker.gpu_drivers import (
    AmdGpus,
    FirstDriver,
    Gpu,
    GpuSource,
    GpuUser,
    IntelGpus,
    NoDriver,
    Nvml,
    SimulatedGpus,
    Simulation,
)

log = logging.getLogger(__name__)

GPU_READ_TIMEOUT = 5.0
"""Maximum seconds to read all GPUs."""
DISK_READ_TIMEOUT = 2.0
"""Maximum seconds to read a disk, which may be that of a network file system whose server is down."""
MAX_FACT_LENGTH = 128

_disk_reads = untrusted.SharedCalls(DISK_READ_TIMEOUT)


class GpuReader:
    """Reads `source` without blocking the event loop; `last` is the last successful reading."""

    def __init__(self, source: GpuSource) -> None:
        self._source = source
        self._reading: Future[list[Gpu]] | None = None
        self._deadline = 0.0
        self._last_warning = ""
        self.last: tuple[Gpu, ...] = ()

    async def read(self) -> tuple[Gpu, ...] | None:
        """Return the current GPUs: empty if they are gone, None if they cannot be read at present.

        Raise NoDriver only if no GPU was ever read, because such a machine has no GPU driver.
        """
        if self._reading is None or self._reading.done():
            # The driver may hang, and must not delay the end of the process.
            self._reading = untrusted.in_daemon_thread(self._source.read)
            self._deadline = clock.monotonic() + GPU_READ_TIMEOUT
        try:
            async with asyncio.timeout(max(self._deadline - clock.monotonic(), 0.0)):
                gpus = await asyncio.wrap_future(self._reading)
        except TimeoutError:
            self._warn_once(f"the GPUs have not answered within {GPU_READ_TIMEOUT:g} s")
            return None
        except NoDriver as error:
            if not self.last:
                raise
            self._warn_once(f"the GPUs are gone: {error}")
            return ()
        except Exception as error:
            self._warn_once(f"the GPUs cannot be read: {error}")
            return None
        self._last_warning = ""
        self.last = tuple(gpus) or self.last
        return tuple(gpus)

    async def read_anew(self) -> tuple[Gpu, ...] | None:
        """Read the GPUs after any running read has ended, and return them. Raise NoDriver."""
        if self._reading is not None and not self._reading.done():
            await self.read()
        return await self.read()

    def has_all(self, ids: Sequence[str]) -> bool:
        """Return True if these ids are distinct and the last reading has all of them."""
        return len(set(ids)) == len(ids) and set(ids) <= {gpu.id for gpu in self.last}

    def _warn_once(self, reason: str) -> None:
        """Log a warning once until the GPUs can be read again, and not with every heartbeat."""
        if reason != self._last_warning:
            self._last_warning = reason
            log.warning("%s", reason)


def create_reader(simulated: Simulation | None, users: Callable[[], Iterable[GpuUser]]) -> GpuReader:
    """Return the reader of the machine's GPUs, or of simulated GPUs.

    `users` returns the running engines, which use memory of the simulated GPUs.
    """
    drivers = FirstDriver(Nvml(), AmdGpus(), IntelGpus())
    return GpuReader(SimulatedGpus(simulated, users) if simulated else drivers)


NVIDIA_SMI_ARGUMENTS = ("--query-gpu=memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
NVIDIA_SMI_TIMEOUT = 5.0
_program_runs = untrusted.SharedCalls(NVIDIA_SMI_TIMEOUT)
MIB = 1024 * 1024
BUILD_TOKENS_BY_CAPABILITY: Mapping[str, Sequence[str]] = {
    "nvidia": ("cuda", "vulkan", "cpu"),
    "amd": ("rocm", "hip", "vulkan", "cpu"),
    "intel": ("sycl", "intel", "cpu"),
    "metal": ("metal", "cpu"),
    "darwin-x86": ("darwin-x86", "cpu"),
    "vulkan": ("vulkan", "cpu"),
}


@dataclass(frozen=True)
class GpuTotals:
    """Totals of all GPUs; zeros and empty texts without GPUs. `free` is None if not reported."""

    total: int = 0
    free: int | None = 0
    vendor: str = ""
    compute_capability: str = ""
    each: tuple[Gpu, ...] | None = None
    """The individual GPUs; None if only the totals are available."""

    @classmethod
    def of(cls, gpus: Sequence[Gpu]) -> "GpuTotals":
        """Return the totals of these GPUs."""
        total, reported = sum(gpu.total_vram for gpu in gpus), [gpu.free_vram for gpu in gpus]
        known = [free for free in reported if free is not None]
        free = sum(known) if len(known) == len(reported) else None
        vendor, capability = (gpus[0].vendor, gpus[0].compute_capability) if gpus else ("", "")
        # ROCm counts GPUs in an order of its own: without an id, one cannot be given to an engine.
        by_id = all(gpu.uuid or gpu.vendor == "nvidia" for gpu in gpus)
        return cls(total, free, vendor, capability, tuple(gpus) if by_id else None)


async def measure_figures(models: Path) -> dict[str, int]:
    """Return the bytes of main memory, and of the disk of `models` or of its nearest existing parent folder.

    The result lacks what cannot be measured, or not in time.
    """
    figures: dict[str, int] = {}
    with contextlib.suppress(OSError):  # or TimeoutError, which is one
        figures |= await _disk_reads.call(models, _disk_figures, models)
    with contextlib.suppress(OSError):
        memory = psutil.virtual_memory()
        figures |= {"total_ram": int(memory.total), "available_ram": int(memory.available)}
    return figures


def _disk_figures(models: Path) -> dict[str, int]:
    existing = next(folder for folder in (models, *models.parents) if folder.exists())
    usage = psutil.disk_usage(str(existing))
    return {"total_disk": int(usage.total), "available_disk": int(usage.free)}


async def process_memory(pid: int, reader: GpuReader) -> tuple[int, int]:
    """Return the bytes of main memory and GPU memory of a process and its descendants; 0 = unknown.

    Main memory is the proportional set size if the system reports it, else the resident set size. In a
    container the GPU driver may report no processes, because it does not know the container's process ids.
    """
    pids, ram = await asyncio.to_thread(_process_tree, pid)
    gpus: Sequence[Gpu] = ()
    with contextlib.suppress(NoDriver):
        gpus = await reader.read_anew() or ()
    return ram, sum(size for gpu in gpus for owner, size in gpu.processes if owner in pids)


def _process_tree(pid: int) -> tuple[set[int], int]:
    """Return the ids of a process and its descendants, and the bytes of main memory that they use."""
    pids, ram = set[int](), 0
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                memory: Any = process.memory_info()
                with contextlib.suppress(psutil.AccessDenied):
                    memory = process.memory_full_info()
                ram += getattr(memory, "pss", memory.rss)
                pids.add(process.pid)
    return pids, ram


def system_facts() -> dict[str, Any]:
    """Return names and versions of the machine's software and processor; omit what is unknown."""
    facts: dict[str, Any] = {"os": _os_name(), "kernel": platform.release(), "cpu": _cpu_name()}
    facts |= {"cpu_count": psutil.cpu_count(), "cpu_cores": psutil.cpu_count(logical=False)}
    with contextlib.suppress(OSError):
        booted_at = datetime.fromtimestamp(psutil.boot_time(), UTC)
        facts["booted_at"] = booted_at.isoformat(timespec="seconds")
    return {name: value for name, value in facts.items() if value}


def _os_name() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"][:MAX_FACT_LENGTH]
    except (OSError, KeyError, ValueError):
        return platform.system()


def _cpu_name() -> str:
    """Return the model of the first processor; ARM kernels report none."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()[:MAX_FACT_LENGTH]
    return platform.processor() or platform.machine()


async def read_gpus(reader: GpuReader) -> GpuTotals | None:
    """Return the totals of the GPUs, with each GPU if its driver is supported.

    Return None if they cannot be read now.
    """
    try:
        readings = await reader.read()
    except NoDriver:
        return _apple_gpu() or await _read_nvidia_smi()
    if readings is None:
        return None
    return GpuTotals.of(readings) if readings or reader.last else GpuTotals()


def _apple_gpu() -> GpuTotals | None:
    """Return the GPU of an Apple chip, which shares the main memory; None on other machines."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return None
    memory = psutil.virtual_memory()
    return GpuTotals(int(memory.total), int(memory.available), "apple")


async def _read_nvidia_smi() -> GpuTotals:
    """Return the totals that `nvidia-smi` reports within 5 s, if it is installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return GpuTotals()
    try:
        return parse_gpus(await _program_runs.call(program, _run_nvidia_smi, program))
    except (TimeoutError, subprocess.TimeoutExpired):
        log.warning("nvidia-smi did not answer within %g s", NVIDIA_SMI_TIMEOUT)
    except OSError as error:
        log.warning("nvidia-smi cannot be started: %s", error)
    return GpuTotals()


def _run_nvidia_smi(program: str) -> str:
    """Return the program's output. While the driver hangs, the program cannot be killed, and this blocks."""
    return subprocess.run(
        [program, *NVIDIA_SMI_ARGUMENTS],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        errors="replace",
        timeout=NVIDIA_SMI_TIMEOUT,
    ).stdout


def parse_gpus(text: str) -> GpuTotals:
    """Return the totals of lines `total MiB, free MiB, compute capability`; ignore other lines."""
    total = free = 0
    capability = ""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit():
            total, free = total + int(parts[0]) * MIB, free + int(parts[1]) * MIB
            capability = capability or parts[2]
    return GpuTotals(total, free, "nvidia", capability) if total else GpuTotals()


def detect_capability(forced: str, gpus: GpuTotals, run_file: Path) -> str:
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
    if gpus.total <= SMALL_VRAM_BYTES:
        return "default"
    return f"nvidia{toolkit}" if gpus.vendor == "nvidia" else gpus.vendor


def preferred_tokens(capability: str) -> Sequence[str]:
    """Return the preferred words in the name of a build for this machine, best first (worker.md §18.2)."""
    for prefix, tokens in BUILD_TOKENS_BY_CAPABILITY.items():
        if capability.startswith(prefix):
            return tokens
    return ("cpu",)
