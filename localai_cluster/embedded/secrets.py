"""The secrets that `make run` generates once and keeps in files of mode 0600.

A value in the environment (`NAME`, or `NAME_FILE` with a path) takes precedence. Then nothing is generated
for that name, and an existing file of ours is ignored.
"""

import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from localai_cluster.embedded.resources import SetupError, private_directory
from localai_cluster.kit import nkeys
from localai_cluster.kit.env import is_weak_secret
from localai_cluster.kit.files import create_file

SECRET_VARIABLES = {
    "secret_key": "SECRET_KEY",
    "admin_password": "CLUSTER_ADMIN_PASSWORD",
    "admin_api_key": "LOCALAI_API_KEY",
    "registration_token": "LOCALAI_REGISTRATION_TOKEN",
    "nats_account": "LOCALAI_NATS_ACCOUNT_SEED",
    "nats_operator": "CLUSTER_NATS_OPERATOR_SEED",
    "nats_system": "CLUSTER_NATS_SYSTEM_SEED",
}
"""Environment variable that an operator can set in place of each generated secret, by the secret's name."""

INTERNAL_SECRETS = ("valkey",)
"""Names of secrets between the bundled servers and our processes. No setting replaces them."""

_NKEY_ROLES: dict[str, nkeys.Role] = {
    "nats_account": "account",
    "nats_operator": "operator",
    "nats_system": "account",
}
"""NATS roles of the secrets that are seeds of NATS keys, by name; other secrets are 256 random bits.

Keys for an operator's own NATS are never generated.
"""


class Secrets:
    """The secrets of one data directory. Missing secrets are generated."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.directory = private_directory(directory)
        self._environ = environ
        own_nats = bool(environ.get("LOCALAI_NATS_URL") or environ.get("LOCALAI_NATS_URL_FILE"))
        for name in (*SECRET_VARIABLES, *INTERNAL_SECRETS):
            if not self.given(name) and not (own_nats and name in _NKEY_ROLES):
                ensure_secret(self.directory / name, _NKEY_ROLES.get(name))

    def given(self, name: str) -> bool:
        """Return True if the operator has set this secret."""
        variable = SECRET_VARIABLES.get(name, "")
        return bool(variable) and bool(self._environ.get(variable) or self._environ.get(f"{variable}_FILE"))

    def path(self, name: str) -> Path | None:
        """Return the path of the secret's file. Return None if a variable holds the secret itself."""
        variable = SECRET_VARIABLES.get(name, "")
        if variable and self._environ.get(variable):
            return None
        if variable and (file := self._environ.get(f"{variable}_FILE")):
            return Path(file)
        return self.directory / name

    def value(self, name: str) -> str:
        """Return the secret. Raise SetupError if its file cannot be read or is empty."""
        path = self.path(name)
        if path is None:
            return self._environ[SECRET_VARIABLES[name]]
        try:
            value = path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SetupError(f"{path} cannot be read: {error.strerror}.", "Fix its owner or mode.") from error
        if not value:
            raise SetupError(f"{path} is empty.", "Remove it to have a new secret generated.")
        return value

    def environment(self) -> dict[str, str]:
        """Return a variable `NAME_FILE` for every secret that children read from our files."""
        return {
            f"{variable}_FILE": str(self.directory / name)
            for name, variable in SECRET_VARIABLES.items()
            if not self.given(name) and (self.directory / name).exists()
        }

    def renew_bus_keys(self) -> None:
        """Replace the generated keys of the bundled NATS server; keep keys that the operator has set."""
        for name, role in _NKEY_ROLES.items():
            path = self.directory / name
            if not self.given(name) and path.exists():
                path.unlink()
                ensure_secret(path, role)

    def weak(self) -> list[str]:
        """Return the variables whose secrets are too weak for a cluster that other machines can reach."""
        given = {
            variable: self.value(name)
            for name, variable in SECRET_VARIABLES.items()
            if name not in _NKEY_ROLES and self.given(name)
        }
        return [
            variable
            for variable, value in given.items()
            if any(is_weak_secret(key.strip()) for key in _split_secrets(variable, value))
        ]


def _split_secrets(variable: str, value: str) -> list[str]:
    """Split the value of a variable into its secrets. Only the variable of the API keys may hold several."""
    return value.split(",") if variable == SECRET_VARIABLES["admin_api_key"] else [value]


def ensure_secret(path: Path, role: nkeys.Role | None = None) -> str:
    """Return the secret in `path`; generate it if the file does not exist.

    The file has mode 0600. If two processes generate the secret at the same time, both return the same one.
    With a `role` the secret is the seed of a NATS key.
    """
    if not path.exists():
        secret = nkeys.generate(role).seed if role else secrets.token_hex(32)
        create_file(path, f"{secret}\n")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)
    return path.read_text(encoding="utf-8").strip()
