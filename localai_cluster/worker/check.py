"""`localai-cluster-worker check`: report what the worker would meet with these settings, and change nothing.

The server is asked two questions about a node that does not exist, so no node registers and none is counted
as alive.
"""

from collections.abc import AsyncIterator

import httpx

from localai_cluster.worker.config import Config
from localai_cluster.worker.control_plane import CALL_LIMIT, CallFailed, ControlPlane, DowngradeRefused
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.registration import hint


class Problem(str):
    """A line of the report that names what is wrong and the fix."""


async def report(config: Config, identity: NodeIdentity) -> list[str]:
    """Return the lines of the report; those that need a fix are of type Problem."""
    async with httpx.AsyncClient(timeout=CALL_LIMIT, verify=config.tls or True) as client:
        control_plane = ControlPlane(
            config.register_to, config.registration_token, identity, "", client, allow_stock=True
        )
        return [line async for line in _lines(config, identity, control_plane)]


async def _lines(config: Config, identity: NodeIdentity, control_plane: ControlPlane) -> AsyncIterator[str]:
    yield f"node: {config.node_name} at {config.advertise_addr}"
    yield f"files and logs: at {config.advertise_http_addr}"
    yield f"data folder: {config.data_dir}"
    try:
        knows_secrets = await control_plane.knows_secrets()
        if knows_secrets:
            yield f"server: LocalAI Cluster at {config.register_to}; this node has its own secret"
            return
        accepts_token = await control_plane.accepts_token()
    except CallFailed as error:
        yield Problem(f"server: {error}{hint(error)}")
        return
    yield f"server: stock LocalAI at {config.register_to}; all nodes share the registration token"
    if identity.is_accepted_by(config.register_to) and not config.allow_stock_frontend:
        yield Problem(f"server: {DowngradeRefused(config.register_to)}")
    if not accepts_token:
        yield Problem("server: it refuses the registration token; set LOCALAI_REGISTRATION_TOKEN to its own")
    if not config.registration_token:
        yield Problem(
            "access: without LOCALAI_REGISTRATION_TOKEN files, logs and engines of this worker stay closed"
        )
    if config.nats is None:
        yield Problem("bus: set LOCALAI_NATS_URL, since a stock frontend does not say where the bus is")
