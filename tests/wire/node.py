"""A worker as a process, its scripted backends, and its commands as a control plane sends them."""

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from tests.support.ports import free_port
from tests.wire.servers import (
    PASSWORD,
    TOKEN,
    USER,
    ControlPlane,
    NatsServer,
    StockFrontend,
    until,
)

OK = b"\x0a\x02OK"
"""A gRPC `Reply` whose `message` is `OK`."""
ENGINE = Path(__file__).parent / "engine.py"
PORTS = 40
LIMIT = 120.0
"""Seconds for a reply; far above what one takes."""
ANSWERS = 5.0
"""Seconds for the reply to a question that is asked again."""


class Node:
    """A worker and what it talks to. `WIRE_WORKER` is another command than our worker's."""

    def __init__(
        self,
        folder: Path,
        server: NatsServer,
        ports: int = PORTS,
        frontend: ControlPlane | StockFrontend | None = None,
    ) -> None:
        self.folder = folder
        self.backends = folder / "backends"
        self.models = folder / "models"
        self.sources = folder / "sources"
        for path in (self.backends, self.models, self.sources):
            path.mkdir(parents=True)
        self.frontend = frontend or ControlPlane()
        self.base = free_base(ports)
        self.last_port = self.base + ports - 1
        self.process: subprocess.Popen[bytes] | None = None
        self.nats = Client()
        self.prefix: Sequence[str] = ()
        """Words before the worker's command."""
        self._variables: dict[str, str] = {}
        self._server = server

    @property
    def control_plane(self) -> ControlPlane:
        """The frontend, where a test needs more than a stock one offers."""
        assert isinstance(self.frontend, ControlPlane)
        return self.frontend

    async def start(self, **more: str) -> None:
        """Starts everything and waits until the worker answers."""
        await self.begin(**more)
        await until(self.answers, "the worker answers", 30)

    async def begin(self, **more: str) -> None:
        """Starts everything."""
        await self.frontend.start()
        url = f"nats://127.0.0.1:{self._server.port}"
        await self.nats.connect(
            url, user=USER, password=PASSWORD, max_reconnect_attempts=-1, reconnect_time_wait=0
        )
        self._variables = self._environment() | more
        self.launch()

    async def kill_and_start(self) -> None:
        """Ends the worker without a word and starts it again with the same folders."""
        registered = len(self.control_plane.seen("/register"))
        self.kill()
        self.launch()
        await until(lambda: len(self.control_plane.seen("/register")) > registered, "it registers again", 30)
        await until(self.answers, "the worker answers", 30)

    def kill(self) -> None:
        """Ends the worker without a word."""
        assert self.process
        self.process.kill()
        self.process.wait()

    def launch(self) -> None:
        """Starts the worker as it was started first; `said` begins anew."""
        command = os.environ.get("WIRE_WORKER") or f"{sys.executable} -m localai_cluster.worker"
        argv = [*self.prefix, *shlex.split(command)]
        with open(self.folder / "worker.log", "wb") as log:
            self.process = subprocess.Popen(
                argv, env=self._variables, stderr=log, stdout=log, cwd=self.folder
            )

    def _environment(self) -> dict[str, str]:
        root = Path(__file__).parents[2]
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": str(root),
            "LOCALAI_REGISTER_TO": self.frontend.url,
            "LOCALAI_NATS_URL": self._server.url,
            "LOCALAI_REGISTRATION_TOKEN": TOKEN,
            "LOCALAI_NODE_NAME": self.folder.name,
            "LOCALAI_ADDR": f"localhost:{self.base}",
            "LOCALAI_GRPC_MAX_PORT": str(self.last_port),
            "LOCALAI_BACKENDS_PATH": str(self.backends),
            "LOCALAI_BACKENDS_SYSTEM_PATH": str(self.folder / "system"),
            "LOCALAI_MODELS_PATH": str(self.models),
            # Ours reads sources from these folders only; a stock worker does not know the setting.
            "LOCALAI_WORKER_SOURCE_ROOTS": str(self.sources),
        }

    async def answers(self) -> bool:
        """Whether it answers on the bus now. What the server gave to a killed process is lost."""
        self.check_that_it_runs()
        with contextlib.suppress(NoRespondersError, NatsTimeoutError):
            return bool(await self.nats.request(self.subject("backend.list"), b"{}", timeout=ANSWERS))
        return False

    def check_that_it_runs(self) -> None:
        """Fails with its log if it has ended."""
        assert self.process
        assert self.process.poll() is None, (self.folder / "worker.log").read_text()

    async def stop(self) -> None:
        """Ends what is left."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for name in [path.name for path in (self.folder / "notes").glob("*")]:
            for note in self.notes(name):
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    if str(self.folder) in " ".join(psutil.Process(note["pid"]).cmdline()):
                        os.kill(note["pid"], 9)
        await self.nats.close()
        await self.frontend.stop()

    def subject(self, command: str) -> str:
        """The subject of a command, with the node id as nats.md §1.1 has it."""
        return f"nodes.{self.frontend.node_id.translate(str.maketrans('.*> ', '----'))}.{command}"

    async def ask(self, command: str, request: Any) -> dict[str, Any]:
        """The reply to a command; `request` is encoded unless it is bytes."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        reply = await self.nats.request(self.subject(command), body, timeout=LIMIT)
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    async def install(self, backend: str, source: Path | None = None, **more: Any) -> dict[str, Any]:
        """`backend.install`, of a folder if `source` is given."""
        uri = {"uri": str(source)} if source else {}
        return await self.ask("backend.install", {"backend": backend, **uri, **more})

    async def load(self, backend: str, model: str, index: int = 0, **options: Any) -> str:
        """The address of a new engine; its backend is made and installed if need be."""
        source = self.sources / backend
        if not source.exists():
            self.source(backend, **options)
        reply = await self.install(backend, source, model_id=model, replica_index=index)
        assert reply["success"], reply
        return str(reply["address"])

    async def publish_stop(self, body: Any) -> None:
        """`backend.stop`, which has no reply."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.nats.publish(self.subject("backend.stop"), payload)

    async def stop_model(self, key: str, address: str, **more: bool) -> dict[str, Any]:
        """`model.stop`."""
        request = {"model_name": key.rpartition("#")[0], "process_key": key, "expected_address": address}
        return await self.ask("model.stop", request | more)

    async def listed(self) -> dict[str, dict[str, Any]]:
        """`backend.list` by name."""
        reply = await self.ask("backend.list", {})
        assert not reply.get("error"), reply
        return {entry["name"]: entry for entry in reply["backends"] or []}

    async def running(self) -> set[str]:
        """The keys that `models.running` names."""
        reply = await self.ask("models.running", {})
        assert not reply.get("error"), reply
        return {f"{model['model_id']}#{model['replica_index']}" for model in reply["models"]}

    async def runs(self, *keys: str) -> None:
        """Waits until exactly these run."""

        async def holds() -> bool:
            return await self.running() == set(keys)

        await until(holds, f"exactly {keys} run", 30)

    def source(self, name: str, size: int = 0, **options: Any) -> Path:
        """A folder with the scripted engine; `size` bytes of ballast."""
        folder = self.sources / name
        folder.mkdir()
        shutil.copy(ENGINE, folder)
        notes = self.folder / "notes"
        notes.mkdir(exist_ok=True)
        (folder / "engine.json").write_text(json.dumps({"notes": str(notes / name), **options}))
        start = folder / "run.sh"
        start.write_text(f'#!/bin/sh\nexec {sys.executable} -I "$(dirname "$0")/engine.py" "$@"\n')
        start.chmod(0o755)
        if size:
            (folder / "ballast").write_bytes(os.urandom(size))
        return folder

    def gallery(self, name: str, *entries: dict[str, Any]) -> str:
        """An index that is served over HTTP, as the text of `backend_galleries`."""
        url = self.control_plane.serve(f"{name}.yaml", json.dumps(entries).encode())
        return json.dumps([{"url": url, "name": name}])

    def notes(self, source: str, *events: str) -> list[dict[str, Any]]:
        """What the engines of a source noted, all of it or these events."""
        path = self.folder / "notes" / source
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [note for note in found if not events or note["event"] in events]

    def alive(self, source: str) -> list[int]:
        """Ids of the source's engines that still run."""
        return [note["pid"] for note in self.notes(source, "started") if alive(note["pid"])]

    def pids(self) -> dict[int, str]:
        """The ports of the engines' processes and their children, by process id, whoever their parent is."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if any(word.startswith(f"{self.backends}/") for word in words) and "--addr" in words:
                found[process.pid] = words[words.index("--addr") + 1].rpartition(":")[2]
        return found

    @property
    def said(self) -> str:
        """Its output so far."""
        return (self.folder / "worker.log").read_text()

    @property
    def http(self) -> str:
        """Where its HTTP server listens."""
        return f"127.0.0.1:{self.base - 1}"

    @property
    def engine_token(self) -> str:
        """What calls to its engines carry."""
        return self.frontend.access_token

    async def healthy(self, address: str, token: str | None = None) -> bool:
        """Whether the engine at `address` calls itself ready to one with this token."""
        async with grpc.aio.insecure_channel(address) as channel:
            health: Any = channel.unary_unary("/backend.Backend/Health")
            bearer = (("authorization", f"Bearer {self.engine_token if token is None else token}"),)
            try:
                return bool(await health(b"", timeout=30, metadata=bearer) == OK)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return False


def free_base(ports: int) -> int:
    """The first port for engines; the one before it is free too, for the worker's own server."""
    return free_port(ports + 1) + 1


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def archive(folder: Path) -> bytes:
    """A folder as a .tar.gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(folder, ".")
    return buffer.getvalue()
