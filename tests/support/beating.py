"""Heartbeats in the form of workers, sent to the application in front of Django, and their effects."""

import json
from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async

from localai_cluster.kit.database_pool import Pool
from nodes.api.heartbeats import HeartbeatApplication
from nodes.models import BackendNode
from tests.support import api
from tests.support.asgi import exchange


class Counted:
    """A pool that records its statements."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.statements: list[str] = []

    async def fetch_rows(self, statement: str, parameters: Mapping[str, Any], /) -> list[tuple[Any, ...]]:
        self.statements.append(statement)
        return await self.pool.fetch_rows(statement, parameters)


async def beat(
    application: HeartbeatApplication,
    node_id: Any,
    body: Any = None,
    *,
    secret: str | None = api.SECRET,
    content_type: str = "application/json",
    method: str = "POST",
    instance: str = "",
) -> tuple[int, Any]:
    """Send one heartbeat and wait until it is written; return status and body."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", content_type.encode())]
    if instance:
        headers.append((b"x-localai-node-instance", instance.encode("latin-1")))
    if secret is not None:
        headers.append((b"authorization", f"Bearer {secret}".encode()))
    path = f"/api/node/{node_id}/heartbeat"
    sent = await exchange(application, method, path, raw, headers)
    await application._writer._batches.idle()
    return sent[0]["status"], json.loads(sent[1]["body"])


async def made(**fields: Any) -> BackendNode:
    return await sync_to_async(api.make_node)(**fields)


async def now_of(node: BackendNode) -> BackendNode:
    return await BackendNode.objects.aget(pk=node.pk)
