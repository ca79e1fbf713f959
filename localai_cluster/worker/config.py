"""The worker's settings: one table of flags and environment names, read into one frozen object.

`localai_cluster.env` reads them, as it does for the server processes. Every wrong setting is reported, one
line each, with its name and how to fix it. Nothing is guessed.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from localai_cluster.env import Environment, Problem, parse_bool, parse_duration
from localai_cluster.errors import ClusterError
from localai_cluster.messaging.codec import decode_galleries
from localai_cluster.messaging.messages import Gallery
from localai_cluster.messaging.nats import parse_url

T = TypeVar("T")

DEFAULT_HEARTBEAT = 10.0
HIGHEST_PORT = 65535
NAME_LIMIT = 255
ADDRESS_LIMIT = 512


@dataclass(frozen=True)
class Setting:
    """One setting: the flag is `--` plus the key in kebab case; the first environment name found wins.

    `hint` says how to fix a wrong value.
    """

    key: str
    environment: tuple[str, ...]
    help: str
    hint: str = ""
    switch: bool = False

    @property
    def name(self) -> str:
        """The environment variable that messages name."""
        return self.environment[0]

    @property
    def flag(self) -> str:
        """The command-line form."""
        return "--" + self.key.replace("_", "-")


_HOST_PORT = "Use host:port, such as gpu-1.example:50051."
_SWITCH = "Use true or false."

SETTINGS = (
    Setting(
        "register_to",
        ("LOCALAI_REGISTER_TO",),
        "Base URL of the control plane. Required.",
        "Use the URL of the control plane, such as http://cluster.example:8080.",
    ),
    Setting(
        "nats_url",
        ("LOCALAI_NATS_URL",),
        "URL of the message bus, credentials included. Required.",
        "Use nats://user:password@host:4222.",
    ),
    Setting(
        "registration_token",
        ("LOCALAI_REGISTRATION_TOKEN",),
        "Secret shared with the control plane.",
        "Use the token of the control plane.",
    ),
    Setting(
        "node_name",
        ("LOCALAI_NODE_NAME",),
        "Unique name of this node. Default: the host name.",
        f"Use 1 to {NAME_LIMIT} printable characters.",
    ),
    Setting(
        "addr",
        ("LOCALAI_ADDR",),
        "host:port that reaches this worker. Its port is the first port for engines.",
        _HOST_PORT,
    ),
    Setting(
        "serve_addr",
        ("LOCALAI_SERVE_ADDR",),
        "Where the first port for engines comes from without --addr. Default: 0.0.0.0:50051.",
        _HOST_PORT,
    ),
    Setting(
        "grpc_max_port", ("LOCALAI_GRPC_MAX_PORT",), "Highest port for engines. 0 = 65535.", "Use a port."
    ),
    Setting(
        "advertise_addr",
        ("LOCALAI_ADVERTISE_ADDR",),
        "host:port to advertise to the control plane. Default: --addr, else the host name.",
        _HOST_PORT,
    ),
    Setting(
        "find_ports",
        ("LOCALAI_WORKER_FIND_PORTS",),
        "If the ports of --addr are in use, take the next free block of 100 and keep it.",
        _SWITCH,
        switch=True,
    ),
    Setting(
        "http_addr",
        ("LOCALAI_HTTP_ADDR",),
        "host:port of the health probes. Default: 0.0.0.0, one port below the engines.",
        "Use a free host:port, such as 0.0.0.0:50050.",
    ),
    Setting(
        "advertise_http_addr",
        ("LOCALAI_ADVERTISE_HTTP_ADDR",),
        "HTTP host:port to advertise to the control plane.",
        _HOST_PORT,
    ),
    Setting(
        "backends_path",
        ("LOCALAI_BACKENDS_PATH", "BACKENDS_PATH"),
        "Folder for installed backends. Default: ./backends.",
    ),
    Setting(
        "backends_system_path",
        ("LOCALAI_BACKENDS_SYSTEM_PATH",),
        "Folder of read-only system backends. Default: /var/lib/local-ai/backends.",
    ),
    Setting(
        "backend_galleries",
        ("LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES"),
        'JSON list of {"name", "url"}: the galleries for commands that name none.',
        'Use a JSON list such as [{"name":"local","url":"file:///srv/index.yaml"}].',
    ),
    Setting(
        "models_path", ("LOCALAI_MODELS_PATH", "MODELS_PATH"), "Folder for staged models. Default: ./models."
    ),
    Setting(
        "registration_require_auth",
        ("LOCALAI_REGISTRATION_REQUIRE_AUTH",),
        "Refuse to start without a registration token.",
        _SWITCH,
        switch=True,
    ),
    Setting(
        "distributed_require_auth",
        ("LOCALAI_DISTRIBUTED_REQUIRE_AUTH",),
        "Implies --registration-require-auth.",
        _SWITCH,
        switch=True,
    ),
    Setting(
        "heartbeat_interval",
        ("LOCALAI_HEARTBEAT_INTERVAL",),
        "Time between heartbeats. Default: 10s.",
        "Use a duration such as 10s.",
    ),
    Setting("node_labels", ("LOCALAI_NODE_LABELS",), "Labels of this node: k=v,k=v."),
    Setting(
        "max_replicas_per_model",
        ("LOCALAI_MAX_REPLICAS_PER_MODEL",),
        "Maximum replicas per model on this node. Default: 1.",
        "Use a whole number.",
    ),
    Setting("vram_budget", ("LOCALAI_VRAM_BUDGET",), "VRAM to offer: 80%, 12GB, 12GiB or bytes."),
    Setting(
        "download_rate",
        ("LOCALAI_WORKER_DOWNLOAD_RATE",),
        "Bandwidth limit of installs, in bytes per second. 0 = unlimited.",
        "Use bytes per second as a whole number. 0 = unlimited.",
    ),
    Setting(
        "source_roots",
        ("LOCALAI_WORKER_SOURCE_ROOTS",),
        f"Folders that backends and file:// galleries may be read from, separated by {os.pathsep!r}. "
        "Default: the backends path.",
    ),
    Setting(
        "data_dir",
        ("LOCALAI_WORKER_DATA_DIR",),
        "Folder for the node's secret. Default: the folder above the backends.",
    ),
    Setting(
        "capability",
        ("LOCALAI_FORCE_META_BACKEND_CAPABILITY",),
        "Overrides the detected capability, such as nvidia-cuda-12. disable = every build fits.",
    ),
)
_BY_KEY = {setting.key: setting for setting in SETTINGS}
_BY_NAME = {setting.name: setting for setting in SETTINGS}


class InvalidSettings(ClusterError):
    """Settings are wrong; the message has one line for each, with its name and how to fix it."""

    code = "invalid_settings"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(_line(problem) for problem in problems))


def _line(problem: Problem) -> str:
    setting = _BY_NAME.get(problem.setting)
    flag = f" ({setting.flag})" if setting else ""
    return f"{problem.setting}{flag}: {problem.message}. {problem.hint}"


@dataclass(frozen=True)
class Config:
    """Everything the worker was told. Times in seconds, sizes in bytes; secrets stay out of `repr`."""

    register_to: str
    nats_url: str = field(repr=False)
    registration_token: str = field(repr=False)
    node_name: str
    base_port: int
    max_port: int
    find_ports: bool
    advertise_addr: str
    http_bind: tuple[str, int]
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
    source_roots: tuple[Path, ...]
    data_dir: Path
    capability: str

    @property
    def advertise_host(self) -> str:
        """The host part of the advertised address, brackets of an IPv6 address included."""
        return host_port(self.advertise_addr)[0]


def build(given: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> Config:
    """The settings from `given` (by key, flags and environment merged). InvalidSettings.

    `environment` is where the `…_FILE` forms of secrets come from.
    """
    merged = {setting.name: (given.get(setting.key) or "").strip() for setting in SETTINGS}
    read = _Reader(Environment({**environment, **merged}))
    base, advertised = _addresses(read)
    http_bind = read.parsed("http_addr", host_port, ("0.0.0.0", base - 1))
    http_host, _ = host_port(advertised)
    backends = read.path("backends_path", Path("backends"))
    roots = tuple(_path(part) for part in read.text("source_roots").split(os.pathsep) if part.strip())
    config = Config(
        register_to=read.parsed("register_to", _base_url, ""),
        nats_url=_nats_url(read),
        registration_token=read.secret("registration_token"),
        node_name=read.parsed("node_name", _name, socket.gethostname() or f"node-{os.getpid()}"),
        base_port=base,
        max_port=read.parsed("grpc_max_port", lambda text: _max_port(text, base), HIGHEST_PORT),
        find_ports=read.parsed("find_ports", parse_bool, False),
        advertise_addr=advertised,
        http_bind=http_bind,
        advertise_http_addr=read.parsed("advertise_http_addr", _address, f"{http_host}:{http_bind[1]}"),
        backends_path=backends,
        backends_system_path=read.path("backends_system_path", Path("/var/lib/local-ai/backends")),
        galleries=read.parsed("backend_galleries", _galleries, ()),
        models_path=read.path("models_path", Path("models")),
        heartbeat_interval=read.parsed("heartbeat_interval", parse_duration, 0.0) or DEFAULT_HEARTBEAT,
        labels=_labels(read.text("node_labels")),
        max_replicas_per_model=max(1, read.parsed("max_replicas_per_model", _integer, 1)),
        vram_budget=read.text("vram_budget"),
        download_rate=read.parsed("download_rate", _natural, 0),
        source_roots=roots or (backends,),
        data_dir=read.path("data_dir", backends.parent),
        capability=read.text("capability"),
    )
    _require_what_is_needed(read, config)
    if read.problems:
        raise InvalidSettings(read.problems)
    return config


class _Reader:
    """The shared reader, asked by a setting's key; hints come from the table."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.problems = environment.problems

    def text(self, key: str) -> str:
        return self._environment.text(_BY_KEY[key].name)

    def secret(self, key: str) -> str:
        return self._environment.secret(_BY_KEY[key].name)

    def path(self, key: str, default: Path) -> Path:
        return _path(self.text(key)) if self.text(key) else default.absolute()

    def parsed(self, key: str, parse: Callable[[str], T], default: T) -> T:
        setting = _BY_KEY[key]
        return self._environment.parsed(setting.name, parse, default, setting.hint)

    def refuse(self, key: str, message: str) -> None:
        setting = _BY_KEY[key]
        self._environment.refuse(setting.name, message, setting.hint)


def host_port(text: str) -> tuple[str, int]:
    """Host and port of `host:port`, an IPv6 host in brackets. ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= HIGHEST_PORT:
        raise ValueError("not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("not host:port (write an IPv6 address in brackets)")
    return host, int(port)


def refuse(key: str, reason: str) -> NoReturn:
    """Raises InvalidSettings for a value that proved wrong later, when it was used."""
    setting = _BY_KEY[key]
    raise InvalidSettings([Problem(setting.name, reason, setting.hint)])


def _require_what_is_needed(read: _Reader, config: Config) -> None:
    if not read.text("register_to"):
        read.refuse("register_to", "is not set")
    switches = ("registration_require_auth", "distributed_require_auth")
    required = [read.parsed(key, parse_bool, False) for key in switches]
    if any(required) and not config.registration_token:
        read.refuse("registration_token", "is not set, but authentication is required")


def _nats_url(read: _Reader) -> str:
    url = read.secret("nats_url")
    if not url:
        read.refuse("nats_url", "is not set")
        return ""
    try:
        parse_url(url)
    except (ValueError, ClusterError):
        # Neither the value nor the parser's own words, which may quote it: it holds a password.
        read.refuse("nats_url", "is not the URL of a NATS server")
    return url


def _addresses(read: _Reader) -> tuple[int, str]:
    """The first engine port and the advertised address."""
    _, served = read.parsed("serve_addr", host_port, ("", 50051))
    own = read.parsed("addr", _address, "")
    base = host_port(own)[1] if own else served
    if base < 2:
        read.refuse("addr", "port 1 leaves no room for the probes, one below it")
    default = own or f"{socket.gethostname() or 'localhost'}:{base}"
    return base, read.parsed("advertise_addr", _address, default)


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


def _natural(text: str) -> int:
    number = _integer(text)
    if number < 0:
        raise ValueError("negative")
    return number


def _max_port(text: str, base: int) -> int:
    number = _integer(text)
    return number if base <= number <= HIGHEST_PORT else HIGHEST_PORT


def _labels(text: str) -> dict[str, str]:
    """`k=v,k=v`; parts without `=` are skipped, as a stock worker does."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
