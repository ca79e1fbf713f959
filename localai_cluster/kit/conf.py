"""The settings of the server processes, declared once: `conf.cluster().model_load_wait`.

`load` reads all of them, in `settings.py`; `bootstrap` reads its own.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict

from django.conf import settings

from localai_cluster.kit import addresses, clock, env
from localai_cluster.kit.env import (
    BaseUrl,
    Folder,
    Format,
    Pem,
    Seconds,
    Secret,
    choice,
    number,
    setting,
    split_list,
)
from localai_cluster.kit.tls import TlsFiles

_ROOT = Path(__file__).resolve().parents[2]
MOST_PRESSURE = 100
"""Highest prefix pressure that a web process reports for a model, and so the highest valid threshold."""
MOST_WEB_PROCESSES = 64
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(?::[0-9]{1,5})?|https?://\[[0-9a-f:]+\](?::[0-9]{1,5})?|\*")
_HOSTS = env.json_of(dict[str, list[Any]], 'a JSON object of hosts without ports: {"gpu-1": ["10.0.0.5"]}')
_GIB = number(float, 0.01, 10_000)
_MIB = number(float, 0.1, 100_000)


class GallerySetting(TypedDict, total=False):
    """A gallery of LOCALAI_BACKEND_GALLERIES (`contract/nats.md` §4.1)."""

    url: Required[str]
    name: str
    mirrors: list[str]
    verification: dict[str, str]


_GALLERIES = env.json_of(list[GallerySetting], 'a JSON list of {"name": …, "url": …}')


def _galleries(text: str) -> list[GallerySetting]:
    galleries: list[GallerySetting] = _GALLERIES.parse(text)
    if not all(gallery["url"] for gallery in galleries):
        raise ValueError(f"not {_GALLERIES.fix}")
    return galleries


def _node_hosts(text: str) -> dict[str, frozenset[str]]:
    """Parse a JSON object of lists: further hosts by a node's name."""
    return {
        name: frozenset(_host(host, name) for host in hosts) for name, hosts in _HOSTS.parse(text).items()
    }


def _host(value: Any, node: str) -> str:
    try:
        return addresses.host(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError(f"wrong at {node!r}: {value!r} is neither a host name nor an IP address") from None


def _origins(text: str) -> tuple[str, ...]:
    """Parse origins as browsers send them."""
    origins = split_list(text.lower())
    if wrong := next((origin for origin in origins if not _ORIGIN.fullmatch(origin)), None):
        raise ValueError(f"wrong at {wrong!r}: an origin has a scheme and a host, and no path")
    return origins


Port = Annotated[int, number(int, 1, 65535, "a port between 1 and 65535")]
Count = Annotated[int, number(int, 1, 2**31 - 1)]
Mebibytes = Annotated[int, Format(_MIB.fix, lambda text: int(_MIB.parse(text) * 2**20))]
Gibibytes = Annotated[int, Format(_GIB.fix, lambda text: int(_GIB.parse(text) * 2**30))]
Duration = Annotated[float, env.duration(0)]
"""Seconds of which 0 has a meaning of its own."""
Retention = Annotated[float, env.duration(3600)]
Listener = Annotated[addresses.Address, Format("host:port, such as 127.0.0.1:9101", addresses.parse)]
Texts = Annotated[list[str], Format("a list, separated by commas", lambda text: list(split_list(text)))]
Keys = Annotated[tuple[str, ...], Format("keys", split_list, secret=True)]
Networks = Annotated[
    tuple[IPv4Network | IPv6Network, ...],
    Format(
        "networks separated by commas, such as 10.0.0.0/24",
        lambda text: tuple(map(ip_network, split_list(text))),
    ),
]
Origins = Annotated[
    tuple[str, ...], Format("origins separated by commas, such as https://app.example, or *", _origins)
]
NodeHosts = Annotated[dict[str, frozenset[str]], Format(_HOSTS.fix, _node_hosts)]
Galleries = Annotated[list[GallerySetting], Format(_GALLERIES.fix, _galleries)]
AccountSeed = Annotated[str, env.seed("account")]


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(env.SharedSettings):
    """The table of the server processes' settings; times in seconds, sizes in bytes."""

    nats_url: Secret = setting("LOCALAI_NATS_URL", "", "bundled")
    """`nats://host:port`, or `tls://…`, which forces encryption."""
    nats_account_seed: AccountSeed = setting("LOCALAI_NATS_ACCOUNT_SEED", "", "generated")
    """NKEY seed of the cluster's account, which signs the credentials of nodes and server processes."""
    nats_operator_seed: Annotated[str, env.seed("operator")] = setting(
        "CLUSTER_NATS_OPERATOR_SEED", "", "generated"
    )
    """NKEY seed of the operator. With the next one, controllers revoke a node's credentials at once."""
    nats_system_seed: AccountSeed = setting("CLUSTER_NATS_SYSTEM_SEED", "", "generated")
    """NKEY seed of the bus's system account. Only controllers need these two."""
    nats_service_jwt: Secret = setting("LOCALAI_NATS_SERVICE_JWT")
    """Credentials of the server processes, if they must not sign their own."""
    nats_service_seed: Annotated[str, env.seed("user")] = setting("LOCALAI_NATS_SERVICE_SEED")
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
    models_path: Folder = setting(
        "LOCALAI_MODELS_PATH", lambda read: f"{read['data_dir']}/models", "`$CLUSTER_DATA_DIR/models`"
    )
    """Files and definitions of the models ([below](#models-folder))."""
    wheel_dir: Folder = setting("CLUSTER_WHEEL_DIR", str(_ROOT / "dist"), "`./dist` of the project")
    """Folder with the worker package that joining machines install; `make package` builds it there."""
    host: str = setting("HOST", "127.0.0.1", group="Web")
    """Address on which the web process listens; another one lets other machines reach the cluster."""
    port: Port = setting("PORT", "8080")
    """Port of the web process."""
    web_processes: Annotated[int, number(int, 1, MOST_WEB_PROCESSES)] = setting(
        "CLUSTER_WEB_PROCESSES", "1", "1; `make run`: one for each core, at most 4"
    )
    """Web processes of `manage.py serve` on that address ([how many?](operating/web-processes.md))."""
    server: Annotated[str, choice("uvicorn", "daphne")] = setting("CLUSTER_SERVER", "uvicorn")
    """The web server: `uvicorn` or `daphne`, which has disadvantages ([below](#daphne))."""
    web_tls_cert: Pem = setting("CLUSTER_TLS_CERT")
    """Certificate with which the web process serves HTTPS ([below](#https))."""
    web_tls_key: Pem = setting("CLUSTER_TLS_KEY")
    """Private key of that certificate."""
    public_url: BaseUrl = setting("CLUSTER_PUBLIC_URL", "", "`make run` sets it from `HOST`")
    """Base URL under which other machines reach the web process, for the line of *Add a node*."""
    allowed_hosts: Texts = setting("ALLOWED_HOSTS", "*")
    """Django's, separated by commas."""
    csrf_trusted_origins: Texts = setting("CSRF_TRUSTED_ORIGINS")
    """Origin of a reverse proxy with TLS (`https://cluster.example`); sign-in behind it needs this."""
    controller_metrics: Listener | None = setting("CLUSTER_CONTROLLER_METRICS_ADDRESS")
    """`host:port` on which the controller serves `/metrics`; each controller of a machine needs its own."""
    tasks_metrics: Listener | None = setting("CLUSTER_TASKS_METRICS_ADDRESS")
    """The same for `manage.py qcluster`; `controller --tasks` counts tasks with its own."""
    log_level: Annotated[str, choice("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")] = setting(
        "LOG_LEVEL", "INFO"
    )
    """`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`."""
    debug: bool = setting("DEBUG", "false")
    """Django's; never enable it where others can reach the cluster."""
    secret_key: Secret = setting("SECRET_KEY", "", "generated", group="Access")
    """Django's."""
    registration_token: Secret = setting("LOCALAI_REGISTRATION_TOKEN", "", "generated")
    """Required to register a worker without a join token; engines of stock workers accept calls with it."""
    api_keys: Keys = setting("LOCALAI_API_KEY", "", "generated")
    """A fixed admin API key, or several with commas between them."""
    metrics_token: Secret = setting("LOCALAI_METRICS_TOKEN")
    """Token that opens `/metrics` of the server processes and nothing else ([metrics](metrics.md))."""
    keyless_networks: Networks = setting("CLUSTER_KEYLESS_NETWORKS")
    """Networks whose programs may use inference without a key; a proxy's clients all have its address."""
    cors_origins: Origins = setting("CLUSTER_CORS_ORIGINS")
    """Origins whose pages may use inference with a key; `*` for all. They get no sessions."""
    require_auth: bool = setting("LOCALAI_DISTRIBUTED_REQUIRE_AUTH", "true")
    """Always on: `false` is a warning and changes nothing."""
    nats_require_auth: bool = setting("LOCALAI_NATS_REQUIRE_AUTH", "true")
    """Always on: `false` is a warning and changes nothing."""
    auto_approve_nodes: bool = setting("LOCALAI_AUTO_APPROVE_NODES", "false")
    """Approve new nodes automatically."""
    allow_shared_token_nodes: bool = setting("LOCALAI_ALLOW_SHARED_TOKEN_NODES", "false")
    """Admit workers without their own secret, as stock ones are; they are marked as weak."""
    node_hosts: NodeHosts = setting("CLUSTER_NODE_HOSTS")
    """Further hosts of nodes: a JSON object of lists by node name ([below](#hosts-of-nodes))."""
    failed_tokens: Count = setting("CLUSTER_FAILED_TOKENS", "30")
    """Wrong tokens and node secrets per address and minute before it gets 429 ([below](#wrong-tokens))."""
    pending_nodes: Count = setting("CLUSTER_PENDING_NODES", "500")
    """Nodes that may await approval; then a new one without a join token gets 429."""
    pending_nodes_per_address: Count = setting("CLUSTER_PENDING_NODES_PER_ADDRESS", "100")
    """The same for nodes from one address (the /64 of an IPv6 one); behind a proxy or NAT all share one."""
    galleries: Galleries = setting("LOCALAI_BACKEND_GALLERIES", group="Backends")
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
    model_load_wait: Duration = setting("LOCALAI_MODEL_LOAD_WAIT", "60s", group="Models")
    """Longest wait of a request for a cold load (C32); 0 = no limit."""
    ollama_load_wait: Duration = setting("CLUSTER_OLLAMA_LOAD_WAIT", "5m")
    """The same on Ollama's routes, whose clients do not repeat a refused request; 0 = no limit."""
    model_load_timeout: Duration = setting("LOCALAI_NATS_MODEL_LOAD_TIMEOUT", "0", "by size")
    """Time limit of one LoadModel; by size, 5 min and 20 s for each GiB of its files, at most 6 h (C28)."""
    load_failure_grace: Duration = setting("CLUSTER_LOAD_FAILURE_GRACE", "15s")
    """Time during which requests get the error of a failed load before it is tried again (C33)."""
    unload_grace: Duration = setting("CLUSTER_UNLOAD_GRACE", "30s")
    """Time for the running requests of an unloaded replica, unless a request says `deadline_seconds`."""
    vram_policy: Annotated[str, choice("fit", "require", "ignore", "prefer")] = setting(
        "LOCALAI_VRAM_POLICY", "fit"
    )
    """What lack of VRAM means for a load (R2.32): `fit`, `require` or `ignore` ([below](#vram))."""
    least_serving: Annotated[float, number(float, 0, 1_000_000)] = setting("CLUSTER_LEAST_SERVING", "5")
    """How many times its load time a replica serves before `fit` evicts it ([below](#vram))."""
    disk_headroom_check: bool = setting("LOCALAI_DISTRIBUTED_DISK_HEADROOM_CHECK", "true")
    """Refuse nodes with too little free disk; `false` only warns ([below](#disk), R2.39)."""
    shared_models: bool = setting("LOCALAI_DISTRIBUTED_SHARED_MODELS", "false")
    """Every worker has the models folder under the same path, so no file is [sent](staging.md) (R2.56)."""
    node_options: bool = setting("CLUSTER_NODE_OPTIONS", "true")
    """Derive batch and parallel requests from the node where a definition does not say them (R2.80)."""
    request_timeout: Seconds = setting("CLUSTER_REQUEST_TIMEOUT", "10m", group="Requests")
    """Time limit of one inference call; of a stream of text until its first piece."""
    stream_stall: Seconds = setting("CLUSTER_STREAM_STALL", "2m")
    """Longest gap between two pieces of text, and longest stall of a client that does not read."""
    stream_client: Annotated[str, choice("http2", "grpc")] = setting("CLUSTER_STREAM_CLIENT", "http2")
    """Client of the engines' text and vectors: `http2`, or `grpc`, which takes several times the CPU."""
    expose_node_header: bool = setting("LOCALAI_EXPOSE_NODE_HEADER", "false")
    """Return the node's id in the header `X-LocalAI-Node`; an administrator's session always gets it."""
    prefix_cache: bool = setting("LOCALAI_DISTRIBUTED_PREFIX_CACHE", "true")
    """[Route by prefix](prefix-routing.md) unless a model's rule says otherwise (R3.1). For web processes."""
    prefix_ttl: Seconds = setting("LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL", "5m")
    """Lifetime of the record that a replica has processed a prefix (C43)."""
    prefix_match: Annotated[float, number(float, 0, 1)] = setting("CLUSTER_PREFIX_MATCH", "0.3")
    """Least cached share of a prompt at which a replica is preferred (C41); rules may set their own."""
    prefix_balance_abs: Annotated[int, number(int, 0, 1_000_000)] = setting("CLUSTER_PREFIX_BALANCE_ABS", "2")
    """Requests more that may run on a preferred replica than on the idlest one (C42)."""
    prefix_balance_rel: Annotated[float, number(float, 1, 1_000_000)] = setting(
        "CLUSTER_PREFIX_BALANCE_REL", "1.5"
    )
    """How many times as many, and one more (C42)."""
    prefix_pressure: Annotated[int, number(int, 0, MOST_PRESSURE)] = setting("CLUSTER_PREFIX_PRESSURE", "20")
    """Requests a minute kept from a preferred replica that add a replica (C44, [below](#pressure))."""
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
    operation_retention: Retention = setting("CLUSTER_OPERATION_RETENTION", "2160h")
    """Retention of ended operations, at most 100,000 ([below](#retention))."""
    event_retention: Retention = setting("CLUSTER_EVENT_RETENTION", "720h")
    """Retention of nodes' timelines, the audit of changes, placement records and expired join tokens."""
    snapshot_retention: Annotated[float, env.duration(7200)] = setting("CLUSTER_SNAPSHOT_RETENTION", "48h")
    """Retention of the snapshots with which a placement decision can be made again."""
    decision_space: Gibibytes = setting("CLUSTER_DECISION_SPACE", "2")
    """GiB for the records of placement decisions, and as many for snapshots ([below](#retention))."""
    response_retention: Duration = setting("CLUSTER_RESPONSE_RETENTION", "0")
    """Time after the last use for which `/v1/responses` stores responses ([below](#responses)); 0 = none."""
    response_space: Mebibytes = setting("CLUSTER_RESPONSE_SPACE", "64")
    """MiB for the stored responses of each API key."""

    @cached_property
    def web_tls(self) -> TlsFiles:
        """The files with which the web process serves HTTPS; none = HTTP."""
        return TlsFiles("", self.web_tls_cert, self.web_tls_key)

    def problems(self) -> Iterator[env.Problem]:
        """Return what is wrong with the combination of the settings."""
        yield from super().problems()
        if self.web_tls:
            yield from env.tls_problems("CLUSTER_TLS", lambda: self.web_tls.server(clock.now()))
        if self.server == "daphne" and self.web_processes > 1:
            yield env.Problem(
                "CLUSTER_WEB_PROCESSES",
                "daphne serves with one process",
                "Unset it, or use CLUSTER_SERVER=uvicorn.",
            )
        if not self.gallery_dir and any(g["url"].startswith("cluster:") for g in self.galleries):
            yield env.Problem(
                "LOCALAI_BACKEND_GALLERIES",
                "has a cluster: URL, but CLUSTER_GALLERY_DIR is not set",
                "Set CLUSTER_GALLERY_DIR to the folder of that gallery.",
            )


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


def load(values: Mapping[str, str] = os.environ) -> tuple[ClusterSettings, env.Environment]:
    """Read every setting; return them with the environment that has collected the problems."""
    environment = env.Environment(values)
    return environment.read(ClusterSettings), environment


def cluster() -> ClusterSettings:
    """Return the settings of this process."""
    try:
        # Where Django keeps a setting after its first use; its own way there takes three times as long.
        current: ClusterSettings = object.__getattribute__(settings, "CLUSTER")
    except AttributeError:
        current = settings.CLUSTER
    return current
