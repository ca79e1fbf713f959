"""The drivers of GPUs: NVIDIA's management library (NVML), and the files of AMD's and Intel's drivers.

A driver may be missing, fail for one GPU, vanish with an upgrade or hang (`hardware.GpuReader`). A GPU that
does not report its memory is omitted.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pynvml

log = logging.getLogger(__name__)

MAX_GPUS = 64
"""Maximum number of GPUs that are read."""
MAX_NAME_LENGTH, MAX_UUID_LENGTH, MAX_DRIVER_LENGTH = 128, 96, 48
GIB = 2**30
_REPORTED_FIELDS = ("index", "uuid", "name", "total_vram", "free_vram", "utilization")
_REPORTED_FIELDS_IF_KNOWN = ("temperature", "power", "power_limit", "ecc_errors", "driver")
_NO_DRIVER_ERRORS = frozenset(
    {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""NVML errors that mean no usable driver; the last one occurs after an upgrade of the driver."""
_CARD_NAME_PATTERN = re.compile(r"card(\d{1,4})\Z", re.ASCII)
_AMD_ID_PREFIX = "GPU-"
"""Prefix of a GPU's unique id in ROCm."""
_AMD_UNIQUE_ID_PATTERN = re.compile(r"[0-9a-f]{16}\Z")
_SIMULATED_GPUS_PATTERN = re.compile(r"(\d{1,2})x(\d{1,4})GiB\Z", re.ASCII)


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory is in bytes, `utilization` in percent (None if not reported, as in MIG mode)."""

    index: int
    uuid: str
    name: str
    total_vram: int
    free_vram: int | None
    """Free memory in bytes; None if the driver does not report it."""
    utilization: int | None = None
    compute_capability: str = ""
    vendor: str = "nvidia"
    temperature: int | None = None
    """Temperature in degrees Celsius."""
    power: int | None = None
    """Power draw in watts."""
    power_limit: int | None = None
    """Maximum power draw in watts that the driver allows."""
    ecc_errors: int | None = None
    """Number of uncorrected memory errors since the driver was loaded."""
    driver: str = ""
    """Version of the driver; for NVIDIA also the newest version of CUDA that it supports."""
    processes: tuple[tuple[int, int], ...] = ()
    """Ids of the processes that use the GPU, with the bytes of each; empty if not reported."""

    @property
    def report(self) -> dict[str, Any]:
        """The fields of this GPU in registrations and heartbeats."""
        known = {name: getattr(self, name) for name in _REPORTED_FIELDS_IF_KNOWN}
        return {name: getattr(self, name) for name in _REPORTED_FIELDS} | {
            name: value for name, value in known.items() if value not in (None, "")
        }

    @property
    def id(self) -> str:
        """Id of the GPU for engines: the UUID if known, because an index changes when another GPU is lost."""
        return self.uuid or str(self.index)


class NoDriver(Exception):
    """There is no GPU driver, or no usable one."""


class GpuSource(Protocol):
    """A source of GPU readings."""

    def read(self) -> list[Gpu]:
        """Return the GPUs that report their memory. Blocks.

        Raise NoDriver. Any other error means that the GPUs cannot be read at present.
        """


class Nvml:
    """The GPUs according to NVML. Only one thread at a time may call `read`."""

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
            count, driver = min(self._library.nvmlDeviceGetCount(), MAX_GPUS), self._driver_version()
            return [gpu for index in range(count) if (gpu := self._read_gpu(index, driver)) is not None]
        except pynvml.NVMLError as error:
            self._close_nvml()
            if error.value in _NO_DRIVER_ERRORS:
                raise NoDriver(str(error)) from error
            raise

    def _driver_version(self) -> str:
        version = _printable_text(
            self._query_or_none(self._library.nvmlSystemGetDriverVersion), MAX_DRIVER_LENGTH
        )
        cuda = self._query_or_none(self._library.nvmlSystemGetCudaDriverVersion)
        return f"{version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}" if version and cuda else version

    def _read_gpu(self, index: int, driver: str) -> Gpu | None:
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            memory = library.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            if error.value in {*_NO_DRIVER_ERRORS, pynvml.NVML_ERROR_UNINITIALIZED}:
                raise
            self._warn_once(f"GPU {index} does not report its memory and is left out: {error}")
            return None
        capability = self._query_or_none(library.nvmlDeviceGetCudaComputeCapability, handle)
        rates = self._query_or_none(library.nvmlDeviceGetUtilizationRates, handle)
        return Gpu(
            index=index,
            uuid=_printable_text(self._query_or_none(library.nvmlDeviceGetUUID, handle), MAX_UUID_LENGTH),
            name=_printable_text(self._query_or_none(library.nvmlDeviceGetName, handle), MAX_NAME_LENGTH),
            total_vram=int(memory.total),
            free_vram=min(int(memory.free), int(memory.total)),
            utilization=None if rates is None else min(int(rates.gpu), 100),
            compute_capability="" if capability is None else f"{capability[0]}.{capability[1]}",
            temperature=self._query_or_none(
                library.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            power=_divide_if_known(self._query_or_none(library.nvmlDeviceGetPowerUsage, handle), 1000),
            power_limit=_divide_if_known(
                self._query_or_none(library.nvmlDeviceGetEnforcedPowerLimit, handle), 1000
            ),
            ecc_errors=self._query_or_none(
                library.nvmlDeviceGetTotalEccErrors,
                handle,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            ),
            driver=driver,
            processes=self._read_processes(handle),
        )

    def _read_processes(self, handle: Any) -> tuple[tuple[int, int], ...]:
        """Return the processes of a GPU. The driver lists a process that computes and draws twice."""
        used: dict[int, int] = {}
        for kind in ("Compute", "Graphics"):
            query = getattr(self._library, f"nvmlDeviceGet{kind}RunningProcesses")
            for process in self._query_or_none(query, handle) or ():
                used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
        return tuple(used.items())

    def _query_or_none(self, query: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `query`; None if this GPU or driver does not support it."""
        try:
            return query(*args)
        except pynvml.NVMLError:
            return None

    def _close_nvml(self) -> None:
        """Close NVML; the next read opens it again, because no connection survives a driver upgrade."""
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


class SysfsGpus:
    """The GPUs of one vendor according to the driver's files below `/sys/class/drm` (Linux)."""

    vendor = ""
    """PCI vendor id."""

    def __init__(self, root: Path = Path("/sys/class/drm")) -> None:
        self._root = root

    def read(self) -> list[Gpu]:
        """Return every GPU that reports its memory. Raise NoDriver."""
        cards = sorted(
            (int(match[1]), path)
            for path in self._root.glob("card*")
            if (match := _CARD_NAME_PATTERN.match(path.name))
            and _read_sysfs(path / "device" / "vendor") == self.vendor
        )
        if not cards:
            raise NoDriver(f"there is no GPU of vendor {self.vendor}")
        gpus = [self.read_gpu(index, card) for index, (_, card) in enumerate(cards[:MAX_GPUS])]
        return [gpu for gpu in gpus if gpu is not None]

    def read_gpu(self, index: int, card: Path) -> Gpu | None:
        """Return the GPU of this card; None if it does not report its memory."""
        raise NotImplementedError


class AmdGpus(SysfsGpus):
    """The GPUs of the amdgpu driver; their processes are those of ROCm, below `kfd`."""

    vendor = "0x1002"

    def __init__(self, root: Path = Path("/sys/class/drm"), kfd: Path = Path("/sys/class/kfd/kfd")) -> None:
        super().__init__(root)
        self._kfd = kfd

    def _read_processes(self, unique_id: str) -> tuple[tuple[int, int], ...]:
        line = f"unique_id {int(unique_id, 16)}" if _AMD_UNIQUE_ID_PATTERN.match(unique_id) else ""
        nodes = self._kfd.glob("topology/nodes/*") if line else ()
        gpu_id = next(
            (
                _read_sysfs(node / "gpu_id")
                for node in nodes
                if line in _read_sysfs(node / "properties").splitlines()
            ),
            "",
        )
        files = self._kfd.glob(f"proc/*/vram_{gpu_id}") if gpu_id.isdigit() else ()
        return tuple(
            (int(file.parent.name), size)
            for file in files
            if file.parent.name.isdigit() and (size := _read_sysfs_number(file))
        )

    def read_gpu(self, index: int, card: Path) -> Gpu | None:
        device = card / "device"
        names = ("mem_info_vram_total", "mem_info_vram_used", "gpu_busy_percent")
        total, used, busy = (_read_sysfs_number(device / name) for name in names)
        if not total or used is None:
            return None
        unique_id = _read_sysfs(device / "unique_id")
        return Gpu(
            index=index,
            uuid=f"{_AMD_ID_PREFIX}{unique_id}" if _AMD_UNIQUE_ID_PATTERN.match(unique_id) else "",
            name=_printable_text(_read_sysfs(device / "product_name") or "AMD GPU", MAX_NAME_LENGTH),
            total_vram=total,
            free_vram=max(total - used, 0),
            utilization=None if busy is None else min(busy, 100),
            vendor="amd",
            temperature=_divide_if_known(_read_sensor(device, "temp1_input"), 1000),
            power=_divide_if_known(
                _read_sensor(device, "power1_average") or _read_sensor(device, "power1_input"), 1_000_000
            ),
            power_limit=_divide_if_known(_read_sensor(device, "power1_cap"), 1_000_000),
            driver=_printable_text(_read_sysfs(Path("/sys/module/amdgpu/version")), MAX_DRIVER_LENGTH),
            processes=self._read_processes(unique_id),
        )


class IntelGpus(SysfsGpus):
    """The GPUs of the drivers xe and i915 with their own memory. The drivers do not report its use."""

    vendor = "0x8086"

    def read_gpu(self, index: int, card: Path) -> Gpu | None:
        tiles = card.glob("device/tile*/physical_vram_size_bytes")
        total = sum(_read_sysfs_number(tile) or 0 for tile in tiles) or _read_sysfs_number(
            card / "lmem_total_bytes"
        )
        return Gpu(index, "", "Intel GPU", total, None, vendor="intel") if total else None


def _read_sysfs(path: Path) -> str:
    """Return the content of a kernel file; "" if it cannot be read, as during the reset of a GPU."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_sysfs_number(path: Path) -> int | None:
    text = _read_sysfs(path)
    return int(text) if text.isascii() and text.isdigit() else None


def _read_sensor(device: Path, name: str) -> int | None:
    """Return the value of a sensor in the device's first `hwmon` folder."""
    return next((_read_sysfs_number(path) for path in sorted(device.glob(f"hwmon/hwmon*/{name}"))), None)


def _divide_if_known(value: int | None, unit: int) -> int | None:
    return None if value is None else round(value / unit)


class FirstDriver:
    """Reads the first source that has GPUs: a driver may be installed on a machine without its GPUs."""

    def __init__(self, *sources: GpuSource) -> None:
        self._sources = sources

    def read(self) -> list[Gpu]:
        """Return the GPUs of the first source that has GPUs.

        Raise NoDriver if no source has GPUs, or the error that a source raises.
        """
        for source in self._sources:
            with contextlib.suppress(NoDriver):
                if gpus := source.read():
                    return gpus
        raise NoDriver("there is no driver of a GPU")


@dataclass(frozen=True)
class Simulation:
    """The GPUs of a test setting: the size of each GPU, and the memory of every engine, in bytes."""

    sizes: tuple[int, ...]
    engine: int = 0


def parse_simulation(text: str) -> Simulation:
    """Parse `2x24GiB`, `1x24GiB+1x48GiB`, or `2x24GiB:6GiB` with an engine's memory. Raise ValueError."""
    groups, colon, engine = text.partition(":")
    sizes: list[int] = []
    for group in groups.split("+"):
        count, size = _parse_gpu_group(group)
        sizes += [size] * count
    if len(sizes) > MAX_GPUS:
        raise ValueError(f"more than {MAX_GPUS} GPUs")
    return Simulation(tuple(sizes), _parse_gpu_group(f"1x{engine}")[1] if colon else 0)


def _parse_gpu_group(text: str) -> tuple[int, int]:
    match = _SIMULATED_GPUS_PATTERN.match(text)
    if match is None:
        raise ValueError("not GPUs such as 2x24GiB")
    return int(match[1]), int(match[2]) * GIB


GpuUser = tuple[int, Sequence[str]]
"""The process id of an engine and its assigned GPUs."""


class SimulatedGpus:
    """GPUs that do not exist. `users` returns all running engines.

    An engine uses its memory evenly on its assigned GPUs, or all of it on the first GPU.
    """

    def __init__(self, simulated: Simulation, users: Callable[[], Iterable[GpuUser]]) -> None:
        self._simulation, self._users = simulated, users

    def read(self) -> list[Gpu]:
        """Return all GPUs."""
        free = dict(zip(self._simulated_ids(), self._simulation.sizes, strict=True))
        used: dict[str, list[tuple[int, int]]] = {id: [] for id in free}
        for pid, assigned in self._users():
            gpu_ids = [id for id in assigned if id in free] or [*free][:1]
            for id in gpu_ids:
                share = min(self._simulation.engine // len(gpu_ids), free[id])
                free[id] -= share
                used[id].append((pid, share))
        return [
            Gpu(index, id, "Simulated GPU", size, free[id], 0, "8.9", processes=tuple(used[id]))
            for index, (id, size) in enumerate(
                zip(self._simulated_ids(), self._simulation.sizes, strict=True)
            )
        ]

    def _simulated_ids(self) -> Iterator[str]:
        return (f"GPU-00000000-0000-0000-0000-{index:012x}" for index in range(len(self._simulation.sizes)))


def visible_gpu_variables(ids: Sequence[str]) -> dict[str, str]:
    """Return the environment that limits CUDA or ROCm to these GPUs, in this order.

    It is empty for all GPUs. With it, CUDA and NVML number the GPUs alike. AMD's unique ids have no dashes.
    """
    if not ids:
        return {}
    if all(_AMD_UNIQUE_ID_PATTERN.match(id.removeprefix(_AMD_ID_PREFIX)) for id in ids):
        return {"ROCR_VISIBLE_DEVICES": ",".join(ids)}
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _printable_text(value: Any, longest: int) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
    return "".join(character for character in text if character.isprintable())[:longest]
