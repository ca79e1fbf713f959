"""GPUs one by one: what NVML may answer, written from NVIDIA's documentation, and a driver that hangs.

`Library` stands for `pynvml`; its errors are the real ones.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from localai_cluster.kit import untrusted
from localai_cluster.worker import hardware
from localai_cluster.worker.config import InvalidSettings, build
from localai_cluster.worker.gpu_drivers import (
    AmdGpus,
    FirstDriver,
    Gpu,
    IntelGpus,
    NoDriver,
    Nvml,
    SimulatedGpus,
    Simulation,
    parse_simulation,
    visible_gpu_variables,
)
from localai_cluster.worker.hardware import GpuReader, GpuTotals
from localai_cluster.worker.heartbeats import measure_figures
from tests.conftest import until

GIB = 2**30
UUIDS = ["GPU-5b1d1f1e-8a58-4f2f-9d0b-2f1f6a9f7c11", "GPU-0c5f3c1a-1111-4f2f-9d0b-2f1f6a9f7c12"]


class Library:
    """Two cards; `errors` are raised by (function, index or None for all)."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.errors: dict[tuple[str, int | None], int] = {}
        self.opened = self.closed = 0
        self.processes: dict[int, list[tuple[int, int | None]]] = {0: [], 1: []}

    def _check(self, function: str, index: int | None = None) -> None:
        for key in ((function, index), (function, None)):
            if key in self.errors:
                raise pynvml.NVMLError(self.errors[key])

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.closed += 1

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._check("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._check("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(total=24 * GIB, free=(20 + handle) * GIB, used=4 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._check("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        self._check("nvmlDeviceGetCudaComputeCapability", handle)
        return (8, 9)

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        self._check("nvmlDeviceGetUUID", handle)
        return UUIDS[handle].encode()

    def nvmlDeviceGetName(self, handle: int) -> Any:
        self._check("nvmlDeviceGetName", handle)
        return "NVIDIA L4"

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._check("nvmlDeviceGetTemperature", handle)
        return {pynvml.NVML_TEMPERATURE_GPU: 62}[sensor]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._check("nvmlDeviceGetPowerUsage", handle)
        return 71_600

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        self._check("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 75_000

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        self._check("nvmlDeviceGetTotalEccErrors", handle)
        counts = {(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC): 3}
        return counts[kind, counter]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        self._check("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes[handle]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> Any:
        self._check("nvmlDeviceGetGraphicsRunningProcesses", handle)
        return self.nvmlDeviceGetComputeRunningProcesses(handle)[:1]

    def nvmlSystemGetDriverVersion(self) -> Any:
        self._check("nvmlSystemGetDriverVersion")
        return b"550.54.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        self._check("nvmlSystemGetCudaDriverVersion")
        return 12_040


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture(autouse=True)
def no_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)


@pytest.fixture
async def hung() -> AsyncIterator[tuple[GpuReader, Callable[[], None], list[int]]]:
    """A reader whose source answers after `let_go` only, and how often it was asked."""
    released, asked = threading.Event(), list[int]()

    class Hanging:
        def read(self) -> list[Gpu]:
            asked.append(1)
            released.wait()
            return Nvml(Library()).read()

    yield GpuReader(Hanging()), released.set, asked
    released.set()


@pytest.mark.rule("R1.3", "worker-6")
def test_every_card_tells_its_figures(library: Library) -> None:
    """Memory is in bytes, `nvmlUtilization_t.gpu` in percent, power in milliwatts; texts may be bytes."""
    first, second = Nvml(library).read()
    assert first.report == {
        "index": 0,
        "uuid": UUIDS[0],
        "name": "NVIDIA L4",
        "total_vram": 24 * GIB,
        "free_vram": 20 * GIB,
        "utilization": 37,
        "temperature": 62,
        "power": 72,
        "power_limit": 75,
        "ecc_errors": 3,
        "driver": "550.54.15, CUDA 12.4",
    }
    assert (second.index, second.id, second.free_vram) == (1, UUIDS[1], 21 * GIB)
    assert GpuTotals.of((first, second)) == GpuTotals(48 * GIB, 41 * GIB, "nvidia", "8.9", (first, second))


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION], ids=["mig", "permission"]
)
def test_what_a_card_does_not_tell_is_absent(library: Library, error: int) -> None:
    """In MIG mode utilization is not supported; without its UUID a card is known by its index."""
    functions = ("UtilizationRates", "UUID", "Name", "CudaComputeCapability", "Temperature", "PowerUsage")
    for function in (*functions, "EnforcedPowerLimit", "TotalEccErrors"):
        library.errors[f"nvmlDeviceGet{function}", 0] = error
    library.errors["nvmlSystemGetCudaDriverVersion", None] = error
    first, second = Nvml(library).read()
    assert (first.utilization, first.uuid, first.name, first.compute_capability) == (None, "", "", "")
    assert (first.id, first.free_vram) == ("0", 20 * GIB)
    assert not {"temperature", "power", "power_limit", "ecc_errors"} & first.report.keys()
    assert first.driver == "550.54.15"
    assert second.utilization == 37


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN], ids=["lost", "unknown"]
)
def test_a_card_without_memory_figures_is_left_out(library: Library, function: str, error: int) -> None:
    """`NVML_ERROR_GPU_IS_LOST`: it has fallen off the bus. The others still count, said once."""
    library.errors[function, 0] = error
    nvml = Nvml(library)
    assert [gpu.index for gpu in nvml.read()] == [1]
    assert [gpu.index for gpu in nvml.read()] == [1]
    assert library.opened == 1


async def test_without_a_driver_there_are_none(library: Library, tmp_path: Path) -> None:
    """Neither library nor module: the heartbeat is that of a machine without GPUs."""
    for error in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        library.errors["nvmlInit", None] = error
        reader = GpuReader(Nvml(library))
        with pytest.raises(NoDriver):
            await reader.read()
        assert await hardware.read_gpus(reader) == GpuTotals()
        assert set(await measure_figures(tmp_path, reader)) == {
            "available_ram",
            "total_disk",
            "available_disk",
        }


async def test_the_real_module_is_harmless_here(tmp_path: Path) -> None:
    """On a machine without a driver nothing is told and nothing raised."""
    assert "available_disk" in await measure_figures(tmp_path, GpuReader(Nvml()))


@pytest.mark.rule("R1.33", "worker-6")
async def test_a_driver_lost_meanwhile_leaves_nothing_free_and_comes_back(
    library: Library, tmp_path: Path
) -> None:
    """After an upgrade of the driver no program can begin: nothing is free until it was loaded again."""
    reader = GpuReader(Nvml(library))
    before = await measure_figures(tmp_path, reader)
    assert (before["available_vram"], len(before["gpus"])) == (41 * GIB, 2)
    library.errors["nvmlDeviceGetCount", None] = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    lost = await measure_figures(tmp_path, reader)
    assert (lost["available_vram"], lost["gpus"]) == (0, [])
    library.errors = {("nvmlInit", None): pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    assert (await measure_figures(tmp_path, reader))["gpus"] == []
    library.errors.clear()
    assert await measure_figures(tmp_path, reader) | {"available_ram": 0, "available_disk": 0} == before | {
        "available_ram": 0,
        "available_disk": 0,
    }
    assert (library.opened, library.closed) == (2, 1)


async def test_an_error_of_the_moment_says_nothing_of_the_gpus(library: Library, tmp_path: Path) -> None:
    """What is not known is not told: the control plane keeps the last figures and their time."""
    reader = GpuReader(Nvml(library))
    await reader.read()
    library.errors["nvmlDeviceGetCount", None] = pynvml.NVML_ERROR_TIMEOUT
    assert not {"gpus", "available_vram"} & set(await measure_figures(tmp_path, reader))
    assert len(reader.last) == 2


@pytest.mark.rule("worker-6")
async def test_a_driver_that_hangs_stops_no_heartbeat(
    hung: tuple[GpuReader, Callable[[], None], list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first heartbeat waits for the limit, later ones not at all; there is one thread, not one a beat."""
    reader, let_go, asked = hung
    monkeypatch.setattr(hardware, "GPU_READ_TIMEOUT", 0.05)
    for _ in range(3):
        assert set(await measure_figures(tmp_path, reader)) == {
            "available_ram",
            "total_disk",
            "available_disk",
        }
    assert len(asked) == 1
    let_go()
    monkeypatch.setattr(hardware, "GPU_READ_TIMEOUT", 60.0)
    told: dict[str, Any] = {}
    while "gpus" not in told:  # its thread ends, then it is asked again
        told = await measure_figures(tmp_path, reader)
        await asyncio.sleep(0)
    assert len(told["gpus"]) == 2


@pytest.mark.rule("worker-6")
async def test_a_disk_that_hangs_stops_no_heartbeat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As that of a network file system whose server is down; there is one thread, not one a beat."""
    reader, released, asked, disk_usage = GpuReader(FirstDriver()), threading.Event(), [], psutil.disk_usage

    def hang(path: str) -> Any:
        asked.append(path)
        released.wait(10)
        return disk_usage(path)

    monkeypatch.setattr(psutil, "disk_usage", hang)
    reads = untrusted.SharedCalls(0.05)
    monkeypatch.setattr(hardware, "_disk_reads", reads)
    for _ in range(3):
        assert set(await measure_figures(tmp_path, reader)) == {"available_ram"}
    assert len(asked) == 1
    reads.limit = 60.0
    released.set()
    assert "available_disk" in await measure_figures(tmp_path, reader)


async def test_without_nvml_the_totals_are_those_of_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 24564, 20000, 8.9\n")
    program.chmod(0o700)
    monkeypatch.setattr("shutil.which", lambda _: str(program))
    totals = GpuTotals(24564 * 2**20, 20000 * 2**20, "nvidia", "8.9")
    assert await hardware.read_gpus(GpuReader(FirstDriver())) == totals
    program.unlink()
    assert await hardware.read_gpus(GpuReader(FirstDriver())) == GpuTotals()


async def test_a_program_that_cannot_be_killed_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`nvidia-smi` hangs in its driver; each heartbeat would add a process."""
    program, starts = tmp_path / "nvidia-smi", tmp_path / "starts"
    program.write_text(f"#!/bin/sh\necho $$ >> {starts}\nexec sleep 1000\n")
    program.chmod(0o700)
    monkeypatch.setattr("shutil.which", lambda _: str(program))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)
    monkeypatch.setattr(hardware, "NVIDIA_SMI_TIMEOUT", 0.3)
    monkeypatch.setattr(hardware, "_program_runs", untrusted.SharedCalls(0.3))
    reader = GpuReader(FirstDriver())
    try:
        for _ in range(3):
            assert await hardware.read_gpus(reader) == GpuTotals()
            await until(lambda: starts.exists() and "\n" in starts.read_text())
        assert len(starts.read_text().split()) == 1
    finally:
        for pid in starts.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


async def test_two_who_ask_at_once_share_an_answer(
    hung: tuple[GpuReader, Callable[[], None], list[int]],
) -> None:
    reader, let_go, asked = hung
    both = asyncio.gather(reader.read(), reader.read())
    await asyncio.sleep(0)
    let_go()
    one, other = await both
    assert one == other
    assert len(asked) == 1


async def test_only_gpus_that_were_seen_are_known(library: Library) -> None:
    reader = GpuReader(Nvml(library))
    assert reader.has_all(())
    assert not reader.has_all(UUIDS)
    await reader.read()
    assert reader.has_all(UUIDS)
    assert reader.has_all(UUIDS[1:])
    assert not reader.has_all([UUIDS[0], UUIDS[0]])
    assert not reader.has_all(["0"])


def test_cuda_is_told_in_its_order() -> None:
    assert visible_gpu_variables(()) == {}
    assert visible_gpu_variables(["GPU-b", "GPU-a"]) == {
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2x24GiB", Simulation((24 * GIB, 24 * GIB))),
        ("1x24GiB+2x48GiB:6GiB", Simulation((24 * GIB, 48 * GIB, 48 * GIB), 6 * GIB)),
    ],
    ids=["equal", "mixed"],
)
def test_the_test_setting_says_sizes(text: str, told: Simulation) -> None:
    assert parse_simulation(text) == told
    assert build({"register_to": "http://c", "test_gpus": text}, {}).test_gpus == told


@pytest.mark.parametrize("text", ["24GiB", "2x24", "x", "65x1GiB", "2x24GiB:", "2x24GiB:much", "²x1GiB"])
def test_other_texts_are_wrong_settings(text: str) -> None:
    with pytest.raises(InvalidSettings, match="LOCALAI_TEST_GPUS"):
        build({"register_to": "http://c", "test_gpus": text}, {})


def test_simulated_engines_take_memory_where_they_were_put() -> None:
    """Evenly from the GPUs that they were given; one that was given none takes it from the first."""
    users: list[tuple[str, ...]] = []
    source = SimulatedGpus(parse_simulation("2x24GiB:6GiB"), lambda: list(enumerate(users)))
    one, two = (gpu.id for gpu in source.read())

    def free() -> list[int]:
        return [(gpu.free_vram or 0) // GIB for gpu in source.read()]

    assert free() == [24, 24]
    users[:] = [(two,), (one, two)]
    assert free() == [21, 15]
    assert [gpu.processes for gpu in source.read()] == [((1, 3 * GIB),), ((0, 6 * GIB), (1, 3 * GIB))]
    users[:] = [()]
    assert free() == [18, 24]
    users[:] = [(one,)] * 5
    assert free() == [0, 24]


def amd_card(root: Path, number: int, **files: str) -> Path:
    """The files of one card, as the kernel's documentation of amdgpu describes them: bytes and percent."""
    device = root / f"card{number}" / "device"
    device.mkdir(parents=True)
    documented = {
        "vendor": "0x1002",
        "mem_info_vram_total": str(16 * GIB),
        "mem_info_vram_used": str(3 * GIB),
        "gpu_busy_percent": "42",
        "unique_id": f"9246a27d3e3c71{number:02x}",
        "product_name": "AMD Instinct MI210",
    }
    for name, text in (documented | files).items():
        if text:
            (device / name).write_text(f"{text}\n")
    return device


@pytest.mark.rule("R1.3", "worker-6")
def test_amd_gpus_are_read_from_the_files_of_their_driver(tmp_path: Path) -> None:
    """In the order of their numbers; connectors and GPUs of other vendors are left out."""
    sensors = amd_card(tmp_path, 10) / "hwmon" / "hwmon3"
    sensors.mkdir(parents=True)
    documented = {"temp1_input": "48000", "power1_average": "101500000", "power1_cap": "300000000"}
    for name, text in documented.items():
        (sensors / name).write_text(f"{text}\n")
    amd_card(tmp_path, 2, mem_info_vram_used=str(17 * GIB))
    amd_card(tmp_path, 0, vendor="0x8086")
    (tmp_path / "card2-DP-1").mkdir()
    first, second = AmdGpus(tmp_path).read()
    assert (first.index, first.id, first.free_vram) == (0, "GPU-9246a27d3e3c7102", 0)
    assert second.report == {
        "index": 1,
        "uuid": "GPU-9246a27d3e3c710a",
        "name": "AMD Instinct MI210",
        "total_vram": 16 * GIB,
        "free_vram": 13 * GIB,
        "utilization": 42,
        "temperature": 48,
        "power": 102,
        "power_limit": 300,
    }
    assert GpuTotals.of((first, second)) == GpuTotals(32 * GIB, 13 * GIB, "amd", "", (first, second))
    assert hardware.detect_capability("", GpuTotals.of((second,)), tmp_path / "none") == "amd"


async def test_an_engine_takes_what_its_processes_take_on_all_gpus(library: Library) -> None:
    """Issue 23: the engine itself and its children, each once; without the driver's word it is not known."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        await until(partial(has_child, engine.pid))
        library.processes = {0: [(engine.pid, 2 * GIB), (1, GIB)], 1: [(children(engine.pid)[0], GIB)]}
        ram, vram = await hardware.process_memory(engine.pid, GpuReader(Nvml(library)))
        assert vram == 3 * GIB
        assert 2**20 < ram < GIB
        library.processes = {0: [(engine.pid, None)], 1: []}
        assert (await hardware.process_memory(engine.pid, GpuReader(Nvml(library))))[1] == 0
        library.errors["nvmlDeviceGetComputeRunningProcesses", None] = pynvml.NVML_ERROR_NOT_SUPPORTED
        assert (await hardware.process_memory(engine.pid, GpuReader(Nvml(library))))[1] == 0
        library.errors["nvmlInit", None] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        assert (await hardware.process_memory(engine.pid, GpuReader(Nvml(library))))[1] == 0
    finally:
        os.killpg(engine.pid, signal.SIGKILL)
        await engine.wait()
    assert await hardware.process_memory(engine.pid, GpuReader(FirstDriver())) == (0, 0)


async def has_child(pid: int) -> bool:
    return bool(children(pid))


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]


async def test_a_measurement_does_not_use_a_read_that_began_before_it(
    hung: tuple[GpuReader, Callable[[], None], list[int]],
) -> None:
    """It may be from before the engine's memory was allocated."""
    reader, let_go, asked = hung
    former = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    measured = asyncio.create_task(reader.read_anew())
    await asyncio.sleep(0)
    let_go()
    assert await former == await measured
    assert len(asked) == 2


def test_the_processes_of_an_amd_gpu_are_those_of_rocm(tmp_path: Path) -> None:
    """By the id that ROCm has for the card; a process without memory there is left out."""
    amd_card(tmp_path, 0)
    kfd = tmp_path / "kfd"
    for number, unique in ((0, 0), (1, 0x9246A27D3E3C7100)):
        node = kfd / "topology" / "nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{number * 4711}\n")
        (node / "properties").write_text(f"cpu_cores_count 0\nunique_id {unique}\n")
    for pid, used in (("77", 3 * GIB), ("78", 0)):
        (kfd / "proc" / pid).mkdir(parents=True)
        (kfd / "proc" / pid / "vram_4711").write_text(f"{used}\n")
        (kfd / "proc" / pid / "vram_9").write_text("1\n")
    (gpu,) = AmdGpus(tmp_path, kfd).read()
    assert gpu.processes == ((77, 3 * GIB),)


def test_what_an_amd_card_does_not_tell_is_absent(tmp_path: Path) -> None:
    """Consumer cards have no unique id: they count, but none is given to an engine by itself."""
    amd_card(tmp_path, 0, unique_id="", gpu_busy_percent="", product_name="")
    amd_card(tmp_path, 1, mem_info_vram_total="")
    amd_card(tmp_path, 2, mem_info_vram_used="nonsense")
    (only,) = AmdGpus(tmp_path).read()
    assert (only.uuid, only.name, only.utilization) == ("", "AMD GPU", None)
    assert GpuTotals.of((only,)) == GpuTotals(16 * GIB, 13 * GIB, "amd", "", None)


def test_the_first_driver_of_the_machine_is_read(library: Library, tmp_path: Path) -> None:
    source = FirstDriver(Nvml(library), AmdGpus(tmp_path))
    assert [gpu.vendor for gpu in source.read()] == ["nvidia", "nvidia"]
    library.errors["nvmlDeviceGetCount", None] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    library.errors["nvmlInit", None] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(NoDriver):
        source.read()
    amd_card(tmp_path, 0)
    assert [gpu.vendor for gpu in source.read()] == ["amd"]


def test_a_driver_without_a_gpu_hides_no_other_vendor(library: Library, tmp_path: Path) -> None:
    """NVML answers with 0 devices where its driver is installed and the card is AMD's."""
    library.count = 0
    source = FirstDriver(Nvml(library), AmdGpus(tmp_path))
    with pytest.raises(NoDriver):
        source.read()
    amd_card(tmp_path, 0)
    assert [gpu.vendor for gpu in source.read()] == ["amd"]


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.mark.rule("R1.3", "worker-6")
async def test_intel_gpus_are_read_from_the_files_of_their_drivers(tmp_path: Path) -> None:
    """xe has a folder for each tile, i915 one figure; a GPU without memory of its own has neither."""
    for number in range(3):
        write_file(tmp_path / f"card{number}" / "device" / "vendor", "0x8086")
    for tile in range(2):
        memory = tmp_path / "card0" / "device" / f"tile{tile}" / "physical_vram_size_bytes"
        write_file(memory, str(24 * GIB))
    write_file(tmp_path / "card1" / "lmem_total_bytes", str(16 * GIB))
    gpus = IntelGpus(tmp_path).read()
    assert [(gpu.total_vram, gpu.free_vram, gpu.vendor) for gpu in gpus] == [
        (48 * GIB, None, "intel"),
        (16 * GIB, None, "intel"),
    ]
    assert GpuTotals.of(gpus) == GpuTotals(64 * GIB, None, "intel", "", None)
    assert hardware.detect_capability("", GpuTotals.of(gpus), tmp_path / "none") == "intel"
    reader = GpuReader(FirstDriver(AmdGpus(tmp_path), IntelGpus(tmp_path)))
    assert not {"gpus", "available_vram"} & set(await measure_figures(tmp_path, reader))


def test_rocm_is_told_unique_ids() -> None:
    assert visible_gpu_variables(["GPU-9246a27d3e3c7102"]) == {"ROCR_VISIBLE_DEVICES": "GPU-9246a27d3e3c7102"}
    assert "CUDA_VISIBLE_DEVICES" in visible_gpu_variables(UUIDS)


async def test_the_memory_of_an_apple_chip_is_that_of_the_machine(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    library.errors["nvmlInit", None] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    found = await hardware.read_gpus(GpuReader(Nvml(library)))
    assert found is not None
    assert found.total > (found.free or 0) > 0
    capability = hardware.detect_capability("", found, Path("/none"))
    assert (found.vendor, found.each, capability) == ("apple", None, "metal")
