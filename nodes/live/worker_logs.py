"""`/ws/nodes/:id/backend-logs/:model`: an engine's output as the worker sends it (http-api §2.13).

The node must exist before the handshake is answered; what fails afterwards closes the socket with 1011 and
the reason. What the client says is not passed on: a worker ignores it.
"""

import contextlib
from collections.abc import AsyncGenerator
from uuid import UUID

from channels.db import database_sync_to_async

from localai_cluster.kit import errors
from localai_cluster.web.sockets import FAILED, Ended, Scope
from nodes.backends import worker_logs
from nodes.models import BackendNode
from nodes.registry import dial_targets


async def admit(scope: Scope) -> None:
    """Raise NotFound for an unknown node, InvalidInput for a name that no model has."""
    node, model = _node_and_model(scope)
    if node is None or not await database_sync_to_async(BackendNode.objects.filter(pk=node).exists)():
        raise errors.NotFound("node not found")
    if len(model) > worker_logs.LONGEST_NAME:
        raise errors.InvalidInput(f"the model's name is over {worker_logs.LONGEST_NAME} characters")


async def output(scope: Scope) -> AsyncGenerator[str, None]:
    """Yield the worker's messages; end with the reason."""
    node, model = _node_and_model(scope)
    assert node is not None
    try:
        server = await database_sync_to_async(dial_targets.http_server)(node)
        async with contextlib.aclosing(worker_logs.follow(server, model)) as messages:
            async for message in messages:
                yield message
    except errors.ClusterError as error:
        raise Ended(FAILED, error.message) from error


def _node_and_model(scope: Scope) -> tuple[UUID | None, str]:
    kwargs = scope["url_route"]["kwargs"]
    try:
        return UUID(kwargs["node_id"]), kwargs["model"]
    except ValueError:
        return None, kwargs["model"]
