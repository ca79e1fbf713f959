"""`localai-cluster-worker check`: report what the worker would meet with these settings, and change nothing.

The server is asked two questions about a node that does not exist, so no node registers and none is counted
as alive. Ports are opened for a moment, unless a worker runs with this data folder.
"""

import os
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import httpx

from localai_cluster.kit.addresses import is_local
from localai_cluster.worker import hardware, identity, ports
from localai_cluster.worker.config import Config, InvalidSettings
from localai_cluster.worker.control_plane import CALL_LIMIT, CallFailed, ControlPlane, DowngradeRefused
from localai_cluster.worker.identity import NodeIdentity
from localai_cluster.worker.registration import hint


class Problem(str):
    """A line of the report that names what is wrong and the fix."""


async def machine(config: Config) -> list[str]:
    """Return the report on this machine: hardware, folders, addresses and ports."""
    gpus = await hardware.gpus(hardware.reader(config.test_gpus, tuple)) or hardware.Gpus()
    capability = hardware.detect_capability(config.capability, gpus, config.capability_file)
    count = f"{len(gpus.each)} GPUs" if gpus.each is not None else "GPUs"
    found = f"{count} with {gpus.total / hardware.GIB:.0f} GiB" if gpus.total else "no GPU"
    lines = [f"hardware: {found}, capability {capability}"]
    if config.without_effect:
        lines.append(f"settings: without effect in this worker: {', '.join(config.without_effect)}")
    return [*lines, *_folders(config), *_addresses(config), *_ports(config)]


def _folders(config: Config) -> Iterator[str]:
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


def _addresses(config: Config) -> Iterator[str]:
    """Find an address that only this machine reaches, while the control plane is another machine."""
    server = urlsplit(config.register_to).hostname or ""
    host = config.advertise_host.strip("[]")
    if is_local(host) and not is_local(server):
        yield Problem(
            f"address: the control plane at {server} cannot reach {config.advertise_addr}; set LOCALAI_ADDR "
            "to an address of this machine in its network"
        )


def _ports(config: Config) -> Iterator[str]:
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
    if not ports.bindable(found.base_port):
        yield Problem(
            f"ports: another program has port {found.base_port}, the first one for engines; set LOCALAI_ADDR "
            "or LOCALAI_WORKER_FIND_PORTS=true"
        )


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
