"""The environment, read once and typed.

`Environment` is the only reader of settings. `load` reads those of the server processes, `settings.py` those
that only Django needs, and `worker/config.py` those of the worker.
A wrong value never raises. It becomes a `Problem` (setting, what is wrong, how to fix it), a safe default
takes its place, and all problems are reported together, so that an operator fixes one list instead of one
traceback after another. A secret may be given as `NAME` or as `NAME_FILE`, the path of a file that holds it.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_GO_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_GO_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
SHORTEST_SECRET = 16
WELL_KNOWN_SECRETS = {
    "changeme",
    "change-me",
    "default",
    "insecure",
    "localai",
    "localai-cluster",
    "password",
    "secret",
}
SERVERS = ("uvicorn", "daphne")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TRUE, _FALSE = {"1", "true", "yes", "on", "t"}, {"0", "false", "no", "off", "f", ""}


@dataclass(frozen=True)
class Problem:
    """One wrong setting: its name, what is wrong with it, what to do."""

    setting: str
    message: str
    hint: str


def parse_duration(text: str) -> float:
    """Seconds of a Go duration such as `90s`, `1m30s`, `500ms` or `0`; raises ValueError."""
    text = text.strip()
    if text == "0":
        return 0.0
    parts = _GO_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("not a duration such as 60s, 1m30s or 500ms")
    return float(sum(float(number) * _GO_UNITS[unit] for number, unit in parts))


def parse_bool(text: str) -> bool:
    """A switch: true/false, 1/0, yes/no, on/off; raises ValueError."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("neither true nor false")


def weak_secret(value: str) -> bool:
    """Whether a secret is too short or too well known to protect the cluster."""
    rest = value.lower()
    for word in WELL_KNOWN_SECRETS:
        rest = rest.replace(word, "")
    return len(value) < SHORTEST_SECRET or len(rest) < SHORTEST_SECRET // 2 or len(set(value)) < 5


def parse_port(text: str) -> int:
    """A TCP port; raises ValueError."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError("not a port between 1 and 65535")
    return int(text)


def parse_count(text: str) -> int:
    """A whole number from 1; raises ValueError."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**31:
        raise ValueError("not a whole number from 1")
    return int(text)


def parse_log_level(text: str) -> str:
    """One of logging's levels, in capitals; raises ValueError."""
    level = text.strip().upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"none of {', '.join(LOG_LEVELS)}")
    return level


def parse_server(text: str) -> str:
    """A web server that we can serve with; raises ValueError."""
    if text not in SERVERS:
        raise ValueError(f"none of {', '.join(SERVERS)}")
    return text


def parse_galleries(text: str) -> list[dict[str, Any]]:
    """A JSON list of objects with `name` and `url` (`contract/nats.md` §4.1); raises ValueError."""
    try:
        value = json.loads(text) if text.strip() else []
    except json.JSONDecodeError:
        raise ValueError("not JSON") from None
    if not isinstance(value, list) or not all(isinstance(g, dict) and g.get("url") for g in value):
        raise ValueError('not a JSON list of {"name": …, "url": …}')
    return value


@dataclass
class Environment:
    """A view on environment variables that collects problems instead of raising."""

    values: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def text(self, name: str, default: str = "") -> str:
        """The variable's text; unset and empty give `default`."""
        return self.values.get(name, "") or default

    def secret(self, name: str) -> str:
        """The secret itself, or the content of the file that `NAME_FILE` names; empty if neither is set."""
        path = self.values.get(f"{name}_FILE", "")
        if self.values.get(name) or not path:
            return self.text(name)
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else "") or "it is not text"
            self.refuse(f"{name}_FILE", f"cannot read {path}: {reason}", "Name a readable file.")
            return ""

    def parsed(self, name: str, parse: Callable[[str], T], default: T, hint: str) -> T:
        """The variable run through `parse`.

        A value that `parse` refuses becomes a problem and gives `default`.
        """
        raw = self.values.get(name, "")
        if not raw:
            return default
        try:
            return parse(raw)
        except ValueError as error:
            self.refuse(name, f"{raw!r} is {error}", hint)
            return default

    def boolean(self, name: str, default: bool = False) -> bool:
        """A switch."""
        return self.parsed(name, parse_bool, default, "Use true or false.")

    def seconds(self, name: str, default: float, minimum: float = 1.0) -> float:
        """A Go duration, in seconds, not shorter than `minimum`."""

        def parse(text: str) -> float:
            value = parse_duration(text)
            if value < minimum:
                raise ValueError(f"shorter than {minimum:g} s")
            return value

        return self.parsed(name, parse, default, "Use a duration such as 60s or 5m.")

    def refuse(self, setting: str, message: str, hint: str) -> None:
        """Adds a problem."""
        self.problems.append(Problem(setting, message, hint))


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of the server processes; times in seconds."""

    data_dir: Path
    models_path: Path
    host: str
    server: str
    port: int
    database_url: str
    redis_url: str
    nats_url: str
    registration_token: str
    api_key: str
    auto_approve_nodes: bool
    allow_shared_token_nodes: bool
    expose_node_header: bool
    galleries: list[dict[str, Any]]
    model_load_wait: float
    """How long a request waits for a running load (C32); 0 = without limit."""
    install_timeout: float
    """Reply limit of `backend.install` (C21)."""
    install_wait: float
    """How long an install waits for a node that is offline before it fails."""
    model_load_timeout: float
    """Limit of one gRPC LoadModel (C28)."""
    load_failure_grace: float
    """How long requests get the error of a failed load before it is tried again (C33)."""
    node_stale_after: float
    """Silence after which a node is offline (C15)."""
    web_stale_after: float
    """Silence after which a web process is dead and its in-flight counts are dropped."""
    failed_tokens: int
    """Failed registration tokens and node secrets allowed per address and minute."""
    drain_deadline: float
    """How long a node drained by an admin keeps replicas with running requests."""
    event_retention: float
    """How long the timelines of nodes are kept, also of deregistered ones."""
    operation_lease: float
    """How long a controller keeps a claimed operation without renewing the claim."""
    request_timeout: float
    """Limit of one inference call to a backend process."""


def load(values: Mapping[str, str] = os.environ) -> tuple[ClusterSettings, Environment]:
    """Reads every setting; returns them with the environment that has collected the problems."""
    env = Environment(values)
    data_dir = Path(env.text("CLUSTER_DATA_DIR", "data")).absolute()
    cluster = ClusterSettings(
        data_dir=data_dir,
        models_path=Path(env.text("LOCALAI_MODELS_PATH", str(data_dir / "models"))).absolute(),
        host=env.text("HOST", "127.0.0.1"),
        port=env.parsed("PORT", parse_port, 8080, "Use a port between 1 and 65535."),
        server=env.parsed("CLUSTER_SERVER", parse_server, "uvicorn", "Use uvicorn or daphne."),
        database_url=env.secret("DATABASE_URL"),
        redis_url=env.secret("REDIS_URL"),
        nats_url=env.secret("LOCALAI_NATS_URL"),
        registration_token=env.secret("LOCALAI_REGISTRATION_TOKEN"),
        api_key=env.secret("LOCALAI_API_KEY"),
        auto_approve_nodes=env.boolean("LOCALAI_AUTO_APPROVE_NODES"),
        allow_shared_token_nodes=env.boolean("LOCALAI_ALLOW_SHARED_TOKEN_NODES"),
        expose_node_header=env.boolean("LOCALAI_EXPOSE_NODE_HEADER"),
        galleries=env.parsed(
            "LOCALAI_BACKEND_GALLERIES", parse_galleries, [], 'Use a JSON list: [{"name": …, "url": …}].'
        ),
        model_load_wait=env.seconds("LOCALAI_MODEL_LOAD_WAIT", 60.0, minimum=0.0),
        install_timeout=env.seconds("LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT", 900.0),
        install_wait=env.seconds("CLUSTER_INSTALL_WAIT", 86400.0),
        model_load_timeout=env.seconds("LOCALAI_NATS_MODEL_LOAD_TIMEOUT", 300.0),
        load_failure_grace=env.seconds("CLUSTER_LOAD_FAILURE_GRACE", 15.0, minimum=0.0),
        node_stale_after=env.seconds("CLUSTER_NODE_STALE_AFTER", 60.0),
        web_stale_after=env.seconds("CLUSTER_WEB_STALE_AFTER", 15.0),
        failed_tokens=env.parsed(
            "CLUSTER_FAILED_TOKENS", parse_count, 30, "Use a whole number such as 30, or 3000 behind a proxy."
        ),
        drain_deadline=env.seconds("CLUSTER_DRAIN_DEADLINE", 3600.0),
        event_retention=env.seconds("CLUSTER_EVENT_RETENTION", 30 * 86400.0, minimum=3600.0),
        operation_lease=env.seconds("CLUSTER_OPERATION_LEASE", 10.0),
        request_timeout=env.seconds("CLUSTER_REQUEST_TIMEOUT", 600.0),
    )
    return cluster, env
