"""An engine and a load generator in Go, which are not the bottleneck, and the same engine in Python.

`build` compiles both programs into `build/engine`; their modules come from Go's module proxy.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from localai_cluster.kit import processes
from tests.conftest import eventually
from tests.support.cluster import ROOT
from tests.support.ports import free_port

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "engine"
ENGINE, LOAD = BUILD / "engine", BUILD / "load"


@cache
def build() -> str:
    """Build both programs if their sources have changed; return the reason if that is impossible, else ""."""
    go = shutil.which("go")
    if go is None:
        return "Go is not installed"
    sources = sorted((*HERE.glob("*.go"), *HERE.glob("load/*.go"), *HERE.glob("go.*")))
    stamp = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".stamp").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if file.read() == stamp and ENGINE.exists() and LOAD.exists():
            return ""
        fetched = subprocess.run([go, "mod", "download"], cwd=HERE, capture_output=True, text=True)
        if fetched.returncode:
            return f"Go's modules cannot be fetched: {fetched.stderr.strip()}"
        subprocess.run([go, "build", "-o", f"{BUILD}/", ".", "./load"], cwd=HERE, check=True)
        file.truncate(0)
        file.write(stamp)
    return ""


@dataclass
class Engine:
    """A running engine."""

    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill the process; running calls are lost."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the engine after its running calls; it accepts no new calls."""
        self.process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def running(
    reaper: processes.ProcessReaper, *, go: bool, streams: int = 0, token: str = "", port: int = 0
) -> Iterator[Engine]:
    """Run an engine in Go or Python; `streams` limits the parallel streams."""
    address = f"127.0.0.1:{port or free_port()}"
    command = [str(ENGINE)] if go else [sys.executable, "-m", "tests.benchmarks.talker"]
    limit = ["-streams", str(streams)] if streams else []
    command += ["-address", address, *limit, "-token", token]
    process = processes.spawn(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=None)
    reaper.add(process.pid)
    try:
        eventually(lambda: listens(address), what=f"the engine listens at {address}")
        yield Engine(address, process)
    finally:
        process.kill()
        process.wait()
        reaper.discard(process.pid)


def listens(address: str) -> bool:
    """True if something accepts connections there."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


@dataclass(frozen=True)
class Load:
    """Figures of one run of the load generator; times in milliseconds, `seconds`, `processor` in seconds."""

    requests: int
    errors: int
    seconds: float
    processor: float
    first_p50: float
    first_p99: float
    gap_p99: float
    p50: float
    p99: float


def generate(url: str, key: str, body: object, *, clients: int, seconds: float, **more: object) -> Load:
    """Run the load generator with this request, or with a script for `direct`; `more` are further flags."""
    text = body if isinstance(body, str) else json.dumps(body)
    flags = {"url": url, "key": key, "body": text, "clients": clients, "seconds": seconds, **more}
    command = [str(LOAD), *(f"-{name}={value}" for name, value in flags.items())]
    return Load(**json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
