"""The worker's settings: one table of flags and environment names, parsed into one frozen object.

A wrong value is refused with one line that names the setting and its mend; nothing is guessed.
"""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from localai_cluster.env import parse_bool, parse_duration
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

    `mend` is what to do when the value is refused.
    """

    key: str
    environment: tuple[str, ...]
    help: str
    mend: str = ""
    switch: bool = False
    secret: bool = False

    @property
    def flag(self) -> str:
        """The command-line form."""
        return "--" + self.key.replace("_", "-")


_HOST_PORT = "Give host:port, such as gpu-1.example:50051."
_SWITCH = "Use true or false."

SETTINGS = (
    Setting(
        "register_to",
        ("LOCALAI_REGISTER_TO",),
        "Base URL of the controller. Required.",
        "Give the controller's URL, such as http://controller:8080.",
    ),
    Setting(
        "nats_url",
        ("LOCALAI_NATS_URL",),
        "URL of the message bus, credentials included. Required.",
        "Give nats://user:password@host:4222.",
        secret=True,
    ),
    Setting(
        "registration_token",
        ("LOCALAI_REGISTRATION_TOKEN",),
        "Secret shared with the controller.",
        "Give the controller's token.",
        secret=True,
    ),
    Setting(
        "node_name",
        ("LOCALAI_NODE_NAME",),
        "Unique name of this node; default: the host name.",
        f"Give 1 to {NAME_LIMIT} printable characters.",
    ),
    Setting(
        "addr",
        ("LOCALAI_ADDR",),
        "host:port at which this worker is reached; the port is the first engine's.",
        _HOST_PORT,
    ),
    Setting(
        "serve_addr",
        ("LOCALAI_SERVE_ADDR",),
        "Gives the first engine's port when there is no --addr; 0.0.0.0:50051.",
        _HOST_PORT,
    ),
    Setting(
        "grpc_max_port", ("LOCALAI_GRPC_MAX_PORT",), "Highest port of an engine; 0 = 65535.", "Give a port."
    ),
    Setting(
        "advertise_addr",
        ("LOCALAI_ADVERTISE_ADDR",),
        "host:port given to the controller; default: --addr, else the host name.",
        _HOST_PORT,
    ),
    Setting(
        "find_ports",
        ("LOCALAI_WORKER_FIND_PORTS",),
        "Where the ports of --addr are occupied, take the next 100 that are free, and keep them.",
        _SWITCH,
        switch=True,
    ),
    Setting(
        "http_addr",
        ("LOCALAI_HTTP_ADDR",),
        "host:port of the probes; default: 0.0.0.0, one below the first port.",
        "Give a free host:port, such as 0.0.0.0:50050.",
    ),
    Setting(
        "advertise_http_addr",
        ("LOCALAI_ADVERTISE_HTTP_ADDR",),
        "HTTP host:port given to the controller.",
        _HOST_PORT,
    ),
    Setting("backends_path", ("LOCALAI_BACKENDS_PATH", "BACKENDS_PATH"), "Installed backends; ./backends."),
    Setting(
        "backends_system_path",
        ("LOCALAI_BACKENDS_SYSTEM_PATH",),
        "Read-only backends of the system; /var/lib/local-ai/backends.",
    ),
    Setting(
        "backend_galleries",
        ("LOCALAI_BACKEND_GALLERIES", "BACKEND_GALLERIES"),
        'JSON list of {"name", "url"}: where backends come from when a command names no gallery.',
        'Give a JSON list such as [{"name":"local","url":"file:///srv/index.yaml"}].',
    ),
    Setting("models_path", ("LOCALAI_MODELS_PATH", "MODELS_PATH"), "Staged models; ./models."),
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
        "Time between heartbeats; 10s.",
        "Give a duration such as 10s.",
    ),
    Setting("node_labels", ("LOCALAI_NODE_LABELS",), "k=v,k=v"),
    Setting(
        "max_replicas_per_model",
        ("LOCALAI_MAX_REPLICAS_PER_MODEL",),
        "Replicas of one model on this node; 1.",
        "Give a whole number.",
    ),
    Setting("vram_budget", ("LOCALAI_VRAM_BUDGET",), "80%, 12GB, 12GiB or bytes; passed on."),
    Setting(
        "download_rate",
        ("LOCALAI_WORKER_DOWNLOAD_RATE",),
        "Cap on what installs copy, in bytes per second; 0 = none.",
        "Give bytes per second as a whole number, 0 = none.",
    ),
    Setting(
        "source_roots",
        ("LOCALAI_WORKER_SOURCE_ROOTS",),
        f"Folders, separated by {os.pathsep!r}, from which backends and file:// galleries may be read; "
        "default: the backends path.",
    ),
    Setting(
        "data_dir",
        ("LOCALAI_WORKER_DATA_DIR",),
        "Holds the node's secret; default: the folder above the backends.",
    ),
    Setting(
        "capability",
        ("LOCALAI_FORCE_META_BACKEND_CAPABILITY",),
        "Capability instead of the detected one, such as nvidia-cuda-12; disable = every build fits.",
    ),
)
_BY_KEY = {setting.key: setting for setting in SETTINGS}


class InvalidSetting(ClusterError):
    """A setting is wrong; the message names it and the mend."""

    code = "invalid_setting"


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
    """The settings from `given` (by key; flags and environment already merged). InvalidSetting."""
    values = {setting.key: (given.get(setting.key) or "").strip() for setting in SETTINGS}
    for key in ("nats_url", "registration_token"):
        values[key] = values[key] or _from_file(key, environment)
    _demand(values)
    base, advertised = _addresses(values)
    http_bind = _parsed(values, "http_addr", host_port, ("0.0.0.0", base - 1))
    backends = _path(values["backends_path"] or "backends")
    roots = tuple(_path(part) for part in values["source_roots"].split(os.pathsep) if part.strip())
    return Config(
        register_to=_parsed(values, "register_to", _base_url, ""),
        nats_url=values["nats_url"],
        registration_token=values["registration_token"],
        node_name=_parsed(values, "node_name", _name, socket.gethostname() or f"node-{os.getpid()}"),
        base_port=base,
        max_port=_parsed(values, "grpc_max_port", lambda text: _max_port(text, base), HIGHEST_PORT),
        find_ports=_parsed(values, "find_ports", parse_bool, False),
        advertise_addr=advertised,
        http_bind=http_bind,
        advertise_http_addr=values["advertise_http_addr"] or f"{host_port(advertised)[0]}:{http_bind[1]}",
        backends_path=backends,
        backends_system_path=_path(values["backends_system_path"] or "/var/lib/local-ai/backends"),
        galleries=_parsed(values, "backend_galleries", decode_galleries, ()),
        models_path=_path(values["models_path"] or "models"),
        heartbeat_interval=_parsed(values, "heartbeat_interval", parse_duration, 0.0) or DEFAULT_HEARTBEAT,
        labels=_labels(values["node_labels"]),
        max_replicas_per_model=max(1, _parsed(values, "max_replicas_per_model", int, 1)),
        vram_budget=values["vram_budget"],
        download_rate=_parsed(values, "download_rate", _natural, 0),
        source_roots=roots or (backends,),
        data_dir=_path(values["data_dir"]) if values["data_dir"] else backends.parent,
        capability=values["capability"],
    )


def host_port(text: str) -> tuple[str, int]:
    """Host and port of `host:port`, an IPv6 host in brackets. ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= HIGHEST_PORT:
        raise ValueError("not host:port")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("not host:port (write an IPv6 address in brackets)")
    return host, int(port)


def refuse(key: str, reason: str) -> NoReturn:
    """Raises InvalidSetting for the setting `key`, its mend added."""
    setting = _BY_KEY[key]
    raise InvalidSetting(f"{setting.environment[0]} ({setting.flag}): {reason}. {setting.mend}")


def _demand(values: Mapping[str, str]) -> None:
    for key in ("register_to", "nats_url"):
        if not values[key]:
            refuse(key, "is not set")
    _parsed(values, "nats_url", parse_url, None)
    switches = ("registration_require_auth", "distributed_require_auth")
    required = [_parsed(values, key, parse_bool, False) for key in switches]
    if any(required) and not values["registration_token"]:
        refuse("registration_token", "is not set, but authentication is required")


def _addresses(values: Mapping[str, str]) -> tuple[int, str]:
    """The first engine port and the advertised address."""
    _, served = _parsed(values, "serve_addr", host_port, ("", 50051))
    _, base = _parsed(values, "addr", host_port, ("", served))
    if base < 2:
        refuse("addr", "port 1 leaves no room for the probes, one below it")
    for key in ("advertise_addr", "advertise_http_addr"):
        _parsed(values, key, host_port, ("", 0))
        if len(values[key]) > ADDRESS_LIMIT:
            refuse(key, f"is longer than {ADDRESS_LIMIT} characters")
    default = values["addr"] or f"{socket.gethostname() or 'localhost'}:{base}"
    return base, values["advertise_addr"] or default


def _parsed(values: Mapping[str, str], key: str, parse: Callable[[str], T], default: T) -> T:
    if not values[key]:
        return default
    try:
        return parse(values[key])
    except (ValueError, ClusterError) as error:
        shown = "the value" if _BY_KEY[key].secret else repr(values[key])
        refuse(key, f"{shown} is refused: {error}")


def _from_file(key: str, environment: Mapping[str, str]) -> str:
    name = f"{_BY_KEY[key].environment[0]}_FILE"
    path = environment.get(name, "")
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{name}: cannot read {path}: {error}. Name a readable file.") from error


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


def _natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("negative")
    return number


def _max_port(text: str, base: int) -> int:
    number = int(text)
    return number if base <= number <= HIGHEST_PORT else HIGHEST_PORT


def _labels(text: str) -> dict[str, str]:
    """`k=v,k=v`; parts without `=` are skipped, as a stock worker does."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
