"""What worker and bus tests share: a real NATS server on a free port, and waiting on conditions."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import NAMESPACE_DNS, uuid5

import httpx

from localai_cluster.embedded.nats import nats_binary as nats_binary
from localai_cluster.messaging.bus import Bus
from localai_cluster.messaging.messages import Gallery, decode, encode, encode_galleries
from localai_cluster.rpc.build import build_stubs as build_stubs
from tests.conftest import until
from tests.support import forking
from tests.support.ports import free_port
from tests.wire.servers import Call, HttpServer

ROOT = Path(__file__).parent.parent.parent
FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
INBOX = "_INBOX.test"
NO_NODE = "/00000000-"
"""Part of the path where a worker asks whether the server knows secrets."""
UNKNOWN_NODE = {"error": {"code": 404, "message": "node not found", "type": "node_error"}}
R = TypeVar("R")
USER, PASSWORD = "tester", "p@ss:w/rd"


class NatsServer:
    """A real server with one user, startable and stoppable on the same port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port(2)
        self.password = PASSWORD
        self._config = folder / "nats.conf"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{USER}:p%40ss%3Aw%2Frd@127.0.0.1:{self.port}"

    async def start(self) -> None:
        user = f'user: "{USER}", password: "{self.password}"'
        addresses = f'listen: "127.0.0.1:{self.port}"\nhttp: "127.0.0.1:{self.port + 1}"'
        self._config.write_text(f"{addresses}\nauthorization {{ {user} }}\n")
        self._launch()
        await until(self._answers, what="nats-server listens")

    async def subscriptions(self) -> list[str]:
        """Every subject somebody listens to."""
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{self.port + 1}/connz", params={"subs": "1"})
        return [s for link in answer.json()["connections"] for s in link.get("subscriptions_list", [])]

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            [nats_binary(), "-c", str(self._config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class StubControlPlane(HttpServer):
    """Answers the self-service routes."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[int] = []
        self.node_id = "node.a 1*b"
        self.is_stock = False
        """Whether it knows no secrets of nodes, as a stock frontend."""
        self.status = "healthy"
        self.heartbeat_status = 200
        self.rotating = False
        self.in_flight: list[int] = []
        self.credentials: Callable[[], dict[str, str]] = dict
        """What an answer to a registration says of the bus."""

    def answer(self, call: Call) -> tuple[int, bytes]:
        """As the contract has it, but for what the test has set."""
        status, body = self._said(call)
        return status, json.dumps(body).encode()

    def _said(self, call: Call) -> tuple[int, Any]:
        if call.path.endswith("/register"):
            if self.refusals:
                return self.refusals.pop(0), {"error": {"message": "not now"}}
            fingerprint = hashlib.sha256(call.headers["x-localai-node-secret"].encode()).hexdigest()
            proof = {} if self.is_stock else {"fingerprint": fingerprint}
            facts = {"id": self.node_id, "name": call.body["name"], "status": self.status}
            return 201, facts | proof | self.credentials()
        if self.is_stock == (len(call.headers.get("authorization", "")) == len("Bearer ") + 64):
            return 401, {
                "error": "invalid registration token" if self.is_stock else "invalid node credential"
            }
        if call.path.endswith("/heartbeat"):
            if self.rotating:
                return 401, {"error": "an admin wants this secret replaced", "rotate": True}
            return self.heartbeat_status, {"message": "heartbeat received"}
        if call.path.endswith("/rotate"):
            self.rotating = False
            return 200, {"message": "secret rotated"}
        if NO_NODE in call.path:
            return (200, []) if self.is_stock else (404, UNKNOWN_NODE)
        if call.path.endswith("/models"):
            return 200, [{"in_flight": self.in_flight.pop(0) if self.in_flight else 0}]
        return 200, {"message": "ok"}


class Registry(StubControlPlane):
    """Gives every name an id of its own."""

    def _said(self, call: Call) -> tuple[int, Any]:
        if call.path.endswith("/register"):
            self.node_id = str(uuid5(NAMESPACE_DNS, call.body["name"]))
        return super()._said(call)


TOKEN = "tok-en"


class Worker:
    """A real worker process against the stub control plane and the real bus."""

    def __init__(self, folder: Path, control_plane: StubControlPlane, nats: NatsServer) -> None:
        self.folder = folder
        self.backends = folder / "backends"
        self.models = folder / "models"
        self.sources = folder / "sources"
        self.sources.mkdir()
        self.base = free_port(8)
        self.log = folder / "worker.log"
        self.control_plane = control_plane
        self.nats = nats
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "LOCALAI_REGISTER_TO": f"http://127.0.0.1:{control_plane.port}/",
            "LOCALAI_NATS_URL": nats.url,
            "LOCALAI_REGISTRATION_TOKEN": TOKEN,
            "LOCALAI_NODE_NAME": "w1",
            "LOCALAI_NODE_LABELS": "tier=t1, odd",
            "LOCALAI_ADDR": f"localhost:{self.base + 1}",
            "LOCALAI_GRPC_MAX_PORT": str(self.base + 7),
            "LOCALAI_BACKENDS_PATH": str(self.backends),
            "LOCALAI_BACKENDS_SYSTEM_PATH": str(folder / "system"),
            "LOCALAI_MODELS_PATH": str(self.models),
            "LOCALAI_WORKER_SOURCE_ROOTS": str(self.sources),
            "LOCALAI_HEARTBEAT_INTERVAL": "300ms",
        }

    def launch(self, **more: str) -> None:
        self.process = forking.Fork(
            forking.WORKER, env=self.environment | more, cwd=self.folder, log=self.log
        )

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    async def ended(self) -> int:
        """The exit code, once it has ended by itself."""
        process = self.process
        assert process
        await until(lambda: process.poll() is not None, 30, "the worker ends")
        return int(process.returncode)

    def source(self, name: str, size: int = 0, **options: Any) -> Path:
        """A folder with the fake engine, told how to behave; `size` bytes of ballast."""
        folder = self.sources / name
        folder.mkdir()
        shutil.copy(FAKE_ENGINE, folder / "fake_engine.py")
        build_stubs(folder)
        (folder / "engine.json").write_text(json.dumps(options))
        start = folder / "run.sh"
        start.write_text(f'#!/bin/sh\nexec {sys.executable} "$(dirname "$0")/fake_engine.py" "$@"\n')
        start.chmod(0o755)
        if size:
            (folder / "ballast").write_bytes(os.urandom(size))
        return folder

    def gallery(self, *entries: dict[str, Any]) -> str:
        """An index of these entries, as the text of `backend_galleries`."""
        index = self.sources / "index.yaml"
        index.write_text(json.dumps(list(entries)))
        return encode_galleries((Gallery(url=index.as_uri(), name="local"),))

    def started(self, backend: str, address: str) -> dict[str, Any]:
        """What an installed engine wrote down about its own start."""
        port = address.rpartition(":")[2]
        facts: dict[str, Any] = json.loads((self.backends / backend / f"started-{port}.json").read_text())
        return facts

    @property
    def engine_token(self) -> str:
        """The token for its engines that it has told the control plane."""
        return str(self.control_plane.seen("/register")[-1].body["engine_token"])

    def events(self, backend: str, address: str) -> list[str]:
        path = self.backends / backend / f"events-{address.rpartition(':')[2]}"
        return path.read_text().split() if path.exists() else []


def engines_of(folder: Path) -> list[int]:
    """Ids of the running processes whose command line names `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in line and b"fake_engine" in line:
                found.append(int(entry.name))
    return found


async def ask(bus: Bus, subject: str, request: Any, reply: type[R], timeout: float) -> R:
    """One question, with replies in an inbox that every user of this server may use."""
    return decode(await bus.request(subject, encode(request), timeout, inbox=INBOX), reply)
