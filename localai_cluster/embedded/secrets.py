"""The secrets that `make run` generates once and keeps in files of mode 0600.

What the operator gives in the environment (`NAME`, or `NAME_FILE` with a path) wins; then nothing is
generated for that name and our file, should there be one, is not used.
"""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from localai_cluster.embedded.places import Trouble, private_directory
from localai_cluster.env import weak_secret

GIVEN_BY = {
    "secret_key": "SECRET_KEY",
    "admin_password": "CLUSTER_ADMIN_PASSWORD",
    "admin_api_key": "LOCALAI_API_KEY",
    "registration_token": "LOCALAI_REGISTRATION_TOKEN",
}
"""Which variable of the operator's replaces which secret."""

INTERNAL = ("nats_controller", "nats_worker", "valkey")
"""Secrets between our own parts; nobody gives these."""


class Secrets:
    """The secrets of one data directory, generated where they are missing."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.directory = private_directory(directory)
        self._environ = environ
        for name in (*GIVEN_BY, *INTERNAL):
            if not self.given(name):
                ensure(self.directory / name)

    def given(self, name: str) -> bool:
        """Whether the operator has given this secret."""
        variable = GIVEN_BY.get(name, "")
        return bool(variable) and bool(self._environ.get(variable) or self._environ.get(f"{variable}_FILE"))

    def path(self, name: str) -> Path | None:
        """The file that holds it: ours or the operator's; None when it is in the environment only."""
        variable = GIVEN_BY.get(name, "")
        if variable and self._environ.get(variable):
            return None
        if variable and (file := self._environ.get(f"{variable}_FILE")):
            return Path(file)
        return self.directory / name

    def value(self, name: str) -> str:
        """The secret itself; `Trouble` when its file cannot be read or is empty."""
        path = self.path(name)
        if path is None:
            return self._environ[GIVEN_BY[name]]
        try:
            value = path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise Trouble(f"{path} cannot be read: {error.strerror}.", "Mend its owner or mode.") from error
        if not value:
            raise Trouble(f"{path} is empty.", "Remove it to have a new secret made.")
        return value

    def environment(self) -> dict[str, str]:
        """`NAME_FILE` for every secret that a child reads from a file of ours."""
        return {
            f"{variable}_FILE": str(self.directory / name)
            for name, variable in GIVEN_BY.items()
            if not self.given(name)
        }

    def weak(self) -> list[str]:
        """The variables of given secrets that are too short or well known to open the product with."""
        given = {variable: self.value(name) for name, variable in GIVEN_BY.items() if self.given(name)}
        return [variable for variable, value in given.items() if weak_secret(value)]


def ensure(path: Path) -> str:
    """The secret in `path`, made first if there is none: mode 0600, whole or not at all, one writer wins."""
    if not path.exists():
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first; its secret counts
        finally:
            draft.unlink()
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)
    return path.read_text(encoding="utf-8").strip()
