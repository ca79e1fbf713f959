"""An intruder with everything it can know, and what it tries against another node.

Each attempt answers which layer refused it; one that is not refused answers "". `test_attack.py` plays them
against a running cluster and holds the table against `docs/security.md`.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import nats.errors
from nats.aio.client import Client

from localai_cluster.messaging.servers import Credentials
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.errors import Unauthenticated
from tests.support.cluster import TOKEN

COMMANDS = (
    "backend.install",
    "backend.upgrade",
    "backend.stop",
    "backend.delete",
    "backend.list",
    "models.running",
    "model.stop",
    "model.unload",
    "model.delete",
    "stop",
    "files.ensure",
    "files.stage",
    "files.temp",
    "files.listdir",
)
"""What controllers send to a worker (nats.md §2.1), after `nodes.<id>.`."""
BROADCASTS = (
    "gallery.op1.progress",
    "gallery.op1.cancel",
    "gallery.opcache.start",
    "gallery.opcache.end",
    "cache.invalidate.models",
    "cache.invalidate.backends",
    "staging.m1.progress",
    "prefixcache.observe",
    "prefixcache.invalidate",
    "state.finetune-jobs.delta",
    "responses.r1.cancel",
    "agent.execute",
    "agent.a1.events.u1",
    "agent.a1.cancel",
    "jobs.new",
    "jobs.mcp-ci.new",
    "jobs.j1.progress",
    "jobs.j1.result",
    "jobs.j1.cancel",
    "mcp.tools.execute",
    "mcp.discovery",
    "$SYS.REQ.CLAIMS.UPDATE",
    "$SYS.ACCOUNT.x.CONNECT",
)
"""What controllers and agents send each other (§2.2, §2.3), and the server's own subjects."""


@dataclass(frozen=True)
class Victim:
    """The node that is attacked: a worker of ours with a loaded engine."""

    id: str
    name: str
    engine: str
    http: str


@dataclass(frozen=True)
class Intruder:
    """Who attacks, and what it has."""

    who: str
    secret: str = ""
    node_id: str = ""
    engine_token: str = ""
    credentials: Credentials | None = field(default=None, repr=False)

    @property
    def bearers(self) -> dict[str, str]:
        """Everything that it could offer as a bearer token."""
        known = {"the registration token": TOKEN, "nothing": ""}
        return known | ({"its own secret": self.secret} if self.secret else {})


@dataclass(frozen=True)
class Target:
    """Where the servers are."""

    web: str
    nats: str


def play(intruder: Intruder, victim: Victim, target: Target) -> dict[str, str]:
    """Which layer refused each attempt of one intruder; AssertionError for what was not refused."""
    found = {}
    for what, attempt in ATTEMPTS.items():
        found[what] = attempt(intruder, victim, target)
        assert found[what], f"{intruder.who} was not refused: {what}"
    return found


def _of(victim: Victim, own: str) -> list[str]:
    commands = [f"nodes.{victim.id}.{command}" for command in COMMANDS]
    own_commands = [f"nodes.{own}.backend.stop", f"nodes.{own}.backend.install"] if own else []
    return [
        *commands,
        f"nodes.{victim.id}.backend.install.op1.progress",
        f"_INBOX.{victim.id}.x.1",
        "_INBOX.x.1",
        *own_commands,
        *BROADCASTS,
    ]


def publish(intruder: Intruder, victim: Victim, target: Target) -> str:
    """Publishes to every subject of the contract but its own progress and inbox."""
    return asyncio.run(_publish(intruder, victim, target))


async def _publish(intruder: Intruder, victim: Victim, target: Target) -> str:
    subjects = _of(victim, intruder.node_id)

    async def attempt(client: Any) -> None:
        for subject in subjects:
            await client.publish(subject, b"{}")

    return await _on_the_bus(intruder, target, attempt, [f'publish to "{one.lower()}"' for one in subjects])


def subscribe(intruder: Intruder, victim: Victim, target: Target) -> str:
    """Subscribes to the same, and to the wildcards that would hold them."""
    return asyncio.run(_subscribe(intruder, victim, target))


async def _subscribe(intruder: Intruder, victim: Victim, target: Target) -> str:
    wide = [">", "nodes.>", "nodes.*.backend.*", "_INBOX.>", "_INBOX.*.*.*", f"nodes.{victim.id}.>"]
    subjects = [*_of(victim, ""), *wide, f"_INBOX.{victim.id}.>", "agent.>", "jobs.>", "$SYS.>"]

    async def attempt(client: Any) -> None:
        for subject in subjects:
            await client.subscribe(subject)

    return await _on_the_bus(
        intruder, target, attempt, [f'subscription to "{one.lower()}"' for one in subjects]
    )


async def _on_the_bus(
    intruder: Intruder, target: Target, attempt: Callable[[Any], Any], expected: Sequence[str]
) -> str:
    complaints: list[str] = []

    async def note(error: Exception) -> None:
        complaints.append(str(error).lower())

    credentials = intruder.credentials
    options: dict[str, Any] = {}
    if credentials:
        options = {
            "user_jwt_cb": lambda: bytearray(credentials.jwt.encode()),
            "signature_cb": credentials.sign,
        }
    client = Client()
    try:
        await client.connect(
            target.nats, error_cb=note, allow_reconnect=False, max_reconnect_attempts=1, **options
        )
        await attempt(client)
        await client.flush()
        await client.flush()
    except nats.errors.Error as error:
        refused = "authorization violation" in str(error).lower()
        return "NATS: no connection" if refused else ""
    finally:
        await client.close()
        await asyncio.sleep(0)  # lets the loop close the socket
    missing = [one for one in expected if not any(f"violation for {one}" in text for text in complaints)]
    assert not missing, f"not refused by the NATS server: {missing}"
    return "NATS: its permissions"


def self_service(intruder: Intruder, victim: Victim, target: Target) -> str:
    """The worker's own routes, for the victim's id."""
    routes = [
        ("POST", "heartbeat"),
        ("POST", "drain"),
        ("POST", "resume"),
        ("GET", "models"),
        ("POST", "deregister"),
        ("POST", "rotate"),
        ("GET", "gallery/index.yaml"),
        ("DELETE", ""),
    ]
    for method, what in routes:
        path = f"/api/node/{victim.id}/{what}".rstrip("/")
        for known, bearer in intruder.bearers.items():
            more = {"X-LocalAI-Node-New-Secret": "f" * 64} if what == "rotate" else {}
            answer = _call(target, method, path, bearer, more=more)
            assert answer.status_code in (401, 403), (what, known, answer.status_code, answer.text)
    return "HTTP: the node's own secret"


def register(intruder: Intruder, victim: Victim, target: Target) -> str:
    """Claims the victim's name with another secret, and with none."""
    body = {"name": victim.name, "address": "127.0.0.1:1", "token": TOKEN}
    for secret in ("e" * 64, ""):
        headers = {"X-LocalAI-Node-Secret": secret} if secret else {}
        answer = _call(target, "POST", "/api/node/register", TOKEN, body, headers)
        assert answer.status_code in (403, 409), (secret, answer.status_code, answer.text)
    return "HTTP: the name's secret; an admin sees a conflict"


def administer(intruder: Intruder, victim: Victim, target: Target) -> str:
    """What only administrators may do."""
    routes: list[tuple[str, str, Any]] = [
        ("GET", "/api/nodes", None),
        ("GET", f"/api/nodes/{victim.id}", None),
        ("POST", f"/api/nodes/{intruder.node_id or victim.id}/approve", {}),
        ("POST", f"/api/nodes/{victim.id}/backends/install", {"backend": "echo"}),
        ("POST", f"/api/nodes/{victim.id}/identity/revoke", {"reason": "x"}),
        ("DELETE", f"/api/nodes/{victim.id}", None),
        ("GET", "/api/join-tokens", None),
        ("POST", "/api/join-tokens", {}),
        ("GET", "/api/operations", None),
    ]
    for method, path, body in routes:
        for known, bearer in intruder.bearers.items():
            answer = _call(target, method, path, bearer, body)
            assert answer.status_code in (401, 403, 429), (path, known, answer.status_code, answer.text)
    return "HTTP: administrators only"


def infer(intruder: Intruder, victim: Victim, target: Target) -> str:
    """A client's request with a worker's secrets."""
    for known, bearer in intruder.bearers.items():
        answer = _call(target, "POST", "/v1/embeddings", bearer, {"model": "echo", "input": "x"})
        assert answer.status_code in (401, 403, 429), (known, answer.status_code, answer.text)
    return "HTTP: API key"


def files(intruder: Intruder, victim: Victim, target: Target) -> str:
    """The files of another node's worker, with everything that it could offer as a token."""
    for method, path in (
        ("PUT", "models/x"),
        ("GET", "models/x"),
        ("HEAD", "models/x"),
        ("POST", "temp"),
        ("GET", "..%2f..%2fetc/passwd"),
    ):
        for bearer in {*intruder.bearers.values(), intruder.engine_token}:
            headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
            url = f"http://{victim.http}/v1/files/{path}"
            answer = httpx.request(
                method, url, headers=headers, content=b"x" if method == "PUT" else None, timeout=30
            )
            assert answer.status_code == 401, (method, path, answer.status_code)
    return "worker: its own token"


def logs(intruder: Intruder, victim: Victim, target: Target) -> str:
    """What the engines of another node print, with everything that it could offer as a token."""
    for bearer in {*intruder.bearers.values(), intruder.engine_token}:
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        for path in ("", "/echo", "/echo%230"):
            url = f"http://{victim.http}/v1/backend-logs{path}"
            answer = httpx.get(url, headers=headers, timeout=30)
            assert (answer.status_code, answer.text) == (401, "unauthorized"), path
    return "worker: its own token"


def metrics(intruder: Intruder, victim: Victim, target: Target) -> str:
    """The figures of the server and of another worker."""
    for bearer in {*intruder.bearers.values(), intruder.engine_token}:
        for path in ("/metrics", "/metrics/nodes"):
            answer = _call(target, "GET", path, bearer)
            assert answer.status_code == 401, answer.text
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        of_worker = httpx.get(f"http://{victim.http}/metrics", headers=headers, timeout=30)
        assert (of_worker.status_code, of_worker.text) == (401, "unauthorized")
    return "HTTP, worker: a scraper's token"


def engine(intruder: Intruder, victim: Victim, target: Target) -> str:
    """A direct call with everything that it could offer as a token."""
    return asyncio.run(_engine(intruder, victim))


async def _engine(intruder: Intruder, victim: Victim) -> str:
    for token in {*intruder.bearers.values(), intruder.engine_token}:
        client = BackendClient(victim.engine, token)
        try:
            await client.status(30)
            return ""
        except Unauthenticated:
            pass
        finally:
            await client.close()
    return "gRPC: the engine's own token"


def _call(
    target: Target, method: str, path: str, bearer: str, body: Any = None, more: dict[str, str] | None = None
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    content = json.dumps(body if body is not None else {}).encode() if method in ("POST", "PUT") else None
    typed = {"Content-Type": "application/json"} if content else {}
    return httpx.request(
        method, target.web + path, headers={**headers, **typed, **(more or {})}, content=content, timeout=60
    )


ATTEMPTS: dict[str, Callable[[Intruder, Victim, Target], str]] = {
    "command another node, publish its progress or replies, or broadcasts": publish,
    "subscribe to another node's subjects, replies, or broadcasts": subscribe,
    "beat, drain, resume, deregister, rotate or read for another node": self_service,
    "register under another node's name": register,
    "list or approve nodes, install, revoke, make join tokens": administer,
    "run inference": infer,
    "upload to or download from another node's worker": files,
    "read the logs of another node's engines": logs,
    "read the metrics of the server or of another worker": metrics,
    "call another node's engine": engine,
}
