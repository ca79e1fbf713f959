"""The table of the worker's settings: flags, environment names, meaning, and the fix for a wrong value.

`main.py` builds the command line from it, `config.py` reads the values with it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from localai_cluster.kit.env import Problem
from localai_cluster.kit.errors import ClusterError
from localai_cluster.worker.log_rings import BYTES, LINES

NAME_LIMIT = 255
MOST_LINES = 10_000
LEAST_BYTES, MOST_BYTES = 64 * 1024, 2 * 1024 * 1024
"""Bounds of the stored output of one engine.

As escaped JSON it fits in what web processes accept (16 MiB).
"""


@dataclass(frozen=True)
class Setting:
    """One setting: the flag is `--` plus the key in kebab case; the first set environment variable wins.

    `hint` is the fix for a wrong value.
    """

    key: str
    environment: tuple[str, ...]
    help: str
    hint: str = ""
    switch: bool = False

    @property
    def name(self) -> str:
        """Environment variable that messages name."""
        return self.environment[0]

    @property
    def flag(self) -> str:
        """Command-line flag."""
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
        "URL of the message bus. Default: what the control plane says at registration.",
        "Use nats://host:4222.",
    ),
    Setting(
        "nats_jwt",
        ("LOCALAI_NATS_JWT",),
        "JWT for the message bus, in place of the one that registrations bring; with --nats-user-seed.",
        "Set both, or neither to have the control plane give them.",
    ),
    Setting(
        "nats_user_seed",
        ("LOCALAI_NATS_USER_SEED",),
        "Seed of the user that --nats-jwt names.",
        "Set both, or neither to have the control plane give them.",
    ),
    *(
        Setting(f"nats_tls_{part.lower()}", (f"LOCALAI_NATS_TLS_{part}",), text, "Name a readable PEM file.")
        for part, text in (
            ("CA", "CA certificates that verify the message bus. Any of the three files forces TLS."),
            ("CERT", "Certificate of this worker, for mutual TLS with the message bus."),
            ("KEY", "Private key of that certificate."),
        )
    ),
    Setting(
        "tls_ca",
        ("LOCALAI_WORKER_TLS_CA",),
        "CA certificates that verify an https:// control plane. Default: those of the system.",
        "Name a readable PEM file.",
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
        "host:port to advertise to the control plane. Default: --addr, else this machine's address on the "
        "way to the control plane.",
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
        "host:port of health probes, logs and /metrics. Default: 0.0.0.0, one port below the engines.",
        "Use a free host:port, such as 0.0.0.0:50050.",
    ),
    Setting(
        "metrics_token",
        ("LOCALAI_WORKER_METRICS_TOKEN",),
        "Token with which a scraper may read /metrics on the port of the health probes.",
        "Use a long random text.",
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
        "log_lines",
        ("LOCALAI_WORKER_LOG_LINES",),
        f"Lines of output kept of each engine. Default: {LINES}.",
        f"Use a whole number from 1 to {MOST_LINES}.",
    ),
    Setting(
        "log_bytes",
        ("LOCALAI_WORKER_LOG_BYTES",),
        f"Bytes of output kept of each engine. Default: {BYTES}.",
        f"Use bytes as a whole number from {LEAST_BYTES} to {MOST_BYTES}.",
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
    Setting(
        "test_gpus",
        ("LOCALAI_TEST_GPUS",),
        "For tests: report GPUs that do not exist, and after a colon what each engine takes of them.",
        "Use groups such as 2x24GiB, 1x24GiB+1x48GiB or 2x24GiB:6GiB.",
    ),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
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
