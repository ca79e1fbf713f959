"""Memory, disk and GPUs of this machine, and the capability that selects builds.

Every call measures. A figure that cannot be measured is absent.
"""

import asyncio
import contextlib
import logging
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from localai_cluster.worker.gpus import Gpu, GpuReader, NoDriver

log = logging.getLogger(__name__)

GPU_QUERY = ("--query-gpu=memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
GPU_TIMEOUT = 5.0
MIB = 1024 * 1024
SMALL_VRAM = 4 * 1024 * MIB
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
        vendor, capability = ("nvidia", each[0].compute_capability) if each else ("", "")
        return cls(total, free, vendor, capability, tuple(each))


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
    """Return the NVIDIA GPUs, one by one if NVML is installed; None if they cannot be read at present."""
    try:
        readings = await reader.read()
    except NoDriver:
        return await _gpu_totals()
    if readings is None:
        return None
    return Gpus.of(readings) if readings or reader.last else Gpus()


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
