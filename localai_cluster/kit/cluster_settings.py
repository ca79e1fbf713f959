"""The settings of the server processes: the name, type, default and hint of each.

`load` reads all of them once through `env.Environment`, in `settings.py`; the rest of the product uses
`conf.cluster()`. The parsers here are for values that only these settings have.
"""

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localai_cluster.kit import addresses
from localai_cluster.kit.env import Environment, parse_base_url, parse_count, parse_port
from localai_cluster.kit.tls import TlsFiles

_ROOT = Path(__file__).resolve().parents[2]
MOST_PRESSURE = 100
"""Highest prefix pressure that a web process reports for a model, and so the highest valid threshold."""
SERVERS = ("uvicorn", "daphne")
VRAM_POLICIES = ("prefer", "require")
"""The first of each is the default."""
REQUIRE_AUTH = ("LOCALAI_DISTRIBUTED_REQUIRE_AUTH", "LOCALAI_NATS_REQUIRE_AUTH")


def parse_listener(text: str) -> addresses.Address:
    """Parse the address that a process listens on; raise ValueError."""
    try:
        return addresses.parse(text)
    except ValueError:
        raise ValueError("not an address such as 127.0.0.1:9101") from None


def parse_galleries(text: str) -> list[dict[str, Any]]:
    """Parse a JSON list of objects with `name` and `url` (`contract/nats.md` §4.1); raise ValueError."""
    try:
        value = json.loads(text) if text.strip() else []
    except json.JSONDecodeError:
        raise ValueError("not JSON") from None
    if not isinstance(value, list) or not all(isinstance(g, dict) and g.get("url") for g in value):
        raise ValueError('not a JSON list of {"name": …, "url": …}')
    return value


def parse_node_hosts(text: str) -> dict[str, frozenset[str]]:
    """Parse a JSON object of lists: further hosts by a node's name; raise ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(value, dict) or not all(isinstance(hosts, list) for hosts in value.values()):
        raise ValueError('not a JSON object such as {"gpu-1": ["10.0.0.5"]}')
    return {name: frozenset(_host(host, name) for host in hosts) for name, hosts in value.items()}


def _host(value: Any, node: str) -> str:
    try:
        return addresses.host(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError(f"wrong at {node!r}: {value!r} is neither a host name nor an IP address") from None


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of the server processes; times in seconds."""

    data_dir: Path
    models_path: Path
    host: str
    server: str
    port: int
    public_url: str
    """Base URL under which other machines reach the web server; "" if the operator set none."""
    wheel_dir: Path
    """Folder with the package that joining machines install."""
    database_url: str
    redis_url: str
    nats_url: str
    nats_account_seed: str = field(repr=False)
    """The account key of the bus: it mints the credentials of nodes and of our own processes."""
    nats_operator_seed: str = field(repr=False)
    """Together with `nats_system_seed`, lets the cluster revoke credentials at once; without, they expire."""
    nats_system_seed: str = field(repr=False)
    """The key of the bus's system account."""
    nats_service_jwt: str = field(repr=False)
    nats_service_seed: str = field(repr=False)
    """Credentials of the server processes; without them they mint their own."""
    nats_worker_jwt_ttl: float
    worker_nats_url: str
    """URL under which workers reach NATS."""
    nats_tls: ssl.SSLContext | None
    """TLS context of the connections to NATS; with it, an unencrypted connection is refused."""
    web_tls: TlsFiles
    """Certificate and key with which the web process serves HTTPS; none = HTTP."""
    require_auth: bool
    """The reference's switch. We always require authentication and report a false value (cluster.W003)."""
    registration_token: str
    api_key: str
    metrics_token: str = field(repr=False)
    """Token with which a scraper may read the metrics of every server process, and nothing else."""
    controller_metrics: addresses.Address | None
    tasks_metrics: addresses.Address | None
    """Addresses on which controllers and tasks serve their metrics; None: they do not."""
    auto_approve_nodes: bool
    allow_shared_token_nodes: bool
    expose_node_header: bool
    vram_policy: str
    """`prefer` lets a load go to a node with too little free VRAM; `require` does not (R2.32)."""
    disk_headroom_check: bool
    """True if a node with too little free disk space is refused (R2.39)."""
    shared_models: bool
    """True if every worker has the models folder under the same path, so that no file is sent (R2.56)."""
    node_options: bool
    """True if some load options are derived from the node's memory and GPU (R2.80)."""
    node_hosts: Mapping[str, frozenset[str]]
    """Hosts that a node's addresses may have besides the one it registers, by the node's name."""
    prefix_cache: bool
    """True if text requests are routed by prompt prefix, unless the model's rule overrides it (R3.1)."""
    prefix_match: float
    """C41: least cached prefix ratio of a prompt, 0 to 1, at which a replica is preferred."""
    prefix_balance_abs: int
    prefix_balance_rel: float
    """C42: highest load of a preferred replica relative to the idlest one: requests more, times as many."""
    prefix_pressure: int
    """C44: requests a minute diverted from a preferred replica that cause a scale-up; 0 means 1."""
    galleries: list[dict[str, Any]]
    gallery_dir: Path | None
    """The folder of the gallery that we serve to our workers: `cluster:` URLs."""
    model_load_wait: float
    """Longest wait of a request for a running load (C32); 0 = without limit."""
    install_timeout: float
    """Reply limit of `backend.install` (C21)."""
    upgrade_timeout: float
    """Reply limit of `backend.upgrade` (C22)."""
    install_wait: float
    """Longest wait of an install, upgrade or deletion for an offline node before it fails."""
    model_load_timeout: float
    """Limit of one gRPC LoadModel; 0 = by the size of the model's files (C28)."""
    load_failure_grace: float
    """Time during which requests get the error of a failed load before the load is retried (C33)."""
    node_stale_after: float
    """Silence after which a node is offline (C15)."""
    mass_silence_hold: float
    """Longest mass-disruption hold before nodes that fell silent together become offline; 0 = no hold."""
    web_stale_after: float
    """Silence after which a web process is dead and its in-flight counts are dropped."""
    failed_tokens: int
    """Failed registration tokens and node secrets allowed per address and minute, and as many API keys."""
    pending_nodes: int
    """Nodes that may await approval before further ones are refused, unless they come with a join token."""
    pending_nodes_per_address: int
    """Nodes from one address that may await approval before further ones are refused."""
    drain_deadline: float
    """Longest time that a node drained by an admin keeps replicas with running requests."""
    unload_grace: float
    """Time that running requests get before an unloaded replica's engine is stopped."""
    auto_upgrade_backends: bool
    """True if controllers upgrade backends when a check has found a newer version (O103)."""
    upgrade_drain: float
    """Time that an upgrade in waves gives running requests before it stops a node's engines."""
    event_retention: float
    """Retention of the timelines of nodes, including deregistered ones."""
    snapshot_retention: float
    """Retention of the snapshots of placement decisions, from which a decision can be replayed."""
    decision_space: int
    """Bytes that the records of placement decisions may take; their snapshots may take as many again."""
    operation_retention: float
    operation_lease: float
    """Lease of a claimed operation: time until it expires unless the controller renews it."""
    request_timeout: float
    """Limit of one inference call to a backend process; for a streamed response, until its first chunk."""
    prefix_ttl: float
    """C43: lifetime of the record that a replica has processed a prefix."""
    stream_stall: float
    """Longest gap between two chunks of a stream, and longest stall of a client that does not read."""


_DURATIONS: dict[str, tuple[str, float, float]] = {
    "nats_worker_jwt_ttl": ("LOCALAI_NATS_WORKER_JWT_TTL", 86400.0, 10.0),
    "model_load_wait": ("LOCALAI_MODEL_LOAD_WAIT", 60.0, 0.0),
    "install_timeout": ("LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT", 900.0, 1.0),
    "upgrade_timeout": ("LOCALAI_NATS_BACKEND_UPGRADE_TIMEOUT", 900.0, 1.0),
    "install_wait": ("CLUSTER_INSTALL_WAIT", 900.0, 1.0),
    "model_load_timeout": ("LOCALAI_NATS_MODEL_LOAD_TIMEOUT", 0.0, 0.0),
    "load_failure_grace": ("CLUSTER_LOAD_FAILURE_GRACE", 15.0, 0.0),
    "node_stale_after": ("CLUSTER_NODE_STALE_AFTER", 60.0, 1.0),
    "mass_silence_hold": ("LOCALAI_MASS_SILENCE_HOLD", 300.0, 0.0),
    "web_stale_after": ("CLUSTER_WEB_STALE_AFTER", 15.0, 1.0),
    "drain_deadline": ("CLUSTER_DRAIN_DEADLINE", 3600.0, 1.0),
    "unload_grace": ("CLUSTER_UNLOAD_GRACE", 30.0, 0.0),
    "upgrade_drain": ("CLUSTER_UPGRADE_DRAIN", 120.0, 0.0),
    "event_retention": ("CLUSTER_EVENT_RETENTION", 30 * 86400.0, 3600.0),
    "snapshot_retention": ("CLUSTER_SNAPSHOT_RETENTION", 2 * 86400.0, 7200.0),
    "operation_retention": ("CLUSTER_OPERATION_RETENTION", 90 * 86400.0, 3600.0),
    "operation_lease": ("CLUSTER_OPERATION_LEASE", 10.0, 1.0),
    "request_timeout": ("CLUSTER_REQUEST_TIMEOUT", 600.0, 1.0),
    "prefix_ttl": ("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", 300.0, 1.0),
    "stream_stall": ("CLUSTER_STREAM_STALL", 120.0, 1.0),
}
"""By their field: the variable of each duration, its default and the shortest one, in seconds."""


def load(values: Mapping[str, str] = os.environ) -> tuple[ClusterSettings, Environment]:
    """Read every setting; return them with the environment that has collected the problems."""
    env = Environment(values)
    data_dir = env.folder("CLUSTER_DATA_DIR", Path("data"))
    cluster = ClusterSettings(
        data_dir=data_dir,
        models_path=env.folder("LOCALAI_MODELS_PATH", data_dir / "models"),
        host=env.text("HOST", "127.0.0.1"),
        port=env.parsed("PORT", parse_port, 8080, "Use a port between 1 and 65535."),
        server=env.choice("CLUSTER_SERVER", SERVERS),
        public_url=env.parsed(
            "CLUSTER_PUBLIC_URL", parse_base_url, "", "Use a URL such as http://192.0.2.10:8080."
        ),
        wheel_dir=env.folder("CLUSTER_WHEEL_DIR", _ROOT / "dist"),
        database_url=env.secret("DATABASE_URL"),
        redis_url=env.secret("REDIS_URL"),
        nats_url=env.secret("LOCALAI_NATS_URL"),
        nats_account_seed=env.seed("LOCALAI_NATS_ACCOUNT_SEED", "account"),
        nats_operator_seed=env.seed("CLUSTER_NATS_OPERATOR_SEED", "operator"),
        nats_system_seed=env.seed("CLUSTER_NATS_SYSTEM_SEED", "account"),
        nats_service_jwt=env.secret("LOCALAI_NATS_SERVICE_JWT"),
        nats_service_seed=env.seed("LOCALAI_NATS_SERVICE_SEED", "user"),
        worker_nats_url=env.text("CLUSTER_WORKER_NATS_URL"),
        nats_tls=env.tls("LOCALAI_NATS_TLS"),
        web_tls=env.tls_server("CLUSTER_TLS"),
        require_auth=all(env.boolean(name, True) for name in REQUIRE_AUTH),
        registration_token=env.secret("LOCALAI_REGISTRATION_TOKEN"),
        api_key=env.secret("LOCALAI_API_KEY"),
        metrics_token=env.secret("LOCALAI_METRICS_TOKEN"),
        controller_metrics=env.parsed(
            "CLUSTER_CONTROLLER_METRICS_ADDRESS",
            parse_listener,
            None,
            "Use host:port, such as 127.0.0.1:9101.",
        ),
        tasks_metrics=env.parsed(
            "CLUSTER_TASKS_METRICS_ADDRESS", parse_listener, None, "Use host:port, such as 127.0.0.1:9102."
        ),
        auto_approve_nodes=env.boolean("LOCALAI_AUTO_APPROVE_NODES"),
        allow_shared_token_nodes=env.boolean("LOCALAI_ALLOW_SHARED_TOKEN_NODES"),
        auto_upgrade_backends=env.boolean("LOCALAI_AUTO_UPGRADE_BACKENDS"),
        expose_node_header=env.boolean("LOCALAI_EXPOSE_NODE_HEADER"),
        vram_policy=env.choice("LOCALAI_VRAM_POLICY", VRAM_POLICIES),
        disk_headroom_check=env.boolean("LOCALAI_DISTRIBUTED_DISK_HEADROOM_CHECK", True),
        shared_models=env.boolean("LOCALAI_DISTRIBUTED_SHARED_MODELS"),
        node_options=env.boolean("CLUSTER_NODE_OPTIONS", True),
        decision_space=int(env.number("CLUSTER_DECISION_SPACE", 2, 0.01, 10_000) * 2**30),
        prefix_cache=env.boolean("LOCALAI_DISTRIBUTED_PREFIX_CACHE", True),
        prefix_match=env.number("CLUSTER_PREFIX_MATCH", 0.3, 0, 1),
        prefix_balance_abs=int(env.number("CLUSTER_PREFIX_BALANCE_ABS", 2, 0, 1_000_000, whole=True)),
        prefix_balance_rel=env.number("CLUSTER_PREFIX_BALANCE_REL", 1.5, 1, 1_000_000),
        prefix_pressure=int(env.number("CLUSTER_PREFIX_PRESSURE", 20, 0, MOST_PRESSURE, whole=True)),
        node_hosts=env.parsed(
            "CLUSTER_NODE_HOSTS",
            parse_node_hosts,
            {},
            'Use a JSON object: {"gpu-1": ["10.0.0.5", "gpu-1.lan"]}, hosts without ports.',
        ),
        galleries=env.parsed(
            "LOCALAI_BACKEND_GALLERIES", parse_galleries, [], 'Use a JSON list: [{"name": …, "url": …}].'
        ),
        gallery_dir=Path(served).absolute() if (served := env.text("CLUSTER_GALLERY_DIR")) else None,
        failed_tokens=env.parsed(
            "CLUSTER_FAILED_TOKENS", parse_count, 30, "Use a whole number such as 30, or 3000 behind a proxy."
        ),
        pending_nodes=env.parsed(
            "CLUSTER_PENDING_NODES", parse_count, 500, "Use a whole number such as 500."
        ),
        pending_nodes_per_address=env.parsed(
            "CLUSTER_PENDING_NODES_PER_ADDRESS",
            parse_count,
            100,
            "Use a whole number such as 100, or 500 behind a proxy.",
        ),
        **{name: env.seconds(*setting) for name, setting in _DURATIONS.items()},
    )
    _check_galleries(cluster, env)
    return cluster, env


def _check_galleries(cluster: ClusterSettings, env: Environment) -> None:
    if cluster.gallery_dir is None and any(str(g["url"]).startswith("cluster:") for g in cluster.galleries):
        env.refuse(
            "LOCALAI_BACKEND_GALLERIES",
            "has a cluster: URL, but CLUSTER_GALLERY_DIR is not set",
            "Set CLUSTER_GALLERY_DIR to the folder of that gallery.",
        )
