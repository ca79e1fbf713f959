"""The settings of all programs, declared once: of the server, of the worker and of `manage.py bootstrap`.

A row is a field: its annotation is its format, its docstring the text in `docs/configuration.md` and in the
worker's `--help`. `Any` is a format that only the worker knows (`worker/config.py`). Times are in seconds,
sizes in bytes.
"""

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from localai_cluster.kit import clock, env
from localai_cluster.kit.addresses import local_address, split_host_port
from localai_cluster.kit.env import (
    Duration,
    Folder,
    FreePort,
    MirrorUrl,
    PemFile,
    Problem,
    Seconds,
    Secret,
    setting,
)
from localai_cluster.kit.tls import TlsFiles, WrongTlsFile

MAX_PRESSURE = 100
"""Maximum prefix pressure that a web process reports for a model, and the maximum threshold."""
MAX_WEB_PROCESSES = 64
MAX_LOG_LINES = 10_000
MIN_LOG_BYTES, MAX_LOG_BYTES = 64 * 1024, 2 * 1024 * 1024
"""Bounds of the stored output of one engine; as escaped JSON it fits in what web processes accept."""
CAPABILITY_FILE = "/run/localai/capability"
AccountSeed = Annotated[str, env.seed("account")]
OperatorSeed = Annotated[str, env.seed("operator")]
UserSeed = Annotated[str, env.seed("user")]
LogBytes = Annotated[int, Meta(ge=MIN_LOG_BYTES, le=MAX_LOG_BYTES)]
ConnectionCount = Annotated[int, Meta(ge=1, le=16)]
WebProcessCount = Annotated[int, Meta(ge=1, le=MAX_WEB_PROCESSES)]
_DEFAULT_WHEEL_FOLDER = str(Path(__file__).resolve().parents[2] / "dist")
_WEB_PROCESSES_DEFAULT_TEXT = "1; `make run`: one for each core, at most 4"
_OWN_ADDRESS_DEFAULT_TEXT = "--addr, else this machine's address on the way to the control plane"


def _default_node_name(_: env.Values) -> str:
    return socket.gethostname() or f"node-{os.getpid()}"


def base_port(values: env.Values) -> int:
    """Return the first port for engines of a worker with these settings (worker.md §3)."""
    return split_host_port(values["addr"] or values["serve_addr"])[1]


def _default_advertise_addr(values: env.Values) -> str:
    return values["addr"] or f"{local_address(values['register_to'])}:{base_port(values)}"


def _default_http_addr(values: env.Values) -> str:
    return f"0.0.0.0:{base_port(values) - 1}"


def _default_advertise_http_addr(values: env.Values) -> str:
    return f"{split_host_port(values['advertise_addr'])[0]}:{split_host_port(values['http_addr'])[1]}"


def _tls_problems(prefix: str, check: Callable[[], Any]) -> Iterator[Problem]:
    """Return the problems of the files that `<prefix>_CA`, `_CERT` and `_KEY` name."""
    try:
        check()
    except WrongTlsFile as error:
        yield Problem(f"{prefix}_{error.part}", str(error), "Name readable PEM files that belong together.")


@dataclass(frozen=True, kw_only=True)
class SharedSettings(env.Table):
    """The settings that server and worker have in common."""

    registries: env.Registries = setting("LOCALAI_REGISTRIES", group="Sources")
    """JSON list of registries: `host`, `username`, `password`, `realm`, `plain_http`."""
    registry_config: Folder | None = setting("LOCALAI_REGISTRY_CONFIG")
    """A `config.json` with credentials of registries, as `docker login` writes it; no helpers are run."""
    registry_ca: env.AdditionalCAs | None = setting("LOCALAI_REGISTRY_CA")
    """PEM file with CA certificates that registries and galleries may have besides the usual ones."""
    github_url: env.BaseUrl = setting("LOCALAI_GITHUB_URL", "https://raw.githubusercontent.com")
    """Base URL of the files that `github:` addresses name; it may be a mirror."""
    hugging_face_url: MirrorUrl = setting("HF_MIRROR", "https://huggingface.co", others=("HF", "HF_ENDPOINT"))
    """Base URL of Hugging Face, for `hf://` and `huggingface://` addresses; it may be a mirror."""
    hugging_face_token: Secret = setting("HF_TOKEN", others=("HUGGING_FACE_HUB_TOKEN",))
    """Token for gated and private repositories of Hugging Face; it goes to `HF_MIRROR` only."""
    nats_tls_ca: PemFile = setting("LOCALAI_NATS_TLS_CA", "", "the system's CAs", group="Message bus")
    """CA certificates that verify the message bus. Any of the three files forces encryption."""
    nats_tls_cert: PemFile = setting("LOCALAI_NATS_TLS_CERT")
    """Certificate for mutual TLS with the message bus."""
    nats_tls_key: PemFile = setting("LOCALAI_NATS_TLS_KEY")
    """Private key of that certificate."""

    @cached_property
    def nats_tls(self) -> ssl.SSLContext | None:
        """The TLS context of the connections to the bus; with it, an unencrypted connection is refused."""
        files = TlsFiles(self.nats_tls_ca, self.nats_tls_cert, self.nats_tls_key)
        return files.client(clock.now()) if files else None

    def problems(self) -> Iterator[Problem]:
        """Return the problems of the TLS files for the bus."""
        return _tls_problems("LOCALAI_NATS_TLS", lambda: self.nats_tls)


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(SharedSettings):
    """The settings of the server processes."""

    nats_url: Secret = setting("LOCALAI_NATS_URL", "", "bundled")
    """`nats://host:port`, or `tls://…`, which forces encryption."""
    nats_account_seed: AccountSeed = setting("LOCALAI_NATS_ACCOUNT_SEED", "", "generated")
    """NKEY seed of the cluster's account, which signs the credentials of nodes and server processes."""
    nats_operator_seed: OperatorSeed = setting("CLUSTER_NATS_OPERATOR_SEED", "", "generated")
    """NKEY seed of the operator. With the next one, controllers revoke a node's credentials at once."""
    nats_system_seed: AccountSeed = setting("CLUSTER_NATS_SYSTEM_SEED", "", "generated")
    """NKEY seed of the bus's system account. Only controllers need these two."""
    nats_service_jwt: Secret = setting("LOCALAI_NATS_SERVICE_JWT")
    """Credentials of the server processes, if they must not sign their own."""
    nats_service_seed: UserSeed = setting("LOCALAI_NATS_SERVICE_SEED")
    """Seed of the user that `LOCALAI_NATS_SERVICE_JWT` names."""
    nats_worker_jwt_ttl: Annotated[float, env.duration(10)] = setting("LOCALAI_NATS_WORKER_JWT_TTL", "24h")
    """Validity of a node's credentials; workers renew them earlier."""
    worker_nats_url: str = setting("CLUSTER_WORKER_NATS_URL", "", "from `LOCALAI_NATS_URL`")
    """URL under which workers reach the bus; each registration tells it ([below](#bus-of-the-workers))."""
    database_url: Secret = setting("DATABASE_URL", "", "bundled", group="Databases and folders")
    """`postgresql://user:password@host:port/name`; a direct connection, not a pooler in transaction mode."""
    redis_url: Secret = setting("REDIS_URL", "", "bundled")
    """`redis://…`, `rediss://…` or `unix://:password@/path?db=0`."""
    data_dir: Folder = setting("CLUSTER_DATA_DIR", "./data")
    """Databases, secrets and models folder of `make run`."""
    models_path: Folder = setting("LOCALAI_MODELS_PATH", "{data_dir}/models", "`$CLUSTER_DATA_DIR/models`")
    """Files and definitions of the models ([below](#models-folder))."""
    wheel_dir: Folder = setting("CLUSTER_WHEEL_DIR", _DEFAULT_WHEEL_FOLDER, "`./dist` of the project")
    """Folder with the worker package that joining machines install; `make package` builds it there."""
    host: str = setting("HOST", "127.0.0.1", group="Web")
    """Address on which the web process listens; another one lets other machines reach the cluster."""
    port: env.Port = setting("PORT", "8080")
    """Port of the web process."""
    web_processes: WebProcessCount = setting("CLUSTER_WEB_PROCESSES", "1", _WEB_PROCESSES_DEFAULT_TEXT)
    """Web processes of `manage.py serve` on that address ([how many?](operating/web-processes.md))."""
    server: Literal["uvicorn", "daphne"] = setting("CLUSTER_SERVER", "uvicorn")
    """The web server: `uvicorn` or `daphne`, which has disadvantages ([below](#daphne))."""
    web_tls_cert: PemFile = setting("CLUSTER_TLS_CERT")
    """Certificate with which the web process serves HTTPS ([below](#https))."""
    web_tls_key: PemFile = setting("CLUSTER_TLS_KEY")
    """Private key of that certificate."""
    public_url: env.BaseUrl = setting("CLUSTER_PUBLIC_URL", "", "`make run` sets it from `HOST`")
    """Base URL under which other machines reach the web process, for the line of *Add a node*."""
    allowed_hosts: env.NameList = setting("ALLOWED_HOSTS", "*")
    """Django's, separated by commas."""
    csrf_trusted_origins: env.NameList = setting("CSRF_TRUSTED_ORIGINS")
    """Origin of a reverse proxy with TLS (`https://cluster.example`); sign-in behind it needs this."""
    controller_metrics: env.ListenAddress | None = setting("CLUSTER_CONTROLLER_METRICS_ADDRESS")
    """`host:port` on which the controller serves `/metrics`; each controller of a machine needs its own."""
    tasks_metrics: env.ListenAddress | None = setting("CLUSTER_TASKS_METRICS_ADDRESS")
    """`host:port` on which `manage.py qcluster` serves `/metrics`; unused with `controller --tasks`."""
    log_level: env.LogLevel = setting("LOG_LEVEL", "INFO")
    """`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`."""
    debug: bool = setting("DEBUG", "false")
    """Django's; never enable it where others can reach the cluster."""
    secret_key: Secret = setting("SECRET_KEY", "", "generated", group="Access")
    """Django's."""
    registration_token: Secret = setting("LOCALAI_REGISTRATION_TOKEN", "", "generated")
    """Required to register a worker without a join token; engines of stock workers accept calls with it."""
    api_keys: env.SecretKeys = setting("LOCALAI_API_KEY", "", "generated")
    """A fixed admin API key, or several with commas between them."""
    metrics_token: Secret = setting("LOCALAI_METRICS_TOKEN")
    """Token that opens `/metrics` of the server processes and nothing else ([metrics](metrics.md))."""
    keyless_networks: env.Networks = setting("CLUSTER_KEYLESS_NETWORKS")
    """Networks whose programs may use inference without a key; a proxy's clients all have its address."""
    cors_origins: env.Origins = setting("CLUSTER_CORS_ORIGINS")
    """Origins whose pages may use inference with a key; `*` for all. They get no sessions."""
    require_auth: bool = setting("LOCALAI_DISTRIBUTED_REQUIRE_AUTH", "true")
    """Always on: `false` is a warning and changes nothing."""
    nats_require_auth: bool = setting("LOCALAI_NATS_REQUIRE_AUTH", "true")
    """Always on: `false` is a warning and changes nothing."""
    auto_approve_nodes: bool = setting("LOCALAI_AUTO_APPROVE_NODES", "false")
    """Approve new nodes automatically."""
    allow_shared_token_nodes: bool = setting("LOCALAI_ALLOW_SHARED_TOKEN_NODES", "false")
    """Admit workers without their own secret, as stock ones are; they are marked as weak."""
    node_hosts: env.NodeHosts = setting("CLUSTER_NODE_HOSTS")
    """Further hosts of nodes: a JSON object of lists by node name ([below](#hosts-of-nodes))."""
    failed_tokens: env.PositiveCount = setting("CLUSTER_FAILED_TOKENS", "30")
    """Wrong tokens and node secrets per address and minute before it gets 429 ([below](#wrong-tokens))."""
    pending_nodes: env.PositiveCount = setting("CLUSTER_PENDING_NODES", "500")
    """Nodes that may await approval; then a new one without a join token gets 429."""
    pending_nodes_per_address: env.PositiveCount = setting("CLUSTER_PENDING_NODES_PER_ADDRESS", "100")
    """Nodes from one address (an IPv6 /64) that may await approval; behind a proxy or NAT all share one."""
    galleries: env.Galleries = setting("LOCALAI_BACKEND_GALLERIES", group="Backends")
    """JSON list of `{"name", "url"}` sent with installs, or workers use theirs ([below](#galleries))."""
    gallery_dir: Folder | None = setting("CLUSTER_GALLERY_DIR", "", "`make run`: `build/gallery`")
    """Folder of an index and archives of backends that web processes serve to nodes: `cluster:` URLs."""
    install_timeout: Seconds = setting("LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT", "15m")
    """Time limit for the reply to an install (C21)."""
    upgrade_timeout: Seconds = setting("LOCALAI_NATS_BACKEND_UPGRADE_TIMEOUT", "15m")
    """Time limit for the reply to an upgrade (C22)."""
    install_wait: Seconds = setting("CLUSTER_INSTALL_WAIT", "15m")
    """Longest wait of work on a backend for an offline or unhealthy node ([below](#waiting-for-a-node))."""
    auto_upgrade_backends: bool = setting("LOCALAI_AUTO_UPGRADE_BACKENDS", "false")
    """[Automatic upgrades](operating/upgrade-backends.md#automatic-upgrades) by controllers (O103)."""
    upgrade_drain: Duration = setting("CLUSTER_UPGRADE_DRAIN", "2m")
    """Time that an upgrade in waves gives a node's requests before it stops its engines; 0 = none."""
    model_galleries: env.Galleries = setting("LOCALAI_GALLERIES", group="Models")
    """JSON list of `{"name", "url"}`: the galleries of models ([below](#sources-of-models))."""
    share_roots: env.Folders = setting("CLUSTER_SHARE_ROOTS")
    """Folders of shares, mounted below the models folder, whose models are used where they are."""
    s3_endpoint: env.BaseUrl = setting("CLUSTER_S3_ENDPOINT", "", "Amazon's")
    """Base URL of the object store of `s3://` addresses."""
    s3_region: str = setting("CLUSTER_S3_REGION", "", "us-east-1")
    """Region of the object store."""
    s3_access_key: Secret = setting("CLUSTER_S3_ACCESS_KEY")
    """Access key of the object store; without one, requests are not signed."""
    s3_secret_key: Secret = setting("CLUSTER_S3_SECRET_KEY")
    """Secret key of the object store."""
    model_load_wait: Duration = setting("LOCALAI_MODEL_LOAD_WAIT", "60s")
    """Longest wait of a request for a cold load (C32); 0 = no limit."""
    ollama_load_wait: Duration = setting("CLUSTER_OLLAMA_LOAD_WAIT", "5m")
    """Time that a request on Ollama's routes waits for a load: clients do not repeat it; 0 = no limit."""
    model_load_timeout: Duration = setting("LOCALAI_NATS_MODEL_LOAD_TIMEOUT", "0", "by size")
    """Time limit of one LoadModel; by size, 5 min and 20 s for each GiB of its files, at most 6 h (C28)."""
    load_failure_grace: Duration = setting("CLUSTER_LOAD_FAILURE_GRACE", "15s")
    """Time during which requests get the error of a failed load before it is tried again (C33)."""
    unload_grace: Duration = setting("CLUSTER_UNLOAD_GRACE", "30s")
    """Time for the running requests of an unloaded replica, unless a request says `deadline_seconds`."""
    vram_policy: Literal["fit", "require", "ignore", "prefer"] = setting("LOCALAI_VRAM_POLICY", "fit")
    """What lack of VRAM means for a load (R2.32): `fit`, `require` or `ignore` ([below](#vram))."""
    least_serving: Annotated[float, Meta(ge=0, le=1_000_000)] = setting("CLUSTER_LEAST_SERVING", "5")
    """How many times its load time a replica serves before `fit` evicts it ([below](#vram))."""
    disk_headroom_check: bool = setting("LOCALAI_DISTRIBUTED_DISK_HEADROOM_CHECK", "true")
    """Refuse nodes with too little free disk; `false` only warns ([below](#disk), R2.39)."""
    shared_models: bool = setting("LOCALAI_DISTRIBUTED_SHARED_MODELS", "false")
    """Every worker has the models folder under the same path, so no file is [sent](staging.md) (R2.56)."""
    node_options: bool = setting("CLUSTER_NODE_OPTIONS", "true")
    """Derive batch and parallel requests from the node where a definition does not say them (R2.80)."""
    download_on: Literal["control-plane", "worker"] = setting("CLUSTER_DOWNLOAD_ON", "control-plane")
    """Nodes get [imported files](staging.md) from the control plane, or weights from the web and the hub."""
    download_connections: ConnectionCount = setting("CLUSTER_DOWNLOAD_CONNECTIONS", "4")
    """Connections over which an import downloads a large file, if its source sends ranges."""
    request_timeout: Seconds = setting("CLUSTER_REQUEST_TIMEOUT", "10m", group="Requests")
    """Time limit of one inference call; of a stream of text until its first piece."""
    stream_stall: Seconds = setting("CLUSTER_STREAM_STALL", "2m")
    """Longest gap between two pieces of text, and longest stall of a client that does not read."""
    stream_client: Literal["http2", "grpc"] = setting("CLUSTER_STREAM_CLIENT", "http2")
    """Client of the engines' text and vectors: `http2`, or `grpc`, which takes several times the CPU."""
    expose_node_header: bool = setting("LOCALAI_EXPOSE_NODE_HEADER", "false")
    """Return the node's id in the header `X-LocalAI-Node`; an administrator's session always gets it. Name
    nodes to users in refusals too.
    """
    prefix_cache: bool = setting("LOCALAI_DISTRIBUTED_PREFIX_CACHE", "true")
    """[Route by prefix](prefix-routing.md) unless a model's rule says otherwise (R3.1). For web processes."""
    prefix_ttl: Seconds = setting("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", "5m")
    """Lifetime of the record that a replica has processed a prefix (C43)."""
    prefix_match: env.Fraction = setting("CLUSTER_PREFIX_MATCH", "0.3")
    """Least cached share of a prompt at which a replica is preferred (C41); rules may set their own."""
    prefix_balance_abs: Annotated[int, Meta(ge=0, le=1_000_000)] = setting("CLUSTER_PREFIX_BALANCE_ABS", "2")
    """Requests more that may run on a preferred replica than on the idlest one (C42)."""
    prefix_balance_rel: env.Ratio = setting("CLUSTER_PREFIX_BALANCE_REL", "1.5")
    """Times as many requests, plus one, that may run on a preferred replica (C42)."""
    prefix_pressure: Annotated[int, Meta(ge=0, le=MAX_PRESSURE)] = setting("CLUSTER_PREFIX_PRESSURE", "20")
    """Requests per minute diverted from busy replicas that add a replica (C44, [below](#pressure))."""
    node_stale_after: Seconds = setting("CLUSTER_NODE_STALE_AFTER", "60s", group="Time limits")
    """Silence after which a node is offline (C15)."""
    node_doubt_after: Seconds = setting("CLUSTER_NODE_DOUBT_AFTER", "5s")
    """Absence from the bus after which a silent node is [unhealthy](killed-workers.md)."""
    node_gone_after: Seconds = setting("CLUSTER_NODE_GONE_AFTER", "30s")
    """Silence after which a node is offline if nothing listens for it on the bus either."""
    mass_silence_hold: Duration = setting("LOCALAI_MASS_SILENCE_HOLD", "5m")
    """Hold for [many silent nodes](operating/troubleshooting.md#many-nodes-silent-at-once); 0 = none."""
    web_stale_after: Seconds = setting("CLUSTER_WEB_STALE_AFTER", "15s")
    """Silence after which a web process is dead and its in-flight counts are removed."""
    drain_deadline: Seconds = setting("CLUSTER_DRAIN_DEADLINE", "1h")
    """Longest time that a draining node keeps replicas with running requests; 30 days at most."""
    operation_lease: Seconds = setting("CLUSTER_OPERATION_LEASE", "10s")
    """Time until a claimed operation is free again unless its controller renews the lease."""
    operation_retention: env.Retention = setting("CLUSTER_OPERATION_RETENTION", "2160h")
    """Retention of ended operations, at most 100,000 ([below](#retention))."""
    event_retention: env.Retention = setting("CLUSTER_EVENT_RETENTION", "720h")
    """Retention of nodes' timelines, the audit of changes, placement records and expired join tokens."""
    snapshot_retention: Annotated[float, env.duration(7200)] = setting("CLUSTER_SNAPSHOT_RETENTION", "48h")
    """Retention of the snapshots with which a placement decision can be made again."""
    decision_storage_limit: env.Gibibytes = setting("CLUSTER_DECISION_SPACE", "2")
    """GiB for the records of placement decisions, and as many for snapshots ([below](#retention))."""
    response_retention: Duration = setting("CLUSTER_RESPONSE_RETENTION", "0")
    """Time after the last use for which `/v1/responses` stores responses ([below](#responses)); 0 = none."""
    response_storage_limit: env.Mebibytes = setting("CLUSTER_RESPONSE_SPACE", "64")
    """MiB for the stored responses of each API key."""

    @cached_property
    def web_tls(self) -> TlsFiles:
        """The files with which the web process serves HTTPS; none = HTTP."""
        return TlsFiles("", self.web_tls_cert, self.web_tls_key)

    def problems(self) -> Iterator[Problem]:
        """Return the problems of the combination of the settings."""
        yield from super().problems()
        if self.web_tls:
            yield from _tls_problems("CLUSTER_TLS", lambda: self.web_tls.server(clock.now()))
        if self.server == "daphne" and self.web_processes > 1:
            hint = "Unset it, or use CLUSTER_SERVER=uvicorn."
            yield Problem("CLUSTER_WEB_PROCESSES", "daphne serves with one process", hint)
        if not self.gallery_dir and any(gallery["url"].startswith("cluster:") for gallery in self.galleries):
            reason = "has a cluster: URL, but CLUSTER_GALLERY_DIR is not set"
            hint = "Set CLUSTER_GALLERY_DIR to the folder of that gallery."
            yield Problem("LOCALAI_BACKEND_GALLERIES", reason, hint)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(SharedSettings):
    """The settings of a worker, each also a flag."""

    nats_url: Any = setting("LOCALAI_NATS_URL", "", "from the registration")
    """URL of the message bus."""
    nats_jwt: Secret = setting("LOCALAI_NATS_JWT")
    """JWT for the message bus, in place of those that registrations bring; it is never renewed."""
    nats_user_seed: Secret = setting("LOCALAI_NATS_USER_SEED")
    """Seed of the user that --nats-jwt names."""
    register_to: env.ServerUrl = setting("LOCALAI_REGISTER_TO", group="Control plane")
    """Base URL of the control plane. Required."""
    tls_ca: PemFile = setting("LOCALAI_WORKER_TLS_CA", "", "the system's CAs")
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
    node_name: env.NodeName = setting("LOCALAI_NODE_NAME", _default_node_name, "the host name")
    """Unique name of this node."""
    node_labels: env.Labels = setting("LOCALAI_NODE_LABELS")
    """Labels of this node: k=v,k=v."""
    max_replicas_per_model: env.ReplicaSlots = setting("LOCALAI_MAX_REPLICAS_PER_MODEL", "1")
    """Maximum replicas per model on this node."""
    vram_budget: str = setting("LOCALAI_VRAM_BUDGET")
    """VRAM to offer: 80%, 12GB, 12GiB or bytes."""
    heartbeat_interval: env.IntervalSeconds = setting("LOCALAI_HEARTBEAT_INTERVAL", "10s")
    """Time between heartbeats."""
    addr: env.HostPort = setting("LOCALAI_ADDR", group="Addresses and ports")
    """host:port that reaches this worker. Its port is the first port for engines."""
    serve_addr: env.HostPort = setting("LOCALAI_SERVE_ADDR", "0.0.0.0:50051")
    """Where the first port for engines comes from without --addr."""
    grpc_max_port: env.WholeNumber = setting("LOCALAI_GRPC_MAX_PORT", "0")
    """Highest port for engines. 0 = 65535."""
    find_ports: bool = setting("LOCALAI_WORKER_FIND_PORTS", "false")
    """If the ports of --addr are in use, take the next free block of 100 and keep it."""
    advertise_addr: env.HostPort = setting(
        "LOCALAI_ADVERTISE_ADDR", _default_advertise_addr, _OWN_ADDRESS_DEFAULT_TEXT
    )
    """host:port to advertise to the control plane."""
    http_addr: FreePort = setting(
        "LOCALAI_HTTP_ADDR", _default_http_addr, "0.0.0.0, one port below the engines"
    )
    """host:port of health probes, files, logs and /metrics."""
    advertise_http_addr: env.HostPort = setting(
        "LOCALAI_ADVERTISE_HTTP_ADDR", _default_advertise_http_addr, "from the two above"
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
        "LOCALAI_WORKER_DATA_DIR", "{backends_path.parent}", "the folder above the backends"
    )
    """Folder for the node's secret and the list of servers that have accepted it."""
    source_roots: env.Folders = setting("LOCALAI_WORKER_SOURCE_ROOTS", "{backends_path}", "the backends path")
    """Folders that backends and file:// galleries may be read from, separated as in PATH."""
    backend_galleries: Any = setting("LOCALAI_BACKEND_GALLERIES", group="Backends and engines", short=True)
    """JSON list of {"name", "url"}: the galleries for commands that name none."""
    galleries: Any = setting("LOCALAI_GALLERIES", short=True)
    """JSON list of {"name", "url"}: the galleries of models for --prefetch-models."""
    prefetch_models: env.NameList = setting("LOCALAI_PREFETCH_MODELS", short=True)
    """Models of the galleries, separated by commas, whose files are fetched before the registration."""
    download_rate: env.BytesPerSecond = setting("LOCALAI_WORKER_DOWNLOAD_RATE", "0")
    """Bandwidth limit of downloads, in bytes per second. 0 = unlimited."""
    require_backend_integrity: bool = setting("LOCALAI_REQUIRE_BACKEND_INTEGRITY", "false", short=True)
    """Refuse archives without a hash in their gallery, and images that no digest names."""
    capability: str = setting("LOCALAI_FORCE_META_BACKEND_CAPABILITY", "", "detected")
    """Capability that selects builds, such as nvidia-cuda-12. disable = every build fits."""
    capability_file: Folder = setting("LOCALAI_FORCE_META_BACKEND_CAPABILITY_RUN_FILE", CAPABILITY_FILE)
    """File whose content is the capability, if it exists."""
    log_lines: Annotated[int, Meta(ge=1, le=MAX_LOG_LINES)] = setting("LOCALAI_WORKER_LOG_LINES", "1000")
    """Lines of output kept of each engine."""
    log_bytes: LogBytes = setting("LOCALAI_WORKER_LOG_BYTES", "1048576")
    """Bytes of output kept of each engine that runs, and of the last 32 that have ended."""
    test_gpus: Any = setting("LOCALAI_TEST_GPUS")
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

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """Verifies the control plane; None for the system's CAs."""
        return TlsFiles(self.tls_ca).client(clock.now()) if self.tls_ca else None

    def problems(self) -> Iterator[Problem]:
        """Return the problems of the files."""
        yield from super().problems()
        yield from _tls_problems("LOCALAI_WORKER_TLS", lambda: self.tls)


@dataclass(frozen=True, kw_only=True)
class Bootstrap(env.Table):
    """The settings that only `manage.py bootstrap` reads."""

    password: Secret = setting("CLUSTER_ADMIN_PASSWORD", "", "generated")
    """Password of the first admin, used once."""
    generated: bool = setting("CLUSTER_ADMIN_PASSWORD_GENERATED", "false", "`make run` sets it")
    """The password was generated and must be changed at the first sign-in."""
    node: str = setting("CLUSTER_ENROL_NODE", "", "the local worker")
    """A node that is approved in advance."""
    secret: Secret = setting("CLUSTER_ENROL_SECRET", "", "the local worker's")
    """The secret of that node."""
    copied: bool = setting("CLUSTER_DATA_COPIED", "false", "`make run` sets it")
    """The data folder is a [copy](operating/backup.md#make-run): all nodes are offline at first."""
    join_command: str = setting("CLUSTER_JOIN_COMMAND_FILE", "", "`make run` sets it if `HOST` is open")
    """Where the line that adds a machine is written, with a new join token; needs `CLUSTER_PUBLIC_URL`."""
    model_scheduling: str = setting("LOCALAI_MODEL_SCHEDULING")
    """Scheduling rules as a JSON list ([below](#scheduling-rules))."""
    model_scheduling_config: str = setting("LOCALAI_MODEL_SCHEDULING_CONFIG")
    """YAML file (or JSON, at most 1 MiB) with such a list; its rules count after the others."""
