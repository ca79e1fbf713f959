"""Two machines on one: network namespaces that are connected with each other and nothing else."""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from tests.conftest import eventually

_PREFIX = "lac"
_NETWORK_NAMESPACE = 0x40000000
"""The flag CLONE_NEWNET."""


@dataclass
class Machine:
    """One network namespace with an address, a loopback device and one end of the cable."""

    name: str
    address: str
    _within: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._within = ThreadPoolExecutor(1, initializer=self._enter)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return the command prefix that runs a command on this machine."""
        return ("ip", "netns", "exec", self.name)

    def start(
        self, *argv: str, env: Mapping[str, str], output: IO[bytes], cwd: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a program on this machine, in its own session."""
        return subprocess.Popen(
            [*self.prefix, *argv],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def http(self, method: str, url: str, **more: Any) -> httpx.Response:
        """Send a request from this machine."""
        more = {"timeout": 180, "trust_env": False, **more}
        return self._within.submit(httpx.request, method, url, **more).result()

    def connected_to(self, port: int) -> bool:
        """Return True if a program on this machine has a connection to the port."""
        return bool(_ip(*self.prefix[1:], "ss", "-tnH", "state", "established", f"dport = {port}"))

    def cut(self) -> None:
        """Disconnect the cable."""
        _ip("-n", self.name, "link", "set", "cable", "down")

    def restore(self) -> None:
        """Reconnect the cable."""
        _ip("-n", self.name, "link", "set", "cable", "up")

    def _enter(self) -> None:
        """Move this thread, and the sockets that it opens, into the namespace."""
        with Path("/run/netns", self.name).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK_NAMESPACE):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")

    def remove(self) -> None:
        """End all processes of the machine, and remove it."""
        self._within.shutdown()
        _remove(self.name)


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two connected machines; skip the test if this system does not allow namespaces."""
    for program in ("ip", "ss"):
        if not shutil.which(program):
            pytest.skip(f"two machines: `{program}` (iproute2) is not installed")
    _remove_leftovers()
    here, there = (Machine(f"{_PREFIX}-{os.getpid()}-{one}", f"10.213.0.{one}") for one in (1, 2))
    try:
        try:
            for machine in (here, there):
                _ip("netns", "add", machine.name)
            peer = ("peer", "name", "cable", "netns", there.name)
            _ip("link", "add", "name", "cable", "netns", here.name, "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"two machines: no network namespaces here: {error.stderr.strip()}")
        for machine in (here, there):
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", machine.name, "link", "set", device, "up")
        yield here, there
    finally:
        for machine in (there, here):
            machine.remove()


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _remove(name: str) -> None:
    def empty() -> bool:
        try:
            left = [int(pid) for pid in _ip("netns", "pids", name).split()]
        except subprocess.CalledProcessError:
            return True  # there is no such namespace
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    eventually(empty, seconds=10, what=f"nothing runs in {name}")
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Remove the machines of killed test runs."""
    known = Path("/run/netns")
    for path in known.glob(f"{_PREFIX}-*-?") if known.is_dir() else ():
        owner = path.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove(path.name)
