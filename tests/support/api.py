"""Callers of the REST API, and registrations in the form of workers."""

import json
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db import connection
from django.http import HttpResponse
from django.test import Client

from localai_cluster.accounts import actors
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock
from nodes.api.registrations import RegistrationApplication
from nodes.models import BackendNode, NodeModel
from nodes.registry import lifecycle
from nodes.registry import registration as registry_registration
from tests.support import replicas
from tests.support.asgi import exchange
from tests.support.environment import API_KEY, REGISTRATION_TOKEN
from tests.support.fleet import register_as

RECORDINGS = Path(__file__).parent.parent / "data" / "http"
SECRET = "a" * 64
OTHER_SECRET = "b" * 64
REGISTER = "/api/node/register"


def examples(name: str) -> list[dict[str, Any]]:
    """Return the examples of one recording of the reference."""
    found: list[dict[str, Any]] = json.loads((RECORDINGS / f"{name}.json").read_text())["examples"]
    return found


class Caller:
    """Sends JSON with fixed headers."""

    def __init__(self, **headers: str) -> None:
        self.client = Client(raise_request_exception=False, enforce_csrf_checks=True)
        self.headers = headers

    def get(self, path: str) -> Any:
        """Send GET."""
        return self.client.get(path, headers=self.headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        """Send POST with a JSON value, raw bytes, or no body."""
        return self.send("POST", path, body, **headers)

    def put(self, path: str, body: Any = None) -> Any:
        """Send PUT; bodies as with POST."""
        return self.send("PUT", path, body)

    def patch(self, path: str, body: Any = None) -> Any:
        """Send PATCH; bodies as with POST."""
        return self.send("PATCH", path, body)

    def delete(self, path: str) -> Any:
        """Send DELETE."""
        return self.send("DELETE", path)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Send a request with a JSON value, raw bytes, or no body."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = {**self.headers, **headers}
        if path.rstrip("/") == REGISTER:
            return self._raw(method, raw, {"content-type": "application/json", **sent})
        return self.client.generic(method, path, raw, content_type="application/json", headers=sent)

    def _raw(self, method: str, body: bytes, headers: dict[str, str]) -> HttpResponse:
        """Register through a second application, as if the request had reached another web process."""
        cookies = {"cookie": self.client.cookies.output(header="", sep=";")} if self.client.cookies else {}
        raw = [(k.lower().encode(), v.encode("latin-1")) for k, v in {**headers, **cookies}.items()]
        client = self.client.defaults.get("REMOTE_ADDR", "127.0.0.1")
        # The connection of a test's own transaction has to stay open.
        in_test = connection.in_atomic_block
        with patch("channels.db.close_old_connections") if in_test else nullcontext():
            ask = async_to_sync(exchange)
            sent = ask(RegistrationApplication(), method, REGISTER, body, raw, client=client)
        answer = Answer(sent[1]["body"], status=sent[0]["status"])
        for name, value in sent[0]["headers"]:
            answer[name.decode()] = value.decode()
        return answer


class Answer(HttpResponse):
    """An answer of a raw application, with the interface of Django's client."""

    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.content)


def bearer(credential: str) -> Caller:
    """Return a caller with this credential."""
    return Caller(Authorization=f"Bearer {credential}")


def admin() -> Caller:
    """Return a caller with the static admin key."""
    return bearer(API_KEY)


def worker(secret: str = SECRET) -> Caller:
    """Return a caller with a node's own secret."""
    return bearer(secret)


def registration(name: str = "w1", **fields: Any) -> dict[str, Any]:
    """Return the body of a registration."""
    return {"name": name, "address": "127.0.0.1:51100", "token": REGISTRATION_TOKEN, **fields}


def secret_of(name: str) -> str:
    """Return the secret that the worker of this name has generated."""
    return SECRET if name == "w1" else hash_secret(name)


def register(body: Any, secret: str | None = None, **headers: str) -> Any:
    """Register over HTTP with the secret of the named worker; without a secret if `secret` is empty."""
    name = body.get("name") if isinstance(body, dict) else None
    secret = secret_of(str(name)) if secret is None else secret
    extra = ({"X-LocalAI-Node-Secret": secret} if secret else {}) | headers
    return bearer(REGISTRATION_TOKEN).post(REGISTER, body, **extra)


def make_node(
    name: str = "w1", *, secret: str | None = None, approved: bool = True, **fields: Any
) -> BackendNode:
    """Register a node; return its row."""
    fields.setdefault("address", "127.0.0.1:51100")
    return register_as(
        registry_registration.Registration(name=name, **fields),
        secret=secret_of(name) if secret is None else secret,
        source_address="127.0.0.1",
        now=clock.now(),
        auto_approve=approved,
    ).node


def node(node_id: UUID | str) -> BackendNode:
    """Return the current row."""
    return BackendNode.objects.get(pk=node_id)


def message(response: HttpResponse) -> str:
    """Return the message of an error in any envelope."""
    error = json.loads(response.content)["error"]
    return str(error if isinstance(error, str) else error["message"])


def replica(node: BackendNode, name: str = "m", **fields: Any) -> NodeModel:
    """Create a loaded replica on the node."""
    return NodeModel.engines.create(node=node, model_name=name, **replicas.columns(**fields))


def mark(node: BackendNode, event: str) -> None:
    """Apply an event that no admin triggers: `silent`, `unhealthy`."""
    task = actors.task("test")
    if event == "unhealthy":
        lifecycle.mark_unhealthy(node.id, actor=task, now=clock.now(), reason="it did not answer")
        return
    BackendNode.objects.filter(pk=node.pk).update(last_heartbeat=clock.now() - timedelta(hours=1))
    lifecycle.mark_silent([node.id], limit=60, actor=task, now=clock.now())
