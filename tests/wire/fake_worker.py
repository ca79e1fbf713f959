"""A scripted worker, as a control plane meets it: registration, heartbeats, commands, files and one engine.

It behaves as a stock worker does: it knows the registration token only, and names no extensions.
"""

import asyncio
import base64
import hashlib
import json
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.support.ports import free_port
from tests.wire.servers import Answer, Call, HttpServer, ask, until

GIB = 2**30
OK = b"\x0a\x02OK"
DONE = b"\x10\x01"
EMBEDDING = b"\x0a\x08" + struct.pack("<2f", 0.6, 0.8)
SILENT = object()
"""A reply that is never sent."""

Reply = Callable[[dict[str, Any]], Any]


@dataclass
class Received:
    """One command, file request or call to the engine; `at` on the monotonic clock."""

    kind: str
    name: str
    body: Any
    at: float = field(default_factory=time.monotonic)


class Files(HttpServer):
    """The worker's file server: HEAD, PUT whole or from an offset. `cut_after` cuts the next PUT there."""

    def __init__(self, token: str, received: list[Received]) -> None:
        super().__init__()
        self.stored: dict[str, bytes] = {}
        self.targets: dict[str, str] = {}
        self.cut_after = 0
        self._token = token
        self._received = received

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
                method, path, _ = first.split(" ")
                key = path.removeprefix("/v1/files/")
                self._received.append(Received(method, key, headers))
                if headers.get("authorization") != f"Bearer {self._token}":
                    status, more = 401, ""
                elif method == "HEAD":
                    status, more = self._head(key)
                else:
                    status, more = await self._put(key, headers, reader)
                body = json.dumps({"local_path": f"/srv/{key}"}).encode() if method == "PUT" else b""
                length = "" if method == "HEAD" else f"Content-Length: {len(body)}\r\n"
                writer.write(f"HTTP/1.1 {status} X\r\n{more}{length}\r\n".encode() + body)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _head(self, key: str) -> tuple[int, str]:
        if key not in self.stored:
            return 404, "Content-Length: 0\r\n"
        content = self.stored[key]
        digest = hashlib.sha256(content).hexdigest()
        is_whole = self.targets.get(key, digest) == digest
        name = "X-Content-SHA256" if is_whole else "X-Target-SHA256"
        size = f"X-File-Size: {len(content)}\r\nContent-Length: {len(content)}\r\nAccept-Ranges: bytes\r\n"
        return 200, f"{size}X-Local-Path: /srv/{key}\r\n{name}: {self.targets.get(key, digest)}\r\n"

    async def _put(self, key: str, headers: dict[str, str], reader: asyncio.StreamReader) -> tuple[int, str]:
        length = int(headers["content-length"])
        start = int(headers.get("content-range", "bytes 0-").removeprefix("bytes ").partition("-")[0])
        have = self.stored.get(key, b"")[:start]
        if len(have) != start:
            return 416, f"X-File-Size: {len(have)}\r\n"
        self.targets[key] = headers.get("x-content-sha256", "")
        if self.cut_after:
            cut, self.cut_after = self.cut_after, 0
            self.stored[key] = have + await reader.readexactly(cut)
            raise OSError("cut")
        self.stored[key] = have + await reader.readexactly(length)
        return 200, ""

    def answer(self, call: Call) -> tuple[int, bytes]:
        raise NotImplementedError


class FakeWorker:
    """One worker. `replies` maps a command to its reply; a command in `deaf` has no listener."""

    def __init__(self, url: str, token: str, nats_url: str, name: str, *, disk: int = 900 * GIB) -> None:
        self.address = url.removeprefix("http://").rstrip("/")
        self.token, self.name, self.disk = token, name, disk
        self.received: list[Received] = []
        self.files = Files(token, self.received)
        self.registered: dict[str, Any] = {}
        self.replies: dict[str, Reply] = {}
        self.deaf: set[str] = set()
        self.engine_port = free_port()
        self.nats = Client()
        self.nats_errors: list[str] = []
        self._nats_url = nats_url
        self._beating: asyncio.Task[None] | None = None
        self._engine: Any = None
        self.load_gate = asyncio.Event()
        self.load_gate.set()

    @property
    def id(self) -> str:
        return str(self.registered["id"])

    def of(self, *kinds: str, name: str = "") -> list[Received]:
        """What came of these kinds, in its order."""
        return [one for one in self.received if one.kind in kinds and name in one.name]

    def commands(self, command: str) -> list[Any]:
        """The bodies of one command."""
        return [one.body for one in self.received if (one.kind, one.name) == ("command", command)]

    async def call(self, path: str, body: Any = None, **headers: str) -> Answer:
        """A POST with the token, unless `headers` have another credential."""
        more = {"Content_Type": "application/json", **headers}
        token = "" if "Authorization" in headers else self.token
        content = b"" if body is None else json.dumps(body).encode()
        return await ask(self.address, "POST", path, token, content, **more)

    def body(self) -> dict[str, Any]:
        """The registration of a stock worker."""
        return {
            "name": self.name,
            "address": f"127.0.0.1:{self.engine_port}",
            "http_address": f"127.0.0.1:{self.files.port}",
            "total_vram": 0,
            "available_vram": 0,
            "gpu_vendor": "",
            "gpu_compute_capability": "",
            "capability": "default",
            "max_replicas_per_model": 1,
            "total_disk": self.disk and 1000 * GIB,
            "available_disk": self.disk,
            "total_ram": 64 * GIB,
            "available_ram": 60 * GIB,
            "labels": {"node.replica-slots": "1", "wire": self.name},
            "token": self.token,
        }

    async def register(self) -> dict[str, Any]:
        answer = await self.call("/api/node/register", self.body())
        assert answer.status == 201, answer
        self.registered = json.loads(answer.body)
        return self.registered

    async def serve(self) -> None:
        """Listen for commands, files and calls to the engine, and send heartbeats."""
        await self.files.start()
        await self._start_engine()
        await self.connect()
        self._beating = asyncio.create_task(self._beat())

    async def connect(self) -> None:
        """Join the bus, with the credentials of the registration if it brought any."""
        url = self.registered.get("nats_url") or self._nats_url
        options: dict[str, Any] = {}
        if jwt := self.registered.get("nats_jwt"):
            seed = self.registered["nats_user_seed"]
            options = {
                "user_jwt_cb": lambda: bytearray(jwt.encode()),
                "signature_cb": lambda nonce: sign(seed, nonce),
                "inbox_prefix": inbox_of(jwt),
            }
        await self.nats.connect(url, error_cb=self._note_error, **options)
        for command in ("backend.install", "backend.upgrade", "backend.stop", "backend.delete"):
            await self._listen(command)
        for command in ("backend.list", "models.running", "model.unload", "model.delete", "stop"):
            await self._listen(command)

    async def _listen(self, command: str) -> None:
        if command not in self.deaf:
            await self.nats.subscribe(f"nodes.{self.id}.{command}", cb=self._handle)

    async def _note_error(self, error: Exception) -> None:
        self.nats_errors.append(str(error))

    async def _handle(self, message: Msg) -> None:
        command = message.subject.split(".", 2)[2]
        body = json.loads(message.data or b"null")
        self.received.append(Received("command", command, body))
        reply = self.replies.get(command, self._usual(command))(body or {})
        if reply is not SILENT and message.reply:
            await self.nats.publish(message.reply, json.dumps(reply).encode())

    def _usual(self, command: str) -> Reply:
        address = f"127.0.0.1:{self.engine_port}"
        return {
            "backend.install": lambda _: {"success": True, "address": address},
            "backend.upgrade": lambda _: {"success": True, "reports_stopped_processes": True},
            "backend.delete": lambda _: {"success": True, "reports_stopped_processes": True},
            "backend.list": lambda _: {"backends": None},
            "models.running": lambda _: {"models": []},
            "model.unload": lambda _: {"success": True},
            "model.delete": lambda _: {"success": True},
        }.get(command, lambda _: SILENT)

    async def _beat(self) -> None:
        while True:
            await self.heartbeat()
            await asyncio.sleep(0.5)

    async def heartbeat(self) -> Answer:
        figures = {"available_ram": 60 * GIB, "available_disk": self.disk}
        if self.disk:
            figures["total_disk"] = 1000 * GIB
        return await self.call(f"/api/node/{self.id}/heartbeat", figures)

    async def silence(self) -> None:
        """Send no heartbeats any more."""
        assert self._beating
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def _start_engine(self) -> None:
        async def call(method: str, request: bytes, context: Any) -> bytes:
            metadata = dict(context.invocation_metadata())
            self.received.append(Received("grpc", method, (metadata, request)))
            if method == "LoadModel":
                await self.load_gate.wait()
            return {"Health": OK, "Embedding": EMBEDDING, "Status": b""}.get(method, DONE)

        def handler(method: str) -> Any:
            async def unary(request: bytes, context: Any) -> bytes:
                return await call(method, request, context)

            return grpc.unary_unary_rpc_method_handler(unary)

        methods = ("Health", "LoadModel", "Embedding", "Free", "Status")
        handlers = {method: handler(method) for method in methods}
        self._engine = grpc.aio.server()
        generic = grpc.method_handlers_generic_handler("backend.Backend", handlers)
        self._engine.add_generic_rpc_handlers((generic,))
        self._engine.add_insecure_port(f"127.0.0.1:{self.engine_port}")
        await self._engine.start()

    async def stop(self) -> None:
        """Leave without a word."""
        self.load_gate.set()
        if self._beating:
            await self.silence()
            await self.nats.close()
            await self._engine.stop(None)
            await self.files.stop()


def sign(seed: str, nonce: str) -> bytes:
    """The answer to a NATS server's challenge: an nkey's seed is two prefix bytes, the key and a checksum."""
    raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    return base64.b64encode(Ed25519PrivateKey.from_private_bytes(raw[2:34]).sign(nonce.encode()))


def claims_of(jwt: str) -> dict[str, Any]:
    """What a JWT says; its signature is the NATS server's business."""
    part = jwt.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims


def inbox_of(jwt: str) -> str:
    """The inbox that the JWT allows, without its wildcard."""
    allowed = claims_of(jwt)["nats"]["pub"]["allow"]
    return str(next(subject for subject in allowed if subject.startswith("_INBOX"))).removesuffix(".>")


async def started(worker: FakeWorker, approve: Callable[[str], Any]) -> FakeWorker:
    """Register, have the node approved, register again for credentials, and serve."""
    registered = await worker.register()
    if registered["status"] == "pending":
        await approve(worker.id)
        await worker.register()
    await worker.serve()
    await until(lambda: worker.nats.is_connected, "the fake worker is on the bus")
    return worker
