"""The worker's settings, read by the table of `config_table.py` into one frozen object.

`localai_cluster.kit.env` reads them, as for the server processes. Every wrong setting is reported on its own
line, with its name and the fix. Nothing is guessed.
"""

import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from localai_cluster.kit.env import Environment, Problem, parse_bool, parse_duration
from localai_cluster.kit.errors import ClusterError
from localai_cluster.messaging.codec import decode_galleries
from localai_cluster.messaging.messages import Gallery
from localai_cluster.messaging.servers import Credentials, Servers, parse_url
from localai_cluster.worker.config_table import (
    BY_KEY,
    LEAST_BYTES,
    MOST_BYTES,
    MOST_LINES,
    NAME_LIMIT,
    SETTINGS,
    InvalidSettings,
)
from localai_cluster.worker.hardware import Simulation, simulation
from localai_cluster.worker.log_rings import BYTES, LINES

T = TypeVar("T")

DEFAULT_HEARTBEAT = 10.0
HIGHEST_PORT = 65535
ADDRESS_LIMIT = 512


@dataclass(frozen=True)
class Config:
    """All settings of a worker. Times in seconds, sizes in bytes; secrets are excluded from `repr`."""

    register_to: str
    nats: Servers | None = field(repr=False)
    """The configured bus; None if the control plane provides its address."""
    nats_tls: ssl.SSLContext | None
    tls: ssl.SSLContext | None
    """Verifies the control plane; None for the system's CAs."""
    registration_token: str = field(repr=False)
    node_name: str
    base_port: int
    max_port: int
    find_ports: bool
    advertise_addr: str
    http_bind: tuple[str, int]
    metrics_token: str = field(repr=False)
    """Token for the metrics; empty if only the control plane may read them."""
    advertise_http_addr: str
    backends_path: Path
    backends_system_path: Path
    galleries: tuple[Gallery, ...]
    models_path: Path
    heartbeat_interval: float
    labels: Mapping[str, str]
    max_replicas_per_model: int
    vram_budget: str
    download_rate: int
    log_lines: int
    log_bytes: int
    source_roots: tuple[Path, ...]
    data_dir: Path
    capability: str
    test_gpus: Simulation | None = None
    """Simulated GPUs that replace those of the machine; None outside of tests."""

    @property
    def advertise_host(self) -> str:
        """Host part of the advertised address, with the brackets of an IPv6 address."""
        return host_port(self.advertise_addr)[0]


def build(values: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> Config:
    """Build the settings from `values` (by key, flags and environment merged). Raise InvalidSettings.

    `environment` provides the `…_FILE` forms of secrets.
    """
    merged = {setting.name: (values.get(setting.key) or "").strip() for setting in SETTINGS}
    reader = _Reader(Environment({**environment, **merged}))
    base, advertised = _addresses(reader)
    http_bind = reader.parsed("http_addr", host_port, ("0.0.0.0", base - 1))
    http_host, _ = host_port(advertised)
    backends = reader.path("backends_path", Path("backends"))
    roots = tuple(_path(part) for part in reader.text("source_roots").split(os.pathsep) if part.strip())
    config = Config(
        register_to=reader.parsed("register_to", _base_url, ""),
        nats=_nats(reader),
        nats_tls=reader.environment.tls("LOCALAI_NATS_TLS"),
        tls=reader.environment.tls("LOCALAI_WORKER_TLS"),
        registration_token=reader.secret("registration_token"),
        node_name=reader.parsed("node_name", _name, socket.gethostname() or f"node-{os.getpid()}"),
        base_port=base,
        max_port=reader.parsed("grpc_max_port", lambda text: _max_port(text, base), HIGHEST_PORT),
        find_ports=reader.parsed("find_ports", parse_bool, False),
        advertise_addr=advertised,
        http_bind=http_bind,
        metrics_token=reader.secret("metrics_token"),
        advertise_http_addr=reader.parsed("advertise_http_addr", _address, f"{http_host}:{http_bind[1]}"),
        backends_path=backends,
        backends_system_path=reader.path("backends_system_path", Path("/var/lib/local-ai/backends")),
        galleries=reader.parsed("backend_galleries", _galleries, ()),
        models_path=reader.path("models_path", Path("models")),
        heartbeat_interval=reader.parsed("heartbeat_interval", parse_duration, 0.0) or DEFAULT_HEARTBEAT,
        labels=_labels(reader.text("node_labels")),
        max_replicas_per_model=max(1, reader.parsed("max_replicas_per_model", _integer, 1)),
        vram_budget=reader.text("vram_budget"),
        download_rate=reader.parsed("download_rate", _not_negative, 0),
        log_lines=reader.parsed("log_lines", lambda text: _in_range(text, 1, MOST_LINES), LINES),
        log_bytes=reader.parsed("log_bytes", lambda text: _in_range(text, LEAST_BYTES, MOST_BYTES), BYTES),
        source_roots=roots or (backends,),
        data_dir=reader.path("data_dir", backends.parent),
        capability=reader.text("capability"),
        test_gpus=reader.parsed("test_gpus", simulation, None),
    )
    _check_required(reader, config)
    if reader.problems:
        raise InvalidSettings(reader.problems)
    return config


class _Reader:
    """The shared reader, addressed by a setting's key; hints come from the table."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.problems = environment.problems

    def text(self, key: str) -> str:
        return self.environment.text(BY_KEY[key].name)

    def secret(self, key: str) -> str:
        return self.environment.secret(BY_KEY[key].name)

    def path(self, key: str, default: Path) -> Path:
        return _path(self.text(key)) if self.text(key) else default.absolute()

    def parsed(self, key: str, parse: Callable[[str], T], default: T) -> T:
        setting = BY_KEY[key]
        return self.environment.parsed(setting.name, parse, default, setting.hint)

    def refuse(self, key: str, message: str) -> None:
        setting = BY_KEY[key]
        self.environment.refuse(setting.name, message, setting.hint)


def host_port(text: str) -> tuple[str, int]:
    """Parse `host:port`, an IPv6 host in brackets. Raise ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= HIGHEST_PORT:
        raise ValueError("not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("not host:port (write an IPv6 address in brackets)")
    return host, int(port)


def refuse(key: str, reason: str) -> NoReturn:
    """Raise InvalidSettings for a value that proved wrong when it was used."""
    setting = BY_KEY[key]
    raise InvalidSettings([Problem(setting.name, reason, setting.hint)])


def _check_required(reader: _Reader, config: Config) -> None:
    if not reader.text("register_to"):
        reader.refuse("register_to", "is not set")
    switches = ("registration_require_auth", "distributed_require_auth")
    required = [reader.parsed(key, parse_bool, False) for key in switches]
    if any(required) and not config.registration_token:
        reader.refuse("registration_token", "is not set, but authentication is required")


def _nats(reader: _Reader) -> Servers | None:
    url, jwt, seed = (reader.secret(key) for key in ("nats_url", "nats_jwt", "nats_user_seed"))
    if bool(jwt) != bool(seed):
        reader.refuse("nats_user_seed" if jwt else "nats_jwt", "is not set")
    if jwt and seed and not url:
        reader.refuse("nats_url", "is not set, but credentials for it are")
    if not url:
        return None
    try:
        servers = parse_url(url)
    except ClusterError:
        # Quote neither the value nor the parser's message, which may contain it: it may hold a password.
        reader.refuse("nats_url", "is not the URL of a NATS server")
        return None
    try:
        return replace(servers, credentials=Credentials.of(jwt, seed)) if jwt and seed else servers
    except ValueError as error:
        reader.refuse("nats_jwt", f"cannot be used: {error}")
        return None


def _addresses(reader: _Reader) -> tuple[int, str]:
    """Return the first engine port and the advertised address."""
    _, default_port = reader.parsed("serve_addr", host_port, ("", 50051))
    address = reader.parsed("addr", _address, "")
    base = host_port(address)[1] if address else default_port
    if base < 2:
        reader.refuse("addr", "port 1 leaves no room for the probes, one below it")
    advertised = reader.parsed("advertise_addr", _address, address)
    return base, advertised or f"{local_address(reader.text('register_to'))}:{base}"


def local_address(url: str) -> str:
    """Return this machine's address on the route to the server of `url`, an IPv6 one in brackets.

    Nothing is sent: connecting a UDP socket only chooses the route. Without a route or a name server the
    result is the host name.
    """
    with contextlib.suppress(OSError, ValueError):
        parts = urlsplit(url)
        target = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        for family, _, _, _, address in socket.getaddrinfo(*target, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own_address = str(probe.getsockname()[0]).partition("%")[0]
                return f"[{own_address}]" if ":" in own_address else own_address
    return socket.gethostname() or "localhost"


def _address(text: str) -> str:
    host_port(text)
    if len(text) > ADDRESS_LIMIT:
        raise ValueError(f"longer than {ADDRESS_LIMIT} characters")
    return text


def _path(text: str) -> Path:
    return Path(text.strip()).expanduser().absolute()


def _base_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http:// or https:// URL")
    return text.rstrip("/")


def _name(text: str) -> str:
    if len(text) > NAME_LIMIT or not text.isprintable():
        raise ValueError("too long or not printable")
    return text


def _galleries(text: str) -> tuple[Gallery, ...]:
    try:
        return decode_galleries(text)
    except ClusterError as error:
        raise ValueError(f"not a list of galleries ({error.message})") from error


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("not a whole number") from None


def _not_negative(text: str) -> int:
    number = _integer(text)
    if number < 0:
        raise ValueError("negative")
    return number


def _in_range(text: str, least: int, most: int) -> int:
    number = _integer(text)
    if not least <= number <= most:
        raise ValueError(f"not between {least} and {most}")
    return number


def _max_port(text: str, base: int) -> int:
    number = _integer(text)
    return number if base <= number <= HIGHEST_PORT else HIGHEST_PORT


def _labels(text: str) -> dict[str, str]:
    """Parse `k=v,k=v`; parts without `=` are skipped, like in a stock worker."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
