"""The settings of the server processes, declared once: `conf.cluster().model_load_wait`.

`load` reads all of them, in `settings.py`. `docs/configuration.md` explains each variable.
"""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings

from localai_cluster.kit import addresses, env
from localai_cluster.kit.registry_settings import HINT, NO_REGISTRIES, RegistrySetting, parse_settings
from localai_cluster.kit.tls import TlsFiles, trust_besides

_ROOT = Path(__file__).resolve().parents[2]
MOST_PRESSURE = 100
"""Highest prefix pressure that a web process reports for a model, and so the highest valid threshold."""
_PORT = env.number_parser(int, 1, 65535, "not a port between 1 and 65535")
_COUNT = env.number_parser(int, 1, 2**31 - 1, "not a whole number from 1")
_SPACE = env.number_parser(float, 0.01, 10_000)
_GALLERIES_WANTED = 'not a JSON list of {"name": …, "url": …}'
_GALLERIES = env.json_parser(list[dict[str, Any]], _GALLERIES_WANTED)
_HOSTS = env.json_parser(dict[str, list[Any]], 'not a JSON object such as {"gpu-1": ["10.0.0.5"]}')


def _listener(text: str) -> addresses.Address:
    try:
        return addresses.parse(text)
    except ValueError:
        raise ValueError("not an address such as 127.0.0.1:9101") from None


def _gibibytes(text: str) -> int:
    return int(_SPACE(text) * 2**30)


def _galleries(text: str) -> list[dict[str, Any]]:
    """Parse a JSON list of objects with `name` and `url` (`contract/nats.md` §4.1)."""
    galleries = _GALLERIES(text) if text.strip() else []
    if not all(gallery.get("url") for gallery in galleries):
        raise ValueError(_GALLERIES_WANTED)
    return galleries


def parse_node_hosts(text: str) -> dict[str, frozenset[str]]:
    """Parse a JSON object of lists: further hosts by a node's name; raise ValueError."""
    return {name: frozenset(_host(host, name) for host in hosts) for name, hosts in _HOSTS(text).items()}


def _host(value: Any, node: str) -> str:
    try:
        return addresses.host(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError(f"wrong at {node!r}: {value!r} is neither a host name nor an IP address") from None


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The table of the server processes' settings; times in seconds."""

    data_dir: Path = env.folder("CLUSTER_DATA_DIR", lambda _: Path("data"))
    models_path: Path = env.folder("LOCALAI_MODELS_PATH", lambda values: values["data_dir"] / "models")
    host: str = env.text("HOST", "127.0.0.1")
    server: str = env.choice("CLUSTER_SERVER", "uvicorn", "daphne")
    port: int = env.parsed("PORT", _PORT, 8080, "Use a port between 1 and 65535.")
    public_url: str = env.parsed(
        "CLUSTER_PUBLIC_URL", env.parse_base_url, "", "Use a URL such as http://192.0.2.10:8080."
    )
    """Base URL under which other machines reach the web server; "" if the operator set none."""
    wheel_dir: Path = env.folder("CLUSTER_WHEEL_DIR", lambda _: _ROOT / "dist")
    """Folder with the package that joining machines install."""
    database_url: str = env.secret("DATABASE_URL")
    redis_url: str = env.secret("REDIS_URL")
    nats_url: str = env.secret("LOCALAI_NATS_URL")
    nats_account_seed: str = env.seed("LOCALAI_NATS_ACCOUNT_SEED", "account")
    """The account key of the bus: it mints the credentials of nodes and of our own processes."""
    nats_operator_seed: str = env.seed("CLUSTER_NATS_OPERATOR_SEED", "operator")
    """Together with `nats_system_seed`, lets the cluster revoke credentials at once; without, they expire."""
    nats_system_seed: str = env.seed("CLUSTER_NATS_SYSTEM_SEED", "account")
    """The key of the bus's system account."""
    nats_service_jwt: str = env.secret("LOCALAI_NATS_SERVICE_JWT")
    nats_service_seed: str = env.seed("LOCALAI_NATS_SERVICE_SEED", "user")
    """Credentials of the server processes; without them they mint their own."""
    nats_worker_jwt_ttl: float = env.seconds("LOCALAI_NATS_WORKER_JWT_TTL", 86400.0, 10.0)
    worker_nats_url: str = env.text("CLUSTER_WORKER_NATS_URL")
    """URL under which workers reach NATS."""
    nats_tls: ssl.SSLContext | None = env.setting(
        *(f"LOCALAI_NATS_TLS_{part}" for part in ("CA", "CERT", "KEY")),
        read=lambda values, _: values.tls("LOCALAI_NATS_TLS")[1],
    )
    """TLS context of the connections to NATS; with it, an unencrypted connection is refused."""
    web_tls: TlsFiles = env.setting(
        "CLUSTER_TLS_CERT",
        "CLUSTER_TLS_KEY",
        read=lambda values, _: values.tls("CLUSTER_TLS", serves=True)[0],
    )
    """Certificate and key with which the web process serves HTTPS; none = HTTP."""
    require_auth: bool = env.switch(
        "LOCALAI_DISTRIBUTED_REQUIRE_AUTH", "LOCALAI_NATS_REQUIRE_AUTH", default=True
    )
    """The reference's switch. We always require authentication and report a false value (cluster.W003)."""
    registration_token: str = env.secret("LOCALAI_REGISTRATION_TOKEN")
    api_keys: tuple[str, ...] = env.secrets("LOCALAI_API_KEY")
    """The administrator's fixed keys."""
    metrics_token: str = env.secret("LOCALAI_METRICS_TOKEN")
    """Token with which a scraper may read the metrics of every server process, and nothing else."""
    controller_metrics: addresses.Address | None = env.parsed(
        "CLUSTER_CONTROLLER_METRICS_ADDRESS", _listener, None, "Use host:port, such as 127.0.0.1:9101."
    )
    tasks_metrics: addresses.Address | None = env.parsed(
        "CLUSTER_TASKS_METRICS_ADDRESS", _listener, None, "Use host:port, such as 127.0.0.1:9102."
    )
    """Addresses on which controllers and tasks serve their metrics; None: they do not."""
    auto_approve_nodes: bool = env.switch("LOCALAI_AUTO_APPROVE_NODES")
    allow_shared_token_nodes: bool = env.switch("LOCALAI_ALLOW_SHARED_TOKEN_NODES")
    expose_node_header: bool = env.switch("LOCALAI_EXPOSE_NODE_HEADER")
    vram_policy: str = env.choice("LOCALAI_VRAM_POLICY", "prefer", "require")
    """`prefer` lets a load go to a node with too little free VRAM; `require` does not (R2.32)."""
    disk_headroom_check: bool = env.switch("LOCALAI_DISTRIBUTED_DISK_HEADROOM_CHECK", default=True)
    """True if a node with too little free disk space is refused (R2.39)."""
    shared_models: bool = env.switch("LOCALAI_DISTRIBUTED_SHARED_MODELS")
    """True if every worker has the models folder under the same path, so that no file is sent (R2.56)."""
    node_options: bool = env.switch("CLUSTER_NODE_OPTIONS", default=True)
    """True if some load options are derived from the node's memory and GPU (R2.80)."""
    node_hosts: Mapping[str, frozenset[str]] = env.parsed(
        "CLUSTER_NODE_HOSTS",
        parse_node_hosts,
        {},
        'Use a JSON object: {"gpu-1": ["10.0.0.5", "gpu-1.lan"]}, hosts without ports.',
    )
    """Hosts that a node's addresses may have besides the one it registers, by the node's name."""
    prefix_cache: bool = env.switch("LOCALAI_DISTRIBUTED_PREFIX_CACHE", default=True)
    """True if text requests are routed by prompt prefix, unless the model's rule overrides it (R3.1)."""
    prefix_match: float = env.number("CLUSTER_PREFIX_MATCH", 0.3, 0, 1)
    """C41: least cached prefix ratio of a prompt, 0 to 1, at which a replica is preferred."""
    prefix_balance_abs: int = env.number("CLUSTER_PREFIX_BALANCE_ABS", 2, 0, 1_000_000)
    prefix_balance_rel: float = env.number("CLUSTER_PREFIX_BALANCE_REL", 1.5, 1, 1_000_000)
    """C42: highest load of a preferred replica relative to the idlest one: requests more, times as many."""
    prefix_pressure: int = env.number("CLUSTER_PREFIX_PRESSURE", 20, 0, MOST_PRESSURE)
    """C44: requests a minute diverted from a preferred replica that cause a scale-up; 0 means 1."""
    galleries: list[dict[str, Any]] = env.parsed(
        "LOCALAI_BACKEND_GALLERIES", _galleries, [], 'Use a JSON list: [{"name": …, "url": …}].'
    )
    registries: tuple[RegistrySetting, ...] = env.setting(
        "LOCALAI_REGISTRIES",
        read=lambda values, _: values.parsed_secret(
            "LOCALAI_REGISTRIES", parse_settings, NO_REGISTRIES, HINT
        ),
        default=(),
        secret=True,
    )
    """Registries whose images the upgrade check compares."""
    registry_config: Path | None = env.folder("LOCALAI_REGISTRY_CONFIG", lambda _: None)
    """A `config.json` with credentials of registries, as Docker writes it."""
    registry_tls: ssl.SSLContext | None = env.parsed(
        "LOCALAI_REGISTRY_CA", trust_besides, None, "Name a readable PEM file."
    )
    """Verifies registries and galleries; None for the usual CAs."""
    github_url: str = env.parsed(
        "LOCALAI_GITHUB_URL",
        env.parse_base_url,
        "https://raw.githubusercontent.com",
        "Use the URL of a mirror, such as https://mirror.example/raw.",
    )
    """Base of the files that `github:` addresses name."""
    gallery_dir: Path | None = env.folder("CLUSTER_GALLERY_DIR", lambda _: None)
    """The folder of the gallery that we serve to our workers: `cluster:` URLs."""
    model_load_wait: float = env.seconds("LOCALAI_MODEL_LOAD_WAIT", 60.0, 0.0)
    """Longest wait of a request for a running load (C32); 0 = without limit."""
    ollama_load_wait: float = env.seconds("CLUSTER_OLLAMA_LOAD_WAIT", 300.0, 0.0)
    """The same on Ollama's routes, whose clients do not repeat a refused request; 0 = without limit."""
    install_timeout: float = env.seconds("LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT", 900.0)
    """Reply limit of `backend.install` (C21)."""
    upgrade_timeout: float = env.seconds("LOCALAI_NATS_BACKEND_UPGRADE_TIMEOUT", 900.0)
    """Reply limit of `backend.upgrade` (C22)."""
    install_wait: float = env.seconds("CLUSTER_INSTALL_WAIT", 900.0)
    """Longest wait of an install, upgrade or deletion for an offline node before it fails."""
    model_load_timeout: float = env.seconds("LOCALAI_NATS_MODEL_LOAD_TIMEOUT", 0.0, 0.0)
    """Limit of one gRPC LoadModel; 0 = by the size of the model's files (C28)."""
    load_failure_grace: float = env.seconds("CLUSTER_LOAD_FAILURE_GRACE", 15.0, 0.0)
    """Time during which requests get the error of a failed load before the load is retried (C33)."""
    node_stale_after: float = env.seconds("CLUSTER_NODE_STALE_AFTER", 60.0)
    """Silence after which a node is offline (C15)."""
    mass_silence_hold: float = env.seconds("LOCALAI_MASS_SILENCE_HOLD", 300.0, 0.0)
    """Longest mass-disruption hold before nodes that fell silent together become offline; 0 = no hold."""
    web_stale_after: float = env.seconds("CLUSTER_WEB_STALE_AFTER", 15.0)
    """Silence after which a web process is dead and its in-flight counts are dropped."""
    failed_tokens: int = env.parsed(
        "CLUSTER_FAILED_TOKENS", _COUNT, 30, "Use a whole number such as 30, or 3000 behind a proxy."
    )
    """Failed registration tokens and node secrets allowed per address and minute, and as many API keys."""
    pending_nodes: int = env.parsed("CLUSTER_PENDING_NODES", _COUNT, 500, "Use a whole number such as 500.")
    """Nodes that may await approval before further ones are refused, unless they come with a join token."""
    pending_nodes_per_address: int = env.parsed(
        "CLUSTER_PENDING_NODES_PER_ADDRESS",
        _COUNT,
        100,
        "Use a whole number such as 100, or 500 behind a proxy.",
    )
    """Nodes from one address that may await approval before further ones are refused."""
    drain_deadline: float = env.seconds("CLUSTER_DRAIN_DEADLINE", 3600.0)
    """Longest time that a node drained by an admin keeps replicas with running requests."""
    unload_grace: float = env.seconds("CLUSTER_UNLOAD_GRACE", 30.0, 0.0)
    """Time that running requests get before an unloaded replica's engine is stopped."""
    auto_upgrade_backends: bool = env.switch("LOCALAI_AUTO_UPGRADE_BACKENDS")
    """True if controllers upgrade backends when a check has found a newer version (O103)."""
    upgrade_drain: float = env.seconds("CLUSTER_UPGRADE_DRAIN", 120.0, 0.0)
    """Time that an upgrade in waves gives running requests before it stops a node's engines."""
    event_retention: float = env.seconds("CLUSTER_EVENT_RETENTION", 30 * 86400.0, 3600.0)
    """Retention of the timelines of nodes, including deregistered ones."""
    snapshot_retention: float = env.seconds("CLUSTER_SNAPSHOT_RETENTION", 2 * 86400.0, 7200.0)
    """Retention of the snapshots of placement decisions, from which a decision can be replayed."""
    decision_space: int = env.parsed(
        "CLUSTER_DECISION_SPACE", _gibibytes, 2 * 2**30, "Use a number such as 2."
    )
    """Bytes that the records of placement decisions may take; their snapshots may take as many again."""
    operation_retention: float = env.seconds("CLUSTER_OPERATION_RETENTION", 90 * 86400.0, 3600.0)
    operation_lease: float = env.seconds("CLUSTER_OPERATION_LEASE", 10.0)
    """Lease of a claimed operation: time until it expires unless the controller renews it."""
    request_timeout: float = env.seconds("CLUSTER_REQUEST_TIMEOUT", 600.0)
    """Limit of one inference call to a backend process; for a streamed response, until its first chunk."""
    prefix_ttl: float = env.seconds("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", 300.0)
    """C43: lifetime of the record that a replica has processed a prefix."""
    stream_stall: float = env.seconds("CLUSTER_STREAM_STALL", 120.0)
    """Longest gap between two chunks of a stream, and longest stall of a client that does not read."""


def load(values: Mapping[str, str] = os.environ) -> tuple[ClusterSettings, env.Environment]:
    """Read every setting; return them with the environment that has collected the problems."""
    environment = env.Environment(values)
    cluster_ = env.read_table(ClusterSettings, environment)
    if not cluster_.gallery_dir and any(str(g["url"]).startswith("cluster:") for g in cluster_.galleries):
        environment.refuse(
            "LOCALAI_BACKEND_GALLERIES",
            "has a cluster: URL, but CLUSTER_GALLERY_DIR is not set",
            "Set CLUSTER_GALLERY_DIR to the folder of that gallery.",
        )
    return cluster_, environment


def cluster() -> ClusterSettings:
    """Return the settings of this process."""
    current: ClusterSettings = settings.CLUSTER
    return current
