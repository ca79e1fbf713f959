"""Registration: the request body of a worker, and the retries (worker.md §5)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from localai_cluster import __version__
from localai_cluster.kit.errors import ClusterError
from localai_cluster.worker.config import Config
from localai_cluster.worker.control_plane import CallFailed, ControlPlane, Registered
from localai_cluster.worker.engines import Engine
from localai_cluster.worker.hardware import Figures, Gpus

log = logging.getLogger(__name__)

ATTEMPTS = 100
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
SLOTS_LABEL = "node.replica-slots"


class GaveUp(ClusterError):
    """The control plane did not accept any registration."""

    code = "registration_failed"


def body(config: Config, capability: str, gpus: Gpus, measured: Figures, engine_token: str) -> dict[str, Any]:
    """Build the registration of a backend worker (worker.md §5.1), without the registration token.

    Its engines accept calls with `engine_token` only.
    """
    slots = config.max_replicas_per_model
    values: dict[str, Any] = {
        "name": config.node_name,
        "address": config.advertise_addr,
        "http_address": config.advertise_http_addr,
        "total_vram": gpus.total,
        "available_vram": gpus.total,
        "gpu_vendor": gpus.vendor,
        "gpu_compute_capability": gpus.compute_capability,
        "capability": capability,
        "engine_token": engine_token,
        "max_replicas_per_model": slots,
        "labels": {**config.labels, SLOTS_LABEL: str(slots)},
        "version": __version__,
        **measured.known("total_disk", "available_disk", "total_ram", "available_ram"),
    }
    if gpus.each is not None:
        values["gpus"] = [gpu.report for gpu in gpus.each]
    if config.vram_budget:
        values["vram_budget"] = config.vram_budget
    return values


def running_processes(engines: Iterable[Engine], host: str) -> list[dict[str, str]]:
    """Return the running engines by key, with the addresses that install replies have given."""
    return [{"process_key": engine.key, "address": f"{host}:{engine.port}"} for engine in engines]


def pauses() -> Iterator[float]:
    """Yield the seconds before each retry: 2, 4, 8, 16, 30, 30 …"""
    pause = FIRST_PAUSE
    for _ in range(ATTEMPTS - 1):
        yield pause
        pause = min(pause * 2, LONGEST_PAUSE)


async def register(
    control_plane: ControlPlane,
    body: Callable[[], Awaitable[dict[str, Any]]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Registered:
    """Register, with up to 100 attempts, after any error. Raise GaveUp."""
    delays = pauses()
    while True:
        try:
            return await register_once(control_plane, body)
        except CallFailed as error:
            pause = next(delays, None)
            if pause is None:
                raise GaveUp(
                    f"registration failed {ATTEMPTS} times, giving up: {error}{hint(error)}"
                ) from error
            pause = max(pause, error.wait)
            log.warning("registration failed: %s; retrying in %g s%s", error, pause, hint(error))
            await sleep(pause)


async def register_once(
    control_plane: ControlPlane, body: Callable[[], Awaitable[dict[str, Any]]]
) -> Registered:
    """Register without retries. Raise CallFailed."""
    return await control_plane.register(await body())


_HINTS = {
    401: "Check LOCALAI_REGISTRATION_TOKEN; for a new join token, press Add a node on the Nodes page.",
    403: "If this node's secret was revoked, give the node a new identity: stop the worker, delete the file "
    "node-secret in its data folder (and node-secret.next, if it exists), start the worker, and have an "
    "administrator approve it.",
    409: "An administrator must resolve this conflict: accept this worker on the node's page or with "
    "`manage.py nodes accept`, or give it another LOCALAI_NODE_NAME. If its data folder is a copy of "
    "another worker's, stop this worker and delete the file node-secret in the copy.",
    429: "The control plane has counted too many failed attempts from this address.",
}


def hint(error: CallFailed) -> str:
    """Return the remedy for a refused registration, as a sentence to append."""
    return f". {_HINTS[error.http_status]}" if error.http_status in _HINTS else ""
