"""A server under test: started by a command, spoken to as an administrator and as a client.

`WIRE_SERVER` is the command; without it LocalAI Cluster is started. The command gets LocalAI's own settings
as environment variables (`LOCALAI_MODELS_PATH`, time limits, galleries), starts everything the server needs,
prints one line of JSON (`url`, `nats`: the URL for workers, `token`: of registration, `key`: of an
administrator) and ends all of it on SIGTERM.
"""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.wire.servers import Answer, ask

OURS = f"{sys.executable} -m tests.support.wire_server"
START = 180.0
"""Seconds for the start of everything on a busy machine."""


class Server:
    """The server and its administrator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = folder / "models"
        self.models.mkdir(parents=True)
        self.url = self.address = self.nats = self.token = self._key = ""
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, **settings: str) -> None:
        """Start it and wait until it is ready."""
        process = self._launch(settings)
        assert process.stdout
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START)
        assert line, (self.folder / "server.log").read_text()
        told = json.loads(line)
        self.url, self.nats, self.token, self._key = (told[key] for key in ("url", "nats", "token", "key"))
        self.address = self.url.removeprefix("http://").rstrip("/")

    def _launch(self, settings: dict[str, str]) -> "subprocess.Popen[bytes]":
        command = shlex.split(os.environ.get("WIRE_SERVER") or OURS)
        root = Path(__file__).parents[2]
        variables = {"PYTHONPATH": str(root), "LOCALAI_MODELS_PATH": str(self.models), **settings}
        with open(self.folder / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **variables}, cwd=root, stdout=subprocess.PIPE, stderr=log
            )
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            # Closes its output too.
            self._process.communicate()

    def define(self, name: str, backend: str, content: bytes) -> None:
        """A model of embeddings: its file and its definition, in place before the server starts."""
        (self.models / f"{name}.bin").write_bytes(content)
        lines = [f"name: {name}", f"backend: {backend}", "parameters:", f"  model: {name}.bin"]
        (self.models / f"{name}.yaml").write_text("\n".join([*lines, "embeddings: true", ""]))

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """One request as administrator."""
        content = b"" if body is None else json.dumps(body).encode()
        return await ask(self.address, method, path, self._key, content, Content_Type="application/json")

    async def get(self, path: str) -> Any:
        answer = await self.ask("GET", path)
        assert answer.status == 200, answer
        return json.loads(answer.body)

    async def approve(self, node_id: str) -> None:
        answer = await self.ask("POST", f"/api/nodes/{node_id}/approve", {})
        assert answer.status == 200, answer

    async def node(self, node_id: str) -> dict[str, Any]:
        nodes: list[dict[str, Any]] = await self.get("/api/nodes")
        return next(node for node in nodes if node["id"] == node_id)

    async def status(self, node_id: str) -> str:
        return str((await self.node(node_id))["status"])

    async def replicas(self, node_id: str) -> list[tuple[str, int, str]]:
        """Model, index and state of the node's replicas."""
        rows = await self.get(f"/api/nodes/{node_id}/models")
        return [(row["model_name"], row["replica_index"], row["state"]) for row in rows or []]

    async def embed(self, model: str) -> Answer:
        """One request of a client, which loads the model if need be."""
        return await self.ask("POST", "/v1/embeddings", {"model": model, "input": "a cat"})

    async def operation(self, backend: str) -> dict[str, Any] | None:
        """The listed operation on a backend, if there is one."""
        listed = (await self.get("/api/operations"))["operations"] or []
        return next((one for one in listed if backend in (one["name"], one["fullName"])), None)
