"""Pages of the tests: sockets on `/ws/feed`, with every message checked against the API document."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

from channels.testing import WebsocketCommunicator
from django.db import connections
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from localai_cluster.api_document import document
from localai_cluster.edge import websocket_application
from nodes.live import watch
from tests.support.environment import API_KEY

ADMIN = [(b"authorization", f"Bearer {API_KEY}".encode())]


def look() -> watch.Snapshot:
    """Read a snapshot; close the thread's connections, which a communicator of channels leaves open."""
    try:
        return watch.read_snapshot()
    finally:
        connections.close_all()


@cache
def _components() -> dict[str, Any]:
    """Return the document's components without additional properties, `nullable` as JSON Schema."""
    components: dict[str, Any] = deepcopy(document()["components"])
    for schema in components["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
            fields = schema["properties"]
            schema["properties"] = {name: _nullable(field) for name, field in fields.items()}
    return components


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [field, {"type": "null"}]} if field.get("nullable") else field


def wrong_with(message: dict[str, Any]) -> list[str]:
    """Return the violations of the document in this message."""
    schemas = _components()["schemas"]
    kinds = {schemas[name]["properties"]["type"]["enum"][0]: name for name in schemas if is_message(name)}
    reference = {"$ref": f"#/components/schemas/{kinds[message['type']]}"}
    validator = Draft202012Validator(reference | {"components": _components()})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(message)]


def is_message(name: str) -> bool:
    """Return True if a component is a message of the feed."""
    return name.startswith("Feed") and "type" in _components()["schemas"][name].get("properties", {})


class Tab:
    """A page's socket; `seen` has every message so far, `nodes` and `operations` the content of the page."""

    def __init__(self, query: str = "", headers: Any = ADMIN) -> None:
        self.socket = WebsocketCommunicator(websocket_application, f"/ws/feed{query}", headers=list(headers))
        self.seen: list[dict[str, Any]] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.cursor, self.seq = "", 0

    @property
    def place(self) -> str:
        """Return the query by which a later tab continues from here."""
        return f"?operations={self.seq}&nodes={self.cursor}"

    async def open(self) -> "Tab":
        """Connect."""
        accepted, _ = await self.socket.connect(timeout=60)
        assert accepted
        return self

    async def next(self) -> dict[str, Any]:
        """Return the next message, checked against the document."""
        message: dict[str, Any] = await self.socket.receive_json_from(timeout=60)
        assert wrong_with(message) == []
        self.seen.append(message)
        if message["type"].startswith("nodes."):
            self._apply_nodes(message)
        if message["type"].startswith("operations."):
            self._apply_operations(message)
        return message

    def _apply_nodes(self, message: dict[str, Any]) -> None:
        self.cursor = message["cursor"]
        if message["type"] == "nodes.snapshot":
            self.nodes = {node["id"]: node for node in message["nodes"]}
            return
        for patch in message["changed"]:
            self.nodes[patch["id"]] = self.nodes.get(patch["id"], {}) | patch
        for node in message["removed"]:
            self.nodes.pop(node, None)

    def _apply_operations(self, message: dict[str, Any]) -> None:
        self.seq = message["seq"]
        if message["type"] == "operations.snapshot":
            self.operations = {}
        for one in message["operations"]:
            if one["jobID"] in message.get("partial", ()):
                known = self.operations[one["jobID"]]["nodes"]
                moved = {part["node_id"]: part for part in one["nodes"]}
                one = {**one, "nodes": [moved.get(part["node_id"], part) for part in known]}
            self.operations[one["jobID"]] = one

    async def until(self, holds: Callable[[], Any]) -> None:
        """Read until the condition holds."""
        while not holds():
            await self.next()

    async def greeted(self) -> "Tab":
        """Read until nodes, operations and notices have been sent once."""
        kinds = ("nodes.", "operations.", "notices")
        await self.until(lambda: all(any(m["type"].startswith(k) for m in self.seen) for k in kinds))
        return self

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages of this kind."""
        return [message for message in self.seen if message["type"] == kind]

    @property
    def notices(self) -> set[str]:
        """Return the ids of the current notices."""
        return {notice["id"] for notice in self.told("notices")[-1]["notices"]}

    async def closed(self) -> int:
        """Return the code with which the server closes the socket, after reading all messages before."""
        while True:
            message = await self.socket.receive_output(timeout=60)
            if message["type"] == "websocket.close":
                return int(message["code"])
