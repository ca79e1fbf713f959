"""The worker's settings with the worker's own types, and their command-line flags.

`kit/settings_table.py` declares the settings; `__main__.py` builds the command line from them. Every wrong
setting is reported on its own line, with its name and the fix.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, NoReturn

from localai_cluster.kit import env
from localai_cluster.kit.addresses import split_host_port
from localai_cluster.kit.env import Format, Problem
from localai_cluster.kit.errors import ClusterError
from localai_cluster.kit.settings_table import WorkerSettings, base_port
from localai_cluster.messaging.messages import Gallery, decode_galleries
from localai_cluster.messaging.servers import Credentials, Servers, parse_url
from localai_cluster.registries.access import Access, default_config
from localai_cluster.worker.gpu_drivers import Simulation, parse_simulation

MAX_PORT = 65535
_SET_BOTH_HINT = "Set both, or neither to have the control plane give them."
_GALLERIES_FORMAT = 'a JSON list such as [{"name":"local","url":"file:///srv/index.yaml"}]'
_TEST_GPUS_FORMAT = "groups such as 2x24GiB, 1x24GiB+1x48GiB or 2x24GiB:6GiB"
Bus = Annotated[Servers, Format("the URL of a NATS server, such as nats://host:4222", parse_url, secret=True)]
Galleries = Annotated[tuple[Gallery, ...], Format(_GALLERIES_FORMAT, decode_galleries)]


class Config(WorkerSettings):
    """All settings of a worker. Times are in seconds, sizes in bytes. `repr` omits secrets."""

    nats_url: Bus | None
    backend_galleries: Galleries
    galleries: Galleries
    test_gpus: Annotated[Simulation, Format(_TEST_GPUS_FORMAT, parse_simulation)] | None

    @property
    def without_effect(self) -> list[str]:
        """Variables that are set but that this worker does not use, for a warning."""
        entries = (entry for entry in SETTINGS if entry.group == "Without effect")
        return [entry.names[0] for entry in entries if getattr(self, entry.key)]

    @property
    def all_galleries(self) -> tuple[Gallery, ...]:
        """The galleries of backends, plus the galleries of models if models are prefetched."""
        return (*self.backend_galleries, *(self.galleries if self.prefetch_models else ()))

    @property
    def advertise_host(self) -> str:
        """Host of the advertised address; an IPv6 address has brackets."""
        return split_host_port(self.advertise_addr)[0]

    @property
    def base_port(self) -> int:
        """First port of the engines."""
        return base_port(vars(self))

    @property
    def max_port(self) -> int:
        """Last port of the engines."""
        return self.grpc_max_port if self.base_port <= self.grpc_max_port <= MAX_PORT else MAX_PORT

    @property
    def http_bind(self) -> tuple[str, int]:
        """Host and port of the worker's own HTTP server."""
        return split_host_port(self.http_addr)

    @cached_property
    def nats(self) -> Servers | None:
        """The configured bus; None if the control plane provides the address."""
        if self.nats_url is None or not (self.nats_jwt and self.nats_user_seed):
            return self.nats_url
        return replace(self.nats_url, credentials=Credentials.of(self.nats_jwt, self.nats_user_seed))

    @property
    def registry_access(self) -> Access:
        """The credentials and addresses of registries."""
        return Access(self.registries, self.registry_config or default_config())

    def problems(self) -> Iterator[Problem]:
        """Return the missing settings, and the problems of settings that contradict each other."""
        if not self.register_to:
            yield Problem("LOCALAI_REGISTER_TO", "is not set", f"Use {env.SERVER_URL_FORMAT_TEXT}.")
        required = self.registration_require_auth or self.distributed_require_auth
        if required and not self.registration_token:
            reason = "is not set, but authentication is required"
            yield Problem("LOCALAI_REGISTRATION_TOKEN", reason, "Use the token of the control plane.")
        if self.base_port < 2:
            reason = "port 1 leaves no room for the probes, one below it"
            yield Problem("LOCALAI_ADDR", reason, "Use host:port, such as gpu-1.example:50051.")
        if bool(self.nats_jwt) != bool(self.nats_user_seed):
            missing = "LOCALAI_NATS_USER_SEED" if self.nats_jwt else "LOCALAI_NATS_JWT"
            yield Problem(missing, "is not set", _SET_BOTH_HINT)
        elif self.nats_jwt and not self.nats_url:
            yield Problem(
                "LOCALAI_NATS_URL", "is not set, but credentials for it are", "Use nats://host:4222."
            )
        try:
            _ = self.nats
        except ValueError as error:
            yield Problem("LOCALAI_NATS_JWT", f"cannot be used: {error}", _SET_BOTH_HINT)
        yield from super().problems()


SETTINGS = env.declared_settings(Config)


def flag(entry: env.Setting) -> str:
    """Return the command-line flag of a setting."""
    return "--" + entry.key.replace("_", "-")


class InvalidSettings(ClusterError):
    """Settings are wrong. The message has a line for each, with its name and the fix."""

    code = "invalid_settings"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(_format_problem(problem) for problem in problems))


def _format_problem(problem: Problem) -> str:
    own_flag = next((f" ({flag(entry)})" for entry in SETTINGS if problem.setting in entry.names), "")
    return f"{problem.setting}{own_flag}: {problem.message}. {problem.hint}"


def build(flags: Mapping[str, str | None], environment: Mapping[str, str] = os.environ) -> Config:
    """Read the settings from `flags`, by field name, and from environment variables.

    Raise InvalidSettings.
    """
    reader = env.Environment(environment)
    config = reader.read(Config, flags)
    if reader.problems:
        raise InvalidSettings(reader.problems)
    return config


def refuse(key: str, reason: str) -> NoReturn:
    """Raise InvalidSettings for a value that failed when it was used."""
    entry = next(entry for entry in SETTINGS if entry.key == key)
    raise InvalidSettings([Problem(entry.names[0], reason, f"Use {entry.format.fix}.")])
