"""Becoming a node of the cluster: what is told, and how often it is tried again (worker.md §5)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from localai_cluster.errors import ClusterError
from localai_cluster.worker.config import Config
from localai_cluster.worker.controller import CallFailed, Controller, Registered
from localai_cluster.worker.hardware import Figures, Gpus
from localai_cluster.worker.processes import Engine

log = logging.getLogger(__name__)

ATTEMPTS = 100
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
SLOTS_LABEL = "node.replica-slots"


class GaveUp(ClusterError):
    """The controller accepted no registration."""

    code = "registration_failed"


def body(config: Config, capability: str, found: Gpus, measured: Figures) -> dict[str, Any]:
    """The registration of a backend worker (worker.md §5.1), without the token."""
    slots = config.max_replicas_per_model
    told: dict[str, Any] = {
        "name": config.node_name,
        "address": config.advertise_addr,
        "http_address": config.advertise_http_addr,
        "total_vram": found.total,
        "available_vram": found.total,
        "gpu_vendor": found.vendor,
        "gpu_compute_capability": found.compute_capability,
        "capability": capability,
        "max_replicas_per_model": slots,
        "labels": {**config.labels, SLOTS_LABEL: str(slots)},
        **measured.known("total_disk", "available_disk", "total_ram", "available_ram"),
    }
    if config.vram_budget:
        told["vram_budget"] = config.vram_budget
    return told


def listed(engines: Iterable[Engine], host: str) -> list[dict[str, str]]:
    """`running_processes`: what runs here under which key, at the addresses that installs have answered."""
    return [{"process_key": engine.key, "address": f"{host}:{engine.port}"} for engine in engines]


def pauses() -> Iterator[float]:
    """Seconds before each further attempt: 2, 4, 8, 16, 30, 30 …"""
    pause = FIRST_PAUSE
    for _ in range(ATTEMPTS - 1):
        yield pause
        pause = min(pause * 2, LONGEST_PAUSE)


async def register(
    controller: Controller,
    told: Callable[[], Awaitable[dict[str, Any]]],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Registered:
    """Registers, trying up to 100 times; every refusal is tried again. GaveUp."""
    waits = pauses()
    while True:
        try:
            return await register_once(controller, told)
        except CallFailed as error:
            pause = next(waits, None)
            if pause is None:
                what = f"gave up registering after {ATTEMPTS} attempts"
                raise GaveUp(f"{what}: {error}{mend(error)}") from error
            pause = max(pause, error.wait)
            log.warning("registration failed: %s; next attempt in %g s%s", error, pause, mend(error))
            await sleep(pause)


async def register_once(controller: Controller, told: Callable[[], Awaitable[dict[str, Any]]]) -> Registered:
    """Registers without trying again. CallFailed."""
    registered = await controller.register(await told())
    log.info("registered id=%s status=%s", registered.node_id, registered.status)
    if registered.status == "pending":
        log.info("this node waits for an administrator's approval")
    return registered


_MENDS = {
    401: "Check LOCALAI_REGISTRATION_TOKEN.",
    403: "If this node's secret was revoked, give it a new identity: stop the worker, delete the file "
    "node-secret in its data folder (and node-secret.next, if it is there), start it again and have an "
    "administrator approve it.",
    409: "An administrator has to decide this conflict: accept this worker on the node's page or by "
    "`manage.py nodes conflicts`, or give it another LOCALAI_NODE_NAME. If its data folder is a copy of "
    "another worker's, stop it and delete the file node-secret in the copy.",
    429: "The controller has seen too many failed attempts from this address.",
}


def mend(error: CallFailed) -> str:
    """What whoever reads the log can do about a refused registration, as a further sentence."""
    return f". {_MENDS[error.http_status]}" if error.http_status in _MENDS else ""
