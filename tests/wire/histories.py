"""Random histories of one worker: commands, faults, and what must hold when they are over."""

import asyncio
import gzip
import hashlib
import json
import os
import random
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from tests.wire.node import Node, archive
from tests.wire.registry import Registry, entry, layer, layer_of
from tests.wire.servers import NatsServer, ask, until

SIZE = 300_000
RATE = "600000"
"""Bytes per second of all copies, so that a fault can meet one."""
SMALL = 64_000
"""Bytes that a file may have while the disk is said to be full."""
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "leaves": {"exit": "no"}, "mute": {}, "away": {"away": True}}


class History:
    """A worker with a bus, a control plane and a registry of its own. `steps` says what was done."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.steps: list[str] = []
        self.server = NatsServer(folder)
        self.node = Node(folder / "node", self.server)
        self.registry = Registry()
        self._dice = random.Random(seed)
        self._gate = self.node.folder / "gate"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._repairs: list[Callable[[], Awaitable[None]]] = []
        self._uploads: dict[str, bytes] = {}

    async def begin(self) -> None:
        """Start everything."""
        self.registry.start()
        for name, options in KINDS.items():
            self.node.source(name, SIZE, **options | ({"gate": str(self._gate)} if name == "mute" else {}))
        pulled = self.node.source("pulled", SIZE)
        layers = [gzip.compress(layer(entry("lib/one", os.urandom(SIZE)))), layer_of(pulled)]
        self.registry.push("a/pulled", layers)
        await self.server.start()
        registries = json.dumps([{"host": self.registry.host, "plain_http": True}])
        await self.node.start(
            LOCALAI_HEARTBEAT_INTERVAL="100ms",
            LOCALAI_WORKER_DOWNLOAD_RATE=RATE,
            LOCALAI_REGISTRIES=registries,
        )

    async def play(self, steps: int) -> None:
        """Do something random `steps` times; a fault lasts for some of them."""
        commands = (self._install, self._download, self._pull, self._upload, self._rotate, self._stop)
        faults = (self._kill, self._cut_bus, self._cut_http, self._fill_disk, self._kill_engine)
        for _ in range(steps):
            if self._repairs and self._dice.random() < 0.4:
                await self._repairs.pop(0)()
            step = self._dice.choice(self._dice.choice((commands, faults)))
            self.steps.append(step.__name__.strip("_"))
            await step()

    async def settle(self) -> None:
        """End all faults, then wait until what the worker says is what is there."""
        while self._repairs:
            await self._repairs.pop()()
        self._gate.touch()
        await until(self.node.answers, "the worker answers", 60)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=3)  # a kill loses replies
        await self._cancel_tasks()
        problem = ""

        async def is_consistent() -> bool:
            nonlocal problem
            problem = await self._problem()
            return not problem

        try:
            await until(is_consistent, "the worker is consistent", 20)
        except AssertionError as error:
            raise AssertionError(problem) from error
        # The worker still does everything.
        address = await self.node.load("plain", "last")
        assert await self.node.healthy(address)
        await self.node.publish_stop(None)
        await self.node.runs()

    async def end(self) -> None:
        """Stop the worker in order: it leaves no process and no port."""
        process = self.node.process
        assert process
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None, "the worker ends", 60)
        assert process.returncode == 0
        assert self.node.control_plane.calls[-1].path.endswith("/deregister")
        assert (self.node.pids(), self._listening()) == ({}, set())

    async def close(self) -> None:
        """End what is left."""
        await self._cancel_tasks()
        await self.node.stop()
        self.server.stop()
        self.registry.stop()

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task

    async def _maybe_wait(self, task: asyncio.Task[Any]) -> None:
        """Wait for a command, or go on soon after it has begun."""
        await asyncio.wait({task}, timeout=self._dice.choice((0.05, 0.3, 1.0, 3.0)))

    async def _install(self) -> None:
        name = self._dice.choice(list(KINDS))
        more = {"model_id": self._dice.choice("ab"), "replica_index": self._dice.randrange(2)}
        self.steps[-1] += f" {name} {more}"
        force = self._dice.random() < 0.2
        source = self.node.sources / name
        await self._maybe_wait(self._start(self.node.install(name, source, **more, force=force)))

    async def _download(self) -> None:
        content = archive(self.node.sources / "plain")
        uri = self.node.control_plane.serve("fetched.tar.gz", content)
        hashed = {"sha256": hashlib.sha256(content).hexdigest()} if self._dice.random() < 0.5 else {}
        galleries = self.node.gallery("own", {"name": "fetched", "uri": uri, **hashed})
        command = self._dice.choice(("install", "upgrade"))
        request = {"backend": "fetched", "backend_galleries": galleries, "op_id": "op.fetched"}
        task = self._start(self.node.ask(f"backend.{command}", request))
        await self._maybe_wait(task)
        if self._dice.random() < 0.3:
            self._start(self.node.ask("backend.cancel", {"op_id": "op.fetched"}))

    async def _pull(self) -> None:
        self.registry.drops = [self._dice.randrange(SIZE)] if self._dice.random() < 0.3 else []
        uri = f"oci://{self.registry.host}/a/pulled"
        await self._maybe_wait(self._start(self.node.install("pulled", uri=uri, model_id="pulled")))

    async def _upload(self) -> None:
        name, content = f"f{self._dice.randrange(2)}.bin", self._dice.randbytes(SIZE)
        digest, half = hashlib.sha256(content).hexdigest(), self._dice.randrange(1, SIZE)

        async def send() -> None:
            for start, end in ((0, half), (half, SIZE)):
                span = f"bytes {start}-{end - 1}/{SIZE}"
                headers = {"Content_Range": span, "X_Content_SHA256": digest}
                path, body = f"/v1/files/models/m/{name}", content[start:end]
                await ask(self.node.http, "PUT", path, self.node.engine_token, body, **headers)

        await self._maybe_wait(self._start(send()))

    async def _rotate(self) -> None:
        self.node.control_plane.wants_rotation = True

    async def _stop(self) -> None:
        body = self._dice.choice((None, {"backend": "a"}, {"backend": "plain"}, {"backend": "b#0"}))
        self._start(self.node.publish_stop(body))
        if self._dice.random() < 0.3:
            backend = self._dice.choice(["plain", "away", "fetched"])
            await self._maybe_wait(self._start(self.node.ask("backend.delete", {"backend": backend})))

    async def _kill(self) -> None:
        self.node.kill()
        self.node.launch()
        await asyncio.wait({self._start(asyncio.sleep(2.0))}, timeout=self._dice.choice((0.0, 1.0, 2.0)))

    async def _kill_engine(self) -> None:
        if pids := sorted(self.node.pids()):
            os.kill(self._dice.choice(pids), signal.SIGKILL)

    async def _cut_bus(self) -> None:
        if self.server.start not in self._repairs:
            self.server.stop()
            self._repairs.append(self.server.start)

    async def _cut_http(self) -> None:
        if self.node.frontend.start not in self._repairs:
            await self.node.frontend.stop()
            self._repairs.append(self.node.frontend.start)

    async def _fill_disk(self) -> None:
        """No file may grow, as on a full disk: a write fails wherever it meets the limit."""
        process = self.node.process
        assert process
        if process.poll() is None:
            _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (SMALL, most))
            self._repairs.append(self._empty_disk)

    async def _empty_disk(self) -> None:
        process = self.node.process
        assert process
        if process.poll() is None:
            _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))

    async def _problem(self) -> str:
        """Return what is there and not said, or said and not there; "" if nothing."""
        node = self.node
        reply = await node.ask("models.running", {})
        said = {int(model["address"].rpartition(":")[2]) for model in reply["models"]}
        listed, folders = set(await node.listed()), {path.name for path in node.backends.iterdir()}
        folders = {name for name in folders if not name.startswith(".partial-")}
        secret = (node.folder / "node-secret").read_text().strip()
        engines = {int(port) for port in node.pids().values()}
        for what, found, expected in (
            ("engines", engines, said),
            ("ports", self._listening(), said),
            ("backends", folders, listed),
            ("secret", secret, node.control_plane.secret),
            ("incomplete files", self._incomplete(), []),
        ):
            if found != expected:
                return f"{what}: {found}, expected {expected}"
        return ""

    def _listening(self) -> set[int]:
        """Return the ports for engines on which a process of this worker's folder listens."""
        links = [link for link in psutil.net_connections("tcp") if link.status == psutil.CONN_LISTEN]
        ports = {getattr(link.laddr, "port", 0) for link in links if self._is_own(link.pid)}
        return {port for port in ports if self.node.base <= port <= self.node.last_port}

    def _is_own(self, pid: int | None) -> bool:
        try:
            return bool(pid) and Path(psutil.Process(pid).cwd()).is_relative_to(self.node.backends)
        except psutil.Error:
            return False

    def _incomplete(self) -> list[str]:
        """Return the backends that lack a file, and the uploads that are not what they are said to be."""
        lacking = [
            path.name
            for path in self.node.backends.glob("[!.]*")
            if not (path / "ballast").exists() or (path / "ballast").stat().st_size != SIZE
        ]
        wrong = [
            path.name
            for path in (self.node.models / "m").glob("*.sha256")
            if path.read_text().strip() != hashlib.sha256(path.with_suffix("").read_bytes()).hexdigest()
        ]
        return lacking + wrong
