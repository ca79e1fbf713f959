"""Example engines as real processes, assembled once, started by run.sh with a nearly empty environment."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import BackendError
from localai_cluster.rpc.messages import ModelOptions
from tests.conftest import until
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "engine-token"
READY_SECONDS = 20.0


@cache
def gallery() -> Path:
    """Return the folder of the assembled gallery; rebuild outdated parts once per test run."""
    subprocess.run(
        [sys.executable, ROOT / "examples/gallery/build.py"], check=True, stdout=subprocess.DEVNULL
    )
    return ROOT / "build" / "gallery"


@dataclass
class Backend:
    """A running engine; `log` has its stdout and stderr."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait()


def start(name: str, port: int, log: Path, *, token: str = TOKEN, folder: Path | None = None) -> Backend:
    """Start an engine as a worker does, without waiting until it is ready; `folder` overrides its folder."""
    script = (folder or gallery() / name) / "run.sh"
    environment = {"PATH": os.defpath}
    if token:
        environment["LOCALAI_GRPC_AUTH_TOKEN"] = token
    with log.open("ab") as out:
        process = subprocess.Popen(
            [str(script), "--addr", f"0.0.0.0:{port}"],
            env=environment,
            cwd=script.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return Backend(f"127.0.0.1:{port}", process, log)


async def ready(backend: Backend, *, token: str = TOKEN) -> None:
    """Wait until the engine reports that it is ready; fail with its log if it does not."""
    client = BackendClient(backend.address, token)

    async def healthy() -> bool:
        try:
            return await client.health(2.0)
        except BackendError:
            return backend.process.poll() is not None

    try:
        await until(healthy)
        assert backend.process.poll() is None
    except AssertionError as failure:
        raise AssertionError(
            f"engine at {backend.address} did not start:\n{backend.log.read_text()}"
        ) from failure
    finally:
        await client.close()


@asynccontextmanager
async def running_backend(
    name: str, *, model: str = "", options: tuple[str, ...] = ()
) -> AsyncIterator[Backend]:
    """Run an engine that is ready; load `model`, if given, with these engine options."""
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    backend = start(name, free_port(), folder / "log")
    try:
        await ready(backend)
        if model:
            await load(backend, model, *options)
        yield backend
    finally:
        backend.process.terminate()
        backend.process.wait(timeout=60)
        shutil.rmtree(folder)


async def load(backend: Backend, model: str, *options: str) -> None:
    """Load a model into a running engine."""
    client = BackendClient(backend.address, TOKEN)
    try:
        result = await client.load_model(ModelOptions(Model=model, Embeddings=True, Options=options), 30.0)
    finally:
        await client.close()
    assert result.success, result.message
