"""Images from a real registry, pushed by the script in `examples/`; only in `make sweep`."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_port
from tests.wire.conftest import OpenNode
from tests.wire.node import Node
from tests.wire.servers import until

REGISTRY = os.environ.get("WIRE_REGISTRY") or shutil.which("docker-registry") or shutil.which("registry")
PUSH = Path(__file__).parents[2] / "examples" / "gallery" / "image.py"
GIB = 2**30
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("TEST_EFFORT" not in os.environ, reason="`make sweep` plays it"),
    pytest.mark.skipif(
        REGISTRY is None, reason="there is no docker-registry (Debian's package of that name)"
    ),
]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host and port of a registry."""
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    process = subprocess.Popen(
        [str(REGISTRY), "serve", str(folder / "config.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/").close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def push(folder: Path, image: str, *options: str) -> str:
    """Pushes a folder and returns the digest of the image."""
    command = [sys.executable, str(PUSH), str(folder), f"http://{image}", *options]
    done = subprocess.run(command, check=True, capture_output=True)
    return done.stdout.decode().strip()


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
@pytest.mark.parametrize("pack", ["gzip", "none"])
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


def copy_and_hash(folder: Path, target: Path) -> float:
    """Seconds that `cp` and `sha256sum` take."""
    began = time.monotonic()
    subprocess.run(["cp", "-r", str(folder), str(target)], check=True)
    files = [str(path) for path in (target / "lib").iterdir()]
    subprocess.run(["sha256sum", *files], check=True, capture_output=True)
    return time.monotonic() - began


@pytest.mark.rule("worker-18.6")
async def test_a_gibibyte_costs_little_more_than_a_copy(
    open_node: OpenNode, registry: str, tmp_path: Path
) -> None:
    """Prints the ratio to `cp` and `sha256sum`, and the memory of the worker; asserts only the memory."""
    node = await open_node()
    folder = with_libraries(node, "big", 4, GIB // 4)
    push(folder, f"{registry}/backends/big:latest", "--pack", "none", "--layers", "4")
    assert node.process
    worker, peak = psutil.Process(node.process.pid), 0
    before = sum(worker.cpu_times()[:2])
    began = time.monotonic()
    task = asyncio.create_task(install(node, "big", f"{registry}/backends/big:latest"))
    while not task.done():
        peak = max(peak, worker.memory_full_info().pss)
        await asyncio.wait({task}, timeout=0.2)
    took = time.monotonic() - began
    assert task.result()["success"], task.result()
    baseline = await asyncio.to_thread(copy_and_hash, folder, tmp_path / "copy")
    used = sum(worker.cpu_times()[:2]) - before
    print(
        f"\n1 GiB in 4 layers: {took:.1f} s; cp and sha256sum: {baseline:.1f} s; ratio {took / baseline:.2f};"
        f" worker: {used:.1f} s of processor time, PSS at most {peak / 2**20:.0f} MiB"
    )
    assert peak < 150 * 10**6
    await until(lambda: not list(node.backends.glob(".*")), "no partial file is left", 5)
