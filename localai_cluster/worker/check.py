"""`localai-cluster-worker check`: reports problems of the settings, and changes nothing.

The server gets a request about a node that does not exist and a registration without a name, so no node
registers and no node counts as alive. Ports are opened for a moment, unless a worker runs with this data
folder.
"""

import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import httpx

from localai_cluster import gallery_index
from localai_cluster.kit.addresses import is_local
from localai_cluster.messaging.messages import Gallery
from localai_cluster.messaging.nats import connection_problem
from localai_cluster.worker import hardware, identity, ports
from localai_cluster.worker.config import Config, InvalidSettings
from localai_cluster.worker.control_plane import (
    CALL_TIMEOUT,
    CallFailed,
    ControlPlane,
    DowngradeRefused,
    ServerKind,
)
from localai_cluster.worker.gpu_drivers import GIB
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.prefetch import refuse_served
from localai_cluster.worker.registration import hint


class Problem(str):
    """A line of the report that states a problem and its fix."""


async def report_machine(config: Config) -> list[str]:
    """Return the lines of the report on this machine: hardware, folders, addresses and ports."""
    gpus = await hardware.read_gpus(hardware.create_reader(config.test_gpus, tuple)) or hardware.GpuTotals()
    capability = hardware.detect_capability(config.capability, gpus, config.capability_file)
    count = f"{len(gpus.each)} GPUs" if gpus.each is not None else "GPUs"
    found = f"{count} with {gpus.total / GIB:.0f} GiB" if gpus.total else "no GPU"
    lines = [f"hardware: {found}, capability {capability}"]
    if config.without_effect:
        lines.append(f"settings: these have no effect in this worker: {', '.join(config.without_effect)}")
    return [*lines, *_check_folders(config), *_check_addresses(config), *_check_ports(config)]


def _check_folders(config: Config) -> Iterator[str]:
    folders = {
        "LOCALAI_WORKER_DATA_DIR": config.data_dir,
        "LOCALAI_BACKENDS_PATH": config.backends_path,
        "LOCALAI_MODELS_PATH": config.models_path,
    }
    for name, folder in folders.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield f"folder: {folder}"
        else:
            yield Problem(
                f"folder: cannot write {folder}; set {name} to a folder that this user can write to"
            )
    system = config.backends_system_path
    if not system.exists():
        yield f"folder: {system} does not exist, so there are no system backends"
    elif system.is_dir() and os.access(system, os.R_OK | os.X_OK):
        yield f"folder: {system} (read-only)"
    else:
        yield Problem(f"folder: cannot read {system}; set LOCALAI_BACKENDS_SYSTEM_PATH to a readable folder")


def _check_addresses(config: Config) -> Iterator[str]:
    """Report an address that only this machine reaches, if the control plane is on another machine."""
    server = urlsplit(config.register_to).hostname or ""
    host = config.advertise_host.strip("[]")
    if is_local(host) and not is_local(server):
        yield Problem(
            f"address: the control plane at {server} cannot reach {config.advertise_addr}; set LOCALAI_ADDR "
            "to an address of this machine in its network"
        )


def _check_ports(config: Config) -> Iterator[str]:
    if identity.is_in_use(config.data_dir):
        yield f"ports: not checked, since a worker runs with {config.data_dir}"
        return
    try:
        found, listener = ports.open_probe_listener(config, store=False)
    except InvalidSettings as error:
        yield Problem(f"ports: {error.message}")
        return
    listener.close()
    yield f"ports: {found.http_bind[1]} for files, logs and probes"
    yield f"ports: {found.base_port} to {found.max_port} for engines"
    if not ports.is_bindable(found.base_port):
        yield Problem(
            f"ports: another program has port {found.base_port}, the first one for engines; set LOCALAI_ADDR "
            "or LOCALAI_WORKER_FIND_PORTS=true"
        )


async def report_connections(config: Config, identity: NodeIdentity) -> list[str]:
    """Return the lines of the report on server, bus and galleries. A line of type Problem needs a fix."""
    async with httpx.AsyncClient(timeout=CALL_TIMEOUT, verify=config.tls or True) as client:
        control_plane = ControlPlane(
            config.register_to, config.registration_token, identity, "", client, allow_stock=True
        )
        lines = [line async for line in _check_server(config, identity, control_plane)]
    async with httpx.AsyncClient(timeout=CALL_TIMEOUT, verify=config.registry_ca or True) as client:
        galleries = [await _check_gallery(config, client, gallery) for gallery in config.all_galleries]
    return [*lines, await _check_bus(config), *galleries]


async def _check_server(
    config: Config, identity: NodeIdentity, control_plane: ControlPlane
) -> AsyncIterator[str]:
    yield f"node: {config.node_name} at {config.advertise_addr}"
    yield f"files and logs: at {config.advertise_http_addr}"
    yield f"data folder: {config.data_dir}"
    try:
        kind = ServerKind.CLUSTER if await control_plane.knows_secrets() else ServerKind.STOCK
        accepts_token = await control_plane.accepts_token(kind)
    except CallFailed as error:
        yield Problem(f"server: {error}{hint(error)}")
        return
    if not accepts_token:
        yield Problem("server: it refuses the registration token; set LOCALAI_REGISTRATION_TOKEN to its own")
    if kind is ServerKind.CLUSTER:
        yield f"server: LocalAI Cluster at {config.register_to}; this node has its own secret"
        return
    yield f"server: stock LocalAI at {config.register_to}; all nodes share the registration token"
    if identity.is_accepted_by(config.register_to) and not config.allow_stock_frontend:
        yield Problem(f"server: {DowngradeRefused(config.register_to)}")
    if not config.registration_token:
        yield Problem(
            "access: without LOCALAI_REGISTRATION_TOKEN files, logs and engines of this worker stay closed"
        )
    if config.nats is None:
        yield Problem("bus: set LOCALAI_NATS_URL, since a stock frontend does not say where the bus is")


async def _check_bus(config: Config) -> str:
    """Report on the bus of the settings; the bus of a registration is not known yet."""
    if config.nats is None:
        return "bus: not checked, since its address comes with the registration"
    where = ", ".join(config.nats.urls)
    reason = await connection_problem(replace(config.nats, tls=config.nats_tls))
    if not reason:
        return f"bus: connected to {where}"
    if "authorization violation" in reason.lower() and not config.nats.has_login:
        return f"bus: {where} requires credentials, which must come with the registration"
    return Problem(f"bus: {where}: {reason}; check LOCALAI_NATS_URL and its credentials and certificates")


async def _check_gallery(config: Config, client: httpx.AsyncClient, gallery: Gallery) -> str:
    name = gallery.name or gallery_index.public_url(gallery.url)
    if gallery_index.served_name(gallery.url) is not None:
        return f"gallery: {name} comes from the control plane, for registered nodes only"
    try:
        index = await gallery_index.fetch(
            gallery,
            client,
            served=refuse_served,
            resolve=lambda path: gallery_index.check_inside(path, config.source_roots),
            timeout=CALL_TIMEOUT,
            github_url=config.github_url,
        )
    except gallery_index.GalleryUnreadable as error:
        return Problem(f"gallery: {error.message}")
    return f"gallery: {name} has {len(index.entries)} entries"
