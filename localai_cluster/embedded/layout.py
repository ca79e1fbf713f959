"""The layout of one `make run`: its folders, its servers, and the environment of every child process.

Nothing starts here; `run.py` does that. The operator's settings are passed on unchanged, secrets as paths of
their files. The worker gets its own environment, without the database and the admin key.
"""

import json
import os
import shutil
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import psutil
from cryptography import x509

from localai_cluster.embedded.bundled_servers import EmbeddedPostgres, EmbeddedValkey
from localai_cluster.embedded.nats import BusKeys, EmbeddedNats
from localai_cluster.embedded.resources import (
    SetupError,
    free_port,
    port_is_free,
    private_directory,
    runtime_directory,
)
from localai_cluster.embedded.secrets import Secrets, ensure_secret
from localai_cluster.embedded.server import EmbeddedServer
from localai_cluster.kit import addresses, conf, env
from localai_cluster.kit.env import split_list
from localai_cluster.kit.settings_table import Bootstrap, ClusterSettings, WorkerSettings


def ssl_context_for(certificate: Path) -> ssl.SSLContext:
    """Return a context that accepts exactly this certificate, under any name, for probes on this machine."""
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def certified_host(certificate: Path, preferred: str) -> str:
    """Return `preferred` if the certificate names it, else another name of this machine in the certificate.

    Raise SetupError if the certificate names no host of this machine.
    """
    names = _certificate_hosts(certificate)
    for host in (preferred, "localhost", *names):
        if host in names:
            return host
    raise SetupError(
        f"CLUSTER_TLS_CERT: {certificate} names no host.",
        "Use a certificate with a subject alternative name.",
    )


def public_host(certificate: Path, preferred: str) -> str:
    """Return `preferred` if the certificate names it, else a host in it that other machines may know."""
    names = _certificate_hosts(certificate)
    others = (name for name in names if not addresses.is_loopback(name))
    return preferred if preferred in names else next(others, preferred)


def is_self_signed(certificate: Path) -> bool:
    """Return True if the certificate signs itself."""
    found = _load_certificate(certificate)
    return found.issuer == found.subject


def _certificate_hosts(certificate: Path) -> list[str]:
    try:
        names = (
            _load_certificate(certificate)
            .extensions.get_extension_for_class(x509.SubjectAlternativeName)
            .value
        )
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    hosts = [*names.get_values_for_type(x509.DNSName), *addresses]
    return [host for host in hosts if not host.startswith("*")]


def _load_certificate(certificate: Path) -> x509.Certificate:
    # The settings have been checked: it can be read and holds a certificate.
    return x509.load_pem_x509_certificates(certificate.read_bytes())[0]


ROOT = Path(__file__).resolve().parents[2]
GALLERY_FOLDER = ROOT / "build" / "gallery"
MODEL_FILES_FOLDER = ROOT / "build" / "models"
EXAMPLES_FOLDER = ROOT / "examples"
WORKER_COMMAND = (sys.executable, "-m", "localai_cluster.worker")
LOCAL_WORKER_NAME = "local"
NATS_PORT = 4222
MAX_WEB_PROCESSES = 4
SERVER_URLS_FILE = "server_urls"
"""Name of the file in the secrets folder to which `make run` writes its bundled servers' URLs."""
FIRST_WORKER_PORT = 50051
"""First port of the local worker's engines; its probes use the port below it.

Further workers use blocks of higher ports.
"""


def _variables_hidden_from_workers() -> set[str]:
    """Return the variables of the server's secrets that are not a worker's too, and of the bus's URL."""
    declared = [*env.declared_settings(ClusterSettings), *env.declared_settings(Bootstrap)]
    secrets = {name for entry in declared if entry.format.secret for name in entry.names}
    workers = {name for entry in fields(WorkerSettings) for name in entry.metadata["names"]}
    names = secrets - workers | {"LOCALAI_NATS_URL"}
    return names | {f"{name}_FILE" for name in names}


@dataclass(frozen=True)
class Layout:
    """One data directory, with the settings of the operator's environment."""

    settings: ClusterSettings
    data_dir: Path
    host: str
    port: int
    environ: Mapping[str, str]
    secrets: Secrets
    sockets: Path
    certificate: Path | None = None
    """Certificate of the web process; None if it serves HTTP."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Layout":
        """Read the environment and create the directory. Raise SetupError, which names a wrong setting."""
        settings, view = conf.load(environ)
        for problem in view.problems:
            raise SetupError(f"{problem.setting}: {problem.message}.", problem.hint)
        if settings.web_tls and settings.server == "daphne":
            raise SetupError(
                "CLUSTER_TLS_CERT: daphne does not serve HTTPS here.",
                "Unset it, or use CLUSTER_SERVER=uvicorn.",
            )
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        kept = Secrets(settings.data_dir / "secrets", environ)
        layout = cls(
            settings,
            settings.data_dir,
            settings.host,
            settings.port,
            environ,
            kept,
            runtime_directory(settings.data_dir),
            Path(settings.web_tls.certificate) if settings.web_tls else None,
        )
        layout._refuse_weak_secrets()
        return layout

    def _refuse_weak_secrets(self) -> None:
        weak = self.secrets.weak() if self.open_to_others else []
        if weak:
            raise SetupError(
                f"HOST={self.host} exposes the cluster, but these secrets are weak: {', '.join(weak)}.",
                "Set long random values, or unset them to have some generated.",
            )

    @property
    def open_to_others(self) -> bool:
        """True if other machines can reach the cluster."""
        return not addresses.is_loopback(self.host)

    @property
    def base_url(self) -> str:
        """The cluster's URL on this machine, with a host that its certificate names."""
        host = (
            certified_host(self.certificate, self._local_dial_host)
            if self.certificate
            else self._local_dial_host
        )
        return f"{self._url_scheme}://{_bracket_ipv6(host)}:{self.port}"

    @property
    def probe_url(self) -> str:
        """The cluster's URL for probes; with `probe_trust` the certificate need not name its host."""
        return f"{self._url_scheme}://{_bracket_ipv6(self._local_dial_host)}:{self.port}"

    @cached_property
    def probe_trust(self) -> ssl.SSLContext | bool:
        """Value of httpx's `verify` for probes from this process."""
        return ssl_context_for(self.certificate) if self.certificate else True

    @property
    def _local_dial_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def _url_scheme(self) -> str:
        return "https" if self.certificate else "http"

    @property
    def public_url(self) -> str:
        """The cluster's URL for other machines; "" if they cannot reach the cluster.

        A setting of the operator takes precedence.
        """
        if not self.open_to_others:
            return ""
        host = reachable_address(self.host)
        if self.certificate:
            host = public_host(self.certificate, host)
        return f"{self._url_scheme}://{_bracket_ipv6(host)}:{self.port}"

    @property
    def join_command(self) -> Path:
        """The file with the shell command that adds a machine. It holds a join token.

        Each start writes the file again.
        """
        return self.secrets.directory / "join_command"

    @property
    def admin_key(self) -> str:
        """The first API key of the admin: the operator's setting may hold several."""
        return next(iter(split_list(self.secrets.value("admin_api_key"))), "")

    def given(self, name: str) -> bool:
        """Return True if the operator has set the variable `name` or `<name>_FILE`."""
        return bool(self.environ.get(name) or self.environ.get(f"{name}_FILE"))

    def servers(self) -> dict[str, EmbeddedServer]:
        """Return the bundled servers in start order, by the variable that replaces each of them."""
        wanted: dict[str, EmbeddedServer] = {}
        if not self.given("DATABASE_URL"):
            wanted["DATABASE_URL"] = EmbeddedPostgres(self.data_dir / "postgres", self.sockets)
        if not self.given("LOCALAI_NATS_URL"):
            wanted["LOCALAI_NATS_URL"] = EmbeddedNats(
                self.data_dir / "nats",
                host=self.host,
                port=self._choose_nats_port(),
                keys=self._load_bus_keys(),
            )
        if not self.given("REDIS_URL"):
            wanted["REDIS_URL"] = EmbeddedValkey(
                self.data_dir / "valkey", password=self.secrets.value("valkey"), sockets=self.sockets
            )
        return wanted

    def _load_bus_keys(self) -> BusKeys:
        seeds = [self.secrets.value(name) for name in ("nats_operator", "nats_system", "nats_account")]
        try:
            return BusKeys.of(*seeds)
        except ValueError as error:
            raise SetupError(
                f"A NATS key in {self.secrets.directory} cannot be used: {error}.",
                "Remove the files nats_* there to have new keys generated. Workers register again.",
            ) from None

    def _choose_nats_port(self) -> int:
        """Return the NATS port of the last run if it is free, else another port.

        Workers on other machines use the port of the last run.
        """
        note = self.data_dir / "nats-port"
        preferred = NATS_PORT
        with suppress(OSError, ValueError):
            preferred = int(note.read_text())
        port = free_port(self.host, preferred=preferred)
        note.write_text(f"{port}\n")
        return port

    def product_environment(self, servers: Mapping[str, EmbeddedServer]) -> dict[str, str]:
        """Return the environment of web, controller, tasks and management commands."""
        gallery = [{"name": "local", "url": "cluster:index.yaml"}]
        return {
            "CLUSTER_GALLERY_DIR": str(GALLERY_FOLDER),
            "LOCALAI_BACKEND_GALLERIES": json.dumps(gallery),
            "CLUSTER_PUBLIC_URL": self.public_url,
            # glibc gives each thread a heap of its own, which grows and is never given back.
            "MALLOC_ARENA_MAX": "2",
            "CLUSTER_WEB_PROCESSES": str(self._count_web_processes()),
            **self.environ,
            **self.secrets.environment(),
            **{name: server.url for name, server in servers.items()},
            "CLUSTER_DATA_DIR": str(self.data_dir),
            "HOST": self.host,
            "PORT": str(self.port),
            "DJANGO_SETTINGS_MODULE": "localai_cluster.settings",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def _count_web_processes(self) -> int:
        """Return the number of web processes: one for each core, at most `MAX_WEB_PROCESSES`.

        With Daphne as the web server there is one process.
        """
        is_uvicorn = self.settings.server == "uvicorn"
        return min(len(os.sched_getaffinity(0)), MAX_WEB_PROCESSES) if is_uvicorn else 1

    def forget_original(self) -> None:
        """Remove from a copied folder the original cluster's keys and URLs of servers."""
        (self.secrets.directory / SERVER_URLS_FILE).unlink(missing_ok=True)
        self.secrets.renew_bus_keys()
        shutil.rmtree(self.data_dir / "nats" / "accounts", ignore_errors=True)

    def bootstrap_environment(self, *, copied: bool = False) -> dict[str, str]:
        """Return the additional environment of `manage.py bootstrap`.

        It names the node to enrol and its secret, and the file for the command that adds machines. It also
        states whether the admin's password was generated and whether the data folder was copied.
        """
        home = private_directory(self.data_dir / "worker")
        ensure_secret(home / "node-secret")
        self.join_command.unlink(missing_ok=True)  # its token may have expired
        return {
            "CLUSTER_ADMIN_PASSWORD_GENERATED": str(not self.secrets.given("admin_password")).lower(),
            "CLUSTER_ENROL_NODE": LOCAL_WORKER_NAME,
            "CLUSTER_ENROL_SECRET_FILE": str(home / "node-secret"),
            "CLUSTER_DATA_COPIED": str(copied).lower(),
            **({"CLUSTER_JOIN_COMMAND_FILE": str(self.join_command)} if self.open_to_others else {}),
        }

    def worker_environment(self, name: str, home: Path) -> dict[str, str]:
        """Return the environment of a worker on this machine, with its folders in `home`.

        The registration provides the bus's address and the credentials for it.
        """
        private_directory(home)
        hidden = _variables_hidden_from_workers()
        own = {
            "LOCALAI_REGISTER_TO": self.base_url,
            "LOCALAI_NODE_NAME": name,
            "LOCALAI_ADDR": f"127.0.0.1:{FIRST_WORKER_PORT}",
            "LOCALAI_HTTP_ADDR": f"127.0.0.1:{FIRST_WORKER_PORT - 1}",
            "LOCALAI_WORKER_FIND_PORTS": "true",
            "LOCALAI_BACKENDS_PATH": str(home / "backends"),
            "LOCALAI_MODELS_PATH": str(home / "models"),
            "LOCALAI_WORKER_DATA_DIR": str(home),
            "LOCALAI_WORKER_SOURCE_ROOTS": self.environ.get("LOCALAI_WORKER_SOURCE_ROOTS")
            or str(GALLERY_FOLDER),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        passed = {key: value for key, value in self.environ.items() if key not in hidden}
        given_ca = self.environ.get("LOCALAI_WORKER_TLS_CA")
        if self.certificate and not given_ca and is_self_signed(self.certificate):
            own["LOCALAI_WORKER_TLS_CA"] = str(self.certificate)
        token = {}
        if not self.given("LOCALAI_REGISTRATION_TOKEN"):
            token = {"LOCALAI_REGISTRATION_TOKEN_FILE": str(self.secrets.path("registration_token"))}
        return {**passed, **token, **own}

    def seed_models(self) -> None:
        """Copy the example definitions and their files to a new models folder; keep an existing folder."""
        if self.environ.get("LOCALAI_MODELS_PATH"):
            return
        models, draft = self.data_dir / "models", self.data_dir / "models.new"
        if not models.exists() and (EXAMPLES_FOLDER / "models").is_dir():
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(EXAMPLES_FOLDER / "models", draft)
            for file in MODEL_FILES_FOLDER.glob("*.gguf"):
                link_or_copy(file, draft / file.name)
            draft.rename(models)

    def check_port(self) -> None:
        """Raise SetupError if the port is in use."""
        if not port_is_free(self.port, self.host):
            raise SetupError(
                f"Port {self.port} on {self.host} is in use.",
                f"Stop the program that uses it, or choose another port: PORT={free_port()} make run.",
            )


def link_or_copy(file: Path, place: Path) -> None:
    """Create a hard link to `file` at `place`; copy the file if the file system has no links."""
    try:
        place.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, place)


def reachable_address(host: str) -> str:
    """Return the address under which other machines reach `host`.

    If `host` means all interfaces, the address is a guess.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: this only finds the source address of a packet to another network.
        probe.connect(("192.0.2.1", 9))
        found: str = probe.getsockname()[0]
        return found
    # A network of its own, without a way out of it.
    own = (one for device in psutil.net_if_addrs().values() for one in device)
    usable = (one.address for one in own if one.family == socket.AF_INET)
    return next(
        (address for address in usable if not address.startswith(("127.", "169.254."))), socket.gethostname()
    )


def manage(*words: str) -> list[str]:
    """Return the command line of `manage.py` with these arguments."""
    return [sys.executable, str(ROOT / "manage.py"), *words]


def _bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def free_bytes(place: Path) -> int:
    """Return the bytes that this user can still write to the file system of `place`."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize
