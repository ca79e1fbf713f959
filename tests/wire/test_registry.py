"""Images from a real registry, pushed by the script in `examples/`; only in `make sweep`."""

import asyncio
import filecmp
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.wire.conftest import OpenNode
from tests.wire.node import Node
from tests.wire.real_registry import REPLIES, observed, push, recorded, running
from tests.wire.servers import until

GIB = 2**30
LAYERS = 4
MAX_MEMORY = 150 * 10**6
SHOWN = "for the table: "
"""What `tests/sweep.py` puts into its table."""
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("TEST_EFFORT" not in os.environ, reason="`make sweep` plays it"),
]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host and port of a registry."""
    with running(tmp_path_factory.mktemp("registry")) as address:
        yield address


async def test_its_replies_are_those_that_were_recorded(tmp_path: Path, registry: str) -> None:
    """So the registry of `tests/wire/registry.py`, which is held to them, is true."""
    assert await asyncio.to_thread(recorded, tmp_path) == json.loads(REPLIES.read_text())


def with_libraries(node: Node, name: str, count: int, size: int) -> Path:
    folder = node.source(name)
    (folder / "metadata.json").write_text(f'{{"name": "{name}"}}')
    (folder / "lib").mkdir()
    for number in range(count):
        with open(folder / "lib" / f"lib{number}.so", "wb") as file:
            for _ in range(size // 2**20):
                file.write(os.urandom(2**20))
    (folder / "lib" / "libengine.so").symlink_to("lib0.so")
    return folder


async def install(node: Node, name: str, image: str) -> dict[str, object]:
    return await node.ask("backend.install", {"backend": name, "uri": f"oci://{image}", "install_only": True})


@pytest.mark.rule("worker-18.6")
@pytest.mark.parametrize("pack", ["gzip", "zstd", "none"])
async def test_install_upgrade_by_digest_and_delete(node: Node, registry: str, pack: str) -> None:
    name, image = f"real-{pack}", f"{registry}/backends/{pack}:latest"
    folder = with_libraries(node, name, 2, 2**20)
    first = push(folder, image, "--pack", pack, "--layers", "2")
    reply = await node.ask("backend.install", {"backend": name, "uri": f"oci://{image}", "model_id": name})
    assert reply["success"], reply
    assert await node.healthy(reply["address"])
    assert (await node.listed())[name]["digest"] == first
    (folder / "new").write_text("new")
    second = push(folder, image, "--pack", pack, "--layers", "2")
    reply = await node.ask("backend.upgrade", {"backend": name, "uri": f"oci://{image}"})
    assert reply["success"], reply
    assert (await node.listed())[name]["digest"] == second != first
    assert (node.backends / name / "lib" / "libengine.so").resolve().name == "lib0.so"
    assert (await node.ask("backend.delete", {"backend": name}))["success"]
    assert name not in await node.listed()


@pytest.fixture(scope="module")
def big(node: Node, registry: str) -> tuple[Path, str]:
    """A backend of 1 GiB, and its image in layers that are not packed."""
    folder, image = with_libraries(node, "big", LAYERS, GIB // LAYERS), "backends/big:latest"
    push(folder, f"{registry}/{image}", "--pack", "none", "--layers", str(LAYERS))
    return folder, image


@asynccontextmanager
async def memory_bounded(node: Node) -> AsyncIterator[list[int]]:
    """Looks at the worker's memory all the time; the list has the peak in bytes."""
    assert node.process
    worker, peak = psutil.Process(node.process.pid), [0]

    async def look() -> None:
        while True:
            peak[0] = max(peak[0], worker.memory_full_info().pss)
            await asyncio.sleep(0.2)

    looking = asyncio.create_task(look())
    try:
        yield peak
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    assert peak[0] < MAX_MEMORY


def copy_and_hash(folder: Path, target: Path) -> tuple[float, float]:
    """Seconds that `cp` and `sha256sum` take, and those of processor time."""
    began, before = time.monotonic(), os.times()
    subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
    files = [str(path) for path in (target / "lib").iterdir()]
    subprocess.run(["sha256sum", *files], check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.monotonic() - began, used


@pytest.mark.rule("worker-18.6")
async def test_a_gibibyte_costs_little_more_than_a_copy(
    open_node: OpenNode, registry: str, big: tuple[Path, str], tmp_path: Path
) -> None:
    """Prints the ratio to `cp` and `sha256sum`; asserts only the memory."""
    (folder, image), node = big, await open_node()
    assert node.process
    worker = psutil.Process(node.process.pid)
    before = sum(worker.cpu_times()[:2])
    began = time.monotonic()
    async with memory_bounded(node) as peak:
        reply = await install(node, "big", f"{registry}/{image}")
    took, used = time.monotonic() - began, sum(worker.cpu_times()[:2]) - before
    assert reply["success"], reply
    baseline, least = await asyncio.to_thread(copy_and_hash, folder, tmp_path / "copy")
    print(
        f"\n{SHOWN}1 GiB in {LAYERS} layers: {took:.1f} s; cp and sha256sum: {baseline:.1f} s;"
        f" ratio {took / baseline:.2f}; processor time: {used:.1f} s of {least:.1f} s;"
        f" PSS at most {peak[0] / 2**20:.0f} MiB"
    )
    await until(lambda: not list(node.backends.glob(".*")), "no partial file is left", 5)


@pytest.mark.rule("worker-18.6")
async def test_a_gibibyte_throttled_and_killed_goes_on_at_its_byte(
    open_node: OpenNode, registry: str, big: tuple[Path, str]
) -> None:
    """Within each layer, between two, and while it unpacks; the memory stays bounded."""
    folder, image = big
    node = await open_node(LOCALAI_WORKER_DOWNLOAD_RATE=str(64 * 2**20))

    def written() -> list[int]:
        return sorted(size for path in node.backends.glob(".partial-*") if (size := path.stat().st_size))

    def unpacking() -> bool:
        return bool(list(node.backends.glob("*.install-tmp"))) or (node.backends / "big").exists()

    quarter = GIB // LAYERS
    goals = [quarter * share // 8 for share in (4, 9, 14, 20, 25, 31)]
    stages = [*(lambda goal=goal: sum(written()) >= goal for goal in goals), unpacking]
    resumes = 0
    with observed(registry) as (address, seen):
        for stage in [*stages, None]:
            parts = written()
            seen.clear()
            async with memory_bounded(node):
                attempt = asyncio.create_task(install(node, "big", f"{address}/{image}"))
                if stage is None:
                    reply = await attempt
                    assert reply["success"], reply
                else:
                    await until(stage, "the worker reaches the stage", 120)
            firsts = dict(reversed(seen))
            asked = sorted(int(text[6:-1]) for text in firsts.values() if text)
            # The layers are asked for in their order, the complete ones of the same size first.
            assert set(asked) <= set(parts), (asked, parts)
            assert asked == parts or stage is not None, (asked, parts)
            resumes += len(asked)
            if stage is not None:
                await node.kill_and_start()
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
                assert not list(node.backends.glob("*.install-tmp"))
    assert resumes >= len(goals)
    for path in (folder / "lib").iterdir():
        assert filecmp.cmp(path, node.backends / "big" / "lib" / path.name, shallow=False)
    print(f"\n{SHOWN}1 GiB at 64 MiB/s with {len(stages)} kills: {resumes} layers went on at their byte")
