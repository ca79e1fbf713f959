"""What a worker talks to, as the suite plays it: a real NATS server and a scripted control plane."""

import asyncio
import base64
import hashlib
import inspect
import json
import os
import shutil
import socket
import ssl
import subprocess
import sysconfig
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.ports import free_port

PATIENCE = 6
"""How many times as long everything may take on a machine that has something else to do."""
CREDENTIALS = Path(__file__).parent / "user.creds"
"""JWT and seed of a user whom no server knows; they do not expire. An open server takes everybody."""
NO_NODE = "00000000-0000-0000-0000-000000000000"
"""Where our worker asks whether the server knows secrets of nodes."""
USER, PASSWORD, TOKEN = "wire", "p@ss:w/rd", "registration-token"


async def until(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> Any:
    """The first true value of `condition` (sync or async); fails with `what` after a long time."""
    deadline = time.monotonic() + PATIENCE * seconds
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {PATIENCE * seconds} s: {what}"
        await asyncio.sleep(0.02)


def own_address() -> str:
    """An address of this machine that is not loopback; 127.0.0.2 if it has none."""
    found = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return found[0] if found else "127.0.0.2"


class NatsServer:
    """A server with one user, or open to everybody. `WIRE_NATS_SERVER` names another executable."""

    def __init__(self, folder: Path, *, is_open: bool = False) -> None:
        self.port = free_port(2)
        self.monitor = f"127.0.0.1:{self.port + 1}"
        login = "" if is_open else f"{USER}:p%40ss%3Aw%2Frd@"
        self.url = f"nats://{login}127.0.0.1:{self.port}"
        self._is_open = is_open
        self._config = folder / "nats.conf"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        user = "" if self._is_open else f'authorization {{ user: "{USER}", password: "{PASSWORD}" }}'
        addresses = f'listen: "127.0.0.1:{self.port}"\nhttp: "{self.monitor}"'
        self._config.write_text(f"{addresses}\n{user}\n")
        beside = Path(sysconfig.get_path("scripts"), "nats-server")
        program = os.environ.get("WIRE_NATS_SERVER") or shutil.which(beside) or "nats-server"
        self._launch(program)
        await until(self._listens, "nats-server listens")

    async def subscriptions(self) -> list[str]:
        """Every subject that somebody listens to."""
        answer = await ask(self.monitor, "GET", "/connz?subs=1", "")
        links = json.loads(answer.body)["connections"]
        return [subject for link in links for subject in link.get("subscriptions_list", [])]

    def _launch(self, program: str) -> None:
        null = subprocess.DEVNULL
        self._process = subprocess.Popen([program, "-c", self._config], stdout=null, stderr=null)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass
class Call:
    """One HTTP request as the server saw it; `at` on the monotonic clock, `status` of the answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    at: float
    status: int = 0


class HttpServer:
    """Keeps what it was sent, and answers each request by `answer`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.calls: list[Call] = []
        self.tls: ssl.SSLContext | None = None
        self.drops = False
        """True if it is as good as gone: it closes connections without an answer."""
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)

    async def stop(self) -> None:
        assert self._server
        self._server.close()
        for link in list(self._links):
            link.close()
        await self._server.wait_closed()

    def seen(self, ending: str) -> list[Call]:
        return [call for call in self.calls if call.path.endswith(ending)]

    def answer(self, call: Call) -> tuple[int, bytes]:
        """Status and body."""
        raise NotImplementedError

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(writer)
        try:
            while True:
                call = await self._read(reader)
                self.calls.append(call)
                if self.drops:
                    return
                status, text = self.answer(call)
                call.status = status
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._links.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Call:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        text = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        return Call(method, path, headers, _value(text), time.monotonic())


def _value(text: bytes) -> Any:
    """The JSON value of a body, None without one, or a text that is no JSON."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text.decode(errors="replace")


class ControlPlane(HttpServer):
    """Answers the routes a worker calls, and serves `files` under `/files/`.

    It recognises a node's own secret, as LocalAI Cluster does, if the worker sends one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}"
        self.node_id = "node.a 1*b"
        self.files: dict[str, bytes] = {}
        self.refusals: list[int] = []
        """The statuses of the next registrations; then they are accepted."""
        self.in_flight: list[int] = []
        """What the next polls of the node's models say; then none."""
        self.secret = ""
        """The node's secret that it accepts, from the first registration with one."""
        self.wants_rotation = False
        self.at_rotation: Callable[[Callable[[], None]], None] = lambda commit: commit()
        """Commits a new secret, or not."""

    @property
    def access_token(self) -> str:
        """What it sends to files, logs and engines: our worker names a token of its own."""
        return str(self.seen("/register")[-1].body.get("engine_token") or TOKEN)

    def serve(self, name: str, content: bytes) -> str:
        """The address under which a worker can download `content`."""
        self.files[name] = content
        return f"{self.url}/files/{name}"

    def answer(self, call: Call) -> tuple[int, bytes]:
        if call.path.startswith("/files/"):
            content = self.files.get(call.path.removeprefix("/files/"))
            return (404, b"") if content is None else (200, content)
        if call.path.endswith("/register"):
            status, body = self._register(call)
        elif call.path.startswith(f"/api/node/{NO_NODE}/"):
            status, body = 404, error(404, "node not found")
        elif self.secret not in ("", call.headers.get("authorization", "").removeprefix("Bearer ")):
            status, body = 401, {"error": "invalid node credential"}
        else:
            status, body = self._act(call)
        return status, json.dumps(body).encode()

    def _register(self, call: Call) -> tuple[int, Any]:
        if self.refusals:
            return self.refusals.pop(0), {"error": "not now"}
        secret = call.headers.get("x-localai-node-secret", "")
        if self.secret not in ("", secret):
            return 403, {"error": "this credential belongs to another node"}
        self.secret = secret
        proof = {"fingerprint": hashlib.sha256(secret.encode()).hexdigest()} if secret else {}
        return 201, {"id": self.node_id, "name": call.body["name"], "status": "healthy", **proof}

    def _act(self, call: Call) -> tuple[int, Any]:
        if call.path.endswith("/rotate"):
            self.wants_rotation = False
            self.at_rotation(lambda: setattr(self, "secret", call.headers["x-localai-node-new-secret"]))
        elif self.wants_rotation:
            return 401, {"error": "an admin wants this secret replaced", "rotate": True}
        elif call.path.endswith("/models"):
            return 200, [{"in_flight": self.in_flight.pop(0) if self.in_flight else 0}]
        return 200, {"message": "ok"}


FIGURES = ("total_vram", "available_vram", "total_ram", "available_ram", "total_disk", "available_disk")
NEVER = "0001-01-01T00:00:00Z"


class StockFrontend(HttpServer):
    """A stock frontend for one worker: statuses, envelopes and effects as they were recorded.

    A registration deletes the node's replicas, and so does a drain. Nothing is known of secrets.
    """

    def __init__(self, *, auto_approve: bool = True, token: str = TOKEN) -> None:
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = token
        self.node_id = ""
        self.status = ""
        self.replicas: list[dict[str, Any]] = []
        self.gives_credentials = False
        self._auto_approve = auto_approve

    def approve(self) -> None:
        """What an administrator does."""
        self.status = "healthy"

    def forget(self) -> None:
        """Remove the node."""
        self.node_id, self.status, self.replicas = "", "", []

    def answer(self, call: Call) -> tuple[int, bytes]:
        status, body = self._refusal(call) or self._answer(call)
        return status, json.dumps(body).encode()

    def _refusal(self, call: Call) -> tuple[int, Any] | None:
        """The check of the header comes first and has a flat envelope."""
        scheme, _, bearer = call.headers.get("authorization", "").partition(" ")
        if not self.token:
            return None
        if scheme != "Bearer":
            return 401, {"error": "missing or invalid Authorization header"}
        return None if bearer == self.token else (401, {"error": "invalid registration token"})

    def _answer(self, call: Call) -> tuple[int, Any]:
        if call.path.rstrip("/") == "/api/node/register" and call.method == "POST":
            return self._register(call.body)
        parts = call.path.strip("/").split("/")
        node_id, action = (parts[2], parts[3]) if len(parts) == 4 else ("", "")
        if (call.method, action) == ("GET", "models"):
            return 200, self.replicas if node_id == self.node_id else []
        if call.method != "POST" or action not in ("heartbeat", "drain", "resume", "deregister"):
            return 404, error(404, "Not Found")
        if not node_id or node_id != self.node_id:
            return 404, error(404, "node not found")
        return 200, {"message": self._act(action)}

    def _register(self, body: Any) -> tuple[int, Any]:
        if not isinstance(body, dict) or any(body.get(name, 0) < 0 for name in FIGURES):
            return 400, error(400, "invalid request body")
        if self.token and body.get("token") != self.token:
            wrong = "invalid registration token" if body.get("token") else "registration token required"
            return 401, error(401, wrong)
        if complaint := _complaint(body):
            return 400, error(400, complaint)
        is_new = not self.node_id
        if is_new:
            self.node_id = str(uuid.uuid4())
        if self.status != "pending" or self._auto_approve:
            self.status = "healthy" if self._auto_approve or not is_new else "pending"
        self.replicas = []
        made = "2026-11-21T00:09:05.820188502Z" if is_new else NEVER
        kind = body.get("node_type", "backend")
        facts = {"id": self.node_id, "name": body["name"], "node_type": kind, "status": self.status}
        if self.gives_credentials and self.status != "pending":
            jwt, seed = CREDENTIALS.read_text().split()
            facts |= {"nats_jwt": jwt, "nats_user_seed": seed}
        return 201, {"created_at": made, **facts}

    def _act(self, action: str) -> str:
        if action == "heartbeat":
            return "heartbeat received"
        self.status = {"drain": "draining", "resume": "healthy", "deregister": "offline"}[action]
        if action != "resume":
            self.replicas = []
        return "node resumed" if action == "resume" else f"node set to {self.status}"

    @property
    def access_token(self) -> str:
        """What it sends to files, logs and engines of a worker."""
        return self.token


def _complaint(body: dict[str, Any]) -> str:
    """What is wrong with the fields of a registration."""
    kind = body.get("node_type", "backend")
    if kind not in ("backend", "agent"):
        return f'invalid node_type "{kind}"; must be "backend" or "agent"'
    if not body.get("name"):
        return "name is required"
    limits = {"name": 255, "address": 512, "http_address": 512}
    long = [name for name, limit in limits.items() if len(body.get(name, "")) > limit]
    return f"{long[0]} exceeds {limits[long[0]]} characters" if long else ""


def error(code: int, message: str) -> dict[str, Any]:
    """The nested envelope."""
    return {"error": {"code": code, "message": message, "type": "node_error"}}


async def get(address: str, path: str, token: str) -> tuple[int, Any]:
    """Status and JSON body (None for another one) of a GET with this bearer."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    try:
        writer.write(request(address, path, token, {"Connection": "close"}))
        head, _, body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if b"transfer-encoding: chunked" in head.lower():
            body = b"".join(piece for at, piece in enumerate(body.split(b"\r\n")) if at % 2)
        return status, json.loads(body) if status == 200 else None
    finally:
        writer.close()


def request(address: str, path: str, token: str, headers: dict[str, str], method: str = "GET") -> bytes:
    """The head of a request."""
    bearer = {"Authorization": f"Bearer {token}"} if token else {}
    lines = [f"{name}: {value}" for name, value in {"Host": address, **bearer, **headers}.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


@dataclass
class Answer:
    """One HTTP answer of a worker."""

    status: int
    headers: dict[str, str]
    body: bytes


async def ask(address: str, method: str, path: str, token: str, body: bytes = b"", **headers: str) -> Answer:
    """One request, the path as it is given; `headers` with underscores for dashes."""
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    if method in ("PUT", "POST"):
        more["Content-Length"] = str(len(body))
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    try:
        writer.write(request(address, path, token, {"Connection": "close", **more}, method) + body)
        head, _, rest = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if found.get("transfer-encoding", "").lower() == "chunked":
            rest = _joined(rest)
        return Answer(int(first.split()[1]), found, rest)
    finally:
        writer.close()


def _joined(chunks: bytes) -> bytes:
    """The body that came in chunks."""
    whole = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        length = int(size, 16)
        whole, chunks = whole + chunks[:length], chunks[length + 2 :]
        if not length:
            break
    return whole


class WebSocket:
    """A client that reads text messages; `status` answers the handshake."""

    def __init__(self, address: str, path: str, token: str, **headers: str) -> None:
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        }
        self.status = 0
        self._address = address
        self._request = request(address, path, token, upgrade | headers)

    async def __aenter__(self) -> "WebSocket":
        self._reader, self._writer = await asyncio.open_connection(*self._address.rsplit(":", 1))
        self._writer.write(self._request)
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 60)
        self.status = int(head.split()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def leave(self) -> None:
        """Cuts the connection without a word."""
        self._writer.transport.abort()

    async def message(self) -> Any:
        """The next text message, decoded; pings are passed over."""
        while True:
            first, second = await asyncio.wait_for(self._reader.readexactly(2), 60)
            length = second & 0x7F
            if length >= 126:
                length = int.from_bytes(await self._reader.readexactly(2 if length == 126 else 8))
            data = await self._reader.readexactly(length)
            if first & 0x0F == 1:
                assert first & 0x80, "a message in one frame"
                return json.loads(data)
