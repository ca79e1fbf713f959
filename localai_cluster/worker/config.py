"""The worker's settings, declared once: environment variables, flags, meanings, defaults and their values.

`__main__.py` builds the command line from the table. Every wrong setting is reported on its own line, with
its name and the fix.
"""

import os
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, NoReturn

from localai_cluster.kit import clock, env
from localai_cluster.kit.addresses import local_address, parse_base_url, split_host_port
from localai_cluster.kit.env import Folder, Format, Pem, Problem, Secret, number, setting
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.tls import TlsFiles
from localai_cluster.messaging.messages import Gallery, decode_galleries
from localai_cluster.messaging.servers import Credentials, Servers, parse_url
from localai_cluster.registries.access import Access, default_config
from localai_cluster.worker.gpu_drivers import Simulation, simulation
from localai_cluster.worker.hardware import CAPABILITY_FILE
from localai_cluster.worker.log_rings import BYTES, LINES

HIGHEST_PORT = 65535
ADDRESS_LIMIT = 512
NAME_LIMIT = 255
MOST_LINES = 10_000
LEAST_BYTES, MOST_BYTES = 64 * 1024, 2 * 1024 * 1024
"""Bounds of the stored output of one engine; as escaped JSON it fits in what web processes accept."""
_BOTH = "Set both, or neither to have the control plane give them."


def _address(text: str) -> str:
    split_host_port(text)
    if len(text) > ADDRESS_LIMIT:
        raise ValueError(f"longer than {ADDRESS_LIMIT} characters")
    return text


def _name(text: str) -> str:
    if len(text) > NAME_LIMIT or not text.isprintable():
        raise ValueError("too long or not printable")
    return text


def _host_name() -> str:
    return socket.gethostname() or f"node-{os.getpid()}"


def _labels(text: str) -> dict[str, str]:
    """Parse `k=v,k=v`; parts without `=` are skipped, like in a stock worker."""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}


def _folders(text: str) -> tuple[Path, ...]:
    return tuple(
        Path(part.strip()).expanduser().absolute() for part in text.split(os.pathsep) if part.strip()
    )


def _base(values: env.Values) -> int:
    """Return the first port for engines (worker.md §3)."""
    return split_host_port(values["addr"] or values["serve_addr"])[1]


def _advertised(values: env.Values) -> str:
    return values["addr"] or f"{local_address(values['register_to'])}:{_base(values)}"


def _advertised_http(values: env.Values) -> str:
    return f"{split_host_port(values['advertise_addr'])[0]}:{split_host_port(values['http_addr'])[1]}"


_WHOLE = number(int, -(2**63), 2**63 - 1, "a whole number")
_SERVER = Format("the URL of the control plane, such as http://cluster.example:8080", parse_base_url)
Bus = Annotated[Servers, Format("the URL of a NATS server, such as nats://host:4222", parse_url, secret=True)]
NodeName = Annotated[str, Format(f"1 to {NAME_LIMIT} printable characters", _name)]
HostPort = Annotated[str, Format("host:port, such as gpu-1.example:50051", _address)]
FreePort = Annotated[str, Format("a free host:port, such as 0.0.0.0:50050", _address)]
Labels = Annotated[dict[str, str], Format("k=v,k=v", _labels)]
Slots = Annotated[int, Format("a whole number", lambda text: max(1, _WHOLE.parse(text)))]
Rate = Annotated[int, number(int, 0, 2**63 - 1, "bytes per second as a whole number. 0 = unlimited")]
Interval = Annotated[float, Format("a duration such as 10s", lambda text: env.parse_duration(text) or 10.0)]
Folders = Annotated[tuple[Path, ...], Format("paths", _folders)]
Names = Annotated[tuple[str, ...], Format("names", env.split_list)]
Mirror = Annotated[
    str,
    Format("the URL of a mirror", lambda text: (text if "://" in text else f"https://{text}").rstrip("/")),
]
TestGpus = Annotated[
    Simulation, Format("groups such as 2x24GiB, 1x24GiB+1x48GiB or 2x24GiB:6GiB", simulation)
]
Galleries = Annotated[
    tuple[Gallery, ...],
    Format('a JSON list such as [{"name":"local","url":"file:///srv/index.yaml"}]', decode_galleries),
]


@dataclass(frozen=True, kw_only=True)
class Config(env.SharedSettings):
    """All settings of a worker. Times in seconds, sizes in bytes; secrets are excluded from `repr`."""

    nats_url: Bus | None = setting("LOCALAI_NATS_URL", "", "from the registration")
    """URL of the message bus."""
    nats_jwt: Secret = setting("LOCALAI_NATS_JWT")
    """JWT for the message bus, in place of those that registrations bring; it is never renewed."""
    nats_user_seed: Secret = setting("LOCALAI_NATS_USER_SEED")
    """Seed of the user that --nats-jwt names."""
    register_to: Annotated[str, _SERVER] = setting("LOCALAI_REGISTER_TO", group="Control plane")
    """Base URL of the control plane. Required."""
    tls_ca: Pem = setting("LOCALAI_WORKER_TLS_CA", "", "the system's CAs")
    """CA certificates that verify an https:// control plane."""
    registration_token: Secret = setting("LOCALAI_REGISTRATION_TOKEN")
    """Secret shared with the control plane, or a join token."""
    registration_require_auth: bool = setting("LOCALAI_REGISTRATION_REQUIRE_AUTH", "false")
    """Refuse to start without a registration token."""
    nats_require_auth: bool = setting("LOCALAI_NATS_REQUIRE_AUTH", "false")
    """Wait for credentials for the message bus; never connect without."""
    distributed_require_auth: bool = setting("LOCALAI_DISTRIBUTED_REQUIRE_AUTH", "false")
    """Implies --registration-require-auth and --nats-require-auth."""
    allow_stock_frontend: bool = setting("LOCALAI_WORKER_ALLOW_STOCK_FRONTEND", "false")
    """Serve a stock LocalAI frontend also where LocalAI Cluster has accepted this worker's secret."""
    node_name: NodeName = setting("LOCALAI_NODE_NAME", lambda _: _host_name(), "the host name")
    """Unique name of this node."""
    node_labels: Labels = setting("LOCALAI_NODE_LABELS")
    """Labels of this node: k=v,k=v."""
    max_replicas_per_model: Slots = setting("LOCALAI_MAX_REPLICAS_PER_MODEL", "1")
    """Maximum replicas per model on this node."""
    vram_budget: str = setting("LOCALAI_VRAM_BUDGET")
    """VRAM to offer: 80%, 12GB, 12GiB or bytes."""
    heartbeat_interval: Interval = setting("LOCALAI_HEARTBEAT_INTERVAL", "10s")
    """Time between heartbeats."""
    addr: HostPort = setting("LOCALAI_ADDR", group="Addresses and ports")
    """host:port that reaches this worker. Its port is the first port for engines."""
    serve_addr: HostPort = setting("LOCALAI_SERVE_ADDR", "0.0.0.0:50051")
    """Where the first port for engines comes from without --addr."""
    grpc_max_port: Annotated[int, _WHOLE] = setting("LOCALAI_GRPC_MAX_PORT", "0")
    """Highest port for engines. 0 = 65535."""
    find_ports: bool = setting("LOCALAI_WORKER_FIND_PORTS", "false")
    """If the ports of --addr are in use, take the next free block of 100 and keep it."""
    advertise_addr: HostPort = setting(
        "LOCALAI_ADVERTISE_ADDR",
        _advertised,
        "--addr, else this machine's address on the way to the control plane",
    )
    """host:port to advertise to the control plane."""
    http_addr: FreePort = setting(
        "LOCALAI_HTTP_ADDR",
        lambda values: f"0.0.0.0:{_base(values) - 1}",
        "0.0.0.0, one port below the engines",
    )
    """host:port of health probes, files, logs and /metrics."""
    advertise_http_addr: HostPort = setting(
        "LOCALAI_ADVERTISE_HTTP_ADDR", _advertised_http, "from the two above"
    )
    """HTTP host:port to advertise to the control plane."""
    metrics_token: Secret = setting("LOCALAI_WORKER_METRICS_TOKEN")
    """Token with which a scraper may read /metrics there, and nothing else."""
    backends_path: Folder = setting("LOCALAI_BACKENDS_PATH", "./backends", group="Folders", short=True)
    """Folder for installed backends."""
    backends_system_path: Folder = setting("LOCALAI_BACKENDS_SYSTEM_PATH", "/var/lib/local-ai/backends")
    """Folder of read-only system backends."""
    models_path: Folder = setting("LOCALAI_MODELS_PATH", "./models", short=True)
    """Folder for staged models; `staging` and `data` beside it hold files of requests."""
    data_dir: Folder = setting(
        "LOCALAI_WORKER_DATA_DIR",
        lambda values: str(values["backends_path"].parent),
        "the folder above the backends",
    )
    """Folder for the node's secret and the list of servers that have accepted it."""
    source_roots: Folders = setting(
        "LOCALAI_WORKER_SOURCE_ROOTS", lambda values: str(values["backends_path"]), "the backends path"
    )
    """Folders that backends and file:// galleries may be read from, separated as in PATH."""
    backend_galleries: Galleries = setting(
        "LOCALAI_BACKEND_GALLERIES", group="Backends and engines", short=True
    )
    """JSON list of {"name", "url"}: the galleries for commands that name none."""
    galleries: Galleries = setting("LOCALAI_GALLERIES", short=True)
    """JSON list of {"name", "url"}: the galleries of models for --prefetch-models."""
    prefetch_models: Names = setting("LOCALAI_PREFETCH_MODELS", short=True)
    """Models of the galleries, separated by commas, whose files are fetched before the registration."""
    hugging_face_url: Mirror = setting("HF_MIRROR", "https://huggingface.co", others=("HF", "HF_ENDPOINT"))
    """Base URL of the files that `huggingface://` and `hf://` addresses name; it may be a mirror."""
    download_rate: Rate = setting("LOCALAI_WORKER_DOWNLOAD_RATE", "0")
    """Bandwidth limit of downloads, in bytes per second. 0 = unlimited."""
    require_backend_integrity: bool = setting("LOCALAI_REQUIRE_BACKEND_INTEGRITY", "false", short=True)
    """Refuse archives without a hash in their gallery, and images that no digest names."""
    capability: str = setting("LOCALAI_FORCE_META_BACKEND_CAPABILITY", "", "detected")
    """Capability that selects builds, such as nvidia-cuda-12. disable = every build fits."""
    capability_file: Folder = setting("LOCALAI_FORCE_META_BACKEND_CAPABILITY_RUN_FILE", str(CAPABILITY_FILE))
    """File whose content is the capability, if it exists."""
    log_lines: Annotated[int, number(int, 1, MOST_LINES)] = setting("LOCALAI_WORKER_LOG_LINES", str(LINES))
    """Lines of output kept of each engine."""
    log_bytes: Annotated[int, number(int, LEAST_BYTES, MOST_BYTES)] = setting(
        "LOCALAI_WORKER_LOG_BYTES", str(BYTES)
    )
    """Bytes of output kept of each engine that runs, and of the last 32 that have ended."""
    test_gpus: TestGpus | None = setting("LOCALAI_TEST_GPUS")
    """For tests: report GPUs that do not exist, and after a colon what each engine takes of them."""

    storage_url: Secret = setting("LOCALAI_STORAGE_URL", group="Without effect")
    """Object store. Files come over HTTP, never through an object store."""
    storage_bucket: str = setting("LOCALAI_STORAGE_BUCKET")
    """Bucket in the object store."""
    storage_region: str = setting("LOCALAI_STORAGE_REGION")
    """Region of the object store."""
    storage_access_key: Secret = setting("LOCALAI_STORAGE_ACCESS_KEY")
    """Access key of the object store."""
    storage_secret_key: Secret = setting("LOCALAI_STORAGE_SECRET_KEY")
    """Secret key of the object store."""

    @property
    def without_effect(self) -> list[str]:
        """Variables that are set and that this worker does not use, for a warning."""
        entries = (entry for entry in SETTINGS if entry.group == "Without effect")
        return [entry.names[0] for entry in entries if getattr(self, entry.key)]

    @property
    def all_galleries(self) -> tuple[Gallery, ...]:
        """The galleries of backends, and those of models if models are prefetched."""
        return (*self.backend_galleries, *(self.galleries if self.prefetch_models else ()))

    @property
    def advertise_host(self) -> str:
        """Host part of the advertised address, with the brackets of an IPv6 address."""
        return split_host_port(self.advertise_addr)[0]

    @property
    def base_port(self) -> int:
        """The first port for engines."""
        return _base(vars(self))

    @property
    def max_port(self) -> int:
        """The last port for engines."""
        return self.grpc_max_port if self.base_port <= self.grpc_max_port <= HIGHEST_PORT else HIGHEST_PORT

    @property
    def http_bind(self) -> tuple[str, int]:
        """Host and port of the worker's own HTTP server."""
        return split_host_port(self.http_addr)

    @cached_property
    def nats(self) -> Servers | None:
        """The configured bus; None if the control plane provides its address."""
        if self.nats_url is None or not (self.nats_jwt and self.nats_user_seed):
            return self.nats_url
        return replace(self.nats_url, credentials=Credentials.of(self.nats_jwt, self.nats_user_seed))

    @property
    def registry_access(self) -> Access:
        """How to reach each registry."""
        return Access(self.registries, self.registry_config or default_config())

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """Verifies the control plane; None for the system's CAs."""
        return TlsFiles(self.tls_ca).client(clock.now()) if self.tls_ca else None

    def problems(self) -> Iterator[Problem]:
        """Return what is missing, and what is wrong with the combination of the settings."""
        if not self.register_to:
            yield Problem("LOCALAI_REGISTER_TO", "is not set", f"Use {_SERVER.fix}.")
        required = self.registration_require_auth or self.distributed_require_auth
        if required and not self.registration_token:
            reason = "is not set, but authentication is required"
            yield Problem("LOCALAI_REGISTRATION_TOKEN", reason, "Use the token of the control plane.")
        if self.base_port < 2:
            reason = "port 1 leaves no room for the probes, one below it"
            yield Problem("LOCALAI_ADDR", reason, "Use host:port, such as gpu-1.example:50051.")
        if bool(self.nats_jwt) != bool(self.nats_user_seed):
            missing = "LOCALAI_NATS_USER_SEED" if self.nats_jwt else "LOCALAI_NATS_JWT"
            yield Problem(missing, "is not set", _BOTH)
        elif self.nats_jwt and not self.nats_url:
            yield Problem(
                "LOCALAI_NATS_URL", "is not set, but credentials for it are", "Use nats://host:4222."
            )
        try:
            _ = self.nats
        except ValueError as error:
            yield Problem("LOCALAI_NATS_JWT", f"cannot be used: {error}", _BOTH)
        yield from super().problems()
        yield from env.tls_problems("LOCALAI_WORKER_TLS", lambda: self.tls)


SETTINGS = env.declared(Config)


def flag(entry: env.Setting) -> str:
    """Return the command-line flag of a setting."""
    return "--" + entry.key.replace("_", "-")


class InvalidSettings(ClusterError):
    """Settings are wrong; the message has one line for each, with its name and how to fix it."""

    code = "invalid_settings"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(_line(problem) for problem in problems))


def _line(problem: Problem) -> str:
    own_flag = next((f" ({flag(entry)})" for entry in SETTINGS if problem.setting in entry.names), "")
    return f"{problem.setting}{own_flag}: {problem.message}. {problem.hint}"


def build(flags: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> Config:
    """Read the settings from flags (by field) and variables. Raise InvalidSettings."""
    reader = env.Environment(environment)
    config = reader.read(Config, flags)
    if reader.problems:
        raise InvalidSettings(reader.problems)
    return config


def refuse(key: str, reason: str) -> NoReturn:
    """Raise InvalidSettings for a value that proved wrong when it was used."""
    entry = next(entry for entry in SETTINGS if entry.key == key)
    raise InvalidSettings([Problem(entry.names[0], reason, f"Use {entry.format.fix}.")])
