"""The worker's settings: one table of flags, environment variables, meanings and fixes, and its values.

`main.py` builds the command line from the table; `localai_cluster.kit.env` reads the values, as for the
server processes. Every wrong setting is reported on its own line, with its name and the fix.
"""

import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from localai_cluster.gallery_index import GITHUB_URL
from localai_cluster.kit.addresses import local_address, split_host_port
from localai_cluster.kit.env import (
    Environment,
    Problem,
    number_parser,
    parse_base_url,
    parse_bool,
    parse_duration,
)
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.registry_settings import HINT as REGISTRIES_HINT
from localai_cluster.kit.registry_settings import NO_REGISTRIES, parse_settings
from localai_cluster.kit.tls import trust_besides
from localai_cluster.messaging.codec import decode_galleries
from localai_cluster.messaging.messages import Gallery
from localai_cluster.messaging.servers import Credentials, Servers, parse_url
from localai_cluster.registries.access import Access, default_config
from localai_cluster.worker.hardware import Simulation, simulation
from localai_cluster.worker.log_rings import BYTES, LINES

T = TypeVar("T")

DEFAULT_HEARTBEAT = 10.0
HIGHEST_PORT = 65535
ADDRESS_LIMIT = 512
NAME_LIMIT = 255
MOST_LINES = 10_000
LEAST_BYTES, MOST_BYTES = 64 * 1024, 2 * 1024 * 1024
"""Bounds of the stored output of one engine; as escaped JSON it fits in what web processes accept."""
_ANY = 2**63 - 1


@dataclass(frozen=True)
class Option:
    """One setting: the flag is `--` plus the key in kebab case; the first set environment variable wins.

    `hint` is the fix for a wrong value.
    """

    key: str
    help: str
    hint: str
    environment: tuple[str, ...]
    switch: bool

    @property
    def name(self) -> str:
        """Environment variable that messages name."""
        return self.environment[0]

    @property
    def flag(self) -> str:
        """Command-line flag."""
        return "--" + self.key.replace("_", "-")


def _option(
    key: str, help: str, hint: str = "", *, names: Sequence[str] = (), switch: bool = False
) -> Option:
    return Option(key, help, hint, tuple(names) or (f"LOCALAI_{key.upper()}",), switch)


_HOST_PORT = "Use host:port, such as gpu-1.example:50051."

SETTINGS = (
    _option(
        "register_to",
        "Base URL of the control plane. Required.",
        "Use the URL of the control plane, such as http://cluster.example:8080.",
    ),
    _option(
        "nats_url",
        "URL of the message bus. Default: what the control plane says at registration.",
        "Use nats://host:4222.",
    ),
    _option(
        "nats_jwt",
        "JWT for the message bus, in place of the one that registrations bring; with --nats-user-seed.",
        "Set both, or neither to have the control plane give them.",
    ),
    _option(
        "nats_user_seed",
        "Seed of the user that --nats-jwt names.",
        "Set both, or neither to have the control plane give them.",
    ),
    *(
        _option(f"nats_tls_{part}", text, "Name a readable PEM file.")
        for part, text in (
            ("ca", "CA certificates that verify the message bus. Any of the three files forces TLS."),
            ("cert", "Certificate of this worker, for mutual TLS with the message bus."),
            ("key", "Private key of that certificate."),
        )
    ),
    _option(
        "tls_ca",
        "CA certificates that verify an https:// control plane. Default: those of the system.",
        "Name a readable PEM file.",
        names=("LOCALAI_WORKER_TLS_CA",),
    ),
    _option(
        "registration_token", "Secret shared with the control plane.", "Use the token of the control plane."
    ),
    _option(
        "allow_stock_frontend",
        "Serve a stock LocalAI frontend also at an address where LocalAI Cluster has accepted this worker. "
        "The registration token then opens files, logs and engines.",
        "Use true or false.",
        names=("LOCALAI_WORKER_ALLOW_STOCK_FRONTEND",),
        switch=True,
    ),
    _option(
        "node_name",
        "Unique name of this node. Default: the host name.",
        f"Use 1 to {NAME_LIMIT} printable characters.",
    ),
    _option(
        "addr", "host:port that reaches this worker. Its port is the first port for engines.", _HOST_PORT
    ),
    _option(
        "serve_addr",
        "Where the first port for engines comes from without --addr. Default: 0.0.0.0:50051.",
        _HOST_PORT,
    ),
    _option("grpc_max_port", "Highest port for engines. 0 = 65535.", "Use a port."),
    _option(
        "advertise_addr",
        "host:port to advertise to the control plane. Default: --addr, else this machine's address on the "
        "way to the control plane.",
        _HOST_PORT,
    ),
    _option(
        "find_ports",
        "If the ports of --addr are in use, take the next free block of 100 and keep it.",
        "Use true or false.",
        names=("LOCALAI_WORKER_FIND_PORTS",),
        switch=True,
    ),
    _option(
        "http_addr",
        "host:port of health probes, logs and /metrics. Default: 0.0.0.0, one port below the engines.",
        "Use a free host:port, such as 0.0.0.0:50050.",
    ),
    _option(
        "metrics_token",
        "Token with which a scraper may read /metrics on the port of the health probes.",
        "Use a long random text.",
        names=("LOCALAI_WORKER_METRICS_TOKEN",),
    ),
    _option("advertise_http_addr", "HTTP host:port to advertise to the control plane.", _HOST_PORT),
    _option(
        "backends_path",
        "Folder for installed backends. Default: ./backends.",
        names=("LOCALAI_BACKENDS_PATH", "BACKENDS_PATH"),
    ),
    _option(
        "backends_system_path", "Folder of read-only system backends. Default: /var/lib/local-ai/backends."
    ),
    _option(
        "backend_galleries",
        'JSON list of {"name", "url"}: the galleries for commands that name none.',
        'Use a JSON list such as [{"name":"local","url":"file:///srv/index.yaml"}].',
        names=("LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES"),
    ),
    _option(
        "registries",
        "Registries of images: a JSON list of host, username, password, realm (URL of a token service on "
        "another host that may get the password) and plain_http. Secret.",
        REGISTRIES_HINT,
    ),
    _option(
        "registry_config",
        "File with credentials of registries, as `docker login` writes it. "
        "Default: $DOCKER_CONFIG/config.json or ~/.docker/config.json.",
    ),
    _option(
        "registry_ca",
        "CA certificates that registries and galleries over https:// may have besides the usual ones.",
        "Name a readable PEM file.",
    ),
    _option(
        "github_url",
        f"Base URL of the files that github: addresses name. Default: {GITHUB_URL}.",
        "Use the URL of a mirror, such as https://mirror.example/raw.",
    ),
    _option(
        "models_path",
        "Folder for staged models. Default: ./models.",
        names=("LOCALAI_MODELS_PATH", "MODELS_PATH"),
    ),
    _option(
        "registration_require_auth",
        "Refuse to start without a registration token.",
        "Use true or false.",
        switch=True,
    ),
    _option(
        "distributed_require_auth", "Implies --registration-require-auth.", "Use true or false.", switch=True
    ),
    _option("heartbeat_interval", "Time between heartbeats. Default: 10s.", "Use a duration such as 10s."),
    _option("node_labels", "Labels of this node: k=v,k=v."),
    _option(
        "max_replicas_per_model",
        "Maximum replicas per model on this node. Default: 1.",
        "Use a whole number.",
    ),
    _option("vram_budget", "VRAM to offer: 80%, 12GB, 12GiB or bytes."),
    _option(
        "download_rate",
        "Bandwidth limit of installs, in bytes per second. 0 = unlimited.",
        "Use bytes per second as a whole number. 0 = unlimited.",
        names=("LOCALAI_WORKER_DOWNLOAD_RATE",),
    ),
    _option(
        "log_lines",
        f"Lines of output kept of each engine. Default: {LINES}.",
        f"Use a whole number from 1 to {MOST_LINES}.",
        names=("LOCALAI_WORKER_LOG_LINES",),
    ),
    _option(
        "log_bytes",
        f"Bytes of output kept of each engine. Default: {BYTES}.",
        f"Use bytes as a whole number from {LEAST_BYTES} to {MOST_BYTES}.",
        names=("LOCALAI_WORKER_LOG_BYTES",),
    ),
    _option(
        "source_roots",
        f"Folders that backends and file:// galleries may be read from, separated by {os.pathsep!r}. "
        "Default: the backends path.",
        names=("LOCALAI_WORKER_SOURCE_ROOTS",),
    ),
    _option(
        "data_dir",
        "Folder for the node's secret. Default: the folder above the backends.",
        names=("LOCALAI_WORKER_DATA_DIR",),
    ),
    _option(
        "capability",
        "Overrides the detected capability, such as nvidia-cuda-12. disable = every build fits.",
        names=("LOCALAI_FORCE_META_BACKEND_CAPABILITY",),
    ),
    _option(
        "test_gpus",
        "For tests: report GPUs that do not exist, and after a colon what each engine takes of them.",
        "Use groups such as 2x24GiB, 1x24GiB+1x48GiB or 2x24GiB:6GiB.",
    ),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}


class InvalidSettings(ClusterError):
    """Settings are wrong; the message has one line for each, with its name and how to fix it."""

    code = "invalid_settings"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(_line(problem) for problem in problems))


def _line(problem: Problem) -> str:
    flag = next((f" ({option.flag})" for option in SETTINGS if option.name == problem.setting), "")
    return f"{problem.setting}{flag}: {problem.message}. {problem.hint}"


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
    allow_stock_frontend: bool
    """True if a server that has accepted the node's secret may become a stock frontend."""
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
    registries: Access
    registry_tls: ssl.SSLContext | None
    """Verifies registries and galleries; None for the usual CAs."""
    github_url: str
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
        return split_host_port(self.advertise_addr)[0]


def build(values: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> Config:
    """Build the settings from `values` (by key, flags and environment merged). Raise InvalidSettings.

    `environment` provides the `…_FILE` forms of secrets.
    """
    merged = {setting.name: (values.get(setting.key) or "").strip() for setting in SETTINGS}
    reader = _Reader(Environment({**environment, **merged}))
    base, advertised = _addresses(reader)
    http_bind = reader.parsed("http_addr", split_host_port, ("0.0.0.0", base - 1))
    http_host, _ = split_host_port(advertised)
    backends = reader.path("backends_path", Path("backends"))
    roots = tuple(_path(part) for part in reader.text("source_roots").split(os.pathsep) if part.strip())
    config = Config(
        register_to=reader.parsed("register_to", _base_url, ""),
        nats=_nats(reader),
        nats_tls=reader.environment.tls("LOCALAI_NATS_TLS")[1],
        tls=reader.environment.tls("LOCALAI_WORKER_TLS")[1],
        registration_token=reader.secret("registration_token"),
        allow_stock_frontend=reader.parsed("allow_stock_frontend", parse_bool, False),
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
        registries=_registries(reader, environment),
        registry_tls=reader.parsed("registry_ca", trust_besides, None),
        github_url=reader.parsed("github_url", parse_base_url, GITHUB_URL),
        models_path=reader.path("models_path", Path("models")),
        heartbeat_interval=reader.parsed("heartbeat_interval", parse_duration, 0.0) or DEFAULT_HEARTBEAT,
        labels=_labels(reader.text("node_labels")),
        max_replicas_per_model=max(
            1,
            reader.parsed("max_replicas_per_model", number_parser(int, -_ANY, _ANY, "not a whole number"), 1),
        ),
        vram_budget=reader.text("vram_budget"),
        download_rate=reader.parsed(
            "download_rate", number_parser(int, 0, _ANY, "not a whole number from 0"), 0
        ),
        log_lines=reader.parsed("log_lines", number_parser(int, 1, MOST_LINES), LINES),
        log_bytes=reader.parsed("log_bytes", number_parser(int, LEAST_BYTES, MOST_BYTES), BYTES),
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


def _registries(reader: _Reader, environment: Mapping[str, str]) -> Access:
    setting = BY_KEY["registries"]
    settings = reader.environment.parsed_secret(setting.name, parse_settings, NO_REGISTRIES, setting.hint)
    return Access(settings, reader.path("registry_config", default_config(environment)))


def _addresses(reader: _Reader) -> tuple[int, str]:
    """Return the first engine port and the advertised address."""
    _, default_port = reader.parsed("serve_addr", split_host_port, ("", 50051))
    address = reader.parsed("addr", _address, "")
    base = split_host_port(address)[1] if address else default_port
    if base < 2:
        reader.refuse("addr", "port 1 leaves no room for the probes, one below it")
    advertised = reader.parsed("advertise_addr", _address, address)
    return base, advertised or f"{local_address(reader.text('register_to'))}:{base}"


def _address(text: str) -> str:
    split_host_port(text)
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


def _max_port(text: str, base: int) -> int:
    number = number_parser(int, -_ANY, _ANY, "not a whole number")(text)
    return number if base <= number <= HIGHEST_PORT else HIGHEST_PORT


def _labels(text: str) -> dict[str, str]:
    """Parse `k=v,k=v`; parts without `=` are skipped, like in a stock worker."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
